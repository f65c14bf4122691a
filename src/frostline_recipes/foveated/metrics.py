"""Whether looking twice helps: the figures of every run, their controls, and a verdict in words.

ratio = loss of the coarse pass / loss of the last fine pass. Beside it stand what a gaze without a mind of
its own would give: the same model with random queries and with those of another clip; and how healthy the
queries are, since attention that is uniform sees no better than a mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostline_recipes.foveated.model import Control
from frostline_recipes.foveated.passes import Pass, losses, parts

log = logging.getLogger("frostline")

STUCK, UNIFORM = 0.005, 0.01
"""A ratio that near to 1, or an entropy that near to uniform, is an alarm."""
NOWHERE = 0.9
"""A share of attention to tokens that are no patch, as the class token, that is an alarm."""
CONTROLS = ("random", "shuffled")
"""Of queries. The static query is the third, and the coarse pass itself."""
HELPED = 1.02
"""What random queries gain should stay below this: they choose nothing."""
WEIGHED = 0.5
"""The least weight of the coarse loss: a coarse pass that is hardly trained makes any ratio large."""
FEWEST = 20
"""Clips that a verdict rests on: intervals by drawing a handful anew are far too narrow."""


def loss(model: Any, batch: Any, *, lambda_coarse: float = 1.0, coarse_only: bool = False) -> Any:
    """What a step is trained on, with the figures that show whether the fine pass is worth it."""
    passes = model(batch, mode="coarse" if coarse_only else "train")
    found = losses(passes, lambda_coarse)
    with torch.no_grad():
        found |= health(passes[-1], model.gaze.prefix)
        if "loss_fine" in found:
            ratio = found["loss_coarse"].detach() / found["loss_fine"].detach()
            found |= {"ratio": ratio, "improvement_pct": 100 * (ratio - 1)}
    return found


def health(one: Pass, prefix: int = 0) -> dict[str, Tensor]:
    """entropy: of attention, as a share of uniform attention's. correlation: of what a frame's own query and
    that of another frame extract from it; near 1, it does not matter who asks. query_std. off_patches: the
    share of attention that goes to the first `prefix` tokens, which are nowhere in the picture."""
    attention = one.attention.detach().float()
    spread = -(attention * attention.clamp_min(1e-12).log()).sum(-1).mean() / math.log(attention.shape[-1])
    told = {"entropy": spread, "query_std": one.queries.detach().float().std()}
    if prefix:
        told["off_patches"] = attention[..., :prefix].sum(-1).mean()
    if one.crossed is not None:
        told["correlation"] = _correlated(one.extracted[: len(one.crossed)], one.crossed)
    return told


def _correlated(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's, over the last dimension; the mean of all."""
    a, b = a.detach().float(), b.detach().float()
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return nn.functional.cosine_similarity(a, b, dim=-1).mean()


def evaluate(
    model: Any,
    feed: Iterable[Any],
    *,
    coarse_only: bool = False,
    rows: int | None = None,
    warmup_steps: int = 0,
    lambda_coarse: float = 1.0,
    step: int | None = None,
) -> dict[str, float]:
    """All figures on held-out clips, with a bootstrap interval of the ratio; says the verdict aloud.

    rows: clips at a time, where a batch of the feed is more than is trained on at once.
    step: how many the model was trained; before warmup_steps a ratio of 1 is no alarm. None: unknown.
    """
    each, told = by_clip(model, feed, coarse_only=coarse_only, rows=rows)
    told = {f"loss_{name}": float(values.mean()) for name, values in each.items()} | told
    last = "coarse" if coarse_only else "fine"
    told["loss"] = told.get(f"loss_total_{last}", told[f"loss_{last}"])
    told["clips"] = float(len(each["coarse"]))
    if not coarse_only:
        told |= _compared(each)
        told |= {"lambda_coarse": lambda_coarse} if lambda_coarse < WEIGHED else {}
    trained_on = getattr(feed, "split", "") in ("train", None)
    say(told, warming=step is not None and step < warmup_steps, trained_on=trained_on)
    return told


@torch.no_grad()
def by_clip(
    model: Any, feed: Iterable[Any], *, coarse_only: bool = False, rows: int | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Losses of every clip by what was looked with, in the feed's order; and means of other figures: the loss
    that is trained, and the health of the queries.

    A clip alone in its batch is shuffled with the queries of the clip before; the first of all, with those of
    the clip after. Where there is one clip only, nothing is shuffled.
    """
    losses_of: dict[str, list[Tensor]] = {}
    sums: dict[str, float] = {}
    clips = 0
    asked, waiting = None, None  # the queries of the clip before; the first clip, alone in its batch
    for batch in (part for whole in feed for part in _parts(whole, rows)):
        found, figures, asked = _one(model, batch, asked, coarse_only=coarse_only)
        if waiting is not None:
            losses_of["shuffled"] = [_looked_with(model, waiting, asked)]
        waiting = None if coarse_only or "shuffled" in found else batch
        for name, values in found.items():
            losses_of.setdefault(name, []).append(values)
        n = len(found["coarse"])
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + n * float(value)
        clips += n
    each = {name: torch.cat(values).double().cpu().numpy() for name, values in losses_of.items()}
    return each, {name: value / max(1, clips) for name, value in sums.items()}


def _one(
    model: Any, batch: Any, others: Tensor | None, *, coarse_only: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Losses of each clip of a batch, by what was looked with; figures; the queries of its last clip.

    others: queries [1, T, Q] of a clip that is not in the batch.
    """
    seen = model.gaze.prepare(batch)
    passes = model(batch, mode="coarse" if coarse_only else "evaluate", seen=seen)
    asked = passes[-1].queries[-1:]
    found = {"coarse": passes[0].judged_B}
    figures = health(passes[-1], model.gaze.prefix) | parts(passes[0], "coarse")
    if coarse_only:
        return found, figures, asked
    found["fine"] = passes[-1].judged_B
    figures |= parts(passes[-1], "fine")
    found["random"] = _looked_with(model, batch, "random", seen)
    shuffled: Control | Tensor | None = others if len(found["fine"]) == 1 else "shuffled"
    if shuffled is not None:
        found["shuffled"] = _looked_with(model, batch, shuffled, seen)
    found["autoregressive"] = model(batch, mode="autoregressive", seen=seen)[0].judged_B
    found["text"] = model(batch, mode="text")[0].judged_B
    return found, figures, asked


def _looked_with(model: Any, batch: Any, queries: Control | Tensor, seen: Any = None) -> Tensor:
    """Losses of each clip, with other queries in the last pass."""
    judged: Tensor = model(batch, mode="evaluate", queries=queries, seen=seen)[-1].judged_B
    return judged


def _parts(batch: Any, rows: int | None) -> Iterator[Any]:
    if rows is None or batch.n_rows <= rows:
        yield batch
        return
    for start in range(0, batch.n_rows, rows):
        yield batch.part(start, min(batch.n_rows, start + rows))


def _compared(each: Mapping[str, Any]) -> dict[str, float]:
    ratio, low, high = ratio_of(each["coarse"], each["fine"])
    told = {"ratio": ratio, "ratio_low": low, "ratio_high": high, "improvement_pct": 100 * (ratio - 1)}
    for control in (*CONTROLS, "autoregressive"):
        if control in each:
            told[f"ratio_{control}"] = ratio_of(each["coarse"], each[control])[0]
    return told | {f"over_{control}_low": low for control, low in over(each).items()}


def over(each: Mapping[str, Any]) -> dict[str, float]:
    """How much better than each control the model's own queries are, as loss over loss: at least so much."""
    return {name: ratio_of(each[name], each["fine"])[1] for name in CONTROLS if name in each}


def ratio_of(above: Sequence[float], below: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """Mean over mean, and its 95 % interval by drawing clips (pairs) anew.

    >>> ratio_of([2.0, 4.0], [1.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    a, b = np.asarray(above, float), np.asarray(below, float)
    rng, drawn = np.random.default_rng(0), np.empty(draws)
    for k in range(draws):  # one at a time: all at once, a large set would not fit
        picked = rng.integers(0, len(a), len(a))
        drawn[k] = a[picked].mean() / b[picked].mean()
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(a.mean() / b.mean()), float(low), float(high)


def verdict(
    ratio: float,
    low: float,
    high: float,
    controls: Mapping[str, float] | None = None,
    over: Mapping[str, float] | None = None,
) -> str:
    """What document 001 would call it; an interval that reaches 1 shows nothing.

    controls: their ratios, as {"random": 1.001}; what queries without a choice gain as well shows nothing.
    over:     how much better than each of them the model is at least; default: by the ratios alone.

    >>> verdict(1.22, 1.18, 1.26)
    'very promising: ratio 1.220 (1.180 to 1.260)'
    >>> verdict(1.22, 1.18, 1.26, {"random": 1.21})
    'not shown: ratio 1.220 (1.180 to 1.260), and random queries give 1.210; below 1.02 is expected'
    >>> verdict(1.2, 1.1, 1.3, {"shuffled": 1.19}, {"shuffled": 0.99})
    'not shown: ratio 1.200 (1.100 to 1.300), and shuffled queries (1.190) do as well as those asked'
    """
    digits = _digits(ratio)
    figures = f"ratio {ratio:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
    if not low > 1 or abs(ratio - 1) < STUCK:  # also where it is no number
        return f"not shown: {figures}"
    if why := _without_choice(ratio, controls or {}, over or {}):
        return f"not shown: {figures}, and {why}"
    if ratio > 1.15:
        return f"very promising: {figures}"
    return f"{'proof of concept' if ratio >= 1.05 else 'a little better, below the 1.05 aimed at'}: {figures}"


def _digits(ratio: float) -> int:
    """So many that a ratio near 1 is told from 1."""
    return 4 if abs(ratio - 1) < STUCK else 3


def _without_choice(ratio: float, controls: Mapping[str, float], over: Mapping[str, float]) -> str:
    """Why a gain does not come from where the model chose to look; empty where the controls gain nothing."""
    if not controls.get("random", 1.0) < HELPED:  # also where it is no number
        return f"random queries give {controls['random']:.3f}; below {HELPED:g} is expected"
    as_well = [name for name, found in controls.items() if not _beaten(name, found, ratio, over)]
    if as_well:
        told = " and ".join(f"{name} queries ({controls[name]:.3f})" for name in as_well)
        return f"{told} do as well as those asked"
    return ""


def _beaten(name: str, control: float, ratio: float, over: Mapping[str, float]) -> bool:
    return over[name] > 1 if name in over else control < ratio


def _controls(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figures[f"ratio_{name}"] for name in CONTROLS if f"ratio_{name}" in figures}


def _over(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figures[f"over_{name}_low"] for name in CONTROLS if f"over_{name}_low" in figures}


def alarms(figures: Mapping[str, float], *, warming: bool = False) -> list[str]:
    """What should make a person look, in sentences. warming: so early that a ratio of 1 is usual."""
    found = []
    if not all(math.isfinite(figures[name]) for name in ("ratio", "entropy") if name in figures):
        found.append("losses or attention are no numbers: the model is broken")
    ratio = figures.get("ratio", math.nan)
    if abs(ratio - 1) < STUCK:
        stuck = f"the ratio is {ratio:.4f}: the fine pass tells nothing that the coarse one did not"
        found += [] if warming else [stuck]
    elif ratio > 1 and (why := _without_choice(ratio, _controls(figures), _over(figures))):
        found.append(f"{why}: what the fine pass gains does not come from where it looks")
    if ratio > 1 + STUCK and figures.get("ratio_autoregressive", 1.0) < 1 - STUCK:
        found.append(
            f"frame by frame it does worse than the coarse pass ({figures['ratio_autoregressive']:.3f}): it "
            "learned to look in its parallel passes only"
        )
    if figures["entropy"] > 1 - UNIFORM:
        found.append(
            f"attention is uniform (entropy {100 * figures['entropy']:.1f} % of its most): "
            "the queries choose nothing"
        )
    if figures.get("off_patches", 0.0) > NOWHERE:
        found.append(
            f"{100 * figures['off_patches']:.0f} % of the attention goes to tokens that are no patch, as the "
            "class token: it looks nowhere in the picture"
        )
    return found


def lines(figures: Mapping[str, float], *, warming: bool = False, trained_on: bool = False) -> list[str]:
    """The verdict and the alarms of an evaluation; of a coarse pass alone only the alarms.

    trained_on: these are clips that the model was trained on.
    """
    told = [f"{_verdict_of(figures, trained_on)}. {_controls_told(figures)}"] if "ratio" in figures else []
    return told + [f"warning: {alarm}." for alarm in alarms(figures, warming=warming)]


def _verdict_of(figures: Mapping[str, float], trained_on: bool) -> str:
    ratio, clips = figures["ratio"], int(figures.get("clips", FEWEST))
    told = f"not shown: ratio {ratio:.{_digits(ratio)}f}"
    if "lambda_coarse" in figures:
        weight = f"lambda_coarse={figures['lambda_coarse']:g}"
        return f"{told}, of a coarse pass that was hardly trained ({weight}): compare with fine_iterations=0"
    if trained_on:
        return f"{told} on clips that it was trained on, which show nothing of others"
    if clips < FEWEST:
        of = "one clip" if clips == 1 else f"{clips} clips"
        return f"{told} of {of}; a verdict needs {FEWEST} that it was not trained on"
    return verdict(ratio, figures["ratio_low"], figures["ratio_high"], _controls(figures), _over(figures))


def _controls_told(figures: Mapping[str, float]) -> str:
    controlled = _controls(figures)
    told = ", ".join(f"{name} queries {found:.3f}" for name, found in controlled.items())
    if "shuffled" not in controlled:
        told += "; shuffled queries were not tried, for want of another clip"
    return f"Controls: {told}."


def say(figures: Mapping[str, float], *, warming: bool = False, trained_on: bool = False) -> None:
    """What an evaluation comes to, where a person sees it."""
    for line in lines(figures, warming=warming, trained_on=trained_on):
        log.warning("foveated: %s", line)
