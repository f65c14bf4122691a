from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import frostline as fl
from frostline.errors import UsageError
from frostline.fingerprint import differences, field, fingerprint

WORK = """
    import helpers
    def decode(path):
        return helpers.resize(path)
    def tokens(caption):
        return len(caption)
    def head(features, ids):
        return features, ids
"""
HELPERS = "SIZE = 3\ndef deep(x):\n    return x\ndef resize(x):\n    return deep(x) * SIZE\n"
ROWS = [{"key": "a", "path": "a.mp4", "caption": "one"}]


class Lines:
    """A pipeline of four stages: path → frames → features; caption → ids; both → pair, sum."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.options: dict[str, dict[str, Any]] = {}

    def __call__(self, **chunk: int) -> dict[str, Any]:
        decode = self.lab.load("work:decode")
        module = __import__("work")
        parts = {
            "frames": (decode, "path", {}),
            "features": (self.net, "frames", {"on": "device", "batch_size": 64}),
            "ids": (module.tokens, "caption", {}),
            "pair": (module.head, ("features", "ids"), {"writes": ("pair", "sum")}),
        }
        stages = [
            fl.Stage(name, self.options.get(name, {}).get("fn", fn), reads=reads, **(more | self._more(name)))
            for name, (fn, reads, more) in parts.items()
        ]
        return fingerprint(fl.Pipeline(fl.Source.table(ROWS), *stages), chunk=chunk)

    def _more(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self.options.get(name, {}).items() if key != "fn"}


@pytest.fixture
def lines(lab: Any) -> Lines:
    torch.manual_seed(0)
    lab.write(work=WORK, helpers=HELPERS)
    return Lines(lab)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name].digest != after[name].digest}


def _said(before: dict[str, Any], after: dict[str, Any], name: str = "pair") -> list[str]:
    return differences(before[name].parts, after[name].parts)


def _of_stage(fn: Any) -> Any:
    return fingerprint(fl.Pipeline(fl.Source.table(ROWS), fl.Stage("y", fn, reads="caption")))["y"]


@pytest.mark.parametrize("used", ["HERE / 'table.json'", "Path(__file__).parent", "(__name__, HERE)"])
def test_where_a_file_of_code_lies_does_not_count(lab: Any, used: str) -> None:
    """Nor what else lies beside it, as the stores themselves."""
    head = "from pathlib import Path\nHERE = Path(__file__).parent\ndef fn(x):\n"
    before = _of_stage(lab.load(work=f"{head}    return {used}"))
    (lab.folder / "stores").mkdir()
    (lab.folder / "stores" / "commit.json").write_text("anything")
    assert _of_stage(lab.load(work=f"# a comment\n{head}    return {used}")).digest == before.digest


BELOW_FRAMES = {"frames", "features", "pair", "sum"}
BELOW_FEATURES = {"features", "pair", "sum"}


def test_nothing_changed(lines: Lines) -> None:
    before, after = lines(), lines()
    assert set(before) == {"frames", "features", "ids", "pair", "sum"}
    assert before == after
    assert len({found.digest for found in before.values()}) == 5
    assert _said(before, after) == []


def test_comments_change_nothing(lines: Lines) -> None:
    before = lines()
    lines.lab.write(helpers="# why\n" + HELPERS.replace("return x", "return x  # as is"))
    assert _changed(before, lines()) == set()


def test_code_two_calls_down_reaches_exactly_what_is_below(lines: Lines) -> None:
    before = lines()
    lines.lab.write(helpers=HELPERS.replace("return x", "return -x"))
    after = lines()
    assert _changed(before, after) == BELOW_FRAMES
    assert _said(before, after) == ["code of helpers.deep (stage frames) changed"]


def test_a_constant(lines: Lines) -> None:
    before = lines()
    lines.lab.write(helpers=HELPERS.replace("SIZE = 3", "SIZE = 4"))
    after = lines()
    assert _changed(before, after) == BELOW_FRAMES
    assert _said(before, after) == ["value of helpers.SIZE (stage frames) changed"]


def test_one_bit_of_a_weight(lines: Lines) -> None:
    before = lines()
    lines.net[0].weight.data.view(torch.int32)[0, 0] ^= 1
    after = lines()
    assert _changed(before, after) == BELOW_FEATURES
    [text] = _said(before, after)
    assert text.startswith("weights of stage features: ")


def test_a_buffer_and_an_attribute(lines: Lines) -> None:
    before = lines()
    lines.net[1].running_var.mul_(2)
    middle = lines()
    assert _changed(before, middle) == BELOW_FEATURES
    lines.net[1].eps = 1e-3
    after = lines()
    assert _changed(middle, after) == BELOW_FEATURES
    [text] = _said(middle, after)
    assert text.startswith("structure of the network of stage features changed")


def test_chunk_size_asked_and_got(lines: Lines) -> None:
    before, after = lines(), lines(features=32)
    assert _changed(before, after) == BELOW_FEATURES
    assert _said(before, after) == ["chunk size of stage features: 64 → 32"]
    assert after["features"].parts["stages"]["features"]["chunk_asked"] == 64
    lines.options["features"] = {"batch_size": 32}  # asked or forced: the rows are the same
    assert _changed(after, lines()) == set()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "bf16"}, "precision of stage features: none → bf16"),
        ({"compile": True}, "compile of stage features: False → True"),
    ],
)
def test_precision_and_compile(lines: Lines, options: dict[str, Any], said: str) -> None:
    before = lines()
    lines.options["features"] = options
    after = lines()
    assert _changed(before, after) == BELOW_FEATURES
    assert _said(before, after) == [said]


def test_library_versions(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines()
    now = field.origin.version_of("torch")
    assert now is not None
    monkeypatch.setattr(
        field.origin, "version_of", lambda module: ("torch", "9.0") if module.startswith("torch") else None
    )
    after = lines()
    assert _changed(before, after) == BELOW_FEATURES
    assert _said(before, after) == [f"torch {now[1]} → 9.0 (stage features)"]


def test_parameters_are_named(lines: Lines) -> None:
    lines.lab.write(work=WORK + "    def sized(path, size=1):\n        return size\n")
    sized = lines.lab.load("work:sized")
    lines.options["frames"] = {"fn": functools.partial(sized, size=256)}
    before = lines()
    lines.options["frames"] = {"fn": functools.partial(sized, size=224)}
    after = lines()
    assert _changed(before, after) == BELOW_FRAMES
    assert _said(before, after) == ["parameter size of stage frames: 256 → 224"]


def test_parameters_of_a_callable_object(lines: Lines) -> None:
    text = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Cut:\n    side: int = 2\n"
    cut = lines.lab.load("cuts:Cut", cuts=text + "    def __call__(self, path):\n        return self.side\n")
    lines.options["frames"] = {"fn": cut(3)}
    before = lines()
    lines.options["frames"] = {"fn": cut(4)}
    assert _said(before, lines()) == ["parameter side of stage frames: 3 → 4"]


def test_a_version_stands_for_the_code_but_not_for_parameters(lines: Lines) -> None:
    lines.options["frames"] = {"version": "1"}
    before = lines()
    lines.lab.write(helpers=HELPERS.replace("return x", "return -x"))
    assert _changed(before, lines()) == set()
    lines.options["frames"] = {"version": "2"}
    after = lines()
    assert _changed(before, after) == BELOW_FRAMES
    assert _said(before, after) == ["version of stage frames: 1 → 2"]
    lines.options["features"] = {"version": "1"}
    before = lines()
    lines.net[0].bias.data[0] += 1
    assert _changed(before, lines()) == BELOW_FEATURES


def test_reading_something_else(lines: Lines) -> None:
    before = lines()
    lines.options["ids"] = {}
    stages = before["ids"].parts["stages"]["ids"]
    after = {"field": "ids", "stages": {"ids": {**stages, "reads": ["path"]}}}
    assert differences(before["ids"].parts, after) == ["stage ids now reads path instead of caption"]


def test_a_stage_comes_or_goes() -> None:
    assert differences({"stages": {"a": {}}}, {"stages": {"b": {}}}) == ["stage b is new", "stage a is gone"]


def test_all_problems_of_all_stages_at_once() -> None:
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec("def a(x):\n    return x\ndef b(x):\n    return x", space)
    stages = [fl.Stage("one", space["a"], reads="path"), fl.Stage("two", space["b"], reads="caption")]
    with pytest.raises(UsageError) as caught:
        fingerprint(fl.Pipeline(fl.Source.table(ROWS), *stages))
    assert [text.split(":")[0] for text in caught.value.problems] == ["stage one", "stage two"]
    vouched = [stage.with_options(version="1") for stage in stages]
    assert fingerprint(fl.Pipeline(fl.Source.table(ROWS), *vouched))


def test_parts_stay_small_and_the_digest_does_not_notice(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = "\n".join(f"def a_rather_long_name_{i}(x):\n    return x + {i}" for i in range(1200))
    calls = " + ".join(f"a_rather_long_name_{i}(x)" for i in range(1200))
    fn = lab.load(work=f"{many}\ndef fn(x):\n    return [{calls.replace(' + ', ', ')}]\n")
    pipeline = fl.Pipeline(fl.Source.table(ROWS), fl.Stage("y", fn, reads="path"))
    found = fingerprint(pipeline)["y"]
    assert len(json.dumps(found.parts)) < 48 << 10
    assert found.parts["stages"]["y"]["functions_left_out"] == 1201
    monkeypatch.setattr(field, "_LIMIT", 10**9)
    whole = fingerprint(pipeline)["y"]
    assert whole.digest == found.digest
    assert len(whole.parts["stages"]["y"]["functions"]) == 1201
    changed = {**whole.parts, "stages": {"y": {**found.parts["stages"]["y"], "code": "0" * 32}}}
    assert differences(found.parts, changed) == ["code of stage y changed"]


def test_lazy_networks_count_like_loaded_ones(lab: Any, tmp_path: Path) -> None:
    work = """
        import torch
        def fn(n):
            torch.manual_seed(n)
            return torch.nn.Linear(2, 2)
    """
    load = lab.load(work=work)

    def made(n: int) -> Any:
        stage = fl.Stage("y", fl.lazy(load, n), reads="path", on="device")
        return fingerprint(fl.Pipeline(fl.Source.table(ROWS), stage))["y"]

    assert made(0) == made(0)
    said = differences(made(0).parts, made(1).parts)
    assert said[0] == "parameter args[0] of stage y: 0 → 1"
    assert said[1].startswith("weights of stage y: ")


@pytest.mark.parametrize("seed", ["0", "5"])
def test_equal_in_every_process(lab: Any, seed: str) -> None:
    lab.write(
        work=WORK
        + """
    import torch, frostline as fl
    from frostline.fingerprint import fingerprint
    torch.manual_seed(0)
    stages = [fl.Stage("frames", decode, reads="path")]
    stages += [fl.Stage("x", torch.nn.GELU(), reads="frames", on="device")]
    found = fingerprint(fl.Pipeline(fl.Source.table([dict(key="a", path="p", caption="c")]), *stages))
    digests = {name: one.digest for name, one in found.items()}
    """,
        helpers=HELPERS,
    )
    here = lab.load("work:digests")
    assert (
        json.loads(lab.run("import json, work; print(json.dumps(work.digests))", PYTHONHASHSEED=seed)) == here
    )
