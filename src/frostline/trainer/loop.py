"""The loop: batches through the step until its end, with everything that must happen in between.

What it does to the model is a function of the workload, its settings and the step number alone. When it
saves, evaluates, logs or is killed changes nothing: those only look. (One class and a long file: all that
happens between two steps shares where this call is.)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from frostline.batch import Batch
from frostline.errors import TrainStopped
from frostline.rewind import Moment
from frostline.step import Step
from frostline.store.verification import settle_all
from frostline.supply import Supply
from frostline.trainer import moment
from frostline.trainer.checkpoint import Checkpoints, Loaded, load
from frostline.trainer.contents import checked
from frostline.trainer.differences import some
from frostline.trainer.distributed import Single
from frostline.trainer.evaluation import check, evaluate
from frostline.trainer.folder import STABLE
from frostline.trainer.forecast import forecast
from frostline.trainer.gauges import Busy, memory
from frostline.trainer.gradients import STEPS as AUDITED
from frostline.trainer.gradients import GradientAudit
from frostline.trainer.limits import Limits
from frostline.trainer.meter import Meter, Window
from frostline.trainer.progress import TrainProgress
from frostline.trainer.recorder import Recorder, read_metrics
from frostline.trainer.schedule import Schedule, peaks
from frostline.trainer.skipped import Bad, Skipped, named
from frostline.workload import Workload

_COUNTED = ("bad", "overflow")
_STOP, _SAVE = 2, 1
HELD_OUT, TRAINED_ON = "held out", "samples trained on"


@dataclass
class Parts:
    """What a loop is made of."""

    workload: Workload
    step: Step
    supply: Supply
    held_out: Supply | None
    schedule: Schedule
    total_steps: int | None
    """The end, in steps; None: until this call's time is over."""
    limits: Limits
    checkpoints: Checkpoints
    recorder: Recorder | None
    """None on all ranks but the first."""
    progress: TrainProgress
    ranks: Single
    chunked: bool = False
    """The schedule is bound to this call: its fall is not what the next call goes on from."""
    looked_at: str = HELD_OUT
    """What evaluations are of."""


class Loop:
    """One call of a training."""

    def __init__(self, parts: Parts) -> None:
        self.p, self.step = parts, parts.step
        self.settings = parts.step.training
        self.at = 0
        """Optimiser steps done."""
        self.fresh = True
        """The model begins with the weights that it was made with."""
        self.best: float | None = None
        self.evaluated: dict[str, float] = {}
        self.evaluated_at: int | None = None
        """The step that `evaluated` is of."""
        self.figures: dict[str, float] = {}
        self._elapsed_before, self._began = 0.0, time.monotonic()
        self._decaying = False
        self._base = peaks(self.step.optimizer)
        self._meter, self._busy = Meter(), Busy(self.step.device)
        self._skipped = Skipped(self.settings, parts.progress.note)
        self._audit: GradientAudit | None = None
        self._saved_at, self._saved_when = -1, time.monotonic()
        self._window = Window()
        self._evaluated_at = -1
        self._resumed, self._left_over = False, False
        """_left_over: an evaluation is left to the next call."""
        self._turned = time.monotonic()
        """When the step began that is under way, with the wait for its batch."""
        self._over = False
        """The hours that the schedule is bound to are over, and they are the end."""
        self._evaluates = bool(parts.ranks.most(int(parts.held_out is not None)))
        parts.limits.looks_last = self._evaluates and parts.chunked
        home = parts.checkpoints.folder.parent
        parts.limits.know(parts.ranks.gather(parts.limits.remember(home) if parts.recorder else {})[0])

    # going on

    def restore(self, loaded: Loaded) -> None:
        state = loaded.state
        note = moment.restore(self.step, loaded, self.p.ranks)
        self.p.supply.load_state_dict(state["supply"])
        self.at, self.best = loaded.step, self._better(state)
        self._elapsed_before = state["elapsed_s"]
        self._over = self._hours_left() == 0
        self._skipped.load(state["bad"])
        self._meter.load_state(state["meter"])
        self._saved_at, self._resumed = self.at, True
        if self.p.recorder is not None:
            self.p.recorder.rewind(self.at)
            self.p.checkpoints.name_again(loaded.path, state["names"])
        if note:
            self.p.progress.note(note)
        if told := self.p.supply.differences(state["supply"]):
            self.p.progress.note(f"from this epoch on with other data, or another order: {'; '.join(told)}")

    def _catch_up(self) -> None:
        """The evaluation of the step that a call goes on from, if the one before left it or was killed in it.

        Where it was written down, that call may still have been killed before it saved its best.
        """
        if not self._evaluates or not self._resumed:
            return
        lines = read_metrics(self.p.recorder.path) if self.p.recorder is not None else []
        made = next((x for x in reversed(lines) if x["kind"] == "eval" and x["step"] == self.at), None)
        if self.p.ranks.most(int(made is not None)):
            self._evaluated_at = self.at
            self._keep_best(made or {})
        elif self.done or self._evaluates_after(self.at):
            self._evaluate()

    def _better(self, state: Mapping[str, Any]) -> float | None:
        """The best score so far; a call that went back to an earlier state may have seen a better one."""
        path, metric = self.p.checkpoints.best(), self.p.workload.metric
        there = load(path, only=[]).state if path is not None and metric is not None else None
        best, other = self._score(state), None if there is None else self._score(there)
        if best is None or other is None or metric is None:
            return other if best is None else best
        return other if metric.is_better(other, than=best) else best

    def _score(self, state: Mapping[str, Any]) -> float | None:
        """A checkpoint's best; None where it is one of another metric, which says nothing of this one."""
        score: float | None = state["best"] if state.get("metric", self._metric) == self._metric else None
        return score

    @property
    def _metric(self) -> list[str] | None:
        metric = self.p.workload.metric
        return None if metric is None else [metric.name, metric.better]

    def _hours_left(self) -> float | None:
        """Seconds of a schedule that is bound to hours over all calls; None where these are not the end."""
        hours = self.p.schedule.total_s
        if hours is None or self.p.total_steps is not None or self.p.chunked:
            return None
        return max(0.0, hours - self.elapsed)

    def _save(self, *, best: bool = False, label: str | None = None) -> None:
        began = time.monotonic()
        settle_all()  # nothing is kept that was learned from a damaged file
        groups, state = moment.take(self.step, self.p.ranks)
        state |= {
            "supply": self.p.supply.state_dict(), "best": self.best, "metric": self._metric,
            "elapsed_s": self.elapsed,
            "decaying": self._decaying, "bad": self._skipped.state(), "meter": self._meter.state(),
            "names": [*(["best"] if best else []), *([label] if label else [])],
            "schedule": asdict(self.p.schedule), "training": asdict(self.settings),
        }  # fmt: skip
        if self.p.recorder is not None:
            self.p.recorder.flush()
            self.p.checkpoints.save(self.at, groups, state, best=best, label=label)
        self.p.ranks.wait()
        self._saved_at, self._saved_when = self.at, time.monotonic()
        self.p.limits.saved(self._saved_when - began)
        self._window.away += self._saved_when - began
        self._busy.pause()

    def _save_if_it_can(self) -> None:
        """Before an error leaves that the state has no part in. One of the save must not hide it."""
        if self._saved_at == self.at:
            return
        try:
            self._save()
        except Exception as e:  # noqa: BLE001 - whatever it is, the other error tells more
            self.p.progress.note(f"step {self.at:,} could not be saved: {e}")

    # the loop

    def run(self) -> str | None:
        """Train; why it ended before its last step, or None."""
        if resting := self.step.to_train_mode():
            self.p.progress.note(
                f"in eval mode where the model was made, and nothing in it trains: {some(resting, 8)} "
                f"{'stays' if len(resting) == 1 else 'stay'} so"
            )
        self._began = time.monotonic()
        self._catch_up()
        if self.done:
            return None
        self._began = time.monotonic()
        batches = self._batches()
        generators = Moment(self.step.device)
        first = next(batches)  # may load networks of the pipeline, which draw their first weights
        generators.restore()
        self._prepare(first)
        self._began = time.monotonic()
        batch: Batch | None = first
        stopped, begun = None, self.at
        self._window, self._turned = Window(self.at), time.monotonic()
        while batch is not None:
            self._one(batch)
            if self.at == 1:  # what cannot be saved is to show now, and not when hours are to be
                groups, state = moment.take(self.step, self.p.ranks)
                checked(self.at, groups, state, None)
                moment.refuse_new(self.step)
            if self.at == begun + 1 and not self._logs_after(self.at):
                self._window = Window(self.at)  # the first step is no measure: it makes the optimiser's state
            stopped = self._between()
            self._turned = time.monotonic()
            batch = None if self.done or stopped else next(batches)
        batches.close()
        return self._finish(stopped)

    @property
    def done(self) -> bool:
        return self._over or (self.p.total_steps is not None and self.at >= self.p.total_steps)

    @property
    def saved_at(self) -> int | None:
        """The step of the newest checkpoint; None: there is none."""
        return self._saved_at if self._saved_at >= 0 else None

    @property
    def elapsed(self) -> float:
        """Seconds of training, of all calls together."""
        return self._elapsed_before + time.monotonic() - self._began

    @property
    def epoch(self) -> float:
        state = self.p.supply.state_dict()
        return float(state["epoch"] + state["cursor"] / max(1, self.p.supply.n_batches(state["epoch"])))

    def _batches(self) -> Generator[Batch]:
        while True:
            waited = time.perf_counter()
            for batch in self.p.supply:
                self._window.waited += time.perf_counter() - waited
                yield batch
                waited = time.perf_counter()

    def _one(self, batch: Batch) -> None:
        by_time = self.p.schedule.total_s is not None
        elapsed = self.p.ranks.most(int(1e6 * self.elapsed)) / 1e6 if by_time else 0.0
        factor = self.p.schedule.factor(self.at, elapsed)
        for group, base in zip(self.step.optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        self._busy.begin()
        try:
            figures = self.step(batch, norm=self._logs_after(self.at + 1))
        except Exception as e:
            e.add_note(self._where(batch))
            raise
        self._busy.end()
        self.at += 1
        self._window.rows += self._samples(batch)
        self._meter.add(
            {n: v for n, v in figures.items() if n not in _COUNTED} | {"lr": self._base[0] * factor},
            unless=figures["bad"],
        )
        self._meter.count({n: v for n, v in figures.items() if n in _COUNTED})
        self._skipped.add(self.at, batch, figures["bad"])
        if self._audit is not None and self._audit.looked >= AUDITED:
            self._audit.verdict()
            self._audit = self.step.on_grads = None
        self.p.limits.stepped(time.monotonic() - self._turned)

    def _where(self, batch: Batch) -> str:
        """For an error of the model or its loss: what it was at, and what is left to go on from."""
        kept = "no checkpoint was written yet"
        if self.saved_at is not None:
            kept = f"the checkpoint of step {self.saved_at:,} is kept"
        keys = [] if batch._keys is None else batch.keys_of_rows
        return f"(in {named((self.at + 1, keys))}; {kept})"

    def _samples(self, batch: Batch) -> int:
        """Rows of this rank's share; a batch in parts counts what `batch_size` does, such as episodes."""
        if any(isinstance(value, Batch) for value in batch.values()):
            return 0 if self.p.ranks.rank else self.p.workload.batch_size or batch.n_rows
        return batch.n_rows

    def _between(self) -> str | None:
        """After a step: log, evaluate, save; why to stop."""
        if self._logs_after(self.at) or self.done:
            self._log()
        if self._evaluates and self._evaluates_after(self.at) and not self.done:
            self._look(asked=self.p.limits.why is not None)
        if self.p.ranks.most(int(self._hours_left() == 0)):
            self._over = True
        stop = self._left_over or self.p.limits.reason is not None
        vote = self.p.ranks.most(_STOP * stop + _SAVE * self._save_is_due())
        if vote >= _STOP:
            told = (
                "no time is left for an evaluation" if self._left_over else "another rank was asked to stop"
            )
            return self.p.limits.reason or told
        self._watch_decay()
        if vote & _SAVE and self._saved_at != self.at and not self.done:
            self._save()
        if self._saved_at == self.at and self.p.limits.looks_last:
            self._time_a_look()
        return None

    def _evaluates_after(self, step: int) -> bool:
        every = self.settings.eval_every
        return bool(every and step and step % every == 0)

    def _logs_after(self, step: int) -> bool:
        """Known before the step, which then also works out what is only ever logged."""
        return step % self.settings.log_every == 0 or step == self.p.total_steps

    def _save_is_due(self) -> bool:
        every = self.settings.save_every
        late = time.monotonic() - self._saved_when > 60 * self.settings.save_minutes
        return late or bool(every and self.at % every == 0) or self.p.limits.wants_save

    def _watch_decay(self) -> None:
        """Keep the state before the rate falls, where the next call is to go on from it."""
        begins = self.p.schedule.decay_begins() if self.p.chunked and not self._decaying else None
        due = begins is not None and self.elapsed >= begins
        if self.p.ranks.most(int(due)):
            self._save(label=STABLE)
            self._decaying = True
            self.p.progress.note(
                f"step {self.at:,}: the rate falls from here to the end of this call; the next call goes on "
                f"from this step"
            )

    def _finish(self, stopped: str | None) -> str | None:
        """Save, evaluate; what the call ended before, or None."""
        if self._audit is not None and self._audit.looked:
            self._audit.verdict()  # of a run of one or two steps
        ended = self.done or self._decaying
        if ended and self._skipped:
            self._log()  # stopped in between, the window goes on in the next call
        if self._saved_at != self.at:
            self._save()  # before an evaluation that may fail, or be killed
        if ended and self._evaluates and self._evaluated_at != self.at and not self._left_over:
            self._look(asked=self.p.limits.why is not None and not self.done)
        self.p.progress.end()
        if self.done:
            stopped = f"no time is left for the evaluation of step {self.at:,}" if self._left_over else None
        return stopped

    # before the first step

    def _prepare(self, batch: Batch) -> None:
        """Rehearse with the first batch: warms up, shows what fits, and gives the figures of the forecast."""
        began = time.monotonic()
        try:
            figures = self.step.rehearse(batch)
        except Exception as e:
            e.add_note(self._where(batch))
            raise
        seconds = time.monotonic() - began
        warmed = self.settings.compile or self.step.device.type != "cpu"  # most of it was not the step
        if warmed or self.p.ranks.most(int(1000 * seconds)) < 5000:
            began = time.monotonic()
            self.step.rehearse(batch)
            _synchronize(self.step.device)
            seconds = time.monotonic() - began
        if self.at == 0:
            first = {name: float(v) for name, v in figures.items()}
            check(self.p.workload, self.step, batch, first, fresh=self.fresh)
        if self.at < AUDITED:
            self._audit = GradientAudit(
                self.step.model, self.step.optimizer, self.settings.unused, self.p.workload.loss
            )
            self.step.on_grads = self._audit
        left = None if self.p.total_steps is None else self.p.total_steps - self.at
        ends = [s for s in (self.p.limits.left_s, self._hours_left()) if s is not None]
        told = forecast(seconds, left, min(ends, default=None), self.p.supply, self.step.device)
        self.p.progress.note(f"{told}; {self.p.schedule.told()}")

    # looking

    def _log(self) -> None:
        self.figures = self._meter.read()
        skipped = self._skipped.look(self.at, any_bad=bool(self.figures.get("bad")))
        if skipped:
            self._write_keys(skipped)
        _, rows = self.p.ranks.agree(fits=True, rows=self._window.rows)
        busy, wall = self._busy.read(), self._window.wall()
        values: dict[str, Any] = {"epoch": self.epoch, **self.figures}
        speed = {
            "samples_per_s": rows / wall, "data_wait": min(1.0, self._window.waited / wall),
            "elapsed_s": self.elapsed, **({} if busy is None else {"busy": busy}), **memory(self.step.device),
        }  # fmt: skip
        if self.p.recorder is not None:
            self.p.recorder.write(self.at, values | {f"time/{n}": v for n, v in speed.items()})
        self.p.progress.line(
            self.at, self.p.total_steps, values["epoch"], self.figures.get("loss"), speed["samples_per_s"],
            speed["data_wait"], busy, speed.get("peak_allocated_bytes", speed["rss_bytes"]), self._left(wall),
            {n: self.figures[n] for n in _COUNTED if self.figures.get(n)},
        )  # fmt: skip
        self._window = Window(self.at)
        if skipped and self._skipped.too_many:
            self._save_if_it_can()  # none of the bad updates is in it
            raise self._skipped.stopped(self.saved_at)

    def _write_keys(self, skipped: list[Bad]) -> None:
        """All keys of skipped updates, of all ranks. A line's step is this one: `rewind` goes by it."""
        shares = self.p.ranks.gather([keys for _, keys in skipped])
        for i, (step, _) in enumerate(skipped):
            # after a resume all ranks know the first one's keys of steps before it
            keys = [*dict.fromkeys(key for share in shares for key in share[i])]
            if self.p.recorder is not None:
                self.p.recorder.write(
                    self.at, {"what": "skipped", "skipped_step": step, "keys": json.dumps(keys)}, kind="event"
                )

    def _left(self, wall: float) -> float | None:
        by_steps = None
        if self.p.total_steps is not None:
            steps = max(1, self.at - self._window.steps_before)
            by_steps = (self.p.total_steps - self.at) * wall / steps + self._looks_s(self.p.total_steps)
        limit = self.p.limits.limit_s
        by_time = None if limit is None else max(0.0, limit - self.p.limits.elapsed)
        ends = (by_steps, by_time, self._hours_left())
        return min((s for s in ends if s is not None), default=None)

    def _looks_s(self, total: int) -> float:
        """Seconds that the evaluations from here on take, that of this step and the last one among them."""
        every = self.settings.eval_every
        between = (total - 1) // every - (self.at - 1) // every if every and self.at < total else 0
        return (between + 1) * (self.p.limits.look_s or 0.0) if self._evaluates else 0.0

    def _look(self, *, asked: bool) -> None:
        """Evaluate; unless a stop was asked for, or the time does not do: then the next call does."""
        limits = self.p.limits
        if not self.p.ranks.most(int(asked or not limits.may_look)):
            self._evaluate()
            return
        self._left_over = True
        if not asked:
            then = "the next call makes it"
            if self._decaying:  # it goes on from before
                then = "the next call times one" if limits.look_s is None else "a longer call has time for it"
            self.p.progress.note(
                f"step {self.at:,}: no evaluation now, {limits.why_not_look()}; {then}. `frostline evaluate` "
                f"looks at a checkpoint at any time"
            )

    def _time_a_look(self) -> None:
        """Evaluate once where every call ends with it, so that the time to keep for that is known.

        Right after a save, so that nothing is lost if it takes too long; not early in a first call, which may
        be too short for it: the next one does then.
        """
        early = not self._resumed and self.p.limits.elapsed < 60 * self.settings.save_minutes
        if not self.p.ranks.most(int(early or not self.p.limits.may_time_look)):
            self._evaluate()

    def _evaluate(self) -> None:
        began = time.monotonic()
        self.p.limits.looking()
        error: Exception | None = None
        try:
            self._look_at_held_out()
        except Exception as e:  # noqa: BLE001 - raised again once all ranks have saved
            error = e
        if self.p.ranks.most(int(error is not None)):
            self._save_if_it_can()
            if error is None:  # torchrun ends all once one has ended: the first rank has to say why before
                self.p.ranks.wait()
            raise error or TrainStopped("The evaluation failed on the first rank.")
        self._busy.pause()
        self._evaluated_at = self.at
        self.p.limits.evaluated(time.monotonic() - began)
        self._window.away += time.monotonic() - began
        self._keep_best(self.evaluated)

    def _look_at_held_out(self) -> None:
        if self.p.ranks.rank or self.p.held_out is None:
            return
        self.evaluated = evaluate(self.p.workload, self.step, self.p.held_out, at=self.at)
        self.evaluated_at = self.at
        if self.p.recorder is not None:
            on = {} if self.p.looked_at == HELD_OUT else {"on": self.p.looked_at}
            self.p.recorder.write(self.at, {"epoch": self.epoch, **on, **self.evaluated}, kind="eval")
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.evaluated.items())
        self.p.progress.note(f"step {self.at:,}, {self.p.looked_at}: {told}")

    def _keep_best(self, figures: Mapping[str, Any]) -> None:
        """A checkpoint of its own for the best so far; the first rank knows the figures."""
        metric = self.p.workload.metric
        value = figures.get(metric.name, math.nan) if metric is not None else math.nan
        better = (
            metric is not None
            and math.isfinite(value)
            and (self.best is None or metric.is_better(value, than=self.best))
        )
        if self.p.ranks.most(int(better)):
            self.best = value
            self._save(best=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
