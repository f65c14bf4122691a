"""Inputs, stages and disks that are not as they should be: clear errors, and nothing is lost.

Longer than most files here: the faults of one list, a short test each.
"""

from __future__ import annotations

import gc
import os
import shutil
import struct
import subprocess
import zlib
from collections import namedtuple
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import (
    ChunkTooLarge,
    FreezeStopped,
    NotFrozen,
    StageFailed,
    StoreError,
    StoreFull,
    UsageError,
)
from frostline.execution import Execution
from frostline.freezer import attempt
from frostline.freezer.attempt import Outcome
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.stages import Image
from frostline.store.manifest import commit_numbers

GOOD = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))


def freeze(data: fl.Pipeline, root: Path, **options: Any) -> tuple[Outcome, str]:
    """What came of it, and what was said."""
    said = StringIO()
    return run(data, root, Options(device="cpu", **options), Reporter(out=said)), said.getvalue()


def reasons(root: Path) -> dict[str, str]:
    return {e["key"]: e["reason"] for e in fl.Store.open(root).quarantine}


def numbers(n: int = 20) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(n)])


# --- files --------------------------------------------------------------------------------------------


def png(width: int = 8, height: int = 8, *, declared: tuple[int, int] | None = None) -> bytes:
    """A small picture; its header may declare another size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(range(y, y + 3 * width)) for y in range(height))
    head = struct.pack(">IIBBBBB", *(declared or (width, height)), 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    pytest.importorskip("PIL")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(GOOD):
        (folder / f"good-{i:02d}.png").write_bytes(png())
    return folder


def images(folder: Path) -> fl.Pipeline:
    return fl.Pipeline(fl.Source.files(folder / "*"), fl.Stage("image", Image(size=4), reads="path"))


FILES: dict[str, tuple[bytes, str]] = {
    "cut.png": (png()[:60], "damaged or cut off"),
    "empty.png": (b"", "it is empty (0 bytes)"),
    "huge.png": (png(declared=(40_000, 40_000)), "1600000000 pixels"),
    "large.png": (png(declared=(12_000, 12_000)), "Pillow refuses its size"),
    "page.png": (b"<html>not found</html>", "it begins with b'<html>"),
    "list.zip": (b"PK\x03\x04" + bytes(40), "no image in a known format"),
}


def test_files_that_are_no_pictures_are_quarantined_with_their_reasons(
    pictures: Path, tmp_path: Path
) -> None:
    for name, (data, _) in FILES.items():
        (pictures / name).write_bytes(data)
    (pictures / "nowhere.png").symlink_to(pictures / "not there")
    os.mkfifo(pictures / "pipe.png")
    (pictures / "folder.png").mkdir()
    root = tmp_path / "store"
    outcome, _ = freeze(images(pictures), root, max_bad=8)
    assert len(outcome.store) == GOOD
    found = reasons(root)
    assert {*found} == {*FILES, "nowhere.png", "pipe.png"}  # a folder is no file, and is not listed
    for name, (_, text) in FILES.items():
        assert text in found[name], found[name]
        assert name in found[name]
    assert "No such file" in found["nowhere.png"]
    assert "no regular file" in found["pipe.png"]
    assert all(reason.startswith("image: ") for reason in found.values())


def test_what_failed_is_not_tried_again_unless_it_changed_or_is_asked_for(
    pictures: Path, tmp_path: Path
) -> None:
    (pictures / "a-bad.png").write_bytes(b"no")
    (pictures / "b-bad.png").write_bytes(b"no")
    root = tmp_path / "store"
    freeze(images(pictures), root, max_bad=2)
    before = commit_numbers(root)
    again, said = freeze(images(pictures), root, max_bad=2)
    assert again.plan.idle
    assert "2 samples failed before and did not change" in said
    assert commit_numbers(root) == before
    (pictures / "b-bad.png").write_bytes(png())
    repaired, _ = freeze(images(pictures), root, max_bad=2)
    assert (repaired.stats.samples, repaired.stats.failed) == (1, 0)
    assert {*reasons(root)} == {"a-bad.png"}
    asked, _ = freeze(images(pictures), root, max_bad=2, retry_bad=True)
    assert (asked.stats.samples, asked.stats.failed) == (0, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(pictures: Path, tmp_path: Path) -> None:
    (pictures / "secret.png").write_bytes(png())
    (pictures / "secret.png").chmod(0)
    freeze(images(pictures), tmp_path / "store", max_bad=1)
    assert "Permission denied" in reasons(tmp_path / "store")["secret.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="write access"):
        freeze(fl.Pipeline(numbers(), fl.Stage("y", double, reads="x")), tmp_path / "shut" / "store")


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in (b"caf\xe9.png", "été.png".encode(), b"good.png"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(png())
    root = tmp_path / "store"
    freeze(images(folder), root)
    assert {*fl.Store.open(root).keys} == {"caf\\xe9.png", "été.png", "good.png"}
    assert freeze(images(folder), root)[0].plan.idle


def test_nothing_and_twice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No file matches"):
        freeze(images(tmp_path / "nothing"), tmp_path / "store")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"empty\.jsonl"):
        fl.Source.table(tmp_path / "empty.jsonl")
    none = fl.Pipeline(fl.Source.dataset([], fields=["x"]), fl.Stage("y", double, reads="x"))
    with pytest.raises(UsageError, match=r"list lists nothing: there is no sample"):
        freeze(none, tmp_path / "store")
    rows = [{"key": "a", "x": 1.0}, {"key": "b", "x": 2.0}, {"key": "a", "x": 3.0}]
    twice = fl.Pipeline(fl.Source.table(rows), fl.Stage("y", double, reads="x"))
    with pytest.raises(UsageError, match=r"1 keys .* more than once(.|\n)*'a'"):
        freeze(twice, tmp_path / "store")
    assert not (tmp_path / "store").exists()


# --- stages -------------------------------------------------------------------------------------------


def double(x: float) -> float:
    return 2 * x


def uneven(x: float) -> Tensor:
    return torch.zeros(4 if x in (11.0, 15.0) else 3)


def nothing_for_some(x: float) -> Any:
    return None if x == 17.0 else torch.zeros(2)


def text_for_some(x: float) -> Any:
    return "text" if x == 17.0 else torch.zeros(2)


def fails_for_some(x: float) -> float:
    if x in (3.0, 17.0):
        raise RuntimeError(f"cannot work\non {x}")
    return x


def fails(x: float) -> float:
    raise KeyError("gone")


def one(name: str, fn: Any, **options: Any) -> fl.Pipeline:
    return fl.Pipeline(numbers(), fl.Stage(name, fn, reads="x", **options))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_MOST_ROWS", 4)


@pytest.mark.usefixtures("small_shards")
def test_another_shape_for_some_samples(tmp_path: Path) -> None:
    """The first samples show one shape; those of another are named, and ragged is offered."""
    data = fl.Pipeline(numbers(50), fl.Stage("y", uneven_late, reads="x"))
    freeze(data, tmp_path / "s", max_bad=2)
    found = reasons(tmp_path / "s")
    assert {*found} == {"k41", "k45"}
    assert "'y' is [4], the first samples' is [3]" in found["k41"]
    assert "fl.Field((None,), 'float32')" in found["k41"]
    assert len(fl.Store.open(tmp_path / "s")) == 48


def uneven_late(x: float) -> Tensor:
    return torch.zeros(4 if x in (41.0, 45.0) else 3)


def test_another_shape_among_the_first_samples_is_ragged(tmp_path: Path) -> None:
    freeze(one("y", uneven), tmp_path / "s")
    store = fl.Store.open(tmp_path / "s")
    assert store.fields["y"].shape == (None,)
    assert len(store["k11"]["y"]) == 4


def two_unequal_dimensions(x: float) -> Tensor:
    return torch.zeros(2, 4 if x == 11.0 else 3)


def test_a_shape_that_cannot_be_ragged_names_both_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[2, 3\] for 'k0' but float32 \[2, 4\] for 'k11'.*Pad or resize"):
        freeze(one("y", two_unequal_dimensions), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


def net_on_uneven(x: Tensor) -> Tensor:
    return x.sum(1)


@pytest.mark.parametrize("early", [True, False])
def test_another_shape_before_a_stage_of_chunks(tmp_path: Path, early: bool) -> None:
    data = fl.Pipeline(
        numbers(50),
        fl.Stage("y", uneven if early else uneven_late, reads="x"),
        fl.Stage("z", net_on_uneven, reads="y", on="device", batch_size=4),
    )
    freeze(data, tmp_path / "s", max_bad=2)
    found = reasons(tmp_path / "s")
    assert {*found} == ({"k11", "k15"} if early else {"k41", "k45"})
    assert all("'y' is float32 [4], the first samples' is float32 [3]" in why for why in found.values())
    assert all("resize or pad in an earlier stage, or give batch_size=1" in w for w in found.values())


@pytest.mark.parametrize("fn", [nothing_for_some, text_for_some])
def test_another_type_for_some_samples(tmp_path: Path, fn: Any) -> None:
    """Among the first samples it is said before anything is written."""
    with pytest.raises(UsageError, match=r"'y' is .*(NoneType|str)"):
        freeze(one("y", fn), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


def nothing_late(x: float) -> Any:
    return None if x == 41.0 else torch.zeros(2)


def text_late(x: float) -> Any:
    return "text" if x == 41.0 else torch.zeros(2)


@pytest.mark.parametrize("fn", [nothing_late, text_late])
@pytest.mark.usefixtures("small_shards")
def test_another_type_for_a_late_sample(tmp_path: Path, fn: Any) -> None:
    data = fl.Pipeline(numbers(50), fl.Stage("y", fn, reads="x"))
    freeze(data, tmp_path / "s", max_bad=1)
    assert {*reasons(tmp_path / "s")} == {"k41"}
    assert "y" in reasons(tmp_path / "s")["k41"]
    assert len(fl.Store.open(tmp_path / "s")) == 49


def too_few(x: Tensor) -> Tensor:
    return x[:-1]


def of_no_type(x: Tensor) -> object:
    return object()


def pair(x: float) -> tuple[float, float, float]:
    return x, x, x


@pytest.mark.parametrize(
    ("fn", "options", "text"),
    [
        (too_few, {"batch_size": 4}, r"tensor \[3\] for 'y', called with 4 samples; expected a row for each"),
        (of_no_type, {"batch_size": 4}, r"it returned object for 'y'; expected a tensor \[4, …\]"),
        (pair, {"writes": ["y", "z"]}, r"it returned tuple of 3; expected 2 values: y, z"),
        (fails, {}, r"KeyError: 'gone'"),
        (fails, {"batch_size": 4}, r"KeyError: 'gone'"),
    ],
)
def test_stages_that_never_work(tmp_path: Path, fn: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises((StageFailed, FreezeStopped), match=text):
        freeze(one("y", fn, **options), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


def test_a_stage_that_fails_for_some(tmp_path: Path) -> None:
    freeze(one("y", fails_for_some), tmp_path / "s", max_bad=2)
    found = reasons(tmp_path / "s")
    assert found == {f"k{i}": f"y: RuntimeError: cannot work on {i}.0" for i in (3, 17)}
    assert len(fl.Store.open(tmp_path / "s")) == 18


def picky(x: Tensor) -> Tensor:
    if (x == 6).any():
        raise ValueError("a six")
    return x.double() * 3


def test_one_sample_of_a_chunk_fails(tmp_path: Path) -> None:
    freeze(one("y", picky, on="device", batch_size=4), tmp_path / "s", max_bad=1)
    store = fl.Store.open(tmp_path / "s")
    assert reasons(tmp_path / "s") == {"k6": "y: ValueError: a six"}
    assert {key: store[key]["y"].item() for key in store.keys} == {
        f"k{i}": 3.0 * i for i in range(20) if i != 6
    }


# --- too many -----------------------------------------------------------------------------------------


def fails_above(x: float) -> float:
    if x >= 4:
        raise ValueError(f"{x} is above")
    return x


@pytest.mark.parametrize(("max_bad", "most"), [(3, 3), ("10%", 2), (0, 0)])
def test_over_budget_stops_with_the_first_ten_reasons(tmp_path: Path, max_bad: str | int, most: int) -> None:
    with pytest.raises(FreezeStopped) as stopped:
        freeze(one("y", fails_above), tmp_path / "s", max_bad=max_bad)
    text = str(stopped.value)
    assert f"of 20 samples failed, {most} may (max_bad={max_bad})" in text
    shown = [line for line in text.splitlines() if "is above" in line]
    assert len(shown) == 10
    assert shown[0] == "  - 'k4': ValueError: 4.0 is above"
    outcome, _ = freeze(one("y", fails_above), tmp_path / "s", max_bad=16)
    assert len(outcome.store) == 4


def test_within_budget_as_a_share(tmp_path: Path) -> None:
    assert len(freeze(one("y", fails_above), tmp_path / "s", max_bad="80%")[0].store) == 4


def fails_below_50(x: float) -> float:
    if x < 50:
        raise ValueError(f"{x} is below")
    return x


def some_fail_below_50(x: Tensor) -> Tensor:
    if (x < 50).any():
        raise ValueError("some are below")
    return x * 2


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (fails_below_50, {}),
        (some_fail_below_50, {"on": "device", "batch_size": 4}),
        (some_fail_below_50, {"on": "device", "batch_size": 1}),
    ],
)
def test_the_first_quarter_fails_within_the_budget(tmp_path: Path, fn: Any, options: Any) -> None:
    data = fl.Pipeline(numbers(200), fl.Stage("y", fn, reads="x", **options))
    outcome, _ = freeze(data, tmp_path / "s", max_bad="50%")
    assert list(outcome.store.keys) == [f"k{i}" for i in range(50, 200)]
    assert {*reasons(tmp_path / "s")} == {f"k{i}" for i in range(50)}


@pytest.mark.parametrize("options", [{}, {"on": "device", "batch_size": 4}])
def test_none_of_the_first_samples_works(tmp_path: Path, options: Any) -> None:
    data = fl.Pipeline(numbers(20), fl.Stage("y", fails, reads="x", **options))
    with pytest.raises(FreezeStopped) as stopped:
        freeze(data, tmp_path / "s", max_bad="90%")
    lines = str(stopped.value).splitlines()
    assert lines[0] == "None of the first 20 samples could be computed; nothing was written:"
    assert lines[1] == "  - Stage 'y' failed for 'k0': KeyError: 'gone'"
    assert len(lines) == 11
    assert not (tmp_path / "s").exists()


# --- values that a store cannot hold ------------------------------------------------------------------


def sparse_17(x: float) -> Tensor:
    return torch.eye(3).to_sparse() if x == 17 else torch.eye(3)


def compressed_17(x: float) -> Tensor:
    return torch.eye(3).to_sparse_csr() if x == 17 else torch.eye(3)


def quantized_17(x: float) -> Tensor:
    return torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8) if x == 17 else torch.eye(3)


def meta_17(x: float) -> Tensor:
    return torch.eye(3, device="meta") if x == 17 else torch.eye(3)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (sparse_17, "'y' is a sparse tensor (sparse_coo), and a store holds dense ones. Return y.to_dense()"),
        (compressed_17, "'y' is a sparse tensor (sparse_csr)"),
        (quantized_17, "'y' is a quantized tensor (qint8). Return y.dequantize()"),
        (meta_17, "'y' has a shape but no values (device 'meta')"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
def test_a_tensor_that_no_field_can_hold(tmp_path: Path, fn: Any, text: str) -> None:
    freeze(one("y", fn), tmp_path / "s", max_bad=1, workers="threads")
    assert {*reasons(tmp_path / "s")} == {"k17"}
    assert text in reasons(tmp_path / "s")["k17"]
    assert len(fl.Store.open(tmp_path / "s")) == 19


def of_no_values(x: Tensor) -> Tensor:
    return torch.zeros(len(x), 2, device="meta")


def test_a_chunk_without_values(tmp_path: Path) -> None:
    with pytest.raises(FreezeStopped, match=r"None of the first 20 (.|\n)*no values \(device 'meta'\)"):
        freeze(one("y", of_no_values, on="device", batch_size=4), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


def complex_number(x: float) -> Tensor:
    return torch.tensor([complex(x, 1)])


def test_a_type_that_no_field_has(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"These fields cannot be stored:\n  - y: .*complex64.*dtype must be"
    ):
        freeze(one("y", complex_number), tmp_path / "s")


def nan_for_17(x: float) -> Tensor:
    return torch.full((8,), float("nan") if x == 17 else x)


def large_for_17(x: float) -> Tensor:
    return torch.full((8,), 1e6 if x == 17 else x)


CODECS = [
    (nan_for_17, "int8/token", "row 'k17' holds NaN or infinity, which int8 cannot. Use 'raw'"),
    (large_for_17, "float16", "row 'k17' holds values beyond that type's range"),
]


@pytest.mark.parametrize(("fn", "codec", "text"), CODECS)
def test_one_value_that_a_codec_cannot_hold(tmp_path: Path, fn: Any, codec: str, text: str) -> None:
    outcome, _ = freeze(one("y", fn), tmp_path / "s", codec={"y": codec}, max_bad=1)
    assert (outcome.stats.samples, outcome.stats.failed) == (19, 1)
    assert {*reasons(tmp_path / "s")} == {"k17"}
    assert text in reasons(tmp_path / "s")["k17"]
    assert outcome.store.check(deep=True).ok
    assert freeze(one("y", fn), tmp_path / "s", codec={"y": codec})[0].plan.idle


@pytest.mark.parametrize(("fn", "codec", "text"), CODECS)
def test_one_value_of_an_added_field_that_a_codec_cannot_hold(
    tmp_path: Path, fn: Any, codec: str, text: str
) -> None:
    first, second = fl.Stage("a", double, reads="x"), fl.Stage("y", fn, reads="x")
    freeze(fl.Pipeline(numbers(), first), tmp_path / "s")
    both = fl.Pipeline(numbers(), first, second, outputs=["a", "y"])
    outcome, _ = freeze(both, tmp_path / "s", codec={"y": codec}, max_bad=1)
    assert (len(outcome.store), len(outcome.store.with_fields(["y"]))) == (20, 19)
    (entry,) = outcome.store.quarantine
    assert (entry["key"], entry["field"]) == ("k17", "y")
    assert text in entry["reason"]
    assert freeze(both, tmp_path / "s", codec={"y": codec})[0].plan.idle


# --- memory -------------------------------------------------------------------------------------------


class Hungry(nn.Module):
    """Takes four samples at a time and no more."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return x * 2


class Insatiable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_makes_smaller_chunks_and_remembers_them(tmp_path: Path) -> None:
    data = one("y", Hungry(), on="device", batch_size=16)
    outcome, said = freeze(data, tmp_path / "s")
    assert len(outcome.store) == 20
    assert "ran out of memory with 16 samples a call" in said
    assert "Going on with 8: other chunks give other bits" in said
    assert "Going on with 4" in said
    parts = outcome.store.fields["y"].provenance["stages"]["y"]
    assert (parts["chunk"], parts["chunk_asked"]) == (4, 16)
    commits = commit_numbers(tmp_path / "s")
    again, said = freeze(data, tmp_path / "s")
    assert again.plan.idle
    assert "out of memory" not in said
    assert commit_numbers(tmp_path / "s") == commits
    small = freeze(one("y", Hungry(), on="device", batch_size=4), tmp_path / "small")[0].store
    assert small.fields["y"].fingerprint == outcome.store.fields["y"].fingerprint
    wide = freeze(one("y", Hungry(), on="device", batch_size=2), tmp_path / "other")[0].store
    assert wide.fields["y"].fingerprint != outcome.store.fields["y"].fingerprint


def test_not_even_one_sample_fits(tmp_path: Path) -> None:
    with pytest.raises(ChunkTooLarge, match=r"'y' ran out of memory with 1 samples a call"):
        freeze(one("y", Insatiable(), on="device", batch_size=4), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


# --- disk ---------------------------------------------------------------------------------------------


def wide(x: float) -> Tensor:
    return torch.full((256,), x)


def test_the_forecast_says_that_the_disk_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 4096, 4096))
    with pytest.raises(StoreFull, match=r"needs about .* GB for 20 samples, and 0\.00 GB are free .*--codec"):
        freeze(one("y", wide), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")
    dry, _ = freeze(one("y", wide), tmp_path / "s", dry_run=True)
    assert dry.forecast is not None
    assert dry.forecast.free == 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 200 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    gc.collect()  # errors hold frames, and these hold stores that are open
    subprocess.run(["umount", place], check=True)


@pytest.mark.usefixtures("small_shards")
def test_a_disk_that_is_really_full(
    tmp_path: Path, small_disk: Path, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fl.Pipeline(numbers(200), fl.Stage("y", wide, reads="x"))
    freeze(data, tmp_path / "whole")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:  # somebody else takes the room after the forecast
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 10**12))
        with pytest.raises(StoreFull):
            freeze(data, small_disk / "s")
    rows = len(fl.Store.open(small_disk / "s"))
    assert 0 < rows < 200
    assert fl.Store.open(small_disk / "s").check(deep=True).ok
    subprocess.run(["mount", "-o", "remount,size=300m", small_disk], check=True)
    freeze(data, small_disk / "s")
    assert faults.files_of(small_disk / "s") == faults.files_of(tmp_path / "whole")


# --- what was asked for -------------------------------------------------------------------------------


def flipped(x: float, rng: Any) -> float:
    return -x if rng.random() < 0.5 else x


def test_cuts_that_cannot_be(tmp_path: Path) -> None:
    data = fl.Pipeline(
        numbers(),
        fl.Stage("doubled", double, reads="x"),
        fl.Stage("flipped", flipped, reads="doubled", random=True),
    )
    with pytest.raises(UsageError, match=r"no field 'duobled'.*doubled"):
        freeze(data, tmp_path / "s", cut=("duobled",))
    with pytest.raises(NotFrozen, match=r"'flipped': stage 'flipped' is random"):
        freeze(data, tmp_path / "s", cut=("doubled", "flipped"))
    with pytest.raises(UsageError, match="name at least one field"):
        freeze(data, tmp_path / "s", cut=())
    assert not (tmp_path / "s").exists()
    assert [*freeze(data, tmp_path / "s")[0].plan.fields] == ["doubled"]


def test_a_limit_and_then_none(tmp_path: Path, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_MOST_ROWS", 4)
    assert len(freeze(one("y", double), tmp_path / "s", limit=8)[0].store) == 8
    assert freeze(one("y", double), tmp_path / "s", limit=8)[0].plan.idle
    outcome, _ = freeze(one("y", double), tmp_path / "s")
    assert (outcome.stats.samples, len(outcome.store)) == (12, 20)
    freeze(one("y", double), tmp_path / "whole")
    assert faults.files_of(tmp_path / "s") == faults.files_of(tmp_path / "whole")
    assert freeze(one("y", double), tmp_path / "s", limit=8)[0].plan.idle  # a limit takes nothing away


def test_a_store_that_something_else_made(store: Path, faults: Any, tmp_path: Path) -> None:
    before = faults.files_of(store)
    with pytest.raises(StoreError, match=r"did not make it. Give another folder"):
        freeze(one("y", double), store)
    assert faults.files_of(store) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"mine"):
        freeze(one("y", double), tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError):
        freeze(one("y", double), tmp_path / "file")


def test_options_that_cannot_be_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        freeze(one("y", double), tmp_path / "s", limit=0, max_hours=-1.0, workers="many", n_workers=0)
    assert len(refused.value.problems) == 4


def test_what_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"fl.freeze\(…\) was given int 3; expected a Pipeline or a Workload"
    ):
        fl.freeze(3, tmp_path / "s")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="given NoneType None"):
        fl.freeze(None, tmp_path / "s")  # type: ignore[arg-type]


def test_numbers_of_two_types_are_to_be_converted_and_not_resized() -> None:
    rows = fl.Source.table([{"key": f"k{i}", "x": i if i == 2 else float(i)} for i in range(4)])
    data = fl.Pipeline(rows, fl.Stage("y", net_on_uneven, reads="x", on="device", batch_size=4))
    execution = Execution(data, ["y"])
    why = execution.finish(execution.begin(range(4))).failed["k2"].reason
    assert "'x' is float32 [] for the others of the call, but 'k2' is int64 []" in why
    assert why.endswith("A call of several samples needs one type: convert in an earlier stage")
