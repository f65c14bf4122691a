"""What is said of copies to the device."""

from __future__ import annotations

from frostline.profiler.reading import _copies


def test_a_copy_that_nobody_waits_for_takes_what_the_device_is_at_it() -> None:
    """What the host needs to ask for one says nothing: 33 MB in 0.09 ms would be 376 GB/s."""
    copies = [
        {"kind": "pinned", "blocking": False, "calls": 8, "bytes": 8e6, "s": 1e-5},
        {"kind": "pageable", "blocking": True, "calls": 4, "bytes": 4e6, "s": 0.004},
    ]
    raw = {"copies": copies, "spans": [{"bounds": [0, 1, 2, 3]}], "kernels": {"up_s": {"pinned": 0.5}}}
    pinned, pageable = _copies(raw)
    assert (pinned.calls, pinned.bytes, pinned.ms) == (2.0, 2e6, 500.0)
    assert (pageable.calls, pageable.bytes, pageable.ms) == (1.0, 1e6, 1.0)


def test_pinned_copies_of_both_kinds_share_the_device_by_their_bytes() -> None:
    copies = [
        {"kind": "pinned", "blocking": waits, "calls": 1, "bytes": size, "s": 0.25}
        for waits, size in ((False, 3e6), (True, 1e6))
    ]
    raw = {"copies": copies, "spans": [{"bounds": [0]}], "kernels": {"up_s": {"pinned": 0.004}}}
    assert [copy.ms for copy in _copies(raw)] == [3.0, 250.0]


def test_without_a_trace_such_a_copy_has_no_time() -> None:
    raw = {"copies": [{"kind": "pinned", "blocking": False, "calls": 1, "bytes": 1e6, "s": 1e-5}]}
    assert [copy.ms for copy in _copies(raw)] == [0.0]
