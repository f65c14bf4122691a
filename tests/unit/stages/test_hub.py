"""Names, folders and weights: what leads where, and what never happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frostline.errors import UsageError
from frostline.stages import hub


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facebook" / "dinov2-small").mkdir(parents=True)
    (tmp_path / "facebook" / "dinov2-small" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert hub.place("facebook/dinov2-small") == str(Path("facebook/dinov2-small"))
    assert hub.place("facebook/dinov2-base") == "facebook/dinov2-base"


@pytest.mark.parametrize("name", ["", "./x", "/no/such/place", "~/nothing-here", "a/b/c"])
def test_what_can_only_be_a_path_is_never_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        hub.place(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="There is no folder"):
        hub.place(tmp_path / "model.safetensors")


def test_pickled_weights_beside_safe_ones_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="never opens"):
        hub.refuse_pickled(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    hub.refuse_pickled(str(tmp_path))


def test_seeded_gives_the_generator_back_also_after_an_error() -> None:
    torch.manual_seed(1)
    want = torch.rand(2)
    torch.manual_seed(1)
    drawn = []

    def draw_and_fail() -> None:
        with hub.seeded(5):
            drawn.append(torch.rand(2))
            raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            draw_and_fail()
    assert torch.equal(torch.rand(2), want)
    assert torch.equal(drawn[0], drawn[1])


def test_dtypes() -> None:
    assert hub.dtype_named(torch.float16) is torch.float16
    for wrong in ("int64", "no_such", "nn", torch.int8):
        with pytest.raises(UsageError, match="dtype is"):
            hub.dtype_named(wrong)
