"""What a training says on the way, with a clock that the test moves."""

from __future__ import annotations

import io
import logging
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest

from frostline.trainer import progress
from frostline.trainer.progress import TrainProgress, forecast_text

FULL: dict[str, Any] = {
    "epoch": 3.41,
    "loss": 1.234,
    "samples_per_s": 812.4,
    "data_wait": 0.02,
    "busy": 0.97,
    "memory_bytes": 12.3e9,
    "left_s": 840,
}
TEXT = (
    "step 1,200 of 10,000 (12%) · epoch 3.41 · loss 1.234 · 812 samples/s · data wait 2% · device busy 97% · "
    "12.30 GB · 14 min left"
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_full_line(clock: Clock) -> None:
    out = io.StringIO()
    TrainProgress(out).line(1200, 10_000, **FULL, extra={"lr": 3e-4, "bad steps": 1200, "mode": "bf16"})
    assert out.getvalue() == f"{TEXT} · lr 0.0003 · bad steps 1,200 · mode bf16\n"


def test_what_is_not_known_is_left_out(clock: Clock) -> None:
    out = io.StringIO()
    TrainProgress(out).line(7, None, epoch=0.0, loss=None, samples_per_s=3.14159, data_wait=None)
    assert out.getvalue() == "step 7 · epoch 0.00 · 3.14 samples/s\n"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_shown_as_such(clock: Clock, loss: float) -> None:
    out = io.StringIO()
    TrainProgress(out).line(1, 10, **{**FULL, "loss": loss})
    assert f" · loss {loss} · " in out.getvalue()


def test_a_hundred_percent_is_said_only_at_the_end(clock: Clock) -> None:
    out = io.StringIO()
    for step in (9_999, 10_000):
        TrainProgress(out).line(step, 10_000, **FULL)
    assert "(99%)" in out.getvalue().splitlines()[0]
    assert "(100%)" in out.getvalue().splitlines()[1]


def test_piped_there_is_a_line_at_once_then_every_ten_seconds_and_the_last(clock: Clock) -> None:
    out = io.StringIO()
    shown = TrainProgress(out)
    for step in range(1, 26):
        shown.line(step, 25, **FULL)
        clock.now += 1
    shown.end()
    shown.end()
    said = [line.split(" of ")[0] for line in out.getvalue().splitlines()]
    assert said == ["step 1", "step 11", "step 21", "step 25"]
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_the_last_line_is_not_said_twice(clock: Clock) -> None:
    out = io.StringIO()
    shown = TrainProgress(out)
    shown.line(1, 1, **FULL)
    shown.end()
    assert len(out.getvalue().splitlines()) == 1


def test_piped_a_line_that_was_held_back_comes_before_a_note(clock: Clock) -> None:
    out = io.StringIO()
    shown = TrainProgress(out)
    for step in (1, 2, 3):
        shown.line(step, 3, **FULL)
    shown.note("step 3, held out: loss 1")
    shown.note("done")
    shown.end()
    said = [line.split(" of ")[0] for line in out.getvalue().splitlines()]
    assert said == ["step 1", "step 3", "step 3, held out: loss 1", "done"]


def test_at_the_end_no_time_is_left(clock: Clock) -> None:
    out = io.StringIO()
    shown = TrainProgress(out)
    shown.line(10_000, 10_000, **FULL)
    assert out.getvalue().endswith("(100%) · epoch 3.41 · loss 1.234 · 812 samples/s · data wait 2% · "
                                   "device busy 97% · 12.30 GB\n")  # fmt: skip


def test_every_line_is_flushed_at_once(clock: Clock) -> None:
    raw = io.BytesIO()
    shown = TrainProgress(io.TextIOWrapper(raw, encoding="utf-8", line_buffering=False))
    shown.line(1200, 10_000, **FULL)
    assert raw.getvalue().decode() == TEXT + os.linesep
    shown.note("saved")
    assert raw.getvalue().decode().endswith(f"saved{os.linesep}")


def test_on_a_terminal_one_line_is_rewritten(clock: Clock) -> None:
    out = Terminal()
    shown = TrainProgress(out)
    shown.line(1200, 10_000, **FULL)
    clock.now += 0.1
    shown.line(1201, 10_000, **FULL)  # too soon
    clock.now += 0.1
    shown.line(1202, 10_000, **FULL)
    assert out.getvalue() == f"\r\x1b[2K{TEXT}\r\x1b[2K{TEXT.replace('1,200', '1,202')}"
    shown.note("saved step 1,202")
    assert out.getvalue().endswith("left\r\x1b[2Ksaved step 1,202\n")
    shown.end()
    assert out.getvalue().endswith("saved step 1,202\n")  # nothing was open


def test_on_a_terminal_the_end_leaves_the_last_line_standing(clock: Clock) -> None:
    out = Terminal()
    shown = TrainProgress(out)
    shown.line(1, 10_000, **FULL)
    shown.line(1200, 10_000, **FULL)
    shown.end()
    assert out.getvalue().endswith(f"\r\x1b[2K{TEXT}\n")


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (len(TEXT) + 1, TEXT),
        (len(TEXT), TEXT.replace(" · epoch 3.41", "")),
        (100, TEXT.replace(" · epoch 3.41", "").replace(" · device busy 97%", "")),
        (80, "step 1,200 of 10,000 (12%) · loss 1.234 · 812 samples/s · 14 min left"),
        (42, "step 1,200 of 10,000 (12%) · 14 min left"),
        (30, "step 1,200 · 14 min left"),
        (20, "14 min left"),
        (10, "14 min l…"),
        (3, "1…"),
        (1, ""),
    ],
)
def test_a_narrow_terminal_loses_what_matters_least_and_the_time_left_last(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, columns: int, text: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    TrainProgress(out).line(1200, 10_000, **FULL)
    assert out.getvalue() == f"\r\x1b[2K{text}"
    assert len(text) < columns  # a full last column wraps in some terminals


def test_where_no_time_left_is_known_the_step_is_cut_last(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    out = Terminal()
    TrainProgress(out).line(1200, 10_000, **{**FULL, "left_s": None})
    assert out.getvalue() == "\r\x1b[2Kstep 1…"


def test_wide_letters_count_twice(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = dict.fromkeys(["loss", "samples_per_s", "data_wait"])
    for columns, extra in (("38", ""), ("39", " · 損失損失損失損失 1")):  # 17 columns, and 3 + 16 + 2
        monkeypatch.setenv("COLUMNS", columns)
        out = Terminal()
        TrainProgress(out).line(1, 2, epoch=0, **unknown, extra={"損失" * 4: 1})
        assert out.getvalue() == f"\r\x1b[2Kstep 1 of 2 (50%){extra}"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_the_width_is_that_of_the_terminal_itself(clock: Clock) -> None:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    with open(theirs, "w", encoding="utf-8") as out:
        TrainProgress(out).line(1200, 10_000, **FULL)
        shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert shown == "\r\x1b[2Kstep 1,200 · 14 min left"


def test_names_from_a_workload_cannot_break_the_line(clock: Clock) -> None:
    out = io.StringIO()
    TrainProgress(out).line(1, 2, **FULL, extra={"a\r\nb\x1b[2K": 1})
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().endswith(" · a??b?[2K 1\n")


def test_an_output_without_these_letters_gets_others(clock: Clock) -> None:
    raw = io.BytesIO()
    shown = TrainProgress(io.TextIOWrapper(raw, encoding="ascii"))
    shown.line(1, 2, epoch=0.5, loss=1.0, samples_per_s=None, data_wait=None, extra={"größe": 1})
    shown.note("läuft")
    assert raw.getvalue().decode("ascii").split(os.linesep) == [
        "step 1 of 2 (50%) | epoch 0.50 | loss 1 | gr??e 1",
        "l?uft",
        "",
    ]


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")]
)
def test_an_output_that_breaks_does_not_end_the_training(
    clock: Clock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    shown = TrainProgress(Gone())
    with caplog.at_level(logging.WARNING):
        shown.line(1, 2, **FULL)
        shown.note("saved")
        clock.now += 60
        shown.line(2, 2, **FULL)
        shown.end()
    assert caplog.text.count("Progress is no longer shown") == 1
    assert str(error) in caplog.text


def test_quiet_says_nothing(clock: Clock) -> None:
    out = io.StringIO()
    shown = TrainProgress(out, quiet=True)
    shown.note("a sentence")
    shown.line(1, 2, **FULL)
    shown.end()
    assert out.getvalue() == ""


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    TrainProgress().note("a sentence")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "a sentence\n")


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (
            (10_000, 8.2, 244, "14:32"),
            {},
            "10,000 steps (8.2 epochs) at 41 steps/s: about 4 min, until 14:32",
        ),
        ((1, None, 5.0, None), {}, "1 step at 5 s a step: about 5 s"),
        ((20, 0.034, None, None), {}, "20 steps (0.034 epochs)"),
        ((None, None, 7200, "16:00"), {}, "as many steps as fit: about 2.0 h, until 16:00"),
        ((None, None, None, None), {}, "no end is set: until it is stopped"),
        ((None, None, None), {"steps_per_s": 150.0}, "no end is set: until it is stopped, at 150 steps/s"),
        (
            (2_000, 12.0, 10, "00:10"),
            {"memory_bytes": 2e9},
            "2,000 steps (12.0 epochs) at 200 steps/s: about 10 s, until 00:10; peak memory 2.00 GB",
        ),
    ],
)
def test_forecasts(given: tuple[Any, ...], options: dict[str, float], text: str) -> None:
    assert forecast_text(*given, **options) == text
