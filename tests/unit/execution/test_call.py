"""One stage, called: chunks of one size, what it may return, precision and compiling."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import ChunkTooLarge, KeyMissing, StageFailed
from frostline.execution.call import Ready, described

CPU = torch.device("cpu")


def ready(fn: Any, *, reads: Any = "x", **options: Any) -> Ready:
    return Ready(fl.Stage("stage", fn, reads=reads, **options), CPU)


def keys(n: int) -> list[str]:
    return [f"k{i}" for i in range(n)]


@pytest.mark.parametrize(("n", "calls"), [(1, [4]), (4, [4]), (7, [4, 4]), (12, [4, 4, 4])])
def test_every_call_has_the_same_size_and_the_tail_is_cut_off(n: int, calls: list[int]) -> None:
    seen: list[Tensor] = []
    stage = ready(lambda x: [seen.append(x), 2 * x][1], batch_size=4)
    found = stage.many(keys(n), [torch.arange(n)])["stage"]
    assert found.tolist() == [2 * i for i in range(n)]
    assert [len(x) for x in seen] == calls
    assert set(seen[-1].tolist()) <= set(range(n))  # filled with a real value


def test_text_is_given_as_a_list_and_a_list_may_come_back() -> None:
    stage = ready(lambda texts: [t.upper() for t in texts], batch_size=3)
    assert stage.many(keys(4), [["a", "b", "c", "d"]])["stage"] == ["A", "B", "C", "D"]


def test_a_random_stage_gets_what_it_draws_from_and_filled_up_rows_draw_as_the_last_one() -> None:
    asked: list[list[str]] = []

    def rng(names: Any) -> list[str]:
        asked.append([*names])
        return [*names]

    def joined(x: Any, rng: list[str]) -> Any:
        return [f"{value}{name}" for value, name in zip(x, rng, strict=True)]

    stage = ready(joined, batch_size=2, random=True)
    assert stage.many(keys(3), [["a", "b", "c"]], rng)["stage"] == ["ak0", "bk1", "ck2"]
    assert asked == [["k0", "k1"], ["k2", "k2"]]
    assert ready(joined, random=True).one("k7", [["a"]], rng)["stage"] == ["ak7"]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_what_is_computed_for_training_can_take_part_in_it(options: Any) -> None:
    net = nn.Linear(3, 2)
    for inference in (True, False):
        stage = Ready(fl.Stage("stage", net, reads="x", **options), CPU, inference=inference)
        x = torch.ones(2, 3)
        found = stage.many(keys(2), [x])["stage"] if options else stage.one("k0", [x])["stage"]
        assert (found.is_inference(), found.requires_grad) == (inference, False)


def test_nothing_to_do_is_done_without_a_call() -> None:
    assert ready(lambda x: 1 / 0, batch_size=2).many([], [[]]) == {"stage": []}


def both(x: Any) -> Any:
    return x + 1, x * 2


def named(x: Any) -> Any:
    return {"twice": x * 2, "more": x + 1, "other": None}


@pytest.mark.parametrize("fn", [both, named, lambda x: [x + 1, x * 2]])
def test_several_fields_come_as_a_tuple_a_list_or_a_dict(fn: Any) -> None:
    one = ready(fn, writes=["more", "twice"]).one("a", [3])
    many = ready(fn, writes=["more", "twice"], batch_size=2).many(keys(3), [torch.tensor([1, 2, 3])])
    assert one == {"more": 4, "twice": 6}
    assert {n: c.tolist() for n, c in many.items()} == {"more": [2, 3, 4], "twice": [2, 4, 6]}


def test_one_field_may_come_under_its_name_or_be_a_dict_itself() -> None:
    assert ready(lambda x: {"y": x}, writes="y").one("a", [3]) == {"y": 3}
    assert ready(lambda x: {"y": x, "z": 1}, writes="y").one("a", [3]) == {"y": {"y": 3, "z": 1}}
    assert ready(lambda x: (x, x), writes="y").one("a", [3]) == {"y": (3, 3)}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ((1, 2, 3), "it returned tuple of 3; expected 2 values: a, b"),
        ({"a": 1}, "it returned dict of 1; expected 2 values: a, b"),
        (None, "it returned NoneType; expected 2 values: a, b"),
    ],
)
def test_a_wrong_number_of_fields_is_told(result: Any, told: str) -> None:
    with pytest.raises(StageFailed, match=r"'k7'") as caught:
        ready(lambda x: result, writes=["a", "b"]).one("k7", [0])
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: x[:3], r"it returned a tensor \[3\] for 'stage', called with 4 samples; expected a row"),
        (lambda x: ["a"], "it returned a list of 1 for 'stage', called with 4 samples"),
        (lambda x: x.sum(), r"it returned Tensor for 'stage'; expected a tensor \[4, …\] or a list of 4"),
        (lambda x: None, "it returned NoneType for 'stage'"),
        (lambda x: "abcd", "it returned str for 'stage'"),
    ],
)
def test_a_wrong_number_of_rows_is_told(fn: Any, told: str) -> None:
    with pytest.raises(StageFailed, match=told):
        ready(fn, batch_size=4).many(keys(2), [torch.zeros(2)])


def test_arrays_and_tuples_of_rows_are_columns_too() -> None:
    assert ready(lambda x: x.numpy() + 1, batch_size=2).many(keys(3), [torch.zeros(3)])["stage"].tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert ready(lambda x: ("p", "q"), batch_size=2).many(keys(2), [[1, 2]])["stage"] == ["p", "q"]
    assert torch.equal(ready(lambda x: np.ones(2)).one("a", [0])["stage"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_what_a_stage_raises_is_told_with_the_samples_and_is_the_cause(options: Any) -> None:
    stage = ready(lambda x: 1 / 0, **options)
    with pytest.raises(StageFailed, match="Stage 'stage' failed for 'k0': ZeroDivisionError: ") as caught:
        stage.many(keys(1), [[1]]) if options else stage.one("k0", [1])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.stage, caught.value.keys) == ("stage", ("k0",))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_exit_ends_a_sample_and_not_the_program(options: Any) -> None:
    stage = ready(lambda x: sys.exit(3), **options)
    with pytest.raises(StageFailed, match="Stage 'stage' failed for 'k0': SystemExit: 3"):
        stage.many(keys(1), [[1]]) if options else stage.one("k0", [1])


def test_exit_in_a_compiled_network_ends_a_sample_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sys.exit(3)

    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    stage = ready(Leaving(), on="device", batch_size=2, compile=True)
    with pytest.raises(StageFailed, match="Stage 'stage' failed for 'k0': SystemExit: 3"):
        stage.many(keys(1), [torch.ones(1, 2)])


def test_no_memory_is_another_matter_than_a_bad_sample() -> None:
    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore\nlines")

    with pytest.raises(ChunkTooLarge, match=r"with 4 samples a call: CUDA out of memory\. Tried") as caught:
        ready(full, batch_size=4).many(keys(1), [[1.0]])
    assert (caught.value.stage, caught.value.chunk) == ("stage", 4)
    assert "lines" not in str(caught.value)


def test_no_gradient_is_recorded() -> None:
    net = nn.Linear(2, 2)
    assert not ready(net, on="device", batch_size=2).many(keys(1), [torch.ones(1, 2)])["stage"].requires_grad


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_is_that_of_a_copy(name: Any, dtype: torch.dtype) -> None:
    net = nn.Linear(3, 2).requires_grad_(False)
    before = net.weight.clone()
    stage = ready(net, on="device", batch_size=2, precision=name)
    found = stage.many(keys(3), [torch.ones(3, 3)])["stage"]
    assert found.dtype == dtype
    assert net.weight.dtype == torch.float32
    assert torch.equal(net.weight, before)
    assert torch.equal(found[:2], net.to(dtype)(torch.ones(2, 3, dtype=dtype)))


def test_precision_leaves_whole_numbers_and_text_alone() -> None:
    seen: list[Any] = []
    stage = ready(
        lambda x, n, t: [seen.extend((x, n, t)), x][1],
        reads=["x", "n", "t"],
        on="device",
        batch_size=1,
        precision="bf16",
    )
    stage.many(["a"], [torch.ones(1), torch.ones(1, dtype=torch.int64), ["text"]])
    assert [seen[0].dtype, seen[1].dtype, seen[2]] == [torch.bfloat16, torch.int64, ["text"]]


def test_without_precision_the_given_network_runs_itself() -> None:
    net = nn.Linear(3, 2).requires_grad_(False)
    assert ready(net, on="device").fn is net
    assert ready(fl.lazy(lambda: net), on="device").fn is net


def test_a_network_is_compiled_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: [asked.append(options), module][1])
    stage = ready(nn.Linear(3, 2), on="device", batch_size=4, compile=True)
    for n in (1, 4, 7):
        stage.many(keys(n), [torch.ones(n, 3)])
    assert asked == [{"dynamic": False}]
    ready(nn.Linear(3, 2), on="device", batch_size=4)
    assert len(asked) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
def test_a_compiled_network_gives_what_the_plain_one_gives() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    fast = ready(net, on="device", batch_size=2, compile=True).many(keys(5), [x])["stage"]
    torch.testing.assert_close(fast, net(x))


def test_an_error_in_one_line() -> None:
    assert described(ValueError("two\n  lines")) == "ValueError: two lines"
    assert described(ValueError()) == "ValueError"
    assert described(KeyMissing("no key 'a'")) == "no key 'a'"
