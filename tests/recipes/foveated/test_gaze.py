"""Where the model looks: attention over stored features, and queries through the encoder's layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frostline import stages
from frostline.errors import UsageError
from frostline_recipes.foveated.encoder import Encoder, projections
from frostline_recipes.foveated.gaze import Deep, Shallow, position_code

pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], int]] = {  # configuration, tokens before the patches
    "dinov2": ({**SMALL, "mlp_ratio": 2}, 1),
    "dinov2_with_registers": ({**SMALL, "mlp_ratio": 2, "num_register_tokens": 3}, 4),
    "dinov3_vit": ({**SMALL, "num_register_tokens": 3}, 4),
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shallow(**options: Any) -> Shallow:
    torch.manual_seed(1)
    return Shallow(24, **{"query_width": 10, "heads": 3, "grid": (3, 4), "prefix": 1, **options})


def features(*, clips: int = 2, frames: int = 5) -> Tensor:
    return torch.randn(clips, frames, 13, 24, generator=seeded()) * 3 + 1


def encoder(kind: str, *, trainable: bool = False) -> Encoder:
    tower = stages.vision_tower(config={"model_type": kind, **KINDS[kind][0]}, seed=3)
    return Encoder(tower, stages.Preprocess(None, MEAN, STD), trainable=trainable)


def deep(kind: str, **options: Any) -> Deep:
    return Deep(encoder(kind, **options), grid=(4, 4), prefix=KINDS[kind][1])


def frames(*, clips: int = 2, count: int = 3) -> Tensor:
    return torch.randint(0, 256, (clips, count, 3, 32, 32), generator=seeded(), dtype=torch.uint8)


# --- shallow --------------------------------------------------------------------------------------------


def as_written(gaze: Shallow, query: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The attention with its keys and values made one by one, as the docstring writes it."""
    normed = nn.functional.layer_norm(features, (gaze.width,))
    keys = gaze.key(normed) + gaze.where_k(gaze.code)
    values = gaze.value(normed) + gaze.where_v(gaze.code)
    q, k, v = (x.unflatten(-1, (gaze.heads, -1)) for x in (gaze.query(query), keys, values))
    scores = torch.einsum("bthd,btnhd->bthn", q, k) / math.sqrt(q.shape[-1])
    attention = scores.softmax(-1)
    return torch.einsum("bthn,btnhd->bthd", attention, v).flatten(-2), attention


def test_shallow_equals_attention_over_keys_and_values_that_are_made() -> None:
    gaze, x = shallow(), features()
    nn.init.normal_(gaze.value.bias)
    query = torch.randn(2, 5, 10, generator=seeded(2))
    extracted, attention = gaze(query, gaze.prepare({"features": x}))
    want, weights = as_written(gaze, query, x)
    assert torch.allclose(extracted, want, atol=1e-5)
    assert torch.allclose(attention, weights, atol=1e-6)
    assert torch.allclose(attention.sum(-1), torch.ones(2, 5, 3))


def test_shallow_gradients_equal_those_of_keys_and_values_that_are_made() -> None:
    gaze, x = shallow(), features()
    query = torch.randn(2, 5, 10, generator=seeded(2))
    target = torch.randn(2, 5, 24, generator=seeded(4))
    found = []
    for answer in (gaze(query, gaze.prepare({"features": x}))[0], as_written(gaze, query, x)[0]):
        found.append(torch.autograd.grad((answer - target).square().mean(), list(gaze.parameters())))
    for ours, written in zip(*found, strict=True):
        assert torch.allclose(ours, written, atol=1e-6)
        assert ours.abs().sum() > 0


def test_scores_of_a_fresh_gaze_are_far_from_uniform() -> None:
    """Small scores were what made all queries see the same."""
    gaze = Shallow(96, heads=6, grid=(16, 16), prefix=1)
    x = torch.randn(4, 4, 257, 96, generator=seeded())
    _, attention = gaze(torch.randn(4, 4, 96, generator=seeded(1)), gaze.prepare({"features": x}))
    entropy = -(attention * attention.log()).sum(-1).mean()
    assert entropy < 0.95 * math.log(257)


def test_a_query_can_name_a_place_when_all_patches_look_alike() -> None:
    gaze = shallow()
    seen = gaze.prepare({"features": torch.ones(1, 1, 13, 24).cumsum(-1)})
    query = torch.randn(1, 1, 10, generator=seeded(), requires_grad=True)
    chooser = torch.optim.Adam([query, *gaze.where_k.parameters()], 0.1)
    for _ in range(60):
        _, attention = gaze(query, seen)
        chooser.zero_grad()
        (-attention[..., 7].log().mean()).backward()
        chooser.step()
    assert gaze(query, seen)[1][..., 7].min() > 0.9


def test_places_have_codes_of_their_own_and_prefix_tokens_none() -> None:
    code = position_code((5, 7), prefix=2)
    assert code.shape[0] == 37
    assert not code[:2].any()
    apart = torch.cdist(code[2:], code[2:]) + 10 * torch.eye(35)
    assert apart.min() > 0.3
    assert torch.allclose(code[2:].square().sum(1), torch.full((35,), code.shape[1] / 2))


def test_shallow_under_bf16_keeps_the_softmax_in_fp32_and_is_near() -> None:
    gaze, x, query = shallow(), features(), torch.randn(2, 5, 10, generator=seeded(2))
    want, weights = gaze(query, gaze.prepare({"features": x}))
    with torch.autocast("cpu", torch.bfloat16):
        seen = gaze.prepare({"features": x.bfloat16()})
        extracted, attention = gaze(query, seen)
    assert seen.features.dtype == torch.bfloat16
    assert attention.dtype == torch.float32
    assert torch.allclose(attention, weights, atol=0.02)
    assert torch.allclose(extracted.float(), want, atol=0.1)


def test_shallow_reads_frames_through_an_encoder_as_the_stage_would() -> None:
    gaze = Shallow(24, heads=3, grid=(4, 4), prefix=1, encoder=encoder("dinov2"))
    tower = stages.vision_tower(config={"model_type": "dinov2", **KINDS["dinov2"][0]}, seed=3)
    stored = tower(stages.Preprocess(None, MEAN, STD)(frames()))
    plain = Shallow(24, heads=3, grid=(4, 4), prefix=1)
    assert torch.equal(
        gaze.prepare({"frames": frames()}).features, plain.prepare({"features": stored}).features
    )


@pytest.mark.parametrize(("trainable", "reached"), [(True, True), (False, False)])
def test_an_encoder_gets_gradients_through_a_shallow_gaze_only_when_it_trains(
    trainable: bool, reached: bool
) -> None:
    gaze = Shallow(24, heads=3, grid=(4, 4), prefix=1, encoder=encoder("dinov2", trainable=trainable))
    gaze(torch.randn(2, 3, 24, generator=seeded()), gaze.prepare({"frames": frames()}))[0].sum().backward()
    assert gaze.encoder is not None
    assert any(p.grad is not None for p in gaze.encoder.parameters()) == reached


def test_features_of_another_encoder_are_refused() -> None:
    with pytest.raises(UsageError, match=r"wants \[B, T, 13, 24\].*freeze again"):
        shallow().prepare({"features": torch.zeros(1, 2, 17, 24)})
    with pytest.raises(UsageError, match="has no 'features', only 'frames'"):
        shallow().prepare({"frames": frames()})


def test_all_that_is_wrong_with_a_gaze_is_said_at_once() -> None:
    with pytest.raises(UsageError) as failure:
        Shallow(10, heads=3, grid=(0, 4), prefix=-1)
    assert len(failure.value.problems) == 3


# --- deep -----------------------------------------------------------------------------------------------


def masked(gaze: Deep, pixels: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder with one more token, first, that nobody sees, by an additive mask; what comes out, and what
    the last layer gathers for each token."""
    network = gaze.encoder.network
    states = torch.cat([query[:, None], network.embeddings(pixels)], 1)
    mask = torch.zeros(states.shape[1], states.shape[1])
    mask[:, 0] = -torch.inf
    options = {}
    if hasattr(network, "rope_embeddings"):
        options["position_embeddings"] = network.rope_embeddings(pixels)
    gathered: list[Tensor] = []
    out = projections(gaze.encoder.blocks[-1])[3]
    hook = out.register_forward_pre_hook(lambda _, given: gathered.append(given[0]))
    for layer in gaze.encoder.blocks:
        states = layer(states, attention_mask=mask[None, None], **options)
    hook.remove()
    return gaze.encoder.last_norm(states), gathered[0]


@pytest.mark.parametrize("kind", ["dinov2", "dinov3_vit"])
def test_deep_equals_the_encoder_with_a_token_that_is_masked_from_all(kind: str) -> None:
    gaze, query = deep(kind), torch.randn(2, 3, 24, generator=seeded(5))
    extracted, attention = gaze(query, gaze.prepare({"frames": frames()}))
    pixels = stages.Preprocess(None, MEAN, STD)(frames()).flatten(0, 1)
    whole, gathered = masked(gaze, pixels, query.flatten(0, 1))
    assert torch.allclose(extracted.flatten(0, 1), gathered[:, 0], atol=1e-4)
    untouched = gaze.encoder.network(pixel_values=pixels).last_hidden_state
    assert torch.allclose(whole[:, 1:], untouched, atol=1e-4)
    assert torch.allclose(attention.sum(-1), torch.ones(2, 3, 2))
    assert attention.std() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_deep_extracts_otherwise_for_another_query_from_the_same_patches(kind: str) -> None:
    gaze = deep(kind)
    seen = gaze.prepare({"frames": frames()})
    one, other = (gaze(torch.randn(2, 3, 24, generator=seeded(s)), seen)[0] for s in (1, 2))
    assert (one - other).abs().mean() > 0.1
    assert seen.size == (2, 3)
    alone = gaze(torch.randn(2, 3, 24, generator=seeded(1))[:, 1:2], seen.at(1))[0]
    assert torch.allclose(alone, one[:, 1:2], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainable", [True, False])
def test_gradient_reaches_the_query_and_a_deep_encoder_that_trains(kind: str, trainable: bool) -> None:
    gaze = deep(kind, trainable=trainable)
    query = torch.randn(2, 3, 24, generator=seeded(), requires_grad=True)
    gaze(query, gaze.prepare({"frames": frames()}))[0].square().sum().backward()
    assert query.grad is not None
    assert query.grad.abs().sum() > 0
    patches = gaze.encoder.network.embeddings.patch_embeddings
    reached = [p.grad for p in patches.parameters() if p.grad is not None]
    assert bool(reached) == trainable
    assert all(g.abs().sum() > 0 for g in reached)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_gaze_that_cannot_choose_extracts_the_same_whatever_is_asked(kind: str) -> None:
    """A query must not reach the language model but through where it looks."""
    gaze = deep(kind)
    ask = projections(gaze.encoder.blocks[-1])[0]
    with torch.no_grad():
        for parameter in ask.parameters():
            parameter.zero_()
    seen = gaze.prepare({"frames": frames()})
    one, other = (gaze(torch.randn(2, 3, 24, generator=seeded(s)), seen) for s in (1, 2))
    assert torch.allclose(one[1], torch.full_like(one[1], 1 / one[1].shape[-1]))
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_deep_encoder_that_trains_gets_a_gradient(kind: str) -> None:
    gaze = deep(kind, trainable=True)
    query = torch.randn(2, 3, 24, generator=seeded())
    gaze(query, gaze.prepare({"frames": frames()}))[0].square().sum().backward()
    learned = {name: p for name, p in gaze.named_parameters() if p.requires_grad}
    assert [name for name, p in learned.items() if p.grad is None] == []
    assert len(learned) > len([*gaze.parameters()]) / 2


def test_an_encoder_stays_in_eval_mode_and_draws_nothing() -> None:
    gaze = deep("dinov3_vit", trainable=True)
    gaze.train()
    assert not any(module.training for module in gaze.encoder.modules())
    one, other = (gaze.prepare({"frames": frames()}).kept[0][0] for _ in range(2))
    assert torch.equal(one, other)


def test_the_encoder_is_saved_once() -> None:
    gaze = deep("dinov2")
    assert len(gaze.state_dict()) == len({value.data_ptr() for value in gaze.state_dict().values()})


def test_layers_of_earlier_transformers_are_read_as_well() -> None:
    """Its DINOv2 kept the projections one level deeper and under other names."""
    now = encoder("dinov2").blocks[0]
    before, inner = copy.deepcopy(now), nn.Module()
    inner.attention, inner.output = nn.Module(), nn.Module()
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    for new, old in names.items():
        setattr(inner.attention, old, getattr(now.attention, new))
    inner.output.dense = now.attention.o_proj
    before.attention = inner
    assert projections(before) == projections(now)


def test_a_network_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="DINOv2 or DINOv3 of transformers, and got Linear"):
        Encoder(nn.Linear(2, 2), nn.Identity())


def test_frames_of_another_size_are_refused_by_a_deep_gaze() -> None:
    with pytest.raises(UsageError, match="do not fit this gaze"):
        deep("dinov2").prepare({"frames": torch.zeros(1, 2, 3, 48, 48, dtype=torch.uint8)})
