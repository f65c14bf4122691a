"""A store that is brought up to date again and again: nothing stale stays, and runs add up to one."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import FreezeStopped, NotFrozen
from frostline.fingerprint import files as fingerprint_files
from frostline.freezer import attempt
from frostline.freezer.attempt import Outcome
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run


def read(path: str) -> int:
    return int(Path(path).read_text())


def doubled(y: int) -> int:
    return 2 * int(y)


def go(data: fl.Pipeline, root: Path, **options: Any) -> Outcome:
    return run(data, root, Options(**options), Reporter(quiet=True))


def files(folder: Path, *numbers: int) -> fl.Pipeline:
    folder.mkdir(exist_ok=True)
    for i, number in enumerate(numbers):
        (folder / f"{i}.txt").write_text(str(number))
    return fl.Pipeline(fl.Source.files(folder / "*.txt"), fl.Stage("y", read, reads="path"))


def values(root: Path, field: str = "y") -> list[int]:
    store = fl.Store.open(root)
    return [int(store[key][field]) for key in sorted(store.keys)]


def test_a_version_that_is_added_and_changed(tmp_path: Path) -> None:
    for numbers, version in (([1, 2, 3], None), ([7, 8, 9], "v2"), ([70, 80, 90], "v3"), ([1, 1, 1], None)):
        source = fl.Source.dataset([{"x": n} for n in numbers], version=version)
        go(fl.Pipeline(source, fl.Stage("y", doubled, reads="x")), tmp_path / "s")
        assert values(tmp_path / "s") == [2 * n for n in numbers]


def test_a_limit_with_new_texts_does_not_hide_what_changed_beyond_it(tmp_path: Path) -> None:
    data = files(tmp_path / "d", 10, 11, 12, 13, 14)
    go(data, tmp_path / "s")
    (tmp_path / "d" / "4.txt").write_text("99")
    go(data, tmp_path / "s", limit=2, paranoid=True)
    go(data, tmp_path / "s", paranoid=True)
    assert values(tmp_path / "s") == [10, 11, 12, 13, 99]


def of_two(b: int, *more: fl.Stage) -> fl.Pipeline:
    rows = [{"key": str(i), "a": i, "b": b + i} for i in range(3)]
    outputs = ["y", *(stage.name for stage in more)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", doubled, reads="a"), *more, outputs=outputs)


Z = fl.Stage("z", doubled, reads="b")


def killed(root: Path, names: list[str]) -> None:
    if names:
        raise KeyboardInterrupt


def test_a_row_that_has_its_new_text_already_is_compared_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_MOST_ROWS", 1)
    go(of_two(5), tmp_path / "s")
    stopped = go(of_two(5, Z), tmp_path / "s", max_hours=1e-9)  # some rows have the new text, and z
    assert len(stopped.store.with_fields(["z"])) in (1, 2)
    go(of_two(6, Z), tmp_path / "s")
    assert values(tmp_path / "s", "z") == [12, 14, 16]


def test_the_newest_texts_count_where_a_kill_left_old_ones_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(of_two(5), tmp_path / "s")
    with monkeypatch.context() as patched:
        patched.setattr(attempt, "retire_fields", killed)
        with pytest.raises(KeyboardInterrupt):
            go(of_two(5, Z), tmp_path / "s")
    go(of_two(7, Z), tmp_path / "s")
    assert values(tmp_path / "s", "z") == [14, 16, 18]


def half_random(path: str, *, own: bool) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
    made[0].load_state_dict(torch.load(path))
    if own:
        made[1].weight.data.fill_(float(np.random.default_rng().normal()))
    return made.requires_grad_(False).eval()


@pytest.mark.parametrize("own", [False, True], ids=["by torch's default", "otherwise"])
def test_weights_that_are_in_no_file_are_drawn_alike_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr(fingerprint_files, "SETTLED_NS", -(10**12))
    weights = tmp_path / "first.pt"
    torch.save(torch.nn.Linear(1, 2).state_dict(), weights)

    def data(n: int) -> fl.Pipeline:
        rows = [{"key": str(i), "x": [float(i)]} for i in range(n)]
        encoder = fl.Stage(
            "y", fl.lazy(half_random, str(weights), own=own), reads="t", on="device", batch_size=2
        )
        return fl.Pipeline(fl.Source.table(rows), fl.Stage("t", torch.tensor, reads="x"), encoder)

    go(data(2), tmp_path / "s")
    assert go(data(2), tmp_path / "s").plan.idle
    if not own:
        go(data(4), tmp_path / "s")
        whole = go(data(4), tmp_path / "whole").store.rows([0, 1, 2, 3])["y"]
        assert torch.equal(fl.Store.open(tmp_path / "s").rows([0, 1, 2, 3])["y"], whole)
        return
    with pytest.raises(NotFrozen, match="y: its loader gives other weights each time"):
        go(data(4), tmp_path / "s")
    assert len(fl.Store.open(tmp_path / "s")) == 2


class Remembering:
    """What it was asked for, as a tokenizer does: in memory that is not Python's, and part of its content."""

    def __init__(self, path: str) -> None:
        self.by, self.asked = read(path), io.BytesIO()

    def __call__(self, x: int) -> int:
        self.asked.seek(0)
        self.asked.write(b"padding")
        return self.by * int(x)


def test_what_a_call_leaves_behind_is_not_taken_for_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint_files, "SETTLED_NS", -(10**12))
    (tmp_path / "by.txt").write_text("3")

    def data(n: int) -> fl.Pipeline:
        rows = [{"key": str(i), "x": i} for i in range(n)]
        loader = fl.lazy(Remembering, str(tmp_path / "by.txt"))
        return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", loader, reads="x"))

    go(data(2), tmp_path / "s")
    go(data(4), tmp_path / "s")
    assert values(tmp_path / "s") == [0, 3, 6, 9]


def test_an_input_that_cannot_be_read_is_settled_until_it_can(tmp_path: Path) -> None:
    data = files(tmp_path / "d", 1, 2, 3)
    os.symlink(tmp_path / "nowhere", tmp_path / "d" / "9.txt")
    go(data, tmp_path / "s", max_bad=1)
    assert [entry["key"] for entry in fl.Store.open(tmp_path / "s").quarantine] == ["9.txt"]
    assert go(data, tmp_path / "s", max_bad=1).plan.idle
    (tmp_path / "nowhere").write_text("4")
    go(data, tmp_path / "s")
    assert values(tmp_path / "s") == [1, 2, 3, 4]


def test_failures_of_earlier_runs_count(tmp_path: Path) -> None:
    data = files(tmp_path / "d", 1, 2)
    (tmp_path / "d" / "8.txt").write_text("eight")
    go(data, tmp_path / "s", max_bad=1)
    (tmp_path / "d" / "9.txt").write_text("nine")
    with pytest.raises(FreezeStopped, match="2 of 4 samples failed, 1 may"):
        go(data, tmp_path / "s", max_bad=1)
    go(data, tmp_path / "s", max_bad=2)
    (tmp_path / "d" / "3.txt").write_text("3")
    assert not go(data, tmp_path / "s", max_bad=1).plan.idle  # nothing new fails: nothing to stop for


def rows_of(x: int) -> torch.Tensor:
    return torch.full((3 if x < 40 else 4,), float(x))


def total(v: torch.Tensor) -> torch.Tensor:
    return v.sum(1)


def test_two_runs_keep_to_the_same_shapes_as_one(tmp_path: Path) -> None:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"k{i:02d}", "x": i} for i in range(80)]),
        fl.Stage("v", rows_of, reads="x"),
        fl.Stage("y", total, reads="v", on="device", batch_size=4),
    )
    go(data, tmp_path / "one", max_bad=80)
    go(data, tmp_path / "two", max_bad=80, limit=40)
    go(data, tmp_path / "two", max_bad=80)
    assert [len(fl.Store.open(tmp_path / name)) for name in ("one", "two")] == [40, 40]


def fails_at_two(y: int) -> int:
    if int(y) == 2:
        raise ValueError("two")
    return int(y) + 100


def test_a_field_that_failed_for_a_row_can_be_read_by_a_later_one(tmp_path: Path) -> None:
    data = files(tmp_path / "d", 1, 2, 3)
    go(data, tmp_path / "s")
    more = fl.Pipeline(data.source, *data.steps, fl.Stage("b", fails_at_two, reads="y"), outputs=["y", "b"])
    go(more, tmp_path / "s", max_bad=1)
    last = fl.Pipeline(more.source, *more.steps, fl.Stage("c", doubled, reads="b"), outputs=["y", "b", "c"])
    go(last, tmp_path / "s", max_bad=4)
    store = fl.Store.open(tmp_path / "s")
    assert int(store["0.txt"]["c"]) == 202
    assert len(store.with_fields(["c"])) == 2


def test_a_field_beyond_the_cut_is_kept_up_to_date(tmp_path: Path) -> None:
    data = files(tmp_path / "d", 1, 2)

    def pipeline(version: str) -> fl.Pipeline:
        stage = fl.Stage("b", doubled, reads="y", version=version)
        return fl.Pipeline(data.source, *data.steps, stage, outputs=["b"])

    go(pipeline("1"), tmp_path / "s", cut=("y", "b"))
    outcome = go(pipeline("2"), tmp_path / "s", cut=("y",))
    assert any(text.startswith("b: to be computed again") for text in outcome.plan.said())
    assert values(tmp_path / "s", "b") == [2, 4]


def halves(x: int) -> torch.Tensor:
    return torch.tensor([x / 2, x / 3])


def test_another_declaration_is_another_field(tmp_path: Path) -> None:
    def pipeline(codec: str) -> fl.Pipeline:
        spec = {"h": fl.Field((2,), "float32", codec)}
        rows = fl.Source.table([{"key": "a", "x": 1}, {"key": "b", "x": 2}])
        return fl.Pipeline(rows, fl.Stage("halves", halves, reads="x", writes=spec))

    go(pipeline("int8/token"), tmp_path / "s")
    outcome = go(pipeline("raw"), tmp_path / "s")
    assert "it is declared as float32 [2], raw, and was as float32 [2], int8/token" in outcome.plan.said()[0]
    assert fl.Store.open(tmp_path / "s").fields["h"].codec == "raw"


def test_what_is_not_whole_is_not_returned(tmp_path: Path) -> None:
    """A script must not train on a part of its data because a time limit was reached."""
    data = fl.Pipeline(
        fl.Source.table([{"key": f"{i:05d}", "x": i} for i in range(5000)]), fl.Stage("y", doubled, reads="x")
    )
    with pytest.raises(FreezeStopped, match=r"the time limit of .* with 4,096 rows"):
        fl.freeze(data, tmp_path / "s", max_hours=1e-9, quiet=True)
    assert len(fl.freeze(data, tmp_path / "s", quiet=True)) == 5000
