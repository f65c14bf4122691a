from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import frostline as fl
from frostline.errors import UsageError
from frostline.fingerprint import made_by
from frostline.fingerprint.recorder import recording

WORK = """
    import json, os
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    calls = []

    def fn(path=None):
        calls.append(1)
        net = torch.nn.Linear(2, 2)
        net.load_state_dict(load_file(path or {path!r}))
        return net

    def opened(path=None):
        calls.append(1)
        with safe_open(path or {path!r}, "pt") as f:
            net = torch.nn.Linear(2, 2)
            net.load_state_dict({{k: f.get_tensor(k) for k in f.keys()}})
        return net

    def pt():
        calls.append(1)
        net = torch.nn.Linear(2, 2)
        net.load_state_dict(torch.load({path!r}, weights_only=True))
        return net

    def array():
        calls.append(1)
        return np.load({path!r})

    def nothing():
        calls.append(1)
        torch.manual_seed(0)
        return torch.nn.Linear(2, 2)

    def chosen():
        return fn(os.environ["WHICH"])

    def function():
        calls.append(1)
        with open({path!r}) as f:
            n = len(f.read())
        return lambda x: x + n
"""


def _save(path: Path, value: float) -> None:
    aside = path.with_name("aside.tmp")
    state = {"weight": torch.full((2, 2), value), "bias": torch.zeros(2)}
    if path.suffix == ".safetensors":
        save_file(state, aside)
    elif path.suffix == ".pt":
        torch.save(state, aside)
    else:
        with open(aside, "wb") as file:
            np.save(file, state["weight"].numpy())
    os.replace(aside, path)


class Bench:
    def __init__(self, lab: Any, path: Path) -> None:
        self.lab, self.path = lab, path

    def lazy(self, name: str = "fn", *args: Any) -> Any:
        """A lazy of a module that is imported afresh, as in a new process."""
        return fl.lazy(self.lab.load(f"work:{name}", work=WORK.format(path=str(self.path))), *args)

    @staticmethod
    def loads(lazy: Any) -> int:
        return len(lazy.loader.__globals__["calls"])


@pytest.fixture
def bench(lab: Any, tmp_path: Path) -> Bench:
    return Bench(lab, tmp_path / "net" / "w.safetensors")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fn", "w.safetensors"),
        ("opened", "w.safetensors"),
        ("pt", "w.pt"),
        ("array", "w.npy"),
        ("function", "w.npy"),
    ],
)
def test_known_files_spare_the_load_and_replaced_ones_do_not(bench: Bench, name: str, file: str) -> None:
    bench.path = bench.path.with_name(file)
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    size = bench.path.stat().st_size
    if name == "function":
        bench.path.write_text("abc")
    first = made_by(lazy := bench.lazy(name))
    assert bench.loads(lazy) == 1
    assert made_by(lazy := bench.lazy(name)) == first
    assert bench.loads(lazy) == 0
    assert not lazy.loaded
    assert made_by(lazy := bench.lazy(name), paranoid=True) == first
    assert bench.loads(lazy) == 1
    if name == "function":
        bench.path.write_text("abcd")
    else:
        _save(bench.path, 2.0)  # under the same name, with equal size
        assert bench.path.stat().st_size == size
    after = made_by(lazy := bench.lazy(name))
    assert bench.loads(lazy) == 1
    assert (after.weights, after.code) != (first.weights, first.code)


def test_an_argument_that_names_a_file_counts_by_content(bench: Bench, tmp_path: Path) -> None:
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    first = made_by(bench.lazy("fn", str(bench.path)))
    times = (bench.path.stat().st_mtime_ns,) * 2
    data = bytearray(bench.path.read_bytes())
    data[-1] ^= 1
    bench.path.write_bytes(data)
    os.utime(bench.path, ns=times)
    assert made_by(bench.lazy("fn", str(bench.path))).weights != first.weights


def test_a_loader_without_files_is_always_run(bench: Bench) -> None:
    first = made_by(bench.lazy("nothing"))
    assert made_by(lazy := bench.lazy("nothing")) == first
    assert bench.loads(lazy) == 1


def test_new_weights_in_a_loaded_object_are_noticed(bench: Bench) -> None:
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    lazy = bench.lazy()
    first = made_by(lazy)
    lazy.get().weight.data[0, 0] += 1
    assert made_by(lazy).weights != first.weights


def test_changed_code_of_the_loader_and_files_beside_run_it_again(bench: Bench) -> None:
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    made_by(bench.lazy())
    (bench.path.parent / "config.json").write_text("{}")
    made_by(lazy := bench.lazy())
    assert bench.loads(lazy) == 1
    made_by(lazy := bench.lazy())
    assert bench.loads(lazy) == 0
    text = WORK.format(path=str(bench.path)).replace(
        "net.load_state_dict(load_file", "net.half().load_state_dict(load_file"
    )
    lazy = fl.lazy(bench.lab.load("work:fn", work=text))
    made_by(lazy)
    assert bench.loads(lazy) == 1


def test_a_file_that_was_missing_and_appears_runs_it_again(lab: Any, tmp_path: Path) -> None:
    work = """
        calls = []
        def fn():
            calls.append(1)
            for name in ({a!r}, {b!r}):
                try:
                    with open(name, "rb") as f:
                        return f.read()
                except FileNotFoundError:
                    continue
    """.format(a=str(tmp_path / "better" / "a"), b=str(tmp_path / "b"))
    (tmp_path / "better").mkdir()
    (tmp_path / "b").write_bytes(b"fallback")
    first = made_by(fl.lazy(lab.load(work=work)))
    lazy = fl.lazy(lab.load())
    assert made_by(lazy) == first
    assert not lazy.loaded
    (tmp_path / "better" / "a").write_bytes(b"better")
    assert made_by(fl.lazy(lab.load())).weights != first.weights


def test_the_environment_counts_when_the_loader_asks_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    other = bench.path.with_name("other.safetensors")
    _save(other, 2.0)
    monkeypatch.setenv("WHICH", str(bench.path))
    first = made_by(bench.lazy("chosen"))
    monkeypatch.setenv("WHICH", str(other))
    assert made_by(bench.lazy("chosen")).weights != first.weights


def test_a_damaged_entry_is_ignored(bench: Bench, cache: Path) -> None:
    bench.path.parent.mkdir()
    _save(bench.path, 1.0)
    first = made_by(bench.lazy())
    for entry in cache.rglob("*.json"):
        entry.write_bytes(entry.read_bytes()[:-20])
    assert made_by(bench.lazy()) == first


def test_a_loader_without_source_is_refused_or_run_when_vouched_for() -> None:
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec("import torch\ndef load():\n    return torch.nn.Linear(2, 2)", space)
    with pytest.raises(UsageError, match="version="):
        made_by(fl.lazy(space["load"]))
    assert made_by(fl.lazy(space["load"]), vouched=True).structure


def test_recording_sees_all_threads_and_ends(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        path.write_text("x")
    with recording() as opened:
        thread = threading.Thread(target=a.read_text)
        thread.start()
        thread.join()
        assert opened.here == 0
        b.read_text()
        (tmp_path / "out").write_text("not read")
        os.close(os.open(tmp_path / "c", os.O_CREAT | os.O_RDWR))
    a.with_name("later").write_text("x")
    a.with_name("later").read_text()
    assert {Path(name).name for name in opened.files} == {"a", "b"}
    assert opened.here == 1


def test_safetensors_is_given_back_unchanged() -> None:
    import safetensors
    import safetensors.torch

    before = safetensors.safe_open
    with recording(), recording():
        assert safetensors.torch.safe_open is not before
    assert safetensors.safe_open is safetensors.torch.safe_open is before
