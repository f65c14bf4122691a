"""What a person should know of a run, each with its figures."""

from __future__ import annotations

from collections.abc import Sequence

from frostline.profiler.remedies import often_called, prefix_known, storable
from frostline.profiler.verdict import MUCH, STARTS, Seen, begins, hidden, own_lines, shares
from frostline.results import Finding, Repeat
from frostline.wording import size


def findings(seen: Seen, repeats: Sequence[Repeat]) -> tuple[Finding, ...]:
    """What takes most of the step first, what takes no time last."""
    if not seen.step:
        return ()
    found = [
        *_starting(seen), *_loaders(seen), *_often(seen), *_frozen(seen), *_repeated(seen, repeats),
        *_compiled(seen), *_waits(seen), *_copied(seen), *_disturbed(seen), *_between(seen),
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda finding: -(finding.ms or 0.0)))


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
    if shares(seen)["input"] < MUCH:
        return []
    if seen.wait_ms < MUCH * seen.step and hidden(seen):
        return _hidden(seen)
    for loader in seen.loaders:
        if loader.wait_ms < MUCH * seen.step:
            continue
        text = f"{loader.wait_ms:.1f} ms a step are spent waiting for it"
        if loader.prepare_ms is not None:
            text += f"; one batch takes {loader.prepare_ms:.1f} ms to prepare"
            if loader.decode_ms:
                text += f", {loader.decode_ms / loader.prepare_ms:.0%} of that decoding"
        title = f"{loader.name} {'is waited for' if loader.workers else 'works while the step waits'}"
        if loader.needed is not None and loader.needed > loader.workers:
            title = f"{loader.name} cannot keep up"
            text += f"; {loader.needed} workers would keep up with the step, there are {loader.workers}"
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
        if max(module.ms, module.prefix_ms) < MUCH * seen.told_ms:
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
        if not repeat.repeats or repeat.ms is None or repeat.ms < MUCH * seen.told_ms:
            continue
        items = repeat.what.startswith("items of ")
        if items and shares(seen)["input"] < MUCH:  # prepared in time
            continue
        text = f"{repeat.repeats:,} of {repeat.seen:,} inputs ({repeat.share:.1%}) had been seen before"
        text += f"; that took {repeat.ms:.1f} ms a step"
        if items:
            text += ". What is the same each time can be stored; random augmentation must not be"
        if repeat.epochs is not None:
            room = f" ({size(repeat.stored)})" if repeat.stored is not None else ""
            text += f". Storing the results{room} pays in trainings of more than {repeat.epochs:.1f} epochs"
        title = f"{repeat.what} {'are prepared' if items else 'does its work'} again"
        found.append(Finding("repeat", title, f"{text}.", repeat.ms))
    return found


def _compiled(seen: Seen) -> list[Finding]:
    if not any(module.compiled for module in seen.modules):
        return []
    found = []
    for module in seen.modules:
        if not module.compiled and module.depth == 0 and module.ms >= MUCH * seen.told_ms:
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
    found = []
    for line, share in own_lines(seen):
        text = f'About {share:.0%} of the step, outside of every row but "other".'
        found.append(Finding("code", f"{line} takes its time", text, share * seen.step))
    return found


def _disturbed(seen: Seen) -> list[Finding]:
    """A loader that is no longer waited for also leaves its cores to the step. On one core each worker takes
    as much as the step at most; a batch that saves more is unlike the others."""
    replayed = seen.trial("replayed")
    if replayed is None or seen.on_gpu or seen.wait_ms >= MUCH * seen.step or hidden(seen):
        return []
    workers = sum(loader.workers for loader in seen.loaders)
    if not 1.15 <= seen.step / replayed.ms <= 1 + workers:
        return []
    text = (
        f"Nothing waits for data, but while the workers rest a step takes {replayed.ms:.1f} ms instead of "
        f"{seen.step:.1f}: they share its cores."
    )
    return [Finding("loader", "the loader's workers slow the step down", text, seen.step - replayed.ms)]
