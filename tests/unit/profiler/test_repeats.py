"""What is counted as done again, and when storing it would pay."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler import repeats
from frostline.profiler.rows import Spans
from frostline.results import Repeat

FAST = (1e9, 2e9)
"""Bytes a second, written and read."""


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_disk", lambda out: FAST)


def module(name: str = "Net", **given: Any) -> dict[str, Any]:
    return {"name": name, "prefix": "", "frozen": "parameters", "calls": 2, "steps": 2, "out_bytes": 4e6,
            **given}  # fmt: skip


def held(name: str = "Net", **given: Any) -> dict[str, Any]:
    return {"name": name, "calls": 10, "looked": 10, "rows": 80, "repeats": 60, "moved": False, **given}


def raw(**given: Any) -> dict[str, Any]:
    """Two steps of pass B of 1 s, one batch of 8 each; Net takes 0.4, its part `stem` ends after 0.1."""

    def lines(step: int) -> list[list[Any]]:
        return [
            ["forward", "Net", -1, step, step + 0.0, step + 0.4, 0, 0, 0, 0],
            ["forward", "Net.stem", 2 * step, step, step + 0.05, step + 0.1, 0, 0, 0, 0],
        ]  # fmt: skip

    block = {"phase": "B", "start": 0, "end": 2, "times": [1.0, 1.0], "fresh": [0, 0], "batches": [1, 1],
             "rows": [8, 8]}  # fmt: skip
    found = {"spans": [*lines(0), *lines(1)], "bounds": [[1.0, 0.0], [2.0, 0.0]], "cuda": False}
    loader = {"dataset": "D", "samples": 64, "batches": 8, "calls": 9, "a_step": 1, "items": 0, "repeats": 0}
    return {"blocks": [block], "spans": [found], "modules": [module()], "inputs": [held()],
            "loaders": [loader], **given}  # fmt: skip


def all_of(found: dict[str, Any], *prepared: dict[str, Any]) -> tuple[Repeat, ...]:
    return repeats.repeats(found, Spans(found), prepared, Path("/nowhere"))


def line(
    *decodes: tuple[str, str, float], size: int = 0, n: int = 8, dataset: str = "D", s: float = 0.0
) -> dict[str, Any]:
    told = [[what, key, 0.0, seconds, size] for what, key, seconds in decodes]
    return {"dataset": dataset, "n": n, "decodes": told, "s": s}


def test_a_modules_repeats_cost_their_share_of_its_time() -> None:
    (found,) = all_of(raw())
    assert (found.what, found.seen, found.repeats, found.exact, found.note) == (
        "module Net",
        80,
        60,
        True,
        "",
    )
    assert found.share == 0.75
    assert found.ms == pytest.approx(0.75 * 400)


def test_a_sample_says_that_it_is_one() -> None:
    (found,) = all_of(raw(inputs=[held(looked=3, rows=24, repeats=12)]))
    assert not found.exact
    assert "3 of 10" in found.note


@pytest.mark.parametrize("given", [{"moved": True}, {"rows": 0, "looked": 0}, {"name": "Gone"}])
def test_what_changed_was_never_seen_or_is_unknown_is_not_told(given: dict[str, Any]) -> None:
    assert all_of(raw(inputs=[held(**given)])) == ()


def test_a_prefix_costs_from_the_beginning_to_its_end() -> None:
    modules = [module(frozen="", prefix="Net.stem"), module("Net.stem", out_bytes=8e6)]
    (found,) = all_of(raw(modules=modules))
    assert found.what == "module Net.stem"
    assert found.ms == pytest.approx(0.75 * 100)


def test_storing_pays_when_reading_is_quicker_than_computing() -> None:
    """8 rows a step of 400 ms: 50 ms to compute one, 4 to write its 4 MB, 2 to read them."""
    (found,) = all_of(raw())
    assert found.epochs == pytest.approx((50 + 4) / (50 - 2))


def test_storing_never_pays_when_reading_is_slower() -> None:
    (found,) = all_of(raw(modules=[module(out_bytes=50e-3 * FAST[1])]))
    assert found.epochs is None


@given(size=st.floats(1e3, 2e8))
def test_so_many_epochs_are_where_both_take_the_same(size: float) -> None:
    (found,) = all_of(raw(modules=[module(out_bytes=size)]))
    compute, write, read = 0.05, size / FAST[0], size / FAST[1]
    if found.epochs is None:
        assert read >= compute
    else:
        assert found.epochs * compute == pytest.approx(compute + write + found.epochs * read)


@pytest.mark.parametrize("given", [{"loaders": []}, {"modules": [module(out_bytes=0)]}, {"spans": []}])
def test_without_a_length_a_size_or_a_time_the_epochs_are_unknown(given: dict[str, Any]) -> None:
    assert [found.epochs for found in all_of(raw(**given))] == [None]


def test_the_results_of_all_samples_are_stored() -> None:
    """Of 64 samples 32 were seen, then all of them more than once; then 24 rows a step."""
    for seen, results in (
        ({"rows": 32, "looked": 4, "calls": 4, "repeats": 0}, 64),
        ({"rows": 80, "repeats": 16}, 64),
        ({"rows": 240, "repeats": 48}, 64 * 3),
    ):
        assert [found.stored for found in all_of(raw(inputs=[held(**seen)]))] == [results * 4e6]


def test_results_that_are_the_same_are_stored_once() -> None:
    """20 pictures behind 64 samples: seen in half of an epoch, in a whole one, and where items are known."""
    loader = raw()["loaders"][0]
    assert [found.stored for found in all_of(raw())] == [20 * 4e6]
    (half,) = all_of(raw(inputs=[held(rows=32, looked=4, calls=4, repeats=12)]))
    assert half.stored == 2 * 20 * 4e6  # at most: others may come
    loaders = [loader | {"items": 96, "repeats": 32}]  # all 64 were asked for
    module, _ = sorted(all_of(raw(loaders=loaders)), key=lambda found: found.ms is None)
    assert module.stored == 20 * 4e6
    again = line(*[("PIL", "a", 0.05), ("PIL", "b", 0.05)] * 32, size=1000, n=64)
    assert [found.stored for found in all_of(raw(inputs=[]), again)] == [2 * 1000]


@pytest.mark.parametrize("given", [{"loaders": []}, {"modules": [module(out_bytes=0)]}])
def test_without_a_length_or_a_size_what_storing_takes_is_unknown(given: dict[str, Any]) -> None:
    assert [found.stored for found in all_of(raw(**given))] == [None]


def test_storing_decodes_pays_when_reading_is_quicker_than_decoding() -> None:
    """50 ms to decode a file, 4 to write its 4 MB, 2 to read them; two files for each of 64 samples."""
    decodes = [[("PIL", f"file{i + k}", 0.05) for i in range(16)] for k in (0, 16)]
    (found,) = all_of(raw(inputs=[]), *(line(*each, size=4_000_000) for each in decodes))
    assert found.epochs == pytest.approx((50 + 4) / (50 - 2))
    assert found.stored == pytest.approx(64 * 2 * 4e6)


def test_storing_decodes_never_pays_when_reading_is_slower() -> None:
    (found,) = all_of(raw(inputs=[]), line(("PIL", "a", 0.001), size=4_000_000))
    assert found.epochs is None
    assert found.stored == pytest.approx(64 / 8 * 4e6)


@pytest.mark.parametrize(("key", "size"), [("a", 0), ("", 4_000_000)])
def test_decodes_of_unknown_size_or_input_have_no_epochs(key: str, size: int) -> None:
    (found,) = all_of(raw(inputs=[]), line(("av", key, 1.0), ("av", key, 1.0), size=size))
    assert (found.epochs, found.stored) == (None, None)


def test_decodes_of_unknown_size_do_not_shift_the_others() -> None:
    sized, without = line(("av", "a", 0.05), size=4_000_000), line(("av", "b", 9.0))
    (found,) = all_of(raw(inputs=[]), sized, without)
    assert found.epochs == pytest.approx((50 + 4) / (50 - 2))
    assert found.stored == pytest.approx(64 * 2 / 16 * 4e6)


def test_decodes_of_another_loader_do_not_count_for_the_samples_of_the_main_one() -> None:
    main = raw()["loaders"][0]
    found = raw(inputs=[], loaders=[main, main | {"dataset": "Held", "samples": 9, "calls": 1}])
    mine = [("PIL", f"file{i}", 0.05) for i in range(8)]
    lines = [line(*mine, size=1000), line(*[("PIL", "b", 0.05)] * 80, dataset="Held")]
    assert [f.stored for f in all_of(found, *lines)] == [pytest.approx(64 * 1000)]


@pytest.mark.parametrize("n", [0, 8])
def test_what_the_script_decodes_itself_is_for_the_samples_of_the_loader(n: int) -> None:
    own = line(("processor", "a", 0.5), size=80_000, n=0, dataset="the script itself")  # a whole batch
    (found,) = all_of(raw(inputs=[]), line(n=n), own)
    assert found.epochs is not None
    assert found.stored == (pytest.approx(64 * 10_000) if n else None)


def test_the_disk_is_tried_once_and_only_if_a_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(repeats, "_disk", lambda out: tried.append(out) or FAST)
    all_of(raw(modules=[module(out_bytes=0)]), line(("av", "a", 1.0)))
    assert tried == []
    decodes = line(("av", "a", 1.0), ("cv2", "a", 1.0), size=1000)
    found = all_of(raw(modules=[module(), module("Net.stem")], inputs=[held(), held("Net.stem")]), decodes)
    assert all(f.epochs is not None for f in found)
    assert tried == [Path("/nowhere")]


def test_files_are_counted_over_all_workers() -> None:
    """Each worker sees a file once; together they decode it three times."""
    keys = [f"file{i}" for i in range(5)]
    lines = [line(*(("PIL", key, 0.1) for key in random.sample(keys, 5))) for _ in range(3)]
    (found,) = all_of(raw(inputs=[]), *lines)
    assert (found.what, found.seen, found.repeats, found.exact) == ("decode PIL", 15, 10, True)
    assert found.ms == pytest.approx(1000 * 10 * 0.1 / 3)  # three batches were prepared, a step has one


def test_what_the_script_decodes_is_not_shared_out_over_a_loaders_batches() -> None:
    own = [line(("av", "a", 0.1), n=0, dataset="the script itself") for _ in range(4)]
    loaded = [line(("PIL", "b", 0.2)) for _ in range(4)]
    found = {f.what: f.ms for f in all_of(raw(inputs=[]), *own, *loaded)}
    assert found == {"decode av": pytest.approx(75), "decode PIL": pytest.approx(150)}  # three of four again


@given(st.lists(st.lists(st.sampled_from("abcdefg"), max_size=6), min_size=1, max_size=6))
def test_repeats_are_all_but_the_first(batches: list[list[str]]) -> None:
    found = all_of(raw(inputs=[]), *(line(*(("cv2", key, 0.1) for key in batch)) for batch in batches))
    keys = Counter(key for batch in batches for key in batch)
    assert sum(f.repeats for f in found) == sum(keys.values()) - len(keys)


def test_a_decode_whose_input_is_unknown_is_told_and_never_a_repeat() -> None:
    (found,) = all_of(raw(inputs=[]), line(("av", "", 1.0), ("av", "", 1.0), ("av", "a", 1.0)))
    assert (found.seen, found.repeats, found.exact) == (1, 0, False)
    assert "2 more" in found.note


def test_the_same_file_by_two_decoders_is_no_repeat() -> None:
    found = all_of(raw(inputs=[]), line(("av", "a", 1.0), ("cv2", "a", 1.0)))
    assert [f.repeats for f in found] == [0, 0]


LOADER = {"dataset": "D", "samples": 64, "batches": 8, "calls": 9, "a_step": 2, "items": 80, "repeats": 60}


def test_items_take_what_preparing_them_does_but_for_decoding() -> None:
    """Two batches a step of 40 ms each on average, of which a quarter is decoding; three of four again."""
    lines = [line(("PIL", "a", 0.005), s=0.03), line(("PIL", "b", 0.015), s=0.05), line(dataset="E", s=9.0)]
    found = {f.what: f for f in all_of(raw(inputs=[], loaders=[LOADER]), *lines)}
    assert found["items of D"].ms == pytest.approx(2 * (40 - 10) * 0.75)


def test_items_of_two_loaders_of_one_kind_have_no_time_of_their_own() -> None:
    found = all_of(raw(inputs=[], loaders=[LOADER, LOADER | {"samples": 9}]), line(s=0.03))
    assert [f.ms for f in found] == [None, None]


def test_items_that_nobody_saw_prepared_are_told_without_a_time() -> None:
    (found,) = all_of(raw(inputs=[], loaders=[LOADER | {"items": 70, "repeats": 6}]))
    assert (found.what, found.seen, found.repeats, found.ms) == ("items of D", 70, 6, None)
    assert "64" in found.note


def test_items_of_data_sets_that_took_each_others_place_are_counted_by_themselves() -> None:
    loader = {"dataset": "D", "samples": 8, "batches": 1, "calls": 3, "a_step": 1, "items": 24, "repeats": 0}
    (found,) = all_of(raw(inputs=[], loaders=[loader | {"anew": 2}]))
    assert found.note.startswith("3 data sets")


def test_the_dearest_come_first() -> None:
    modules, inputs = [module(), module("Net.stem")], [held("Net.stem"), held()]
    found = all_of(raw(modules=modules, inputs=inputs), line(("av", "a", 0.2), ("av", "a", 0.2)))
    assert [f.what for f in found] == ["module Net", "decode av", "module Net.stem"]


def test_the_disk_is_tried_where_the_profile_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(repeats, "_TRIED_BYTES", 1 << 20)
    assert all(rate > 0 for rate in repeats._disk(tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="there is no posix_fadvise here")
@pytest.mark.parametrize("error", [None, OSError(22, "no advice is taken")])
def test_the_kernel_is_asked_to_let_go_of_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    asked: list[tuple[int, int, int]] = []

    def advise(fd: int, *what: int) -> None:
        assert os.fstat(fd).st_size == 1 << 20
        asked.append(what)  # type: ignore[arg-type]
        if error is not None:
            raise error

    monkeypatch.undo()
    monkeypatch.setattr(repeats, "_TRIED_BYTES", 1 << 20)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert all(rate > 0 for rate in repeats._disk(tmp_path))
    assert asked == [(0, 0, os.POSIX_FADV_DONTNEED)]
