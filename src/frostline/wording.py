"""Figures as people read them."""

from __future__ import annotations


def size(n: float) -> str:
    """
    >>> size(512), size(5_990_400), size(3 * 10**12)
    ('512 B', '5.99 MB', '3.00 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}" if n >= 100 else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:,.2f} TB"


def duration(seconds: float) -> str:
    """
    >>> duration(0.2), duration(42), duration(200), duration(7300)
    ('less than 1 s', '42 s', '3 min', '2.0 h')
    """
    if seconds < 1:
        return "less than 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def about(seconds: float) -> str:
    """
    >>> about(0.2), about(42)
    ('less than 1 s', 'about 42 s')
    """
    return duration(seconds) if seconds < 1 else f"about {duration(seconds)}"


def many(n: int, word: str) -> str:
    """
    >>> many(1, "sample"), many(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def plain(text: object, most: int = 0) -> str:
    """Text without control characters, cut to `most` characters."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return clean[: most - 1] + "…" if most and len(clean) > most else clean
