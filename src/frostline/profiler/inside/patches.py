"""Attributes that are replaced for a while, and come back exactly as they were."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """
    >>> class Thing:
    ...     size = 1
    >>> patches = Patches()
    >>> patches.set(Thing, "size", 2)
    >>> Thing.size
    2
    >>> patches.undo()
    >>> Thing.size
    1
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """An attribute that the owner only inherits is taken away again by `undo`, not written down."""
        self._before.append((owner, name, value, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """What somebody else has replaced since is theirs, and stays."""
        while self._before:
            owner, name, ours, before = self._before.pop()
            if vars(owner).get(name, _ABSENT) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
