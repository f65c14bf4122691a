"""The SVG of a pipeline."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

import frostline as fl
from frostline.drawing import draw, shorten

NS = "{http://www.w3.org/2000/svg}"


def same(*values):
    return values


def noisy(*values, rng):
    return values


def source(*names: str) -> fl.Source:
    return fl.Source.table([{"key": "a", **dict.fromkeys(names, 1)}])


def boxes(svg: str) -> dict[str, ET.Element]:
    """The rectangle of each box by its name."""
    groups = ET.fromstring(svg).iter(f"{NS}g")
    return {g.find(f"{NS}text").text: g.find(f"{NS}rect") for g in groups}


def line(svg: str) -> float:
    path = next(p for p in ET.fromstring(svg).iter(f"{NS}path") if p.get("class") == "fl-line")
    return float(path.get("d").removeprefix("M0 ").split("H")[0])


PIPELINES = {
    "source only": fl.Pipeline(source("x")),
    "chain": fl.Pipeline(
        source("f0"), *(fl.Stage(f"f{i}", same, reads=["f0", f"f{i - 1}"][i == 1 :]) for i in range(1, 16))
    ),
    "fan": fl.Pipeline(
        source("x"),
        *(fl.Stage(f"e{i}", same, reads="x") for i in range(13)),
        fl.Stage("join", same, reads=[f"e{i}" for i in range(13)]),
        fl.Stage("flip", noisy, reads=["join", "e3"], random=True),
    ),
    "live": fl.Pipeline(
        source("x"),
        fl.Stage("far", same, reads="near"),
        fl.Stage("near", noisy, reads="x", random=True),
        fl.Stage("cold", same, reads="x"),
        fl.Pick("cold", n=3),
        fl.Stage("late", same, reads=["cold", "far"]),
    ),
    "two picked": fl.Pipeline(
        source("x"), fl.Stage("a", same, reads="x"), fl.Pick(["a", "x"], n=2), fl.Stage("b", same, reads="a")
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_boxes_do_not_overlap_and_lie_inside(name: str) -> None:
    svg = draw(PIPELINES[name], title=name)
    root = ET.fromstring(svg)
    rects = [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in boxes(svg).values()]
    assert len(rects) == len(PIPELINES[name].steps) + 2
    for i, (x, y, w, h) in enumerate(rects):
        assert x >= 0
        assert y >= 0
        assert x + w <= float(root.get("width"))
        assert y + h <= float(root.get("height"))
        for x2, y2, w2, h2 in rects[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


@pytest.mark.parametrize("name", PIPELINES)
def test_what_is_frozen_lies_below_the_line(name: str) -> None:
    pipeline, svg = PIPELINES[name], draw(PIPELINES[name])
    found = boxes(svg)
    for stage in pipeline.stages:
        assert (float(found[stage.name].get("y")) > line(svg)) == (stage.name not in pipeline.why_not_frozen)
    assert float(found["to the model"].get("y")) < line(svg)


def test_text_is_escaped_cut_and_whole_in_the_title() -> None:
    name = "<script>&\x1b a name that is far too long for its box"
    data = fl.Pipeline(source("x"), fl.Stage("s", same, reads="x", writes="y"))
    svg = draw(data, title=name)
    assert "<script>" not in svg
    assert ET.fromstring(svg).get("aria-label") == name.replace("\x1b", " ")
    long = fl.Pipeline(source("x"), fl.Stage("l" * 40, same, reads="x", writes="y"))
    root = ET.fromstring(draw(long))
    assert [t.text for t in root.iter(f"{NS}text") if t.text.startswith("lll")] == ["l" * 16 + "…"]
    assert any(t.text.startswith("l" * 40) for t in root.iter(f"{NS}title"))


def test_file_names_that_are_no_utf8_can_be_written() -> None:
    draw(fl.Pipeline(fl.Source.files("\udcff/*.png"))).encode("utf-8")


def test_the_cut_is_named_and_drawing_loads_nothing() -> None:
    never = fl.lazy(pytest.fail, "loaded")
    data = fl.Pipeline(source("x"), *(fl.Stage(f"s{i}", never, reads="x", on="device") for i in range(5)))
    svg = draw(data)
    assert all(text in svg for text in ("· s0", "· s2", "and 2 more", "device × 32"))
    assert not never.loaded


def test_wide_letters_take_two_columns() -> None:
    assert shorten("模型名字", 8) == "模型名字"
    assert shorten("模型名字长", 8) == "模型名…"
