"""The script's own lines between the parts that are known."""

from __future__ import annotations

import json
import multiprocessing
import sys
import sysconfig
import threading
import time
from collections import Counter
from itertools import accumulate, cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frostline.profiler.inside.samples import Samples, uneven, user_line
from frostline.profiler.inside.spans import Spans


def test_the_users_innermost_line_is_told() -> None:
    seen: list[str] = []

    def hook(pairs: Any) -> Any:
        seen.append(user_line(sys._getframe(1)))  # json's own frame
        return pairs

    at = sys._getframe().f_lineno + 1
    json.loads('{"a": 1}', object_pairs_hook=hook)
    assert seen == [f"{__file__}:{at}"]


def test_the_command_that_started_it_all_is_nobodys_own_line() -> None:
    command = str(Path(sysconfig.get_path("scripts")) / "frostline")
    inner = SimpleNamespace(f_code=SimpleNamespace(co_filename=json.__file__), f_lineno=3, f_back=None)
    inner.f_back = SimpleNamespace(f_code=SimpleNamespace(co_filename=command), f_lineno=8, f_back=None)
    assert user_line(inner) == f"{json.__file__}:3"


def test_no_frame_is_somewhere() -> None:
    assert user_line(None) == "somewhere"


def test_what_a_part_covers_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten looks, every other one inside of a part; each counts for the time since the last one: 1, 3, 1, …"""
    clock = accumulate(cycle([1.0, 3.0]), initial=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    samples, looks = Samples(), iter(range(10))
    me = threading.get_ident()
    samples._over = SimpleNamespace(wait=lambda seconds: next(looks, None) is None)  # type: ignore[assignment]
    within = iter([True, False] * 5)
    samples._watch(me, SimpleNamespace(within=lambda thread: next(within)))
    assert samples.looked == 20
    assert sum(samples.lines.values()) == 15
    assert sum(share for _, share in samples.told()) == 0.75


@pytest.mark.parametrize("loop_s", [0.001, 0.002, 0.0021, 0.004])
def test_looks_do_not_meet_the_same_moment_of_a_loop_again_and_again(loop_s: float) -> None:
    at = [*accumulate(islice(uneven(), 400))]
    met = Counter(int(10 * (look % loop_s) / loop_s) for look in at)
    assert max(met.values()) <= 2 * len(at) / 10


def test_lines_are_told_by_the_time_that_they_take() -> None:
    """One holds Python's lock for three quarters of the time, the other lets go of it again and again."""
    samples, spent = Samples(), [0.0, 0.0]
    samples.begin(Spans(cuda=False))
    first = sys._getframe().f_lineno + 8

    def off() -> float:
        seen = samples.lines.get(f"{__file__}:{first}", 0.0) / (samples.looked or 1.0)
        return abs(seen - spent[0] / sum(spent))

    while sum(spent) < 1.0 or (off() > 0.15 and sum(spent) < 100):  # on a busy machine looks are few
        began = time.perf_counter()
        sum(i for i in range(200_000))
        held = time.perf_counter()
        time.sleep((held - began) / 3)
        spent = [spent[0] + held - began, spent[1] + time.perf_counter() - held]
    samples.end()
    assert f"{__file__}:{first}" in dict(samples.told())
    assert off() <= 0.15


def test_threads_take_turns_as_before_afterwards_and_in_children() -> None:
    usual = sys.getswitchinterval()
    samples = Samples()
    samples.begin(Spans(cuda=False))
    assert sys.getswitchinterval() < usual
    child = multiprocessing.get_context("fork").Pool(1)
    with child:
        assert child.apply(sys.getswitchinterval) == pytest.approx(usual)
    samples.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_what_the_script_set_meanwhile_stays() -> None:
    usual = sys.getswitchinterval()
    samples = Samples()
    samples.begin(Spans(cuda=False))
    try:
        sys.setswitchinterval(0.02)
        samples.end()
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(usual)


def test_its_thread_ends_and_ending_twice_does_nothing() -> None:
    samples = Samples()
    assert samples.told() == []
    samples.begin(Spans(cuda=False))
    samples.end()
    samples.end()
    assert not [t for t in threading.enumerate() if t.name == "frostline-samples"]


def test_spans_know_whether_a_thread_is_within_one() -> None:
    spans, me = Spans(cuda=False), threading.get_ident()
    assert not spans.within(me)
    place = spans.enter("forward", "Net")
    assert spans.within(me)
    spans.leave(place)
    assert not spans.within(me)
