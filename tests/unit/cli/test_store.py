"""`frostline store …` as a person runs it: what is printed, exit codes, no traceback for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.cli import show
from frostline.cli.main import main


class Unloadable:
    """Something only pickle can carry."""


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command; gives (exit code, what it printed, what it said on standard error)."""
    monkeypatch.delenv("FROSTLINE_TRACEBACK", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["store", *map(str, words)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    (folder / "train").mkdir(parents=True)
    torch.manual_seed(0)
    for i in range(6):
        values = {
            "frames": torch.full((4, 3, 8, 8), 10 * i, dtype=torch.uint8),
            "dino": torch.randn(5, 16),
            "caption": f"clip {i}",
        }
        torch.save(values, folder / "train" / f"clip-{i}.pt")
    return folder


@pytest.fixture
def store(folder: Path, tmp_path: Path, run) -> Path:
    code, _, err = run(
        "import", folder, "--out", tmp_path / "s", "--codec", "dino=int8/token", "--rows-per-shard", 2
    )
    assert (code, err) == (0, "")
    return tmp_path / "s"


# import


def test_import_says_what_it_made(folder: Path, tmp_path: Path, run) -> None:
    (folder / "train" / "bad.pt").touch()
    code, out, err = run("import", folder, "--out", tmp_path / "s", "--max-bad", "20%", "--codec", "float16")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "field: frames: uint8 [4 × 3 × 8 × 8]",
        "field: dino: float32 [5 × 16], stored as float16",
        "field: caption: str",
        "quarantined: train/bad.pt: is empty (0 bytes)",
        f"ok: 6 rows imported into {tmp_path / 's'}, 1 in quarantine.",
    ]
    code, out, _ = run("import", folder, "--out", tmp_path / "s", "--max-bad", "1", "--codec", "float16")
    assert code == 0
    assert (
        f"ok: 0 rows imported into {tmp_path / 's'}, 7 files were dealt with before, 1 in quarantine." in out
    )


def test_import_refuses(folder: Path, tmp_path: Path, run) -> None:
    def refused(*words: object) -> str:
        code, out, err = run("import", *words)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        return err

    assert "no such folder" in refused(tmp_path / "none", "--out", tmp_path / "s")
    (tmp_path / "empty").mkdir()
    assert "The folder is empty" in refused(tmp_path / "empty", "--out", tmp_path / "s")
    torch.save({"frames": Unloadable()}, folder / "evil.pt")
    np.save(folder / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    err = refused(folder, "--out", tmp_path / "s")
    assert "2 of 8 files cannot be taken, 0 allowed (--max-bad)" in err
    assert err.count("holds pickled objects") == 2
    assert not (tmp_path / "s").exists()
    assert "expected a number of files" in refused(folder, "--out", tmp_path / "s", "--max-bad", "many")
    assert "did you mean 'dino'" in refused(
        folder, "--out", tmp_path / "s", "--max-bad", 2, "--codec", "dinoo=int8"
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    assert "something else is there" in refused(folder, "--out", tmp_path / "taken", "--max-bad", 2)


def test_import_without_out_is_a_usage_error(folder: Path, run) -> None:
    code, _, err = run("import", folder)
    assert code == 2
    assert "--out" in err


# inspect


def test_inspect(store: Path, run) -> None:
    code, out, err = run("inspect", store)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for word in (
        "frames",
        "4 × 3 × 8 × 8",
        "int8/token",
        "cosine: min",
        "6, at most 2 a shard",
        "imported_from",
    ):
        assert word in out


def test_inspect_as_json(store: Path, run) -> None:
    code, out, _ = run("inspect", store, "--json")
    assert code == 0
    about = json.loads(out)
    assert (about["rows"], [f["name"] for f in about["fields"]]) == (6, ["frames", "dino", "caption"])


def test_inspect_shows_the_first_ten_of_quarantine(store: Path, run) -> None:
    with fl.Store.append(store) as writer:
        for i in range(12):
            writer.quarantine(f"bad-{i}", reason="moov atom not found", input=f"bad-{i}.mp4")
    _, out, _ = run("inspect", store)
    assert "Quarantine: 12 inputs, the first 10 (--json has all)" in out
    assert out.count("moov atom not found") == 10
    _, out, _ = run("inspect", store, "--json")
    assert len(json.loads(out)["quarantine"]) == 12


def test_inspect_a_row_with_its_picture(store: Path, tmp_path: Path, run) -> None:
    code, out, _ = run("inspect", store, "--row", "train/clip-3", "--picture", tmp_path / "p.png")
    assert code == 0
    assert f"picture of frames: {tmp_path / 'p.png'}" in out
    assert "clip 3" in out
    assert "min 30, mean 30, max 30" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    _, out, _ = run("inspect", store, "--row", "train/clip-3", "--picture", tmp_path / "q.png", "--json")
    assert json.loads(out)["pictures"] == {"frames": str(tmp_path / "q.png")}


def test_a_picture_nobody_placed_goes_to_a_new_folder(store: Path, tmp_path: Path, run, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, out, _ = run("inspect", store, "--row", "train/clip-3")
    place = Path(out.splitlines()[-1].removeprefix("picture of frames: "))
    assert place.name == "train-clip-3.png"
    assert place.is_file()
    assert json.loads(run("inspect", store, "--row", "train/clip-3", "--json")[1])["pictures"] == {}


def test_inspect_refuses(store: Path, tmp_path: Path, run) -> None:
    code, out, err = run("inspect", store, "--row", "train/clip3")
    assert (code, out) == (1, "")
    assert "no key 'train/clip3'; did you mean 'train/clip-3'" in err
    code, _, err = run("inspect", tmp_path)
    assert code == 1
    assert "No store at" in err
    code, _, err = run("inspect", store, "--picture", "x.png")
    assert (code, "--row KEY" in err) == (1, True)
    code, _, err = run("inspect", store, "--row", "train/clip-3", "--picture", tmp_path / "no" / "where.png")
    assert (code, "Cannot write the picture" in err) == (1, True)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, run) -> None:
    with fl.Store.create(tmp_path / "s", {"text": fl.Field((), "str")}) as writer:
        writer.append("evil", {"text": "\x1b[2J\x1b]0;owned\x07 [red]no markup[/red]"})
        writer.quarantine("\x1b[31m", reason="line\nbreak", input={"a": "\x1b"})
    for words in (("inspect", tmp_path / "s"), ("inspect", tmp_path / "s", "--row", "evil")):
        code, out, _ = run(*words)
        assert code == 0
        assert "\x1b" not in out
        assert "\x07" not in out
    assert "[red]no markup[/red]" in out


# check


def test_check(store: Path, run) -> None:
    for words in ((), ("--deep",)):
        code, out, _ = run("check", store, *words)
        assert (code, out.startswith("ok: ")) == (0, True)
        assert "6 rows" in out


def test_check_lists_the_damage(store: Path, run) -> None:
    shards = sorted((store / "data").rglob("*.safetensors"))
    for shard in shards[:2]:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    code, out, _ = run("check", store)
    assert code == 1
    assert out.count("damaged: ") == 2
    assert all(shard.name in out for shard in shards[:2])
    assert "2 problem(s)" in out


def test_check_of_no_store(tmp_path: Path, run) -> None:
    code, _, err = run("check", tmp_path)
    assert (code, "No store at" in err) == (1, True)


def test_check_of_a_store_without_its_manifest(store: Path, run) -> None:
    (store / "manifest.json").unlink()
    code, out, _ = run("check", store)
    assert (code, "damaged: " in out) == (1, True)


# export


@pytest.mark.parametrize("format", ["pt", "npz", "safetensors"])
def test_export_and_back(store: Path, tmp_path: Path, run, format) -> None:
    code, out, _ = run("export", store, "--out", tmp_path / "out", "--format", format)
    assert (code, "6 rows of frames, dino, caption" in out) == (0, True)
    assert (tmp_path / "out" / "train" / f"clip-0.{format}").is_file()
    code, out, _ = run("import", tmp_path / "out", "--out", tmp_path / "t")
    assert code == 0
    assert sorted(fl.Store.open(tmp_path / "t").keys) == sorted(fl.Store.open(store).keys)


def test_export_parquet_names_what_it_leaves_out(store: Path, tmp_path: Path, run) -> None:
    code, out, _ = run("export", store, "--out", tmp_path / "x.parquet", "--format", "parquet", "--limit", 2)
    assert code == 0
    assert "note: Wrote the first 2 of 6 rows." in out
    assert (tmp_path / "x.parquet").is_file()


def test_export_never_leaves_the_folder(tmp_path: Path, run) -> None:
    keys = ["../out-of-here", "/tmp/abs", "a/../../b", "", ".."]
    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}) as writer:
        for i, key in enumerate(keys):
            writer.append(key, {"n": i})
    code, _, _ = run("export", tmp_path / "s", "--out", tmp_path / "out", "--format", "npz")
    assert code == 0
    assert {p.name for p in tmp_path.iterdir()} == {"s", "out"}
    assert len(list((tmp_path / "out").rglob("*.npz"))) == len(keys)


def test_export_refuses(store: Path, tmp_path: Path, run) -> None:
    code, _, err = run("export", store, "--out", tmp_path / "o", "--field", "dinno")
    assert (code, "no field 'dinno'; did you mean 'dino'" in err) == (1, True)
    code, _, err = run("export", store, "--out", tmp_path / "o", "--format", "zip")
    assert (code, "expected one of pt, npz" in err) == (1, True)
    code, _, err = run("export", store, "--out", store)
    assert (code, "something is there already" in err) == (1, True)
    code, _, err = run("export", tmp_path, "--out", tmp_path / "o")
    assert (code, "No store at" in err) == (1, True)


# delete, retire, gc


def test_delete_retire_and_gc(store: Path, run) -> None:
    code, out, _ = run("delete", store, "train/clip-0", "train/clip-1")
    assert (code, "2 rows deleted" in out) == (0, True)
    code, out, _ = run("retire", store, "frames")
    assert code == 0
    before = {p for p in store.rglob("*") if p.is_file()}
    code, out, _ = run("gc", store, "--dry-run")
    assert (code, "would be freed" in out) == (0, True)
    assert {p for p in store.rglob("*") if p.is_file()} - {store / ".lock"} == before - {store / ".lock"}
    code, out, _ = run("gc", store)
    assert (code, "freed in" in out, "would" in out) == (0, True, False)
    opened = fl.Store.open(store)
    assert (len(opened), list(opened.fields)) == (4, ["dino", "caption"])
    assert not list((store / "data").glob("*frames*"))
    assert opened.check(deep=True).ok


def test_delete_takes_all_or_none(store: Path, run) -> None:
    code, _, err = run("delete", store, "train/clip-0", "train/clip-9")
    assert (code, "no key 'train/clip-9'; did you mean" in err) == (1, True)
    assert len(fl.Store.open(store)) == 6


def test_retire_refuses_with_the_nearest_name(store: Path, run) -> None:
    code, _, err = run("retire", store, "frame")
    assert (code, "no field 'frame'; did you mean 'frames'" in err) == (1, True)


@pytest.mark.parametrize("share", ["x", "0", "200%", "-1"])
def test_gc_wants_a_share(store: Path, run, share) -> None:
    code, _, err = run("gc", store, f"--min-dead={share}")
    assert (code, "is not a share" in err) == (2, True)


def test_a_store_that_is_being_written_says_by_whom(store: Path, run) -> None:
    with fl.Store.append(store):
        code, _, err = run("delete", store, "train/clip-0")
    assert (code, "being written" in err, str(os.getpid()) in err) == (1, True, True)


# the parts


def test_as_a_program_in_a_pipe(store: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "store", "inspect", str(store)],
        capture_output=True, text=True, encoding="utf-8", check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_plain_progress_has_rate_and_time_left(capsys, monkeypatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 6.0])
    monkeypatch.setattr(show.time, "monotonic", lambda: next(clock))
    with show.Meter("files") as meter:
        for done in (1, 20, 60):
            meter("importing", done, 120)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "importing: 50%, 10 files/s, 6 s left\n")


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (123456, "123 kB")])
def test_sizes(n, text) -> None:
    assert show.size(n) == text
