"""Finding what a name stands for: a folder on this machine or a repository on the Hugging Face hub.

Nothing a repository brings is run (`trust_remote_code=False`), and weights are read from safetensors files
only, never from pickled ones. A name that leads nowhere is answered with those that come close.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import MissingExtra, UsageError

KNOWN = (
    "facebook/dinov2-small",
    "facebook/dinov2-base",
    "facebook/dinov2-large",
    "facebook/dinov2-giant",
    "facebook/dinov2-with-registers-small",
    "facebook/dinov2-with-registers-base",
    "facebook/dinov3-vits16-pretrain-lvd1689m",
    "facebook/dinov3-vits16plus-pretrain-lvd1689m",
    "facebook/dinov3-vitb16-pretrain-lvd1689m",
    "facebook/dinov3-vitl16-pretrain-lvd1689m",
    "google/siglip-base-patch16-224",
    "google/siglip-so400m-patch14-384",
    "google/siglip2-base-patch16-224",
    "google/siglip2-so400m-patch14-384",
    "google/vit-base-patch16-224",
    "google/vit-base-patch16-224-in21k",
    "openai/clip-vit-base-patch16",
    "openai/clip-vit-base-patch32",
    "openai/clip-vit-large-patch14",
    "stabilityai/sd-vae-ft-mse",
    "madebyollin/taesd",
)
"""Offered as close matches, without asking the hub. Any other name works as well."""


def library(name: str, what: str) -> Any:
    """transformers, diffusers or huggingface_hub, or the error that names the extra."""
    try:
        return import_module(name)
    except ImportError as e:
        raise MissingExtra.needed(what, package=name, extra="hf") from e


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bar that transformers draws while it reads a file of weights, in a second as a rule."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def close_to(name: str, among: Iterable[str]) -> str:
    """ " Did you mean …?", or nothing.

    >>> close_to("vit_smal", ["vit_small", "resnet50"])
    " Did you mean 'vit_small'?"
    """
    found = get_close_matches(name, list(among), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def place(name: str | PathLike[str], *, file: str = "config.json") -> str:
    """The name as the libraries take it: a folder that exists and holds `file`, or a name for the hub."""
    text = fspath(name)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        if not (folder / file).is_file():
            inside = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise UsageError(
                f"The folder {text!r} has no {file}; it holds {inside}. Give the model's own folder."
            )
        return str(folder)
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        beside = [p for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        matches = close_to(folder.name, [p.name for p in beside])
        raise UsageError(f"There is no folder {text!r}, and no name on the hub looks like that.{matches}")
    return text


def not_found(name: str, what: str, error: Exception) -> UsageError:
    """`name` could not be loaded: why, and what comes close among known names and folders here."""
    here = [p.name for p in Path.cwd().iterdir() if p.is_dir() and not p.name.startswith(".")]
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UsageError(
        f"Cannot load {what} {name!r}: it is no folder here, and the hub did not give it ({first})."
        f"{close_to(name, [*KNOWN, *here])} Check the name and the network, or give a folder made by "
        "save_pretrained."
    )


def refuse_pickled(folder: str) -> None:
    """A local folder whose weights are pickled only; said here, since the libraries' own message is long."""
    files = {p.name for p in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    pickled = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickled and not any(name.endswith(".safetensors") for name in files):
        raise UsageError(
            f"The folder {folder!r} holds its weights as {pickled[0]!r}, a pickled file, which frostline "
            "never opens. Load it where you trust it, and save it again with save_pretrained(…), which "
            "writes safetensors."
        )


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype:
    """
    >>> dtype_named("bfloat16"), dtype_named(None)
    (torch.bfloat16, torch.float32)
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.float32
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype is {dtype!r}; a floating-point type, such as 'float32' or 'bfloat16'")
    return found


def one_source(what: str, name: object, config: object, seed: int | None) -> None:
    """Either weights by name or a configuration and a seed: never random weights by accident."""
    problems = []
    if (name is None) == (config is None):
        problems.append("give a name or folder, or config={…} for seeded random weights, and not both")
    if seed is not None and config is None:
        problems.append(
            f"seed is {seed}, but the weights of {name!r} are not random; seed goes with config={{…}}"
        )
    if problems:
        raise UsageError(f"{what} cannot load:", problems=problems)


class seeded:
    """Random numbers from `seed` inside, and the generator as it was afterwards."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed or 0
        self._fork = torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def frozen(module: nn.Module) -> None:
    """In eval mode, with nothing to train."""
    module.eval().requires_grad_(False)
