"""Attributes come back exactly as they were."""

from __future__ import annotations

import types

from frostline.profiler.inside.patches import Patches


class Base:
    size = 1

    @staticmethod
    def plain() -> int:
        return 1

    @property
    def long(self) -> int:
        return 2


class Below(Base):
    pass


def test_what_was_inherited_is_inherited_again() -> None:
    patches = Patches()
    patches.set(Below, "size", 7)
    assert (Below.size, Base.size) == (7, 1)
    patches.undo()
    assert "size" not in vars(Below)
    assert Below.size == 1


def test_static_methods_and_properties_stay_what_they_are() -> None:
    before = {name: vars(Base)[name] for name in ("plain", "long")}
    patches = Patches()
    for name in before:
        patches.set(Base, name, None)
    patches.undo()
    assert {name: vars(Base)[name] for name in before} == before
    assert isinstance(vars(Base)["plain"], staticmethod)


def test_what_was_set_twice_comes_back_from_the_first() -> None:
    module, patches = types.ModuleType("m"), Patches()
    module.value = 1  # type: ignore[attr-defined]
    patches.set(module, "value", 2)
    patches.set(module, "value", 3)
    patches.undo()
    assert module.value == 1


def test_undoing_twice_does_nothing() -> None:
    thing, patches = types.SimpleNamespace(a=1), Patches()
    patches.set(thing, "a", 2)
    patches.undo()
    thing.a = 5
    patches.undo()
    assert thing.a == 5


def test_what_was_not_there_is_gone() -> None:
    thing, patches = types.SimpleNamespace(), Patches()
    patches.set(thing, "a", 2)
    patches.undo()
    assert vars(thing) == {}
