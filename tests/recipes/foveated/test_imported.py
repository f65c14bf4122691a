"""Document 001's layout, a .pt file for every video: imported without unpickling, and fed to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.supply import supply
from frostline_recipes.foveated.imported import workload
from frostline_recipes.foveated.workload import load

pytest.importorskip("transformers")
Shell = Any  # of conftest.py
TARGET = "frostline_recipes.foveated.imported:workload"
LITTLE = ("batch_size=2", "warmup_steps=1", "max_tokens=16", "num_frames=6")
CAPTIONS = ("a red star turns blue and then becomes a disc", "a cat", "a dog and a ring")


def saved(
    folder: Path, i: int, *, frames: int, tokens: int, width: int, side: int, caption: str | None = None
) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(i)
    video = {
        "dino_features": torch.randn(frames, tokens, width, generator=drawn).half(),
        "latents": torch.randn(frames, 4, side, side, generator=drawn).half(),
        "caption": caption or CAPTIONS[i % 3],
    }
    torch.save(video, folder / f"video_{i:03d}.pt")
    return video


@pytest.fixture(scope="module")
def store(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty videos with the document's names and ranks, of smaller sizes."""
    folder = tmp_path_factory.mktemp("pt")
    for i in range(20):
        saved(folder, i, frames=8, tokens=10, width=64, side=8)
    told = shell("store", "import", str(folder), "--out", "imported")
    assert told.code == 0, told.err
    return Path(shell.folder / "imported")


def test_the_documents_sizes_are_imported_bit_by_bit(shell: Shell, tmp_path: Path) -> None:
    video = saved(tmp_path, 0, frames=24, tokens=325, width=384, side=32)
    assert shell("store", "import", str(tmp_path), "--out", "full").code == 0
    store = fl.Store.open(shell.folder / "full")
    assert {name: (field.dtype, tuple(field.shape)) for name, field in store.fields.items()} == {
        "dino_features": ("float16", (24, 325, 384)), "latents": ("float16", (24, 4, 32, 32)),
        "caption": ("str", ()),
    }  # fmt: skip
    row = store["video_000"]
    assert row["caption"] == CAPTIONS[0]
    assert torch.equal(torch.as_tensor(row["dino_features"]), video["dino_features"])
    assert torch.equal(torch.as_tensor(row["latents"]), video["latents"])
    model = workload(store=str(shell.folder / "full")).model
    assert model.loader(*model.args, **model.kwargs).gaze.grid == (18, 18)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "pt").mkdir()
    saved(tmp_path / "pt", 0, frames=8, tokens=10, width=64, side=8)
    torch.save({"caption": Trap(tmp_path / "sprung")}, tmp_path / "pt" / "trap.pt")
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "pt" / "bare.pt", _use_new_zipfile_serialization=False)
    told = shell("store", "import", str(tmp_path / "pt"), "--out", "trapped", "--max-bad", "2")
    assert not (tmp_path / "sprung").exists()
    assert told.code == 0, told.err
    assert [*fl.Store.open(shell.folder / "trapped").keys] == ["video_000"]


def test_batches_are_what_the_model_reads(store: Path) -> None:
    of = workload(store=str(store), num_frames=6, objective="joint", batch_size=4, max_tokens=16)
    [batch, *_] = supply(of, None, split="train", batch_size=4, device="cpu")
    assert batch["features"].shape == (4, 6, 10, 64)
    assert batch["latents"].shape == (4, 6, 4, 8, 8)
    assert isinstance(batch["tokens"], fl.Ragged)
    # Frames are drawn, those of latents are those of features.
    row = fl.Store.open(store)[batch.keys_of_rows[0]]
    features, latents = (torch.as_tensor(row[name]) for name in ("dino_features", "latents"))
    at = [int((features == one).flatten(1).all(1).nonzero()) for one in batch["features"][0]]
    assert at == sorted(at)
    assert torch.equal(latents[at], batch["latents"][0])


@pytest.mark.parametrize("objective", ["joint", "reconstruct"])
def test_a_model_trains_live_from_the_imported_store(shell: Shell, store: Path, objective: str) -> None:
    out = f"pt-{objective}"
    told = shell(
        "train", TARGET, f"store={store}", f"objective={objective}", *LITTLE, "--live", "--steps", "3",
        "--log-every", "1", "--out", out, "--device", "cpu",
    )  # fmt: skip
    assert told.code == 0, told.err
    losses = shell.losses(out)
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_store_of_the_training_gives_the_same_losses_and_there_are_no_pictures_without_frames(
    shell: Shell, store: Path
) -> None:
    words = (f"store={store}", *LITTLE, "--steps", "3", "--log-every", "1", "--device", "cpu")
    assert shell("train", TARGET, *words, "--live", "--out", "pt-live").code == 0
    told = shell("train", TARGET, *words, "--store", "pt-copy", "--out", "pt-stored")
    assert told.code == 0, told.err
    assert shell.losses("pt-stored") == shell.losses("pt-live")
    with pytest.raises(UsageError, match=r"was trained with .*\bstore, which foveated has not"):
        load(str(shell.folder / "pt-live"))


def test_empty_captions_are_refused_where_they_are_told(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(14):
        saved(tmp_path, i, frames=4, tokens=5, width=32, side=2, caption=" " if i else "a cat")
    assert shell("store", "import", str(tmp_path), "--out", "bare").code == 0
    read: list[Any] = []
    rows_of = fl.Store.rows
    monkeypatch.setattr(fl.Store, "rows", lambda *a, **o: read.append(a[2]) or rows_of(*a, **o))
    given = {"store": str(shell.folder / "bare"), "num_frames": 4}
    for objective in ("caption", "joint"):
        with pytest.raises(
            UsageError, match=r"13 of 14 rows .* have an empty caption.* import again"
        ) as told:
            workload(**given, objective=objective)
        assert told.value.problems[0] == "video_001"
        assert told.value.problems[10:] == ("… and 3 more",)
    assert read == [["caption"]] * 2, "no features"
    workload(**given, objective="reconstruct")


def test_numbers_of_frames_that_differ_are_told_and_what_to_do_about_it_works(
    shell: Shell, tmp_path: Path
) -> None:
    for i in range(8):
        saved(tmp_path, i, frames=7 if i == 3 else 8, tokens=10, width=64, side=2)
    assert shell("store", "import", str(tmp_path), "--out", "odd").code == 0
    for objective in ("caption", "joint"):
        with pytest.raises(
            UsageError, match=r"differs from file to file.*--ragged never --max-bad N"
        ) as told:
            workload(store=str(shell.folder / "odd"), num_frames=6, objective=objective)
        assert len(told.value.problems) == 1
    words = ("--out", "even", "--ragged", "never", "--max-bad", "1")
    assert shell("store", "import", str(tmp_path), *words).code == 0
    workload(store=str(shell.folder / "even"), num_frames=6)
    assert len(fl.Store.open(shell.folder / "even")) == 7


def test_few_rows_are_divided_so_that_no_split_is_empty(shell: Shell, tmp_path: Path) -> None:
    for i in range(4):
        saved(tmp_path, i, frames=8, tokens=10, width=64, side=2)
    assert shell("store", "import", str(tmp_path), "--out", "four").code == 0
    words = (f"store={shell.folder / 'four'}", *LITTLE, "--steps", "1", "--device", "cpu")
    for how, out in ((("--live",), "four-live"), (("--store", "four-copy"), "four-stored")):
        told = shell("train", TARGET, *words, *how, "--out", out)
        assert told.code == 0, told.err
        assert "clips 1," in told.out


def test_captions_that_are_cut_off_are_said_aloud(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload(store=str(store), num_frames=4, max_tokens=5)
    assert "20 of the first 20 captions fill max_tokens=5" in caplog.text


def test_what_does_not_fit_is_told(shell: Shell, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no field for features='feats'.*dino_features \[8, 10, 64\]"):
        workload(store=str(store), features="feats")
    with pytest.raises(UsageError, match="num_frames is 16, and 8 are stored"):
        workload(store=str(store))
    with pytest.raises(UsageError, match="num_frames is 1, and 8 are stored; at least 2"):
        workload(store=str(store), num_frames=1, objective="joint")
    with pytest.raises(UsageError, match=r"caption='latents' is float16 .*; expected text"):
        workload(store=str(store), num_frames=4, caption="latents")
    with pytest.raises(UsageError, match="with prefix=5 tokens before a square of patches"):
        workload(store=str(store), prefix=5, num_frames=4)
    with pytest.raises(UsageError, match=r"dino_features is \[8, 10, 64\]; expected \[8, 4, h, w\]"):
        workload(store=str(store), latents="dino_features", objective="joint", num_frames=4)
    told = shell("train", TARGET, f"store={tmp_path / 'nowhere'}", "--steps", "1", "--live")
    assert told.code == 1
    assert "nowhere" in told.err
    assert "frostline store import FOLDER --out stores/imported" in told.told
    assert "Traceback" not in told.err
