"""Busy and idle time of a device, from traces that are made up here; intervals against a plain timeline."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler.inside.kernels import _device, gaps, subtract, union

CUDA, HOST = torch._C._autograd.DeviceType.CUDA, torch._C._autograd.DeviceType.CPU
MS = 1_000_000


@dataclass
class Event:
    """As kineto has them; start and end in milliseconds."""

    _name: str
    start: float
    end: float
    place: Any = CUDA
    annotation: bool = False

    def is_user_annotation(self) -> bool:
        return self.annotation

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return round(self.start * MS)

    def duration_ns(self) -> int:
        return round((self.end - self.start) * MS)

    def device_type(self) -> Any:
        return self.place


def kernel(start: float, end: float) -> Event:
    return Event("ampere_sgemm_128x64", start, end)


def copy(start: float, end: float) -> Event:
    return Event("Memcpy HtoD (Pageable -> Device)", start, end)


def host(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, HOST)


def label(kind: str, start: float, end: float) -> Event:
    return host(f"frostline:{kind}:some name", start, end)


def device(*events: Event, steps: int = 1) -> dict[str, Any]:
    traced = SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: [*events]))
    )
    return _device(traced, steps)


def ms(found: dict[str, Any], name: str) -> float:
    return 1000 * float(found[name])


def idle(found: dict[str, Any]) -> dict[str, float]:
    return {cause: 1000 * seconds for cause, seconds in found["idle_s"].items() if seconds}


def test_busy_is_what_runs_at_all_not_the_sum_of_streams() -> None:
    found = device(kernel(0, 4), kernel(2, 6), copy(3, 7), kernel(9, 10))
    assert ms(found, "busy_s") == pytest.approx(8)
    assert idle(found) == pytest.approx({"other": 2})  # nothing of torch went on meanwhile


def test_figures_are_a_steps() -> None:
    found = device(kernel(0, 4), kernel(6, 10), steps=2)
    assert ms(found, "busy_s") == pytest.approx(4)
    assert idle(found) == pytest.approx({"other": 1})
    assert found["kernels"] == 1


@pytest.mark.parametrize("kind", ["data", "copy", "optimizer"])
def test_the_device_is_idle_for_what_the_host_does_meanwhile(kind: str) -> None:
    found = device(kernel(0, 2), label(kind, 2.5, 6.5), kernel(7, 9))
    assert idle(found) == pytest.approx({kind: 5})


def test_what_the_host_did_for_a_small_part_of_the_gap_is_not_its_cause() -> None:
    assert idle(device(kernel(0, 2), label("data", 2, 3), kernel(7, 9))) == pytest.approx({"other": 5})


def test_after_the_host_waited_for_the_device_the_gap_is_that_waits() -> None:
    """`.item()` returns when the last kernel ends; until the next one is launched the device has nothing."""
    found = device(kernel(0, 4), host("cudaStreamSynchronize", 1, 4.05), kernel(6, 8))
    assert idle(found) == pytest.approx({"sync": 2})


def test_a_wait_that_ended_before_is_not_the_gaps() -> None:
    found = device(kernel(0, 4), host("cudaStreamSynchronize", 0.5, 1), kernel(6, 8))
    assert "sync" not in idle(found)


def test_an_asynchronous_copy_is_no_wait() -> None:
    found = device(kernel(0, 4), host("cudaMemcpyAsync", 1, 4.05), kernel(6, 8))
    assert "sync" not in idle(found)


def test_the_labels_shadow_on_the_device_is_no_kernel() -> None:
    shadow = Event("frostline:forward:Model", 0, 10)
    assert ms(device(shadow, kernel(0, 2), kernel(8, 10)), "busy_s") == pytest.approx(4)


def test_copies_that_kernels_run_beside_cost_nothing() -> None:
    """Two copies overlap each other and a kernel: 8 ms of copying, 3 of them alone."""
    found = device(kernel(0, 5), copy(2, 6), copy(4, 8), copy(9, 11), kernel(8, 12))
    assert ms(found, "copy_s") == pytest.approx(8)
    assert ms(found, "exposed_copy_s") == pytest.approx(3)


def test_steps_ends_are_the_windows_ends() -> None:
    """Waiting for the first batch comes before the first kernel, and counts."""
    found = device(
        label("end", 0, 0.001), label("data", 0, 6), kernel(6, 8), label("end", 9, 9.001),
        label("data", 9, 15), kernel(15, 17), label("end", 18, 18.001), steps=2,
    )  # fmt: skip
    assert ms(found, "busy_s") == pytest.approx(2)
    assert idle(found)["data"] == pytest.approx(6.5)


def test_what_ran_before_the_first_step_is_not_its_work() -> None:
    found = device(kernel(-50, 0), label("end", 0, 0.001), kernel(1, 2), label("end", 2, 2.001))
    assert ms(found, "busy_s") == pytest.approx(1)


def test_nothing_on_the_device_is_nothing_to_say() -> None:
    assert device(host("cudaStreamSynchronize", 0, 1), label("data", 0, 3)) == {}


Spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)


def moments(spans: list[Any]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


@given(Spans)
def test_a_union_covers_the_same_and_nothing_twice(spans: list[Any]) -> None:
    found = union(spans)
    assert moments(found) == moments(spans)
    assert sum(end - start for start, end in found) == len(moments(spans))
    assert found == sorted(found)


@given(Spans, st.integers(0, 40), st.integers(1, 40))
def test_gaps_are_the_rest_of_the_window(spans: list[Any], began: int, length: int) -> None:
    ended = began + length
    found = gaps(union(spans), began, ended)
    assert moments(found) == {*range(began, ended)} - moments(spans)
    assert sum(b - a for a, b in found) == len(moments(found))
    assert all(a < b for a, b in found)


@given(Spans, Spans)
def test_what_is_left_of_spans_without_others(spans: list[Any], others: list[Any]) -> None:
    found = subtract(union(spans), union(others))
    assert moments(found) == moments(spans) - moments(others)
    assert sum(b - a for a, b in found) == len(moments(found))


def test_a_device_that_is_behind_the_host_is_busy_until_it_is_done() -> None:
    """The host has queued three steps in 12 ms; the device computes for 99."""
    marks = [Event("frostline:end:step", t, t, HOST) for t in (0, 4, 8, 12)]
    found = device(*marks, kernel(0, 99), steps=3)
    assert found["busy_s"] == pytest.approx(0.033)
    assert sum(found["idle_s"].values()) == pytest.approx(0)


def test_a_label_of_torch_itself_is_no_kernel() -> None:
    """`Optimizer.step#AdamW.step` lies on the device too, over the gaps between its kernels."""
    shadow = Event("Optimizer.step#AdamW.step", 0, 10, annotation=True)
    found = device(kernel(0, 1), shadow, kernel(9, 10))
    assert found["busy_s"] == pytest.approx(0.002)


def test_the_scripts_own_code_is_no_launching() -> None:
    """60 ms of numpy between two kernels; then torch is called every half millisecond."""
    calls = [Event("aten::add", t / 2, t / 2 + 0.3, HOST) for t in range(140, 200)]
    found = device(kernel(0, 1), kernel(61, 70), *calls, kernel(100, 101))
    assert found["idle_s"]["other"] == pytest.approx(0.060, rel=0.01)
    assert found["idle_s"]["launch"] == pytest.approx(0.030, rel=0.01)
