"""Units of an experiment: each is computed once, and kept."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from frostline import keyed
from frostline.errors import UsageError
from frostline.experiment import plain
from frostline.step import Moment
from frostline.store.disk import make_folder
from frostline.store.verification import settle_all

_NAME = 80
"""Letters of a file's name that come from the unit's."""
_SEED = "--seed"
"""The run's seed among what a result depends on; no parameter can be called so."""


class Units:
    """The results in one folder.

    parameters: what every result depends on, unless it is said with `of`.
    seed:       what a unit's random numbers come from, with its name: a resumed experiment draws the same.
    """

    def __init__(
        self,
        folder: Path,
        *,
        parameters: Mapping[str, Any],
        seed: int,
        device: torch.device,
        note: Callable[[str], None],
    ) -> None:
        self._folder, self._seed, self._device, self._note = folder, seed, device, note
        self._parameters = plain.normal({**parameters, _SEED: seed}, "parameters")
        self._asked: dict[str, Any] = {}
        self.made, self.found = 0, 0

    def kept(
        self, unit: str, of: Mapping[str, Any] | None, files: Iterable[Path] = ()
    ) -> plain.Loaded | None:
        """The unit's result, if it is there and of these settings; what is wrong with one is said."""
        depends = self._depends(unit, of)
        there = plain.load(self._path(unit))
        if there is None:
            return None
        why = there.damage
        if why is None and there.about.get("unit") != unit:
            why = f"{self._path(unit).name} holds {there.about.get('unit')!r}"
        if why is None:
            why = "; ".join(_differences(there.about.get("of"), depends))
        why = why or "; ".join(f"{file} is gone" for file in files if not Path(file).is_file())
        if why:
            self._note(f"unit {unit!r} is made again: {why}")
            return None
        self.found += 1
        return there

    def make(self, unit: str, fn: Callable[[], Any], of: Mapping[str, Any] | None) -> Any:
        """Compute and keep it."""
        depends = self._depends(unit, of)
        began = time.monotonic()
        with self._drawing(unit):
            value = fn()
        settle_all()  # nothing is kept that was computed from a damaged file
        make_folder(self._folder)
        about = {"unit": unit, "of": depends, "seconds": round(time.monotonic() - began, 3)}
        value = plain.save(self._path(unit), value, about, f"unit {unit!r}")
        self.made += 1
        return value

    def _depends(self, unit: str, of: Mapping[str, Any] | None) -> Any:
        if not isinstance(unit, str) or not unit:
            raise UsageError(f"ctx.once({unit!r}, …): a unit is named by a text, as 'seed-3'.")
        mine = self._parameters if of is None else plain.normal({**of, _SEED: self._seed}, "of")
        if self._asked.setdefault(unit, mine) != mine:
            changed = "; ".join(_differences(self._asked[unit], mine))
            raise UsageError(
                f"ctx.once({unit!r}, …) was asked for two different things ({changed}). Put what differs "
                f"into the unit's name."
            )
        return mine

    def _path(self, unit: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", unit).strip(".")[:_NAME]
        if name != unit:
            name += f"-{xxhash.xxh3_64_hexdigest(unit.encode())[:8]}"
        return self._folder / f"{name}.json"

    @contextmanager
    def _drawing(self, unit: str) -> Iterator[None]:
        """Random numbers from the unit's name, whatever was computed before; afterwards as they were."""
        before = Moment(self._device)
        seed = keyed.derive(self._seed, 0, unit, "unit")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        try:
            yield
        finally:
            before.restore()


def _differences(then: Any, now: Any) -> list[str]:
    if not isinstance(then, dict) or not isinstance(now, dict):
        return [] if then == now else [f"it was made with {then!r:.80}, now it is {now!r:.80}"]
    names = dict.fromkeys([*then, *now])
    return [
        f"{name} was {then.get(name)!r:.80}, is {now.get(name)!r:.80}"
        for name in names
        if then.get(name) != now.get(name)
    ]
