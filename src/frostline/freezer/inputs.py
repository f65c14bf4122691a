"""What a row was computed from: one short text for each sample, kept in the store beside its values.

For every raw field that the frozen stages read: size, time and a hash of the ends of a file (with
`paranoid`: of all of it), or a hash of the value. A row whose text differs is computed again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from frostline.errors import FrostlineError
from frostline.execution.call import described
from frostline.fingerprint import FileId, digest, file_id, value_of
from frostline.pipeline import Pipeline
from frostline.store import Field

PREFIX = "_source."
"""How the store's fields that hold these texts begin; the rest says what the texts are made of."""
_AT_ONCE = 4096
_THREADS = 8
_MOST_A_TASK = 32
"""Samples looked at in one task: handing one over takes as long as hashing two numbers."""
_FILE_ID = re.compile(r"\d+ -?\d+ [0-9a-f]+( [0-9a-f]+)?")


@dataclass(frozen=True)
class Inputs:
    """Which raw fields count, and how closely files are looked at."""

    pipeline: Pipeline
    names: tuple[str, ...]
    paranoid: bool = False

    @staticmethod
    def of(pipeline: Pipeline, *, paranoid: bool = False) -> Inputs:
        below = [name for stage in pipeline.frozen for name in stage.writes]
        return Inputs(pipeline, pipeline.raw_needed([*below, *pipeline.cut]), paranoid)

    @property
    def field(self) -> Field:
        """The store's field: what it is made of is its fingerprint."""
        by_version = self.pipeline.source.version is not None
        about = {"reads": [*self.names], "paranoid": self.paranoid, "by_version": by_version}
        return Field((), "str", fingerprint=digest(value_of(about)), provenance=about)

    @property
    def name(self) -> str:
        """Texts made otherwise lie under another name: the old ones stay until the new ones are whole."""
        return PREFIX + str(self.field.fingerprint)[:8]

    def texts(self, places: Sequence[int]) -> Iterator[tuple[int, str | FrostlineError]]:
        """The text of each sample, or why there is none (no such file, not to be read), in order."""
        with ThreadPoolExecutor(_THREADS, "frostline-look") as pool:
            for start in range(0, len(places), _AT_ONCE):
                some = places[start : start + _AT_ONCE]
                size = max(1, min(_MOST_A_TASK, len(some) // (4 * _THREADS)))
                tasks = [some[s : s + size] for s in range(0, len(some), size)]
                for task, texts in zip(tasks, pool.map(self._texts_or_errors, tasks), strict=True):
                    yield from zip(task, texts, strict=True)

    def _texts_or_errors(self, places: Sequence[int]) -> list[str | FrostlineError]:
        return [self._text_or_error(place) for place in places]

    def _text_or_error(self, place: int) -> str | FrostlineError:
        try:
            return self.text(place)
        except FrostlineError as e:
            return e
        except Exception as e:  # noqa: BLE001 - anybody's data set: whatever it raises is told with the sample
            return FrostlineError(described(e))

    def text(self, place: int) -> str:
        source = self.pipeline.source
        if source.version is not None:
            return _text({"version": source.version})
        raw = source.raw(place) if self.names else {}
        return _text({name: self._part(name, raw[name]) for name in self.names})

    def _part(self, name: str, value: Any) -> str:
        if name in self.pipeline.source.paths or (isinstance(value, str) and _is_file(value)):
            return file_id(value, full=self.paranoid).text
        return digest(value_of(value))[:16]


def _is_file(text: str) -> bool:
    """Whether a text names a file: then its content counts too, also where nobody said it was a path."""
    return 0 < len(text) < 4096 and "\0" not in text and "\n" not in text and os.path.isfile(text)


def _text(parts: dict[str, str]) -> str:
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=False)


def changed(old: str, new: str) -> list[str]:
    """The raw fields whose content differs, or is not known to be the same, of those both texts tell of.

    >>> changed('{"x":"12 7 ab","y":"9"}', '{"x":"13 8 cd","y":"9"}')
    ['x']
    >>> changed('{"x":"12 7 ab ffff"}', '{"x":"12 7 ab"}')  # not asked for its full hash now
    []
    """
    before, now = json.loads(old), json.loads(new)
    if before and now and not before.keys() & now.keys():
        return [*now]  # nothing in common, as after `version=` was added: nothing is known to be the same
    return [name for name in before if name in now and _differ(before[name], now[name])]


def same(old: str, new: str) -> bool:
    """Whether two texts tell of the same fields, and none differs."""
    return old == new or (json.loads(old).keys() == json.loads(new).keys() and not changed(old, new))


def unrecorded(old: str, new: str) -> bool:
    """Whether files differ only in that all of their content is hashed now, and was not then.

    >>> unrecorded('{"x":"12 7 ab"}', '{"x":"12 7 ab ffff"}')
    True
    """
    before, now = json.loads(old), json.loads(new)
    pairs = [(before.get(name, ""), now[name]) for name in changed(old, new)]
    return bool(pairs) and all(
        _is_file_id(a) and _is_file_id(b) and not FileId.parse(a).differs(FileId.parse(b)) for a, b in pairs
    )


def _differ(before: str, now: str) -> bool:
    if before == now or not (_is_file_id(before) and _is_file_id(now)):
        return before != now
    was, is_ = FileId.parse(before), FileId.parse(now)
    return bool(was.differs(is_)) or (is_.full is not None and was.full is None)


def _is_file_id(text: str) -> bool:
    """Beside it there are hashes of values, in one word, and versions, which may be any text."""
    return _FILE_ID.fullmatch(text) is not None
