"""The figures of every run: what they are by hand, what is called what, and when a person is warned."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline_recipes.foveated import metrics
from frostline_recipes.foveated.gaze import Shallow
from frostline_recipes.foveated.model import Foveated
from frostline_recipes.foveated.passes import Pass, losses

transformers = pytest.importorskip("transformers")


def a_pass(attention: torch.Tensor, extracted: torch.Tensor, **more: torch.Tensor) -> Pass:
    frames = extracted.shape[:2]
    return Pass(torch.randn(*frames, 8), extracted, attention, torch.zeros(*frames, 4), **more)


def language_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def model() -> Foveated:
    torch.manual_seed(3)
    gaze = Shallow(8, heads=2, grid=(2, 2), prefix=1)
    return Foveated(gaze, language_model(), caption_length=4).eval()


def batch(clips: int, seed: int = 0) -> fl.Batch:
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 31, (3 * clips,), generator=drawn)
    fields = {
        "features": torch.randn(clips, 5, 5, 8, generator=drawn),
        "tokens": fl.Ragged(tokens, torch.arange(0, 3 * clips + 1, 3)),
    }
    return fl.Batch(fields, [f"{seed}-{i}" for i in range(clips)])


# health


def test_uniform_attention_has_all_of_the_entropy_and_a_single_patch_none() -> None:
    extracted = torch.randn(2, 3, 8)
    uniform = torch.full((2, 3, 4, 10), 0.1)
    assert float(metrics.health(a_pass(uniform, extracted))["entropy"]) == pytest.approx(1, abs=1e-6)
    one = torch.zeros(2, 3, 4, 10)
    one[..., 3] = 1
    assert float(metrics.health(a_pass(one, extracted))["entropy"]) == pytest.approx(0, abs=1e-6)
    half = torch.zeros(2, 3, 4, 10)
    half[..., :5] = 0.2
    expected = math.log(5) / math.log(10)
    assert float(metrics.health(a_pass(half, extracted))["entropy"]) == pytest.approx(expected, abs=1e-6)


def test_correlation_is_of_what_two_queries_extract_from_the_same_frame() -> None:
    attention = torch.full((2, 4, 1, 3), 1 / 3)
    mine, other = torch.randn(2, 2, 4, 16, generator=torch.Generator().manual_seed(1)).unbind()
    by_hand = [np.corrcoef(mine[0, t], other[0, t])[0, 1] for t in range(4)]
    told = float(metrics.health(a_pass(attention, mine, crossed=other[:1]))["correlation"])
    assert told == pytest.approx(np.mean(by_hand), abs=1e-5)


def test_queries_that_choose_nothing_are_told_by_their_correlation(model: Foveated) -> None:
    """Frames differ; who asks does not matter."""
    usual = float(metrics.health(model(batch(3))[-1])["correlation"])
    torch.nn.init.zeros_(model.gaze.query.weight)
    blind = metrics.health(model(batch(3))[-1])
    assert float(blind["correlation"]) == pytest.approx(1, abs=1e-4)
    assert usual < 0.99


def test_a_single_frame_has_no_pairs_and_still_figures(model: Foveated) -> None:
    one = batch(3)
    one = {**one, "features": one["features"][:, :1]}
    assert "correlation" not in metrics.health(model(one)[-1]), "no other frame's query can be tried"
    told = metrics.health(a_pass(torch.full((2, 1, 1, 3), 1 / 3), torch.randn(2, 1, 16)))
    assert all(math.isfinite(float(value)) for value in told.values())


# the ratio and what it is called


def test_the_ratio_is_mean_over_mean_and_its_interval_is_that_of_drawing_clips_anew() -> None:
    rng = np.random.default_rng(4)
    below = rng.uniform(1, 2, 400)
    above = 1.2 * below + rng.normal(0, 0.2, 400)
    ratio, low, high = metrics.ratio_of(above, below)
    assert ratio == pytest.approx(above.sum() / below.sum())
    # The delta method: a ratio of means strays by std(a - ratio * b) / (mean(b) * sqrt(n)).
    strays = np.std(above - ratio * below) / (below.mean() * math.sqrt(400))
    assert (low, high) == pytest.approx((ratio - 1.96 * strays, ratio + 1.96 * strays), abs=0.2 * strays)
    assert metrics.ratio_of(above, below) == (ratio, low, high), "the same each time"


def test_clips_are_drawn_in_pairs() -> None:
    """Hard clips are hard for both: drawn one by one, their spread would drown what is the same in all."""
    below = np.array([0.1, 1.0, 10.0])
    assert metrics.ratio_of(1.1 * below, below) == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ((1.30, 1.00, 1.60), "not shown"),  # the interval reaches 1
        ((0.95, 0.90, 0.99), "not shown"),
        ((1.004, 1.001, 1.008), "not shown"),  # said to tell nothing, beside it
        ((1.04, 1.001, 1.08), "a little better, below the 1.05 aimed at"),
        ((1.05, 1.03, 1.07), "proof of concept"),
        ((1.15, 1.10, 1.20), "proof of concept"),
        ((1.1501, 1.10, 1.20), "very promising"),
    ],
)
def test_what_a_ratio_is_called(figures: tuple[float, float, float], word: str) -> None:
    ratio, low, high = figures
    n = 4 if ratio == 1.004 else 3
    assert metrics.verdict(*figures) == f"{word}: ratio {ratio:.{n}f} ({low:.{n}f} to {high:.{n}f})"


def test_a_ratio_near_1_is_told_from_1() -> None:
    assert metrics.verdict(1.0001, 0.9998, 1.0004) == "not shown: ratio 1.0001 (0.9998 to 1.0004)"
    one = {"ratio": 1.0001, "ratio_low": 1.0001, "ratio_high": 1.0001, "entropy": 0.5, "clips": 1.0}
    assert metrics.lines(one)[0].startswith("not shown: ratio 1.0001 of one clip;")


def test_a_handful_of_clips_or_those_trained_on_show_nothing_however_large_the_ratio() -> None:
    good = {"ratio": 1.3, "ratio_low": 1.25, "ratio_high": 1.35, "entropy": 0.5, "ratio_random": 1.0}
    told = [metrics.lines({**good, "clips": n})[0] for n in (19.0, 20.0)]
    assert told[0].startswith(
        "not shown: ratio 1.300 of 19 clips; a verdict needs 20 that it was not trained"
    )
    assert told[1].startswith("very promising: ")
    [told_of_them, *_] = metrics.lines({**good, "clips": 500.0}, trained_on=True)
    assert told_of_them.startswith("not shown: ratio 1.300 on clips that it was trained on")


@pytest.mark.parametrize(("split", "seen"), [("train", True), (None, True), ("val", False), ("test", False)])
def test_a_feed_of_clips_trained_on_is_known_as_such(
    model: Foveated, split: str | None, seen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Fed(list[fl.Batch]):
        pass

    feed = Fed([batch(24)])
    feed.split = split  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "frostline"):
        metrics.evaluate(model, feed)
    assert ("on clips that it was trained on" in caplog.text) == seen


def test_a_coarse_pass_that_was_hardly_trained_is_no_baseline(
    model: Foveated, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "frostline"):
        told = metrics.evaluate(model, [batch(24)], lambda_coarse=0.02)
        assert "a coarse pass that was hardly trained (lambda_coarse=0.02): compare with" in caplog.text
        assert metrics.lines(told)[0].startswith("not shown: "), "read from a file again, it is the same"
        caplog.clear()
        assert "lambda_coarse" not in metrics.evaluate(model, [batch(24)], lambda_coarse=0.5)
    assert "hardly trained" not in caplog.text


@pytest.mark.parametrize(("by_frame", "alarmed"), [(0.57, True), (0.994, True), (0.996, False), (1.2, False)])
def test_a_gain_that_is_lost_frame_by_frame_is_an_alarm(by_frame: float, alarmed: bool) -> None:
    figures = {"ratio": 1.067, "entropy": 0.5, "ratio_autoregressive": by_frame}
    assert any("frame by frame it does worse" in alarm for alarm in metrics.alarms(figures)) == alarmed
    assert metrics.alarms({**figures, "ratio": 0.9}) == [], "nothing was gained"


def test_attention_to_the_class_token_is_no_look_at_the_picture() -> None:
    attention = torch.zeros(2, 3, 1, 5)
    attention[..., 0], attention[..., 3] = 0.95, 0.05
    told = metrics.health(a_pass(attention, torch.randn(2, 3, 16)), prefix=1)
    assert float(told["off_patches"]) == pytest.approx(0.95)
    figures = {"ratio": 1.2, "entropy": float(told["entropy"]), "off_patches": float(told["off_patches"])}
    [alarm] = metrics.alarms(figures)
    assert alarm.startswith("95 % of the attention goes to tokens that are no patch")
    assert metrics.alarms({**figures, "off_patches": 0.89}) == []


def test_a_gain_over_a_control_must_be_sure_and_not_only_there() -> None:
    """As with another clip's queries, which keep 98 % of it."""
    rng = np.random.default_rng(1)
    fine = rng.uniform(1.0, 3.0, 40)
    each = {"fine": fine, "random": 1.3 * fine, "shuffled": fine * rng.uniform(0.7, 1.32, 40)}
    ratios = {name: 1.3 * fine.mean() / each[name].mean() for name in metrics.CONTROLS}
    assert ratios["shuffled"] < 1.3, "by itself it does less"
    sure = metrics.over(each)
    assert sure["random"] == pytest.approx(1.3)
    assert sure["shuffled"] < 1
    assert metrics.verdict(1.3, 1.2, 1.4, ratios).startswith("very promising")
    told = metrics.verdict(1.3, 1.2, 1.4, ratios, sure)
    assert told.startswith("not shown")
    assert "shuffled queries" in told
    figures = {"ratio": 1.3, "entropy": 0.5, **{f"ratio_{n}": r for n, r in ratios.items()}}
    assert metrics.alarms(figures) == []
    figures |= {f"over_{name}_low": low for name, low in sure.items()}
    assert "does not come from where it looks" in metrics.alarms(figures)[0]


@pytest.mark.parametrize(
    ("random", "shuffled", "why"),
    [
        (1.20, 1.00, "random queries give 1.200; below 1.02 is expected"),
        (1.02, 1.00, "random queries give 1.020; below 1.02 is expected"),
        (math.nan, 1.00, "random queries give nan; below 1.02 is expected"),
        (1.00, 1.21, "shuffled queries (1.210) do as well as those asked"),
        (1.019, 1.199, ""),
    ],
)
def test_what_a_control_gains_as_well_is_not_shown_and_an_alarm(
    random: float, shuffled: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    figures = {
        "ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3, "entropy": 0.7, "ratio_random": random,
        "ratio_shuffled": shuffled,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "frostline"):
        metrics.say(figures)
    first, *alarms = [record.getMessage() for record in caplog.records]
    if why:
        assert first.startswith(f"foveated: not shown: ratio 1.200 (1.100 to 1.300), and {why}. Controls: ")
        gained = "what the fine pass gains does not come from where it looks"
        assert alarms == [f"foveated: warning: {why}: {gained}."]
    else:
        assert first.startswith("foveated: very promising: ")
        assert alarms == []


def test_a_small_gain_that_random_queries_have_too_is_not_shown() -> None:
    said = metrics.verdict(1.015, 1.01, 1.02, {"random": 1.015})
    assert said.startswith("not shown: ratio 1.015")
    assert "random queries (1.015) do as well" in said
    assert metrics.alarms({"ratio": 0.9, "entropy": 0.5, "ratio_random": 1.1}) == [], "nothing was gained"


def test_alarms_are_raised_at_their_borders_and_not_beside_them() -> None:
    def found(ratio: float, entropy: float) -> list[str]:
        return [alarm.split()[1] for alarm in metrics.alarms({"ratio": ratio, "entropy": entropy})]

    assert found(1.2, 0.8) == []
    assert found(1.0049, 0.8) == found(0.9951, 0.8) == ["ratio"]
    assert found(1.0051, 0.8) == found(0.9949, 0.8) == []
    assert found(1.2, 0.991) == ["is"]
    assert found(1.2, 0.989) == []
    assert found(1.0, 1.0) == ["ratio", "is"]


@pytest.mark.parametrize(("step", "alarmed"), [(None, True), (0, False), (4, False), (5, True), (6, True)])
def test_a_ratio_of_1_is_an_alarm_from_the_end_of_the_warm_up(
    blind: Foveated, step: int | None, alarmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "frostline"):
        metrics.evaluate(blind, [batch(4)], warmup_steps=5, step=step)
    assert ("warning: the ratio is 1.0000" in caplog.text) == alarmed
    assert "not shown: ratio 1.0000" in caplog.text, "the verdict stays"
    assert "warning: attention is uniform" in caplog.text, "at any time"


def test_a_ratio_of_1_in_the_warm_up_is_no_other_alarm_either() -> None:
    figures = {"ratio": 1.001, "entropy": 0.5, "ratio_random": 1.1, "ratio_shuffled": 1.1}
    assert metrics.alarms(figures, warming=True) == []


# in training and evaluation


def test_the_loss_that_is_trained_is_that_of_the_passes(model: Foveated) -> None:
    told = metrics.loss(model, batch(3), lambda_coarse=0.5)
    passes = model(batch(3))
    for name, value in losses(passes, 0.5).items():
        assert torch.equal(told[name], value), name
    assert torch.equal(told["loss"], passes[-1].loss + 0.5 * passes[0].loss)
    assert float(told["ratio"]) == pytest.approx(passes[0].loss.item() / passes[-1].loss.item())
    assert float(told["improvement_pct"]) == pytest.approx(100 * (float(told["ratio"]) - 1), abs=1e-4)
    assert {"entropy", "correlation", "query_std"} <= told.keys()
    trained = [name for name, value in told.items() if value.requires_grad]
    assert sorted(trained) == ["loss", "loss_coarse", "loss_fine"]


def test_the_coarse_pass_alone_has_no_ratio(model: Foveated) -> None:
    told = metrics.loss(model, batch(3), coarse_only=True)
    assert torch.equal(told["loss"], model(batch(3), mode="coarse")[0].loss)
    assert "ratio" not in told
    evaluated = metrics.evaluate(model, [batch(3)], coarse_only=True)
    assert evaluated["loss"] == evaluated["loss_coarse"] == pytest.approx(told["loss"].item(), abs=1e-6)


@torch.no_grad()
def test_evaluation_is_the_mean_over_clips_however_they_are_put_into_batches(model: Foveated) -> None:
    whole, other = batch(4), batch(2, seed=1)
    told = metrics.evaluate(model, [whole, other])
    each = [*model(whole, mode="evaluate")[-1].loss_B, *model(other, mode="evaluate")[-1].loss_B]
    assert told["loss"] == told["loss_fine"] == pytest.approx(float(torch.stack(each).mean()), abs=1e-6)
    assert told["ratio"] == pytest.approx(told["loss_coarse"] / told["loss_fine"])
    for control in ("random", "shuffled", "autoregressive"):
        assert math.isfinite(told[f"ratio_{control}"])
    text = [*model(whole, mode="text")[0].loss_B, *model(other, mode="text")[0].loss_B]
    assert told["loss_text"] == pytest.approx(float(torch.stack(text).mean()), abs=1e-6)
    assert told["ratio_low"] <= told["ratio"] <= told["ratio_high"]


def test_a_batch_may_be_evaluated_in_parts(model: Foveated) -> None:
    whole = metrics.evaluate(model, [batch(4)])
    parts = metrics.evaluate(model, [batch(4)], rows=2)
    for name in ("loss_fine", "loss_coarse", "loss_random", "loss_text", "ratio"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name


@pytest.mark.parametrize("coarse_only", [False, True])
def test_a_joint_objective_has_captions_under_the_names_that_are_compared(coarse_only: bool) -> None:
    joint = Foveated(
        Shallow(8, heads=2, grid=(2, 2), prefix=1), language_model(), objective="joint", caption_length=4
    ).eval()
    seen = batch(4)
    latents = torch.randn(4, 5, 4, 2, 2, generator=torch.Generator().manual_seed(1))
    seen = fl.Batch({**{name: seen[name] for name in seen}, "latents": latents}, seen.keys_of_rows)
    told = metrics.evaluate(joint, [seen], coarse_only=coarse_only)
    with torch.no_grad():
        passes = joint(seen, mode="coarse" if coarse_only else "evaluate")
    ends = {"coarse": passes[0]} if coarse_only else {"coarse": passes[0], "fine": passes[-1]}
    for name, one in ends.items():
        assert told[f"loss_{name}"] == pytest.approx(float(one.caption_B.mean()), rel=1e-5)
        assert told[f"loss_reconstruct_{name}"] == pytest.approx(float(one.reconstruct_B.mean()), rel=1e-5)
        both = told[f"loss_{name}"] + told[f"loss_reconstruct_{name}"]
        assert told[f"loss_total_{name}"] == pytest.approx(both, rel=1e-5)
    assert told["loss"] == told["loss_total_coarse" if coarse_only else "loss_total_fine"]
    step = metrics.loss(joint, seen, coarse_only=coarse_only)
    if not coarse_only:
        assert told["ratio"] == pytest.approx(told["loss_coarse"] / told["loss_fine"])
        assert told["ratio_random"] == pytest.approx(told["loss_coarse"] / told["loss_random"])
        assert float(step["ratio"]) == pytest.approx(told["ratio"], rel=1e-5), "training tells the same"
        assert {name for name in step if name.startswith("loss_")} <= told.keys()


def test_what_is_no_number_shows_nothing_and_is_an_alarm() -> None:
    assert metrics.verdict(math.nan, math.nan, math.nan).startswith("not shown")
    assert metrics.alarms({"ratio": math.nan, "entropy": 0.5}) == [
        "losses or attention are no numbers: the model is broken"
    ]


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (1, 1, 1), (1, 1)])
@torch.no_grad()
def test_a_clip_alone_in_its_batch_gets_the_queries_of_its_neighbour(
    model: Foveated, sizes: tuple[int, ...]
) -> None:
    """Of the clip before; the first of all, of the one after."""
    feed = [batch(n, seed=k) for k, n in enumerate(sizes)]
    asked = [model(one, mode="evaluate")[-1].queries[-1:] for one in feed]
    expected = []
    for k, one in enumerate(feed):
        queries = "shuffled" if one.n_rows > 1 else asked[k - 1 if k else 1]
        expected += [*model(one, mode="evaluate", queries=queries)[-1].judged_B]
    each, _ = metrics.by_clip(model, feed)
    assert each["shuffled"] == pytest.approx(torch.stack(expected).numpy(), rel=1e-5)
    assert not np.isclose(each["shuffled"], each["random"], rtol=1e-6).any()
    assert not np.isclose(each["shuffled"], each["fine"], rtol=1e-6).any()
    told = metrics.evaluate(model, feed)
    assert told["loss_shuffled"] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert all(math.isfinite(value) for value in told.values())


def test_a_batch_evaluated_clip_by_clip_is_shuffled_too(model: Foveated) -> None:
    """As with batch_size=1 and grad_accum=4."""
    told = metrics.evaluate(model, [batch(4)], rows=1)
    assert told["loss_shuffled"] != pytest.approx(told["loss_random"], rel=1e-6)
    assert told["ratio_shuffled"] == pytest.approx(told["loss_coarse"] / told["loss_shuffled"])


def test_one_clip_shows_nothing(model: Foveated, caplog: pytest.LogCaptureFixture) -> None:
    """Its interval has no width: a lucky clip would be called very promising."""
    with caplog.at_level(logging.WARNING, "frostline"):
        told = metrics.evaluate(model, [batch(1)])
    assert all(math.isfinite(value) for value in told.values())
    assert not {"loss_shuffled", "ratio_shuffled"} & told.keys(), "no other clip asks"
    assert "not shown" in caplog.text
    assert "of one clip;" in caplog.text
    assert "shuffled queries were not tried, for want of another clip." in caplog.text


@pytest.fixture
def blind(model: Foveated) -> Foveated:
    """A model that looks everywhere alike, whatever is asked."""
    with torch.no_grad():
        for part in (model.gaze.key, model.gaze.where_k):
            part.weight.zero_()
    return model


def test_a_gaze_that_chooses_nothing_is_said_aloud(blind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "frostline"):
        told = metrics.evaluate(blind, [batch(24)])
    assert told["ratio"] == pytest.approx(1, abs=1e-6), "the same is seen in all passes"
    assert told["entropy"] == pytest.approx(1, abs=1e-6)
    said = [record.getMessage() for record in caplog.records if record.name == "frostline"]
    assert any(line.startswith("foveated: not shown: ratio 1.0000 (") for line in said)
    assert any("warning: the ratio is 1.0000: the fine pass tells nothing" in line for line in said)
    assert any("warning: attention is uniform (entropy 100.0 % of its most)" in line for line in said)


def test_a_gaze_that_helps_raises_no_alarm(model: Foveated, caplog: pytest.LogCaptureFixture) -> None:
    figures = {
        "ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3, "entropy": 0.7, "ratio_random": 1.0,
        "ratio_shuffled": 1.01,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "frostline"):
        metrics.say(figures)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "foveated: very promising: ratio 1.200 (1.100 to 1.300). Controls: random queries 1.000, "
        "shuffled queries 1.010."
    )
