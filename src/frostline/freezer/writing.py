"""Blocks of computed samples into the store: new rows, or new fields of rows that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor

from frostline.errors import FieldError, FreezeStopped, StageFailed
from frostline.execution import Block
from frostline.execution.columns import Column
from frostline.freezer import schema
from frostline.freezer.plan import Plan, combined
from frostline.inspector.samples import MOST_TRIED
from frostline.store import Field, Store
from frostline.store.building import checked, encode_rows
from frostline.store.convert import Budget as Share
from frostline.store.extender import Extender
from frostline.store.writer import Writer

_SHOWN = 10
Write = Callable[[list[str], Block], None]


class Budget:
    """How many samples may fail; counts them, those of earlier runs too, and stops at too many."""

    def __init__(self, said: str | int, total: int, root: Path) -> None:
        parsed = Share.parse(said, total)
        share = parsed.said.endswith("%") and parsed.said != "0%"
        self.most = max(parsed.most, 1) if share else parsed.most  # 1% of 50 samples: one
        self._said, self._total, self._root = parsed.said, total, root
        self.reasons: list[str] = []
        self.failed = 0

    def tries(self, enough: int) -> int:
        """How many samples may be tried until `enough` work: when more of them fail, all of it stops."""
        return min(MOST_TRIED, self.most + enough)

    def add(self, failed: Mapping[str, StageFailed]) -> None:
        self.failed += len(failed)
        self.reasons += [f"{key!r}: {e.reason}" for key, e in failed.items()][: _SHOWN - len(self.reasons)]
        if failed and self.failed > self.most:
            more = f"\n  - … and {self.failed - _SHOWN:,} more" if self.failed > _SHOWN else ""
            raise FreezeStopped(
                f"Stopped: {self.failed:,} of {self._total:,} samples failed, {self.most:,} may "
                f"(max_bad={self._said}). What is whole is kept in {self._root}; repair the inputs or allow "
                f"more (--max-bad), and run the same again:\n  - " + "\n  - ".join(self.reasons) + more
            )


class Rows:
    """Puts blocks into a store, with the text that says what each row was computed from."""

    def __init__(
        self, plan: Plan, specs: Mapping[str, Field], text_of: Callable[[str], str], budget: Budget
    ) -> None:
        self._plan, self._specs, self._text_of, self._budget = plan, specs, text_of, budget
        self._mark = combined(plan)

    def into(self, writer: Writer | Extender) -> Write:
        names = list(writer.fields)

        def write(order: list[str], block: Block) -> None:
            block.columns = {name: self._whole(name, column) for name, column in block.columns.items()}
            self._refuse_misfits(block)
            self._budget.add(block.failed)
            columns = dict(block.columns)
            if self._plan.text_field in names:
                columns[self._plan.text_field] = [self._text_of(key) for key in block.keys]
            done, bad = 0, dict[str, StageFailed]()
            for failed, some in groupby(order, key=lambda key: key in block.failed):
                keys = [*some]
                if failed:
                    self._quarantine(writer, keys, block.failed)
                    continue
                part = slice(done, done + len(keys))
                bad |= self._put(writer, keys, {name: columns[name][part] for name in names})
                done += len(keys)
            if bad:
                block.leave_out(bad)

        return write

    def _put(
        self, writer: Writer | Extender, keys: list[str], values: dict[str, Column]
    ) -> dict[str, StageFailed]:
        """Rows into the store, but for those with a value that a codec cannot hold: quarantined, returned."""
        try:
            _put(writer, keys, values)
            return {}
        except FieldError:  # nothing was taken: for all rows, or none
            bad = _culprits(writer.fields, keys, values)
            if not bad:
                raise
        self._budget.add(bad)
        done = 0
        for failed, some in groupby(keys, key=lambda key: key in bad):
            run = [*some]
            part = slice(done, done + len(run))
            if failed:
                self._quarantine(writer, run, bad)
            else:
                _put(writer, run, {name: column[part] for name, column in values.items()})
            done += len(run)
        return bad

    def _quarantine(
        self, writer: Writer | Extender, keys: Sequence[str], failed: Mapping[str, StageFailed]
    ) -> None:
        for key in keys:
            reason = f"{failed[key].stage}: {failed[key].reason}"
            writer.quarantine(key, reason=reason, input=[self._text_of(key), self._mark])

    def _whole(self, name: str, column: Column) -> Column:
        """Values of the field's type and shape as one tensor: checked and encoded at once, not one by one."""
        spec = self._specs[name]
        if isinstance(column, Tensor) or spec.ragged or not column:
            return column
        return schema.as_one(spec, column)

    def _refuse_misfits(self, block: Block) -> None:
        """Samples whose values have another shape than their field fail, each with the reason."""
        bad: dict[str, StageFailed] = {}
        for name, column in block.columns.items():
            alike = isinstance(column, Tensor) and bool(block.keys)
            if alike and schema.misfit(name, self._specs[name], block.keys[0], column[0]) is None:
                continue
            for key, value in zip(block.keys, column, strict=True):
                why = schema.misfit(name, self._specs[name], key, value)
                if why is not None:
                    bad.setdefault(key, StageFailed(name, [key], why))
        if bad:
            block.leave_out(bad)


def delete_rows(root: Path, keys: Sequence[str]) -> None:
    with Store.append(root) as writer:
        for key in keys:
            if key in writer:
                writer.delete(key)


def retire_fields(root: Path, names: Sequence[str]) -> None:
    """Take fields out that are there; what is left is at least a text field."""
    there = [name for name in names if name in Store.open(root).fields]
    if there:
        Store.retire(root, *there)


def _culprits(
    fields: Mapping[str, Field], keys: Sequence[str], values: Mapping[str, Column]
) -> dict[str, StageFailed]:
    """The rows that cannot be encoded, each by itself, and why: NaN in int8, a value beyond float16."""
    bad: dict[str, StageFailed] = {}
    for i, key in enumerate(keys):
        for name, spec in fields.items():
            try:
                row = checked(name, spec, [key], values[name][i : i + 1])
                encode_rows(name, spec, [key], row, sample=0)
            except FieldError as e:
                bad.setdefault(key, StageFailed(name, [key], str(e)))
    return bad


def _put(writer: Writer | Extender, keys: list[str], values: dict[str, Column]) -> None:
    writer.append_batch(keys, values, take=True)  # they were computed for this, and nobody else has them
