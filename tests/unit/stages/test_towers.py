"""`vision_tower`: every kind of network, every output, and names and weights that are not right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frostline.errors import MissingExtra, UsageError
from frostline.stages import vision_tower

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PICTURE = {"image_size": 32, "patch_size": 8}
KINDS: dict[str, tuple[dict[str, object], int]] = {  # configuration, tokens before the patches
    "dinov2": ({**SMALL, **PICTURE}, 1),
    "dinov2_with_registers": ({**SMALL, **PICTURE, "num_register_tokens": 4}, 5),
    "dinov3_vit": ({**SMALL, **PICTURE, "num_register_tokens": 4, "pos_embed_rescale": 2.0}, 5),
    "clip_vision_model": ({**SMALL, **PICTURE}, 1),
    "siglip_vision_model": ({**SMALL, **PICTURE}, 0),
    "vit": ({**SMALL, **PICTURE}, 1),
}


def config(kind: str) -> dict[str, object]:
    return {"model_type": kind, **KINDS[kind][0]}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_plain_tensors_of_the_stated_shapes(kind: str) -> None:
    before = KINDS[kind][1]
    tokens = vision_tower(config=config(kind), seed=1)(pixels())
    patches = vision_tower(config=config(kind), seed=1, output="patches")(pixels())
    assert type(tokens) is torch.Tensor
    assert (tokens.shape, patches.shape) == ((2, 16 + before, 16), (2, 16, 16))
    assert torch.equal(patches, tokens[:, before:])
    assert vision_tower(config=config(kind), seed=1, output="pooled")(pixels()).shape == (2, 16)
    if before:
        cls = vision_tower(config=config(kind), seed=1, output="cls")(pixels())
        assert torch.equal(cls, tokens[:, 0])
    else:
        with pytest.raises(UsageError, match="SiglipVisionModel has no class token"):
            vision_tower(config=config(kind), output="cls")(pixels())


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_and_the_same_every_time_even_when_told_to_train(kind: str) -> None:
    tower = vision_tower(config=config(kind), seed=1)
    assert not tower.training
    assert not any(p.requires_grad for p in tower.parameters())
    first = tower(pixels())
    tower.train()
    assert not any(module.training for module in tower.modules())
    assert torch.equal(tower(pixels()), first)


def test_dinov3_would_be_random_in_train_mode() -> None:
    """The fault that eval mode keeps away; without it the test above could not fail."""
    tower = vision_tower(config=config("dinov3_vit"), seed=1)
    tower.network.train()
    assert not torch.equal(tower(pixels()), tower(pixels()))


def test_the_seed_makes_the_weights_and_leaves_the_generator() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    same = [vision_tower(config=config("vit"), seed=seed)(pixels()) for seed in (3, 3, 4)]
    assert torch.equal(torch.rand(3), want)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    assert torch.equal(
        vision_tower(config=config("vit"))(pixels()), vision_tower(config=config("vit"), seed=0)(pixels())
    )


def test_layers() -> None:
    last = vision_tower(config=config("dinov2"), seed=1)
    states = last.network(pixel_values=pixels(), output_hidden_states=True).hidden_states
    for layer, at in ((-2, 1), (1, 1), (0, 0), (2, 2), (-3, 0)):
        assert torch.equal(vision_tower(config=config("dinov2"), seed=1, layer=layer)(pixels()), states[at])
    assert torch.equal(last.network.layernorm(states[-1]), last(pixels()))
    with pytest.raises(UsageError, match="layer is 3; this Dinov2Model has 2 blocks: -3 … 2"):
        vision_tower(config=config("dinov2"), layer=3)
    with pytest.raises(UsageError, match="only the result of the whole network is pooled"):
        vision_tower(config=config("dinov2"), layer=1, output="pooled")


@pytest.mark.parametrize("kind", KINDS)
def test_clips_and_other_sizes(kind: str) -> None:
    tower = vision_tower(config=config(kind), output="patches")
    assert tower(pixels(2, 3, 3, 32, 32)).shape == (2, 3, 16, 16)
    assert tower(pixels(1, 3, 48, 64)).shape == (1, 48, 16)


def test_dtype_and_convolutional_networks() -> None:
    tower = vision_tower(config=config("vit"), dtype="bfloat16")
    assert tower(pixels()).dtype == torch.bfloat16
    conv = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    assert vision_tower(config=conv, output="patches")(pixels()).shape == (2, 16, 16)
    assert vision_tower(config=conv, output="pooled")(pixels()).shape == (2, 16)
    with pytest.raises(UsageError, match="no class token"):
        vision_tower(config=conv, output="cls")(pixels())
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        vision_tower(config=config("vit"), dtype="int8")


def test_a_folder_gives_the_same_network(tmp_path: Path) -> None:
    tower = vision_tower(config=config("dinov2"), seed=5)
    tower.network.save_pretrained(tmp_path)
    for name in (tmp_path, str(tmp_path)):
        assert torch.equal(vision_tower(name)(pixels()), tower(pixels()))


def test_of_clip_only_the_vision_part_is_loaded(tmp_path: Path) -> None:
    text = {**SMALL, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    whole = transformers.CLIPConfig(vision_config={**SMALL, **PICTURE}, text_config=text)
    model = transformers.CLIPModel(whole).eval()
    model.save_pretrained(tmp_path)
    tower = vision_tower(tmp_path, output="pooled")
    assert torch.equal(tower(pixels()), model.vision_model(pixel_values=pixels()).pooler_output)
    assert not any("text" in name for name in tower.state_dict())


def test_weights_that_are_missing_are_never_made_up(tmp_path: Path) -> None:
    vision_tower(config=config("vit"), seed=5).network.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    pooler = {key for key in weights if key.startswith("pooler.")}
    save_file(
        {k: v for k, v in weights.items() if k not in pooler},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert vision_tower(tmp_path)(pixels()).shape == (2, 17, 16)  # nobody reads the pooler
    with pytest.raises(UsageError, match=r"(?s)not all there.*needs its pooler.*pooler\.dense\.bias"):
        vision_tower(tmp_path, output="pooled")
    gone = next(key for key in weights if "layernorm" in key)
    save_file(
        {k: v for k, v in weights.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UsageError, match="not all there"):
        vision_tower(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tower = vision_tower(config=config("vit"))
    tower.network.config.save_pretrained(tmp_path)
    torch.save(tower.network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UsageError, match=r"'pytorch_model\.bin', a pickled file, which frostline never opens"
    ):
        vision_tower(tmp_path)


def test_wrong_names_are_answered_with_close_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"(?s)'facebook/dinov2-smal'.*Did you mean 'facebook/dinov2-small'"):
        vision_tower("facebook/dinov2-smal")
    (tmp_path / "my-encoder").mkdir()
    with pytest.raises(UsageError, match="Did you mean 'my-encoder'"):
        vision_tower(tmp_path / "my-encodr")
    with pytest.raises(UsageError, match=r"has no config\.json; it holds nothing"):
        vision_tower(tmp_path / "my-encoder")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="Did you mean 'my-encoder'"):
        vision_tower("my-encoda")
    with pytest.raises(UsageError, match=r"model_type 'dinov4', which.*Did you mean 'dinov2'"):
        vision_tower(config={"model_type": "dinov4"})


def test_a_folder_that_would_run_its_own_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
        )
    )
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UsageError, match="Cannot load the vision tower"):
        vision_tower(tmp_path)
    assert not marker.exists()


def test_contradictions_are_listed() -> None:
    with pytest.raises(UsageError, match="give a name or folder, or config"):
        vision_tower()
    with pytest.raises(UsageError) as error:
        vision_tower("a", config={"model_type": "vit"})
    assert len(error.value.problems) == 1
    with pytest.raises(UsageError, match="seed is 3, but the weights of 'a' are not random"):
        vision_tower("a", seed=3)
    with pytest.raises(UsageError, match="output is 'all'"):
        vision_tower("a", output="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Put stages\.Preprocess before it"):
        vision_tower(config=config("vit"))(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"transformers: pip install 'frostline\[hf\]'"):
        vision_tower("facebook/dinov2-small")
