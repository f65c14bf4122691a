"""The networks by name: a vision encoder, an autoencoder, a language model with its tokenizer.

"small" is what comes with frostline and needs no download, and "tiny" is smaller, for two cores: encoders of
DINOv2's architecture that were trained on pictures like those of the embedded set (`pretrain.py`), language
models of SmolLM2's architecture and an autoencoder of Stable Diffusion's, with random weights of a seed.
Every other name is a short one below, a folder made by `save_pretrained`, or a name on the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline_recipes.foveated import names

SMALL = Path(__file__).parent / "small"
ENCODERS = {
    "small": str(SMALL / "encoder"),
    "tiny": str(SMALL / "encoder-tiny"),
    "dinov2-s14": "facebook/dinov2-small",
    "dinov3-s16": "facebook/dinov3-vits16-pretrain-lvd1689m",
}
VAES = {"sd-vae": "stabilityai/sd-vae-ft-mse"}
LLMS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M"}

SMALL_VAE = {
    "_class_name": "AutoencoderKL", "block_out_channels": [8, 16, 16, 16], "layers_per_block": 1,
    "norm_num_groups": 4, "latent_channels": 4, "scaling_factor": 0.18215,
}  # fmt: skip
"""Stable Diffusion's: four levels, so that a latent is an eighth as wide as its picture."""
SMALL_LLM = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
TINY_LLM = {**SMALL_LLM, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 288}
OWN_LLMS = {"small": SMALL_LLM, "tiny": TINY_LLM}
SEEDED = {
    "seeded-dinov2": {
        "model_type": "dinov2", "image_size": 256, "patch_size": 16, "hidden_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 3, "mlp_ratio": 4,
    },
    "seeded-dinov3": {
        "model_type": "dinov3_vit", "image_size": 256, "patch_size": 16, "hidden_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 384, "num_register_tokens": 4,
    },
}  # fmt: skip
"""Architectures with random weights of seed 0: for tests, and to see what trained features are worth."""
_LOOKED_AT = 500
"""Captions whose length is looked at before anything is made."""
log = logging.getLogger("frostline")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What DINO's pictures are normalised with, unless their own preprocessor tells otherwise."""


@dataclass(frozen=True)
class Vision:
    """What is known of an encoder before it is loaded. N = prefix + grid² tokens of D numbers."""

    name: str
    width: int
    patch: int
    prefix: int
    size: int
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD

    @property
    def grid(self) -> tuple[int, int]:
        side = self.size // self.patch
        return side, side

    @property
    def covers(self) -> float:
        """The share of a frame's side that patches lie on; what is left over, right and below, none sees."""
        return self.grid[0] * self.patch / self.size

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]


def find(*, encoder: str, llm: str, vae: str, size: int, latents: bool) -> Vision:
    """Names that lead nowhere show here, before clips are looked for; no weights are loaded yet.

    latents: whether the autoencoder will be used; otherwise only its name is looked at.
    """
    known = {"encoder": [*ENCODERS, *SEEDED], "llm": [*OWN_LLMS, *LLMS], "vae": ["small", *VAES]}
    names.refuse_unknown(known, {"encoder": encoder, "llm": llm, "vae": vae})
    found = vision(encoder, size)
    if llm not in OWN_LLMS:
        _refuse_other_words(llm, _empty_language_model(llm))
    if latents:
        config = SMALL_VAE if vae == "small" else names.autoencoder("vae", vae, VAES.get(vae, vae))
        _refuse_other_latents(vae, config, size)
    given = {"encoder": encoder, "llm": llm, **({"vae": vae} if latents else {})}
    names.refuse_without_weights({what: name for what, name in given.items() if name not in known[what]})
    return found


def vision(name: str, size: int) -> Vision:
    """The encoder's shape for pictures of `size` pixels, from its configuration; a wrong name shows here."""
    config = _config(name)
    kind = config.get("model_type")
    if kind not in ("dinov2", "dinov2_with_registers", "dinov3_vit"):
        raise UsageError(
            f"encoder={name!r} is a {kind!r}; foveated takes DINOv2 and DINOv3: "
            f"{', '.join([*ENCODERS, *SEEDED])}, or a folder or hub name of one."
        )
    patch = int(config["patch_size"])
    if size < patch:
        raise UsageError(f"frame_size is {size}; at least {patch}, one patch of encoder={name!r}")
    registers = int(config.get("num_register_tokens", 0) or 0)
    own = None if name in SEEDED else names.normalisation("encoder", name, ENCODERS.get(name, name))
    return Vision(name, int(config["hidden_size"]), patch, 1 + registers, size, *(own or (MEAN, STD)))


def encoder(name: str) -> Any:
    """The frozen network: pixels [B, (T,) 3, H, W] to tokens [B, (T,) N, D]."""
    return stages.vision_tower(**place(name))


def place(name: str) -> dict[str, Any]:
    """How the tower of that name is had; what is frozen depends on this, and not on what else has names."""
    if name in SEEDED:
        return {"config": SEEDED[name], "seed": 0}
    return {"name_or_folder": ENCODERS.get(name, name)}


def autoencoder(name: str) -> Any:
    """Frames to latents [.., 4, H/8, W/8]."""
    if name == "small":
        return stages.autoencoder(config=SMALL_VAE, seed=0)
    return stages.autoencoder(VAES.get(name, name))


def tokenizer_of(llm: str) -> str:
    """Where the tokenizer of a language model lies."""
    return str(SMALL / "tokenizer") if llm in OWN_LLMS else LLMS.get(llm, llm)


def _tokenizer(llm: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_of(llm), trust_remote_code=False)


def tokens(llm: str, most: int) -> fl.Stage:
    """The stage that makes a caption's tokens, at most so many, the last of which says that it ends."""
    made: Any = stages.Tokenizer(tokenizer_of(llm), max_length=most)
    if llm not in OWN_LLMS:  # the own one adds its end by itself
        end = _tokenizer(llm).eos_token_id
        made = made if end is None else Ended(made, end, most)
    return fl.Stage("tokens", made, reads="caption", writes={"tokens": fl.Field((None,), "int64")})


def look_at_captions(stage: fl.Stage, captions: Iterable[str], llm: str, most: int) -> None:
    """Refuse those that the language model cannot read, and say how many of the first ones are cut off."""
    told = iter(captions)
    few = [stage.fn(text) for text in islice(told, _LOOKED_AT)]
    if llm not in OWN_LLMS:
        _refuse_unread(stage, few, told, llm)
    long = sum(len(ids) >= most for ids in few)
    if long:
        own = " (it knows the words of the embedded set, and reads others letter by letter)"
        log.warning(
            "foveated: %s of the first %s captions fill max_tokens=%d tokens of llm=%s%s: what goes beyond "
            "is cut off, and never told. Raise max_tokens to keep more.",
            f"{long:,}", f"{len(few):,}", most, llm, own if llm in OWN_LLMS else "",
        )  # fmt: skip


def _refuse_unread(stage: fl.Stage, few: Sequence[Tensor], rest: Iterable[str], llm: str) -> None:
    """Tokens without an embedding, which a tokenizer may have that words were added to; never used, fine."""
    known = _empty_language_model(llm).get_input_embeddings().num_embeddings
    highest = max(_tokenizer(llm).get_vocab().values())
    if highest < known:
        return
    used = max((int(ids.max()) for ids in chain(few, map(stage.fn, rest)) if len(ids)), default=0)
    if used >= known:
        raise UsageError(
            f"llm={llm!r} has embeddings of {known:,} tokens, and its tokenizer reads captions with token "
            f"{used:,}. The two are not of one model, or words were added to the tokenizer alone: call "
            f"resize_token_embeddings({highest + 1}) on the model and save it, or save the tokenizer it had."
        )


@dataclass(frozen=True)
class Ended:
    """A tokenizer's ids, with the token that ends a text where it adds none, as GPT-2's and SmolLM2's.

    Without it a language model never learns where a caption ends, and goes on for ever.
    """

    tokenizer: stages.Tokenizer
    end: int
    most: int
    """Ids, the end included."""

    def __call__(self, text: str) -> Tensor:
        ids = self.tokenizer(text)
        if len(ids) and int(ids[-1]) == self.end:
            return ids
        return torch.cat([ids[: self.most - 1], ids.new_tensor([self.end])])


def language_model(name: str, *, seed: int = 0) -> Any:
    """A causal language model of transformers; "small" and "tiny" have random weights of `seed`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if name in OWN_LLMS:
        words = AutoTokenizer.from_pretrained(tokenizer_of(name))
        config = LlamaConfig(
            **OWN_LLMS[name], vocab_size=len(words), bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config)
    try:
        found = AutoModelForCausalLM.from_pretrained(
            LLMS.get(name, name), trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError) as e:
        raise names.not_found("llm", name, LLMS.get(name, name), e) from e
    _refuse_other_words(name, found)
    return found


def _empty_language_model(name: str) -> Any:
    """As its configuration says, without weights: what it is built of is known before anything is loaded."""
    place = LLMS.get(name, name)
    config = names.configuration("llm", name, place)
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as e:  # it tells no words
        raise names.not_found("llm", name, place, e) from e


_ATTENDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers whose keys and values a cache holds."""


def _refuse_other_words(name: str, found: Any) -> None:
    if not (hasattr(found, "lm_head") and hasattr(getattr(found, "model", None), "embed_tokens")):
        raise UsageError(
            f"llm={name!r} is a {type(found).__name__}; foveated takes language models that are built like "
            "Llama, with .model.embed_tokens and .lm_head: SmolLM2, Llama, Qwen, Mistral."
        )
    told = found.config.to_dict()
    problems = [
        f"{option} is {told[option]}: its words come from scaled or capped numbers, not from .lm_head alone"
        for option in ("logits_scaling", "logit_scale", "final_logit_softcapping")
        if told.get(option) not in (None, 1)
    ]
    kinds = {*(told.get("layer_types") or ())} - _ATTENDS
    kinds |= {"mamba"} if any(option.startswith("mamba_") for option in told) else set()
    if kinds:
        problems.append(f"some of its layers are no attention ({', '.join(sorted(kinds))})")
    if problems:
        raise UsageError(f"llm={name!r} cannot be used by foveated:", problems=problems)


def preprocess(size: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Frames uint8 to what an encoder takes."""
    made: nn.Module = stages.Preprocess(size, mean=mean, std=std)
    return made


def _refuse_other_latents(name: str, config: Mapping[str, Any], size: int) -> None:
    kind, channels = config.get("_class_name"), config.get("latent_channels", 4)
    if kind not in ("AutoencoderKL", "AutoencoderTiny") or channels != 4:
        raise UsageError(
            f"vae={name!r} is a {kind!r} with {channels} latent channels; foveated takes an AutoencoderKL or "
            f"AutoencoderTiny with 4, as Stable Diffusion's: small, {', '.join(VAES)}, or a folder or hub "
            "name of one."
        )
    blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    default = {"AutoencoderKL": 1, "AutoencoderTiny": 4}[kind]  # what diffusers takes where none are named
    factor = 2 ** (len(blocks or [0] * default) - 1)
    if size % factor:
        raise UsageError(
            f"frame_size is {size}, which {factor} does not divide: a latent of vae={name!r} stands for "
            f"{factor} x {factor} pixels. Take {size - size % factor or factor} or "
            f"{size - size % factor + factor}; objective=caption needs no latents."
        )


def _config(name: str) -> Mapping[str, Any]:
    if name in SEEDED:
        return SEEDED[name]
    found: dict[str, Any] = names.configuration("encoder", name, ENCODERS.get(name, name)).to_dict()
    return found
