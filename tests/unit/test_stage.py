"""Stage and lazy: one step and all that can be wrong with it. Pick: which parts of a row are read."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import frostline as fl
from frostline.errors import UsageError
from frostline.stage import DEFAULT_CHUNK, Lazy, Pick, Stage


def one(x):
    return x


def two(x, y, *, scale=1):
    return x


def drawn(x, *, rng):
    return x


def problems(*args, **options) -> tuple[str, ...]:
    with pytest.raises(UsageError, match="cannot work") as caught:
        Stage(*args, **options)
    return caught.value.problems


# Stage


def test_reads_and_writes() -> None:
    stage = Stage("features", one, reads="x")
    assert (stage.reads, stage.writes, stage.fields) == (("x",), ("features",), {})
    assert (stage.on, stage.chunk, stage.random) == ("cpu", None, False)
    fields = {"tokens": fl.Field((None,), "int32"), "mask": fl.Field((None,), "bool")}
    told = Stage("t", two, reads=["x", "y"], writes=fields)
    assert (told.reads, told.writes, told.fields) == (("x", "y"), ("tokens", "mask"), fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stage.name = "other"


def test_samples_a_call() -> None:
    assert Stage("a", one, reads="x", on="device").chunk == DEFAULT_CHUNK
    assert Stage("a", one, reads="x", on="device", batch_size=7).chunk == 7
    assert Stage("a", one, reads="x", batch_size=7).chunk == 7
    shown = repr(Stage("a", drawn, reads="x", on="device", batch_size=7, random=True))
    assert shown == "<Stage a: x → a, on the device, 7 samples a call, random>"


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (one, {"reads": ["x", "y"]}, "fn(x) cannot be called with x, y"),
        (two, {"reads": "x"}, "missing a required argument: 'y'"),
        (one, {"reads": "x", "random": True}, "with x and rng="),
        (drawn, {"reads": "x"}, "missing a required"),
        (torch.nn.Linear(2, 2), {"reads": ["x", "y"]}, "too many positional arguments"),
    ],
)
def test_a_function_that_does_not_take_these_fields(fn, options, said) -> None:
    (found,) = problems("a", fn, **options)
    assert said in found


def test_functions_whose_signature_is_not_known_pass() -> None:
    Stage("a", fl.lazy(one, 1), reads=["x", "y", "z"])
    Stage("a", int, reads="x")
    Stage("a", max, reads=["x", "y"])
    Stage("a", lambda *values, **rest: values, reads=["x", "y"], random=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "gpu"}, "on is 'gpu'; one of 'cpu', 'device'"),
        ({"on": "device", "precision": "int8"}, "precision is 'int8'; one of None, 'fp32'"),
        ({"precision": "bf16"}, "give on='device'"),
        ({"compile": True}, "give on='device'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"eval": one}, "with random=True"),
        ({"version": 2}, "version is 2; expected a string"),
        ({"reads": []}, "reads is ()"),
        ({"reads": 5}, "reads is (5,)"),
        ({"reads": ["x", "x"]}, "each once"),
        ({"writes": []}, "writes is ()"),
        ({"writes": ["y", None]}, "writes is ('y', None)"),
        ({"writes": "a b"}, "a name is a letter or _"),
    ],
)
def test_options_that_cannot_be(options, said) -> None:
    assert any(said in problem for problem in problems("a", one, **({"reads": "x"} | options)))


def test_all_that_is_wrong_with_a_stage_is_said_at_once() -> None:
    found = problems("", 3, reads=(), on="gpu", batch_size=-1, version=1)
    for words in (
        "its name is ''",
        "fn is int 3",
        "reads is ()",
        "on is",
        "batch_size is -1",
        "version is 1",
    ):
        assert any(words in problem for problem in found), words
    assert any("its name is None" in problem for problem in problems(None, one, reads="x"))


def test_the_same_stage_with_other_options() -> None:
    fields = {"tokens": fl.Field((None,), "int32")}
    first = Stage("t", drawn, reads="x", writes=fields, random=True, eval=one, version="2")
    other = first.with_options(batch_size=8)
    assert (other.batch_size, other.fields, other.writes) == (8, fields, ("tokens",))
    assert (other.fn, other.random, other.eval, other.version) == (drawn, True, one, "2")
    assert first.batch_size is None
    with pytest.raises(UsageError, match="batch_size is 0"):
        first.with_options(batch_size=0)


# lazy


def test_lazy_loads_once_also_when_threads_ask_at_once() -> None:
    calls = []
    made = fl.lazy(lambda n, scale: calls.append(n) or [n * scale], 3, scale=2)
    assert (made.loaded, calls) == (False, [])
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: made.get(), range(32)))
    assert (calls, made.loaded, got[0]) == ([3], True, [6])
    assert all(value is got[0] for value in got)


def test_a_loader_that_failed_is_asked_again() -> None:
    answers = iter([ZeroDivisionError, None])

    def load():
        if error := next(answers):
            raise error
        return "network"

    made = fl.lazy(load)
    with pytest.raises(ZeroDivisionError):
        made.get()
    assert (made.loaded, made.get()) == (False, "network")


def test_another_process_loads_for_itself() -> None:
    made = fl.lazy(dict, a=1)
    made.get()
    copied = copy.copy(made)  # as sending it to another process does
    assert isinstance(copied, Lazy)
    assert (copied.loaded, copied.get()) == (False, {"a": 1})


def test_lazy_wants_a_loader() -> None:
    with pytest.raises(UsageError, match="expected a function that loads something"):
        fl.lazy(torch.zeros(3))


# Pick


def test_one_field_or_several() -> None:
    assert Pick("features", 4).fields == ("features",)
    assert Pick(("features", "boxes"), n=4) == Pick(["features", "boxes"], 4)
    assert dataclasses.replace(Pick("features", 4), n=2) == Pick("features", 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pick("features", 4).n = 3


@settings(deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(["spread", "first", "random"]))
def test_indices_are_distinct_ascending_and_inside(data, train, how) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=8)))
    n = data.draw(st.integers(1, int(lengths.min())))
    keys = [f"clip-{i}" for i in range(len(lengths))]
    out = Pick("x", n, eval=how).indices(0, 0, keys, lengths, train)
    assert out.shape == (len(lengths), n)
    assert out.dtype == np.int64
    assert (np.diff(out, axis=1) > 0).all()
    assert ((out >= 0) & (out < lengths[:, None])).all()


def test_training_draws_hang_on_seed_epoch_key_and_fields_only() -> None:
    keys = [f"clip-{i}" for i in range(50)]
    pick = Pick("x", 8)
    whole = pick.indices(0, 0, keys, 24, train=True)
    np.testing.assert_array_equal(pick.indices(0, 0, keys[20:25], [24] * 5, train=True), whole[20:25])
    np.testing.assert_array_equal(pick.indices(0, 0, keys[::-1], 24, train=True), whole[::-1])
    for other in (
        pick.indices(1, 0, keys, 24, train=True),
        pick.indices(0, 1, keys, 24, train=True),
        Pick("y", 8).indices(0, 0, keys, 24, train=True),
    ):
        assert (other != whole).any(axis=1).mean() > 0.9


def test_what_evaluation_sees() -> None:
    def seen(how, n, length):
        return Pick("x", n, eval=how).indices(3, 5, ["a"], [length], train=False)[0].tolist()

    assert seen("spread", 4, 24) == [0, 8, 15, 23]
    assert seen("spread", 2, 24) == [0, 23]
    assert seen("spread", 5, 5) == [0, 1, 2, 3, 4]
    assert seen("spread", 1, 5) == [2]
    assert seen("spread", 1, 1) == [0]
    assert seen("first", 3, 24) == [0, 1, 2]
    assert seen("random", 3, 24) == Pick("x", 3).indices(3, 5, ["a"], [24], train=True)[0].tolist()


def test_rows_that_are_too_short_are_named() -> None:
    with pytest.raises(UsageError, match=r"n=8\).*2 of these 3 are shorter") as caught:
        Pick(("x", "y"), 8).indices(0, 0, ["a", "b", "c"], [4, 8, 7], train=True)
    assert caught.value.problems == ("'a' has length 4", "'c' has length 7")


def test_no_rows_are_no_problem() -> None:
    assert Pick("x", 3).indices(0, 0, [], [], train=True).shape == (0, 3)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="only axis=0") as caught:
        Pick((), 0, axis=1, eval="last")
    assert len(caught.value.problems) == 4
    with pytest.raises(UsageError, match="each once"):
        Pick(("x", "x"), 1)


def test_a_lazy_network_is_drawn_alike_and_disturbs_no_other_draw() -> None:
    torch.manual_seed(3)
    usual = torch.rand(4)
    torch.manual_seed(3)
    one = fl.lazy(torch.nn.Linear, 4, 2).get()
    assert torch.equal(torch.rand(4), usual)
    torch.manual_seed(9)
    assert torch.equal(one.weight, fl.lazy(torch.nn.Linear, 4, 2).get().weight)


def test_a_lazy_network_is_drawn_alike_on_cards_that_it_is_the_first_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps the last seed that was given, and a card begins with it."""
    torch.manual_seed(3)
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert fl.lazy(seeds.copy).get() == [0]
    assert seeds == [0, 3]
