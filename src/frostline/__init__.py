"""Compute once what never changes, then feed the accelerator flat out.

`import frostline as fl` shows the names in `__all__` and nothing else. Each is loaded when it is first used,
so that `import frostline` and `frostline --help` do not pay for torch. A new public name needs a line in
`docs/decisions/0001-public-names.md`; a contract test compares the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frostline.batch import Batch as Batch
    from frostline.batch import Ragged as Ragged
    from frostline.feed import Feed as Feed
    from frostline.feed.order import Buckets as Buckets
    from frostline.feed.order import Episodes as Episodes
    from frostline.feed.order import Sequential as Sequential
    from frostline.feed.order import Shuffle as Shuffle
    from frostline.freezer import cached as cached
    from frostline.freezer import freeze as freeze
    from frostline.inspector import audit as audit
    from frostline.pipeline import Pipeline as Pipeline
    from frostline.profiler.workloads import profile as profile
    from frostline.source import Source as Source
    from frostline.stage import Pick as Pick
    from frostline.stage import Stage as Stage
    from frostline.stage import lazy as lazy
    from frostline.store import Field as Field
    from frostline.store import Store as Store
    from frostline.trainer import train as train
    from frostline.workload import Metric as Metric
    from frostline.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "Batch": "frostline.batch",
    "Buckets": "frostline.feed.order",
    "Episodes": "frostline.feed.order",
    "Feed": "frostline.feed",
    "Field": "frostline.store",
    "Metric": "frostline.workload",
    "Pick": "frostline.stage",
    "Pipeline": "frostline.pipeline",
    "Ragged": "frostline.batch",
    "Sequential": "frostline.feed.order",
    "Shuffle": "frostline.feed.order",
    "Source": "frostline.source",
    "Stage": "frostline.stage",
    "Store": "frostline.store",
    "Workload": "frostline.workload",
    "audit": "frostline.inspector",
    "cached": "frostline.freezer",
    "freeze": "frostline.freezer",
    "lazy": "frostline.stage",
    "profile": "frostline.profiler.workloads",
    "train": "frostline.trainer",
}
"""Where each public name lives; the `TYPE_CHECKING` imports above say the same to type checkers."""

__all__ = [  # written out: type checkers read no expressions here
    "Batch",
    "Buckets",
    "Episodes",
    "Feed",
    "Field",
    "Metric",
    "Pick",
    "Pipeline",
    "Ragged",
    "Sequential",
    "Shuffle",
    "Source",
    "Stage",
    "Store",
    "Workload",
    "audit",
    "cached",
    "freeze",
    "lazy",
    "profile",
    "train",
]


if not TYPE_CHECKING:  # seen by type checkers, it would make every misspelt name an `object`

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'frostline' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
