"""Planted faults: each is noticed and named, and nothing stale is served. What is the same costs nothing.

Longer than most files here: the faults of one list, a short test each.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import FrostlineError, NotFrozen, StoreCorrupt, StoreError
from frostline.fingerprint import files
from frostline.freezer.attempt import Outcome
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.store.manifest import commit_numbers

N = 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache; and files count as settled at once, as tests do not wait."""
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_NS", -(10**12))


def freeze(data: fl.Pipeline, root: Path, **options: Any) -> tuple[Outcome, str]:
    """What came of it, and what was said."""
    said = StringIO()
    return run(data, root, Options(device="cpu", **options), Reporter(out=said)), said.getvalue()


def vectors(n: int = N, width: int = 4) -> fl.Source:
    make = torch.Generator().manual_seed(0)
    rows = torch.randn(n, width, generator=make).tolist()
    return fl.Source.table([{"key": f"k{i}", "x": row} for i, row in enumerate(rows)])


def tensor(x: list[float]) -> Tensor:
    return torch.tensor(x)


def encoded(network: Any, **options: Any) -> fl.Pipeline:
    return fl.Pipeline(
        vectors(),
        fl.Stage("vector", tensor, reads="x"),
        fl.Stage("features", network, reads="vector", on="device", batch_size=4, **options),
    )


def live(data: fl.Pipeline, field: str) -> dict[str, list[float]]:
    from frostline.execution import Execution

    block = Execution(data, [field]).compute(range(len(data.source)))
    return dict(zip(block.keys, (row.tolist() for row in block.columns[field]), strict=True))


def held(root: Path, field: str) -> dict[str, list[float]]:
    store = fl.Store.open(root, check="read")
    return {key: store[key][field].tolist() for key in store.keys}


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 3).requires_grad_(False).eval()


# --- weights ------------------------------------------------------------------------------------------


def load(path: str) -> nn.Module:
    network = nn.Linear(4, 3)
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.requires_grad_(False).eval()


def flip_a_bit(path: Path) -> None:
    """One bit of one weight."""
    state = torch.load(path, weights_only=True)
    state["weight"].view(torch.int32)[1, 2] ^= 1 << 20
    torch.save(state, path)


def test_one_bit_of_a_weight_file(tmp_path: Path) -> None:
    weights, root = tmp_path / "weights.pt", tmp_path / "s"
    torch.save(linear().state_dict(), weights)
    freeze(encoded(fl.lazy(load, str(weights))), root)
    before = held(root, "features")
    flip_a_bit(weights)
    data = encoded(fl.lazy(load, str(weights)))
    outcome, said = freeze(data, root)
    assert "features: to be computed again; " in said
    assert "weights of stage features: " in said
    assert outcome.stats.samples == N
    assert held(root, "features") == live(data, "features") != before


def test_a_network_that_did_not_change_is_not_even_loaded(tmp_path: Path) -> None:
    weights, root = tmp_path / "weights.pt", tmp_path / "s"
    torch.save(linear().state_dict(), weights)
    freeze(encoded(fl.lazy(load, str(weights))), root)
    commits, again = commit_numbers(root), fl.lazy(load, str(weights))
    outcome, _ = freeze(encoded(again), root)
    assert outcome.plan.idle
    assert not again.loaded
    assert commit_numbers(root) == commits


def write_by_data(network: nn.Module) -> None:
    network.weight.data[0, 0] += 1  # neither the object nor its version counter changes


def load_another(network: nn.Module) -> None:
    network.load_state_dict(linear(seed=1).state_dict())


@pytest.mark.parametrize("change", [write_by_data, load_another])
def test_new_weights_in_the_same_object(tmp_path: Path, change: Any) -> None:
    network, root = linear(), tmp_path / "s"
    data = encoded(network)
    freeze(data, root)
    assert freeze(data, root)[0].plan.idle
    before = held(root, "features")
    change(network)
    _, said = freeze(data, root)
    assert "weights of stage features: " in said
    assert held(root, "features") == live(data, "features") != before


# --- parameters and code ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resize:
    size: int
    calls: int = 0

    def __call__(self, x: list[float]) -> Tensor:
        whole = torch.tensor(x)[None, None]
        return nn.functional.interpolate(whole, self.size, mode="linear")[0, 0]


def resized(size: int) -> fl.Pipeline:
    return fl.Pipeline(
        vectors(),
        fl.Stage("small", Resize(size), reads="x"),
        fl.Stage("total", torch.sum, reads="small"),
        fl.Stage("other", tensor, reads="x"),
    )


def test_a_changed_resize_reaches_what_is_computed_from_it_and_nothing_else(tmp_path: Path) -> None:
    root, cut = tmp_path / "s", ("small", "total", "other")
    freeze(resized(2), root, cut=cut)
    outcome, said = freeze(resized(3), root, cut=cut)
    assert {*outcome.plan.retired} == {"small", "total"}
    assert "parameter size of stage small: 2 → 3" in said
    assert [*outcome.plan.held] == ["other"]
    assert held(root, "small") == live(resized(3), "small")
    assert held(root, "total") == live(resized(3), "total")


MODULES = {
    "work": """
        import frostline as fl
        import helper
        import nets

        def stage(x):
            return first(x)

        def first(x):
            return helper.second(x) + 1

        rows = [{"key": f"k{i}", "x": float(i)} for i in range(4)]
        network = fl.lazy(nets.load, "weights.pt")
        data = fl.Pipeline(
            fl.Source.table(rows),
            fl.Stage("y", stage, reads="x"),
            fl.Stage("z", network, reads="y", on="device", batch_size=2),
            outputs=["y", "z"],
        )
    """,
    "nets": """
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

            def forward(self, y):
                return y * self.scale

        def load(path):
            net = Net()
            net.load_state_dict(torch.load(path, weights_only=True))
            return net.eval()
    """,
    "helper": """
        FACTOR = 2

        def second(x):
            return third(x)

        def third(x):
            return FACTOR * x

        def unrelated(x):
            return x - 1
    """,
}
RUN = """
import sys
from pathlib import Path
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.fingerprint import files
files.SETTLED_NS = -(10**12)  # files count as settled at once
import work
root = Path(sys.argv[1])
out = run(work.data, root, Options(device="cpu"), Reporter(out=sys.stdout))
store = out.store
print("values", [store[k]["y"].item() for k in store.keys], "idle", out.plan.idle)
print("z", [store[k]["z"].item() for k in store.keys], "loaded", work.network.loaded)
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """Freezes `work.data` of modules written on the spot in a new process; what that prints."""
    folder = tmp_path / "modules"
    folder.mkdir()
    torch.save({"scale": torch.tensor(3.0)}, folder / "weights.pt")

    def run_it(**edits: tuple[str, str]) -> str:
        for name, text in MODULES.items():
            old, new = edits.get(name, ("", ""))
            assert old in text
            (folder / f"{name}.py").write_text(textwrap.dedent(text.replace(old, new, 1) if old else text))
        path = os.pathsep.join([str(folder), str(Path(fl.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, "-B", "-c", RUN, str(tmp_path / "s")],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_it


@pytest.mark.parametrize(
    ("edits", "named", "values"),
    [
        (
            {"helper": ("FACTOR * x", "FACTOR * x + 5")},
            "code of helper.third (stage y) changed",
            [6, 8, 10, 12],
        ),
        ({"helper": ("FACTOR = 2", "FACTOR = 3")}, "value of helper.FACTOR (stage y) changed", [1, 4, 7, 10]),
        ({"nets": ("y * self.scale", "y + self.scale")}, "code of nets.Net", [1, 3, 5, 7]),
        ({"work": ("second(x) + 1", "second(x)")}, "code of work.first (stage y) changed", [0, 2, 4, 6]),
    ],
)
def test_code_that_is_called_by_what_is_called(
    fresh: Any, edits: dict[str, tuple[str, str]], named: str, values: list[int]
) -> None:
    assert "values [1.0, 3.0, 5.0, 7.0] idle False" in fresh()
    said = fresh(**edits)
    assert f"{'z' if 'nets' in edits else 'y'}: to be computed again; {named}" in said
    assert ("z [4.0, 6.0, 8.0, 10.0]" if "nets" in edits else f"z {[3.0 * v for v in values]}") in said
    assert f"values {[float(v) for v in values]} idle False" in said


def test_comments_space_docstrings_and_unrelated_code_change_nothing(fresh: Any) -> None:
    assert "idle False" in fresh()
    edits = {
        "helper": ("def third(x):\n", 'def third(x):\n            """Says more."""\n\n            # why\n'),
        "work": ("return first(x)", "return  first( x )  # as before"),
        "nets": ("            net = Net()\n", "            # a network\n\n            net = Net( )\n"),
    }
    assert "to be computed again" not in (said := fresh(**edits))
    assert "values [1.0, 3.0, 5.0, 7.0] idle True" in said
    assert "z [3.0, 9.0, 15.0, 21.0] loaded False" in said
    assert "idle True" in fresh(helper=("x - 1", "x - 2"))


# --- what is not frozen -------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5)).requires_grad_(False).train()


def with_batch_norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(3)).requires_grad_(False).train()


def partly_trained() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval()
    network[0].requires_grad_(False)
    return network


def flip_by_python(x: Tensor) -> Tensor:
    return x.flip(1) if random.random() < 0.5 else x


def flip_by_numpy(x: Tensor) -> Tensor:
    return x.flip(1) if np.random.rand() < 0.5 else x


def flip_by_torch(x: Tensor) -> Tensor:
    return x.flip(1) if torch.rand(()) < 0.5 else x


def flip_unseeded(x: Tensor) -> Tensor:
    return x.flip(1) if np.random.default_rng().random() < 0.5 else x


@pytest.mark.parametrize(
    ("network", "named"),
    [
        (with_dropout(), r"features: dropout '1' \(p=0\.5\) is in train mode: call \.eval\(\)"),
        (with_batch_norm(), r"features: batch norm '1' is in train mode"),
        (partly_trained(), r"features: it trains: 15 of 35 parameters .* from '1\.weight' to '1\.bias'"),
        (flip_by_python, r"random\.random in flip_by_python(.|\n)*random=True"),
        (flip_by_numpy, r"np\.random\.rand in flip_by_numpy(.|\n)*random=True"),
        (flip_by_torch, r"features: (.|\n)*torch(.|\n)*random=True"),
        (flip_unseeded, r"random bytes in flip_unseeded(.|\n)*random=True"),
    ],
)
def test_what_is_not_frozen_is_refused_before_anything_is_written(
    tmp_path: Path, network: Any, named: str
) -> None:
    with pytest.raises(NotFrozen, match=named):
        freeze(encoded(network), tmp_path / "s")
    assert not commit_numbers(tmp_path / "s")


def test_a_network_put_into_train_mode_after_it_was_frozen(tmp_path: Path) -> None:
    """Rows that are there stay; new ones are not computed by what no longer is what was audited."""
    network, root = with_dropout().eval(), tmp_path / "s"
    freeze(encoded(network), root, limit=5)
    before = held(root, "features")
    network.train()
    with pytest.raises(NotFrozen, match=r"dropout '1' \(p=0\.5\) is in train mode"):
        freeze(encoded(network), root)
    assert held(root, "features") == before


def jitter(x: Tensor, rng: Any) -> Tensor:
    return x + rng.random()


def test_a_random_stage_without_eval_is_refused_in_evaluation() -> None:
    data = fl.Pipeline(
        vectors(),
        fl.Stage("vector", tensor, reads="x"),
        fl.Stage("moved", jitter, reads="vector", random=True),
    )
    work = fl.Workload(
        data,
        model=nn.Linear(4, 1),
        loss=lambda model, batch: model(batch["moved"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        batch_size=2,
    )
    report = fl.audit(work, evaluation=True, training=False)
    assert not report.ok
    assert "stage 'moved' is random and has no eval=" in report.evaluation[0]


# --- inputs -------------------------------------------------------------------------------------------


def total(path: str) -> int:
    with open(path, "rb") as file:
        return sum(file.read())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "inputs"
    made.mkdir()
    for i in range(4):
        (made / f"f{i}.bin").write_bytes(bytes([i]) * 300_000)
        os.utime(made / f"f{i}.bin", ns=(10**18, 10**18))
    return made


def sums(folder: Path) -> fl.Pipeline:
    return fl.Pipeline(fl.Source.files(folder / "*.bin"), fl.Stage("sum", total, reads="path"))


def poke(path: Path, place: int) -> None:
    """Another byte there; size and time stay."""
    data = bytearray(path.read_bytes())
    data[place] += 100
    path.write_bytes(data)
    os.utime(path, ns=(10**18, 10**18))


@pytest.mark.parametrize(("place", "paranoid"), [(0, False), (-1, False), (150_000, True), (0, True)])
def test_an_input_of_the_same_name_size_and_time(
    folder: Path, tmp_path: Path, place: int, paranoid: bool
) -> None:
    root = tmp_path / "s"
    freeze(sums(folder), root, paranoid=paranoid)
    assert freeze(sums(folder), root, paranoid=paranoid)[0].plan.idle
    poke(folder / "f2.bin", place)
    outcome, said = freeze(sums(folder), root, paranoid=paranoid)
    assert "('f2.bin': path)" in said
    assert outcome.plan.changed == {"f2.bin": ["path"]}
    assert outcome.stats.samples == 1
    assert held(root, "sum") == {f"f{i}.bin": 300_000 * i + 100 * (i == 2) for i in range(4)}


def test_paranoid_afterwards_does_not_believe_what_was_frozen_without(folder: Path, tmp_path: Path) -> None:
    """What rows were computed from was not hashed as a whole: they are computed again, and it is."""
    root = tmp_path / "s"
    freeze(sums(folder), root)
    poke(folder / "f3.bin", 150_000)
    assert freeze(sums(folder), root)[0].plan.idle  # what paranoid is for
    freeze(sums(folder), root, paranoid=True)
    assert held(root, "sum")["f3.bin"] == 900_100
    assert freeze(sums(folder), root, paranoid=True)[0].plan.idle
    poke(folder / "f1.bin", 150_000)
    again, _ = freeze(sums(folder), root, paranoid=True)
    assert {*again.plan.changed} == {"f1.bin"}
    assert held(root, "sum")["f1.bin"] == 300_100


def words(caption: str) -> int:
    return len(caption.split())


def test_a_caption_changed_in_a_table(tmp_path: Path) -> None:
    def captions(second: str) -> fl.Pipeline:
        rows = [{"key": "a", "caption": "one two"}, {"key": "b", "caption": second}]
        return fl.Pipeline(fl.Source.table(rows), fl.Stage("words", words, reads="caption"))

    root, cut = tmp_path / "s", ("words", "caption")
    freeze(captions("one"), root, cut=cut)
    outcome, said = freeze(captions("one two three"), root, cut=cut)
    assert "('b': caption)" in said
    assert outcome.stats.samples == 1
    store = fl.Store.open(root)
    assert {k: (store[k]["words"].item(), store[k]["caption"]) for k in store.keys} == {
        "a": (2, "one two"),
        "b": (3, "one two three"),
    }


# --- the store ----------------------------------------------------------------------------------------


def halved(vector: Tensor) -> Tensor:
    return vector / 2


def shard_of(root: Path, field: str) -> Path:
    return next((root / "data").glob(f"*-{field}/*"))


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_a_half_written_or_altered_shard(tmp_path: Path, damage: str) -> None:
    """It is named by a check, refused by a reader, and nothing is computed from it."""
    root = tmp_path / "s"
    data = encoded(linear())
    freeze(data, root, cut=("vector",))
    place = shard_of(root, "vector")
    content = bytearray(place.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[-1] ^= 64
    place.write_bytes(content)
    found = fl.Store.open(root, check="open").check()
    assert not found.ok
    assert any(place.name in str(problem) for problem in found.problems)
    with pytest.raises(StoreCorrupt, match="vector"):
        held(root, "vector")
    with pytest.raises(FrostlineError, match="vector") as refused:  # it would read `vector` from the store
        freeze(data, root, cut=("vector", "features"))
    assert not isinstance(refused.value, NotFrozen)
    left = fl.Store.open(root, check="open")
    assert "features" not in left.fields or not len(left.with_fields(["features"]))


def test_a_damaged_text_of_an_input(tmp_path: Path) -> None:
    """What a row was computed from cannot be read: that is said, and the row is not taken for good."""
    root, data = tmp_path / "s", encoded(linear())
    freeze(data, root)
    name = next(n for n in fl.Store.open(root).fields if n.startswith("_source."))
    place = shard_of(root, name)
    content = place.read_bytes()
    at = content.index(b'{"x"')
    place.write_bytes(content[:at] + b"[" + content[at + 1 :])
    with pytest.raises(StoreCorrupt, match=name):
        freeze(data, root)


# --- fl.cached ----------------------------------------------------------------------------------------


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
KEYS = [f"k{i}" for i in range(6)]


def stored(network: nn.Module, root: Path, **options: Any) -> Tensor:
    with fl.cached(network, root, **options) as encoder:
        return encoder(ROWS, keys=KEYS)


@pytest.mark.parametrize("change", [write_by_data, load_another])
def test_cached_new_weights_in_the_same_object(tmp_path: Path, change: Any) -> None:
    network = linear()
    with fl.cached(network, tmp_path / "s") as encoder:
        encoder(ROWS, keys=KEYS)
        encoder.flush()
        change(network)
        for _ in range(2):  # a loop that catches the error must not be served the old rows afterwards
            with pytest.raises(StoreError, match=r"rows of another encoder: weights of stage output"):
                encoder(ROWS, keys=KEYS)
    with pytest.raises(StoreError, match=r"weights of stage output: .*stale='recompute'"):
        fl.cached(network, tmp_path / "s")
    assert torch.equal(stored(network, tmp_path / "s", stale="recompute"), stored(network, tmp_path / "t"))


def test_cached_new_weights_before_anything_is_written(tmp_path: Path) -> None:
    """Rows that are only in memory are not served either, nor written under the new weights' name."""
    network = linear()
    with fl.cached(network, tmp_path / "s", stale="recompute") as encoder:
        old = encoder(ROWS, keys=KEYS)
        write_by_data(network)
        new = encoder(ROWS, keys=KEYS)
    assert not torch.equal(old, new)
    assert torch.equal(stored(network, tmp_path / "s"), new)
    other = linear()
    with fl.cached(other, tmp_path / "t") as encoder:
        encoder(ROWS, keys=KEYS)
        write_by_data(other)
        with pytest.raises(StoreError, match=r"weights of stage output"):
            encoder(ROWS, keys=KEYS)
    assert torch.equal(stored(linear(), tmp_path / "t"), old)


def test_cached_another_input_under_the_same_key(tmp_path: Path) -> None:
    network = linear()
    stored(network, tmp_path / "s")
    changed = ROWS.clone()
    changed[2, 0] += 1
    with fl.cached(network, tmp_path / "s") as encoder:
        got = encoder(changed, keys=KEYS)
        assert (encoder.read, encoder.computed) == (5, 1)
    assert torch.equal(got, stored(network, tmp_path / "other")) is False
    assert torch.equal(got[2], stored_alone(network, changed, tmp_path / "alone")[2])
    with fl.cached(network, tmp_path / "s") as encoder:
        assert torch.equal(encoder(changed, keys=KEYS), got)
        assert encoder.computed == 0


def stored_alone(network: nn.Module, rows: Tensor, root: Path) -> Tensor:
    with fl.cached(network, root) as encoder:
        return encoder(rows, keys=KEYS)


def test_cached_another_chunk_size_or_codec(tmp_path: Path) -> None:
    network = linear()
    stored(network, tmp_path / "s", batch_size=4)
    with pytest.raises(StoreError, match=r"chunk size of stage output: 4 → 8"):
        fl.cached(network, tmp_path / "s", batch_size=8)
    with pytest.raises(StoreError, match=r"codec raw → float16"):
        fl.cached(network, tmp_path / "s", batch_size=4, codec="float16")
    again = stored(network, tmp_path / "s", batch_size=4, codec="float16", stale="recompute")
    assert fl.Store.open(tmp_path / "s").fields["output"].codec == "float16"
    assert torch.equal(stored(network, tmp_path / "s", batch_size=4, codec="float16"), again)


def test_cached_an_encoder_that_a_loop_puts_into_train_mode(tmp_path: Path) -> None:
    model = nn.ModuleDict({"encoder": with_dropout().eval(), "head": nn.Linear(3, 1)})
    with fl.cached(model["encoder"], tmp_path / "s") as encoder:
        first = encoder(ROWS[:3], keys=KEYS[:3])
        model.train()
        assert torch.equal(encoder(ROWS[:3], keys=KEYS[:3]), first)  # read, not computed
        with pytest.raises(NotFrozen, match=r"dropout '1' \(p=0\.5\) is in train mode"):
            encoder(ROWS, keys=KEYS)
        model.eval()
        assert torch.equal(encoder(ROWS, keys=KEYS)[:3], first)


def test_cached_what_is_not_frozen(tmp_path: Path) -> None:
    for network, named in ((with_dropout(), "dropout '1'"), (with_batch_norm(), "batch norm '1'")):
        with pytest.raises(NotFrozen, match=named), fl.cached(network, tmp_path / "s") as encoder:
            encoder(ROWS, keys=KEYS)
    assert not commit_numbers(tmp_path / "s")
