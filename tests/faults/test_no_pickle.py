"""Nothing is unpickled: not from a store, not from what is imported."""

from __future__ import annotations

import ast
import contextlib
import pickle  # noqa: TID251 – to plant a pickle and to see that nobody opens one
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import FrostlineError
from frostline.store.convert import import_folder
from frostline.store.gc import collect

SOURCE = Path(fl.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr("_pickle.loads", refuse)
    monkeypatch.setattr("_pickle.load", refuse)


@pytest.mark.usefixtures("no_pickle")
def test_a_store_is_written_read_extended_checked_and_collected_without_pickle(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fields = {
        "x": fl.Field((2,), "float32", "int8/token"),
        "t": fl.Field((), "json"),
        "b": fl.Field((), "bytes"),
    }
    with fl.Store.create(root, fields, rows_per_shard=2) as writer:
        for i in range(5):
            writer.append(
                str(i), {"x": torch.ones(2), "t": {"i": i}, "b": b"\x80\x04N."}
            )  # itself a pickle of None
        writer.quarantine("bad", reason="no", input=[1])
        writer.delete("3")
    with fl.Store.extend(root, {"y": fl.Field((None,), "int64")}) as extender:
        for key in extender.pending:
            extender.append(key, {"y": torch.arange(2)})
    collect(root, min_dead=0.01)
    store = fl.Store.open(root, check="read")
    assert store.check(deep=True).ok
    assert store["4"]["b"] == b"\x80\x04N."
    assert store.quarantine[0]["key"] == "bad"
    assert len(store.dataset()[0]) == 4


@pytest.mark.parametrize("kind", ["pt", "npy", "npz"])
def test_a_planted_pickle_is_not_run_by_an_import(tmp_path: Path, kind: str) -> None:
    folder, touched = tmp_path / "in", tmp_path / "touched"
    folder.mkdir()
    bomb = np.array([Bomb(touched)], dtype=object)
    if kind == "pt":
        torch.save({"x": Bomb(touched)}, folder / "a.pt")
    elif kind == "npy":
        np.save(folder / "a.npy", bomb, allow_pickle=True)
    else:
        np.savez(folder / "a.npz", x=bomb)
    with contextlib.suppress(FrostlineError):  # refused or quarantined, as the importer sees fit
        import_folder(folder, tmp_path / "out")
    assert not touched.exists()
    pickle.loads(pickle.dumps(Bomb(touched)))  # noqa: S301
    assert touched.exists()  # the bomb works: it was not opened


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _problems(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN]
    for name, call in _calls(tree):
        options = {k.arg: k.value for k in call.keywords}
        if (
            name.endswith("torch.load")
            and ast.unparse(options.get("weights_only", ast.Constant(None))) != "True"
        ):
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        if (
            name in ("np.load", "numpy.load")
            and ast.unparse(options.get("allow_pickle", ast.Constant(False))) != "False"
        ):
            found.append(f"line {call.lineno}: np.load that may unpickle")
        if name in ("eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load"):
            found.append(f"line {call.lineno}: {name}")
    return found


def test_the_source_has_no_way_to_unpickle() -> None:
    problems = {str(path.relative_to(SOURCE)): _problems(path) for path in SOURCE.rglob("*.py")}
    assert len(problems) > 20
    assert {name: found for name, found in problems.items() if found} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "np.load('x', allow_pickle=True)",
        "eval('1')",
        "import joblib.numpy_pickle",
    ],
)
def test_a_planted_fault_is_noticed(tmp_path: Path, planted: str) -> None:
    (tmp_path / "f.py").write_text(planted)
    assert _problems(tmp_path / "f.py")
