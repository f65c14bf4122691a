"""Reading that says which key failed: a shard's error does not tell what to write again or leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from frostline.errors import FeedError, StoreError
from frostline.store import Table
from frostline.store.read import Read, Source
from frostline.store.runs import Array
from frostline.store.verification import Verification


def planned(table: Table, positions: Array, sources: dict[str, Source]) -> Read:
    """The read of these rows; a shard that cannot be opened is a FeedError with the first key it holds."""
    try:
        return Read(sources, len(positions))
    except (StoreError, OSError) as error:
        raise _unopened(table, positions, sources, error) from error


def _unopened(table: Table, positions: Array, sources: dict[str, Source], error: Exception) -> FeedError:
    for i in range(len(positions)):
        try:
            Read({n: replace(s, rows=s.rows[i : i + 1], chosen=None) for n, s in sources.items()}, 1)
        except (StoreError, OSError) as e:
            return FeedError(f"Reading key {table.keys.at(positions[i : i + 1])[0]!r} failed: {e}")
    return FeedError(f"Reading failed, and not when tried again: {error}")


def settled(verifications: Iterable[Verification]) -> None:
    """Wait for the comparison of files with their checksums; FeedError with the first that is damaged."""
    for verification in verifications:
        try:
            verification.settle()
        except StoreError as error:
            raise FeedError(f"Rows came from a damaged file: {error}") from error


def lengths(table: Table, name: str) -> Array:
    """The lengths of a ragged field's rows; errors as in `planned`."""
    try:
        return table.lengths(name)
    except (StoreError, OSError) as error:
        positions = np.arange(len(table))
        raise _unopened(table, positions, table.sources([name], positions), error) from error


def guarded(table: Table, positions: Array, task: Any) -> Callable[[], None]:
    """The task of a read; where it fails, a FeedError with the first key that does."""

    def run() -> None:
        try:
            task()
        except Exception as error:
            raise _explain(table, positions, task, error) from error

    return run


def _explain(table: Table, positions: Array, task: Any, error: Exception) -> FeedError:
    field = task.piece.source.reader.column.name
    for i in range(task.lo, task.hi):
        try:
            task.piece.fill(task.buffer, i, i + 1)
        except Exception as e:  # noqa: BLE001 - whatever it is, it becomes the message
            key = table.keys.at(positions[i : i + 1])[0]
            return FeedError(
                f"Reading key {key!r} (field {field!r}, shard {int(task.piece.shards[i])}) failed: {e}"
            )
    return FeedError(f"Reading rows ({task.where}) failed, and not when tried again: {error}")
