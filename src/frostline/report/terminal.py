"""A profile on the terminal: verdict first, then the times, then all else that was found.

Reads the same in a pipe (no colour, 100 columns) and never gets wider than it is told.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from frostline.report.figures import digits, ms, number, percent, plain
from frostline.report.section import Section, titled
from frostline.report.sections import sections
from frostline.report.summary import cost, headline, setting
from frostline.report.times import Part, parts, reconciliation, warning
from frostline.results import Profile

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_PIPED_COLUMNS = 100
_WIDEST = 120
"""On a wider terminal prose and bars would be hard to follow."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NARROW = {ord(a): b for a, b in zip("█░─×–−…·", "#.-x--~-", strict=True)} | {
    ord(c): "|" for c in _EIGHTHS.strip()
}
"""For standard outputs that cannot say more than ASCII."""


def lines(profile: Profile, width: int = _PIPED_COLUMNS) -> list[str]:
    """The report as text, no line of it wider than `width`.

    >>> from frostline.results import Machine, Row, Steps, Verdict
    >>> made = Profile(
    ...     "train.py", "SGD.step", Steps(60.8, 60.1, 61.5, 50), None, (Row("data", "loading", 61.2, 1.0),),
    ...     Verdict("input-bound", "The step waits for data."), Machine("cpu", 2, "2.11", "3.12"), samples=32,
    ... )
    >>> print("\\n".join(lines(made, 80)[:4]))
    INPUT-BOUND  The step waits for data.
    <BLANKLINE>
    step 60.8 ms (60.1–61.5) · 526 samples/s · cpu
    50 steps timed, a step ends at SGD.step, 32 samples a step, 2 cores, torch 2.11,
    """
    from rich.console import Console

    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False
    )
    with out.capture() as captured:
        for piece in _pieces(profile, width):
            out.print(piece)
    return [line.rstrip() for line in captured.get().splitlines()]


def show(profile: Profile) -> None:
    """Print it: with colour on a terminal, as plain text elsewhere."""
    from rich.console import Console

    out = Console()
    if not out.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else _PIPED_COLUMNS
        print(_encodable("\n".join(lines(profile, width)), sys.stdout.encoding))
        return
    width = min(out.width, _WIDEST)
    for piece in _pieces(profile, width):
        out.print(piece, width=width)


def _encodable(text: str, encoding: str | None) -> str:
    """A report that cannot be printed helps nobody: what the encoding lacks is written in ASCII.

    >>> _encodable("█▌ 1.31× – né", "ascii")
    '#| 1.31x - n?'
    """
    name = encoding or "utf-8"
    try:
        text.encode(name)
    except UnicodeEncodeError:
        return text.translate(_NARROW).encode(name, "replace").decode(name)
    return text


# --- the pieces, from top to bottom -------------------------------------------------------------------


def _pieces(profile: Profile, width: int) -> Iterator[RenderableType]:
    yield from _verdict(profile)
    yield from _head(profile)
    yield from _times(profile, width)
    for section in sections(profile):
        yield ""
        yield _styled(section.title, "bold")
        yield _table(section) if section.columns else _list(section)
        if section.more:
            yield _styled(section.more, "dim")
    yield ""
    yield _styled(cost(profile), "")
    if profile.notes:
        yield ""
        yield _styled("Notes", "bold")
        yield _list(Section("", tuple(("·", "", note) for note in profile.notes)))


def _styled(text: str, style: str) -> RenderableType:
    from rich.text import Text

    return Text(plain(text), style, overflow="fold")


def _verdict(profile: Profile) -> Iterator[RenderableType]:
    from rich.text import Text

    found = profile.verdict
    colour = {"compute-bound": "green", "unclear": "yellow"}.get(found.kind, "red")
    kind = (plain(found.kind).upper(), f"bold {colour}")
    yield Text.assemble(kind, "  ", plain(found.text), overflow="fold")
    if found.evidence:
        yield _list(Section("", tuple(("·", "", each) for each in found.evidence)))
    yield ""


def _head(profile: Profile) -> Iterator[RenderableType]:
    from rich.text import Text

    pairs = [
        plain(figure if label in ("rate", "device") else f"{label} {figure}")
        for label, figure in headline(profile)
    ]
    yield Text(" · ".join(pairs), "bold", overflow="fold")
    yield _styled(setting(profile), "dim")
    if profile.command:
        yield _styled(profile.command, "dim")


def _times(profile: Profile, width: int) -> Iterator[RenderableType]:
    found = parts(profile)
    if not found:
        return
    yield ""
    yield _styled("Where the step goes", "bold")
    yield _rows(found, width)
    inside = f"; pass B, which timed the rows: {ms(profile.attributed.ms)}" if profile.attributed else ""
    yield _styled(f"= {reconciliation(profile)}{inside}", "")
    if warning(profile):
        yield _styled(f"WARNING: {warning(profile)}", "bold yellow")


def _rows(found: tuple[Part, ...], width: int) -> Table:
    room = max(8, width // 5)
    places = digits(max(abs(part.row.ms) for part in found))
    noted = any(part.note for part in found)
    grid = _grid([("", False), ("ms", True), ("share", True), ("", False)] + [("", False)] * noted)
    grid.columns[3].min_width = grid.columns[3].width = room
    for part in found:
        share = "" if part.share is None else percent(part.share)
        cells = [part.row.name, number(part.row.ms, places), share, bar(part.share, room, part.overlap)]
        grid.add_row(*(_styled(cell, "dim" if part.overlap else "") for cell in cells + [part.note] * noted))
    return grid


def bar(share: float | None, room: int, overlap: bool = False) -> str:
    """A share of the step as blocks; `room` of them are the whole step. What overlaps is drawn lightly.

    >>> bar(0.5, 8), bar(0.3, 8), bar(-0.25, 8, overlap=True)
    ('████', '██▍', '░░')
    """
    if share is None:
        return ""
    whole, part = divmod(round(8 * min(1.0, abs(share)) * room), 8)
    if overlap:
        return "░" * max(1, round(whole + part / 8))
    return "█" * whole + _EIGHTHS[part].strip()


def _grid(columns: list[tuple[str, bool]]) -> Table:
    """(heading, whether it holds figures) for each column."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0)
    )
    for name, right in columns:
        if right:  # a figure without its end is another figure
            grid.add_column(Text(name), justify="right", overflow="ellipsis", no_wrap=True)
        else:
            grid.add_column(Text(name), overflow="fold")
    return grid


def _table(section: Section) -> Table:
    used = [k for k in range(len(section.columns)) if any(row[k] for row in section.rows)]
    grid = _grid([(section.columns[k], section.columns[k] in section.right) for k in used])
    for row in section.rows:
        grid.add_row(*(_styled(row[k], "") for k in used))
    return grid


def _list(section: Section) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for lead, title, text in section.rows:
        lead_in = plain(titled(title, text))
        said = Text.assemble((lead_in, "bold"), " " if title else "", plain(text), overflow="fold")
        grid.add_row(Text(plain(lead)), said)
    return grid
