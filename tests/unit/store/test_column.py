from __future__ import annotations

import os
import pickle  # noqa: TID251 – to see that a reader refuses to travel
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import FieldError, StoreCorrupt, UsageError
from frostline.store.column import ColumnReader

# a fork is what these tests are about; Python 3.12 warns when torch has threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def _reader(store: Path, name: str, **options: Any) -> ColumnReader:
    found = fl.Store.open(store)._snapshot
    column = found.commit.column(name)
    assert column is not None
    return ColumnReader(found, column, **options)


@pytest.mark.parametrize("direct", [False, True])
def test_rows_are_copied_in_any_order_and_more_than_once(store: Path, direct: bool) -> None:
    reader = _reader(store, "x", check="read")
    rows = np.array([9, 0, 5, 5, 3])
    (part,) = reader.spec.parts
    out = np.empty((5, part.width), np.uint8)
    reader.copy(part, *reader.locate(rows), out, direct=direct)
    assert out.view(np.float32)[:, 0].tolist() == [9, 0, 5, 5, 3]


@pytest.mark.parametrize("direct", [False, True])
def test_ragged_rows_are_laid_end_to_end(store: Path, direct: bool) -> None:
    reader = _reader(store, "tokens", check="read")
    shards, places = reader.locate(np.array([3, 4, 1, 7]))
    lengths = reader.lengths(shards, places)
    assert lengths.tolist() == [3, 0, 1, 3]
    (part,) = reader.spec.parts
    out = np.empty((7, part.width), np.uint8)
    reader.copy_ragged(part, shards, places, out, np.array([0, 3, 3, 4, 7]), direct=direct)
    assert out.view(np.int16)[:, 0].tolist() == [3, 3, 3, 1, 7, 7, 7]


def test_a_row_without_the_field_is_named(store: Path) -> None:
    with fl.Store.extend(store, {"y": fl.Field((), "int64")}) as extender:
        for key in ("k4", "k5", "k6", "k7"):
            extender.append(key, {"y": 1})
    reader = _reader(store, "y")
    assert reader.present(np.array([0, 4, 7, 9, 10**9])).tolist() == [False, True, True, False, False]
    with pytest.raises(
        FieldError, match=r"'y' is missing in 2 of the rows asked for, among them \['k0', 'k9'\]"
    ):
        reader.locate(np.array([0, 5, 9]))


def test_few_open_files_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}, rows_per_shard=1) as writer:
        writer.append_batch([str(i) for i in range(60)], {"n": np.arange(60)})
    reader = _reader(tmp_path / "s", "n")
    monkeypatch.setattr(ColumnReader, "most_open", 4)
    (part,) = reader.spec.parts
    wrong: list[int] = []

    def read(seed: int) -> None:
        rows = np.random.default_rng(seed).permutation(60)
        out = np.empty((60, 8), np.uint8)
        reader.copy(part, *reader.locate(rows), out)
        if out.view(np.int64)[:, 0].tolist() != rows.tolist():
            wrong.append(seed)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(reader._open) <= 4


MANY_FIELDS = """
import resource, sys
import numpy as np
import frostline as fl

fields = {f"f{i}": fl.Field((), "int64") for i in range(20)}
with fl.Store.create(sys.argv[1], fields, rows_per_shard=1) as writer:
    writer.append_batch([str(i) for i in range(30)], {name: np.arange(30) for name in fields})
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
batch = fl.Store.open(sys.argv[1]).rows(np.arange(30))
assert all(batch[name].tolist() == list(range(30)) for name in fields)
"""


def test_many_fields_and_shards_stay_within_the_limit_of_open_files(tmp_path: Path) -> None:
    """In a process of its own: what other tests hold open counts against the limit too."""
    subprocess.run([sys.executable, "-c", MANY_FIELDS, str(tmp_path / "s")], check=True, timeout=500)


def test_descriptors_are_given_back(store: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = fl.Store.open(store)
    found.rows(list(range(10)))
    assert len(os.listdir("/proc/self/fd")) > before
    del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_works_after_a_fork_in_the_middle_of_a_read(store: Path) -> None:
    reader = _reader(store, "x")
    reader._lock.acquire()  # as a thread of the parent might hold it
    child = os.fork()
    if child == 0:
        os._exit(0 if len(reader.shard(0)) == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_reader_does_not_travel_between_processes(store: Path) -> None:
    with pytest.raises(TypeError, match="send the Store instead"):
        pickle.dumps(_reader(store, "x"))


def test_a_file_cut_short_while_open_is_noticed_by_preadv(store: Path) -> None:
    reader = _reader(store, "x")
    (part,) = reader.spec.parts
    shards, places = reader.locate(np.array([3]))
    reader.shard(0)
    place = next((store / "data").glob("*-x/00000000.*"))
    with open(place, "rb+") as file:
        file.truncate(place.stat().st_size - 6)
    with pytest.raises(StoreCorrupt, match="cut short while open"):
        reader.copy(part, shards, places, np.empty((1, part.width), np.uint8), direct=True)


def test_a_field_that_begins_late_is_read_in_one_go(tmp_path: Path) -> None:
    """Small rows of many shards are mapped side by side; a later field may lack the first files."""
    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}, rows_per_shard=512) as writer:
        writer.append_batch([str(i) for i in range(1536)], {"n": np.arange(1536)})
    with fl.Store.extend(tmp_path / "s", {"y": fl.Field((4,), "int16")}) as extender:
        for key in list(extender.pending):
            if int(key) < 1024:
                extender.quarantine(key, reason="too early")
            else:
                extender.append(key, {"y": np.full(4, int(key), np.int16)})
    late = fl.Store.open(tmp_path / "s").with_fields(["y"])
    assert len(late) == 512
    assert late.rows(np.arange(512), ["y"])["y"][:, 0].tolist() == list(range(1024, 1536))


def test_a_text_that_does_not_decode_names_its_key(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"t": fl.Field((), "str")}) as writer:
        writer.append("good", {"t": "fine"})
        writer.append("bad", {"t": "broken"})
    file = next((tmp_path / "s" / "data").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(StoreCorrupt, match=r"Key 'bad', field 't', shard 0"):
        fl.Store.open(tmp_path / "s", check="open").rows(["good", "bad"])


@pytest.mark.parametrize("direct", [False, True])
def test_rows_that_lie_together_are_copied_together(tmp_path: Path, direct: bool) -> None:
    root = tmp_path / "wide"
    fields = {"x": fl.Field((8192,), "float32")}  # 32 KB a row: copied by runs
    with fl.Store.create(root, fields, rows_per_shard=4) as writer:
        for i in range(11):
            writer.append(f"k{i}", {"x": torch.full((8192,), float(i))})
    reader = _reader(root, "x")
    (part,) = reader.spec.parts
    for rows in ([0, 1, 2, 3, 4, 5, 6], [3, 4, 6, 7, 8], [5, 4, 3], [10], []):
        out = np.empty((len(rows), part.width), np.uint8)
        reader.copy(part, *reader.locate(np.array(rows, np.int64)), out, direct=direct)
        assert out.view(np.float32)[:, 0].tolist() == rows
        assert out.view(np.float32)[:, -1].tolist() == rows


def test_a_damaged_file_is_refused_before_its_first_row_is_read(store: Path) -> None:
    whole = fl.Store.open(store, check="files")
    assert whole.rows([0, 9])["x"][:, 0].tolist() == [0, 9]
    victim = sorted((store / "data").glob("*x*/*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert len(fl.Store.open(store, check="open").rows([0])["x"])  # structure is whole
    with pytest.raises(StoreCorrupt, match="does not have its checksum"):
        fl.Store.open(store).rows([0])
    with pytest.raises(UsageError, match="'files'"):
        fl.Store.open(store, check="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 4_000, 20_000])
@pytest.mark.parametrize("at_once", [1 << 30, 7_001], ids=["whole", "in short reads"])
def test_lines_of_a_row_come_in_any_order_and_in_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, at_once: int
) -> None:
    """Lines side by side, or with little between them, come in one read; a read may end anywhere."""
    rng = np.random.default_rng()
    n_lines = 40 if width > 1 else 3_000
    data = rng.integers(0, 256, (3, n_lines, width), np.uint8)
    with fl.Store.create(tmp_path / "s", {"x": fl.Field((n_lines, width), "uint8")}) as writer:
        writer.append_batch(["a", "b", "c"], {"x": data})
    reader = _reader(tmp_path / "s", "x", check="open")  # comparing checksums reads as well
    (part,) = reader.spec.parts
    sorted_ones = np.sort(rng.permuted(np.tile(np.arange(n_lines), (3, 1)), axis=1)[:, : n_lines // 2])
    calls = []
    real = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        calls.append(len(buffers))
        return real(fd, [buffers[0][:at_once]] if at_once < 1 << 30 else buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    for chosen in (sorted_ones, sorted_ones[:, ::-1], rng.integers(0, n_lines, (3, 7)), sorted_ones[:, :0]):
        out = np.zeros((3, chosen.shape[1] * width), np.uint8)
        calls.clear()
        reader.copy(part, *reader.locate(np.arange(3)), out, chosen=chosen, direct=True)
        assert np.array_equal(out.reshape(3, -1, width), np.take_along_axis(data, chosen[..., None], axis=1))
        if chosen is sorted_ones and at_once == 1 << 30:
            stretches = (np.diff(chosen) > 1).sum() + 3
            most = {1: 3 * (-(-chosen.shape[1] // 256)), 4_000: stretches // 2 + 3, 20_000: stretches}[width]
            assert len(calls) <= most
            assert max(calls) <= 1_024, "more than one call takes"


@pytest.mark.parametrize("tier", ["mmap", "disk"])
def test_ragged_items_that_were_picked(tmp_path: Path, tier: str) -> None:
    rng = np.random.default_rng()
    rows = [rng.integers(0, 99, (int(n), 300), np.int64) for n in rng.integers(6, 30, 12)]
    with fl.Store.create(tmp_path / "s", {"x": fl.Field((None, 300), "int64")}, rows_per_shard=5) as writer:
        for i, row in enumerate(rows):
            writer.append(f"k{i}", {"x": row})
    pick = fl.Pick("x", n=6)
    feed = fl.Feed(fl.Store.open(tmp_path / "s"), 4, fields=[pick], tier=tier, order=fl.Sequential())
    got = torch.cat([batch["x"] for batch in feed])
    chosen = pick.indices(0, 0, [f"k{i}" for i in range(12)], [len(r) for r in rows], True)
    assert all(np.array_equal(got[i], rows[i][chosen[i]]) for i in range(12))
