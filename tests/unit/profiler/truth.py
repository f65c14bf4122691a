"""What is planted in each script under scripts/, and what a true profile says of it.

`run` profiles a script as a user would; a plant's `wrong` lists where the profile disagrees with the plant.
With `tight` the figures that a busy machine disturbs are judged too: benchmarks/profile.py does, the tests
do not.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from frostline.results import Loader, ModuleUse, Profile, Sync

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
SOURCE = HERE.parents[2] / "src"
ALARMS = frozenset(
    ("repeat", "frozen", "prefix", "calls", "batch", "compile", "sync", "copy", "loader", "memory")
)
"""Kinds of findings that ask somebody to do something."""


@dataclass(frozen=True)
class Seen:
    """A profile, and how strictly it is judged."""

    profile: Profile
    device: str
    tight: bool

    def about(self, what: str, value: float | None, planted: float, share: float) -> Iterator[str]:
        """`value` has to be within `share` of what was planted; only a tight check asks for it."""
        if value is None:
            yield f"{what}: nothing said, planted {planted:.4g}"
        elif self.tight and abs(value / planted - 1) > share:
            yield f"{what}: {value:.4g}, planted {planted:.4g} (±{100 * share:.0f} %)"


@dataclass(frozen=True)
class Plant:
    name: str
    planted: str
    """The cause, in words."""
    check: Callable[[Seen], Iterator[str]]
    boundary: str = "SGD.step"
    verdict: str = "compute-bound"
    on_cuda: str = ""
    """The verdict there, if it is another."""
    findings: frozenset[str] = frozenset()
    """Kinds of findings that are true of the script; any other alarm is a false one."""
    named: str = ""
    """The kind of finding that has to be there."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    args: tuple[str, ...] = field(default=())
    steady: tuple[str, ...] = field(default=())
    """More of them, on a CPU that has other work to do: the tests'."""

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.name}.py"

    def wrong(self, profile: Profile, device: str, *, tight: bool) -> list[str]:
        """Where the profile disagrees with the plant."""
        return [*self._always(profile, device, tight), *self.check(Seen(profile, device, tight))]

    def _always(self, profile: Profile, device: str, tight: bool) -> Iterator[str]:
        expected = self.on_cuda if device == "cuda" and self.on_cuda else self.verdict
        if profile.verdict.kind != expected:
            yield f"verdict: {profile.verdict.kind} ({profile.verdict.text}), planted {expected}"
        if self.boundary not in profile.boundary:
            yield f"boundary: {profile.boundary}, planted {self.boundary}"
        kinds = [finding.kind for finding in profile.findings]
        if self.named and self.named not in kinds:
            yield f"findings: {kinds}, {self.named!r} is missing"
        for finding in profile.findings:
            if finding.kind in ALARMS - self.findings - {self.named}:
                yield f"false alarm: {finding.kind}, {finding.title}"
        yield from _adds_up(profile, tight)


def _adds_up(profile: Profile, tight: bool) -> Iterator[str]:
    if profile.attributed is None or not profile.rows or profile.reconciled is None:
        yield "nothing attributed"
        return
    total = sum(row.ms for row in profile.rows)
    if abs(total / profile.attributed.ms - 1) > 0.01:
        yield f"rows add up to {total:.2f} ms, pass B's step is {profile.attributed.ms:.2f} ms"
    if over := [row.name for row in profile.rows if row.share > 1.001]:
        yield f"more than the whole step: {over}"
    if odd := [r.name for r in profile.remedies if not 1 <= r.bound < 1000]:
        yield f"remedies with a bound that means nothing: {odd}"
    if tight and abs(profile.reconciled) > 0.05:
        yield f"rows and pass A differ by {100 * profile.reconciled:+.1f} %"


def run(
    plant: Plant,
    out: Path,
    *,
    device: str = "cpu",
    steps: int = 50,
    warmup: int = 10,
    timeout: float = 500,
    steady: bool = False,
) -> tuple[Profile, str]:
    """`frostline profile` on the plant's script: what it found and what it printed."""
    options = ["--steps", str(steps), "--warmup", str(warmup), "--out", str(out)]
    script = [sys.executable, str(plant.script), "--device", device, *plant.args]
    script += plant.steady if steady else ()
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "profile", *options, "--", *script],
        capture_output=True, text=True, timeout=timeout, env=environment(), check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{plant.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return Profile.read(out / "profile.json"), done.stdout


def environment() -> dict[str, str]:
    """One thread a process, as two processes share two cores; frostline from this tree."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def load(name: str) -> ModuleType:
    """A script as a module: its constants are what it plants."""
    spec = importlib.util.spec_from_file_location(f"planted_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))  # as where it is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def the_module(profile: Profile, word: str) -> ModuleUse:
    """The outermost module with this word in its name or class."""
    found = [m for m in profile.modules if word in m.name or word in m.kind]
    return min(found, key=lambda m: m.depth, default=ModuleUse(name="", kind="", calls=0.0, ms=0.0))


def the_loader(profile: Profile) -> Loader:
    """The one that most is taken from."""
    none = Loader(name="", workers=-1, batch_size=None, batches=None, calls=0.0, wait_ms=0.0)
    return max(profile.loaders, key=lambda one: one.calls, default=none)


def loader_bound(profile: Profile) -> float | None:
    """How much faster the step gets at most, by the remedy for the loader."""
    bounds = [r.bound for r in profile.remedies if "loader" in f"{r.name} {r.what}".lower()]
    return max(bounds, default=None)


def _decode(seen: Seen) -> Iterator[str]:
    loader, script = the_loader(seen.profile), load("slow_decode")
    if loader.workers != 1 or loader.batches != script.IMAGES // script.BATCH:
        yield f"loader: {loader.workers} workers, {loader.batches} batches"
    share = (loader.decode_ms or 0.0) / (loader.prepare_ms or 1.0)
    if not 0.6 < share <= 1.0:
        yield f"decoding is {100 * share:.0f} % of the preparation, planted: nearly all"
    decoded = [r for r in seen.profile.repeats if "decode" in r.what]
    if not decoded:
        yield "no repeats of decoding"
    for repeat in decoded:
        different = repeat.seen - repeat.repeats
        if repeat.seen < 2 * script.IMAGES or different != script.IMAGES:
            yield f"{different} different files of {repeat.seen} decoded, planted {script.IMAGES}"


def _workers(seen: Seen) -> Iterator[str]:
    loader = the_loader(seen.profile)
    ratio = (loader.prepare_ms or 0.0) / rest(seen)
    # On a machine with other work to do the rest of the step is longer than planted.
    right = {2} if seen.tight else {math.ceil(0.85 * ratio), math.ceil(1.15 * ratio)}
    if loader.workers != 1 or loader.needed not in right:
        yield f"loader: {loader.workers} workers, {loader.needed} needed; planted 1 and {right}"
    yield from seen.about("preparation", loader.prepare_ms, 1000 * load("few_workers").PREPARE_S, 0.15)
    yield from _bound(seen)


def _slow_loader(seen: Seen) -> Iterator[str]:
    loader = the_loader(seen.profile)
    planted = 1000 * load("input_bound").PREPARE_S
    if loader.workers != 0:
        yield f"loader: {loader.workers} workers, planted 0"
    yield from seen.about("preparation", loader.prepare_ms, planted, 0.15)
    yield from seen.about("waiting for the loader", loader.wait_ms, planted, 0.15)
    yield from _bound(seen)


def _bound(seen: Seen) -> Iterator[str]:
    """Roughly what is left without the wait; what it is exactly, benchmarks/profile.py measures."""
    bound = seen.profile.wall.ms / rest(seen)
    yield from seen.about("bound of the loader's remedy", loader_bound(seen.profile), bound, 0.25)


def rest(seen: Seen) -> float:
    """What is left of the step without the wait. On a GPU, which works while the host waits: what it does."""
    busy = seen.profile.machine.busy
    if seen.device == "cuda" and busy:
        return busy * seen.profile.wall.ms
    return seen.profile.wall.ms - the_loader(seen.profile).wait_ms


def _copies(seen: Seen) -> Iterator[str]:
    script = load("pageable_copies")
    planted = script.ROWS * script.WIDTH * 4
    pageable = [c for c in seen.profile.copies if c.kind == "pageable" and c.blocking]
    if not pageable or abs(sum(c.bytes for c in pageable) / planted - 1) > 0.01:
        yield f"copies: {seen.profile.copies}, planted {planted} pageable bytes a step"


def _syncs(seen: Seen) -> Iterator[str]:
    lines = (SCRIPTS / "item_in_loop.py").read_text(encoding="utf-8").splitlines()
    planted = [i for i, line in enumerate(lines, 1) if "# sync" in line]
    for line in planted:
        calls = sum(s.calls for s in at_line(seen.profile, f"item_in_loop.py:{line}"))
        if abs(calls - 1) > 0.01:
            yield f"line {line}: {calls:.2f} syncs a step, planted 1"
    if seen.device == "cpu" and any(s.ms for s in seen.profile.syncs):
        yield "syncs that cost time on a CPU"


def at_line(profile: Profile, place: str) -> list[Sync]:
    return [sync for sync in profile.syncs if sync.where.endswith(place)]


def _eleven(seen: Seen) -> Iterator[str]:
    calls = the_module(seen.profile, "LanguageModel").calls
    if abs(calls - 11) > 0.01:
        yield f"{calls:.2f} calls of LanguageModel a step, planted 11"
    if not any("11" in f.title + f.text for f in seen.profile.findings if f.kind == "calls"):
        yield "no finding says 11"


def _repeats(seen: Seen) -> Iterator[str]:
    script = load("repeated_images")
    encoder = the_module(seen.profile, "Encoder")
    if not encoder.frozen:
        yield f"the encoder is not found frozen: {encoder}"
    found = [r for r in seen.profile.repeats if "encoder" in r.what.lower()]
    if not found:
        yield f"no repeats of the encoder: {[r.what for r in seen.profile.repeats]}"
    for repeat in found:
        planted = script.planted_repeats(repeat.seen // script.BATCH)
        if repeat.seen % script.BATCH or repeat.seen < 5 * script.BATCH:
            yield f"{repeat.seen} images looked at: not whole steps, or too few"
        elif abs(repeat.share - planted / repeat.seen) > 0.01:
            yield f"{repeat.repeats} of {repeat.seen} images are repeats, planted {planted}"


def _prefix(seen: Seen) -> Iterator[str]:
    found = [m for m in seen.profile.modules if m.prefix]
    if not found or not all(m.prefix.endswith("blocks.5") for m in found):
        yield f"frozen up to {[m.prefix for m in found]}, planted blocks.5"
    half = the_module(seen.profile, "VisionTransformer").ms / 2  # its blocks are of one size
    yield from seen.about(
        "the frozen part's time", max((m.prefix_ms for m in found), default=None), half, 0.2
    )


def _six(seen: Seen) -> Iterator[str]:
    encoder = the_module(seen.profile, "SupportEncoder")
    if abs(encoder.calls - 6) > 0.01 or encoder.rows != (1,):
        yield f"SupportEncoder: {encoder.calls:.2f} calls with {encoder.rows} rows, planted 6 with (1,)"


def _compile(seen: Seen) -> Iterator[str]:
    if not any(m.compiled for m in seen.profile.modules):
        yield "nothing is found compiled"
    support = the_module(seen.profile, "support_encoder")
    if not support.name or support.compiled:
        yield f"support_encoder: {support}, planted: not compiled"
    if not any("support" in f.title + f.text for f in seen.profile.findings if f.kind == "compile"):
        yield "no finding names the support encoder"


def _healthy(seen: Seen) -> Iterator[str]:
    if seen.tight and (large := [r.name for r in seen.profile.remedies if r.bound > 1.1]):
        yield f"remedies for a healthy script: {large}"
    epoch = seen.profile.epoch
    if epoch is None or epoch.steps != the_loader(seen.profile).batches:
        yield f"epoch: {epoch}"


def _launch(seen: Seen) -> Iterator[str]:
    trials = {t.name: t.ms for t in seen.profile.trials}
    if seen.tight and not 0.9 <= trials.get("half", 0.0) / trials.get("compute", 1.0) <= 1.1:
        yield f"half the batch does not take the time of the whole one: {trials}"
    if seen.profile.machine.busy is None or seen.profile.machine.busy > 0.6:
        yield f"the GPU is busy {seen.profile.machine.busy} of the time"


def _inference(seen: Seen) -> Iterator[str]:
    if seen.profile.samples != load("inference").BATCH:
        yield f"{seen.profile.samples} samples a step, planted {load('inference').BATCH}"
    if any(r.repeats for r in seen.profile.repeats) or any("stor" in r.name for r in seen.profile.remedies):
        yield f"to be stored, though all come once: {seen.profile.repeats}, {seen.profile.remedies}"


def _closure(seen: Seen) -> Iterator[str]:
    rows = {
        kind: sum(r.ms for r in seen.profile.rows if r.kind == kind)
        for kind in ("forward", "backward", "optimizer")
    }
    if not 0 < rows["forward"] < rows["backward"] or rows["optimizer"] > rows["backward"]:
        yield f"forward and backward are not told apart from the optimiser: {rows}"


def _accumulates(seen: Seen) -> Iterator[str]:
    script, loader = load("grad_accum"), the_loader(seen.profile)
    calls = the_module(seen.profile, "Sequential").calls
    if abs(loader.calls - script.MICRO) > 0.1 or abs(calls - script.MICRO) > 0.1:
        yield f"{loader.calls:.2f} batches and {calls:.2f} forwards a step, planted {script.MICRO}"
    if seen.profile.samples != script.MICRO * script.BATCH:
        yield f"{seen.profile.samples} samples a step, planted {script.MICRO * script.BATCH}"
    if seen.profile.epoch is None or abs(seen.profile.epoch.steps - 100) > 0.5:
        yield f"epoch: {seen.profile.epoch}, planted 100 steps"


_ADAM, _CUDA, _NEEDS = "AdamW.step", ("cuda",), frozenset
PLANTS = (
    Plant("slow_decode", "decoding in the loader", _decode, _ADAM, "input-bound",
          findings=_NEEDS({"repeat", "copy"}), named="loader"),
    Plant("few_workers", "1 worker where 2 keep up", _workers, verdict="input-bound",
          findings=_NEEDS({"copy"}), named="loader", steady=("--asleep",)),
    Plant("input_bound", "50 ms of preparation a batch", _slow_loader, verdict="input-bound",
          findings=_NEEDS({"copy"}), named="loader", steady=("--asleep",)),
    Plant("pageable_copies", "pageable copies that block", _copies, verdict="transfer-bound",
          findings=_NEEDS({"sync"}), named="copy", devices=_CUDA),
    Plant("item_in_loop", ".item(), float(), bool() a step", _syncs, on_cuda="sync-bound",
          findings=_NEEDS({"sync"})),
    Plant("eleven_forwards", "11 forwards where 2 suffice", _eleven, _ADAM,
          findings=_NEEDS({"repeat"}), named="calls"),
    Plant("repeated_images", "frozen encoder, 16 of 20 images repeat", _repeats, _ADAM,
          findings=_NEEDS({"frozen", "copy"}), named="repeat"),
    Plant("partly_frozen", "blocks 0–5 of 12 frozen", _prefix, _ADAM, named="prefix"),
    Plant("six_calls", "6 calls with a batch of 1", _six, _ADAM,
          findings=_NEEDS({"calls"}), named="batch"),
    Plant("outside_compile", "half of it outside the compiled forward", _compile, _ADAM, named="compile"),
    Plant("healthy", "nothing", _healthy),
    Plant("launch_bound", "200 tiny layers", _launch, verdict="launch-bound", devices=_CUDA),
    Plant("inference", "no optimiser", _inference, "ImageEncoder", findings=_NEEDS({"frozen", "copy"})),
    Plant("closure", "backward within optimizer.step", _closure),
    Plant("grad_accum", "4 batches a step", _accumulates, findings=_NEEDS({"copy"})),
)  # fmt: skip
