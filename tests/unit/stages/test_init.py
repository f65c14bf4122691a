"""The names of `frostline.stages`: lazy, complete, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frostline import stages


def test_every_name_is_there() -> None:
    assert sorted(stages.__all__) == stages.__all__ == sorted(stages._HOMES) == dir(stages)
    for name in stages.__all__:
        assert getattr(stages, name).__name__ == name


def test_a_misspelt_name_lists_the_real_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Images'; it has Image, Preprocess"):
        stages.Images  # noqa: B018


def test_importing_brings_no_heavy_library() -> None:
    code = (
        "import sys; import frostline.stages; before = set(sys.modules);"
        " from frostline.stages import Image, Video, Preprocess, Tokenizer, autoencoder;"
        " from frostline.stages import timm_model, vision_tower; Image(size=8); Video();"
        " heavy = ['PIL', 'av', 'transformers', 'diffusers', 'tokenizers', 'timm', 'cv2'];"
        " print('torch' in before, [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False []"
