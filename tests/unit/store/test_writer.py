from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import frostline as fl
from frostline.errors import (
    FieldError,
    KeyDuplicate,
    KeyMissing,
    StoreError,
    StoreFull,
    StoreLocked,
    UsageError,
)
from frostline.store import writer as writer_module
from frostline.store.building import Block
from frostline.store.manifest import commit_numbers

# a fork is what these tests are about; Python 3.12 warns when torch has threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

Row = Callable[[int], dict[str, Any]]
Files = Callable[[Path], dict[str, bytes]]
NUMBER = {"n": fl.Field((), "int64")}


def _numbers(path: Path) -> dict[str, int]:
    store = fl.Store.open(path)
    assert store.check(deep=True).ok
    return dict(zip(store.keys, store.column("n").tolist(), strict=True))


def test_append_and_append_batch_give_the_same_bytes(tmp_path: Path, files_of: Files) -> None:
    fields = {
        "x": fl.Field((4, 3), "float32", "int8/channel"),
        "y": fl.Field((6,), "float32", "float16"),
        "r": fl.Field((None, 3), "float32", "int8/token"),
        "t": fl.Field((), "str"),
    }
    make = torch.Generator().manual_seed(0)
    keys = [f"k{i}" for i in range(23)]
    x, y = torch.randn(23, 4, 3, generator=make), torch.randn(23, 6, generator=make)
    r = [torch.randn(i % 4, 3, generator=make) for i in range(23)]
    values: dict[str, Any] = {"x": x, "y": y, "r": r, "t": keys}
    for name, step in (("one", 1), ("three", 3), ("all", 23), ("five", 5)):
        with fl.Store.create(tmp_path / name, fields, rows_per_shard=5) as writer:
            for i in range(0, 23, step):
                some: dict[str, Any] = {k: v[i : i + step] for k, v in values.items()}
                if step == 1:
                    writer.append(keys[i], {k: v[0] for k, v in some.items()})
                else:
                    writer.append_batch(keys[i : i + step], some)
    want = files_of(tmp_path / "one")
    assert all(files_of(tmp_path / name) == want for name in ("three", "all", "five"))
    assert fl.Store.open(tmp_path / "one").check(deep=True).ok


def test_duplicates_are_refused_wherever_the_first_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), vars(writer_module)["write_shard"]

    def slow(*args: Any) -> Any:
        gate.wait(120)
        return real(*args)

    monkeypatch.setattr(writer_module, "write_shard", slow)
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        with pytest.raises(KeyDuplicate, match="'a' stands twice"):
            writer.append_batch(["a", "b", "a"], {"n": [1, 2, 3]})
        writer.append_batch(["a", "b", "c"], {"n": [1, 2, 3]})
        for key in ("c", "a"):  # in the shard under way; in the shard being written
            assert key in writer
            with pytest.raises(KeyDuplicate, match=f"'{key}' is in .* already"):
                writer.append(key, {"n": 5})
        gate.set()
        writer.commit()
        with pytest.raises(KeyDuplicate):
            writer.append_batch(["new", "c"], {"n": [1, 2]})
        assert "new" not in writer
    with fl.Store.append(tmp_path / "s") as writer, pytest.raises(KeyDuplicate):
        writer.append("a", {"n": 5})
    assert _numbers(tmp_path / "s") == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("flushed", [False, True])
def test_replace_and_delete_of_a_row_just_written(tmp_path: Path, flushed: bool) -> None:
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2 if flushed else 10) as writer:
        writer.append_batch(["a", "b"], {"n": [1, 2]})
        writer.replace("a", {"n": 10})
        writer.delete("b")
        assert "b" not in writer
        writer.append("b", {"n": 20})
        assert len(writer) == 2
        writer.delete("b")
        with pytest.raises(KeyMissing, match="Cannot delete 'b'"):
            writer.delete("b")
        with pytest.raises(KeyMissing):
            writer.replace("b", {"n": 1})
    assert _numbers(tmp_path / "s") == {"a": 10}


def test_a_deleted_key_can_come_again_while_its_deletion_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        writer.append_batch(["a", "b"], {"n": [1, 2]})
    gate, real = threading.Event(), vars(writer_module)["write_shard"]

    def slow(*args: Any) -> Any:
        gate.wait(120)
        return real(*args)

    with fl.Store.append(tmp_path / "s") as writer:
        monkeypatch.setattr(writer_module, "write_shard", slow)
        writer.delete("a")
        writer.append_batch(["c", "d"], {"n": [3, 4]})  # full: written in the background, with the tombstone
        assert "a" not in writer
        writer.append("a", {"n": 5})
        gate.set()
    assert _numbers(tmp_path / "s") == {"b": 2, "c": 3, "d": 4, "a": 5}


def test_a_row_that_cannot_be_encoded_leaves_no_trace(tmp_path: Path) -> None:
    fields = {
        "a": fl.Field((2,), "float32"),
        "b": fl.Field((2,), "float32", "int8/token"),
        "c": fl.Field((2,), "float32", "float16"),
    }
    good, nan, big = torch.ones(2), torch.tensor([math.nan, 1]), torch.tensor([1e9, 1])
    with fl.Store.create(tmp_path / "s", fields, rows_per_shard=3) as writer:
        writer.append("1", {"a": good, "b": good, "c": good})
        with pytest.raises(FieldError, match="NaN"):
            writer.append("bad", {"a": good, "b": nan, "c": good})
        with pytest.raises(FieldError, match="range"):
            writer.append("bad", {"a": good, "b": good, "c": big})
        many = {"a": torch.ones(6, 2), "b": torch.ones(6, 2), "c": torch.stack([good] * 5 + [big])}
        with pytest.raises(FieldError, match="range"):  # in the second shard of this batch
            writer.append_batch(list("uvwxyz"), many)
        writer.quarantine("bad", reason="cannot be encoded")
        writer.append("2", {"a": good * 2, "b": good * 2, "c": good * 2})
        with pytest.raises(FieldError):
            writer.replace("1", {"a": good, "b": nan, "c": good})
        assert "1" in writer
    store = fl.Store.open(tmp_path / "s")
    assert list(store) == ["1", "2"]
    assert [int(store[k]["b"][0]) for k in store] == [1, 2]
    assert store.check(deep=True).ok


def test_names_of_fields_are_compared(store: Path, row: Row) -> None:
    with fl.Store.append(store) as writer:
        with pytest.raises(
            FieldError, match=r"no value for caption, tokens; no field called z\. The store has x"
        ):
            writer.append("new", {"x": torch.zeros(3), "z": 1})
        assert writer.fields == fl.Store.open(store).fields


@pytest.mark.parametrize("key", [7, None, b"a", "\ud800"])
def test_keys_are_text(store: Path, row: Row, key: Any) -> None:
    with fl.Store.append(store) as writer, pytest.raises(UsageError, match=r"[Kk]ey"):
        writer.append(key, row(1))


def test_a_closed_writer_says_so(store: Path, row: Row) -> None:
    writer = fl.Store.append(store)
    writer.close()
    writer.close()
    calls: list[Callable[[], object]] = [
        lambda: writer.append("new", row(1)),
        lambda: writer.append_batch(["new"], {}),
        lambda: writer.delete("k1"),
        lambda: writer.replace("k1", row(1)),
        lambda: writer.quarantine("new", reason="x"),
        writer.commit,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    assert len(fl.Store.open(store)) == 10


def test_an_error_keeps_only_whole_shards_and_resuming_gives_the_same_bytes(
    tmp_path: Path, row: Row, make: Any, files_of: Files
) -> None:
    whole, broken = make(tmp_path / "whole", 10), tmp_path / "broken"
    fields = fl.Store.open(whole).fields
    with (
        contextlib.suppress(ZeroDivisionError),
        fl.Store.create(broken, fields, rows_per_shard=4) as writer,
    ):
        for i in range(7):
            writer.append(f"k{i}", row(i))
        raise ZeroDivisionError
    assert len(fl.Store.open(broken)) == 4
    with fl.Store.create(broken, fields, rows_per_shard=4, resume=True) as writer:
        assert writer.resumed_rows == 4
        for i in range(10):
            if f"k{i}" not in writer:
                writer.append(f"k{i}", row(i))
    assert files_of(broken) == files_of(whole)


def test_quarantine_is_counted_settled_and_released(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with fl.Store.create(path, NUMBER, rows_per_shard=4) as writer:
        writer.append("a", {"n": 1})
        writer.quarantine("bad", reason=OSError("cut short"), input=Path("bad.mp4"))
        writer.quarantine("worse", reason="no")
        assert [q["key"] for q in writer.quarantined] == ["bad", "worse"]
        assert [key for key in ("a", "bad", "worse", "new") if writer.settled(key)] == ["a", "bad", "worse"]
        assert "bad" not in writer
        with pytest.raises(KeyDuplicate):
            writer.quarantine("a", reason="is in")
    store = fl.Store.open(path)
    assert store.quarantine[0] == {"key": "bad", "reason": "cut short", "input": "bad.mp4"}
    assert (store.commit.quarantined, len(store)) == (2, 1)
    with fl.Store.append(path) as writer:
        assert writer.settled("bad")
        writer.append("bad", {"n": 2})
        writer.quarantine("again", reason="1")
        writer.append("again", {"n": 3})
        assert [q["key"] for q in writer.quarantined] == ["worse"] or [
            q["key"] for q in writer.quarantined
        ] == ["bad", "worse"]
    assert [q["key"] for q in fl.Store.open(path).quarantine] == ["worse"]
    with fl.Store.append(path) as writer:
        writer.delete("bad")  # it did succeed; deleting it is no failure
        writer.quarantine("worse", reason="still no")
    store = fl.Store.open(path)
    assert [(q["key"], q["reason"]) for q in store.quarantine] == [("worse", "still no")]
    assert store.commit.quarantined == 1


def test_a_shard_of_failures_only_and_an_empty_commit(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        for i in range(4):
            writer.quarantine(str(i), reason="no")
        writer.append("a", {"n": 1})
        writer.commit()
        before = commit_numbers(tmp_path / "s")
        writer.commit()
        assert commit_numbers(tmp_path / "s") == before
    assert _numbers(tmp_path / "s") == {"a": 1}
    assert fl.Store.open(tmp_path / "s").commit.quarantined == 4


def test_an_error_in_the_background_reaches_the_caller_and_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise StoreFull("No room")

    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        writer.append_batch(["a", "b"], {"n": [1, 2]})
    writer = fl.Store.append(tmp_path / "s")
    monkeypatch.setattr(writer_module, "write_shard", full)
    with pytest.raises(StoreFull):
        writer.append_batch(list("cdefghijklmn"), {"n": [*range(12)]})  # more shards than go at once
    monkeypatch.undo()
    with pytest.raises(UsageError, match="closed"):
        writer.append("z", {"n": 1})
    with fl.Store.append(tmp_path / "s") as writer:
        writer.append("c", {"n": 3})
    assert _numbers(tmp_path / "s") == {"a": 1, "b": 2, "c": 3}


def test_a_fork_cannot_write_and_its_end_does_not_commit(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=10) as writer:
        writer.append("a", {"n": 1})
        child = os.fork()
        if child == 0:
            try:
                writer.append("b", {"n": 2})
            except UsageError:
                writer.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert commit_numbers(tmp_path / "s") == [1]
        writer.append("c", {"n": 3})
    assert _numbers(tmp_path / "s") == {"a": 1, "c": 3}


def test_what_was_given_may_be_overwritten_while_it_is_being_written(tmp_path: Path) -> None:
    x = torch.zeros(2, 3)
    with fl.Store.create(tmp_path / "s", {"x": fl.Field((3,), "float32")}, rows_per_shard=2) as writer:
        for i in range(6):
            x.fill_(i)
            writer.append_batch([f"{i}a", f"{i}b"], {"x": x})
    assert fl.Store.open(tmp_path / "s").rows(list(range(12)))["x"][:, 0].tolist() == [
        i // 2 for i in range(12)
    ]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6))
def test_any_batch_sizes_over_any_shard_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rows_per_shard: int
) -> None:
    path = tmp_path_factory.mktemp("w") / "s"
    n = 0
    with fl.Store.create(path, NUMBER, rows_per_shard=rows_per_shard) as writer:
        for size in sizes:
            writer.append_batch([str(n + i) for i in range(size)], {"n": torch.arange(n, n + size)})
            n += size
            assert len(writer) == n
    assert _numbers(path) == {str(i): i for i in range(n)}
    assert fl.Store.open(path).commit.next_shard == -(-n // rows_per_shard)


def test_a_writer_that_is_never_closed_says_what_is_lost_and_frees_the_store(tmp_path: Path) -> None:
    writer = fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")})
    writer.append("a", {"n": 1})
    with pytest.raises(StoreLocked, match="this process"):
        fl.Store.append(tmp_path / "s")
    holder = [writer]
    del writer
    with pytest.warns(ResourceWarning, match="1 rows that it was given are not in the store"):
        holder.clear()
    gc.collect()
    with fl.Store.append(tmp_path / "s") as again:
        assert "a" not in again


def test_an_interrupt_in_the_middle_of_a_row_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C that the caller catches: what is committed afterwards must be readable, in every field."""
    fields = {"n": fl.Field((), "int64"), "v": fl.Field((2,), "float32", "int8"), "t": fl.Field((), "str")}
    rng, taken, left = random.Random(5), [], [0]
    add = Block.add

    def interrupted(block: Block, rows: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and rng.random() < 0.5:
            raise KeyboardInterrupt
        add(block, rows)
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Block, "add", interrupted)
    with fl.Store.create(tmp_path / "s", fields, rows_per_shard=7) as writer:
        for i in range(60):
            left[0] = rng.randint(1, 2 * len(fields))
            with contextlib.suppress(KeyboardInterrupt):
                writer.append(f"k{i}", {"n": i, "v": torch.full((2,), float(i)), "t": str(i)})
                taken.append(i)
    store = fl.Store.open(tmp_path / "s", check="read")
    assert 0 < len(taken) < 60
    assert list(store.keys) == [f"k{i}" for i in taken]
    rows = store.rows(range(len(store)))
    assert rows["n"].tolist() == taken == [int(t) for t in rows["t"]]
    assert rows["v"][:, 0].tolist() == pytest.approx(taken)
    assert store.check(deep=True).ok


@pytest.mark.parametrize("again", [False, True], ids=["moved", "moved and made anew"])
def test_nothing_is_written_where_the_store_no_longer_is(
    store: Path, make: Callable[..., Path], row: Row, files_of: Files, again: bool
) -> None:
    writer = fl.Store.append(store)
    writer.append("new", row(1))
    store.rename(store.with_name("aside"))
    if again:
        make(store, 9)
    before = files_of(store)
    with pytest.raises(StoreError, match="moved, deleted or made anew"):
        writer.close()
    assert files_of(store) == before
    assert "new" not in fl.Store.open(store.with_name("aside"))


@pytest.mark.parametrize("key", [7, None, b"a"])
def test_only_text_is_deleted_or_replaced(store: Path, row: Row, key: Any) -> None:
    with fl.Store.append(store) as writer:
        with pytest.raises(UsageError, match="A key is a string"):
            writer.delete(key)
        with pytest.raises(UsageError, match="A key is a string"):
            writer.replace(key, row(1))


def test_values_without_names_are_refused(store: Path) -> None:
    with fl.Store.append(store) as writer:
        for write in (writer.append, writer.replace):
            with pytest.raises(
                FieldError, match=r"expected \{field: value\} for x, caption, tokens, got Tensor"
            ):
                write("k1", torch.zeros(3))  # type: ignore[arg-type]
        with pytest.raises(FieldError, match="got NoneType"):
            writer.append_batch(["new"], None)  # type: ignore[arg-type]
