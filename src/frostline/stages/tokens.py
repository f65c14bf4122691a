"""Text to token ids, with the tokenizer of any model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from os import fspath
from typing import Any

import torch
import xxhash
from torch import Tensor

from frostline.errors import UsageError
from frostline.stages import hub

_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class Tokenizer:
    """A string to int64 [length], one entry for each token, without padding.

    >>> Tokenizer("HuggingFaceTB/SmolLM2-135M", max_length=0)
    Traceback (most recent call last):
    ...
    frostline.errors.UsageError: Tokenizer(...) cannot work:
      - max_length is 0; at least 1, or None

    As a stage: `fl.Stage("tokens", Tokenizer("HuggingFaceTB/SmolLM2-135M"), reads="caption")`; the field is
    ragged, and `fl.Ragged.padded` pads a batch of it. The tokenizer is loaded when this is made, so that a
    wrong name shows at once, and again, once, in every process that uses it.
    """

    name: str
    """A name on the Hugging Face hub, or a folder made by `save_pretrained`."""
    max_length: int | None = None
    """Longer texts are cut off at the end, special tokens included. None: never."""
    special_tokens: bool = True
    """Add what the model puts around a text, such as a token for its beginning."""
    digest: str = field(init=False, default="")
    """Of the vocabulary and the rules, since the same name may come to stand for other ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", fspath(self.name))
        if self.max_length is not None and self.max_length < 1:
            raise UsageError(
                "Tokenizer(...) cannot work:",
                problems=[f"max_length is {self.max_length}; at least 1, or None"],
            )
        object.__setattr__(self, "digest", _digest(_loaded(self.name, self.max_length)))

    def __call__(self, text: str) -> Tensor:
        if not isinstance(text, str):
            raise UsageError(f"A Tokenizer takes a string, and got {type(text).__name__}: {text!r:.60}")
        tokenizer = _kept(self.name, self.max_length, self.digest)
        if tokenizer.is_fast:
            # Past transformers' own call, which sets the cut anew each time and fails when two threads do so.
            ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=self.special_tokens).ids
        else:
            cut = {"truncation": True, "max_length": self.max_length} if self.max_length else {}
            ids = tokenizer(text, add_special_tokens=self.special_tokens, **cut)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)


@lru_cache(maxsize=8)
def _kept(name: str, max_length: int | None, digest: str) -> Any:
    """Once for each process; not held by the dataclass, so that a worker is sent a name, no vocabulary."""
    tokenizer = _loaded(name, max_length)
    if _digest(tokenizer) != digest:
        raise UsageError(
            f"The tokenizer {name!r} is not the one that Tokenizer(...) was made with: its files changed in "
            "between. Make the stage anew."
        )
    return tokenizer


def _loaded(name: str, max_length: int | None) -> Any:
    hub.library("transformers", "Tokenizing")
    from transformers import AutoTokenizer

    place = hub.place(name, file=_FILE)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        raise hub.not_found(name, "the tokenizer", e) from e
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        if max_length is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(max_length)
    return tokenizer


def _digest(tokenizer: Any) -> str:
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = repr((type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())))
    return xxhash.xxh3_128_hexdigest(content.encode())
