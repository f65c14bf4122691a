"""Rows out of spans that are made up here: each moment counts once, and they add up to the step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler.rows import Spans
from frostline.results import Row

Line = list[Any]


def span(
    kind: str, start: float, end: float, *, name: str = "", parent: int = -1, step: int = 0,
    device: tuple[float, float] = (0.0, 0.0), beside: bool = False, ours: float = 0.0,
) -> Line:  # fmt: skip
    return [kind, name or kind, parent, step, start, end, *device, int(beside), ours]


def spans(
    *lines: Line, bounds: tuple[Any, ...] = (10.0,), cuda: bool = False, fresh: tuple[int, ...] = ()
) -> Spans:
    ends = [[b, b] if isinstance(b, float) else [*b] for b in bounds]
    last = ends[-1][1 if cuda else 0]
    times = [e[0] - (ends[i - 1][0] if i else 0.0) for i, e in enumerate(ends)]
    block = {
        "phase": "B", "start": 0.0, "end": last, "times": times,
        "fresh": [*fresh] or [0] * len(times),
    }  # fmt: skip
    return Spans({"blocks": [block], "spans": [{"spans": [*lines], "bounds": ends, "cuda": cuda}]})


def ms(found: Spans) -> dict[str, float]:
    return {row.kind: row.ms / 1000 for row in found.rows()}


def total(rows: tuple[Row, ...]) -> float:
    return sum(row.ms for row in rows) / 1000


def test_what_no_span_covers_is_other() -> None:
    found = ms(spans(span("data", 0, 2), span("forward", 2, 5), span("backward", 6, 9)))
    assert found == pytest.approx({"data": 2, "forward": 3, "backward": 3, "other": 2})


def test_a_closure_inside_of_the_optimizers_step_counts_once() -> None:
    """Lightning's way: forward and backward run inside of optimizer.step(closure)."""
    found = spans(
        span("optimizer", 1, 9),
        span("forward", 2, 4, name="Model", parent=0),
        span("forward", 2.5, 3.5, name="Model.head", parent=1),
        span("backward", 4, 8, parent=0),
        span("zero_grad", 1, 1.5, parent=0),
    )
    assert ms(found) == pytest.approx(
        {"forward": 2, "backward": 4, "zero_grad": 0.5, "optimizer": 1.5, "other": 2}
    )
    assert found.modules["Model"] == pytest.approx([1, 2])  # with what is inside of it
    assert found.modules["Model.head"] == pytest.approx([1, 1])


def test_shares_are_of_the_step_and_the_mean_is_over_steps() -> None:
    found = spans(
        span("forward", 0, 2), span("forward", 4, 8, step=1), bounds=(4.0, 12.0)
    ).rows()  # fmt: skip
    forward = next(row for row in found if row.kind == "forward")
    assert (forward.ms, forward.share) == pytest.approx((3000, 0.5))


def test_the_step_between_two_epochs_is_left_out_with_its_spans() -> None:
    found = spans(
        span("forward", 0, 1), span("forward", 50, 90, step=1), span("forward", 100, 101, step=2),
        bounds=(2.0, 100.0, 102.0), fresh=(0, 1, 0),
    )  # fmt: skip
    assert found.steps == 2
    assert ms(found) == pytest.approx({"forward": 1, "other": 1})


def test_a_span_that_never_ended_is_nothing() -> None:
    found = spans(span("data", 0, 2), ["forward", "Model", -1, -1, 0.0, 0.0, 0.0, 0.0, 1])
    assert ms(found) == pytest.approx({"data": 2, "other": 8})


def test_on_a_gpu_rows_are_the_devices() -> None:
    """The host runs ahead: its step takes 3, the device's 10."""
    found = ms(
        spans(
            span("forward", 0.1, 0.5, device=(0, 4)), span("backward", 0.5, 1, device=(4, 9)),
            bounds=((3.0, 10.0),), cuda=True,
        )
    )  # fmt: skip
    assert found == pytest.approx({"forward": 4, "backward": 5, "other": 1})


def test_a_wait_for_data_that_the_device_did_not_notice_is_overlap() -> None:
    """The host waits 6 for its batch; of that the device, still busy with the last step, idles for 1."""
    found = spans(
        span("data", 0, 6, device=(0, 1)), span("forward", 6, 6.5, device=(1, 10)),
        bounds=((10.0, 10.0),), cuda=True,
    )  # fmt: skip
    assert ms(found) == pytest.approx({"data": 6, "forward": 9, "overlap": -5, "other": 0})
    assert total(found.rows()) == pytest.approx(10)


def test_what_is_copied_while_waiting_for_data_counts_once_on_a_gpu() -> None:
    """A collate function that moves its batch to the device, in the script's own process."""
    found = spans(
        span("data", 0, 6, device=(0, 6)), span("copy", 4, 6, parent=0, device=(4, 6)),
        span("forward", 6, 6.1, device=(6, 10)), bounds=((10.0, 10.0),), cuda=True,
    )  # fmt: skip
    assert ms(found) == pytest.approx({"data": 4, "copy": 2, "forward": 4, "other": 0})


def test_another_thread_is_beside_the_step() -> None:
    found = spans(span("forward", 0, 9), span("save", 1, 8, beside=True))
    assert ms(found) == pytest.approx({"forward": 9, "save": 7, "overlap": -7, "other": 1})


def test_what_is_nested_in_another_thread_counts_once_there() -> None:
    found = spans(
        span("forward", 0, 9, name="Student"),
        span("forward", 1, 8, name="Teacher", beside=True),
        span("forward", 2, 7, name="Teacher.body", parent=1, beside=True),
    )
    assert ms(found) == pytest.approx({"forward": 16, "overlap": -7, "other": 1})


def test_a_call_on_another_stream_leaves_the_module_around_it_whole() -> None:
    found = spans(
        span("forward", 0, 1, name="Model", device=(0, 8)),
        span("forward", 0.2, 0.4, name="Model.aside", parent=0, device=(1, 4), beside=True),
        bounds=((2.0, 10.0),),
        cuda=True,
    )
    assert ms(found) == pytest.approx({"forward": 11, "overlap": -3, "other": 2})


def test_a_prefix_runs_from_the_outermost_modules_beginning() -> None:
    """Model begins at 1; its part blocks.5 ends at 6; what comes before blocks.5 is part of the prefix."""
    found = spans(
        span("forward", 1, 9, name="Model"),
        span("forward", 4, 8, name="Model.blocks", parent=0),
        span("forward", 5, 6, name="Model.blocks.5", parent=1),
    )
    assert found.prefixes["Model.blocks.5"] == pytest.approx(5)
    assert "Model" not in found.prefixes


def test_a_prefix_inside_of_an_optimizers_closure_does_not_begin_there() -> None:
    found = spans(
        span("optimizer", 0, 10),
        span("forward", 2, 8, name="Model", parent=0),
        span("forward", 3, 6, name="Model.stem", parent=1),
    )
    assert found.prefixes["Model.stem"] == pytest.approx(4)


Cut = st.lists(st.integers(1, 9), min_size=1, max_size=12)
KINDS = ["data", "forward", "backward", "optimizer", "clip", "save"]


@given(Cut, st.data())
def test_rows_add_up_to_the_step_and_none_is_below_zero(lengths: list[int], data: st.DataObject) -> None:
    """Random nests of spans: every one begins and ends inside of the one around it."""
    lines: list[Line] = []

    def nest(start: float, end: float, parent: int, deep: int) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        me = len(lines)
        lines.append(span(kind, start, end, parent=parent, name=f"{kind}{me}"))
        if deep and data.draw(st.booleans()):
            third = (end - start) / 3
            nest(start, start + third, me, deep - 1)
            nest(start + 2 * third, end, me, deep - 1)

    at = 0.0
    for length in lengths:
        nest(at, at + length, -1, 2)
        at += length + data.draw(st.integers(0, 2))
    found = spans(*lines, bounds=(at,)).rows()
    assert total(found) == pytest.approx(at)
    assert all(row.ms >= -1e-6 for row in found)
    covered = sum(line[5] - line[4] for line in lines if line[2] < 0)
    assert found[-1].ms / 1000 == pytest.approx(at - covered, abs=1e-6)


def test_nothing_gives_no_rows() -> None:
    found = Spans({"blocks": []})
    assert (found.rows(), found.ms, found.timeline([])) == ((), 0.0, ())


def test_the_timeline_has_depths_workers_and_a_track_for_the_device() -> None:
    found = spans(
        span("data", 0, 1),
        span("forward", 1, 2, name="Model", device=(1, 4)),
        span("forward", 1, 1.5, name="Model.head", parent=1, device=(2, 3)),
        bounds=((5.0, 5.0),),
        cuda=True,
    )
    lines = [
        {"pid": 71, "start": 0.5, "s": 1.0, "dataset": "D"},
        {"pid": 72, "start": -0.5, "s": 1.0, "dataset": "D"},
        {"pid": 71, "start": 99.0, "s": 1.0, "dataset": "D"},
    ]
    bars = found.timeline(lines)
    assert [(b.track, b.name, b.depth) for b in bars] == [
        ("host", "data", 0), ("host", "Model", 0), ("device", "Model", 0), ("host", "Model.head", 1),
        ("device", "Model.head", 1), ("worker 1", "D", 0), ("worker 2", "D", 0),
    ]  # fmt: skip
    assert [(b.start, b.ms) for b in bars if b.name == "Model"] == [(1000, 1000), (1000, 3000)]


def test_the_timeline_is_of_steps_without_an_evaluation() -> None:
    """One stands in the first block, which passes leave out."""
    first = spans(span("forward", 0, 90, name="Evaluated"), bounds=(99.0, 100.0, 101.0), fresh=(1, 0, 0))
    second = spans(span("forward", 0, 0.5, name="Model"), bounds=(1.0, 2.0))
    raws = [first._raw, second._raw]
    both = Spans({key: [entry for raw in raws for entry in raw[key]] for key in ("blocks", "spans")})
    assert [bar.name for bar in both.timeline([])] == ["Model"]
    assert [bar.name for bar in first.timeline([])] == ["Evaluated"]  # there is no other


def test_what_the_script_prepares_itself_lies_in_its_wait_for_data() -> None:
    found = spans(span("data", 0, 1), bounds=((5.0, 5.0),))
    found._raw = {**found._raw, "pid": 71}
    lines = [{"pid": pid, "start": 0.2, "s": 0.5, "dataset": "D"} for pid in (71, 72)]
    bars = found.timeline(lines)
    assert [(b.track, b.name, b.depth) for b in bars] == [
        ("host", "data", 0),
        ("host", "D", 1),
        ("worker 1", "D", 0),
    ]


def test_what_entering_and_leaving_spans_takes_is_no_part_of_the_step() -> None:
    found = spans(
        span("forward", 1, 7, name="Model", ours=0.5),
        span("forward", 2, 4, name="Model.head", parent=0, ours=0.25),
        span("backward", 8, 9, ours=0.5),
    )
    assert found.ms / 1000 == pytest.approx(10 - 1.25)
    assert ms(found) == pytest.approx({"forward": 6 - 0.25, "backward": 1, "other": 2})
    assert total(found.rows()) == pytest.approx(10 - 1.25)


def test_on_a_device_it_takes_nothing() -> None:
    found = spans(span("forward", 0, 1, device=(0.0, 8.0), ours=0.5), bounds=((2.0, 10.0),), cuda=True)
    assert total(found.rows()) == pytest.approx(10)
