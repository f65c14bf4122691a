"""The profiler inside of a script's process: it counts steps, and watches each in the way that is its turn.

Nothing that it does changes what the script computes: no random number is drawn, no tensor written to.
One class and one file, though long: hooks, forks, errors and exits may come at any moment of a step, and all
of them move the same state.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from . import cuda, hooks, looks, record
from .calls import Inputs
from .decodes import Decodes
from .ends import Ends
from .instruments import Instruments
from .loaders import Loaders
from .modules import Modules, in_worker
from .phases import AGAIN, FOUND_IN, PHASES, TIMED, Block, more, plan, steady, total
from .starts import Starts

_PATIENCE = 5
"""The warm-up takes at most so many times the steps asked for."""
_AT_LEAST = 2
"""Times as many batches as are measured: a loop of calls that has fewer left may end first."""
_TOLD_EVERY_S = 3.0
_WRITTEN_EVERY_S, _WRITTEN_AT_ONCE = 10.0, 3
"""Only a kill leaves no time to write: writing takes milliseconds, in which workers go on preparing. So what
the first few blocks show is there, and then what so many seconds do."""
_MOST_INPUT_COST = 0.01
"""Of a step, for looking at what frozen modules are given in steps that are measured."""


class Agent:
    """One for a process. `begin()` hooks it up; it ends by itself."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.folder = Path(settings["folder"])
        self.keep_going = bool(settings["keep_going"])
        self.loaders = Loaders(self.folder)
        self.decodes = Decodes(self.loaders.decoded)
        self.ends = Ends(self)
        self.starts = Starts(self)
        self.reset()

    def reset(self) -> None:
        """As new: also in a child that was forked while its parent was being watched."""
        self.pid, self.thread = os.getpid(), threading.get_ident()
        self.n, self.last = 0, time.perf_counter()
        self.boundary_name = ""
        self.phase = "warm"
        self.times: list[float] = []
        self.blocks: list[dict[str, Any]] = []
        self.plan: list[Block] = []
        self.queue: list[Block] = []
        self.unsure = 0
        self.block: Block | None = None
        self.left = 0
        self.modules = Modules(self.starts.called)
        self.inputs: dict[int, Inputs] = {}
        trace = self.folder / f"trace-{self.pid}.json" if self.settings["trace"] else None
        self.instruments = Instruments(trace)
        self.clock = cuda.Clock()
        self.notes: list[str] = []
        self.graphs = 0
        self.waits: list[list[Any]] = []
        self.done = self.held = self.makes = False
        """Nothing is watched any more; all was seen, but the script goes on; so it does, as its loop of calls
        ends before all is seen, and what it makes may be trained on."""
        self.swallowed = self.asked = self.fresh_before = self.early = 0
        self.told = self.written = time.perf_counter()
        self.warmup = 0

    # on and off

    def begin(self) -> None:
        (self.folder / f"torch-{self.pid}").touch()
        hooks.failures.clear()
        self.loaders.install()
        self.decodes.install_all()
        self.ends.install()
        self.modules.begin()
        self.loaders.told = self._waited
        self.loaders.ended = self.guarded(self._loop_ended)
        # these stay until `unhook`: torch iterates over its hooks, so none may be taken away inside of one
        self.handles = [
            optimizers.register_optimizer_step_pre_hook(self.guarded(self._stepping)),
            optimizers.register_optimizer_step_post_hook(self.guarded(self._stepped)),
        ]
        os.register_at_fork(after_in_child=self._forked)

    def guarded(self, ours: Callable[..., None]) -> Callable[..., None]:
        """An error of ours is told, ends the profile, and is none of the script's."""

        def called(*args: Any) -> None:
            try:
                ours(*args)
            except Exception as e:  # noqa: BLE001 -- whatever it is; Stop is no Exception
                self.notes.append(f"the profiler failed and let the script go on: {type(e).__name__}: {e}")
                sys.stderr.write(f"frostline: {self.notes[-1]}\n")
                self.block = None
                self._give_up()

        return called

    def _give_up(self) -> None:
        """What is known is written, if that can be done at all."""
        try:
            self.finish("an error of the profiler")
        except Exception as e:  # noqa: BLE001 -- where one thing of ours failed, others may
            sys.stderr.write(f"frostline: what was measured is lost: {type(e).__name__}: {e}\n")

    def _forked(self) -> None:
        """A child has nothing on that belongs to a block of its parent."""
        self.instruments.drop()

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def finish(self, how: str) -> None:
        """The end: everything is as it was before, what is known is written."""
        if self.done or os.getpid() != self.pid:
            return
        self.done = True
        how = "kept going" if self.held else how  # all steps had been seen
        self._cut_short()
        self.modules.end() if self.modules.watching else None
        for inputs in self.inputs.values():
            inputs.remove()
        self.starts.remove()
        self.loaders.uninstall()
        self.decodes.uninstall()
        self.ends.uninstall()
        if self.n:
            self._write(how)
        self.modules.uses.clear()
        self.inputs.clear()

    def _write(self, how: str) -> None:
        failed = [f"the profiler failed in a hook and let the script go on: {e}" for e in hooks.failures]
        random = [] if self.modules.watching else self.modules.random()
        self.notes += [note for note in [*failed, *random] if note not in self.notes]
        record.write(self, how)
        self.written = time.perf_counter()

    def _cut_short(self) -> None:
        """The steps that are whole of a block which does not come to its end count, if the device lives."""
        try:
            if self.blocks and "end" not in self.blocks[-1]:
                self._close_block(self.last)
            else:
                self._leave()
        except Exception as e:  # noqa: BLE001 -- an error of the script's on the device comes at every call
            self.notes.append(f"the last steps are left out: {type(e).__name__}: {e}")
            self.blocks = [block for block in self.blocks if "end" in block]
            self.instruments.drop()

    def _waited(self, began: float, ended: float, rows: int, came: bool) -> None:
        if threading.get_ident() == self.thread:  # what others wait for is not the step's wait
            self.waits.append([began, ended, rows, came])

    def _begin_again(self) -> None:
        """Other steps than before: nothing of what those were being watched for is left on."""
        self.instruments.drop()
        self._leave()
        for inputs in self.inputs.values():
            inputs.remove()
        self.modules.end()
        self.reset()
        self.modules.begin()

    def _go_on(self) -> None:
        """The same training once more, as a search or a cross-validation does: it goes on where the last one
        ended, with modules of its own."""
        block, left = self.block, self.left
        if block is not None and left < block.steps:
            self._close_block(self.last)  # not the time between two trainings
        elif block is not None:
            self._leave()
            left = block.steps
        if block is not None:
            self.queue.insert(0, dataclasses.replace(block, steps=left))
        for inputs in self.inputs.values():
            inputs.remove()
        self.inputs.clear()
        self.modules.end()
        self.modules, self.block = Modules(self.starts.called), None
        self.modules.begin()

    # steps

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.instruments.parts is not None and not torch.compiler.is_compiling():
            self.instruments.parts.begin_optimizer(optimizer)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or cuda.capturing():
            return
        if self.instruments.parts is not None:
            self.instruments.parts.end_optimizer()
        if self.starts.by_calls and not self.done:
            self._train_after_all()
        last = not self.starts.by_calls and self.starts.is_last(optimizer)
        if self.starts.changed:
            self.starts.changed = False
            if not self.done:
                self._go_on() if self.starts.alike else self._begin_again()
        if last:
            self.boundary(f"{type(optimizer).__name__}.step")

    def _train_after_all(self) -> None:
        """Calls ended the steps so far, as features are computed before a training, or a model is tested."""
        self.starts.forget_calls()
        name, measured = self.boundary_name, bool(self.blocks)
        self._begin_again()
        if measured:
            self.notes.append(
                f"before the first optimiser's step each {name} was taken for a step; that was dropped"
            )

    def boundary(self, name: str) -> None:
        """A step ended."""
        if in_worker() or cuda.capturing():
            return
        if self.done:
            self._stop_again()
            return
        if self.held:
            self.waits.clear()
            self.loaders.step()
            return
        if os.getpid() != self.pid:
            self._begin_again()  # a forked child trains by itself
        if self.block is None:
            cuda.settle()  # while it warms up: the host may be many steps ahead
        now = time.perf_counter()
        self.n += 1
        self.boundary_name, self.thread = name, threading.get_ident()
        if self.block is None:
            self._warming(now)
        else:
            self._measuring(now)
        self.waits.clear()
        self.loaders.step()
        self.last = time.perf_counter()

    def _warming(self, now: float) -> None:
        if self.queue:  # in the middle of it, with other modules
            self.modules.steps += 1
            self.modules.end()
            self._watch_inputs()
            self._next()
            return
        if self.n == 1:
            self.modules.begin_counting()
            self.graphs = _graphs()
            self._watch_inputs()
            self.note_progress("warming up")
            return
        self.times.append(now - self.last)
        if self.modules.watching:
            self.modules.steps += 1
            if self.modules.steps >= min(FOUND_IN, max(1, self.settings["warmup"] - 1)):
                self.modules.end()
                self._watch_inputs()
                if self.modules.felt(self._usual()):
                    self.times.clear()
        wanted = int(self.settings["warmup"])
        if self.n < wanted or self.modules.watching:
            return
        compiling = _graphs() != self.graphs
        self.graphs = _graphs()
        calm = steady(self.times) and not compiling
        world = record.ranks()[1]
        if world > 1 or calm or self.n >= _PATIENCE * max(wanted, 3) or wanted <= 3:
            if not calm and world == 1:
                self.notes.append(f"the steps had not become steady after {self.n} of them")
            self.warmup, self.graphs = self.n, _graphs()
            own = total([block for block in self._planned(world) if block.phase not in AGAIN])
            self.makes = self._without_gradients() and self.loaders.left() < _AT_LEAST * own
            self.queue = self._planned(world)
            self.plan = [] if world > 1 else [*self.queue]
            self.asked = self.n + total(self.queue)
            self._write("unfinished")
            self.early = _WRITTEN_AT_ONCE
            self._next()

    def _planned(self, world: int) -> list[Block]:
        return plan(
            self.settings["steps"],
            1.0 if world > 1 else self._usual(),  # all ranks stop at the same step
            cuda=cuda.used(),
            replay=self.settings["replay"] and not self._goes_on() and world == 1,
            trace=self.settings["trace"] or cuda.used(),
            workers=any(about["workers"] for about in self.loaders.seen.values()),
        )

    def _usual(self) -> float:
        return statistics.median(self.times) if self.times else 1.0

    def _measuring(self, now: float) -> None:
        block = self.block
        assert block is not None  # noqa: S101 -- for type checkers: only called then
        self.left -= 1
        if self.left > block.steps:
            return  # it settles
        if self.left == block.steps:
            self._start_block()
            return
        held = self.blocks[-1]
        self.clock.step()
        held["times"].append(now - self.last)
        held["waits"].append(sum(ended - began for began, ended, *_ in self.waits))
        held["rows"].append(sum(rows for *_, rows, _ in self.waits))
        held["batches"].append(sum(came for *_, came in self.waits))
        held["fresh"].append(self.loaders.begun - self.fresh_before)
        self.fresh_before = self.loaders.begun
        if self.instruments.spans is not None:
            self.instruments.spans.boundary()
        if self.left == 0:
            self._end_block()

    def _next(self) -> None:
        """The next block, or the end. What is unsure is done again before half a batch is tried, which may
        leave other code behind."""
        halved = any(block["phase"].startswith("half") for block in self.blocks)
        if not halved and (not self.queue or self.queue[0].phase == "half"):
            again = more(self.plan, self.blocks, self._usual(), self.unsure)
            self.queue[:0] = again
            self.asked += total(again)
            self.unsure += bool(again)
        if not self.queue:
            self._over()
            return
        self.block = self.queue.pop(0)
        self.left = self.block.steps + self.block.settle
        if not self._enter(self.block.phase):
            self._next()
            return
        self.note_progress(PHASES[self.block.phase])
        if self.block.settle == 0:
            self._start_block()

    def _start_block(self) -> None:
        block = self.block
        assert block is not None  # noqa: S101
        if block.phase not in TIMED:
            cuda.settle()
        for inputs in self.inputs.values():  # not before: a loop of calls has fetched its next batch by now
            inputs.ours = block.phase in AGAIN
        self.instruments.start(block.phase)
        self.fresh_before = self.loaders.begun
        self.blocks.append(
            {
                "phase": block.phase, "start": 0.0, "times": [], "waits": [], "rows": [], "batches": [],
                "fresh": [], "before": record.counters(),
            }
        )  # fmt: skip
        self.clock.begin()
        self.instruments.restart()
        self.blocks[-1]["start"] = time.perf_counter()

    def _end_block(self) -> None:
        cuda.settle()
        self._close_block(time.perf_counter())
        for inputs in self.inputs.values():
            inputs.look()
        self.loaders.count_items()
        self._pause_inputs()
        self.early -= 1
        if self.early >= 0 or time.perf_counter() - self.written > _WRITTEN_EVERY_S:
            self._write("unfinished")
        self._next()

    def _close_block(self, ended: float) -> None:
        if self.blocks[-1]["phase"] == "half" and _graphs() != self.graphs:
            self.blocks[-1]["phase"] = "half, compiled again"  # other code ran than in the whole batch
            self.asked -= total(self.queue)
            self.queue.clear()  # and may run in the whole one from now on
        cuda.settle()
        if found := self.clock.times():
            self.blocks[-1] |= {"times": found, "device_s": sum(found)}
        self.blocks[-1] |= {"end": ended, "after": record.counters()}
        self._leave()

    # what is watched in a phase

    def _enter(self, phase: str) -> bool:
        """Whether the phase can be had. Everything is hooked up before the steps that settle."""
        self.loaders.watch(phase != "bare")
        if phase == "trace" and torch._C._autograd._profiler_enabled():
            self.notes.append("the script runs torch's tracer itself: the device's busy time is not known")
            return False
        if phase == "trace" and torch._C._current_graph_task_id() != -1:
            self.notes.append("steps end within the backward pass: the device's busy time is not known")
            return False
        if phase == "look" and (why := looks.cannot()):
            self.notes.append(f"reads from the device were not looked for, nor operations counted: {why}")
            return False
        tellers = [self.loaders, *self.inputs.values()]
        self.instruments.put_on(phase, lambda: self.modules.worth(self._usual()), tellers)
        if phase == "A":
            self.loaders.keep = bool(self.settings["replay"]) and not self._goes_on()
        if phase == "real":  # beside replayed ones only
            return any(block["phase"] == "replay" for block in self.blocks)
        if phase not in AGAIN:
            return True
        self.loaders.keep = False
        self.loaders.device = cuda.device()
        self.loaders.replay = phase if self.loaders.replayable(phase) else ""
        self.ends.trying = AGAIN[phase] if self.loaders.replay else ""
        return bool(self.loaders.replay)

    def _leave(self) -> None:
        """Whatever the block had on is off."""
        self.loaders.replay = ""
        self.ends.trying = ""
        self.instruments.take_off(len(self.blocks[-1]["times"]) if self.blocks else 0)

    # frozen modules

    def _watch_inputs(self) -> None:
        for use, _ in self.modules.frozen():
            if id(use.module) not in self.inputs and not isinstance(use.module, torch.jit.ScriptModule):
                self.inputs[id(use.module)] = Inputs(use.module)
        for use in self.modules.called():
            if use.prefix is not None and id(use.module) not in self.inputs:
                self.inputs[id(use.module)] = Inputs(use.module, self.modules.up_to(use))

    def _pause_inputs(self) -> None:
        """Looking is left out of measured steps where it would be felt; then the counts are a sample's. And
        of batches that are handed out again: those repeats are ours."""
        step = self._usual()
        following = self.queue[0].phase if self.queue else ""
        for inputs in self.inputs.values():
            cost = inputs.typical_s * inputs.calls / max(1, self.n)
            inputs.paused = following in ("A", "bare", "real") and cost > _MOST_INPUT_COST * step
            inputs.ours = inputs.ours or following in AGAIN

    # the end

    def _over(self) -> None:
        """All steps were seen."""
        self.block = None
        if self._goes_on() and not self.keep_going:
            self.held = True
            if self.starts.unsure:
                self.notes.append(
                    f"an optimiser is there but never stepped, so each {self.boundary_name} is a step"
                )
            self._write("kept going")
            self.told = 0.0  # it may take long: this is told in any case
            self.note_progress("done; the script goes on, as a training may be yet to come")
            return
        if self.starts.unseen:
            self.notes.append(
                f"the optimiser's own steps are not seen, as it is compiled: each {self.boundary_name} is one"
            )
        self.finish("kept going" if self.keep_going else "stopped")
        if not self.keep_going:
            self.note_progress("done: the script is stopped here")
            self.ends.see_to_it()
            self.ends.stop()

    def _goes_on(self) -> bool:
        """Whether the script is not stopped. Asked for; or calls end steps and a training may be yet to come,
        in this process or, where this is not the command itself, in the next: it needs what is made here."""
        child = os.getppid() != self.settings.get("launcher", os.getppid())
        makes = (self.makes and not self.loaders.over_again()) or (child and self._without_gradients())
        return self.keep_going or self.starts.unsure or makes

    def _without_gradients(self) -> bool:
        return self.starts.by_calls and not torch.is_grad_enabled()

    def _loop_ended(self) -> None:
        """A loop of calls is over that was given a batch twice: nothing is to be made of its results."""
        here = threading.get_ident() == self.thread and os.getpid() == self.pid
        if here and self._without_gradients() and not self.done:
            self.notes.append(
                f"the loop in which each {self.boundary_name} is a step ended before all steps were seen. It "
                f"was given some batches twice, so the script is stopped there; if a training follows, "
                f"--keep-going profiles that"
            )
            self.finish("stopped")
            self.note_progress("done: the script is stopped here")
            self.ends.see_to_it()
            self.ends.stop()

    def _stop_again(self) -> None:
        if not self.keep_going and not self.ends.finished:
            self.swallowed += 1
            record.write(self, "stopped")
            self.ends.stop(hard=self.swallowed > 3)

    def note_progress(self, what: str) -> None:
        """A line now and then: quick scripts are not drowned in them."""
        now = time.perf_counter()
        if self.settings["quiet"] or record.ranks()[0] or now - self.told < _TOLD_EVERY_S:
            return
        self.told = now
        told = ""
        if self.block is not None:
            left = (self.asked - self.n) * self._usual()
            told = f"{self.n} of {self.asked} steps, about {left:.0f} s left; "
        sys.stderr.write(f"frostline: {told}{what}\n")


def _graphs() -> int:
    """Graphs that torch.compile has made so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(sum(utils.counters["stats"].values()))
