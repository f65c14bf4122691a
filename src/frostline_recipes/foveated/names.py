"""Names of networks, looked at before anything is made: what cannot be one is refused without asking the hub.

Asking it where there is no network takes half a minute of attempts, which a misspelt short name is not worth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frostline.errors import MissingExtra, UsageError


def refuse_unknown(known: Mapping[str, Sequence[str]], given: Mapping[str, str]) -> None:
    """Every name that is no short one, no folder here, and does not look like one on the hub.

    >>> refuse_unknown({"encoder": ["small", "dinov2-s14"]}, {"encoder": "dinov2-s41"})
    Traceback (most recent call last):
    ...
    frostline.errors.UsageError: foveated knows no such network:
      - encoder='dinov2-s41' is no folder here, and names on the hub are owner/name. Known are 'small', \
'dinov2-s14'; did you mean 'dinov2-s14'?
    """
    problems = [_problem(what, name, known[what]) for what, name in given.items()]
    if any(problems):
        raise UsageError("foveated knows no such network:", problems=[p for p in problems if p])


def _problem(what: str, name: str, known: Sequence[str]) -> str:
    if name in known or (name and Path(name).expanduser().is_dir()):
        return ""
    near = get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return f"{what}={name!r}: there is no such folder{meant}"
    if "/" in name:
        return ""
    listed = f"Known are {', '.join(map(repr, known))}{meant}"
    return f"{what}={name!r} is no folder here, and names on the hub are owner/name. {listed}"


def configuration(what: str, name: str, place: str) -> Any:
    """The configuration of a network of transformers, from its folder or the hub; no weights are loaded."""
    try:
        from transformers import AutoConfig
    except ImportError as e:
        raise MissingExtra.needed(f"{what}={name!r}", package="transformers", extra="hf") from e
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise not_found(what, name, place, e) from e


def normalisation(what: str, name: str, place: str) -> tuple[Sequence[float], Sequence[float]] | None:
    """Mean and deviation of a network's pictures, as `preprocessor_config.json` beside it tells; None: it is
    not there, or tells none."""
    from transformers.utils import cached_file

    called = "preprocessor_config.json"
    quiet = {f"_raise_exceptions_for_{of}": False for of in ("missing_entries", "connection_errors")}
    file = Path(place) / called if Path(place).is_dir() else cached_file(place, called, **quiet)
    if file is None or not Path(file).is_file():
        return None
    try:
        told = json.loads(Path(file).read_text("utf-8"))
        mean, std = told.get("image_mean"), told.get("image_std")
        if mean is None and std is None:
            return None
        if not all(len(some) == 3 and all(isinstance(x, int | float) for x in some) for some in (mean, std)):
            raise ValueError(f"image_mean {mean!r} and image_std {std!r}: expected three numbers each")
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise UsageError(f"{what}={name!r}: {called} cannot be read: {e}") from e
    return tuple(mean), tuple(std)


def autoencoder(what: str, name: str, place: str) -> dict[str, Any]:
    """The configuration of an autoencoder of diffusers, likewise; a pipeline's folder has it in `vae`."""
    for package in ("diffusers", "transformers"):
        if find_spec(package) is None:
            raise MissingExtra.needed(f"{what}={name!r}", package=package, extra="hf")
    from transformers.utils import cached_file

    folder = _inside(place)
    try:
        file = folder / "config.json" if folder.is_dir() else cached_file(place, "config.json")
        found: dict[str, Any] = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise not_found(what, name, place, e) from e
    return found


def _inside(place: str) -> Path:
    """Where an autoencoder's files are."""
    return Path(place) / "vae" if (Path(place) / "vae" / "config.json").is_file() else Path(place)


def refuse_without_weights(given: Mapping[str, str]) -> None:
    """Folders with no weights: those are loaded last, when everything is frozen, and should show before."""
    problems = []
    for what, name in given.items():
        folder = _inside(name) if what == "vae" else Path(name)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            there = ", ".join(sorted(path.name for path in folder.iterdir()))
            problems.append(f"{what}={name!r}: no *.safetensors is in the folder, only {there}")
    if problems:
        raise UsageError("Networks without weights; expected what save_pretrained makes:", problems=problems)


def not_found(what: str, name: str, place: str, error: Exception) -> UsageError:
    """Why it could not be loaded, and what to do about it."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    called = f"{what}={name!r}" + (f" ({place} on the hub)" if place != name else "")
    if Path(place).expanduser().is_dir():
        return UsageError(
            f"Cannot load {called} from its folder: {first}. Expected a folder made by save_pretrained."
        )
    return UsageError(
        f"Cannot load {called}: {first}. Check the name and the network. Where there is no network, download "
        f"it elsewhere and give {what}= its folder, or take {what}=small, which comes with frostline."
    )
