"""A table of text, and what its cells are made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frostline.report.figures import digits, number


@dataclass(frozen=True)
class Section:
    """A titled table. Without columns it is a list: (figure, title, text) a row."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    """The columns that hold figures."""
    more: str = ""
    """A line below: what was left out."""


def titled(title: str, text: str) -> str:
    """A title in front of its text.

    >>> titled("six calls", "One does."), titled("Stop!", "Now."), titled("", "Now.")
    ('six calls:', 'Stop!', '')
    """
    return title if not title or not text or title.endswith((".", ":", "!", "?")) else f"{title}:"


def scaled(n: float) -> str:
    """
    >>> scaled(3.2e12) + "FLOP", scaled(1_774_464), scaled(12)
    ('3.2 TFLOP', '1.77 M', '12 ')
    """
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:g} "


def column(values: Sequence[float | None]) -> list[str]:
    """Times below each other, with as many decimals as the largest needs."""
    places = digits(max((abs(v) for v in values if v is not None), default=0))
    return ["?" if value is None else number(value, places) for value in values]


def calls(n: float) -> str:
    """
    >>> calls(6), calls(0.25), calls(1.5)
    ('6', '0.25', '1.5')
    """
    return f"{n:,.2f}".rstrip("0").rstrip(".")
