"""What the commands print: tables that read well at 100 columns and in a pipe, progress with the time left.

Values come from anybody's files: control characters do not reach the terminal, and nothing is markup.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from frostline.wording import duration as duration
from frostline.wording import plain as plain
from frostline.wording import size as size

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_COLUMNS = 100
_EVERY_S = 5.0


def console() -> Console:
    """Standard output; in a pipe 100 columns wide (or COLUMNS), since nobody there has a window."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdecimal() else _PIPED_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """A table with a heading; columns named in `right` are figures."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    _print(Text(title, "bold"))  # a title of the table itself would be folded to the table's width
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(plain(cell)) for cell in row))
    _print(grid)
    _print("")


def lines(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values, one a line, the values in one column."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name, "bold"), Text(plain(value)))
    _print(grid)
    _print("")


def _print(what: Any) -> None:
    """To a terminal as it is; in a pipe without the spaces that fill lines up."""
    out = console()
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as captured:
        out.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def shape(dims: Sequence[int | None]) -> str:
    """
    >>> shape([24, 325, 384]), shape([None, 384]), shape([])
    ('24 × 325 × 384', 'any × 384', '')
    """
    return " × ".join("any" if n is None else str(n) for n in dims)


class Meter:
    """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere.

    Called as `meter(what, done, total)`, as the store's own functions do.
    """

    def __init__(self, unit: str = "files") -> None:
        self._unit = unit
        self._what = ""
        self._task: Any = None
        self._bar: Any = self._make_bar() if sys.stderr.isatty() else None
        self._began = self._said = time.monotonic()
        self._first = 0

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._said, self._first = what, now, now, max(0, done - 1)
            if self._bar:
                self._task = self._bar.add_task(what, total=total, rate="")
                self._bar.start()
        rate = (done - self._first) / max(now - self._began, 1e-9)
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, rate=self._rate(rate))
        elif now - self._said >= _EVERY_S:
            self._said = now
            left = (total - done) / max(rate, 1e-9)
            share = f"{done / max(total, 1):.0%}"
            print(f"{what}: {share}, {self._rate(rate)}, {duration(left)} left", file=sys.stderr, flush=True)

    def _rate(self, rate: float) -> str:
        return f"{size(rate)}/s" if self._unit == "bytes" else f"{rate:,.0f} {self._unit}/s"

    def _make_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), TextColumn("left"),
        )  # fmt: skip
        return Progress(*columns, console=Console(stderr=True), transient=True)
