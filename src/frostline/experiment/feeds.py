"""Batches for an experiment: from stores that are made first, or live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from frostline.errors import UsageError
from frostline.freezer.options import Options
from frostline.freezer.stores import complete, places_of
from frostline.store import Store, Table
from frostline.supply import Supply, supply
from frostline.trainer.evaluation import split_for
from frostline.workload import Workload


class Feeds:
    """Makes feeds, and the stores that they need when the first one is asked for."""

    def __init__(
        self, *, store: Path | None, live: bool, device: torch.device, max_hours: float | None, quiet: bool
    ) -> None:
        self._store, self._live, self._device = store, live, device
        self._max_hours, self._quiet = max_hours, quiet
        self._stores: dict[int, tuple[Workload, dict[str, Table]]] = {}
        self._open: list[Supply] = []

    def feed(
        self,
        workload: Workload,
        *,
        split: str | None,
        batch_size: int | None,
        train: bool,
        seed: int,
        live: bool,
    ) -> Supply:
        size: Any = batch_size if batch_size is not None else workload.batch_size
        if size is None:
            raise UsageError(
                "ctx.feed(…) needs a batch_size, here or in the workload: ctx.feed(batch_size=8)."
            )
        chosen = split_for(workload, (), split)
        made = supply(
            workload, None if live or self._live else self._made(workload), split=chosen, batch_size=size,
            device=self._device, seed=seed, train=train,
        )  # fmt: skip
        self._open.append(made)
        return made

    def close(self) -> None:
        for one in self._open:
            one.close()

    def _made(self, workload: Workload) -> Mapping[str, Table]:
        """The stores of all pipelines, made or completed; once a workload."""
        if id(workload) not in self._stores:
            places = places_of(workload, self._store, asked="ctx.feed(…)")
            options = Options(device=str(self._device), max_hours=self._max_hours)
            complete(workload, places, options, quiet=self._quiet)
            tables: dict[str, Table] = {name: Store.open(place) for name, place in places.items()}
            self._stores[id(workload)] = (workload, tables)  # held, so that its id stays its own
        return self._stores[id(workload)][1]
