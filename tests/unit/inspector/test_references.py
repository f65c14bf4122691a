"""Names that make a result depend on more than its inputs."""

from __future__ import annotations

import datetime
import os
import random
import time
from random import choice

import numpy as np

from frostline.inspector.reach import reach
from frostline.inspector.references import clock_uses, date_uses, process_uses, random_uses


def uses(fn) -> list:
    return reach(fn).uses


def test_global_generators_count_and_own_ones_do_not() -> None:
    assert len(random_uses(uses(lambda: (choice([1]), np.random.shuffle([1]), random.seed(0))))) == 3
    assert (
        random_uses(uses(lambda: (random.Random(0), np.random.default_rng(0), np.random.RandomState(0))))
        == []
    )


def test_dates_of_today_count_and_given_ones_do_not() -> None:
    assert len(date_uses(uses(lambda: (datetime.datetime.now(), datetime.date.today())))) == 2
    assert (
        date_uses(uses(lambda: (datetime.date(2020, 1, 1), datetime.datetime.fromisoformat("2020-01-01"))))
        == []
    )


def test_processes_and_clocks_are_named_with_their_place() -> None:
    def fn():
        time.sleep(0)
        return os.getpid(), time.monotonic_ns(), os.path.join("a")

    (process,) = process_uses(uses(fn))
    assert process.startswith("os.getpid (the process) in test_processes_and_clocks")
    (clock,) = clock_uses(uses(fn))
    assert clock.startswith("time.monotonic_ns in ")
