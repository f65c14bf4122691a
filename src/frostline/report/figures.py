"""Numbers and names as the reports print them."""

from __future__ import annotations

import math

MINUS = "−"


def plain(text: object) -> str:
    r"""Names come from anybody's script: one line, and no control characters.

    >>> plain("two\nlines, a bell \x07")
    'two lines, a bell \\x07'
    """
    flat = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in flat)


def digits(ms: float) -> int:
    """Decimals for a column of times of which the largest is `ms`.

    >>> digits(1234), digits(61.2), digits(4.5), digits(0.3)
    (0, 1, 2, 3)
    """
    return next((n for n, least in enumerate((1000, 10, 1)) if abs(ms) >= least), 3)


def number(value: float, decimals: int | None = None) -> str:
    """
    >>> number(61.23), number(-7.061), number(1234.5), number(0.02, 1), number(0), number(float("nan"))
    ('61.2', '−7.06', '1,234', '<0.1', '0', '?')
    """
    if not math.isfinite(value):
        return "?"
    if value == 0:
        return "0"
    places = digits(value) if decimals is None else decimals
    least = 10.0**-places
    if abs(value) < least / 2:  # it is there: 0.0 would say that it is not
        return f"<{least:.{places}f}" if value > 0 else f"{MINUS}0"
    return f"{value:,.{places}f}".replace("-", MINUS)


def ms(value: float) -> str:
    """
    >>> ms(61.23), ms(0.0123)
    ('61.2 ms', '0.012 ms')
    """
    return f"{number(value)} ms"


def between(low: float, high: float, decimals: int | None = None) -> str:
    """An interval, both ends with the same decimals; empty when there is none.

    >>> between(9.96, 10.31), between(3, 3), between(-0.4, 1.5, 1)
    ('10.0–10.3', '', '−0.4 to 1.5')
    """
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        return ""
    places = digits(max(abs(low), abs(high))) if decimals is None else decimals
    link = " to " if low < 0 else "–"
    return f"{number(low, places)}{link}{number(high, places)}"


def percent(share: float) -> str:
    """A share, at most 100 %; 100 % only when it is all.

    >>> percent(0.5), percent(0.99984), percent(1.02), percent(0.0001), percent(-0.115)
    ('50.0 %', '99.9 %', '100 %', '<0.1 %', '−11.5 %')
    """
    if share >= 1:
        return "100 %"
    return f"{number(100 * (min(share, 0.9994)), 1)} %"


def signed(share: float) -> str:
    """
    >>> signed(0.0066), signed(-0.2), signed(0)
    ('+0.7 %', '−20.0 %', '+0.0 %')
    """
    return f"{100 * share:+.1f} %".replace("-", MINUS)


def times(factor: float) -> str:
    """
    >>> times(1.312), times(float("inf")), times(37.2)
    ('1.31×', 'any ×', '37×')
    """
    if not math.isfinite(factor):
        return "any ×"
    return f"{factor:.2f}×" if factor < 10 else f"{factor:,.0f}×"
