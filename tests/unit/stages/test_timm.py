"""`timm_model`, with a timm made up for the tests: the real one needs torchvision."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from frostline.errors import MissingExtra, UsageError
from frostline.stages import timm_model

PRETRAINED = ["vit_small_patch16_dinov3.lvd1689m", "vit_base_patch16_dinov3.lvd1689m", "resnet18.a1_in1k"]


class Vit(nn.Module):
    """A class token and a register before the patches, as timm's transformers have them."""

    num_prefix_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 8, 8)
        self.drop = nn.Dropout(0.5)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.drop(self.patch(x).flatten(2).transpose(1, 2))
        return torch.cat([patches.mean(1, keepdim=True), patches[:, :1] * 0, patches], 1)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        assert pre_logits
        return x[:, 0]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, 8)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake = ModuleType("timm")
    bare = sorted({name.split(".")[0] for name in PRETRAINED} | {"vit_tiny_untrained"})
    fake.made = []  # type: ignore[attr-defined]

    def list_models(filter: str = "*", pretrained: bool = False) -> list[str]:
        return [name for name in (PRETRAINED if pretrained else bare) if fnmatch(name, filter)]

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        fake.made.append((name, pretrained, num_classes))  # type: ignore[attr-defined]
        return Conv() if name.startswith("resnet") else Vit()

    fake.list_models, fake.create_model = list_models, create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 16, 16)), generator=torch.Generator().manual_seed(0))


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtra, match=r"timm: pip install 'frostline\[timm\]'"):
        timm_model("resnet18.a1_in1k")


def test_outputs(timm: ModuleType) -> None:
    outputs = {
        name: timm_model("vit_tiny_untrained", pretrained=False, seed=0, output=name)(pixels())  # type: ignore[arg-type]
        for name in ("tokens", "patches", "cls", "pooled")
    }
    assert outputs["tokens"].shape == (2, 6, 4)
    assert torch.equal(outputs["patches"], outputs["tokens"][:, 2:])
    assert torch.equal(outputs["cls"], outputs["tokens"][:, 0])
    assert torch.equal(outputs["cls"], outputs["pooled"])
    conv = timm_model("resnet18.a1_in1k", output="tokens")
    assert conv(pixels(2, 5, 3, 16, 16)).shape == (2, 5, 4, 4)
    assert timm.made[-1] == ("resnet18.a1_in1k", True, 0)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="Conv has no class token"):
        timm_model("resnet18.a1_in1k", output="cls")


def test_frozen(timm: ModuleType) -> None:
    model = timm_model("vit_small_patch16_dinov3", dtype="float64").train()
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    assert model(pixels()).dtype == torch.float64


def test_names_that_do_not_exist(timm: ModuleType) -> None:
    """Both are in a document that this project grew from; neither model exists."""
    for name in ("vit_tiny_patch16_dinov3.lvd1689m", "vit_small_patch32_dinov3.lvd1689m"):
        with pytest.raises(UsageError, match=rf"{name}.*Did you mean 'vit_\w+_patch16_dinov3.lvd1689m'"):
            timm_model(name)
    with pytest.raises(UsageError, match="no model with pretrained weights named 'vit_tiny_untrained'"):
        timm_model("vit_tiny_untrained")
    assert timm.made == []  # type: ignore[attr-defined]


def test_local_weights(timm: ModuleType, tmp_path: Path) -> None:
    source = Vit()
    save_file({**source.state_dict(), "head.weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    model = timm_model("vit_tiny_untrained", weights=tmp_path / "w.safetensors")
    assert torch.equal(model.network.patch.weight, source.patch.weight)
    assert timm.made == [("vit_tiny_untrained", False, 0)]  # type: ignore[attr-defined]
    save_file({"patch.bias": torch.zeros(4), "other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"(?s)patch\.weight is missing.*other is unknown"):
        timm_model("vit_tiny_untrained", weights=tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"junk")
    with pytest.raises(UsageError, match="Cannot read weights"):
        timm_model("vit_tiny_untrained", weights=tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"a \.safetensors file"):
        timm_model("vit_tiny_untrained", weights="w.pth")


def test_contradictions(timm: ModuleType) -> None:
    with pytest.raises(UsageError, match="goes with pretrained=False"):
        timm_model("resnet18", seed=1)
    with pytest.raises(UsageError, match=r"Put stages\.Preprocess before it"):
        timm_model("resnet18.a1_in1k")(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
