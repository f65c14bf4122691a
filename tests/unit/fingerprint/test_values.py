from __future__ import annotations

import datetime
import decimal
import functools
import itertools
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frostline.errors import UsageError
from frostline.fingerprint import digest, value_of
from frostline.fingerprint.files import content_of


class Kind(Enum):
    A = 1
    B = 2


@dataclass
class Options:
    size: int = 3
    name: str = "a"


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x


class Plain:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def double(x: int) -> int:
    return 2 * x


DIFFERENT: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        1.0,
        -0.0,
        0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        1j,
        "",
        "1",
        b"1",
        "None",
    ),
    *(
        1 << 70,
        -(1 << 70),
        "a" * 1000,
        "a" * 1001,
        b"a" * 1000,
        [],
        (),
        {},
        set(),
        [1],
        (1,),
        {1},
        [[1]],
        [1, 1],
    ),
    *(
        {"a": 1},
        {"a": 1.0},
        {1: "a"},
        {"1": "a"},
        {(1, 2): 3},
        range(3),
        range(0, 3, 2),
        slice(3),
        Kind.A,
        Kind.B,
    ),
    *(
        Options(),
        Options(size=4),
        Options(size=3.0),
        Slotted(1),
        Slotted(2),
        Plain(x=1),
        Plain(y=1),
        Plain(x=2),
    ),  # type: ignore[arg-type]
    *(
        np.float32(1),
        np.float64(1),
        np.int64(1),
        np.zeros(2),
        np.zeros(2, "f4"),
        np.zeros((2, 1)),
        np.ones(2),
    ),
    *(np.dtype("f4"), np.dtype("f8"), np.array(["a", None], object), np.array("2020", "M8[D]")),
    *(
        torch.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(1, 2),
        torch.ones(2),
        torch.tensor(0.0),
    ),
    *(
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.Size([1]),
        torch.strided,
    ),
    *(
        double,
        len,
        np.clip,
        np.add,
        int,
        float,
        Options,
        functools.partial(double, 1),
        functools.partial(double, 2),
    ),
    *(lambda x: 1, lambda x: 2, datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), decimal.Decimal("1.0")),
    *(
        decimal.Decimal("1.00"),
        deque([1]),
        deque([1], 3),
        OrderedDict(a=1),
        defaultdict(int, a=1),
        itertools.count(2),
    ),
    *(
        np.random.default_rng(0),
        np.random.default_rng(1),
        torch.Generator().manual_seed(3),
        list[int],
        int | str,
    ),
    *(Path("nowhere/a"), Path("nowhere/b"), Plain(x=1).__init__, Plain(x=2).__init__),
    *(torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), torch.complex(torch.zeros(1), torch.ones(1))),
]


def test_no_two_different_values_are_taken_for_each_other() -> None:
    seen: dict[str, Any] = {}
    for value in DIFFERENT:
        found = digest(value_of(value))
        assert found not in seen, (value, seen.get(found))
        seen[found] = value


def test_equal_values_are_equal() -> None:
    pairs: list[tuple[Any, Any]] = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 1, 3}),
        (float("nan"), float("nan")),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (Options(), Options()),
        (np.random.default_rng(5), np.random.default_rng(5)),
        (Plain(x=[1, {"y": (2,)}]), Plain(x=[1, {"y": (2,)}])),
        (torch.complex(torch.ones(1), -torch.ones(1)), torch.complex(torch.ones(1), torch.ones(1)).conj()),
    ]
    for a, b in pairs:
        assert digest(value_of(a)) == digest(value_of(b)), a


def test_cycles_end() -> None:
    a: list[Any] = [1]
    a.append(a)
    b: list[Any] = [2]
    b.append(b)
    assert digest(value_of(a)) != digest(value_of(b))
    node = Plain()
    node.me = node  # type: ignore[attr-defined]
    assert digest(value_of(node)) == digest(value_of(node))


def test_objects_that_share_parts_do_not_grow_without_end() -> None:
    def made(last: int) -> Plain:
        node = Plain(x=last)
        for _ in range(60):
            node = Plain(a=node, b=node)
        return node

    assert digest(value_of(made(1))) == digest(value_of(made(1))) != digest(value_of(made(2)))


def test_a_bit_in_an_array_counts() -> None:
    x = np.zeros(1000, np.float32)
    before = value_of(x)
    x.view(np.uint8)[1777] ^= 1
    assert value_of(x) != before


def test_what_has_no_content_is_named_with_its_place_and_all_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        thing = Plain(inner={"log": log}, steps=(i for i in range(3)), fine=threading.Lock())
        with pytest.raises(UsageError) as caught:
            value_of(thing)
    text = str(caught.value)
    assert len(caught.value.problems) == 2
    assert "the value.inner['log']" in text
    assert "the value.steps" in text
    assert "version=" in text


def test_masks_names_and_kinds_of_arrays_count() -> None:
    plain = np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")])
    turned = np.array([(1, 2)], dtype=[("b", "i4"), ("a", "i4")])
    masked = [np.ma.array([1.0, 2.0], mask=[False, last]) for last in (False, True)]
    different = [plain, turned, plain.view(np.recarray), *masked, np.array([1.0, 2.0])]
    assert len({digest(value_of(value)) for value in different}) == len(different)
    assert value_of(masked[1]) == value_of(masked[1].copy())


def test_an_object_that_refuses_to_be_copied_is_named_whatever_it_raises() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise KeyError("no copies")  # torch.jit.ScriptFunction raises a PickleError

    with pytest.raises(UsageError, match="Odd, which has no content"):
        value_of(Odd())


def test_a_ufunc_made_of_own_code_is_not_taken_for_its_name() -> None:
    with pytest.raises(UsageError, match=r"numpy\.ufunc"):
        value_of(np.frompyfunc(double, 1, 1))
    assert digest(value_of(np.vectorize(double))) != digest(value_of(np.vectorize(len)))


def test_tensors_without_content_are_refused() -> None:
    with pytest.raises(UsageError, match="meta"):
        value_of({"w": torch.empty(3, device="meta")})


def test_paths_count_by_what_lies_there(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("same")
    b.write_text("same")
    assert value_of(a) == value_of(b) == {"file": content_of(a)}
    assert value_of(str(a)) == str(a)
    assert value_of(str(a), files="loader") == value_of(a)
    b.write_text("other")
    assert value_of(a) != value_of(b)


def test_folders_count_for_a_loader_and_as_models_for_a_stage(tmp_path: Path) -> None:
    model, inputs = tmp_path / "model", tmp_path / "inputs"
    for folder, name in ((model, "config.json"), (inputs, "x.jpg")):
        folder.mkdir()
        (folder / name).write_text("1")
    assert value_of(str(inputs), files="stage") == str(inputs)
    assert value_of(str(inputs), files="loader") != str(inputs)
    before = value_of(str(model), files="stage")
    (model / "config.json").write_text("2")
    assert value_of(str(model), files="stage") != before
    assert value_of(".", files="loader") == "."


def test_a_folder_of_inputs_or_of_code_is_a_place(tmp_path: Path) -> None:
    inputs, here = tmp_path / "inputs", Path(__file__).parent
    inputs.mkdir()
    before = value_of(inputs, files="stage")
    (inputs / "new.jpg").write_text("1")
    assert value_of(inputs, files="stage") == before != value_of(tmp_path, files="stage")
    assert value_of(here, files="stage") == value_of(here.parent, files="loader")
    assert value_of(inputs, files="loader") != before


def test_networks_in_values_count_by_weights() -> None:
    net = torch.nn.Linear(2, 2)
    holder = Plain(net=net)
    before = value_of(holder)
    net.weight.data[0, 0] += 1
    assert value_of(holder) != before


def test_vouched_code_counts_by_name() -> None:
    tree = value_of(Options(), vouched=True)
    assert "code" not in tree
    assert tree["object"] == {"named": "Options"}


def test_what_was_vouched_for_may_lack_content_but_closures_still_count(tmp_path: Path) -> None:
    def made(n: int) -> Any:
        def inner(x: int) -> int:
            return inner(x) + n

        return inner

    assert (
        value_of(made(1), vouched=True) == value_of(made(1), vouched=True) != value_of(made(2), vouched=True)
    )
    with open(tmp_path / "log", "w") as log:
        assert value_of(Plain(log=log), vouched=True)


def test_the_state_of_an_object_is_what_a_copy_would_get() -> None:
    class Cached(Plain):
        def __getstate__(self) -> dict[str, object]:
            return {"x": self.x}  # type: ignore[attr-defined]

    assert value_of(Cached(x=1, memo=5)) == value_of(Cached(x=1, memo=6)) != value_of(Cached(x=2, memo=5))
