"""What processes that train one model say to each other; and one process that has nobody to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Ranks(Protocol):
    """What processes that train one model say to each other."""

    world: int

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        """Whether it fitted everywhere, and the rows of all ranks together."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the sum over all ranks."""

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes what it is on the first rank."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""

    def gather(self, value: Any) -> list[Any]:
        """What all ranks said; plain values."""


class Alone:
    """One process."""

    world = 1

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        return fits, rows

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        return

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        return

    def most(self, number: int) -> int:
        return number

    def gather(self, value: Any) -> list[Any]:
        return [value]
