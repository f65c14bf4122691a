"""What is left to do after a feed, and where it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.supply.layout import Layout


def named(steps: Any) -> list[tuple[bool, list[str]]]:
    return [(step.pooled, [stage.name for stage in step.stages]) for step in steps]


def pipeline() -> fl.Pipeline:
    def stage(name: str, reads: str, **options: Any) -> fl.Stage:
        fn = (lambda x, rng: x) if options.get("random") else (lambda x: x)
        return fl.Stage(name, fn, reads=reads, **options)

    return fl.Pipeline(
        fl.Source.table([{"key": "a", "x": 1.0, "label": 1}]),
        stage("pixels", "x"),
        stage("feats", "pixels", on="device"),
        stage("norm", "feats"),
        stage("crop", "pixels", random=True),
        stage("mixed", "crop", batch_size=2),
        stage("again", "mixed"),
        stage("drop", "norm", on="device", random=True),
        stage("last", "drop"),
        outputs=["norm", "again", "last", "label"],
    )


def test_without_a_store_all_runs_and_what_needs_no_device_runs_ahead() -> None:
    live = Layout(pipeline(), None)
    assert named(live.ahead) == [(True, ["pixels", "crop"]), (False, ["mixed"]), (True, ["again"])]
    assert named(live.late) == [(False, ["feats", "norm", "drop"]), (True, ["last"])]
    assert live.raw == ("x", "label")
    assert not live.direct


def test_with_a_store_only_the_rest_runs() -> None:
    stored = Layout(pipeline(), ["norm", "pixels", "label", "_source.1234"])
    assert named(stored.ahead) == [(True, ["crop"]), (False, ["mixed"]), (True, ["again"])]
    assert named(stored.late) == [(False, ["drop"]), (True, ["last"])]
    assert stored.raw == ()
    assert stored.read_from_feed() == ["label", "norm", "pixels"]


def test_frozen_stages_read_raw_fields_from_the_source_as_they_did() -> None:
    half = Layout(pipeline(), ["x", "label"])
    assert half.raw == ("x",)
    assert half.read_from_feed() == ["label"]


def test_a_feed_delivers_directly_where_only_device_stages_are_left() -> None:
    data = fl.Pipeline(
        fl.Source.table([{"key": "a", "x": 1.0}]),
        fl.Stage("y", lambda x, rng: x, reads="x", random=True, on="device"),
    )
    assert Layout(data, ["x"]).direct
    assert not Layout(data, ["x"]).pooled
    assert not Layout(data, None).direct


@pytest.mark.parametrize("first", [True, False])
def test_a_pick_is_left_to_the_feed_unless_something_reads_the_whole(first: bool) -> None:
    pick = fl.Pick("f", n=2)
    stage = fl.Stage("g", lambda f, rng: f, reads="f", random=True)
    data = fl.Pipeline(
        fl.Source.table([{"key": "a", "x": 1.0}]),
        fl.Stage("f", lambda x: torch.zeros(5), reads="x"),
        *([pick, stage] if first else [stage, pick]),
    )
    assert Layout(data, ["f"]).read_from_feed() == ([pick] if first else ["f"])


def test_a_store_that_helps_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no field of this pipeline\. Freeze this pipeline again"):
        Layout(pipeline(), ["other"]).read_from_feed()
