"""Folders into stores: which fields are found, what counts as bad, and going on after an interruption."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import frostline as fl
from frostline.errors import FieldError, StoreError, UsageError
from frostline.store import convert
from frostline.store.convert import Budget, import_folder


class Unloadable:
    """Something only pickle can carry."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def fill(folder: Path, n: int = 6, **more) -> None:
    for i in range(n):
        torch.save({"x": torch.full((2, 3), float(i)), "label": i, **more}, folder / f"clip-{i}.pt")


def files(root: Path) -> dict[str, bytes]:
    paths = [p for p in root.rglob("*") if p.is_file() and p.name not in ("log.txt", ".lock")]
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}


# what is found


def test_a_dict_of_everything(folder: Path, tmp_path: Path) -> None:
    for i in range(4):
        torch.save(
            {
                "x": torch.full((2, 3), float(i), dtype=torch.bfloat16),
                "tokens": torch.arange(i),
                "caption": f"number {i}",
                "label": i,
                "score": i / 2,
                "good": i % 2 == 0,
                "tags": ["a", "b"],
                "meta": {"n": None},
                "deep": {"inner": torch.tensor(i)},
            },
            folder / f"{i}.pt",
        )
    done = import_folder(folder, tmp_path / "s")
    assert (done.rows, done.already_in, done.bad) == (4, 0, ())
    assert {name: (spec.shape, spec.dtype) for name, spec in done.fields.items()} == {
        "x": ((2, 3), "bfloat16"),
        "tokens": ((None,), "int64"),
        "caption": ((), "str"),
        "label": ((), "int64"),
        "score": ((), "float64"),
        "good": ((), "bool"),
        "tags": ((), "json"),
        "meta": ((), "json"),
        "deep.inner": ((), "int64"),
    }
    row = fl.Store.open(tmp_path / "s")["3"]
    assert row["x"].tolist() == [[3.0] * 3] * 2
    assert row["tokens"].tolist() == [0, 1, 2]
    assert (row["caption"], row["tags"], row["meta"]) == ("number 3", ["a", "b"], {"n": None})
    assert (row["label"].item(), row["score"].item(), row["good"].item()) == (3, 1.5, False)


def test_mixed_formats_and_nested_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    torch.save(torch.from_numpy(x), folder / "one.pth")
    torch.save(torch.from_numpy(x), folder / "old.pt", _use_new_zipfile_serialization=False)
    np.save(folder / "a" / "two.npy", np.asfortranarray(x))
    np.save(folder / "a" / "three.npy", x.astype(">f4"))
    np.savez(folder / "a" / "b" / "four.npz", value=x)
    np.savez_compressed(folder / "five.npz", value=x)
    save_file({"value": torch.from_numpy(x)}, folder / "six.safetensors", metadata={"format": "pt"})
    assert import_folder(folder, tmp_path / "s").rows == 7
    store = fl.Store.open(tmp_path / "s")
    assert sorted(store.keys) == ["a/b/four", "a/three", "a/two", "five", "old", "one", "six"]
    assert all(store[key]["value"].tolist() == x.tolist() for key in store.keys)


def test_numpy_strings_and_empty_arrays(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        np.savez(
            folder / f"{i}.npz", text=np.array(f"é{i}"), words=np.array(["a", "b"]), none=np.zeros((0, 4))
        )
        np.save(folder / f"{i}.npy", np.zeros((0, 4)))
    done = import_folder(folder, tmp_path / "s", pattern="*.npz")
    assert {n: f.dtype for n, f in done.fields.items()} == {"text": "str", "words": "json", "none": "float64"}
    assert fl.Store.open(tmp_path / "s")["2"]["words"] == ["a", "b"]
    assert any("3 outside the pattern" in note for note in done.notes)
    assert import_folder(folder, tmp_path / "t", pattern="*.npy").fields["value"].shape == (0, 4)


def test_the_same_stem_twice_keeps_the_suffix_for_all(folder: Path, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(torch.ones(2), folder / name)
    np.save(folder / "a.npy", np.ones(2, np.float32))
    done = import_folder(folder, tmp_path / "s")
    assert sorted(fl.Store.open(tmp_path / "s").keys) == ["a.npy", "a.pt", "b.pt"]
    assert any("keep their suffix" in note for note in done.notes)


def test_other_and_hidden_files_are_left_out_aloud(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    (folder / "notes.txt").write_text("x")
    (folder / ".hidden.pt").write_bytes(b"junk")
    done = import_folder(folder, tmp_path / "s")
    assert done.rows == 6
    assert done.notes == ("Left out other files: 1 .txt.",)


def test_ragged_never_and_by_name(folder: Path, tmp_path: Path) -> None:
    for i in range(5):
        torch.save({"x": torch.ones(4 if i else 5, 2), "y": torch.ones(3)}, folder / f"{i}.pt")
    with pytest.raises(UsageError, match=r"0\.pt: 'x' is float32 \[5, 2\], in most files float32 \[4, 2\]"):
        import_folder(folder, tmp_path / "s", ragged="never")
    assert import_folder(folder, tmp_path / "s").fields["x"].shape == (None, 2)
    named = import_folder(folder, tmp_path / "t", ragged=["x", "y"]).fields
    assert [named[n].shape for n in "xy"] == [(None, 2), (None,)]
    with pytest.raises(UsageError, match=r"no 'z'.*They have x, y"):
        import_folder(folder, tmp_path / "u", ragged=["z"])


def test_codecs_by_name_and_for_all(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    assert import_folder(folder, tmp_path / "s", codec={"x": "int8"}).fields["x"].codec == "int8/token"
    star = import_folder(folder, tmp_path / "t", codec={"*": "float16"}).fields
    assert (star["x"].codec, star["label"].codec) == ("float16", "raw")
    with pytest.raises(UsageError, match="no 'xx'; did you mean 'x'"):
        import_folder(folder, tmp_path / "u", codec={"xx": "float16"})
    with pytest.raises(FieldError, match="floating-point"):
        import_folder(folder, tmp_path / "u", codec={"label": "float16"})
    assert not (tmp_path / "u").exists()


def test_odd_names_become_names_of_fields(folder: Path, tmp_path: Path) -> None:
    torch.save({"layer 1/attn": torch.ones(2), "0": 1}, folder / "a.pt")
    done = import_folder(folder, tmp_path / "s")
    assert list(done.fields) == ["layer_1_attn", "_0"]
    assert "'layer 1/attn' is called 'layer_1_attn'" in done.notes[0]
    torch.save({"a b": 1, "a/b": 1}, folder / "a.pt")
    with pytest.raises(UsageError, match="would both be the field 'a_b'"):
        import_folder(folder, tmp_path / "t")


def test_mixed_plain_values_become_json_and_int_with_float_a_float(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        torch.save(
            {"caption": None if i else "x", "score": 1 if i else 0.5, "big": 2**70}, folder / f"{i}.pt"
        )
    done = import_folder(folder, tmp_path / "s")
    assert {n: f.dtype for n, f in done.fields.items()} == {
        "caption": "json",
        "score": "float64",
        "big": "json",
    }
    store = fl.Store.open(tmp_path / "s")
    assert (store["1"]["caption"], store["1"]["score"].item(), store["1"]["big"]) == (None, 1.0, 2**70)


def test_only_some_fields(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    torch.save({"x": torch.zeros(2, 3)}, folder / "no-label.pt")
    assert import_folder(folder, tmp_path / "s", fields=["x"]).rows == 7
    with pytest.raises(UsageError, match="did you mean 'label'"):
        import_folder(folder, tmp_path / "t", fields=["labl"])


# bad files


def bad_files(folder: Path) -> dict[str, str]:
    """One of each kind, and what its reason must say."""
    whole = io.BytesIO()
    torch.save({"x": torch.zeros(2, 3), "label": 0}, whole)
    (folder / "cut.pt").write_bytes(whole.getvalue()[:-100])
    (folder / "empty.pt").touch()
    (folder / "junk.pt").write_bytes(b"junk" * 100)
    torch.save({"x": Unloadable(), "label": 0}, folder / "pickled.pt")
    np.save(folder / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(folder / "object.npz", x=np.array([{}], dtype=object))
    torch.save({"x": torch.zeros(2, 3).to_sparse(), "label": 0}, folder / "sparse.pt")
    torch.save({"x": torch.zeros(1).expand(10**12), "label": 0}, folder / "expanded.pt")
    torch.save({"x": [torch.zeros(2)], "label": 0}, folder / "list.pt")
    torch.save([1, 2], folder / "top.pt")
    torch.save({"x": torch.zeros(2, 3, dtype=torch.complex64), "label": 0}, folder / "complex.pt")
    np.save(folder / "date.npy", np.array(["2020-01-01"], dtype="datetime64[D]"))
    np.save(folder / "short.npy", np.zeros(100))
    os.truncate(folder / "short.npy", 500)
    (folder / "junk.safetensors").write_bytes(b"\xff" * 64)
    (folder / "junk.npz").write_bytes(b"PK\x03\x04junk")
    with zipfile.ZipFile(folder / "lie.npz", "w") as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
        )
        archive.writestr("x.npy", header.getvalue())
    os.mkfifo(folder / "pipe.pt")
    torch.save({"x": torch.zeros(2, 3)}, folder / "less.pt")
    torch.save({"x": torch.zeros(2, 3), "label": 0, "more": 1}, folder / "more.pt")
    torch.save({"x": torch.zeros(2, 3, dtype=torch.float64), "label": 0}, folder / "wide.pt")
    torch.save({"x": torch.zeros(2, 4), "label": "zero"}, folder / "unlike.pt")
    return {
        "cut.pt": "is cut short",
        "empty.pt": "is empty (0 bytes)",
        "junk.pt": "is not a whole file of torch.save|cannot be read as|pickled",
        "pickled.pt": "pickled objects",
        "object.npy": "pickled objects",
        "object.npz": "pickled objects",
        "sparse.pt": "sparse_coo",
        "expanded.pt": "claims 4,000,000,000,000 bytes",
        "list.pt": "list of tensors",
        "top.pt": "holds a list",
        "complex.pt": "complex64",
        "date.npy": "datetime64",
        "short.npy": "cannot be read as .npy",
        "junk.safetensors": "cannot be read as .safetensors",
        "junk.npz": "cannot be read as .npz",
        "lie.npz": "which its bytes do not fit",
        "pipe.pt": "not a regular file",
        "less.pt": "has no 'label'",
        "more.pt": "also has 'more'",
        "wide.pt": "'x' is float64 [2, 3], in most files float32",
        "unlike.pt": "'label' is str, in most files int64",
    }


def test_every_kind_of_bad_file_has_its_reason(folder: Path, tmp_path: Path) -> None:
    fill(folder, 40)
    expected = bad_files(folder)
    done = import_folder(folder, tmp_path / "s", max_bad="50%")
    assert done.rows == 40
    reasons = {bad.file: bad.reason for bad in done.bad}
    assert reasons.keys() == expected.keys()
    wrong = {f: r for f, r in reasons.items() if not any(part in r for part in expected[f].split("|"))}
    assert wrong == {}
    assert all("\n" not in reason for reason in reasons.values())
    store = fl.Store.open(tmp_path / "s")
    assert {entry["input"]: entry["reason"] for entry in store.quarantine} == reasons
    assert store.check(deep=True).ok


def test_any_bad_file_stops_by_default_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    fill(folder, 30)
    for i in range(12):
        (folder / f"bad-{i:02}.pt").touch()
    with pytest.raises(UsageError, match=r"12 of 42 files cannot be taken, 0 allowed") as error:
        import_folder(folder, tmp_path / "s")
    assert len(error.value.problems) == 11
    assert error.value.problems[0] == "bad-00.pt: is empty (0 bytes)"
    assert error.value.problems[-1] == "… and 2 more"
    assert not (tmp_path / "s").exists()
    with pytest.raises(UsageError, match="12 of 42"):
        import_folder(folder, tmp_path / "s", max_bad=11)
    assert import_folder(folder, tmp_path / "s", max_bad=12).rows == 30


def test_nothing_left(folder: Path, tmp_path: Path) -> None:
    (folder / "a.pt").touch()
    with pytest.raises(UsageError, match="none of its files can be taken"):
        import_folder(folder, tmp_path / "s", max_bad="100%")


@pytest.mark.parametrize(("said", "most"), [("1%", 3), (3, 3), ("0", 0), ("0.5%", 1), ("100%", 300)])
def test_budget(said, most) -> None:
    assert Budget.parse(said, 300).most == most


@pytest.mark.parametrize("said", ["x", "-1", "101%", "%", "nan%", "0.5", ""])
def test_budget_that_is_none(said) -> None:
    with pytest.raises(UsageError, match="expected a number of files"):
        Budget.parse(said, 300)


def test_values_that_a_codec_cannot_hold_are_bad_and_shift_nothing(folder: Path, tmp_path: Path) -> None:
    for i in range(5):
        x = torch.full((2, 3), float(i) if i != 2 else float("nan"))
        torch.save({"label": i, "x": x}, folder / f"{i}.pt")
    with pytest.raises(UsageError, match="NaN"):
        import_folder(folder, tmp_path / "s", codec={"x": "int8"})
    done = import_folder(folder, tmp_path / "t", codec={"x": "int8"}, max_bad=1)
    assert (done.rows, done.bad[0].key) == (4, "2")
    store = fl.Store.open(tmp_path / "t")
    assert [store[k]["label"].item() for k in store.keys] == [0, 1, 3, 4]
    assert [round(store[k]["x"].max().item()) for k in store.keys] == [0, 1, 3, 4]


def test_damage_behind_a_good_header_is_found_while_reading(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        np.savez(folder / f"{i}.npz", x=np.full(1000, i))
    data = bytearray((folder / "1.npz").read_bytes())
    data[4000] ^= 1
    (folder / "1.npz").write_bytes(data)
    with pytest.raises(UsageError, match=r"1\.npz: cannot be read as \.npz \(Bad CRC"):
        import_folder(folder, tmp_path / "s")
    done = import_folder(folder, tmp_path / "s", max_bad=1)
    assert (done.rows, len(done.bad)) == (2, 1)


# places and links


def test_places_that_cannot_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        import_folder(tmp_path / "none", tmp_path / "s")
    with pytest.raises(UsageError, match="The folder is empty"):
        import_folder(folder, tmp_path / "s")
    (folder / "a.txt").touch()
    with pytest.raises(UsageError, match=r"1 \.txt"):
        import_folder(folder, tmp_path / "s")
    with pytest.raises(UsageError, match="not a folder"):
        import_folder(folder / "a.txt", tmp_path / "s")
    fill(folder)
    with pytest.raises(UsageError, match="among its sources"):
        import_folder(folder, folder / "inside" / "s")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    with pytest.raises(StoreError, match="something else is there"):
        import_folder(folder, tmp_path / "taken")
    import_folder(folder, tmp_path / "s")
    with pytest.raises(UsageError, match="a frostline store already"):
        import_folder(tmp_path / "s", tmp_path / "t")


def test_links_out_of_the_folder_are_refused_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    fill(folder, 3)
    fill(tmp_path, 1)
    (folder / "inside.pt").symlink_to(folder / "clip-0.pt")
    (folder / "outside.pt").symlink_to(tmp_path / "clip-0.pt")
    (folder / "loop").symlink_to(folder)
    with pytest.raises(UsageError, match=r"outside\.pt: is a link that leaves the folder; --follow-links"):
        import_folder(folder, tmp_path / "s")
    done = import_folder(folder, tmp_path / "s", max_bad=1)
    assert sorted(fl.Store.open(tmp_path / "s").keys) == ["clip-0", "clip-1", "clip-2", "inside"]
    assert any("1 linked folder" in note for note in done.notes)
    assert import_folder(folder, tmp_path / "t", follow_links=True).rows == 5


def test_names_that_are_not_utf8_are_bad(folder: Path, tmp_path: Path) -> None:
    fill(folder, 3)
    os.rename(folder / "clip-2.pt", os.fsencode(folder) + b"/bad\xff.pt")
    done = import_folder(folder, tmp_path / "s", max_bad=1)
    assert [(bad.file, bad.reason) for bad in done.bad] == [("bad\\udcff.pt", "its name is not UTF-8")]
    assert import_folder(folder, tmp_path / "s", max_bad=1).rows == 0


# going on


def test_an_interrupted_import_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch) -> None:
    fill(folder, 20)
    for name in ("clip-05a.pt", "clip-19a.pt"):
        (folder / name).touch()
    options = {"rows_per_shard": 4, "max_bad": 2}
    import_folder(folder, tmp_path / "unbroken", **options)

    real, reads = convert.load, []

    def interrupted(path, texts=()):
        reads.append(path)
        if len(reads) == 14:
            raise KeyboardInterrupt
        return real(path, texts)

    monkeypatch.setattr(convert, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_folder(folder, tmp_path / "s", **options)
    kept = len(fl.Store.open(tmp_path / "s"))
    assert 0 < kept < 20
    done = import_folder(folder, tmp_path / "s", **options)
    assert done.rows == 20 - kept
    assert files(tmp_path / "s") == files(tmp_path / "unbroken")
    again = import_folder(folder, tmp_path / "s", **options)
    assert (again.rows, again.already_in, len(again.bad)) == (0, 22, 2)
    assert files(tmp_path / "s") == files(tmp_path / "unbroken")


def test_a_repaired_file_is_read_again_on_request(folder: Path, tmp_path: Path) -> None:
    fill(folder, 4)
    whole = (folder / "clip-1.pt").read_bytes()
    (folder / "clip-1.pt").write_bytes(b"")
    import_folder(folder, tmp_path / "s", max_bad=1)
    (folder / "clip-1.pt").write_bytes(whole)
    left = import_folder(folder, tmp_path / "s", max_bad=1)
    assert (left.rows, left.bad[0].reason[:5]) == (0, "is em")
    assert "--retry-bad" in left.bad[0].reason
    assert import_folder(folder, tmp_path / "s", retry_bad=True).rows == 1
    assert fl.Store.open(tmp_path / "s").quarantine == []


def test_another_store_at_the_same_place_is_left_alone(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    import_folder(folder, tmp_path / "s")
    before = files(tmp_path / "s")
    with pytest.raises(StoreError, match="already"):
        import_folder(folder, tmp_path / "s", resume=False)
    other = tmp_path / "other"
    other.mkdir()
    fill(other)
    with pytest.raises(StoreError, match="begun otherwise"):
        import_folder(other, tmp_path / "s")
    assert files(tmp_path / "s") == before


def test_progress_counts_every_file(folder: Path, tmp_path: Path) -> None:
    fill(folder, 3)
    seen = []
    import_folder(folder, tmp_path / "s", progress=lambda *step: seen.append(step))
    assert seen == [(what, i, 3) for what in ("looking", "importing") for i in (1, 2, 3)]
