"""A store brought up to date: only what changed is computed, and upstream fields are read from the store."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.freezer import attempt
from frostline.freezer.attempt import Attempt, Outcome
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run

Calls = Counter[str]
N = 10


@pytest.fixture(autouse=True)
def no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit calls stages too; what is counted here are the calls of the freeze itself."""
    monkeypatch.setattr(attempt, "audit", lambda *a, **k: SimpleNamespace(raise_if_not_frozen=lambda: None))


def rows(n: int = N, **changes: Any) -> list[dict[str, Any]]:
    return [
        {"key": f"k{i}", "x": changes.get(f"k{i}", i), "caption": f"caption {i}", "label": i % 3}
        for i in range(n)
    ]


def decode(x: int) -> torch.Tensor:
    if x == 99:
        raise ValueError("unreadable")
    return torch.arange(3.0) + x


def pipeline(
    table: Any = None, *, times: float = 2.0, more: tuple[fl.Stage, ...] = (), outputs: Any = ("pixels", "y")
) -> fl.Pipeline:
    return fl.Pipeline(
        fl.Source.table(table or rows()),
        fl.Stage("pixels", decode, reads="x"),
        fl.Stage("y", lambda pixels: pixels.sum(1) * times, reads="pixels", on="device", batch_size=4),
        *more,
        outputs=[*outputs, *(name for stage in more for name in stage.writes)],
    )


def freeze(data: fl.Pipeline, root: Path, **options: Any) -> Outcome:
    return run(data, root, Options(device="cpu", n_workers=2, **options), Reporter(quiet=True))


def values(store: fl.Store, field: str = "y") -> dict[str, Any]:
    keys = list(store.keys)
    return dict(zip(keys, store.rows(keys, [field])[field].tolist(), strict=True))


def expected(*keys: int, times: float = 2.0, **changes: int) -> dict[str, float]:
    return {f"k{i}": (3 * changes.get(f"k{i}", i) + 3) * times for i in keys}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    freeze(pipeline(), tmp_path / "store")
    return tmp_path / "store"


def test_nothing_is_computed_when_nothing_changed(root: Path, calls: Calls, files_of: Any) -> None:
    before = files_of(root)
    assert freeze(pipeline(), root).plan.idle
    assert not calls
    assert files_of(root) == before


def test_keys_that_came_went_or_changed(root: Path, calls: Calls) -> None:
    table = [row for row in rows(N + 2, k4=40) if row["key"] != "k7"]
    store = freeze(pipeline(table), root).store
    keys = [i for i in range(N + 2) if i != 7]
    assert values(store) == expected(*keys, k4=40)
    assert store.check(deep=True).ok
    assert calls["pixels"] <= 2 * 3  # k4, k10 and k11: in the forecast, and then
    calls.clear()
    assert freeze(pipeline(table), root).plan.idle
    assert not calls


def test_a_changed_stage_is_computed_again_from_what_the_store_has(root: Path, calls: Calls) -> None:
    outcome = freeze(pipeline(times=5.0), root)
    assert values(outcome.store) == expected(*range(N), times=5.0)
    assert calls["pixels"] == 0  # read from the store
    assert calls["y"] >= N
    assert list(outcome.plan.retired) == ["y"]
    assert outcome.stats.samples == N


def test_rows_that_a_lossy_codec_stored_are_not_computed_from(tmp_path: Path, calls: Calls) -> None:
    freeze(pipeline(), tmp_path / "s", codec={"pixels": "float16"})
    calls.clear()
    store = freeze(pipeline(times=5.0), tmp_path / "s").store
    assert calls["pixels"] >= N
    assert values(store) == expected(*range(N), times=5.0)


def test_a_changed_stage_upstream_changes_everything_below_it(root: Path, calls: Calls) -> None:
    data = pipeline().with_stages({"pixels": fl.Stage("pixels", lambda x: decode(x) + 1, reads="x")})
    outcome = freeze(data, root)
    assert sorted(outcome.plan.retired) == ["pixels", "y"]
    assert values(outcome.store) == {k: v + 6 for k, v in expected(*range(N)).items()}
    assert calls["pixels"] >= N


@pytest.mark.parametrize("cut", [None, ("y",)])
def test_a_stage_whose_values_have_another_shape_now(tmp_path: Path, cut: Any, calls: Calls) -> None:
    """The shapes to keep to are those of what is computed now, not of what was."""
    freeze(pipeline(), tmp_path / "s", cut=cut)
    wider = fl.Stage("pixels", lambda x: torch.cat([decode(x), torch.ones(2)]), reads="x")
    for _ in range(2):
        outcome = freeze(pipeline().with_stages({"pixels": wider}), tmp_path / "s", cut=cut)
        assert values(outcome.store) == {k: v + 4 for k, v in expected(*range(N)).items()}
        assert not outcome.stats.failed
    assert outcome.plan.idle


def test_a_call_that_keeps_refuses_what_would_go(root: Path, calls: Calls, files_of: Any) -> None:
    before = files_of(root)
    others = [pipeline(rows(N - 1)), pipeline(rows(k4=40)), pipeline(times=5.0)]
    for data in others:
        with pytest.raises(UsageError, match="left as it is"):
            freeze(data, root, keep=True)
    assert files_of(root) == before
    more = freeze(pipeline(rows(N + 1)), root, keep=True)  # to add is no loss
    assert values(more.store) == expected(*range(N + 1))


def test_a_call_that_keeps_leaves_fields_alone_that_it_does_not_know(root: Path) -> None:
    """Another variant of the pipeline made them; they can only stay where no row is added."""
    less = fl.Pipeline(fl.Source.table(rows()), fl.Stage("pixels", decode, reads="x"))
    assert {"pixels", "y"} <= {*freeze(less, root, keep=True).store.fields}
    longer = fl.Pipeline(fl.Source.table(rows(N + 1)), fl.Stage("pixels", decode, reads="x"))
    with pytest.raises(UsageError, match="y: taken out; no stage writes it any more"):
        freeze(longer, root, keep=True)
    assert "y" in fl.Store.open(root).fields


def test_a_changed_stage_and_changed_keys_at_once(root: Path, calls: Calls) -> None:
    table = [row for row in rows(N + 1, k2=20) if row["key"] != "k0"]
    store = freeze(pipeline(table, times=5.0), root).store
    assert values(store) == expected(*range(1, N + 1), times=5.0, k2=20)
    assert store.check(deep=True).ok
    assert calls["pixels"] <= 4  # k2 and k10
    assert freeze(pipeline(table, times=5.0), root).plan.idle


def test_another_field_is_added_and_what_is_beyond_the_cut_is_kept_up_to_date(
    root: Path, calls: Calls
) -> None:
    outcome = freeze(pipeline(), root, cut=("label",))
    assert calls == {}  # a raw field
    assert values(outcome.store, "label") == {f"k{i}": i % 3 for i in range(N)}
    store = freeze(pipeline(rows(N + 1)), root, cut=("label",)).store
    assert values(store) == expected(*range(N + 1))
    assert {"pixels", "y", "label"} < {*store.fields}


def test_a_raw_field_that_becomes_relevant_costs_only_its_text(root: Path, calls: Calls) -> None:
    before = fl.Store.open(root)
    more = fl.Stage("words", lambda caption: len(caption.split()), reads="caption")
    outcome = freeze(pipeline(more=(more,)), root)
    store = outcome.store
    assert set(calls) == {"words"}
    assert values(store, "words") == {f"k{i}": 2 for i in range(N)}
    assert values(store) == expected(*range(N))
    texts = [[n for n in s.fields if n.startswith("_source.")] for s in (before, store)]
    assert len(texts[0]) == len(texts[1]) == 1
    assert texts[0] != texts[1]
    calls.clear()
    changed = rows()
    changed[3]["caption"] = "one two three"  # from now on a caption counts
    store = freeze(pipeline(changed, more=(more,)), root).store
    assert values(store, "words") == {f"k{i}": 3 if i == 3 else 2 for i in range(N)}
    assert calls["words"] <= 2


def test_paranoid_texts_replace_the_others_without_computing(root: Path, calls: Calls) -> None:
    freeze(pipeline(), root, paranoid=True)
    assert calls == {}
    assert freeze(pipeline(), root, paranoid=True).plan.idle


def test_paranoid_and_back_with_files(tmp_path: Path, calls: Calls) -> None:
    folder, root = tmp_path / "in", tmp_path / "s"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text("x" * i if i != 2 else "bad")

    def length(path: str) -> int:
        text = Path(path).read_text()
        if text == "bad":
            raise ValueError(text)
        return len(text)

    def data() -> fl.Pipeline:
        return fl.Pipeline(fl.Source.files(folder), fl.Stage("n", length, reads="path"))

    freeze(data(), root)
    full = freeze(data(), root, paranoid=True)
    assert full.plan.said()[0] == (
        "full hashes of the files were not recorded for 3 rows ('0.txt'): computed again"
    )
    assert not any("changed" in said for said in full.plan.said())
    assert full.stats.samples == 3
    assert freeze(data(), root, paranoid=True).plan.idle
    calls.clear()
    back = freeze(data(), root)
    assert (back.plan.changed, back.plan.new, back.plan.quarantined) == ({}, [], 1)
    assert not calls
    assert freeze(data(), root).plan.idle
    (folder / "3.txt").write_text("four")
    assert freeze(data(), root).plan.changed == {"3.txt": ["path"]}


def test_a_limit_first_and_the_rest_later(tmp_path: Path, calls: Calls) -> None:
    assert list(freeze(pipeline(), tmp_path / "s", limit=3).store.keys) == ["k0", "k1", "k2"]
    calls.clear()
    assert values(freeze(pipeline(), tmp_path / "s").store) == expected(*range(N))
    assert calls["pixels"] <= 4 + N - 3


def test_bad_samples_wait_until_something_changes_or_they_are_tried_again(
    tmp_path: Path, calls: Calls
) -> None:
    root, bad = tmp_path / "s", pipeline(rows(k6=99))
    store = freeze(bad, root).store
    assert [(q["key"], q["reason"]) for q in store.quarantine] == [("k6", "pixels: ValueError: unreadable")]
    assert values(store) == expected(*(i for i in range(N) if i != 6))
    calls.clear()
    again = freeze(bad, root)
    assert again.plan.idle
    assert again.plan.quarantined == 1
    assert not calls
    retried = freeze(bad, root, retry_bad=True)
    assert retried.plan.new == [6]
    assert [q["key"] for q in retried.store.quarantine] == ["k6"]
    repaired = freeze(pipeline(), root).store
    assert values(repaired) == {**expected(*range(N))}
    assert repaired.quarantine == []


def test_a_field_that_failed_for_a_row_leaves_the_row(root: Path, calls: Calls) -> None:
    def picky(pixels: torch.Tensor) -> float:
        if pixels[0] == 5:
            raise ValueError("five")
        return float(pixels[0])

    data = pipeline(more=(fl.Stage("z", picky, reads="pixels"),))
    store = freeze(data, root).store
    assert [(q["key"], q["field"], q["reason"]) for q in store.quarantine] == [
        ("k5", "z", "z: ValueError: five")
    ]
    assert len(store.with_fields(["z"])) == N - 1
    assert values(store) == expected(*range(N))
    assert freeze(data, root).plan.idle


def test_a_field_that_failed_is_tried_again_when_asked_or_when_its_input_changed(
    root: Path, calls: Calls, tmp_path: Path
) -> None:
    def picky(pixels: torch.Tensor) -> float:
        if pixels[0] in (5, 6) and not (tmp_path / "repaired").exists():
            raise ValueError("no")
        return float(pixels[0])

    more = (fl.Stage("z", picky, reads="pixels", version="1"),)
    store = freeze(pipeline(more=more), root, max_bad=2).store
    assert [(q["key"], q["field"]) for q in store.quarantine] == [("k5", "z"), ("k6", "z")]
    other = rows(k6=60)
    store = freeze(pipeline(other, more=more), root, max_bad=2).store
    assert [q["key"] for q in store.quarantine] == ["k5"]
    assert store["k6"]["z"] == 60
    assert freeze(pipeline(other, more=more), root).plan.idle
    (tmp_path / "repaired").touch()
    assert freeze(pipeline(other, more=more), root).plan.idle  # nothing that it knows of changed
    calls.clear()
    outcome = freeze(pipeline(other, more=more), root, retry_bad=True)
    assert (outcome.plan.changed, outcome.plan.retried) == ({"k5": ["z"]}, ["k5"])
    assert outcome.plan.said() == [
        "a field of 1 row ('k5') failed before: computed again",
        "1 sample to be added",
    ]
    assert outcome.store.quarantine == []
    assert outcome.store["k5"]["z"] == 5
    assert values(outcome.store)["k5"] == expected(5)["k5"]
    assert calls["z"] <= 2  # in the forecast, and then
    assert freeze(pipeline(other, more=more), root, retry_bad=True).plan.idle


def test_an_added_field_that_stopped_on_the_way_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    root, asked = tmp_path / "s", iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "_rows_per_shard", lambda self: 4)
        freeze(pipeline(), root)
    with monkeypatch.context() as patch:
        patch.setattr(attempt.Stop, "__call__", lambda self: setattr(self, "why", "a test") or next(asked))
        stopped = freeze(pipeline(times=5.0), root)
    assert stopped.stopped == "a test"
    assert len(stopped.store.with_fields(["y"])) == 4
    outcome = freeze(pipeline(times=5.0), root)
    assert outcome.stopped is None
    assert values(outcome.store) == expected(*range(N), times=5.0)
    assert outcome.stats.samples == N - 4


def test_what_will_be_done_is_said_before(root: Path) -> None:
    out = io.StringIO()
    table = [row for row in rows(N + 1, k2=20) if row["key"] != "k0"]
    run(pipeline(table, times=5.0), root, Options(device="cpu", dry_run=True), Reporter(out=out))
    said = out.getvalue()
    assert "y: to be computed again; " in said
    assert "1 input changed ('k2': x)" in said
    assert "('k0'): deleted" in said
    assert "2 samples to be added" in said
    assert list(fl.Store.open(root).keys) == [f"k{i}" for i in range(N)]


@pytest.mark.parametrize(
    ("row", "chunk", "size"),
    [
        (4000, 32, 4096),  # at most 4096 rows
        (4000, 48, 4080),  # whole chunks
        (1 << 20, 32, 64),  # 64 MB
        (4 << 20, 32, 32),  # a whole chunk, though it is 128 MB
        (15 << 20, 32, 32),  # 480 MB
        (17 << 20, 32, 16),  # 544 MB would be too much: half a chunk
        (17 << 20, 45, 15),  # the largest part that divides it
        (64 << 20, 32, 4),  # 8 rows and their texts are over 512 MB
        (600 << 20, 32, 1),
        (1 << 20, None, 64),
    ],
)
def test_rows_of_a_shard(row: int, chunk: int | None, size: int) -> None:
    specs = {"x": fl.Field((row,), "uint8"), "_source.1": fl.Field((), "str")}
    pipeline = SimpleNamespace(frozen=[SimpleNamespace(chunk=chunk)])
    found = Attempt._rows_per_shard(SimpleNamespace(specs=specs, pipeline=pipeline))  # type: ignore[arg-type]
    assert found == size


def test_ragged_rows_of_a_shard_count_as_a_kilobyte() -> None:
    specs = {"x": fl.Field((None, 1 << 20), "uint8"), "y": fl.Field((1 << 23,), "uint8")}
    pipeline = SimpleNamespace(frozen=[SimpleNamespace(chunk=63)])
    found = Attempt._rows_per_shard(SimpleNamespace(specs=specs, pipeline=pipeline))  # type: ignore[arg-type]
    assert found == 63  # 504 MB and 63 KB
