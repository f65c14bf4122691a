"""Names in byte code: globals, closures, imports inside, attributes, methods of self."""

from __future__ import annotations

import random
import time as clock
from time import time

from torch import nn

from frostline.inspector.bytecode import uses_of

NETWORK = nn.ModuleDict({"a": nn.Linear(1, 1)})


def paths(fn, owner: type | None = None) -> dict[str, object]:
    return {use.path: use.value for use in uses_of(fn, owner)}


def test_globals_and_their_attributes_are_followed() -> None:
    def fn():
        return random.random() + clock.time() + time()

    found = paths(fn)
    assert found["random.random"] is random.random
    assert found["clock.time"] is clock.time
    assert found["time"] is time
    use = next(use for use in uses_of(fn) if use.path == "time")
    assert use.container is fn.__globals__
    assert use.where.startswith(
        "test_globals_and_their_attributes_are_followed.<locals>.fn (test_bytecode.py:"
    )


def test_imports_inside_a_function_are_followed() -> None:
    def fn():
        import os.path as places
        import random as chance
        import xml.dom
        from random import gauss as bell

        return chance.random(), bell(0, 1), xml.dom, places.join("a")

    import os.path
    import xml.dom

    found = paths(fn)
    assert found["places.join"] is os.path.join
    assert found["chance.random"] is random.random
    assert found["bell"] is random.gauss
    assert found["xml.dom"] is xml.dom


def test_closures_nested_functions_and_comprehensions_count() -> None:
    network = NETWORK

    def fn(rows):
        return [random.choice(rows) for _ in rows], lambda: network.a

    found = paths(fn)
    assert found["random.choice"] is random.choice
    assert found["network.a"] is NETWORK["a"]


def test_an_empty_cell_is_passed_over() -> None:
    def fn():
        return later

    assert paths(fn) == {}
    later = 1


def test_methods_called_on_self_are_found_in_the_class() -> None:
    class Flips:
        def __call__(self, x):
            return self.flip(x)

        def flip(self, x):
            return x

    assert paths(Flips.__call__, Flips)["self.flip"] is Flips.flip
    assert paths(Flips.flip, Flips) == {}
