"""Few-shot episodes: n_way classes, n_shot support rows and n_query query rows of each.

Episode j of an epoch is a function of (seed, epoch, j) and of the classes of the tables. Batch i holds
episodes [i·batch_size, (i+1)·batch_size), so another batch size or number of ranks sees the same episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from frostline import keyed
from frostline.errors import UsageError
from frostline.feed.order.base import (
    Rows,
    Table,
    check_batch,
    check_batch_size,
    count_batches,
    not_named,
    not_whole,
)


@dataclass(frozen=True)
class Episodes:
    """Batches of episodes: {support: rows [E, n_way·n_shot], query: rows [E, n_way·n_query]}, class by class.

    `Episodes(by="class", n_way=5, n_shot=1, n_query=15)`: by is a field of numbers or strings. The feed's
    batch_size counts episodes. Over one store both parts come from it and no row is in both; over two,
    named as `support` and `query` say, each part comes from its own. Classes are in random order in an
    episode.
    """

    by: str = "class"
    _: KW_ONLY
    n_way: int
    n_shot: int
    n_query: int
    n_episodes: int | None = None
    """Of an epoch; None: as many as use up the rows of the query table once."""
    seed: int = 0
    support: str = "support"
    query: str = "query"
    """The names of the two parts in a batch and, over two stores, of the stores."""
    skip_small: bool = False
    """Leave classes with too few rows out instead of refusing them."""
    drop_last: bool = False
    """Leave out a last batch that has fewer episodes than batch_size."""

    def __post_init__(self) -> None:
        counts = {"n_way": self.n_way, "n_shot": self.n_shot, "n_query": self.n_query}
        problems = not_whole(1, **counts, n_episodes=self.n_episodes) + not_whole(seed=self.seed)
        problems += not_named(by=self.by)
        if self.support == self.query:
            problems.append(f"support and query are both called {self.query!r}")
        if problems:
            raise UsageError("Episodes(...) cannot work:", problems=problems)

    def over(self, tables: Mapping[str, Table], batch_size: int) -> BoundEpisodes:
        check_batch_size(batch_size)
        if len(tables) == 1:
            groups = _group(next(iter(tables.values())), self.by)
            both = [(groups, self.n_shot + self.n_query)]
        elif set(tables) == {self.support, self.query}:
            both = [
                (_group(tables[self.support], self.by), self.n_shot),
                (_group(tables[self.query], self.by), self.n_query),
            ]
        else:
            raise UsageError(
                f"Episodes draws from one store, or from two called {self.support!r} and {self.query!r}; "
                f"this feed has {', '.join(map(repr, tables)) or 'none'}. Name the stores so, or say how "
                "they are called: Episodes(support=…, query=…)."
            )
        classes = _usable(both, self)
        return BoundEpisodes(self, [Classes.of(groups, classes) for groups, _ in both], batch_size)


@dataclass(frozen=True)
class Classes:
    """The rows of each class, one after the other: class c has rows[starts[c] : starts[c] + counts[c]]."""

    rows: Rows
    starts: Rows
    counts: Rows

    @classmethod
    def of(cls, groups: Mapping[object, Rows], classes: list[object]) -> Classes:
        counts = np.array([len(groups[name]) for name in classes], np.int64)
        rows = np.concatenate([groups[name] for name in classes])
        return cls(rows, np.cumsum(counts) - counts, counts)

    def draw(self, ids: NDArray[np.uint64], classes: Rows, n: int) -> Rows:
        """n distinct rows of each class: ids and classes [E, n_way] → [E, n_way, n]."""
        chosen = keyed.sample(ids.ravel(), n, self.counts[classes.ravel()])
        drawn: Rows = self.rows[chosen + self.starts[classes.ravel()][:, None]]
        return drawn.reshape(*classes.shape, n)


class BoundEpisodes:
    def __init__(self, order: Episodes, parts: list[Classes], batch_size: int) -> None:
        self._order = order
        self._parts = parts
        self._batch_size = batch_size
        one_pass = max(1, len(parts[-1].rows) // (order.n_way * order.n_query))
        self.n_episodes = one_pass if order.n_episodes is None else order.n_episodes

    def n_batches(self, epoch: int) -> int:
        return count_batches(self.n_episodes, self._batch_size, drop_last=self._order.drop_last)

    def batch(self, epoch: int, i: int) -> dict[str, Rows]:
        check_batch(i, self.n_batches(epoch), epoch)
        first = i * self._batch_size
        return self._draw(epoch, range(first, min(first + self._batch_size, self.n_episodes)))

    def _draw(self, epoch: int, episodes: range) -> dict[str, Rows]:
        order, n = self._order, len(episodes)
        ids = keyed.derive_many(order.seed, epoch, [str(j) for j in episodes], "order/episodes")
        classes = keyed.sample(ids, order.n_way, len(self._parts[0].counts))
        of_class = keyed.children(ids, 2 * order.n_way)
        if len(self._parts) == 1:  # one draw for both keeps support and query apart
            drawn = self._parts[0].draw(of_class[:, : order.n_way], classes, order.n_shot + order.n_query)
            support, query = drawn[..., : order.n_shot], drawn[..., order.n_shot :]
        else:
            support = self._parts[0].draw(of_class[:, : order.n_way], classes, order.n_shot)
            query = self._parts[1].draw(of_class[:, order.n_way :], classes, order.n_query)
        return {order.support: support.reshape(n, -1), order.query: query.reshape(n, -1)}


def _group(table: Table, field: str) -> dict[object, Rows]:
    """The rows of each class, ascending. Classes are Python ints or strs, so that two tables compare."""
    values = np.asarray(table.column(field))
    if not values.size:
        return {}
    if values.ndim != 1 or values.dtype.kind not in "biuU":
        raise UsageError(
            f"Episodes(by={field!r}) needs one whole number or string for each row; {field!r} has "
            f"{values.dtype} values of shape {list(values.shape)}."
        )
    names, inverse = np.unique(values, return_inverse=True)
    rows = np.argsort(inverse, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(inverse, minlength=len(names)))
    return dict(zip(names.tolist(), np.split(rows, ends[:-1]), strict=True))


def _usable(both: list[tuple[dict[object, Rows], int]], order: Episodes) -> list[object]:
    """The classes with enough rows in each table, in a fixed order; refuses, or skips, the others."""
    names = sorted({name for groups, _ in both for name in groups}, key=lambda name: (str(type(name)), name))
    small = {}
    for name in names:
        for groups, needed in both:
            if len(groups.get(name, ())) < needed:
                small[name] = f"{name!r} has {len(groups.get(name, ()))} rows; {needed} are needed"
    if small and not order.skip_small:
        shown = [*list(small.values())[:10], *([f"and {len(small) - 10} more"] if len(small) > 10 else [])]
        raise UsageError(
            f"{len(small)} of {len(names)} classes of {order.by!r} have too few rows for "
            f"n_shot={order.n_shot} and n_query={order.n_query}. Lower those, or pass skip_small=True to "
            "leave such classes out:",
            problems=shown,
        )
    usable = [name for name in names if name not in small]
    if len(usable) < order.n_way:
        raise UsageError(
            f"Episodes(n_way={order.n_way}) needs that many classes; {order.by!r} has {len(names)}, of which "
            f"{len(usable)} have enough rows."
        )
    return usable
