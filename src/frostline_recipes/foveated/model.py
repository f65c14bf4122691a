"""The foveated video-language model: each frame becomes one token, and the model's query says where to look.

A coarse pass looks at every frame with one learned query; the language model's states at the frames then ask
for the next frames, and a fine pass looks again with these queries. Shapes: B clips, T frames, Q query width,
E width of the language model, L places of a caption, V words, C channels of the latents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import frostline as fl
from frostline.errors import UsageError
from frostline_recipes.foveated.head import Head
from frostline_recipes.foveated.passes import Pass as Pass
from frostline_recipes.foveated.passes import Passes as Passes
from frostline_recipes.foveated.passes import Targets, caption_loss, of, padded, reconstruct_loss
from frostline_recipes.foveated.passes import losses as losses

Objective = Literal["caption", "reconstruct", "joint"]
Mode = Literal["train", "evaluate", "look", "coarse", "autoregressive", "text"]
Control = Literal["random", "coarse", "shuffled"]
_NOTHING = Targets()
_CROSSED = 4
"""Clips whose frames are also looked at with another frame's query, for a figure."""


class Foveated(nn.Module):
    """A gaze and a causal language model of transformers, trained together.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from frostline_recipes.foveated.gaze import Shallow
    >>> small = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                     num_attention_heads=2, num_key_value_heads=1)
    >>> model = Foveated(Shallow(8, heads=2, grid=(2, 2), prefix=1), LlamaForCausalLM(small))
    >>> batch = {"features": torch.randn(2, 3, 5, 8),
    ...          "tokens": fl.Ragged(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]))}
    >>> passes = model(batch)
    >>> len(passes), passes[-1].attention.shape
    (3, torch.Size([2, 3, 2, 5]))
    >>> sorted(losses(passes, lambda_coarse=1.0))
    ['loss', 'loss_coarse', 'loss_fine']
    """

    gaze: Any
    llm: Any

    def __init__(
        self,
        gaze: nn.Module,
        llm: Any,
        *,
        fine_iterations: int = 2,
        objective: Objective = "caption",
        latent_channels: int = 4,
        caption_length: int | None = None,
        token_std: float = 0.14,
    ) -> None:
        """
        llm: a LlamaForCausalLM or alike, with `.model`, `.lm_head` and `.get_input_embeddings()`.
        caption_length: places that captions are padded to, so that shapes stay the same and nothing waits for
        the device; longer ones are cut off. None: to the longest of a batch, a look at the device's offsets.
        token_std: of the visual tokens; 0.14 works with SmolLM2-135M. A language
        model whose embeddings have another size may want another.
        """
        super().__init__()
        _refuse_bad(fine_iterations, objective, caption_length)
        self.gaze, self.llm, self._forgetful = gaze, llm, _forgetful()
        self.fine_iterations, self.objective = fine_iterations, objective
        self.caption_length, self.token_std = caption_length, token_std
        width, asked = llm.get_input_embeddings().weight.shape[1], self.gaze.query_width
        self.static = nn.Parameter(torch.randn(asked))  # std 1.0: smaller ones look everywhere alike
        self.first = nn.Parameter(torch.randn(asked))
        self.ask = nn.Linear(width, asked, bias=False)  # a bias would ask the same of every frame
        nn.init.normal_(self.ask.weight, std=width**-0.5)
        self.token = nn.Linear(self.gaze.width, width)
        self.head = Head(latent_channels, width) if objective != "caption" else None

    def forward(
        self,
        batch: Mapping[str, Any],
        *,
        mode: Mode = "train",
        queries: Control | Tensor | None = None,
        seed: int = 0,
        seen: Any = None,
    ) -> Passes:
        """All passes over a batch.

        mode: "train", coarse and fine passes, losses of the first and the last; "evaluate", losses of all;
        "look", no losses, for clips without captions; "coarse", that pass alone; "autoregressive",
        frame by frame, one pass; "text", captions with nothing seen.
        queries: a control for the last fine pass. "random": normal ones as large as those asked for, drawn by
        `seed` and the clip's key; "coarse": the static query; "shuffled": those of the batch's next clip; or
        the queries themselves, [B, T, Q].
        seen: what `gaze.prepare(batch)` gave, where it is at hand.
        """
        _refuse_unknown(mode, queries, fine=self.fine_iterations > 0)
        targets = _NOTHING if mode == "look" else self._targets(batch)
        if mode == "text":
            return Passes([self._blind(batch, targets)])
        seen = self.gaze.prepare(batch) if seen is None else seen
        if mode == "autoregressive":
            return Passes([self._watched(seen, targets, _cache())])
        passes = [self._pass(self.static.expand(*seen.size, -1), seen, targets)]
        for k in range(0 if mode == "coarse" else self.fine_iterations):
            asked, last = self.asked(passes[-1].hidden), k == self.fine_iterations - 1
            if last and queries is not None:
                asked = self._instead(queries, asked, batch, seed)
            passes.append(self._pass(asked, seen, targets if last or mode == "evaluate" else _NOTHING))
        if seen.size[1] > 1:
            passes[-1] = replace(passes[-1], crossed=self._crossed(passes[-1].queries, seen))
        return Passes(passes)

    @torch.no_grad()
    def _crossed(self, queries: Tensor, seen: Any) -> Tensor:
        """What the query of the frame before would have extracted from each frame; of a few clips."""
        few = min(_CROSSED, queries.shape[0])
        extracted: Tensor = self.gaze(queries[:few].roll(1, 1), seen.clips(few))[0]
        return extracted

    def asked(self, hidden: Tensor) -> Tensor:
        """Queries [B, T, Q] of all frames from states [B, T, E]: that of frame t from the state at t − 1."""
        first = self.first.expand(hidden.shape[0], 1, -1)
        return torch.cat([first, self._ask(hidden[:, :-1])], 1)

    def visual(self, extracted: Tensor) -> Tensor:
        """Tokens [B, T, E] for the language model, of the same size whatever was extracted."""
        tokens = self.token(extracted)
        return F.layer_norm(tokens, tokens.shape[-1:]) * self.token_std

    def autoregressive(self, batch: Mapping[str, Any]) -> Pass:
        """Frame by frame, as they come in, each with the query of its own past.

        What the parallel form would come to after T fine passes: its k-th has frames 0 … k − 1 right. Equal
        in fp32 to 1e-4 where attention is soft: products of other shapes round differently, and a frame's
        difference goes into the next one's query, the more the sharper it looks.
        """
        watched: Pass = self(batch, mode="autoregressive")[0]
        return watched

    @torch.no_grad()
    def caption(
        self,
        batch: Mapping[str, Any],
        max_tokens: int = 32,
        *,
        mode: Literal["autoregressive", "fine", "coarse"] | None = None,
        end: int | None = None,
    ) -> list[list[int]]:
        """The likeliest words for each clip, one after the other; `end` (None: the model's own) is left out.

        The batch needs no captions. "fine" looks as training does, "coarse" with the static query alone.
        Default: "autoregressive", or "coarse" where no query was trained to be asked.
        """
        mode = mode or ("autoregressive" if self.fine_iterations else "coarse")
        seen, cache = self.gaze.prepare(batch), _cache()
        if mode == "autoregressive":
            hidden = self._watched(seen, _NOTHING, cache).hidden
        else:
            look = self._pass(self.static.expand(*seen.size, -1), seen, _NOTHING)
            for _ in range(self.fine_iterations if mode == "fine" else 0):
                look = self._pass(self.asked(look.hidden), seen, _NOTHING)
            hidden = self._run(self.visual(look.extracted), cache)
        ends = self.llm.config.eos_token_id if end is None else end
        return self._continued(
            hidden, cache, max_tokens, [*ends] if isinstance(ends, list | tuple) else [ends]
        )

    def _ask(self, hidden: Tensor) -> Tensor:
        """Of states of size 1, so that queries start with std 1.0 whatever the language model's last gain."""
        asked: Tensor = self.ask(F.rms_norm(hidden, hidden.shape[-1:]))
        return asked

    def _pass(self, queries: Tensor, seen: Any, targets: Targets) -> Pass:
        extracted, attention = self.gaze(queries, seen)
        return self._judged(
            queries, extracted, attention, *self._told(self.visual(extracted), targets), targets
        )

    def _blind(self, batch: Mapping[str, Any], targets: Targets) -> Pass:
        """Nothing is seen: what remains is what captions have in common."""
        size = of(batch, "features" if "features" in batch else "frames").shape[:2]
        nothing = self.static.new_zeros(*size, 1)
        queries, extracted = (
            nothing.expand(-1, -1, self.gaze.query_width),
            nothing.expand(-1, -1, self.gaze.width),
        )
        attention = nothing[..., None].expand(-1, -1, self.gaze.heads, self.gaze.tokens)
        visual = nothing.expand(-1, -1, self.ask.in_features)
        return self._judged(queries, extracted, attention, *self._told(visual, targets), targets)

    def _told(self, visual: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """States at the frames and at the caption that follows them, but for its last token: one run.

        Captions are padded at their end, and a causal model never looks ahead: neither mask nor positions of
        our own are needed.
        """
        words = targets.tokens
        inputs = visual if words is None else torch.cat([visual, self._embedded(words[:, :-1])], 1)
        states = self._run(inputs)
        return states[:, : visual.shape[1]], states[:, visual.shape[1] :]

    def _watched(self, seen: Any, targets: Targets, cache: Any) -> Pass:
        """Frame by frame, and then the caption; the cache holds what came before."""
        query, looks, states = self.first.expand(seen.size[0], 1, -1), [], []
        for t in range(seen.size[1]):
            looks.append((query, *self.gaze(query, seen.at(t))))
            states.append(self._run(self.visual(looks[-1][1]), cache))
            query = self._ask(states[-1])
        hidden = torch.cat(states, 1)
        after = hidden[:, :0]
        if targets.tokens is not None and targets.tokens.shape[1] > 1:
            after = self._run(self._embedded(targets.tokens[:, :-1]), cache)
        queries, extracted, attention = (torch.cat(part, 1) for part in zip(*looks, strict=True))
        return self._judged(queries, extracted, attention, hidden, after, targets)

    def _continued(
        self, hidden: Tensor, cache: Any, max_tokens: int, ends: list[int | None]
    ) -> list[list[int]]:
        """ends: any of these tokens ends a caption; None does not."""
        state, words = hidden[:, -1:], []
        ended = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        for _ in range(max_tokens):
            words.append(self.llm.lm_head(state)[:, -1].argmax(-1))
            for end in ends:
                ended |= words[-1] == end if end is not None else ended
            if bool(ended.all()):
                break
            state = self._run(self._embedded(words[-1][:, None]), cache)
        rows = torch.stack(words, 1).tolist() if words else [[] for _ in range(len(ended))]
        return [[*takewhile(lambda word: word not in ends, row)] for row in rows]

    def _run(self, inputs: Tensor, cache: Any = None) -> Tensor:
        """The language model without its words: states [B, n, E]."""
        inputs = inputs.to(self.llm.get_input_embeddings().weight.dtype)
        past = self._forgetful() if cache is None else cache
        told = self.llm.model(inputs_embeds=inputs, past_key_values=past, use_cache=cache is not None)
        states: Tensor = told.last_hidden_state
        return states

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.llm.get_input_embeddings()(tokens)
        return embedded

    def _judged(
        self,
        queries: Tensor,
        extracted: Tensor,
        attention: Tensor,
        hidden: Tensor,
        after: Tensor,
        targets: Targets,
    ) -> Pass:
        caption = reconstruct = None
        if targets.tokens is not None and targets.there is not None:
            states = torch.cat([hidden[:, -1:], after], 1)  # the last frame's state tells the first word
            caption = caption_loss(self.llm.lm_head(states), targets.tokens, targets.there)
        if targets.latents is not None and self.head is not None:
            reconstruct = reconstruct_loss(self.head, targets.latents, hidden)
        return Pass(queries, extracted, attention, hidden, caption, reconstruct)

    def _instead(
        self, control: Control | Tensor, asked: Tensor, batch: Mapping[str, Any], seed: int
    ) -> Tensor:
        if isinstance(control, Tensor):
            return control
        if control == "coarse":
            return self.static.expand_as(asked)
        if control == "shuffled":
            if asked.shape[0] < 2:
                raise UsageError("queries='shuffled' takes those of another clip: a batch of one has none.")
            return asked.roll(-1, 0)
        keys = batch.keys_of_rows if isinstance(batch, fl.Batch) else [str(i) for i in range(asked.shape[0])]
        drawn = torch.stack([_normal(f"{seed}/{key}", asked.shape[1:]) for key in keys]).to(asked.device)
        return drawn * asked.square().mean(-1, keepdim=True).sqrt()

    def _targets(self, batch: Mapping[str, Any]) -> Targets:
        tokens = there = latents = None
        if self.objective != "reconstruct":
            tokens, there = padded(of(batch, "tokens"), self.caption_length)
        if self.objective != "caption":
            latents = of(batch, "latents")
        return Targets(tokens, there, latents)


def _normal(key: str, shape: torch.Size) -> Tensor:
    """Standard normal numbers that are a function of a key, whatever batch its clip is in."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


@lru_cache(maxsize=1)
def _forgetful() -> Any:
    """A kind of cache that keeps nothing, for training.

    Without a cache, transformers looks on the device whether sequences were packed (`masking_utils`, 5.22),
    once a pass: the host waits for all that was launched. With one it does not, and this costs no copy.
    """
    from transformers import DynamicCache

    class Forgetful(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    return Forgetful


def _refuse_unknown(mode: str, queries: str | Tensor | None, *, fine: bool) -> None:
    problems = []
    if mode not in get_args(Mode):
        problems.append(f"mode is {mode!r}; one of {', '.join(get_args(Mode))}")
    named = f"{list(queries.shape)}" if isinstance(queries, Tensor) else repr(queries)
    if isinstance(queries, str) and queries not in get_args(Control):
        problems.append(f"queries is {named}; None, {', '.join(get_args(Control))}, or a tensor of them")
    if queries is not None and (not fine or mode not in ("train", "evaluate", "look")):
        none = f"mode={mode!r}" if fine else "fine_iterations=0"
        problems.append(f"queries={named} replaces those of the last fine pass; {none} has none")
    if problems:
        raise UsageError("Foveated cannot run this:", problems=problems)


def _refuse_bad(fine_iterations: int, objective: str, caption_length: int | None) -> None:
    problems = []
    if fine_iterations < 0:
        problems.append(f"fine_iterations is {fine_iterations}; at least 0 (0: the coarse pass alone)")
    if objective not in get_args(Objective):
        problems.append(f"objective is {objective!r}; one of {', '.join(get_args(Objective))}")
    if caption_length is not None and caption_length < 1:
        problems.append(f"caption_length is {caption_length}; at least 1, or None")
    if problems:
        raise UsageError("Foveated(...) cannot work:", problems=problems)
