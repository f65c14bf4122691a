"""Being asked to stop: once it is noted, twice it is done, and afterwards nothing of it is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from frostline import signals as module
from frostline.signals import Signals

BOTH = (signal.SIGTERM, signal.SIGINT)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in BOTH]


@pytest.fixture(autouse=True)
def harmless() -> Iterator[None]:
    """A signal that a failing test lets through must not end the session."""
    before = [signal.signal(number, lambda *_: None) for number in BOTH]
    yield
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_is_noted_and_told_and_nothing_is_raised(number: signal.Signals) -> None:
    told: list[str] = []
    with Signals(told.append) as signals:
        assert signals.why is None
        signal.raise_signal(number)
        assert signals.why == number.name
    assert told == [number.name]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, as its last value."""
    made = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made[-1]))
    return made


@pytest.mark.parametrize(
    ("second", "after", "stops"),
    [
        (signal.SIGTERM, 2.1, True),
        (signal.SIGINT, 0.3, True),
        (signal.SIGTERM, 1.9, False),
        (signal.SIGINT, 0.1, False),
    ],
)
@pytest.mark.parametrize("first", BOTH)
def test_the_second_stops_at_once_unless_it_is_the_first_one_delivered_twice(
    first: signal.Signals, second: signal.Signals, after: float, stops: bool, now: list[float]
) -> None:
    told: list[str] = []
    with Signals(told.append) as signals:
        signal.raise_signal(first)
        now.append(now[-1] + after)
        with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
            signal.raise_signal(second)
    assert signals.why == first.name
    assert told == [first.name]


def test_what_took_the_signals_before_takes_them_again() -> None:
    came: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("mine"))
    before = handlers()
    with Signals(came.append):
        assert handlers() != before
        signal.raise_signal(signal.SIGTERM)
    assert handlers() == before
    signal.raise_signal(signal.SIGTERM)
    assert came == ["SIGTERM", "mine"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_also_when_it_ends_with_an_error(error: type[BaseException]) -> None:
    before = handlers()
    with pytest.raises(error), Signals(print):
        raise error
    assert handlers() == before


def test_one_inside_another_gives_back_to_the_outer_one() -> None:
    told: list[str] = []
    with Signals(lambda name: told.append(f"outer {name}")) as outer:
        with Signals(lambda name: told.append(f"inner {name}")) as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (inner.why, outer.why) == ("SIGTERM", None)
        signal.raise_signal(signal.SIGINT)
    assert told == ["inner SIGTERM", "outer SIGINT"]


def test_in_another_thread_signals_are_left_to_whoever_has_them() -> None:
    before, seen = handlers(), []

    def work() -> None:
        with Signals(print) as signals:
            seen.append((handlers(), signals.why))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
    assert handlers() == before
