"""`frostline show` as a person runs it: what is printed, drawn, and said when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import frostline as fl
from frostline.cli.main import main

WORK = '''
from __future__ import annotations
import frostline as fl

def decode(path): return path
def load(): raise RuntimeError("a network was loaded")
def flip(features, rng): return features
def norm(x): return x
def loss(model, batch): return 0
def adam(model): return None
def score(model, feed): return {}

def workload(*, clips: str = "clips/*.mp4", frames: int = 16, lr: float | None = None) -> fl.Workload:
    """Clips.

    frames: how many of a clip
    """
    data = fl.Pipeline(
        fl.Source.files(clips),
        fl.Stage("pixels", decode, reads="path", writes=["pixels", "times"]),
        fl.Stage("features", fl.lazy(load), reads="pixels", on="device", batch_size=64, precision="bf16"),
        fl.Pick("features", n=frames),
        fl.Stage("flipped", flip, reads="features", random=True),
        fl.Stage("normal", norm, reads="flipped"),
    )
    return fl.Workload(data, model=fl.lazy(load), loss=loss, optimizer=adam, evaluate=score, batch_size=8,
                       metric=fl.Metric("top1", better="higher", margin=0.5),
                       splits={"train": .75, "val": .25})

def two():
    rows = [{"key": str(i), "x": i, "scene": i % 5, "part": ["a", "b"][i % 2]} for i in range(40)]
    a = fl.Pipeline(fl.Source.table(rows), fl.Stage("y", norm, reads="x"))
    b = fl.Pipeline(fl.Source.dataset([{"z": 1}]))
    return fl.Workload({"support": a, "query": b}, run=norm, splits="part")

def grouped():
    data = two().data["support"]
    return fl.Workload(data, run=norm, splits={"train": .5, "val": .5}, group="scene")
'''
NAME = "h4_show_work"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{NAME}.py").write_text(WORK)
    (tmp_path / "clips").mkdir()
    for i in range(12):
        (tmp_path / "clips" / f"{i}.mp4").touch()
    yield tmp_path
    sys.modules.pop(NAME, None)


@pytest.fixture
def run(folder: Path, capsys, monkeypatch):
    monkeypatch.delenv("FROSTLINE_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(target: str, *words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["show", target, *map(str, words)])
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def test_parameters_alone_are_told_without_making_the_workload(run, folder: Path) -> None:
    made = WORK + "\ndef heavy(*, place: str, n: int = 3):\n    raise RuntimeError('it was made')\n"
    (folder / f"{NAME}.py").write_text(made)
    code, out, err = run(f"{NAME}.py:heavy", "--parameters")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "place str required" in lines
    assert "n int 3" in lines
    code, out, _ = run(f"{NAME}.py:heavy", "place=here", "n=5", "--parameters", "--json")
    assert code == 0
    found = {p["name"]: (p["required"], p["given"]) for p in json.loads(out)["parameters"]}
    assert found == {"place": (True, "'here'"), "n": (False, "5")}
    code, _, err = run(f"{NAME}.py:heavy")
    assert code == 1
    assert "place: missing; it is required" in err
    assert "`frostline show TARGET --parameters` lists all" in err


def test_the_graph_in_a_terminal(run) -> None:
    code, out, err = run(f"{NAME}.py", "frames=8")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for expected in (
        f"workload {NAME}",
        "source files clips/*.mp4: 12 keys; fields path",
        "❄ pixels path → pixels, times (cpu; decode)",
        "❄ stored times, features",
        "↻ pick 8 entries of features, drawn each epoch (eval: spread)",
        "↻ flipped features → flipped (cpu; flip)",
        "every epoch: it reads 'flipped', and stage 'flipped' is random",
        "outputs times, features, normal",
        "model load, loaded when needed",
        "metric top1, higher is better, margin 0.5",
        "frames int 16 8 how many of a clip",
        "lr float | None None",
    ):
        assert expected in lines
    places = [
        out.index(mark) for mark in ("source ", "❄ pixels", "❄ features", "❄ the frostline", "↻ flipped")
    ]
    assert places == sorted(places)
    assert "device, 64 samples a call; bf16" in out


def test_in_a_pipe_there_is_nothing_for_a_terminal(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "show", f"{NAME}.py"],
        capture_output=True, text=True, encoding="utf-8", cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_several_pipelines_and_splits(run) -> None:
    code, out, _ = run(f"{NAME}:two")
    assert code == 0
    assert "pipeline support" in out
    assert "pipeline query" in out
    assert "a 20, b 20 keys" in out
    assert "this source has no field 'part'" in out
    assert "It has no parameters." in out
    about = json.loads(run(f"{NAME}:grouped", "--json")[1])
    counts = about["pipelines"]["data"]["splits"]
    assert sum(counts.values()) == 40
    assert {n % 8 for n in counts.values()} == {0}, "scenes of eight samples stay together"


def test_a_source_that_cannot_be_listed_hides_nothing_else(run) -> None:
    code, out, _ = run(f"{NAME}.py", "clips=nothing/*.mp4")
    assert code == 0
    assert "No file matches nothing/*.mp4" in out
    assert "❄ features" in out


def test_json(run) -> None:
    code, out, _ = run(f"{NAME}.py", "frames=4", "--json")
    about = json.loads(out)
    assert code == 0
    data = about["pipelines"]["data"]
    assert (data["source"]["kind"], data["source"]["keys"]) == ("files", 12)
    assert [s["name"] for s in data["stages"] if s["frozen"]] == ["pixels", "features"]
    assert data["cut"] == ["times", "features"]
    assert sum(data["splits"].values()) == 12
    assert about["model"] == {"name": "load", "lazy": True}
    given = {p["name"]: p["given"] for p in about["parameters"]}
    assert given == {"clips": None, "frames": "4", "lr": None}
    assert (about["stores"], about["pictures"]) == ([], {})


def test_a_store_that_is_there_is_mentioned(run, folder: Path) -> None:
    with fl.Store.create(folder / "stores" / NAME, {"n": fl.Field((), "int64")}) as writer:
        writer.append("a", {"n": 1})
    (folder / "stores" / NAME / "broken" / "commits").mkdir(parents=True)
    _, out, _ = run(f"{NAME}.py")
    assert f"stores/{NAME}: 1 rows; fields n" in " ".join(out.split())
    found = json.loads(run(f"{NAME}.py", "--json")[1])["stores"]
    assert [bool(store["problem"]) for store in found] == [False, True]


def test_svg(run, folder: Path) -> None:
    code, out, _ = run(f"{NAME}.py", "--svg", "g.svg")
    assert (code, "graph of data: g.svg" in out) == (0, True)
    assert (folder / "g.svg").read_text(encoding="utf-8").startswith("<svg")
    run(f"{NAME}:two", "--svg", "g.svg")
    assert (folder / "g-support.svg").exists()
    assert (folder / "g-query.svg").exists()
    code, _, err = run(f"{NAME}.py", "--svg", "no/folder/g.svg")
    assert (code, "Cannot write the graph no/folder/g.svg" in err) == (1, True)


@pytest.mark.parametrize("frozen", [True, False])
def test_audit_says_what_was_found_and_fails_when_it_must(run, monkeypatch, frozen) -> None:
    class Report:
        stages = (types.SimpleNamespace(name="pixels", frozen=frozen),)
        ok = frozen

        def __str__(self) -> str:
            return "what the audit\n  - found, " + "at length " * 10

    seen = []
    planted = types.ModuleType("frostline.inspector")
    planted.audit = lambda workload, **_: seen.append(workload) or Report()
    monkeypatch.setitem(sys.modules, "frostline.inspector", planted)
    code, out, _ = run(f"{NAME}.py", "--audit")
    assert (code, len(seen)) == (0 if frozen else 1, 1)
    assert "what the audit\n  - found, at length" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "❄ pixels" not in out, "what is declared is not shown beside what was found"
    code, out, _ = run(f"{NAME}.py", "--audit", "--json")
    assert (code, json.loads(out)["audit"]["ok"]) == (0 if frozen else 1, frozen)


def test_mistakes_are_one_message(run) -> None:
    code, out, err = run(f"{NAME}.py", "frmaes=3", "lr=x")
    assert (code, out) == (1, "")
    assert "frmaes: no such parameter; did you mean frames?" in err
    assert "lr=x: expected a number or none" in err
    code, _, err = run("h4_show_wrok.py")
    assert (code, f"Did you mean {NAME}.py?" in err) == (1, True)
