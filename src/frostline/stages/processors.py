"""What a model's image processor does, from its `preprocessor_config.json`: read, never run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostline.errors import UsageError
from frostline.stages import hub
from frostline.stages.geometry import Size

if TYPE_CHECKING:
    from frostline.stages.pixels import Interpolation

_FILES = ("preprocessor_config.json", "processor_config.json")
"""The second is where transformers 5 keeps it, under "image_processor", when a tokenizer lies beside it."""

_RESAMPLE: dict[object, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_DONE = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"}
"""The steps that are done here; do_convert_rgb is done when decoding."""


@dataclass(frozen=True)
class Recipe:
    """The parameters of `Preprocess`."""

    size: Size | None
    crop: Size | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    interpolation: Interpolation
    rescale: float
    rounding: bool


def recipe(processor: str | PathLike[str] | Mapping[str, object] | object) -> Recipe:
    """From a name, a folder, a configuration or a processor; everything that is missing is listed at once."""
    if isinstance(processor, str | PathLike):
        return _recipe(_read(processor), f"the processor of {fspath(processor)!r}")
    if isinstance(processor, Mapping):
        return _recipe(dict(processor), "this processor configuration")
    to_dict = getattr(processor, "to_dict", None)
    if callable(to_dict):
        return _recipe(dict(to_dict()), f"this {type(processor).__name__}")
    raise UsageError(
        f"Preprocess.of got {type(processor).__name__}; "
        "expected a name, a folder, a configuration dict or an image processor"
    )


def _recipe(config: dict[str, Any], what: str) -> Recipe:
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    problems = [
        f"{name} is on, which Preprocess does not do"
        for name, value in sorted(config.items())
        if name.startswith("do_") and value and name not in _DONE
    ]
    crops = config.get("do_center_crop", "crop_size" in config)
    size = _size(config, "size", problems, square=not crops) if config.get("do_resize", True) else None
    crop = _size(config, "crop_size", problems, square=True) if crops else None
    resample = config.get("resample", 3 if size is None else None)
    if resample not in _RESAMPLE:
        problems.append(f"resample is {resample!r}; 0 (nearest), 1 (lanczos), 2 (bilinear) or 3 (bicubic)")
    normalises = config.get("do_normalize", True)
    mean, std = config.get("image_mean"), config.get("image_std")
    if normalises and not (mean and std):
        problems.append(f"image_mean is {mean} and image_std {std}, but do_normalize is on")
    if problems:
        raise UsageError(f"Preprocess cannot do what {what} does:", problems=problems)
    return Recipe(
        size,
        crop,
        tuple(mean) if normalises and mean else None,
        tuple(std) if normalises and std else None,
        _RESAMPLE[resample],
        float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        rounding=not kind.startswith("DINOv3"),  # it scales floats, after rescaling
    )


def _size(config: dict[str, Any], name: str, problems: list[str], *, square: bool) -> Size | None:
    """`square`: what a bare number means, in the configurations of older models."""
    size = config.get(name)
    if isinstance(size, int):
        return (size, size) if square else size
    if isinstance(size, Mapping):
        given = {key: value for key, value in size.items() if value is not None}
        if given.keys() == {"height", "width"}:
            return int(given["height"]), int(given["width"])
        if given.keys() == {"shortest_edge"}:
            edge = int(given["shortest_edge"])
            return (edge, edge) if name == "crop_size" else edge
    problems.append(f"{name} is {size!r}; a number, height and width, or shortest_edge")
    return None


def _read(name: str | PathLike[str]) -> dict[str, Any]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        there = [folder / file for file in _FILES if (folder / file).is_file()]
        path = str(there[0]) if there else hub.place(name, file=_FILES[0])  # which says what is missing
    else:
        path = _downloaded(hub.place(name))
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:
        raise UsageError(f"{path} is not JSON ({e}). Save the processor again with save_pretrained.") from e
    inner = config.get("image_processor") if isinstance(config, dict) else None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds {type(config).__name__}; expected a JSON object.")
    return inner if isinstance(inner, dict) else config


def _downloaded(name: str) -> str:
    # Reached through a variable, so that an update of the library that only fetches changes no fingerprint.
    library = hub.library("huggingface_hub", "Reading a processor from the hub")
    errors = library.errors
    last: Exception = OSError("it has no processor file")
    for file in _FILES:
        try:
            return str(library.hf_hub_download(name, file))
        except errors.LocalEntryNotFoundError as e:  # no network, and not in the cache
            raise hub.not_found(name, "the image processor of", e) from e
        except errors.EntryNotFoundError as e:
            last = e
        except (errors.HfHubHTTPError, OSError, ValueError) as e:
            raise hub.not_found(name, "the image processor of", e) from e
    raise hub.not_found(name, "the image processor of", last)
