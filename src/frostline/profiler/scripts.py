"""`frostline profile -- COMMAND`: the command runs, what its processes wrote becomes a profile."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from frostline.errors import ProfileFailed
from frostline.profiler.launch import Ran, Settings, launch
from frostline.profiler.reading import read
from frostline.report import html
from frostline.results import Profile


def profile_script(command: Sequence[str], settings: Settings, out: Path) -> tuple[Profile, int]:
    """The profile of somebody's command, and 1 where the command failed by itself."""
    ran = launch(command, settings, out)
    if not ran.processes:
        raise ProfileFailed(_why_not(ran))
    found = read(ran, out)
    ended = ran.processes[0]["ended"]
    if ran.status and ended == "kept going":
        told = f"the script failed after all steps were seen, with status {ran.status}"
        found = dataclasses.replace(found, notes=(*found.notes, told))
    if ran.status and ended == "stopped" and ran.torches > 1:
        told = f"after a process was stopped, the command ended with status {ran.status}"
        hint = "where others need its results, --keep-going lets it run to its end"
        found = dataclasses.replace(found, notes=(*found.notes, f"{told}; {hint}"))
    mine = f"trace-{ran.processes[0]['pid']}.json"
    keep(found, out, [path for path in ran.traces if path.name == mine])
    return found, 1 if ran.status and ended != "stopped" else 0


def keep(profile: Profile, out: Path, traces: Sequence[Path] = ()) -> None:
    profile.write(out / "profile.json")
    (out / "report.html").write_text(html.page(profile), encoding="utf-8")
    if traces:
        shutil.copyfile(traces[0], out / "trace.json")


def _why_not(ran: Ran) -> str:
    told = f"`{shlex.join(ran.command)}` gave no profile"
    end = f" It ended with status {ran.status}." if ran.status else ""
    if not ran.reached:
        return (
            f"{told}: no Python in it could be reached.{end} The profiler gets in by PYTHONPATH; a program "
            f"that is not Python, or `python -I`, `-S` or `-E`, cannot be profiled. A script that sets "
            f"PYTHONPATH has to keep what is there: PYTHONPATH=src:$PYTHONPATH."
        )
    if not ran.torches:
        ran_by = shutil.which(ran.command[0])
        other = f" It was run by {ran_by}; this frostline belongs to {sys.executable}." if ran_by else ""
        other = other if ran.status and ran_by != sys.executable else ""
        return (
            f"{told}: torch was never imported.{end}{other} What can be profiled is a training with PyTorch."
        )
    seen = "written down before it was killed" if ran.status < 0 else "taken"
    return (
        f"{told}: torch was imported, but no step was {seen}.{end} A step ends with optimizer.step() or, in "
        f"a loop without one, with the outermost module's call; a few of them are needed."
    )
