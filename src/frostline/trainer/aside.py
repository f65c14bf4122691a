"""Folders that are written aside and put in their place by a rename.

Beside `step-00000120` there may be `.step-00000120.<pid>.tmp` (being written, or being deleted) and, for the
moment of replacing one, `.step-00000120.<pid>.old`. A killed writer leaves them; the next one clears up.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

import psutil

from frostline.store.disk import sync_folder

log = logging.getLogger("frostline")

_ASIDE = re.compile(r"\.(?P<place>step-\d{8,})\.(?P<pid>\d+)\.(?P<kind>tmp|old)")


def name(place: Path, kind: str) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.{kind}")


def put(written: Path, place: Path) -> None:
    """`written` becomes `place`. One that is there stays, aside, until the new one is in its place."""
    old = name(place, "old")
    if place.exists():
        os.rename(place, old)
    try:
        os.rename(written, place)
    except OSError:
        if old.exists():
            os.rename(old, place)
        raise
    sync_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)  # what stays of it is cleared up by `recover`


def remove(place: Path) -> None:
    """Out of sight first: a killed deletion leaves nothing that looks like a damaged checkpoint."""
    gone = name(place, "tmp")
    os.rename(place, gone)
    shutil.rmtree(gone)


def recover(folder: Path) -> None:
    """Clear up after dead writers: what one had just taken out of its place goes back, the rest goes."""
    for path in sorted(folder.iterdir()):
        found = _ASIDE.fullmatch(path.name)
        if not found or _writing(int(found["pid"]), path):
            continue
        place = folder / found["place"]
        if found["kind"] == "old" and not place.exists():
            os.rename(path, place)
            log.warning("%s is back in its place: a writer was killed while it replaced it.", place)
        else:
            shutil.rmtree(path)
            log.info("Removed %s, which a writer that was killed left.", path)


def _writing(pid: int, path: Path) -> bool:
    """Whether that process may still be at it. A number is given again: to us, or to one that began later."""
    if pid == os.getpid():
        return False
    try:
        return psutil.Process(pid).create_time() <= path.stat().st_mtime
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def candidates(folder: Path) -> list[Path]:
    """Every folder that may be a checkpoint, also one that a killed writer took out of its place."""
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        aside = _ASIDE.fullmatch(path.name)
        if (re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()) or (
            aside and aside["kind"] == "old" and not (folder / aside["place"]).exists()
        ):
            found.append(path)
    return found
