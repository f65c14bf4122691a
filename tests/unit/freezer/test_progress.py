"""What a freeze says on the way, with a clock that the test moves."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from frostline.freezer import progress
from frostline.freezer.progress import Reporter
from frostline.freezer.stream import Stats
from frostline.wording import duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def test_piped_there_is_a_line_every_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    reporter = Reporter(out=out)
    stats = Stats()
    for done in range(31):
        stats.samples, stats.bytes, stats.busy = done, done * 2_000_000, done * 0.5
        reporter.computed("freezing", done, 100, stats)
        clock.now += 1
    assert out.getvalue().splitlines() == [
        "freezing: 10 of 100 (10%), 1.0 samples/s, 2.00 MB/s, device busy 50%, 2 min left",
        "freezing: 20 of 100 (20%), 1.0 samples/s, 2.00 MB/s, device busy 50%, 80 s left",
        "freezing: 30 of 100 (30%), 1.0 samples/s, 2.00 MB/s, device busy 50%, 70 s left",
    ]


def test_on_a_terminal_one_line_is_rewritten_and_cleared(clock: Clock) -> None:
    out = Terminal()
    reporter = Reporter(out=out)
    reporter.looked(0, 10)
    clock.now += 0.1
    reporter.looked(2, 10)  # too soon
    assert out.getvalue() == ""
    clock.now += 0.4
    reporter.looked(5, 10)
    line = "\r\x1b[2Klooking at the inputs: 5 of 10 (50%), 10.0 samples/s, less than 1 s left"
    assert out.getvalue() == line
    reporter.note("a sentence")
    assert out.getvalue() == line + "\r\x1b[2Ka sentence\n"
    reporter.end()
    assert out.getvalue().endswith("a sentence\n")  # nothing was open


def test_the_end_takes_the_line_away(clock: Clock) -> None:
    out = Terminal()
    reporter = Reporter(out=out)
    reporter.looked(0, 10)
    clock.now += 1
    reporter.looked(5, 10)
    reporter.end()
    assert out.getvalue().endswith("left\r\x1b[2K")


def test_rates_are_those_of_what_goes_on_now(clock: Clock) -> None:
    out = io.StringIO()
    reporter = Reporter(out=out)
    stats = Stats(samples=500, bytes=10**9, busy=77.0)
    reporter.computed("adding y", 0, 1000, stats)
    clock.now += 100
    reporter.computed("adding y", 0, 1000, stats)
    assert "0.0 samples/s, 0 B/s, device busy 0%, time left not known yet" in out.getvalue()
    reporter.computed("freezing", 600, 1000, stats)  # resumed: the first 600 were not done in this second
    clock.now += 20
    stats.bytes += 40_000_000
    stats.busy += 400  # never more than all the time
    reporter.computed("freezing", 620, 1000, stats)
    assert (
        "freezing: 620 of 1,000 (62%), 1.0 samples/s, 2.00 MB/s, device busy 100%, 6 min left"
        in out.getvalue()
    )


def test_quarantined_samples_are_told_when_there_are_any(clock: Clock) -> None:
    out = io.StringIO()
    reporter = Reporter(out=out)
    reporter.computed("freezing", 0, 10, Stats())
    for failed in (0, 1200):
        clock.now += 10
        reporter.computed("freezing", 5, 10, Stats(failed=failed))
    first, second = out.getvalue().splitlines()
    assert "quarantined" not in first
    assert ", 1,200 quarantined, " in second


def test_quiet_says_nothing(clock: Clock) -> None:
    out = io.StringIO()
    reporter = Reporter(quiet=True, out=out)
    reporter.note("a sentence")
    reporter.looked(0, 10)
    clock.now += 60
    reporter.looked(9, 10)
    reporter.end()
    assert out.getvalue() == ""


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter().note("here")
    assert capsys.readouterr().err == "here\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "less than 1 s"), (89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_output_that_is_gone_does_not_end_the_freeze(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    reporter = Reporter(out=out)
    out.close()
    for _ in range(2):
        reporter.note("a sentence")
    assert [r.getMessage() for r in caplog.records if "output is gone" in r.getMessage()] != []
    assert len(caplog.records) == 1
