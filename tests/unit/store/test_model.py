"""A store against a plain dict: whatever is done to it, in any order, it holds what the dict holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import frostline as fl
from frostline.errors import KeyDuplicate, KeyMissing
from frostline.store.gc import collect

KEYS = st.sampled_from([*"abcdefghijkl", "", "ключ", "new\nline"])
X, Y = fl.Field((2,), "float32"), fl.Field((None,), "int64")


class StoreModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "s"
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.failed_y: set[str] = set()
        self.has_y = False
        self.n = 0
        self.held: list[tuple[fl.Store, dict[str, dict[str, Any]]]] = []

    @initialize(rows_per_shard=st.integers(1, 4))
    def create(self, rows_per_shard: int) -> None:
        self.writer = fl.Store.create(self.root, {"x": X}, rows_per_shard=rows_per_shard)

    def _value(self) -> dict[str, Any]:
        self.n += 1
        row: dict[str, Any] = {"x": [float(self.n), -1.0]}
        return {**row, "y": [self.n] * (self.n % 3)} if self.has_y else row

    def _given(self, row: dict[str, Any]) -> dict[str, Any]:
        return {k: torch.tensor(v, dtype=torch.float32 if k == "x" else torch.int64) for k, v in row.items()}

    @rule(key=KEYS)
    def append(self, key: str) -> None:
        row = self._value()
        if key in self.rows:
            with pytest.raises(KeyDuplicate):
                self.writer.append(key, self._given(row))
            return
        self.writer.append(key, self._given(row))
        self.rows[key] = row
        self.failed.pop(key, None)

    @rule(keys=st.lists(KEYS, max_size=6))
    def append_batch(self, keys: list[str]) -> None:
        rows = [self._value() for _ in keys]
        names = ["x", "y"] if self.has_y else ["x"]
        values = {name: [self._given(row)[name] for row in rows] for name in names}
        if len(set(keys)) < len(keys) or any(key in self.rows for key in keys):
            with pytest.raises(KeyDuplicate):
                self.writer.append_batch(keys, values)
            return
        self.writer.append_batch(keys, values)
        self.rows.update(zip(keys, rows, strict=True))
        for key in keys:
            self.failed.pop(key, None)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        if key not in self.rows:
            with pytest.raises(KeyMissing):
                self.writer.delete(key)
            return
        self.writer.delete(key)
        del self.rows[key]
        self.failed_y.discard(key)

    @rule(key=KEYS)
    def replace(self, key: str) -> None:
        row = self._value()
        if key not in self.rows:
            with pytest.raises(KeyMissing):
                self.writer.replace(key, self._given(row))
            return
        self.writer.replace(key, self._given(row))
        del self.rows[key]
        self.rows[key] = row
        self.failed_y.discard(key)

    @rule(key=KEYS, reason=st.sampled_from(["one", "two"]))
    def quarantine(self, key: str, reason: str) -> None:
        if key in self.rows:
            with pytest.raises(KeyDuplicate):
                self.writer.quarantine(key, reason=reason)
            return
        self.writer.quarantine(key, reason=reason)
        self.failed[key] = reason

    @rule()
    def commit(self) -> None:
        self.writer.commit()
        self._compare(fl.Store.open(self.root), self.rows)

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.writer = fl.Store.append(self.root)

    @rule()
    def hold_a_snapshot(self) -> None:
        self.writer.commit()
        self.held.append((fl.Store.open(self.root), {k: dict(v) for k, v in self.rows.items()}))

    @precondition(lambda self: not self.has_y)
    @rule(bad=st.sets(KEYS))
    def extend(self, bad: set[str]) -> None:
        self.writer.close()
        with fl.Store.extend(self.root, {"y": Y}) as extender:
            assert list(extender.pending) == list(self.rows)
            for key in list(extender.pending):
                if key in bad:
                    extender.quarantine(key, reason="no y")
                    self.failed_y.add(key)
                else:
                    self.n += 1
                    self.rows[key] = {**self.rows[key], "y": [self.n] * (self.n % 3)}
                    extender.append(key, {"y": torch.tensor(self.rows[key]["y"], dtype=torch.int64)})
        self.has_y = True
        self.writer = fl.Store.append(self.root)

    @precondition(lambda self: self.has_y)
    @rule()
    def retire(self) -> None:
        self.writer.close()
        fl.Store.retire(self.root, "y")
        self.has_y = False
        self.failed_y.clear()
        self.rows = {key: {"x": row["x"]} for key, row in self.rows.items()}
        self.writer = fl.Store.append(self.root)

    @rule(min_dead=st.sampled_from([0.01, 0.5, 2.0]))
    def collect(self, min_dead: float) -> None:
        self.writer.close()
        collect(self.root, min_dead=min_dead)
        self.writer = fl.Store.append(self.root)

    @invariant()
    def writer_knows_what_is_in(self) -> None:
        if hasattr(self, "writer"):
            assert len(self.writer) == len(self.rows)
            assert all(key in self.writer and self.writer.settled(key) for key in self.rows)
            assert all(self.writer.settled(key) and key not in self.writer for key in self.failed)

    def _compare(self, store: fl.Store, rows: dict[str, dict[str, Any]]) -> None:
        assert list(store) == list(rows)
        assert store.rows(list(rows), ["x"])["x"].tolist() == [row["x"] for row in rows.values()]
        if "y" in store.fields:
            some = store.with_fields(["y"])
            assert list(some) == [key for key, row in rows.items() if "y" in row]
            assert [y.tolist() for y in some.rows(list(some.keys), ["y"])["y"]] == [
                rows[key]["y"] for key in some
            ]

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            store = fl.Store.open(self.root, check="read")
            self._compare(store, self.rows)
            for old, rows in self.held:
                self._compare(old, rows)
            found = {(q["key"], q.get("field")) for q in store.quarantine}
            assert found == {*((key, None) for key in self.failed), *((key, "y") for key in self.failed_y)}
            assert store.commit.quarantined == len(found)
            result = store.check(deep=True)
            assert result.ok, result.problems
        shutil.rmtree(self.folder)


StoreModel.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestStoreModel = StoreModel.TestCase
