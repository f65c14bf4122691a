"""Small facts that are kept between processes: one JSON file each, under the user's cache folder.

Only what can be computed again is kept here. A file that is missing, damaged or of another version is as
good as none, and a folder that cannot be written is no error.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

_VERSION = 1


def cache_folder() -> Path:
    """`$FROSTLINE_CACHE`, or `$XDG_CACHE_HOME/frostline`, or `~/.cache/frostline`."""
    given = os.environ.get("FROSTLINE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "frostline"


def recall(kind: str, key: str) -> Any:
    """What was kept under this key; None when there is nothing, or nothing readable."""
    try:
        found = json.loads(_file(kind, key).read_bytes())
    except (OSError, ValueError):  # ValueError: not UTF-8, or not JSON
        return None
    if not isinstance(found, dict) or found.get("version") != _VERSION or found.get("key") != key:
        return None
    # A damaged file can still be JSON; the digest tells.
    return found.get("value") if found.get("check") == _check(found.get("value")) else None


def keep(kind: str, key: str, value: Any) -> None:
    """Keeps a JSON value. Written aside and renamed: a reader sees all of it or nothing."""
    path = _file(kind, key)
    entry = {"version": _VERSION, "key": key, "value": value, "check": _check(value)}
    with suppress(OSError):  # no home, no room, no permission: it is computed again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entry, file)
            os.replace(aside, path)
        except OSError:
            Path(aside).unlink(missing_ok=True)
            raise


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{xxhash.xxh3_128_hexdigest(key.encode())}.json"


def _check(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
