"""The script's own lines between the parts that are known."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

from frostline.profiler.inside.samples import Samples, user_line
from frostline.profiler.inside.spans import Spans


def test_the_users_innermost_line_is_told() -> None:
    import json

    seen: list[str] = []

    def hook(pairs: Any) -> Any:
        seen.append(user_line(sys._getframe(1)))  # json's own frame
        return pairs

    at = sys._getframe().f_lineno + 1
    json.loads('{"a": 1}', object_pairs_hook=hook)
    assert seen == [f"{__file__}:{at}"]


def test_no_frame_is_somewhere() -> None:
    assert user_line(None) == "somewhere"


def test_what_a_part_covers_is_not_looked_at() -> None:
    """Ten looks, every other one inside of a part."""
    samples, looks = Samples(), iter(range(10))
    me = threading.get_ident()
    samples._over = SimpleNamespace(wait=lambda seconds: next(looks, None) is None)  # type: ignore[assignment]
    within = iter([True, False] * 5)
    samples._watch(me, SimpleNamespace(within=lambda thread: next(within)))
    assert samples.looked == 10
    assert sum(samples.lines.values()) == 5
    assert sum(share for _, share in samples.told()) == 0.5


def test_its_thread_ends_and_ending_twice_does_nothing() -> None:
    samples = Samples()
    assert samples.told() == []
    samples.begin(Spans(cuda=False))
    samples.end()
    samples.end()
    assert not [t for t in threading.enumerate() if t.name == "frostline-samples"]


def test_spans_know_whether_a_thread_is_within_one() -> None:
    spans, me = Spans(cuda=False), threading.get_ident()
    assert not spans.within(me)
    place = spans.enter("forward", "Net")
    assert spans.within(me)
    spans.leave(place)
    assert not spans.within(me)
