"""The embedded set: what is drawn, what is told of it, and how it gets onto the disk."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from frostline.errors import FrostlineError, UsageError
from frostline_recipes.foveated import glyphs

av = pytest.importorskip("av")
SMALL = {"n": 5, "size": 64, "seconds": 3.0, "fps": 4}


def colour_at(picture: np.ndarray, x: float, y: float, *, ring: bool) -> str:
    """The name of the colour nearest to what is around (x, y); a ring is looked at beside its middle."""
    size = picture.shape[1]
    column, row = int(x * size), int(y * size)
    column += round(0.38 * glyphs.GLYPH * size) if ring else 0
    seen = picture[:, row - 1 : row + 2, column - 1 : column + 2].astype(float).mean((1, 2))
    return min(glyphs.COLOURS, key=lambda name: np.abs(seen - glyphs.COLOURS[name]).sum())


def decoded(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as clip:
        return [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in clip.decode(video=0)]


@pytest.fixture(scope="module")
def many() -> list[glyphs.Script]:
    return [glyphs.script(i, seed=11) for i in range(300)]


def test_the_caption_tells_what_is_drawn_at_the_target_before_and_after() -> None:
    for i in range(40):
        world = glyphs.script(i, seed=3)
        said = glyphs.caption(world).split()  # a RED STAR turns BLUE and then becomes a DISC
        target = world.glyphs[world.target]
        between = (target.colour_s + target.kind_s) / 2
        for t, colour, kind in (
            (0.0, said[1], said[2]), (between, said[4], said[2]), (23.9, said[4], said[9]),
        ):  # fmt: skip
            assert target.look(t) == glyphs.Look(colour, kind)
            picture = glyphs.frame(world, t)
            assert colour_at(picture, *glyphs.where(world, t), ring=kind == "ring") == colour


def test_colours_survive_h264(tmp_path: Path) -> None:
    for i in range(3):
        world = glyphs.script(i, seed=5, seconds=6.0)
        glyphs.film(world, tmp_path / "clip.mp4", fps=4)
        pictures = decoded(tmp_path / "clip.mp4")
        assert len(pictures) == 24
        for k in (0, 7, 23):
            looks = [glyph.look(k / 4) for glyph in world.glyphs]
            for look, (x, y) in zip(looks, glyphs.places(world, k / 4), strict=True):
                assert colour_at(pictures[k], x, y, ring=look.kind == "ring") == look.colour


def test_every_kind_is_drawn_differently() -> None:
    world = glyphs.script(0, seed=0, objects=1)
    [glyph] = world.glyphs
    x, y = (int(v * 256) for v in glyphs.where(world, 5.0))
    drawn = {}
    for kind in glyphs.KINDS:
        look = glyphs.Look("red", kind)
        same = glyphs.Script(**{**vars(world), "glyphs": (glyphs.Glyph(**{**vars(glyph), "before": look}),)})
        drawn[kind] = glyphs.frame(same, 5.0)
    spot = np.s_[:, y - 16 : y + 17, x - 16 : x + 17]
    for a in glyphs.KINDS:
        for b in glyphs.KINDS:
            differing = (np.abs(drawn[a][spot].astype(int) - drawn[b][spot]).max(0) > 40).mean()
            assert (differing > 0.07) == (a != b), (a, b, differing)


def test_the_bracket_is_there_in_the_first_sixth_only() -> None:
    for i in range(10):
        world = glyphs.script(i, seed=1)
        for t, expected in ((0.0, True), (3.99, True), (4.0, False), (12.0, False), (23.75, False)):
            white = (glyphs.frame(world, t) > 200).all(0)
            assert (white.sum() > 100) == expected
            assert glyphs.cued(world, t) == expected
            if expected:  # around the target, and nowhere else
                rows, columns = np.nonzero(white)
                x, y = glyphs.where(world, t)
                middle = (columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2
                assert np.abs(np.subtract(middle, (x * 256, y * 256))).max() < 1.5


def test_larger_glyphs_cover_more_keep_farther_apart_and_stay_inside() -> None:
    for i in range(5):
        usual, large = (glyphs.script(i, seed=1, objects=3, scale=scale) for scale in (1.0, 1.6))
        white = [(glyphs.frame(world, 0.0) > 200).all(0).sum() for world in (usual, large)]
        assert 2 < white[1] / white[0] < 3.2  # the bracket, 1.6 times as wide with 1.6 times the stroke
        assert (large.size, large.seconds) == (usual.size, usual.seconds)
        path = np.stack([glyphs.places(large, t) for t in np.linspace(0, 24, 97)])
        gaps = np.linalg.norm(path[:, :, None] - path[:, None], axis=3) + np.eye(3)
        assert gaps.min() > 1.5 * glyphs.APART
        assert path.min() > 0.79 * glyphs.BRACKET  # half of one 1.6 times as wide, to the border
        assert path.max() < 1 - 0.79 * glyphs.BRACKET


def test_sixteen_frames_over_the_clip_see_the_cue_at_least_twice() -> None:
    world = glyphs.script(0)
    assert 2 <= sum(glyphs.cued(world, t) for t in np.linspace(0, 23.75, 16)) <= 4


def test_targets_follow_the_same_distribution_as_the_others(many: list[glyphs.Script]) -> None:
    for look in ("before", "after"):
        for part, values in (("colour", list(glyphs.COLOURS)), ("kind", list(glyphs.KINDS))):
            counted = Counter(getattr(getattr(w.glyphs[w.target], look), part) for w in many)
            # Chi-square, 5 degrees of freedom: above 20.5 once in 1,000 draws. The seed is fixed.
            assert sum((counted[v] - 50) ** 2 / 50 for v in values) < 20.5
    places = Counter(w.target for w in many)
    assert sum((places[k] - 50) ** 2 / 50 for k in range(6)) < 20.5
    for measure in (
        lambda g: g.colour_s, lambda g: g.kind_s, lambda g: g.length, lambda g: g.start[0], lambda g: g.turn,
    ):  # fmt: skip
        target = np.array([measure(w.glyphs[w.target]) for w in many])
        others = np.array([measure(g) for w in many for k, g in enumerate(w.glyphs) if k != w.target])
        spread = others.std() * np.sqrt(1 / len(target) + 1 / len(others))
        assert abs(target.mean() - others.mean()) < 3.5 * spread


def test_what_a_target_becomes_is_independent_of_the_rest(many: list[glyphs.Script]) -> None:
    targets = [w.glyphs[w.target] for w in many]
    assert all(
        g.before.colour != g.after.colour and g.before.kind != g.after.kind for w in many for g in w.glyphs
    )
    colours = list(glyphs.COLOURS)
    # Of the five other colours each is as likely: the step around the circle of colours is uniform.
    steps = Counter((colours.index(g.after.colour) - colours.index(g.before.colour)) % 6 for g in targets)
    assert sum((steps[k] - 60) ** 2 / 60 for k in range(1, 6)) < 18.5  # 4 degrees of freedom, 0.1 %
    shared = [
        sum(g.after.colour == t.after.colour for k, g in enumerate(w.glyphs) if k != w.target)
        for w, t in zip(many, targets, strict=True)
    ]
    # Five others, each the same with chance 1/6; the mean of 300 strays by 0.048.
    assert abs(np.mean(shared) - 5 / 6) < 0.17


def test_glyphs_stay_inside_apart_and_at_constant_speed() -> None:
    nearest = []
    for i in range(40):
        world = glyphs.script(i, seed=2)
        path = np.stack([glyphs.places(world, t) for t in np.linspace(0, 24, 97)])  # [times, objects, 2]
        assert path.min() > 0.09
        assert path.max() < 0.91
        steps = np.linalg.norm(np.diff(path, axis=0), axis=2)
        assert np.allclose(steps, steps[:1], rtol=1e-6)
        assert ((steps.sum(0) > 0.39) & (steps.sum(0) < 0.91)).all()
        gaps = np.linalg.norm(path[:, :, None] - path[:, None], axis=3) + np.eye(6)
        nearest.append(gaps.min())
    assert np.mean(np.array(nearest) > 0.98 * glyphs.APART) > 0.9  # where it can be
    assert min(nearest) > glyphs.GLYPH  # never on top of each other


def test_a_glyph_changes_its_colour_first_and_its_kind_later_both_after_the_cue(
    many: list[glyphs.Script],
) -> None:
    for glyph in (g for world in many for g in world.glyphs):
        assert glyphs.CUE * 24 < 0.3 * 24 <= glyph.colour_s <= 0.5 * 24
        assert 0.6 * 24 <= glyph.kind_s <= 0.8 * 24
        a, b = glyph.before, glyph.after
        assert glyph.look(glyph.colour_s - 0.01) == a
        assert glyph.look(glyph.colour_s) == glyph.look(glyph.kind_s - 0.01) == glyphs.Look(b.colour, a.kind)
        assert glyph.look(glyph.kind_s) == b
    # Sixteen frames over the clip see it in each of its three looks.
    shown = [{many[0].glyphs[k].look(t) for t in np.linspace(0, 23.75, 16)} for k in range(6)]
    assert [len(looks) for looks in shown] == [3] * 6


def test_half_of_a_caption_cannot_be_told_from_the_other_half(many: list[glyphs.Script]) -> None:
    said = [glyphs.caption(world).split() for world in many]
    assert len({tuple(words) for words in said}) > 200  # of 900
    for first, second in ((1, 9), (2, 4)):  # a colour says nothing of a kind, before or after
        pairs = Counter((words[first], words[second]) for words in said)
        expected = len(many) / 36
        # Chi-square, 25 degrees of freedom by the margins, 35 at most: above 66.6 once in 1,000 draws.
        assert sum((pairs[c, k] - expected) ** 2 / expected for c in {w[first] for w in said}
                   for k in {w[second] for w in said}) < 66.6  # fmt: skip


def test_a_world_is_drawn_from_its_seed_and_index_alone() -> None:
    again = glyphs.script(4, seed=9)
    assert glyphs.script(4, seed=9) == again
    assert np.array_equal(glyphs.frame(glyphs.script(4, seed=9), 7.0), glyphs.frame(again, 7.0))
    assert glyphs.script(5, seed=9).glyphs != again.glyphs
    assert glyphs.script(4, seed=10).glyphs != again.glyphs
    assert glyphs.script(4, seed=9, size=64).glyphs == again.glyphs
    backgrounds = {glyphs.frame(glyphs.script(i), 0.0)[:, :8, :8].tobytes() for i in range(5)}
    assert len(backgrounds) == 5


def test_a_set_holds_clips_and_a_list_that_is_true_of_them(tmp_path: Path) -> None:
    place = glyphs.make(tmp_path, seed=1, **SMALL)
    rows = list(csv.DictReader((place / "captions.csv").read_text().splitlines()))
    assert [row["split"] for row in rows] == ["train"] * 3 + ["val", "test"]
    assert sorted(p.name for p in place.rglob("*.mp4")) == [Path(row["path"]).name for row in rows]
    for row in rows:
        world = glyphs.script(int(row["index"]), seed=1, size=64, seconds=float(row["seconds"]))
        assert row["caption"] == glyphs.caption(world)
        before, after = (f"{row[f'colour_{when}']} {row[f'kind_{when}']}" for when in ("before", "after"))
        assert row["caption"].startswith(f"a {before} turns ")
        assert [row["caption"].split()[k] for k in (4, 9)] == after.split()
        target = world.glyphs[int(row["target"])]
        assert (float(row["colour_s"]), float(row["kind_s"])) == pytest.approx(
            (target.colour_s, target.kind_s), abs=1e-3
        )
        pictures = decoded(place / row["path"])
        assert len(pictures) == 12
        assert np.abs(pictures[5].astype(int) - glyphs.frame(world, 5 / 4)).mean() < 6


def test_the_bytes_of_a_set_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    one = glyphs.make(tmp_path / "one", workers=1, **SMALL)
    three = glyphs.make(tmp_path / "three", workers=3, **SMALL)
    for path in sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file()):
        assert (one / path).read_bytes() == (three / path).read_bytes()


def test_a_second_call_does_nothing_and_another_argument_makes_another_folder(tmp_path: Path) -> None:
    place = glyphs.make(tmp_path, **SMALL)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert glyphs.make(tmp_path, **SMALL) == place
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert glyphs.make(tmp_path, **{**SMALL, "n": 3}) != place
    assert place.is_dir()


def test_a_killed_process_leaves_no_half_set_and_the_next_one_makes_it_whole(tmp_path: Path) -> None:
    arguments = {**SMALL, "n": 6, "seconds": 40.0}
    code = (
        "import signal; from frostline_recipes.foveated import glyphs\n"
        "glyphs._watch = lambda *_: signal.pause()\n"  # it is in the middle of it until it is killed
        f"glyphs.make({str(tmp_path)!r}, **{arguments!r})"
    )
    making = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not list(tmp_path.glob(".*/clips/*.mp4")) and time.monotonic() < until:
        assert making.poll() is None
        time.sleep(0.01)
    making.send_signal(signal.SIGKILL)
    making.wait()
    assert list(tmp_path.glob(".*.part-*")), "killed too early to tell anything"
    assert not list(tmp_path.glob("glyphs-*"))
    place = glyphs.make(tmp_path, **arguments)
    assert len(list(place.glob("clips/*.mp4"))) == 6
    assert (place / "captions.csv").is_file()


def test_a_failing_process_is_told_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "av.py").write_text("raise OSError('the disk is on fire')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(shadow), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(FrostlineError, match="the disk is on fire"):
        glyphs.make(tmp_path / "set", **SMALL)
    assert list((tmp_path / "set").iterdir()) == []


def test_arguments_that_cannot_work_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as told:
        glyphs.make(tmp_path, n=0, seed=-1, size=33, seconds=1.0, fps=4, objects=0, scale=9)
    assert [p.split()[0] for p in told.value.problems] == ["n", "seed", "size", "1", "objects", "scale"]
    for splits in ((0.5, 0.5), (0.5, 0.1, 0.1), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1)):
        with pytest.raises(UsageError, match="add up to 1"):
            glyphs.make(tmp_path, splits=splits, **SMALL)
    with pytest.raises(UsageError, match="at least one clip for each split"):
        glyphs.make(tmp_path, **{**SMALL, "n": 2})
    with pytest.raises(UsageError) as told:
        glyphs.make(tmp_path, n=0, size=33, fps=0, scale=9, called={"n": "clips", "fps": "rate"})
    assert [p.split(" ")[0] for p in told.value.problems] == ["clips", "size", "24", "scale"]
    assert "24 s at rate=0" in str(told.value)
    assert list(tmp_path.iterdir()) == []
