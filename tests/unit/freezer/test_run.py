"""`fl.freeze` from end to end: sources, kinds of fields, codecs, workers, and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import frostline as fl
from frostline.errors import FreezeStopped, NotFrozen, StoreFull, UsageError
from frostline.freezer import run as run_module
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run

Files = Callable[[Path], dict[str, bytes]]
N = 11


def source(n: int = N) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": i, "text": f"text {i}"} for i in range(n)])


def vector(x: int) -> torch.Tensor:
    return torch.arange(4.0) + x


def encoder(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 8).requires_grad_(False).eval()


def pipeline(n: int = N, **options: Any) -> fl.Pipeline:
    stage = fl.Stage("features", encoder(), reads="vector", on="device", batch_size=4, **options)
    return fl.Pipeline(source(n), fl.Stage("vector", vector, reads="x"), stage, outputs=["features"])


def frozen(data: Any, root: Path, **options: Any) -> fl.Store:
    return fl.freeze(data, root, quiet=True, **options)


# --- sources ------------------------------------------------------------------------------------------


def test_rows_of_a_table(tmp_path: Path) -> None:
    store = frozen(pipeline(), tmp_path / "s")
    assert list(store.keys) == [f"k{i}" for i in range(N)]
    assert [n for n in store.fields if not n.startswith("_")] == ["features"]
    assert store.check(deep=True).ok
    expected = encoder()(torch.stack([vector(i) for i in range(N)]))
    torch.testing.assert_close(store.rows(list(store.keys))["features"], expected)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    for name in ("a.txt", "b/c.txt"):
        (tmp_path / "in" / name).write_text(f"of {name}")
    stage = fl.Stage("content", lambda path: Path(path).read_text(), reads="path")
    store = frozen(fl.Pipeline(fl.Source.files(tmp_path / "in"), stage), tmp_path / "s")
    assert {key: store[key]["content"] for key in store.keys} == {
        "a.txt": "of a.txt",
        "b/c.txt": "of b/c.txt",
    }


class Indexable:
    def __init__(self, n: int = 5, broken: Any = ()) -> None:
        self.n, self.broken = n, broken

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i in self.broken:
            raise KeyError(f"no sample {i}")
        return np.full((2, 3), i, np.uint8), i % 2


def test_anything_with_an_index(tmp_path: Path) -> None:
    data = fl.Source.dataset(Indexable(), fields=["image", "label"])
    stage = fl.Stage(
        "mean", lambda image: image.float().mean((1, 2)), reads="image", on="device", batch_size=2
    )
    store = frozen(fl.Pipeline(data, stage, outputs=["mean", "label", "image"]), tmp_path / "s")
    assert store.column("mean").tolist() == [0, 1, 2, 3, 4]
    assert store.column("label").tolist() == [0, 1, 0, 1, 0]
    assert store["00000003"]["image"].tolist() == [[3, 3, 3]] * 2


def test_a_sample_that_a_data_set_cannot_give_is_quarantined_whatever_it_raises(tmp_path: Path) -> None:
    data = fl.Source.dataset(Indexable(broken={3}), fields=["image", "label"])
    store = frozen(fl.Pipeline(data, outputs=["label"]), tmp_path / "s")
    assert list(store.keys) == ["00000000", "00000001", "00000002", "00000004"]
    assert [(q["key"], q["reason"]) for q in store.quarantine] == [
        ("00000003", "source: KeyError: 'no sample 3'")
    ]


def test_read_only_arrays_give_no_warning(tmp_path: Path) -> None:
    def read_only(x: Any) -> np.ndarray:
        array = np.asarray(x, np.float32) * 2
        array.flags.writeable = False
        return array

    data = fl.Source.dataset([{"x": read_only([i, 1])} for i in range(9)])
    net = fl.Stage("y", lambda z: z.sum(1), reads="z", on="device", batch_size=4)
    stages = (fl.Stage("z", read_only, reads="x"), net)
    torch.set_warn_always(True)  # not once a process, whichever test comes first
    try:
        store = frozen(fl.Pipeline(data, *stages, outputs=["x", "y", "z"]), tmp_path / "s")
    finally:
        torch.set_warn_always(False)
    assert store.column("y").tolist() == [4.0 * (i + 1) for i in range(9)]


# --- fields -------------------------------------------------------------------------------------------


def test_every_kind_of_field(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "i": lambda x: x,
        "f": lambda x: x / 4,
        "b": lambda x: x % 2 == 0,
        "s": lambda x: "é" * x,
        "raw": lambda x: bytes([x]),
        "j": lambda x: {"boxes": [[x, 1.5]], "none": None},
        "bf": lambda x: torch.full((2,), x, dtype=torch.bfloat16),
        "n": lambda x: np.float32(x),
        "ragged": lambda x: torch.full((x % 3, 2), x),
    }
    stages = [fl.Stage(name, fn, reads="x") for name, fn in values.items()]
    store = frozen(fl.Pipeline(source(), *stages, outputs=list(values)), tmp_path / "s")
    kinds = {n: (s.shape, s.dtype) for n, s in store.fields.items() if not n.startswith("_")}
    assert kinds == {
        "i": ((), "int64"), "f": ((), "float64"), "b": ((), "bool"), "s": ((), "str"), "raw": ((), "bytes"),
        "j": ((), "json"), "bf": ((2,), "bfloat16"), "n": ((), "float32"), "ragged": ((None, 2), "int64"),
    }  # fmt: skip
    row = store["k5"]
    assert (row["i"], row["f"], row["b"], row["s"], row["raw"]) == (5, 1.25, False, "ééééé", b"\x05")
    assert row["j"] == {"boxes": [[5, 1.5]], "none": None}
    assert row["ragged"].tolist() == [[5, 5], [5, 5]]
    assert len(store["k3"]["ragged"]) == 0


def test_a_declared_ragged_field_holds_what_the_first_samples_did_not_show(tmp_path: Path) -> None:
    def tokens(x: int) -> torch.Tensor:
        return torch.zeros(2 if x < 40 else 5, dtype=torch.int32)

    def data(**options: Any) -> fl.Pipeline:
        return fl.Pipeline(source(42), fl.Stage("tokens", tokens, reads="x", **options))

    declared = data(writes={"tokens": fl.Field((None,), "int32")})
    assert len(frozen(declared, tmp_path / "a")["k41"]["tokens"]) == 5
    with pytest.raises(FreezeStopped, match=r"store it ragged: writes=.*fl\.Field\(\(None,\), 'int32'\)"):
        frozen(data(), tmp_path / "b", max_bad=0)


@pytest.mark.parametrize("late", [None, "a text", 2.5])
def test_a_value_of_another_type_is_quarantined_and_the_rest_is_there(tmp_path: Path, late: Any) -> None:
    rows = [{"key": f"k{i}", "label": i if i != 35 else late} for i in range(40)]
    store = frozen(fl.Pipeline(fl.Source.table(rows)), tmp_path / "s")
    assert len(store) == 39
    assert [q["key"] for q in store.quarantine] == ["k35"]


def test_codecs_for_all_and_by_name(tmp_path: Path) -> None:
    stage = fl.Stage("more", lambda x: torch.full((8,), float(x)), reads="x")
    data = fl.Pipeline(
        source(), fl.Stage("vector", vector, reads="x"), stage, outputs=["vector", "more", "x"]
    )
    store = frozen(data, tmp_path / "s", codec={"*": "int8/token", "more": "float16"})
    assert [store.fields[n].codec for n in ("vector", "more", "x")] == ["int8/token", "float16", "raw"]
    assert store.fields["vector"].dtype == "float32"
    assert store["k3"]["vector"] == pytest.approx(vector(3), abs=0.1)
    with pytest.raises(UsageError, match=r"no field 'vectr'.*'vector'"):
        frozen(data, tmp_path / "t", codec={"vectr": "float16"})
    with pytest.raises(UsageError, match="--codec"):
        frozen(data, tmp_path / "t", codec={"x": "int8/token"})
    assert not (tmp_path / "t").exists()


def test_the_cut_and_the_limit(tmp_path: Path) -> None:
    store = frozen(pipeline(), tmp_path / "s", cut="vector", limit=3)
    assert list(store.keys) == ["k0", "k1", "k2"]
    assert "features" not in store.fields
    assert torch.equal(store["k2"]["vector"], vector(2))


# --- how it runs --------------------------------------------------------------------------------------

STAGES = """
    import numpy as np
    import torch

    def decode(x):
        if x == 7:
            raise ValueError("seven")
        return torch.arange(4.0) + x, np.float64(x) / 3, "t" * (x % 3), torch.zeros(x % 3, dtype=torch.int16)

    def scaled(v, f):
        return v * f[:, None]
"""


def test_threads_and_processes_make_the_same_bytes(
    tmp_path: Path, module: Callable[[str], ModuleType], files_of: Files
) -> None:
    made = module(STAGES)
    data = fl.Pipeline(
        source(),
        fl.Stage("decode", made.decode, reads="x", writes=["v", "f", "t", "r"]),
        fl.Stage("scaled", made.scaled, reads=["v", "f"], on="device", batch_size=4),
        outputs=["scaled", "f", "t", "r"],
    )
    for workers, n in (("threads", 1), ("threads", 3), ("processes", 1)):
        store = frozen(data, tmp_path / f"{workers}{n}", workers=workers, n_workers=n)
        assert len(store) == N - 1
    assert store.fields["scaled"].dtype == "float64"
    one, *others = (files_of(tmp_path / name) for name in ("threads1", "threads3", "processes1"))
    assert one == others[0]
    assert one == others[1]


def test_precision_and_compile_are_for_device_stages_that_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert frozen(pipeline(), tmp_path / "a", precision="bf16").fields["features"].dtype == "bfloat16"
    own = frozen(pipeline(precision="fp32"), tmp_path / "b", precision="bf16")
    assert own.fields["features"].dtype == "float32"
    changed = run_module.with_options(pipeline(), Options(compile=True))
    assert [stage.compile for stage in changed.stages] == [False, True]


def test_autocast_around_it_changes_no_row(tmp_path: Path) -> None:
    net = torch.nn.Linear(1, 4).requires_grad_(False)
    rows = fl.Source.table([{"key": "a", "x": [1.0]}])
    data = fl.Pipeline(
        rows, fl.Stage("t", torch.tensor, reads="x"), fl.Stage("y", net, reads="t", on="device")
    )
    with torch.autocast("cpu", torch.bfloat16):
        inside = fl.freeze(data, tmp_path / "inside", quiet=True)
    outside = fl.freeze(data, tmp_path / "outside", quiet=True)
    assert torch.equal(inside["a"]["y"], outside["a"]["y"])


def test_it_runs_in_another_thread_too(tmp_path: Path) -> None:
    thread = threading.Thread(target=frozen, args=(pipeline(), tmp_path / "s"))
    thread.start()
    thread.join()
    assert len(fl.Store.open(tmp_path / "s")) == N


def test_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0)  # a sample takes no time
    monkeypatch.setattr("frostline.freezer.forecast.time", stands)
    fl.freeze(pipeline(), tmp_path / "s", device="cpu")
    said = capsys.readouterr().err
    assert f"freezing features: 11 samples on cpu into {tmp_path / 's'}: less than 1 s" in said
    assert "GB free)" in said
    frozen(pipeline(), tmp_path / "s")
    assert capsys.readouterr().err == ""


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    outcome = run(pipeline(), tmp_path / "s", Options(dry_run=True), Reporter(quiet=True))
    assert outcome.forecast is not None
    assert outcome.forecast.samples == N
    assert outcome.stopped is None
    assert not (tmp_path / "s").exists()


def test_an_outcome_tells_what_was_done(tmp_path: Path) -> None:
    outcome = run(pipeline(), tmp_path / "s", Options(), Reporter(quiet=True))
    assert (outcome.stats.samples, outcome.stats.failed, outcome.stats.bytes) == (N, 0, N * 8 * 4)
    assert outcome.stopped is None
    assert len(outcome.store) == N
    again = run(pipeline(), tmp_path / "s", Options(), Reporter(quiet=True))
    assert again.plan.idle
    assert again.forecast is None


def test_the_store_says_what_it_was_computed_from(tmp_path: Path) -> None:
    spec = frozen(pipeline(), tmp_path / "s").fields["features"]
    assert spec.fingerprint
    assert set(spec.provenance["stages"]) == {"vector", "features"}
    assert json.dumps(spec.provenance)


# --- what it refuses ----------------------------------------------------------------------------------


def test_a_workload_brings_its_pipeline_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work = fl.Workload(pipeline(), run=lambda ctx: None, splits={"train": 0.5, "test": 0.5})
    with pytest.raises(UsageError, match="needs a folder for the store"):
        fl.freeze(work, quiet=True)
    assert len(fl.freeze(work.named("mine"), quiet=True)) == N  # splits do not matter: all are stored
    assert (tmp_path / "stores" / "mine").is_dir()


def test_several_pipelines_are_frozen_one_by_one(tmp_path: Path) -> None:
    work = fl.Workload({"support": pipeline(), "frames": pipeline()}, run=lambda ctx: None)
    with pytest.raises(
        UsageError, match=r"several pipelines \(support, frames\).*workload\.pipelines\['support'\]"
    ):
        fl.freeze(work, tmp_path / "s")


def test_bad_options_and_not_frozen_stages_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="limit is 0"):
        frozen(pipeline(), tmp_path / "s", limit=0)
    training = fl.Stage("features", nn.Linear(4, 8), reads="vector", on="device")
    data = fl.Pipeline(source(), fl.Stage("vector", vector, reads="x"), training)
    with pytest.raises(NotFrozen, match="features"):
        frozen(data, tmp_path / "s")
    with pytest.raises(UsageError, match="max_bad is 'some'"):
        frozen(pipeline(), tmp_path / "s", max_bad="some")
    assert not (tmp_path / "s").exists()


def test_none_of_the_first_samples_works(tmp_path: Path) -> None:
    data = fl.Pipeline(source(), fl.Stage("y", lambda x: 1 / (x - x), reads="x"))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        frozen(data, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_forecast_that_does_not_fit_stops_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreFull, match="needs about"):
        frozen(pipeline(), tmp_path / "s")
    assert not (tmp_path / "s").exists()
