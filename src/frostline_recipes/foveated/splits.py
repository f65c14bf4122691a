"""Which clip is of which split, where nobody says: by its key, as `fl.Workload` does, but none left empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from frostline import keyed

SPLITS = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Shares of the clips."""


def divided(keys: Sequence[str], shares: Mapping[str, float] = SPLITS) -> dict[str, str]:
    """The split of each key, where shares alone would leave one empty; {}: they do not.

    Keys have a place from 0 to 1 by their hash, and splits lie side by side there, with the bounds that
    `fl.Workload(splits=shares)` has. Where a split gets none, a bound moves past the nearest key: the others
    stay where they are, and the same keys are always divided alike. Keys that are fewer than the splits are
    all of the first: a training that has nothing to be judged on says so.

    >>> divided(["1", "2", "3", "4"])
    {'1': 'test', '2': 'train', '3': 'val', '4': 'train'}
    >>> divided([str(i) for i in range(100)])
    {}
    >>> divided(["1", "2"])
    {'1': 'train', '2': 'train'}
    """
    places = {key: keyed.derive(0, 0, key, "split") / 2**64 for key in keys}
    ordered = sorted(places, key=places.__getitem__)
    n, left = len(ordered), len(shares)
    if n < left:
        return dict.fromkeys(keys, next(iter(shares)))
    drawn = [sum(place < end for place in places.values()) for end in accumulate(shares.values())]
    drawn[-1] = n  # shares may add up to a little less than 1
    cuts = [0]
    for cut in drawn:
        left -= 1
        cuts.append(min(max(cut, cuts[-1] + 1), n - left))
    if cuts[1:] == drawn:
        return {}
    spans = zip(shares, cuts, cuts[1:], strict=False)
    found = {key: split for split, start, end in spans for key in ordered[start:end]}
    return {key: found[key] for key in keys}
