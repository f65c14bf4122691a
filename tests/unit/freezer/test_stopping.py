"""When a freeze stops: in time, or when it is asked to; and that the signals are given back."""

from __future__ import annotations

import io
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from frostline.freezer import stopping
from frostline.freezer.progress import Reporter
from frostline.freezer.stopping import Stop

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_it_stops_before_a_shard_that_would_not_be_done_in_time(clock: SimpleNamespace) -> None:
    stop = Stop(1.0, Reporter(quiet=True))
    clock.now = 600  # planning
    stop.start()
    asked = []
    for _ in range(4):  # shards of 1000 s
        asked.append(stop())
        clock.now += 1000
    assert asked == [False, False, False, True]  # at 3600 s, the fourth would end at 4600 s
    assert stop.why == "the time limit of 1 h"
    assert stop()


def test_the_longest_shard_counts(clock: SimpleNamespace) -> None:
    stop = Stop(1.0, Reporter(quiet=True))
    stop.start()
    assert not stop()
    clock.now = 2000
    assert stop()  # another 2000 s would be too much
    without = Stop(None, Reporter(quiet=True))
    clock.now = 1e9
    assert not without()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_a_second_one_insists(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostline.signals._SAME_S", dict.fromkeys(SIGNALS, 0.0))  # however soon
    before = [signal.getsignal(n) for n in SIGNALS]
    out = io.StringIO()
    with Stop(None, Reporter(out=out)) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.why == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert [signal.getsignal(n) for n in SIGNALS] == before
    assert out.getvalue() == f"{number.name}: finishing this shard, then stopping. Once more stops now.\n"


def test_handlers_are_given_back_without_a_signal_too() -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with Stop(None, Reporter(quiet=True)):
        assert [signal.getsignal(n) for n in SIGNALS] != before
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_other_threads_leave_signals_alone() -> None:
    seen = []

    def other() -> None:
        with Stop(None, Reporter(quiet=True)) as stop:
            seen.append(([signal.getsignal(n) for n in SIGNALS], stop()))

    before = [signal.getsignal(n) for n in SIGNALS]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
