"""Spans around modules' calls, and what frozen modules are given: row by row, by content."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from frostline.profiler.inside import calls
from frostline.profiler.inside.calls import Calls, Inputs, _in_rows
from frostline.profiler.inside.modules import Use
from frostline.profiler.inside.spans import Spans

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
          torch.int8, torch.bool]  # fmt: skip


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError
        return x


def use(module: nn.Module, name: str) -> Use:
    return Use(module, 0, 0, name=name)


def test_calls_nest_and_end_also_where_they_raise() -> None:
    inner = Fails()
    outer = nn.Sequential(inner)
    spans = Spans(cuda=False)
    calls = Calls([use(outer, "Outer"), use(inner, "Outer.0")], spans)
    with pytest.raises(ValueError):  # noqa: PT011 -- it has no text
        outer(-torch.ones(1))
    outer(torch.ones(1))
    calls.remove()
    outer(torch.ones(1))
    assert [(s.name, s.parent) for s in spans.found] == [
        ("Outer", -1), ("Outer.0", 0), ("Outer", -1), ("Outer.0", 2),
    ]  # fmt: skip
    assert all(s.end >= s.start for s in spans.found)
    assert not outer._forward_hooks
    assert not outer._forward_pre_hooks


def test_a_module_that_calls_itself_nests() -> None:
    class Deep(nn.Module):
        def forward(self, n: int) -> int:
            return 0 if n == 0 else 1 + int(self(n - 1))

    deep, spans = Deep(), Spans(cuda=False)
    calls = Calls([use(deep, "Deep")], spans)
    assert deep(3) == 3
    calls.remove()
    assert [s.parent for s in spans.found] == [-1, 0, 1, 2]


def test_a_module_compiled_in_place_is_timed_around_its_call_and_put_back() -> None:
    net = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    plain = net(x)
    net.compile(backend="eager")
    before, spans = net._compiled_call_impl, Spans(cuda=False)
    calls = Calls([use(net, "Net")], spans)
    assert torch.equal(net(x), plain)
    calls.remove()
    assert [s.name for s in spans.found] == ["Net"]
    assert net._compiled_call_impl is before
    torch._dynamo.reset()


# --- what frozen modules are given --------------------------------------------------------------------


def fed(*batches: Any, **kwargs: Any) -> Inputs:
    net = nn.Identity()
    found = Inputs(net)
    for batch in batches:
        net(batch)
    found.remove()
    net(torch.ones(1))
    return found


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=6))
def test_rows_that_were_given_before_are_counted_exactly(batches: list[list[int]]) -> None:
    """Within a batch and over batches; what repeats is the content, not the object."""
    values = torch.randn(6, 3)
    found = fed(*(values[batch].clone() for batch in batches))
    rows = [row for batch in batches for row in batch]
    assert (found.calls, found.looked, found.rows) == (len(batches), len(batches), len(rows))
    assert found.repeats == len(rows) - len({*rows})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_type_of_input_is_told_apart_on_the_cpu(dtype: torch.dtype) -> None:
    a = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    assert fed(a, a.clone()).repeats == 3


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3).to(torch.float8_e4m3fn),
        torch.eye(3).to_sparse(),
        torch.ones(2, 3, dtype=torch.cfloat),
    ],
    ids=["float8", "sparse", "complex"],
)
def test_what_cannot_be_hashed_does_not_end_the_script(value: Tensor) -> None:
    assert fed(value).calls == 1


def test_a_row_of_one_number_out_of_many_has_bytes() -> None:
    assert _in_rows(torch.ones(1, 4)[:, 0], 1).tolist() == [[0, 0, 128, 63]]


def test_rows_of_a_transposed_input_are_its_rows() -> None:
    a = torch.randn(4, 3)
    assert fed(a, a.t().contiguous().t()).repeats == 4


def test_inputs_by_name_and_inside_of_containers_are_looked_at() -> None:
    class Net(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    net, x = Net(), torch.randn(2, 3)
    found = Inputs(net)
    net(x)
    net(pixels=x)
    net({"pixels": [x]})
    net("text")
    found.remove()
    assert (found.calls, found.looked, found.repeats) == (4, 3, 4)


def test_a_row_is_the_same_only_where_all_that_is_given_is() -> None:
    """A denoiser is given the same picture at another time: that is not the same work."""

    class Net(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x * t

    net, x = Net(), torch.randn(2, 3)
    found = Inputs(net)
    for t in range(3):
        net(x, torch.full((2, 1), t))
    found.remove()
    assert found.repeats == 0


def test_what_is_ours_is_not_counted_and_what_is_paused_is_not_looked_at() -> None:
    net, x = nn.Identity(), torch.randn(2, 3)
    found = Inputs(net)
    net(x)
    found.ours = True
    net(x)
    found.ours, found.paused = False, True
    net(x)
    found.remove()
    assert (found.calls, found.looked, found.rows, found.repeats) == (2, 1, 2, 0)


def test_a_parameter_that_is_written_to_is_seen() -> None:
    net = nn.Linear(2, 2)
    found = Inputs(net)
    assert not found.moved()
    with torch.no_grad():
        net.weight.mul_(0.9)
    assert found.moved()
    found.remove()


def test_a_teacher_that_follows_by_its_data_is_seen() -> None:
    """The usual way of an exponential moving average: `p.data.mul_(m).add_(q.data)`."""
    net, student = nn.Linear(2, 2), nn.Linear(2, 2)
    found = Inputs(net)
    for p, q in zip(net.parameters(), student.parameters(), strict=True):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)
    assert found.moved()
    found.remove()


# --- on a device: the same code, on the CPU -----------------------------------------------------------


def mixed(value: Tensor) -> list[bytes]:
    found = Inputs(nn.Identity())
    return [row.numpy().tobytes() for row in mixed_rows(found, value)]


def mixed_rows(inputs: Inputs, value: Tensor) -> Tensor:
    return inputs._mixed(_in_rows(value, len(value)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_device_equal_rows_are_equal_and_others_are_not(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2 if dtype is torch.bool else 100, (6, 40)).to(dtype)
    order = torch.tensor([0, 1, 2, 3, 4, 5, 3, 0])
    found = mixed(values[order])
    assert len({*found}) == len({tuple(row.tolist()) for row in values})
    assert (found[6], found[7]) == (found[3], found[0])


@given(st.integers(1, 40), st.data())
def test_on_a_device_rows_that_differ_in_one_bit_differ(width: int, data: st.DataObject) -> None:
    dtype, bits = data.draw(st.sampled_from([(torch.int64, 64), (torch.int32, 32), (torch.uint8, 8)]))
    least = 0 if dtype is torch.uint8 else -(1 << (bits - 1))
    number = st.integers(least, least + (1 << bits) - 1)
    row = data.draw(st.lists(number, min_size=width, max_size=width))
    at, bit = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, bits - 1))
    first = torch.tensor([row], dtype=dtype)
    second = first.clone()
    mask = (1 << bit) if dtype is torch.uint8 or bit < bits - 1 else least
    second[0, at] ^= mask
    views = (
        [first, second]
        if dtype is not torch.int32
        else [first.view(torch.float32), second.view(torch.float32)]
    )
    assert mixed(views[0]) != mixed(views[1])


@given(st.permutations(range(8)))
def test_on_a_device_the_same_values_in_another_order_are_another_row(order: list[int]) -> None:
    values = torch.arange(8.0)[None]
    assert (mixed(values) == mixed(values[:, torch.tensor(order)])) == (order == sorted(order))


def test_on_a_device_rows_of_another_width_differ() -> None:
    """Texts that are padded to the longest of their batch: [5, 6] is not [5, 6, 0]."""
    assert mixed(torch.tensor([[5, 6]])) != mixed(torch.tensor([[5, 6, 0]]))


def test_on_a_device_a_few_rows_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(7, 16)
    at_once = mixed(values)
    monkeypatch.setattr(calls, "_AT_ONCE", 130)  # two rows
    assert mixed(values) == at_once


def test_what_waits_on_the_device_is_counted_when_it_is_looked_at() -> None:
    found, x = Inputs(nn.Identity()), torch.randn(3, 2)
    found._waiting = [[mixed_rows(found, x)], [mixed_rows(found, x[:2])]]
    found.look()
    found.look()
    assert found.repeats == 2
