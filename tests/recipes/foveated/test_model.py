"""The foveated model: what passes see, what queries depend on, losses, controls, and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline.step import Step
from frostline.training import Training
from frostline_recipes.foveated.encoder import Encoder
from frostline_recipes.foveated.gaze import Deep, Shallow
from frostline_recipes.foveated.model import Foveated, losses
from frostline_recipes.foveated.passes import padded

transformers = pytest.importorskip("transformers")

CLIPS, FRAMES, TOKENS, WIDTH, WORDS = 3, 5, 10, 24, 29
LENGTHS = (4, 1, 6)


def llm(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def model(**options: Any) -> Foveated:
    words = llm()
    gaze = Shallow(WIDTH, query_width=20, heads=3, grid=(3, 3), prefix=1)
    return Foveated(gaze, words, **options).eval()


def deep(trainable: bool = False, **options: Any) -> Foveated:
    config = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config |= {"model_type": "dinov3_vit", "image_size": 32, "patch_size": 8, "initializer_range": 0.3}
    tower = stages.vision_tower(config=config, seed=0)
    prefix = 1 + tower.network.config.num_register_tokens
    encoder = Encoder(tower, stages.Preprocess(None, (0.5,) * 3, (0.25,) * 3), trainable=trainable)
    return Foveated(Deep(encoder, grid=(4, 4), prefix=prefix), llm(), **options).eval()


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> fl.Batch:
    draw = torch.Generator().manual_seed(seed)
    n = len(lengths)
    ids = torch.randint(3, WORDS, (sum(lengths),), generator=draw)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    fields = {
        "features": torch.randn(n, FRAMES, TOKENS, WIDTH, generator=draw),
        "frames": torch.randint(0, 256, (n, FRAMES, 3, 32, 32), generator=draw, dtype=torch.uint8),
        "latents": torch.randn(n, FRAMES, 4, 8, 8, generator=draw),
        "tokens": fl.Ragged(ids, offsets),
    }
    return fl.Batch(fields, [f"clip{i}" for i in range(n)])


def other_frame(given: fl.Batch, t: int) -> fl.Batch:
    """The same clips, but for frame t."""
    changed = fl.Batch(
        {**given, "features": given["features"].clone(), "frames": given["frames"].clone()}, None
    )
    changed["features"][:, t] = changed["features"][:, t].flip(1)
    changed["frames"][:, t] = 255 - changed["frames"][:, t]
    return changed


def calls(module: Any) -> list[Any]:
    """The first arguments that a module is called with from now on."""
    seen: list[Any] = []

    def note(_: Any, args: Any, options: Any) -> None:
        seen.append(args[0] if args else options)

    module.register_forward_pre_hook(note, with_kwargs=True)
    return seen


# --- what is seen, and what is asked --------------------------------------------------------------------


def test_passes_and_shapes() -> None:
    passes = model(fine_iterations=2)(batch())
    assert len(passes) == 3
    for one in passes:
        assert one.queries.shape == (CLIPS, FRAMES, 20)
        assert one.extracted.shape == (CLIPS, FRAMES, WIDTH)
        assert one.attention.shape == (CLIPS, FRAMES, 3, TOKENS)
        assert one.hidden.shape == (CLIPS, FRAMES, 32)


def test_all_passes_see_the_same_patches_and_prepare_them_once() -> None:
    network, prepared = model(), []
    keep: Callable[..., Any] = network.gaze.prepare
    network.gaze.prepare = lambda given: prepared.append(keep(given)) or prepared[-1]
    shown: list[Any] = []
    network.gaze.register_forward_pre_hook(lambda _, args: shown.append(args[1]))
    network(batch())
    assert len(prepared) == 1
    assert len(shown) == 4  # once more, with another frame's query, for a figure
    assert all(seen is prepared[0] for seen in shown[:3])
    assert shown[3].features.data_ptr() == prepared[0].features.data_ptr()
    before = prepared[0].features.clone()
    network.gaze(torch.randn(CLIPS, FRAMES, 20), prepared[0])
    assert torch.equal(prepared[0].features, before)


def test_the_coarse_pass_asks_the_same_of_every_frame() -> None:
    network = model()
    assert torch.equal(network(batch())[0].queries, network.static.expand(CLIPS, FRAMES, 20))


@pytest.mark.parametrize("make", [model, deep])
@pytest.mark.parametrize("t", [0, 2, FRAMES - 1])
def test_a_query_depends_only_on_the_frames_before_its_own(make: Callable[[], Foveated], t: int) -> None:
    network = make()
    with torch.no_grad():
        here, there = network(batch()), network(other_frame(batch(), t))
    for one, other in zip(list(here)[1:], list(there)[1:], strict=True):
        assert torch.equal(one.queries[:, : t + 1], other.queries[:, : t + 1])
        if t + 1 < FRAMES:
            later = (one.queries[:, t + 1 :] - other.queries[:, t + 1 :]).abs().amax(-1)
            assert later.min() > 1e-4


def test_the_first_query_is_the_same_for_all_clips() -> None:
    network = model()
    for one in list(network(batch()))[1:]:
        assert torch.equal(one.queries[:, 0], network.first.expand(CLIPS, 20))


def test_queries_start_with_a_standard_deviation_of_one_and_without_a_bias() -> None:
    torch.manual_seed(0)
    words = llm()
    torch.nn.init.constant_(words.model.norm.weight, 7.0)  # whatever the language model's last gain is
    network = Foveated(Shallow(96, query_width=512, heads=3, grid=(3, 3), prefix=1), words)
    assert network.ask.bias is None
    given = {**batch(), "features": torch.randn(CLIPS, FRAMES, TOKENS, 96)}
    for one in network(given):
        assert one.queries.std().item() == pytest.approx(1.0, abs=0.15)


def test_visual_tokens_have_one_size_whatever_was_extracted() -> None:
    network = model()
    for scale in (0.01, 1.0, 300.0):
        tokens = network.visual(torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0)) * scale)
        assert torch.allclose(tokens.std(-1, unbiased=False), torch.tensor(0.14), rtol=0.06)


# --- how often networks run -----------------------------------------------------------------------------


def test_one_run_of_the_language_model_a_pass_and_of_the_encoder_a_batch() -> None:
    network = deep()
    words, pictures = calls(network.llm.model), calls(network.gaze.encoder.network)
    network(batch())
    assert len(words) == 3
    assert len(pictures) == 1
    assert pictures[0]["pixel_values"].shape[0] == CLIPS * FRAMES


def test_words_are_made_at_the_places_of_captions_only() -> None:
    network = model()
    states = calls(network.llm.lm_head)
    network(batch())
    assert [tuple(s.shape) for s in states] == [(CLIPS, max(LENGTHS), 32)] * 2  # coarse and last fine


class Looks(TorchDispatchMode):
    """Notes operations whose result the host has to wait for: values, or shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"):
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "looks"), [(6, []), (None, ["_local_scalar_dense"])])
def test_training_never_looks_at_a_value_when_captions_have_a_length(
    length: int | None, looks: list[str]
) -> None:
    network = model(objective="joint", caption_length=length).train()
    with Looks() as mode:
        losses(network(batch()), 0.5)["loss"].backward()
    assert mode.noted == looks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["shallow", "deep"])
def test_no_training_step_waits_for_the_device(kind: str, nothing_waits: Any) -> None:
    network = (model(caption_length=6) if kind == "shallow" else deep(caption_length=6)).cuda().train()
    rows = batch().to("cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    training = Training(precision="bf16", clip=1.0)
    step = Step(network, lambda m, b: losses(m(b), 0.5), optimizer, training=training, device="cuda")
    step(rows)
    with nothing_waits():
        for _ in range(2):
            step(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [model, deep])
def test_losses_on_the_device_are_those_of_the_processor(make: Callable[[], Foveated]) -> None:
    network = make()
    here = [p.loss_caption.item() for p in network(batch(), mode="evaluate")]
    there = [p.loss_caption.item() for p in network.cuda()(batch().to("cuda"), mode="evaluate")]
    assert there == pytest.approx(here, rel=1e-4)  # sums in another order


# --- gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["caption", "reconstruct", "joint"])
def test_gradient_reaches_every_part(objective: Any) -> None:
    network = model(objective=objective)
    if network.head is not None:  # it starts by predicting no change, and passes nothing on
        torch.nn.init.normal_(network.head.out.weight, std=0.1)
    losses(network(batch()), 1.0)["loss"].backward()
    for name, parameter in network.named_parameters():
        if objective == "reconstruct" and "embed_tokens" in name:
            continue  # no words in it
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_fine_loss_alone_reaches_the_static_query() -> None:
    """Through the states of the coarse pass and the queries that they ask."""
    network = model()
    losses(network(batch()), 0.0)["loss_fine"].backward()
    for part in (network.static, network.first, network.ask.weight, network.token.weight):
        assert part.grad is not None
        assert part.grad.abs().sum() > 0


@pytest.mark.parametrize("trainable", [True, False])
def test_a_deep_model_trains_its_encoder_only_when_told_to(trainable: bool) -> None:
    network = deep(trainable=trainable)
    losses(network(batch()), 1.0)["loss"].backward()
    weights = network.gaze.encoder.network.embeddings.patch_embeddings.weight
    assert (weights.grad is not None) == trainable
    assert network.static.grad is not None
    assert network.static.grad.abs().sum() > 0


# --- losses ---------------------------------------------------------------------------------------------


def by_hand(network: Foveated, visual: Tensor, words: Tensor) -> Tensor:
    """One clip, with transformers' own loss: cross-entropy of the words after the frames."""
    inputs = torch.cat([visual, network.llm.get_input_embeddings()(words)])[None]
    logits = network.llm(inputs_embeds=inputs).logits[0]
    return F.cross_entropy(logits[len(visual) - 1 : -1], words)


def test_the_caption_loss_is_the_cross_entropy_of_each_clip_alone() -> None:
    network, given = model(), batch()
    for one in network(given, mode="evaluate"):
        visual = network.visual(one.extracted)
        want = torch.stack([by_hand(network, v, w) for v, w in zip(visual, given["tokens"], strict=True)])
        assert one.caption_B is not None
        assert torch.allclose(one.caption_B, want, atol=1e-5)
        assert torch.allclose(one.loss, want.mean(), atol=1e-5)


def test_padding_changes_no_loss() -> None:
    network = model()
    short = network(batch())[-1].loss_B
    network.caption_length = 11
    assert torch.allclose(network(batch())[-1].loss_B, short, atol=1e-5)


def test_a_batch_in_parts_gives_the_losses_of_the_whole() -> None:
    network, given = model(objective="joint"), batch()
    whole = network(given)[-1].loss_B
    parts = [network(given.part(i, i + 1))[-1].loss_B for i in range(CLIPS)]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)


def test_the_reconstruction_loss_is_the_squared_error_of_the_next_latents() -> None:
    network, given = model(objective="reconstruct"), batch()
    assert network.head is not None
    torch.nn.init.normal_(network.head.out.weight, std=0.1)
    one, latents = network(given)[-1], given["latents"]
    errors = [
        (network.head(latents[:, t], one.hidden[:, t]) - latents[:, t + 1]).square().mean((1, 2, 3))
        for t in range(FRAMES - 1)
    ]
    assert one.caption_B is None
    assert one.reconstruct_B is not None
    assert torch.allclose(one.reconstruct_B, torch.stack(errors).mean(0), atol=1e-5)


def test_joint_is_the_sum_and_losses_weigh_the_coarse_pass() -> None:
    passes = model(objective="joint")(batch())
    last = passes[-1]
    assert last.loss_caption is not None
    assert last.loss_reconstruct is not None
    assert torch.allclose(last.loss, last.loss_caption + last.loss_reconstruct)
    found = losses(passes, 0.25)
    assert torch.allclose(found["loss"], found["loss_total_fine"] + 0.25 * found["loss_total_coarse"])
    assert torch.equal(found["loss_total_fine"], last.loss)
    assert torch.equal(found["loss_fine"], last.loss_caption), "what is compared with the controls"


def test_the_coarse_mode_is_the_first_pass_alone() -> None:
    network = model()
    alone = network(batch(), mode="coarse")
    assert len(alone) == 1
    assert torch.equal(alone[0].loss, network(batch())[0].loss)
    assert set(losses(alone)) == {"loss", "loss_coarse"}


def test_only_evaluation_makes_the_losses_of_passes_between() -> None:
    network = model(fine_iterations=3)
    with pytest.raises(UsageError, match="mode='evaluate'"):
        _ = network(batch())[1].loss
    assert [one.loss.dim() for one in network(batch(), mode="evaluate")] == [0] * 4


def test_looking_needs_no_captions_and_sees_the_same() -> None:
    network, given = model(), batch()
    looked = network({"features": given["features"]}, mode="look")
    for one, other in zip(looked, network(given), strict=True):
        assert torch.allclose(one.attention, other.attention, atol=1e-6)
    with pytest.raises(UsageError, match="without its losses"):
        _ = looked[-1].loss


def test_bf16_losses_are_fp32_and_near() -> None:
    network = model(objective="joint")
    want = network(batch())
    with torch.autocast("cpu", torch.bfloat16):
        got = network(batch())
    assert got[-1].attention.dtype == got[-1].loss_B.dtype == torch.float32
    assert torch.allclose(got[-1].loss_B, want[-1].loss_B, rtol=0.05)


# --- frame by frame -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, deep])
def test_frame_by_frame_equals_the_parallel_form_after_as_many_passes(make: Callable[[], Foveated]) -> None:
    """To 1e-4 in fp32: the same sums, but products of one place round otherwise than those of many."""
    network = make()
    network.fine_iterations = FRAMES
    with torch.no_grad():
        parallel, watched = network(batch())[-1], network.autoregressive(batch())
    for name in ("queries", "extracted", "attention", "hidden", "loss_B"):
        assert torch.allclose(getattr(parallel, name), getattr(watched, name), atol=1e-4), name


def test_fewer_passes_have_only_the_first_frames_right() -> None:
    """Or the test above would hold for any number of passes."""
    network = model(fine_iterations=2)
    with torch.no_grad():
        parallel, watched = network(batch())[-1], network.autoregressive(batch())
    assert torch.allclose(parallel.hidden[:, :2], watched.hidden[:, :2], atol=1e-4)
    assert (parallel.hidden[:, 3:] - watched.hidden[:, 3:]).abs().amax() > 1e-3


def test_the_cache_equals_running_the_whole_past_again() -> None:
    network, given = model(), batch()
    with torch.no_grad():
        watched = network.autoregressive(given)
        seen, query, tokens = network.gaze.prepare(given), network.first.expand(CLIPS, 1, -1), []
        for t in range(FRAMES):
            tokens.append(network.visual(network.gaze(query, seen.at(t))[0]))
            states = network.llm.model(inputs_embeds=torch.cat(tokens, 1)).last_hidden_state
            assert torch.allclose(states[:, -1], watched.hidden[:, t], atol=1e-4)
            query = network._ask(states[:, -1:])


@pytest.mark.parametrize("mode", ["autoregressive", "fine", "coarse"])
def test_greedy_words_are_the_likeliest_after_all_before_them(mode: Any) -> None:
    network, given = model(), batch()
    told = network.caption({"features": given["features"]}, 6, mode=mode, end=-1)
    with torch.no_grad():
        by = {"autoregressive": "autoregressive", "fine": "train", "coarse": "coarse"}[mode]
        visual = network.visual(network(given, mode=by)[-1].extracted)
        for i in range(CLIPS):
            words: list[int] = []
            for _ in range(6):
                inputs = torch.cat(
                    [visual[i], network.llm.get_input_embeddings()(torch.tensor(words).long())]
                )
                words.append(int(network.llm(inputs_embeds=inputs[None]).logits[0, -1].argmax()))
            assert told[i] == words


def test_a_caption_stops_before_its_end_token() -> None:
    network, given = model(), batch()
    free = network.caption(given, 6, end=-1)
    end = free[0][2]
    for row, stopped in zip(free, network.caption(given, 6, end=end), strict=True):
        assert stopped == (row[: row.index(end)] if end in row else row)
    assert network.caption(given, 0) == [[], [], []]


def test_a_model_that_was_never_asked_tells_what_its_coarse_pass_sees() -> None:
    network, given = model(fine_iterations=0), batch()
    told = network.caption(given, 6, end=-1)
    with torch.no_grad():
        network.ask.weight.normal_(generator=torch.Generator().manual_seed(3))
        network.first.normal_(generator=torch.Generator().manual_seed(4))
    assert network.caption(given, 6, end=-1) == told == network.caption(given, 6, mode="coarse", end=-1)


def test_a_model_that_learnt_one_caption_tells_it() -> None:
    network, given = model(), batch()
    same = torch.tensor([7, 5, 11, 2]).repeat(CLIPS)
    given["tokens"] = fl.Ragged(same, torch.arange(0, 13, 4))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        losses(network(given))["loss"].backward()
        optimizer.step()
    assert network.caption(given, 8) == [[7, 5, 11]] * CLIPS  # 2 is the language model's end


# --- controls -------------------------------------------------------------------------------------------


def test_random_queries_are_as_large_as_those_asked_for_and_belong_to_the_clip() -> None:
    network, given = model(), batch()
    asked, drawn = network(given)[-1].queries, network(given, queries="random")[-1].queries
    sizes = [q.square().mean().sqrt().item() for q in (asked, drawn)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)
    assert F.cosine_similarity(asked, drawn, dim=-1).abs().mean() < 0.4
    alone = network(given.part(1, 2), queries="random")[-1].queries
    assert torch.allclose(alone, drawn[1:2], atol=1e-4)
    assert not torch.equal(network(given, queries="random", seed=1)[-1].queries, drawn)


def test_the_coarse_control_looks_as_the_coarse_pass_does() -> None:
    passes = model()(batch(), queries="coarse")
    assert torch.equal(passes[-1].loss_B, passes[0].loss_B)


def test_shuffled_queries_are_those_of_another_clip() -> None:
    network, given = model(), batch()
    asked = network(given)[-1].queries
    assert torch.equal(network(given, queries="shuffled")[-1].queries, asked.roll(-1, 0))
    with pytest.raises(UsageError, match="a batch of one"):
        network(given.part(0, 1), queries="shuffled")


def test_without_looking_all_clips_are_alike() -> None:
    network, given = model(), batch()
    text = network(given, mode="text")
    others = network({**given, "features": torch.randn_like(given["features"])}, mode="text")
    assert torch.equal(text[0].loss_B, others[0].loss_B)
    losses(text)["loss"].backward()
    assert all(p.grad is not None for p in network.llm.parameters())


# --- what is given --------------------------------------------------------------------------------------


def test_captions_are_padded_and_cut_to_the_length() -> None:
    rows = fl.Ragged(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 1, 1, 6]))
    ids, there = padded(rows, None)
    assert ids.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [2, 3, 4, 5, 6]]
    assert there.sum(1).tolist() == [1, 0, 5]
    assert padded(rows, 2)[0].tolist() == [[1, 0], [0, 0], [2, 3]]
    assert padded(rows, 7)[0].shape == (3, 7)


def test_an_empty_caption_among_others_costs_nothing_and_is_a_number() -> None:
    found = model()(batch((3, 0, 2)))[-1].loss_B
    assert found[1] == 0
    assert found.isfinite().all()


def test_what_a_batch_lacks_is_named() -> None:
    given = batch()
    with pytest.raises(UsageError, match="needs captions, and the batch has no 'tokens'"):
        model()({"features": given["features"]})
    with pytest.raises(UsageError, match="needs latents to predict"):
        model(objective="joint")({"features": given["features"], "tokens": given["tokens"]})
    with pytest.raises(UsageError, match="All captions of this batch are empty"):
        model()(batch((0, 0)))
    with pytest.raises(UsageError, match="no next frame"):
        model(objective="reconstruct")({"features": given["features"], "latents": given["latents"][:, :1]})


def test_modes_and_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError) as failure:
        model(fine_iterations=-1, objective="colour", caption_length=0)
    assert len(failure.value.problems) == 3
    with pytest.raises(UsageError, match="mode is 'fast'"):
        model()(batch(), mode="fast")
    with pytest.raises(UsageError, match="mode='coarse' has none"):
        model()(batch(), mode="coarse", queries="random")
    with pytest.raises(UsageError, match="fine_iterations=0 has none"):
        model(fine_iterations=0)(batch(), queries="random")


def test_without_fine_passes_there_is_the_coarse_one() -> None:
    network = model(fine_iterations=0)
    for mode in ("train", "evaluate", "look"):
        assert len(network(batch(), mode=mode)) == 1
    assert sorted(losses(network(batch()))) == ["loss", "loss_coarse"]
    assert network.caption(batch(), 4, mode="fine") == network.caption(batch(), 4, mode="coarse")


def test_a_joint_loss_tells_its_parts() -> None:
    told = losses(model(objective="joint")(batch()), 0.5)
    for name in ("fine", "coarse"):
        parts = told[f"loss_{name}"].detach() + told[f"loss_reconstruct_{name}"]
        assert float(parts) == pytest.approx(float(told[f"loss_total_{name}"]), rel=1e-6)
