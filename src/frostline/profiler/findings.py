"""What a person should know of a run, each with its figures."""

from __future__ import annotations

from collections.abc import Sequence

from frostline.profiler.verdict import (
    STARTS,
    Seen,
    begins,
    hidden,
    often_called,
    prefix_known,
    shares,
    storable,
)
from frostline.results import Finding, Repeat
from frostline.wording import size

_MUCH = 0.05
"""Of the step: what takes less is not told."""


def findings(seen: Seen, repeats: Sequence[Repeat]) -> tuple[Finding, ...]:
    if not seen.step:
        return ()
    found = [
        *_starting(seen), *_loaders(seen), *_often(seen), *_frozen(seen), *_repeated(seen, repeats),
        *_compiled(seen), *_waits(seen), *_copied(seen), *_disturbed(seen), *_between(seen),
    ]  # fmt: skip
    return tuple(found)


def _starting(seen: Seen) -> list[Finding]:
    if seen.start is None or seen.epoch is None or seen.starting < STARTS:
        return []
    text = f"{begins(seen)}, {seen.starting:.0%}"
    if seen.start.anew:
        text += "; its workers end with each epoch, and others are started"
    title = f"the loader of {seen.start.dataset} is slow to begin an epoch"
    return [Finding("loader", title, f"{text}.", 1000 * seen.start.seconds / seen.epoch.steps)]


def _loaders(seen: Seen) -> list[Finding]:
    found = []
    if shares(seen)["input"] < _MUCH:
        return []
    if seen.wait_ms < _MUCH * seen.step and hidden(seen):
        return _hidden(seen)
    for loader in seen.loaders:
        if loader.wait_ms < _MUCH * seen.step:
            continue
        text = f"{loader.wait_ms:.1f} ms a step are spent waiting for it"
        if loader.prepare_ms is not None:
            text += f"; one batch takes {loader.prepare_ms:.1f} ms to prepare"
            if loader.decode_ms:
                text += f", {loader.decode_ms / loader.prepare_ms:.0%} of that decoding"
        if loader.needed is not None and loader.needed > loader.workers:
            text += f"; {loader.needed} workers would keep up with the step, there are {loader.workers}"
        title = (
            f"{loader.name} cannot keep up" if loader.workers else f"{loader.name} works while the step waits"
        )
        found.append(Finding("loader", title, f"{text}.", loader.wait_ms))
    return found


def _hidden(seen: Seen) -> list[Finding]:
    replayed = seen.trial("replayed")
    if replayed is None or not seen.loaders:
        return []
    loader = max(seen.loaders, key=lambda loader: loader.calls)
    text = (
        f"A thread of the script's own waits for it, and the step for that one: {seen.beside_ms:.1f} ms, and "
        f"{replayed.ms:.1f} with batches that are there already"
    )
    if loader.prepare_ms is not None:
        text += f"; one batch takes {loader.prepare_ms:.1f} ms to prepare"
    return [Finding("loader", f"{loader.name} cannot keep up", f"{text}.", seen.beside_ms - replayed.ms)]


def _often(seen: Seen) -> list[Finding]:
    found = []
    for module in often_called(seen):
        share = module.ms / seen.told_ms
        rows = f"batch {module.rows[0]}" if module.rows else "unknown batch"
        if module.rows == (1,):
            title = f"{module.name} is called {module.calls:g} times a step, one row each"
            text = (
                f"One call with {module.calls:g} rows would do, if none needs what another gave; these take "
                f"{share:.0%} of the step."
            )
            found.append(Finding("batch", title, text, module.ms))
        else:
            title = f"{module.name} is called {module.calls:g} times a step"
            text = f"Each with {rows}; forward alone takes {share:.0%} of the step. Do all of them differ?"
            text += " Or does each need what the last one gave?"
            found.append(Finding("calls", title, text, module.ms))
    return found


def _frozen(seen: Seen) -> list[Finding]:
    found = []
    for module in seen.modules:
        if max(module.ms, module.prefix_ms) < _MUCH * seen.told_ms:
            continue
        if storable(module, seen):
            fixed = module.frozen == "parameters"
            why = "None of its parameters is trained" if fixed else "It runs under no_grad"
            text = f"{why}; it takes {module.ms / seen.told_ms:.0%} of the step."
            found.append(Finding("frozen", f"{module.name} never changes", text, module.ms))
        elif not prefix_known(module, seen.modules):
            fixed_ones = module.parameters - module.trainable
            text = (
                f"{fixed_ones:,} of its {module.parameters:,} parameters are frozen; up to {module.prefix} "
                f"nothing is trained, {module.prefix_ms / seen.told_ms:.0%} of the step. What comes after is."
            )
            title = f"{module.name} is frozen up to {module.prefix}"
            found.append(Finding("prefix", title, text, module.prefix_ms))
    return found


def _repeated(seen: Seen, repeats: Sequence[Repeat]) -> list[Finding]:
    found = []
    for repeat in repeats:
        if not repeat.repeats or repeat.ms is None or repeat.ms < _MUCH * seen.told_ms:
            continue
        text = f"{repeat.repeats:,} of {repeat.seen:,} inputs ({repeat.share:.1%}) had been seen before"
        text += f"; that took {repeat.ms:.1f} ms a step"
        if repeat.epochs is not None:
            room = f" ({size(repeat.stored)})" if repeat.stored is not None else ""
            text += f". Storing the results{room} pays in trainings of more than {repeat.epochs:.1f} epochs"
        found.append(Finding("repeat", f"{repeat.what} does its work again", f"{text}.", repeat.ms))
    return found


def _compiled(seen: Seen) -> list[Finding]:
    if not any(module.compiled for module in seen.modules):
        return []
    found = []
    for module in seen.modules:
        if not module.compiled and module.depth == 0 and module.ms >= _MUCH * seen.told_ms:
            text = (
                f"{module.calls:g} calls a step, {module.ms / seen.told_ms:.0%} of it, run as plain Python."
            )
            title = f"{module.name} runs outside of what is compiled"
            found.append(Finding("compile", title, text, module.ms))
    return found


def _waits(seen: Seen) -> list[Finding]:
    found = []
    for sync in seen.syncs:
        if sync.calls <= 0.5:  # in one of the two steps that were looked at: now and then
            continue
        cost = "it costs nothing on the CPU, a GPU would be waited for"
        if seen.on_gpu:
            cost = f"{sync.ms:.2f} ms of waiting"
        often = "once" if sync.calls == 1 else f"{sync.calls:g} times"
        text = f"{sync.what}, {often} a step; {cost}."
        found.append(Finding("sync", f"{sync.where} waits for the device", text, sync.ms or None))
    return found


def _copied(seen: Seen) -> list[Finding]:
    found = []
    for copy in seen.copies:
        if copy.kind == "pageable" and copy.ms >= 0.02 * seen.step:
            text = (
                f"{copy.calls:g} a step, {size(copy.bytes)}: the host waits for each ({copy.ms:.2f} ms), and "
                f"nothing runs beside them. Pin the memory."
            )
            found.append(Finding("copy", "pageable copies to the device", text, copy.ms))
    return found


def _between(seen: Seen) -> list[Finding]:
    """What the script's own code does where the step is in no part that is known."""
    if seen.row("other") < 0.15 * seen.told_ms:
        return []
    found = []
    for line, share in seen.lines:
        if share >= _MUCH:
            text = f'About {share:.0%} of the step, outside of every row but "other".'
            found.append(Finding("code", f"{line} takes its time", text, share * seen.step))
    return found


def _disturbed(seen: Seen) -> list[Finding]:
    """A loader that is no longer waited for also leaves its cores to the step."""
    replayed = seen.trial("replayed")
    if replayed is None or seen.on_gpu or seen.wait_ms >= _MUCH * seen.step or hidden(seen):
        return []
    if seen.step < 1.15 * replayed.ms or not any(loader.workers for loader in seen.loaders):
        return []
    text = (
        f"Nothing waits for data, but while the workers rest a step takes {replayed.ms:.1f} ms instead of "
        f"{seen.step:.1f}: they share its cores."
    )
    return [Finding("loader", "the loader's workers slow the step down", text, seen.step - replayed.ms)]
