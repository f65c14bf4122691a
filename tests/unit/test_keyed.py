"""Keyed randomness: the published vectors, equal bits on numpy and torch, bijections, uniformity."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline import keyed
from frostline.errors import UsageError

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = [  # Random123's kat_vectors: counter and key, then the output
    ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
PINNED = {
    "empty": 1195332135420150210,
    "clip": 4967502502553038125,
    "words": [[480132302, 2418006974]],
    "permute": [36266566, 86174583, 32226565],
}


def z_of_chi_square(observed: np.ndarray, expected: float, freedom: int) -> float:
    """How many standard deviations χ² lies from its mean; many cells make it nearly normal."""
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# --- philox


@pytest.mark.parametrize(("given_words", "expected"), KNOWN)
@pytest.mark.parametrize(
    "make", [int, lambda w: np.array([w]), lambda w: torch.tensor([w])], ids=["int", "numpy", "torch"]
)
def test_philox_gives_the_published_vectors(given_words, expected, make) -> None:
    parts = [make(w) for w in given_words]
    out = keyed.philox(tuple(parts[:4]), tuple(parts[4:]))
    assert tuple(int(np.ravel(w)[0]) for w in out) == expected


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 6), min_size=1, max_size=20))
def test_philox_is_the_same_on_numpy_and_torch(rows) -> None:
    columns = np.array(rows, np.int64).T.copy()
    on_numpy = keyed.philox(tuple(columns[:4]), tuple(columns[4:]))
    tensors = torch.from_numpy(columns)
    on_torch = keyed.philox(tuple(tensors[:4]), tuple(tensors[4:]))
    for a, b in zip(on_numpy, on_torch, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_philox_is_the_same_on_cuda() -> None:
    columns = torch.randint(0, 2**32, (6, 10_000))
    on_cpu = keyed.philox(tuple(columns[:4]), tuple(columns[4:]))
    there = columns.cuda()
    on_cuda = keyed.philox(tuple(there[:4]), tuple(there[4:]))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_cuda, strict=True))


# --- names


def test_derive_is_pinned() -> None:
    """Changing the encoding would change every epoch of every user: do it knowingly."""
    assert keyed.derive(0, 0, "", "") == PINNED["empty"]
    assert keyed.derive(7, 3, "clips/ä.mp4", "pick/features") == PINNED["clip"]
    assert keyed.words(np.array([PINNED["clip"]], np.uint64), 2).tolist() == PINNED["words"]
    assert keyed.permute(np.arange(3), 10**8, PINNED["clip"]).tolist() == PINNED["permute"]


name = st.tuples(
    st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.text(max_size=8), st.text(max_size=8)
)


@settings(deadline=None)
@given(name, name)
def test_different_names_have_different_ids(a, b) -> None:
    assert (keyed.derive(*a) == keyed.derive(*b)) == (a == b)


def test_parts_do_not_run_into_each_other() -> None:
    ids = {keyed.derive(1, 11, "a", "bc"), keyed.derive(11, 1, "a", "bc"), keyed.derive(1, 11, "ab", "c")}
    assert len(ids) == 3


@settings(deadline=None)
@given(st.lists(st.text(max_size=10), max_size=20))
def test_derive_many_is_derive(keys) -> None:
    many = keyed.derive_many(3, 4, keys, "stage")
    assert many.dtype == np.uint64
    assert many.tolist() == [keyed.derive(3, 4, key, "stage") for key in keys]


def test_children_differ_from_each_other_and_from_their_parents() -> None:
    ids = keyed.derive_many(0, 0, [str(i) for i in range(100)], "x")
    children = keyed.children(ids, 50)
    assert children.shape == (100, 50)
    assert len(set(children.ravel().tolist()) | set(ids.tolist())) == 5100


# --- numbers


def test_words_do_not_depend_on_how_many_are_asked_for_or_on_neighbours() -> None:
    ids = keyed.derive_many(0, 0, ["a", "b", "c"], "x")
    many = keyed.words(ids, 11)
    assert many.dtype == np.uint32
    np.testing.assert_array_equal(keyed.words(ids[1:2], 3), many[1:2, :3])
    assert keyed.words(ids, 0).shape == (3, 0)
    assert keyed.words(ids[:0], 4).shape == (0, 4)


def test_uniform_is_uniform_and_below_one() -> None:
    ids = keyed.derive_many(0, 0, [str(i) for i in range(500)], "x")
    u = keyed.uniform(ids, 200)
    assert u.dtype == np.float32
    assert 0 <= u.min() < 1e-3
    assert 0.999 < u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert abs(z_of_chi_square(counts, u.size / 100, 99)) < 4


def test_generator_is_keyed() -> None:
    draw = [keyed.generator(0, epoch, key, "aug").random(4).tolist() for epoch, key in ((0, "a"), (0, "a"))]
    assert draw[0] == draw[1]
    others = [
        keyed.generator(*name).random()
        for name in ((0, 1, "a", "aug"), (0, 0, "b", "aug"), (1, 0, "a", "aug"))
    ]
    assert len({draw[0][0], *others}) == 4


# --- choices


@settings(deadline=None)
@given(st.data())
def test_choose_is_distinct_sorted_in_range_and_independent_of_the_batch(data) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=12)), np.int64)
    n = data.draw(st.integers(0, int(lengths.min())))
    ids = keyed.derive_many(0, 0, [str(i) for i in range(len(lengths))], "x")
    chosen = keyed.choose(ids, n, lengths)
    assert chosen.shape == (len(lengths), n)
    assert chosen.dtype == np.int64
    assert (np.diff(chosen, axis=1) > 0).all()
    assert ((chosen >= 0) & (chosen < lengths[:, None])).all()
    for i in range(len(lengths)):
        np.testing.assert_array_equal(keyed.choose(ids[i : i + 1], n, int(lengths[i]))[0], chosen[i])


@pytest.mark.parametrize("length", [24, 256, 257, 1000])
def test_sample_is_uniform_in_every_place(length) -> None:
    n_ids = 20_000
    ids = keyed.derive_many(1, 0, [str(i) for i in range(n_ids)], "x")
    drawn = keyed.sample(ids, 3, length)
    for place in range(3):
        counts = np.bincount(drawn[:, place], minlength=length)
        assert abs(z_of_chi_square(counts, n_ids / length, length - 1)) < 4
    assert abs((drawn[:, 0] < drawn[:, 1]).mean() - 0.5) < 4 * 0.5 / math.sqrt(n_ids)


def test_all_subsets_are_equally_likely() -> None:
    ids = keyed.derive_many(2, 0, [str(i) for i in range(20_000)], "x")
    counts = np.array(list(Counter(map(tuple, keyed.choose(ids, 3, 6).tolist())).values()))
    assert len(counts) == math.comb(6, 3)
    assert abs(z_of_chi_square(counts, 1000, 19)) < 4


def test_choosing_more_than_there_are_is_refused() -> None:
    ids = keyed.derive_many(0, 0, ["a", "b"], "x")
    with pytest.raises(UsageError, match="5 distinct of 4"):
        keyed.choose(ids, 5, [9, 4])


# --- permutations


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 4160, 4161, 65_536, 99_991, 300_000]
)
def test_permute_is_a_bijection_at_edges(n) -> None:
    out = keyed.permute(np.arange(n), n, key=5)
    assert out.dtype == np.int64
    np.testing.assert_array_equal(np.sort(out), np.arange(n))


@settings(deadline=None)
@given(st.integers(0, 20_000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key) -> None:
    np.testing.assert_array_equal(np.sort(keyed.permute(np.arange(n), n, key)), np.arange(n))


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_permute_at_any_positions(n, key, data) -> None:
    """One position alone, in any shape or company, goes to the same place, and no two to one."""
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    out = keyed.permute(positions, n, key)
    assert out.min() >= 0
    assert out.max() < n
    assert len(set(out.tolist())) == len(positions)
    assert keyed.permute(positions[:1], n, key)[0] == out[0]
    np.testing.assert_array_equal(keyed.permute(positions[:, None], n, key), out[:, None])


@pytest.mark.parametrize("n", range(2, 8))
def test_every_permutation_of_few_is_equally_likely(n) -> None:
    n_keys = 4 * math.factorial(n) + 2000
    counts = Counter(
        tuple(keyed.permute(np.arange(n), n, keyed.derive(0, k, "", "x"))) for k in range(n_keys)
    )
    observed = np.zeros(math.factorial(n))
    observed[: len(counts)] = list(counts.values())
    if n_keys > 20 * len(observed):
        assert len(counts) == len(observed)
    assert abs(z_of_chi_square(observed, n_keys / len(observed), len(observed) - 1)) < 4


@pytest.mark.parametrize(("n", "n_keys"), [(1000, 5000), (4099, 2000), (10_007, 1000)])
def test_places_are_uniform_over_keys(n, n_keys) -> None:
    """Where 100 positions land, over many keys; beyond 4096 this is the Feistel network."""
    positions = np.linspace(0, n - 1, 100).astype(np.int64)
    landed = np.stack([keyed.permute(positions, n, keyed.derive(0, k, "", "x")) for k in range(n_keys)])
    bins = 50
    counts = np.stack([np.bincount(column * bins // n, minlength=bins) for column in landed.T])
    expected = n_keys * np.bincount(np.arange(n) * bins // n) / n
    z = ((counts - expected) ** 2 / expected).sum()
    freedom = 100 * (bins - 1)
    assert abs(z - freedom) / math.sqrt(2 * freedom) < 4


def test_neighbours_do_not_stay_together() -> None:
    """The distance between the images of neighbours; four half-rounds fail this by ten deviations."""
    n, n_keys = 4099, 300
    gaps = np.concatenate(
        [np.diff(keyed.permute(np.arange(n), n, keyed.derive(0, k, "", "x"))) % n for k in range(n_keys)]
    )
    counts = np.bincount(gaps, minlength=n)[1:]
    assert abs(z_of_chi_square(counts, len(gaps) / (n - 1), n - 2)) < 4


def test_epochs_and_seeds_differ() -> None:
    orders = [
        keyed.permute(np.arange(5000), 5000, keyed.derive(seed, epoch, "", "x"))
        for seed in range(3)
        for epoch in range(3)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 10  # 1 is expected
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.06


def test_permute_needs_no_memory_for_a_large_n() -> None:
    """Nor time, or it would not end."""
    positions = np.arange(10**11, 10**11 + 8192)
    keyed.permute(positions, 10**12, 0)
    tracemalloc.start()
    keyed.permute(positions, 10**12, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(("positions", "n"), [([5], 5), ([-1], 5), ([0], 0), ([0], -1), ([0], 2**48 + 1)])
def test_impossible_permutations_are_refused(positions, n) -> None:
    with pytest.raises(UsageError):
        keyed.permute(np.array(positions), n, 0)


def test_what_permute_returns_may_be_written_to() -> None:
    for n in (10, 10_000):
        before = keyed.permute(np.arange(10), n, 0)
        keyed.permute(np.arange(10), n, 0)[:] = 0
        np.testing.assert_array_equal(keyed.permute(np.arange(10), n, 0), before)
