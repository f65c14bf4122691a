"""Clips with their captions, as a source: a folder, a pattern or a list, filtered by how long they last.

How long comes from a clip's header, or from its packets where that is silent; nothing is decoded. Files that
cannot be opened stay in: freezing quarantines them and says why.
"""

from __future__ import annotations

import glob
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import frostline as fl
from frostline import stages
from frostline.errors import MissingExtra, UsageError
from frostline_recipes.foveated import lists
from frostline_recipes.foveated.lists import Clip
from frostline_recipes.foveated.splits import SPLITS, divided

VIDEO = (
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".ogv", ".flv",
    ".wmv", ".3gp",
)  # fmt: skip
"""What counts as a clip in a folder; a pattern takes what it matches."""
_TEXT = (".txt", ".lst", ".list")
"""How people call a text file of paths."""
_THREADS, _AT_ONCE, _SLACK_S = 16, 256, 0.001
"""Threads that open files, how many files they are given at a time, and what headers round."""
_TELL_S = 5.0
"""How often it is said how many were opened: a hundred thousand take minutes."""
_UNTOLD = -1.0
"""Seconds of a clip that can be opened, and that neither its header nor its packets tell."""
log = logging.getLogger("frostline")


def clips(
    videos: str,
    *,
    captions: str | None = None,
    min_s: float = 0.0,
    max_s: float = math.inf,
    limit: int | None = None,
    need_captions: bool = False,
    divide: bool = False,
) -> fl.Source:
    """Clips that last min_s…max_s: fields key, path, duration_s, and caption and split where they are known.

    videos:   a folder, a pattern such as 'clips/**/*.mp4', or a list (.json, .jsonl, .csv, .tsv, .parquet)
              with a column path, video or file, or WebVid's videoid and page_dir: paths below its folder.
    captions: a list for clips whose captions are not in `videos`. A folder's own captions.csv (.json …) is
              found by itself.
    limit:    at most so many clips, of each split its share.
    divide:   name splits also where nobody does, if these are so few clips that one would be empty.

    A clip that cannot be opened stays in, with duration_s 0, and so does one whose header tells none.
    """
    _check(videos, min_s, max_s, limit)
    videos, captions = os.path.expanduser(videos), captions and os.path.expanduser(captions)
    found = _listed(videos, need_captions and not captions) if _is_list(videos) else _files(videos)
    found = _with_captions(found, captions, need_captions)
    kept = _within(found, min_s, max_s, limit)
    told = [row for row, _ in kept]
    if need_captions:
        _refuse_missing(found, told)
    _refuse_part_of_splits(found, told)
    if divide and not any(row.split for row in told):
        kept = _divided(kept)
        told = [row for row, _ in kept]
    extra = [name for name in ("caption", "split") if any(getattr(row, name) for row in told)]
    rows = [
        {
            "key": _key(row), "path": row.path, "duration_s": max(0.0, s),
            **{name: getattr(row, name) for name in extra},
        }
        for row, s in kept
    ]  # fmt: skip
    return replace(fl.Source.table(rows, key="key", paths="path", root=found.root or None), what=videos)


def _key(clip: Clip) -> str:
    """Its path; bytes that are no UTF-8 are written as \\xNN, since a key is text."""
    return os.fsencode(clip.path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Found:
    """Clips, and the folder that they are in."""

    what: str
    root: str
    clips: Sequence[Clip]
    list: str = ""
    """The list that the clips, or their captions, are from."""
    lines: Sequence[Clip] = ()
    """What the list of captions says, as it is written there."""


def _check(videos: str, min_s: float, max_s: float, limit: int | None) -> None:
    problems = []
    if not videos:
        problems.append("videos is empty; expected a folder, a pattern, or a list of clips")
    if not 0 <= min_s <= max_s:
        problems.append(f"min_s..max_s is {min_s:g}..{max_s:g}; seconds, 0 ≤ min_s ≤ max_s")
    if limit is not None and limit < 1:
        problems.append(f"limit is {limit}; at least 1 clip, or none for all")
    if problems:
        raise UsageError("clips(…) cannot look for clips:", problems=problems)


# --- what there is ------------------------------------------------------------------------------------


def _is_list(videos: str) -> bool:
    return videos.lower().endswith(lists.SUFFIXES) and not (glob.has_magic(videos) or os.path.isdir(videos))


def _listed(videos: str, need_caption: bool) -> _Found:
    """The clips of a list, in its folder or in the folder `videos` beside it."""
    place = Path(videos)
    named = lists.read(place, need_caption=need_caption)
    below = [_below_folder(place, row.path) for row in named]
    out = [row.path for row, path in zip(named, below, strict=True) if path is None]
    if out:
        folder = os.path.abspath(place.parent)
        every = {os.path.dirname(os.path.abspath(os.path.join(folder, row.path))) for row in named}
        raise UsageError(
            f"{videos} names clips that are not below its folder {folder} ({len(out):,} of {len(named):,}), "
            f"and a list does not lead out of it. Put it into {os.path.commonpath(every)}, where all of them "
            "are, with absolute paths or with paths from there:",
            problems=lists.ten(out),
        )
    found = lists.once(place, (replace(r, path=p or "") for r, p in zip(named, below, strict=True)))
    roots = lists.folders(place)
    # Of all: of a list as long as WebVid's the first thousands may never have been downloaded.
    there = (
        r for r in roots if os.path.isdir(r) and any(os.path.exists(os.path.join(r, c.path)) for c in found)
    )
    return _Found(videos, next(there, roots[0]), found, list=videos)


def _below_folder(place: Path, path: str) -> str | None:
    """A listed path as one below the list's folder, also where it is absolute; None: it leads out of it."""
    if not os.path.isabs(path) and path.split("/")[0] != "..":
        return path
    for folder in (os.path.abspath(place.parent), os.path.realpath(place.parent)):
        below = os.path.relpath(os.path.join(folder, path), folder).replace(os.sep, "/")
        if below.split("/")[0] != "..":
            return below
    return None


def _files(videos: str) -> _Found:
    """The clips of a folder, or those that match a pattern."""
    _refuse_text(videos)
    if os.path.isdir(videos):
        names = [*_below(videos)]
        matched = [name for name in names if PurePosixPath(name).suffix.lower() in VIDEO]
        what = f"none of the {sum(map(os.path.isfile, names)):,} files in it is called {'|'.join(VIDEO)}"
    else:
        matched = glob.glob(videos, recursive=True)
        what = "it matches nothing" if glob.has_magic(videos) else "there is no such file or folder"
    matched = [name for name in matched if os.path.isfile(name)]
    if not matched:
        raise UsageError(
            f"No videos in {videos!r}: {what} (searched in {os.getcwd()}). Give videos= a folder of clips, a "
            f"pattern such as 'clips/**/*.mp4', or a list of them ({', '.join(lists.SUFFIXES)})."
        )
    root = videos if os.path.isdir(videos) else _fixed(videos)
    paths = sorted(os.path.relpath(name, root or ".").replace(os.sep, "/") for name in matched)
    # Folders called train, val and test say which split a clip is of, if all clips are in one of them.
    split = {path: lists.SPLITS.get(path.split("/")[0].lower(), "") for path in paths if "/" in path}
    apart = len(split) == len(paths) and all(split.values())
    return _Found(videos, root, [Clip(path, split=split[path] if apart else "") for path in paths])


def _refuse_text(videos: str) -> None:
    """A list that is none, and would be opened as a video."""
    if videos.lower().endswith(_TEXT) and os.path.isfile(videos):
        raise UsageError(
            f"videos={videos!r} is a text file; lists of clips are {', '.join(lists.SUFFIXES)}. One with a "
            "path a line becomes a list by a first line that says `path`, and a name that ends in .csv."
        )


def _below(folder: str, *above: str) -> Iterator[str]:
    """All files in a folder and those below it, but hidden ones; a link to a folder above is not followed."""
    here = os.path.realpath(folder)
    if here in above:
        return
    _, folders, files = next(os.walk(folder), (folder, [], []))
    yield from (os.path.join(folder, name) for name in files if not name.startswith("."))
    for name in folders:
        if not name.startswith("."):
            yield from _below(os.path.join(folder, name), here, *above)


def _fixed(pattern: str) -> str:
    """The folder before the first wildcard."""
    while glob.has_magic(pattern) or not os.path.isdir(pattern or "."):
        pattern = os.path.dirname(pattern)
    return pattern


# --- captions -----------------------------------------------------------------------------------------


def _with_captions(found: _Found, captions: str | None, need: bool) -> _Found:
    """The same clips with what a list says of them: the one given, or the folder's own."""
    own = [os.path.join(found.root, "captions" + suffix) for suffix in lists.SUFFIXES]
    given = captions or next((path for path in own if not found.list and os.path.isfile(path)), None)
    if given is None:
        return found
    read = lists.read(Path(given), need_caption=need or captions is not None)
    lines = lists.matched([clip.path for clip in found.clips], found.root, read, os.path.dirname(given))
    told = [
        Clip(clip.path, line.caption, line.split or clip.split) if line else clip
        for clip, line in zip(found.clips, lines, strict=True)
    ]
    return replace(found, clips=told, list=given, lines=read)


def _refuse_missing(found: _Found, clips: Sequence[Clip]) -> None:
    bare = [clip.path for clip in clips if not clip.caption]
    if not bare:
        return
    if not found.list:
        advice = "Give captions= a list of them, or put it beside the clips as captions.csv (path, caption)"
    elif found.list == found.what:
        advice = f"Fill the empty captions in {found.list}, or take those lines out"
    else:
        advice = (
            f"{found.list} has no line with their path, nor with a name that no other clip or line has; or "
            f"the caption there is empty. Add them, or {_only_listed(found, len(clips) - len(bare), True)}"
        )
    raise UsageError(
        f"{len(bare):,} of {len(clips):,} clips in {found.what} have no caption, which this objective needs. "
        f"{advice}; objective=reconstruct needs none:",
        problems=lists.ten(bare),
    )


def _only_listed(found: _Found, told: int, need_captions: bool) -> str:
    """How to use the clips of a list alone; lines may have been matched to clips that they do not lead to."""
    place, root = Path(found.list), os.path.abspath(found.root or ".")
    known = [path for path in (_below_folder(place, line.path) for line in found.lines) if path is not None]
    near = any(_there(folder, known) >= max(1, told) for folder in lists.folders(place))
    steps = []
    if not near and _there(root, [line.path for line in found.lines]) < max(1, told):
        steps.append(f"write each clip's path below {root}")
    if need_captions and not all(line.caption for line in found.lines):
        steps.append("take out lines without a caption")
    give = "give that list" if near else f"put that list into {root} and give it there"
    first = f"in that list {' and '.join(steps)}; then " if steps else ""
    return f"{first}{give} as videos= to use only its own clips"


def _there(folder: str, paths: Sequence[str]) -> int:
    return sum(os.path.exists(os.path.join(folder, path)) for path in paths)


def _refuse_part_of_splits(found: _Found, clips: Sequence[Clip]) -> None:
    """A list that names a split for some clips leaves open what the others are for."""
    bare = [clip.path for clip in clips if not clip.split]
    if bare and len(bare) < len(clips):
        raise UsageError(
            f"{len(bare):,} of {len(clips):,} clips in {found.what} are of no split; {found.list} names one "
            "for the others. Add them to it, take its column of splits out, so that all are divided by their "
            f"keys, or {_only_listed(found, len(clips) - len(bare), False)}:",
            problems=lists.ten(bare),
        )


def _divided(kept: Sequence[tuple[Clip, float]]) -> list[tuple[Clip, float]]:
    """With splits, where by shares of the keys one would be empty."""
    # A clip that cannot be opened will be quarantined: no split should have to rest on it.
    sure = [_key(clip) for clip, seconds in kept if seconds > 0]
    opened = [_key(clip) for clip, seconds in kept if seconds]
    found = divided(sure if len(sure) >= len(SPLITS) else opened)
    return [(replace(clip, split=found.get(_key(clip), "train") if found else ""), s) for clip, s in kept]


# --- how long they last -------------------------------------------------------------------------------


@dataclass
class _Left:
    """What was left out, and why."""

    gone: list[str] = field(default_factory=list)
    lasting: list[float] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """Kept, though they do not tell how long they last."""

    def say(self, found: _Found, kept: int, min_s: float, max_s: float) -> None:
        why = []
        if self.lasting:
            span = f"{min(self.lasting):.1f} to {max(self.lasting):.1f} s"
            why.append(f"{len(self.lasting):,} outside {min_s:g}…{max_s:g} s (they last {span})")
        if self.gone:
            why.append(f"{len(self.gone):,} that are not there (the first: {self.gone[0]})")
        if not kept and not self.lasting:
            raise UsageError(
                f"No videos: none of the {len(self.gone):,} files that {found.what} names is there. Paths "
                f"are taken from {os.path.abspath(found.root)}; the first:",
                problems=self.gone[:10],
            )
        if not kept:
            raise UsageError(
                f"None of the clips in {found.what} lasts {min_s:g} to {max_s:g} s. Change min_s and max_s:",
                problems=why,
            )
        said = []
        if self.untold and (min_s > 0 or max_s < math.inf):
            said.append(
                f"{len(self.untold):,} of them without a duration or time stamps, so perhaps outside "
                f"{min_s:g}…{max_s:g} s (the first: {self.untold[0]})"
            )
        if why:
            said.append(f"left out: {'; '.join(why)}")
        if said:
            log.warning("%s: %s clips kept; %s.", found.what, f"{kept:,}", "; ".join(said))


def _within(found: _Found, min_s: float, max_s: float, limit: int | None) -> list[tuple[Clip, float]]:
    """The clips that last so long, in their order, with what _seconds says; what is left out is said once."""
    left = _Left()
    kept: dict[Clip, float] = {}
    waiting = _mixed(found.clips) if limit else list(found.clips)
    at, told = 0, time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        while at < len(waiting) and (limit is None or len(kept) < limit):
            few = waiting[at : at + min(_AT_ONCE, limit - len(kept) if limit else _AT_ONCE)]
            at += len(few)
            paths = [os.path.join(found.root, clip.path) for clip in few]
            for clip, seconds in zip(few, pool.map(_seconds, paths), strict=True):
                if seconds is None:
                    left.gone.append(clip.path)
                elif seconds == _UNTOLD:
                    left.untold.append(clip.path)
                    kept[clip] = seconds
                elif seconds and not min_s - _SLACK_S <= seconds <= max_s + _SLACK_S:
                    left.lasting.append(seconds)
                else:
                    kept[clip] = seconds
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                seen, every = f"{at:,}", f"{len(waiting):,}"
                log.warning("%s: how long they last was looked at of %s of %s clips", found.what, seen, every)
    left.say(found, len(kept), min_s, max_s)
    return [(clip, kept[clip]) for clip in found.clips if clip in kept]


def _mixed(clips: Sequence[Clip]) -> list[Clip]:
    """Splits interleaved by their sizes, so that the first so many have a share of each."""
    of_split, seen = Counter(clip.split for clip in clips), Counter[str]()
    place = {}
    for clip in clips:
        place[clip] = (seen[clip.split] + 0.5) / of_split[clip.split]
        seen[clip.split] += 1
    return sorted(clips, key=place.__getitem__)


def _seconds(path: str) -> float | None:
    """What the file says; _UNTOLD if it says nothing, 0 if there is no film to read, None if no file."""
    try:
        import av
        from av.stream import Disposition
    except ImportError as e:
        raise MissingExtra.needed("Reading how long clips last", package="av", extra="video") from e
    if not os.path.isfile(path):
        return None
    try:
        with stages.open_clip(path) as clip:
            films = [s for s in clip.streams.video if not s.disposition & Disposition.attached_pic]
            if not films:
                return 0.0
            lasting = [s.duration * s.time_base for s in films if s.duration]
            whole = clip.duration / av.time_base if clip.duration else 0.0
            return float(lasting[0] if lasting else whole) or _counted(clip, films[0]) or _UNTOLD
    except (av.FFmpegError, OSError):
        return 0.0  # not swallowed: freezing opens it again, and quarantines it with the reason


def _counted(clip: Any, film: Any) -> float:
    """Seconds by the packets of a film, as of one that was streamed; 0: they tell none."""
    read = [(p.pts, p.duration or 0) for p in clip.demux(film) if p.size]
    stamps = [(pts, lasts) for pts, lasts in read if pts is not None]
    if stamps:
        first, last = min(pts for pts, _ in stamps), max(pts + lasts for pts, lasts in stamps)
        return float((last - first) * film.time_base)
    return float(len(read) / film.average_rate) if film.average_rate else 0.0
