"""Pictures of where a model looks: right places, one scale, files that open, a page without a network."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
import types
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

import frostline as fl
from frostline import stages
from frostline.errors import UsageError

pytest.importorskip("PIL")
pytest.importorskip("av")
pytest.importorskip("transformers")

import av
from PIL import Image

from frostline.experiment import run
from frostline_recipes.foveated import glyphs, heat, look, page, sheet

GRID = (4, 5)
N = 1 + 4 * 5


def attention(frames: int = 3, heads: int = 2, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(frames, heads, N, generator=torch.Generator().manual_seed(seed))
    return (3 * drawn).softmax(-1)


def pictures(frames: int = 3, height: int = 40, width: int = 50) -> torch.Tensor:
    rng = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8, generator=rng)


def one_patch(row: int, column: int, frames: int = 1) -> heat.Look:
    """A look at one patch alone."""
    p = torch.zeros(frames, 1, N)
    p[..., 1 + row * GRID[1] + column] = 1
    return heat.looks("sharp", p, prefix=1, grid=GRID)[0]


# heat


def test_an_even_look_is_1_everywhere_and_stays_dark() -> None:
    even = heat.looks("even", torch.full((2, 3, N), 1 / N), prefix=1, grid=GRID)[0]
    np.testing.assert_allclose(even.maps, 1, rtol=1e-5)
    np.testing.assert_allclose(even.entropy, 1, rtol=1e-5)
    frame = pictures(1)[0]
    over = heat.laid_over(frame, even.maps[0], heat.top_of([even]))
    np.testing.assert_allclose(over, 0.42 * frame.numpy().transpose(1, 2, 0), atol=2)


def test_the_mean_over_heads_and_each_head_leave_the_prefix_out() -> None:
    p = attention()
    mean, heads = heat.looks("fine 1", p, prefix=1, grid=GRID)
    by_hand = p[:, :, 1:].reshape(3, 2, *GRID).numpy() * N
    np.testing.assert_allclose(mean.maps, by_hand.mean(1), rtol=1e-5)
    np.testing.assert_allclose(heads[1].maps, by_hand[:, 1], rtol=1e-5)
    assert [head.name for head in heads] == ["fine 1, head 1", "fine 1, head 2"]
    entropy = -(p * p.log()).sum(-1) / math.log(N)
    np.testing.assert_allclose(mean.entropy, entropy.mean(1), rtol=1e-5)


def test_one_token_has_no_entropy_and_the_largest_peak() -> None:
    sharp = one_patch(2, 3)
    assert sharp.entropy.tolist() == [0]
    assert sharp.peaks.tolist() == [N]
    np.testing.assert_allclose(sharp.peaks_at(), [[3.5 / 5, 2.5 / 4]])


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 4), (3, 0), (2, 3)])
def test_heat_lies_where_the_patch_is(row: int, column: int) -> None:
    black = torch.zeros(3, 80, 100, dtype=torch.uint8)
    over = heat.laid_over(black, one_patch(row, column).maps[0], top=float(N)).astype(int).sum(-1)
    y, x = np.unravel_index(over.argmax(), over.shape)
    assert (y // 20, x // 20) == (row, column)
    inside = over[row * 20 : row * 20 + 20, column * 20 : column * 20 + 20]
    assert inside.sum() > 0.5 * over.sum()


def test_the_map_of_colours_gets_lighter_all_the_way() -> None:
    shares = np.linspace(0, 1, 200)
    light = heat.colours(shares) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(light) > -0.75).all(), "rounding to whole numbers may take back less than one"
    assert light[-1] - light[0] > 200
    assert heat.colours(np.zeros((2, 3))).shape == (2, 3, 3)


def test_one_scale_for_all_that_is_compared() -> None:
    sharp, dull = (
        one_patch(0, 0, frames=2),
        heat.looks("dull", attention(2) * 0 + 1 / N, prefix=1, grid=GRID)[0],
    )
    assert heat.top_of([dull]) == 4.0
    assert heat.top_of([sharp, dull]) == heat.top_of([sharp]) == N


def test_between_two_looks_they_are_mixed() -> None:
    maps, times = (
        np.stack([np.zeros((2, 2)), np.ones((2, 2)), np.full((2, 2), 3.0)]),
        np.array([0.0, 2.0, 4.0]),
    )
    got = [float(heat.between(maps, times, t)[0, 0]) for t in (-1, 0, 0.5, 2, 3, 4, 9)]
    assert got == [0, 0, 0.25, 1, 2, 3, 3]
    assert heat.between(maps[:1] + 5, times[:1], 3.0)[0, 0] == 5


def test_figures_say_how_near_the_look_is_to_the_target() -> None:
    sharp = one_patch(2, 3, frames=2)
    on, off = np.array([[0.7, 0.625], [0.72, 0.6]]), np.array([[0.1, 0.1], [0.7, 0.625]])
    assert heat.figures(sharp, on) == {"entropy": 0, "peak": N, "on_target": 1, "mass_on_target": 1}
    assert heat.figures(sharp, off)["on_target"] == heat.figures(sharp, off)["mass_on_target"] == 0.5
    assert heat.figures(sharp, None) == {"entropy": 0, "peak": N}


@pytest.mark.parametrize("shape", [(2, 3, N + 1), (2, N), (2, 2, 3, N)])
def test_attention_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"1 \+ 4 x 5 = 21 tokens"):
        heat.looks("coarse", torch.zeros(shape), prefix=1, grid=GRID)


# sheets and films


def test_a_sheet_shows_the_clip_and_every_look_at_its_place() -> None:
    frames = torch.zeros(5, 3, 40, 40, dtype=torch.uint8)
    frames[:, 0] = torch.arange(5, dtype=torch.uint8)[:, None, None] * 50  # a red of its own for each
    shown = [one_patch(0, 0, frames=5), one_patch(3, 4, frames=5)]
    picture = sheet.sheet(frames, np.arange(5.0), shown, tile=80, columns=3)
    pixels = np.asarray(Image.open(BytesIO(sheet.png(picture))))
    foot = 46 + 2 * 28  # its words need three lines
    block = (pixels.shape[0] - foot) // 2
    assert pixels.shape == (2 * block + foot, 78 + 3 * 86 + 6, 3)
    for t in range(5):
        x, y = 78 + t % 3 * 86, t // 3 * block + 20
        assert pixels[y + 40, x + 40].tolist() == [50 * t, 0, 0]
        first, second = (pixels[y + 86 + k * 104 :][:80, x : x + 80].astype(int).sum(-1) for k in range(2))
        assert first[:20, :16].mean() > 3 * first[60:, 60:].mean()
        assert second[60:, 64:].mean() > 3 * second[:20, :20].mean()


def test_the_target_is_ringed() -> None:
    frames, shown = torch.zeros(1, 3, 80, 80, dtype=torch.uint8), [one_patch(3, 0)]
    plain, ringed = (
        np.asarray(sheet.sheet(frames, np.zeros(1), shown, truth=truth, tile=80)).astype(int)
        for truth in (None, np.array([[0.75, 0.25]]))
    )
    changed = np.argwhere(np.abs(plain - ringed).sum(-1)[:200] > 60)
    middle = changed.mean(0) - (106, 78)
    np.testing.assert_allclose(middle, (20, 60), atol=1.5)


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 8])
def test_the_marks_are_explained_however_narrow_the_sheet_is(frames: int) -> None:
    shown = [one_patch(3, 0, frames)]
    given = pictures(frames), np.arange(float(frames)), shown
    truth = np.full((frames, 2), 0.5)
    picture = sheet.sheet(*given, truth=truth)
    placed = sheet._legend(picture.width, truth=True)
    assert [words for words, *_ in placed] == ["of what an even look gives a patch", "strongest", "target"]
    lines = {line for _, _, line in placed}
    assert lines == {0} if frames >= 4 else len(lines) > 1
    pixels = np.asarray(picture).astype(int)
    foot = picture.height - 46 - max(lines) * 28
    for words, x, line in placed:
        y = foot + 16 + 6 + line * 28
        assert np.ptp(pixels[y - 8 : y + 8, x : x + 60]) > 100, words
    assert (pixels[foot:, -2:] == (18, 18, 22)).all(), "nothing is cut off"
    assert "target" not in [words for words, *_ in sheet._legend(picture.width, truth=False)]


def test_a_film_is_h264_with_a_panel_for_each_look(tmp_path: Path) -> None:
    frames, times = pictures(9), np.arange(9) * 0.5
    sheet.film(
        tmp_path / "gaze.mp4", frames, times, [one_patch(0, 0, 3), one_patch(3, 4, 3)], times[::4], panel=100
    )
    with av.open(str(tmp_path / "gaze.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (3 * 102 - 2, 80 + 28)
        decoded = [
            frame.to_ndarray(format="rgb24").astype(int).sum(-1) for frame in container.decode(video=0)
        ]
    assert len(decoded) == 9
    first, second = decoded[4][28:, 102:202], decoded[4][28:, 204:304]
    assert first[:15, :15].mean() > 1.5 * first[60:, 80:].mean()
    assert second[65:, 85:].mean() > 1.5 * second[:20, :20].mean()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"frames": torch.zeros(3, 3, 8, 8)}, "frames are torch.float32"),
        ({"times": np.zeros(2)}, "2 times for 3 frames"),
        ({"shown": [one_patch(0, 0, frames=2)]}, "'sharp' looks at 2 frames"),
        ({"truth": np.zeros((3, 3))}, r"truth is \[3, 3\]"),
    ],
)
def test_looks_that_do_not_fit_are_refused(change: dict, told: str) -> None:
    given = {"frames": pictures(), "times": np.zeros(3), "shown": [], "truth": None} | change
    with pytest.raises(UsageError, match=told):
        sheet.sheet(given["frames"], given["times"], given["shown"], truth=given["truth"])


# the page


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _parsed(text: str) -> _Tags:
    tags = _Tags()
    tags.feed(re.sub(r"(<(?:line|polyline|circle)[^>]*)/>", r"\1>", text))
    assert tags.open == []
    return tags


def test_the_page_holds_everything_itself_and_escapes_what_it_is_told() -> None:
    shown = page.Shown(
        "<script>alert(1)</script>", b"PNG", b"MP4", b"HEADS", {"truth": "a < b & c", "fine": "x"},
        {"coarse": {"entropy": 0.5, "on_target": 0.25}, "fine 1": {"entropy": 0.25, "peak": 12.0}},
    )  # fmt: skip
    text = page.page(
        "Look", [shown], about=["runs/<mine>"], curves=page.curves([{"step": 1, "loss_fine": 1.0}])
    )
    tags = _parsed(text)
    assert len(tags.links) == 3
    assert all(link.startswith("data:") for link in tags.links)
    assert "http" not in text
    assert "<script" not in text
    for told in ("a < b & c", "runs/<mine>", "0.500", "25%", "12.0×"):
        assert told in tags.text


def _metrics(n: int) -> list[dict]:
    return [
        {"step": s, "kind": "train", "loss_fine": 3 / (1 + s), "loss_coarse": 4 / (1 + s)} for s in range(n)
    ] + [{"step": n, "kind": "eval", "loss_fine": 1.0, "ratio": 1.2}]


def test_curves_stay_inside_and_show_losses_and_ratio() -> None:
    svg = page.curves(_metrics(3000))
    _parsed(svg)
    assert svg.count("<svg") == 2
    for name in ("loss_fine", "loss_coarse", "ratio"):
        assert f">{name}</text>" in svg
    lines = [
        [tuple(map(float, p.split(","))) for p in line.split()]
        for line in re.findall(r'points="([^"]+)"', svg)
    ]
    assert [len(line) <= 400 for line in lines] == [True] * 3
    assert all(0 <= x <= 560 and 0 <= y <= 250 for line in lines for x, y in line)
    assert svg.count("<circle") == 2
    falling = lines[1]
    assert falling[0][1] < falling[-1][1], "a loss that falls goes down the page"


def test_figures_that_are_not_finite_or_not_there_are_left_out() -> None:
    assert page.curves([]) == ""
    assert page.curves([{"step": 1, "kind": "train", "loss": 2.0}]) == ""
    odd = [
        {"step": s, "kind": "train", "loss_fine": v} for s, v in enumerate([1.0, math.nan, "nan", None, 2.0])
    ]
    assert len(re.findall(r"[\d.]+,[\d.]+", page.chart(odd, ["loss_fine"], title="loss"))) == 2
    assert "NaN" not in page.chart(
        [{"step": 0, "loss_fine": 0.0}], ["loss_fine"], title="one value, at step 0"
    )


def test_a_line_of_metrics_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 2.0}\n[3]\n{"step": 2, "lo')
    assert page.read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.0}]


# the experiment


def _features(frames: torch.Tensor) -> torch.Tensor:
    """Patches of 16 pixels, by their mean colour: [T, 3, 64, 64] to [T, 1 + 16, 3]."""
    patches = torch.nn.functional.avg_pool2d(frames.float() / 255, 16).flatten(2).transpose(1, 2)
    return torch.cat([patches.mean(1, keepdim=True), patches], 1)


def _loaded(folder: Path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from frostline_recipes.foveated.gaze import Shallow
    from frostline_recipes.foveated.model import Foveated
    from frostline_recipes.foveated.networks import tokenizer_of

    with (folder / "captions.csv").open(newline="") as text:
        table = [*csv.DictReader(text)]
    rows = [
        {
            "key": row["path"],
            "path": str(folder / row["path"]),
            "caption": row["caption"],
            "split": row["split"],
        }
        for row in table
    ]
    data = fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("clip", stages.Video(frames=6, size=64), reads="path", writes=("frames", "times")),
        fl.Stage("features", _features, reads="frames"),
        fl.Stage(
            "tokens",
            stages.Tokenizer(tokenizer_of("small")),
            reads="caption",
            writes={"tokens": fl.Field((None,), "int64")},
        ),
        outputs=("features", "times", "tokens"),
    )
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of("small"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Foveated(Shallow(3, heads=3, grid=(4, 4), prefix=1, query_width=6), LlamaForCausalLM(config))
    return model, fl.Workload(data, run=print, splits="split", batch_size=2)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glyphs")
    return glyphs.make(folder, n=5, size=64, seconds=4.0, fps=4, splits=(0.6, 0.2, 0.2), workers=1)


@pytest.fixture
def trained(clips: Path, monkeypatch: pytest.MonkeyPatch) -> fl.Workload:
    model, work = _loaded(clips)
    stub = types.ModuleType("frostline_recipes.foveated.workload")
    stub.load = lambda checkpoint: (model, work)
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    return work


def test_a_checkpoint_becomes_a_page_with_grid_and_film(trained: fl.Workload, tmp_path: Path) -> None:
    run_folder = tmp_path / "trained"
    (run_folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    stuck = {"ratio": 1.0, "ratio_low": 0.9, "ratio_high": 1.1, "entropy": 0.7, "ratio_random": 1.0}
    rows = [{"kind": "train", "loss_fine": 2.0}, {"kind": "eval", **stuck}, {"kind": "train"}]
    lines = [json.dumps({"step": 1 + k, **row}) for k, row in enumerate(rows)]
    (run_folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    made = look.workload(checkpoint=str(run_folder / "checkpoints" / "step-00000002"), split="train", n=2)
    done = run(made, out=tmp_path / "look", device="cpu", quiet=True)
    assert done.value["clips"] == 2
    assert 0 <= done.value["on_target_fine"] <= 1
    folders = sorted(p.name for p in (tmp_path / "look").iterdir() if (p / "grid.png").exists())
    assert folders == ["00-clips-000000.mp4", "01-clips-000001.mp4"]
    with av.open(str(tmp_path / "look" / folders[0] / "gaze.mp4")) as container:
        assert len([*container.decode(video=0)]) == 16, "all frames of the clip, not only those looked at"
    text = (tmp_path / "look" / "index.html").read_text()
    tags = _parsed(text)
    assert len(tags.links) == 2 * 3
    assert " and then becomes a " in tags.text
    assert "loss_fine" in tags.text
    for told in ("Coarse looks at every frame", "mass on target the share of the attention to patches",
                 "counts in it and is not drawn", "Entropy is 1 for an even look",
                 "Last evaluation of the training, at step 2: not shown: ratio 1.0000 (0.9000 to 1.1000).",
                 "Last evaluation of the training, at step 2: warning: the ratio is 1.0000"):  # fmt: skip
        assert told in tags.text
    again = run(made, out=tmp_path / "look", device="cpu", quiet=True)
    assert (again.made, again.found) == (0, 2)


def test_captions_are_as_long_as_in_training_and_end_as_there(
    trained: fl.Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    words = look.Words(most=5, end=7)
    monkeypatch.setattr(look, "_words", lambda trained: words)
    model = sys.modules["frostline_recipes.foveated.workload"].load("")[0]
    monkeypatch.setattr(
        model, "caption", lambda batch, most, *, mode, end: asked.append((most, end)) or [[3]]
    )
    run(look.workload(checkpoint="a run", n=1), out=tmp_path / "look", device="cpu", quiet=True)
    assert asked == [(5, 7), (5, 7)], "the coarse pass and the fine one"


def test_a_checkpoint_in_the_home_folder_is_found(
    trained: fl.Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = sys.modules["frostline_recipes.foveated.workload"]
    asked, load = [], stub.load
    monkeypatch.setattr(stub, "load", lambda checkpoint: asked.append(checkpoint) or load(checkpoint))
    monkeypatch.setenv("HOME", str(tmp_path))
    run(look.workload(checkpoint="~/runs/mine", n=1), out=tmp_path / "look", device="cpu", quiet=True)
    assert asked == [str(tmp_path / "runs" / "mine")]


def test_a_coarse_pass_alone_is_called_by_its_name() -> None:
    alone = {"coarse": {"entropy": 0.5, "on_target": 0.25}}
    assert look._means([alone]) == {"entropy_coarse": 0.5, "on_target_coarse": 0.25}
    both = {**alone, "fine 1": {"entropy": 0.1}, "fine 2": {"entropy": 0.2}}
    assert look._means([both]) == {"entropy_coarse": 0.5, "on_target_coarse": 0.25, "entropy_fine": 0.2}


def test_a_run_without_an_evaluation_has_no_verdict_on_its_page() -> None:
    assert look._evaluated([], 0) == []
    assert look._evaluated([{"step": 1, "kind": "train", "entropy": 1.0}], 0) == []


def test_the_page_warns_of_the_ratio_after_the_warm_up_only() -> None:
    row = {"step": 5, "kind": "eval", "entropy": 1.0, "ratio": 1.0, "ratio_low": 0.9, "ratio_high": 1.1}
    assert ["the ratio is" in line for line in look._evaluated([row], 5)] == [False, True, False]
    assert ["the ratio is" in line for line in look._evaluated([row], 6)] == [False, False]


def test_a_clip_that_changed_or_pictures_that_are_gone_are_drawn_again(
    trained: fl.Workload, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = tmp_path / "x.mp4"
    files = sorted((clips / "clips").iterdir())
    shutil.copy(files[0], clip)
    made = look.workload(checkpoint="runs/mine", clip=str(clip))
    drawn = []
    for change in (lambda: None, lambda: shutil.copy(files[1], clip), lambda: None):
        change()
        done = run(made, out=tmp_path / "look", device="cpu", quiet=True)
        [grid] = (tmp_path / "look").glob("00-*/grid.png")
        drawn.append((done.made, grid.read_bytes()))
    assert [times for times, _ in drawn] == [1, 1, 0]
    assert drawn[0][1] != drawn[1][1] == drawn[2][1]
    (grid.parent / "gaze.mp4").unlink()
    assert run(made, out=tmp_path / "look", device="cpu").made == 1
    assert "gaze.mp4 is gone" in capsys.readouterr().err


def test_another_model_is_drawn_anew_into_the_same_folder(
    trained: fl.Workload, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = look.workload(checkpoint="runs/mine", n=1)
    before = run(made, out=tmp_path / "look", device="cpu", quiet=True)
    [grid] = (tmp_path / "look").glob("00-*/grid.png")
    drawn = grid.read_bytes()
    model, work = _loaded(clips)
    with torch.no_grad():
        model.static.add_(3.0)  # as after more training
    monkeypatch.setattr(sys.modules["frostline_recipes.foveated.workload"], "load", lambda _: (model, work))
    after = run(made, out=tmp_path / "look", device="cpu", quiet=True)
    assert (after.made, after.found) == (1, 0)
    assert grid.read_bytes() != drawn
    assert after.value["entropy_coarse"] != before.value["entropy_coarse"]


def test_a_clip_that_cannot_be_read_is_told_as_such(trained: fl.Workload, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 40)
    made = look.workload(checkpoint="c", clip=str(broken))
    with pytest.raises(UsageError, match=r"Cannot decode the video '.*broken\.mp4': it is damaged") as told:
        run(made, out=tmp_path / "look", device="cpu", quiet=True)
    assert "Freeze this pipeline" not in str(told.value)


def _changed(trained: fl.Workload, **paths: Path) -> fl.Workload:
    """The same workload, with other files behind some of its clips."""
    data = next(iter(trained.pipelines.values()))
    rows = [{**data.source.raw(i), "key": key} for i, key in enumerate(data.source.keys)]
    for row in rows:
        row["path"] = str(paths.get(f"clip_{Path(row['key']).stem}", row["path"]))
    changed = fl.Pipeline(fl.Source.table(rows), *data.steps, outputs=data.outputs)
    return fl.Workload(changed, run=print, splits="split", batch_size=2)


def test_clips_that_training_went_without_are_left_out_aloud(
    trained: fl.Workload, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 40)
    work = _changed(trained, clip_000000=broken)
    found = [row["key"] for row in look.chosen(work, "", 2, "train")]
    assert found == ["clips/000001.mp4", "clips/000002.mp4"]
    assert "left out: Cannot decode the video" in caplog.text
    work = _changed(trained, clip_000004=broken)
    with pytest.raises(UsageError, match="none of the 1 clips of split='test' can be decoded"):
        look.chosen(work, "", 2, "test")


def _drawn(made: fl.Workload, folder: Path, monkeypatch: pytest.MonkeyPatch) -> look.Sample:
    """What `look` is given of the one clip that a workload looks at."""
    samples = []
    draw = look.look
    monkeypatch.setattr(look, "look", lambda sample, into: samples.append(sample) or draw(sample, into))
    run(made, out=folder, device="cpu", quiet=True)
    [sample] = samples
    return sample


def test_a_sheet_shows_the_frames_that_were_looked_at_however_many_a_film_has(
    trained: fl.Workload, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_FRAMES", 9)  # of the clip's 16; the model is given 6 others
    clip = clips / "clips" / "000001.mp4"
    sample = _drawn(look.workload(checkpoint="c", clip=clip.name), tmp_path, monkeypatch)
    frames, times = stages.Video(frames=6, size=64)(str(clip))
    assert sample.times.tolist() == times.tolist()
    assert torch.equal(sample.frames, frames)
    assert sample.film is not None
    assert len(sample.film[0]) == 9


def test_what_no_patch_lies_on_is_not_drawn(
    trained: fl.Workload, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = look.workload(checkpoint="c", clip="000001.mp4")
    whole = _drawn(made, tmp_path / "whole", monkeypatch)
    model, work = _loaded(clips)
    model.gaze.covers = 0.75  # as 3 patches of 16 pixels on 64
    monkeypatch.setattr(sys.modules["frostline_recipes.foveated.workload"], "load", lambda _: (model, work))
    part = _drawn(made, tmp_path / "part", monkeypatch)
    assert torch.equal(part.frames, whole.frames[..., :48, :48])
    assert part.film[0].shape[-2:] == (48, 48)
    np.testing.assert_allclose(part.truth * 48, whole.truth * 64)
    np.testing.assert_allclose(part.film[2] * 48, whole.film[2] * 64)


def test_a_clip_with_a_long_name_gets_a_folder(clips: Path, trained: fl.Workload, tmp_path: Path) -> None:
    long = tmp_path / ("猫" * 83 + ".mp4")  # 253 bytes
    long.write_bytes((clips / "clips" / "000001.mp4").read_bytes())
    done = run(look.workload(checkpoint="c", clip=str(long)), out=tmp_path / "look", device="cpu", quiet=True)
    assert done.value["clips"] == 1
    assert look._slug("clips/000001.mp4") == "clips-000001.mp4", "a shorter one is left as it is"


def test_pictures_are_the_same_each_time(trained: fl.Workload, tmp_path: Path) -> None:
    made = look.workload(checkpoint="c", n=1)
    for name in ("a", "b"):
        run(made, out=tmp_path / name, device="cpu", quiet=True)
    a, b = (next((tmp_path / name).glob("00-*")) for name in ("a", "b"))
    assert (a / "grid.png").read_bytes() == (b / "grid.png").read_bytes()


def test_clips_are_chosen_by_key_part_path_or_split(
    trained: fl.Workload, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(clip: str = "", n: int = 9, split: str = "test") -> list[str]:
        return [row["key"] for row in look.chosen(trained, clip, n, split)]

    assert keys() == ["clips/000004.mp4"]
    assert keys(split="train", n=2) == ["clips/000000.mp4", "clips/000001.mp4"]
    assert keys("clips/000002.mp4") == ["clips/000002.mp4"]
    assert keys("00003") == ["clips/000003.mp4"]
    other = tmp_path / "other.mp4"
    other.write_bytes((clips / "clips" / "000001.mp4").read_bytes())
    assert look.chosen(trained, str(other), 1, "test")[0]["path"] == str(other)
    assert look.truth(str(other), np.zeros(1)) is None, "nobody knows where its target is"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert look.chosen(trained, "~/other.mp4", 1, "test")[0]["path"] == str(other)
    with pytest.raises(UsageError, match="neither a file nor"):
        keys("nothing.mp4")
    with pytest.raises(UsageError, match="no clip is of split='dev'; there are train, val, test"):
        keys(split="dev")


def test_the_truth_is_where_the_set_drew_the_target(clips: Path) -> None:
    times = np.array([0.0, 1.5])
    world = glyphs.script(2, seed=0, seconds=4.0)
    found = look.truth(str(clips / "clips" / "000002.mp4"), times)
    np.testing.assert_allclose(found, [glyphs.where(world, t) for t in times])


def test_a_list_of_captions_of_somebody_else_tells_no_target(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_bytes("path,caption\na.mp4,ein Bär\n".encode("latin-1"))
    assert look.truth(str(tmp_path / "clips" / "a.mp4"), np.zeros(1)) is None


def test_at_least_one_clip_is_looked_at() -> None:
    with pytest.raises(UsageError, match="n is 0"):
        look.workload(checkpoint="c", n=0)
