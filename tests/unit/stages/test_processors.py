"""Reading what a processor does: from folders, dicts and old configurations; and what is not understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frostline.errors import UsageError
from frostline.stages import Preprocess
from frostline.stages.processors import recipe

BASE: dict[str, object] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}


def test_sizes_in_all_their_spellings() -> None:
    assert recipe({**BASE, "size": 224}).size == (224, 224)
    assert recipe({**BASE, "size": {"height": 10, "width": 20}}).size == (10, 20)
    assert recipe({**BASE, "size": {"shortest_edge": 256, "longest_edge": None}}).size == 256
    old_clip = recipe({**BASE, "size": 224, "crop_size": 200, "do_center_crop": True})
    assert (old_clip.size, old_clip.crop) == (224, (200, 200))
    assert recipe({**BASE, "size": 9, "crop_size": 5, "do_center_crop": False}).crop is None


def test_steps_that_are_off_are_left_out() -> None:
    off = recipe({"do_resize": False, "do_rescale": False, "do_normalize": False})
    assert (off.size, off.rescale, off.mean, off.std) == (None, 1.0, None, None)


def test_everything_that_is_not_understood_at_once() -> None:
    with pytest.raises(UsageError) as error:
        recipe({"do_pad": True, "do_flip_channel_order": True, "size": {"longest_edge": 9}, "resample": 7})
    text = str(error.value)
    for expected in (
        "do_pad is on",
        "do_flip_channel_order is on",
        "size is",
        "resample is 7",
        "image_mean is None",
    ):
        assert expected in text
    with pytest.raises(UsageError, match="got int"):
        recipe(3)


def test_folders(tmp_path: Path) -> None:
    config = {**BASE, "size": {"height": 8, "width": 8}}
    for name, content in (
        ("preprocessor_config.json", config),
        ("processor_config.json", {"image_processor": config, "processor_class": "CLIPProcessor"}),
    ):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
        assert Preprocess.of(folder).size == Preprocess.of(str(folder)).size == (8, 8)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "preprocessor_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        Preprocess.of(tmp_path / "broken")
    with pytest.raises(UsageError, match=r"has no preprocessor_config\.json; it holds broken, "):
        Preprocess.of(tmp_path)


def test_a_saved_processor_is_read_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.SiglipImageProcessorPil().save_pretrained(tmp_path)
    assert Preprocess.of(tmp_path).size == (224, 224)
    assert Preprocess.of(tmp_path).interpolation == "bicubic"


def test_a_repository_without_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name: str, file: str) -> str:
        asked.append(file)
        raise huggingface_hub.errors.EntryNotFoundError("404: no such file")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UsageError, match=r"Cannot load the image processor of 'some/model'.*404"):
        Preprocess.of("some/model")
    assert asked == ["preprocessor_config.json", "processor_config.json"]


def test_a_wrong_name_is_answered_with_close_ones() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(UsageError, match=r"(?s)'facebook/dinov2-smol'.*Did you mean 'facebook/dinov2-small'"):
        Preprocess.of("facebook/dinov2-smol")
