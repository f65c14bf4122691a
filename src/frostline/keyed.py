"""Random numbers that are a function of what they are for, not of when they are drawn.

>>> import frostline.keyed as keyed
>>> ids = keyed.derive_many(0, 3, ["cat.mp4", "dog.mp4"], "pick")    # seed 0, epoch 3
>>> keyed.choose(ids, 4, 24).shape                                   # 4 of 24 frames for each sample
(2, 4)

A draw is named by (seed, epoch, sample key, stage). The name is hashed to a 64-bit *key id* (`derive`), the
key id keys a counter-based generator (Philox4x32-10), and the counter is the position of the draw. No state
is carried from draw to draw, so threads, ranks, batch sizes and resuming cannot change a bit.

`philox` uses operators only: one function serves numpy and torch on any device, with equal bits. Orders of
many rows come from `permute`, a keyed permutation that is evaluated where it is asked and never held.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from frostline.errors import UsageError

Word = TypeVar("Word")
KeyIds = NDArray[np.uint64]
Rows = NDArray[np.int64]

_MASK = 0xFFFFFFFF
_TURNS = 6
"""Half-rounds of the network. Four show in the differences of neighbours (χ², n = 257), six do not."""
_SORTED = 4096
"""Up to here `permute` sorts random words: uniform over all n!, quicker than the network, 32 KB at most."""
_SHORT = 256
"""Up to here `sample` sorts a word for each index of a row; the index fits into 8 bits beside it."""
_LARGEST = 1 << 48
"""`permute` works in halves of at most 24 bits, so that 40 bits of hash times a half fit into 64."""


# --- names --------------------------------------------------------------------------------------------


def derive(seed: int, epoch: int, key: str, stage: str) -> int:
    """The 64-bit key id of one draw. Every part counts: no two different names share an encoding."""
    return xxhash.xxh3_64_intdigest(_prefix(seed, epoch, stage) + key.encode())


def derive_many(seed: int, epoch: int, keys: Sequence[str], stage: str) -> KeyIds:
    """`derive` for many sample keys; what they share is hashed once (0.16 µs a key instead of 1.4)."""
    prefix, digest = _prefix(seed, epoch, stage), xxhash.xxh3_64_intdigest
    return np.fromiter((digest(prefix + key.encode()) for key in keys), np.uint64, count=len(keys))


def _prefix(seed: int, epoch: int, stage: str) -> bytes:
    """16 bytes for all but the sample key; of fixed length, so the key that follows needs no mark."""
    parts = (b"%d" % operator.index(seed), b"%d" % operator.index(epoch), stage.encode())
    return xxhash.xxh3_128_digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def children(key_ids: KeyIds, n: int) -> KeyIds:
    """[B] key ids → [B, n] further ones, for draws inside a draw (the classes of an episode)."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(np.asarray(key_ids, np.uint64)[:, None] + steps)


# --- numbers ------------------------------------------------------------------------------------------


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 (Salmon et al. 2011) on 32-bit words carried in int64 arrays, tensors, or ints.

    The product of two words may pass 2⁶³; int64 arrays wrap silently, and masking after the shift gives the
    high word all the same. Parts may broadcast against each other. Pass arrays of at least one dimension:
    numpy warns when a scalar wraps.
    """
    c0, c1, c2, c3 = (_any(c) for c in counter)
    k0, k1 = (_any(k) for k in key)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _any(word: Word) -> Any:
    """numpy, torch and int share no type that has these operators, hence Any; `philox` keeps Word outside."""
    return word


def words(key_ids: KeyIds, n: int) -> NDArray[np.uint32]:
    """[B] key ids → [B, n] random 32-bit words. Asking for more keeps the first ones."""
    ids = np.asarray(key_ids, np.uint64)[:, None]
    blocks = np.arange((n + 3) // 4, dtype=np.int64)[None, :]
    zero = np.zeros((1, 1), np.int64)
    low, high = (ids & np.uint64(_MASK)).astype(np.int64), (ids >> np.uint64(32)).astype(np.int64)
    four = np.stack(philox((blocks, zero, zero, zero), (low, high)), axis=-1)
    return four.reshape(len(ids), 4 * blocks.shape[1])[:, :n].astype(np.uint32)


def uniform(key_ids: KeyIds, n: int) -> NDArray[np.float32]:
    """[B] key ids → [B, n] numbers in [0, 1): 24 bits each, exact in float32, the same anywhere."""
    return (words(key_ids, n) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def generator(seed: int, epoch: int, key: str, stage: str) -> np.random.Generator:
    """A numpy Generator for a user's function (`rng=`): keyed as all here, free to draw what it likes."""
    return np.random.Generator(np.random.Philox(key=derive(seed, epoch, key, stage)))


# --- choices ------------------------------------------------------------------------------------------


def choose(key_ids: KeyIds, n: int, length: int | ArrayLike) -> Rows:
    """[B, n] distinct indices out of `length` (one, or one for each row), ascending."""
    return np.sort(sample(key_ids, n, length), axis=1)


def sample(key_ids: KeyIds, n: int, length: int | ArrayLike) -> Rows:
    """Like `choose`, in random order: for what has a first and a second, like the classes of an episode."""
    ids = np.asarray(key_ids, np.uint64)
    sizes = np.broadcast_to(np.asarray(length, np.int64), ids.shape)
    if n < 0 or bool((sizes < n).any()):
        raise UsageError(
            f"Cannot choose {n} distinct of {int(sizes.min(initial=n))}: lower n, or leave such rows out."
        )
    out = np.empty((len(ids), n), np.int64)
    # Which way a row goes hangs on its own size, never on its neighbours, or batches would change the draw.
    short = sizes <= _SHORT
    for rows, draw in ((short, _sample_sorted), (~short, _sample_walked)):
        if rows.any():
            out[rows] = draw(ids[rows], n, sizes[rows])
    return out


def _sample_sorted(ids: KeyIds, n: int, sizes: Rows) -> Rows:
    """Sort a random word for each index and keep the first n (ties, 1 in 2³², go to the lower index)."""
    longest = int(sizes.max(initial=0))
    marks = words(ids, longest).astype(np.int64)
    index = np.arange(longest, dtype=np.int64)
    marks = np.where(index < sizes[:, None], marks << 8 | index, np.iinfo(np.int64).max)
    if n < longest:
        marks = np.partition(marks, n, axis=1)[:, :n] if n else marks[:, :0]
    return np.sort(marks, axis=1) & 0xFF


def _sample_walked(ids: KeyIds, n: int, sizes: Rows) -> Rows:
    """The first n values of a keyed permutation of each row's own range: no memory for long rows."""
    root = np.ceil(np.sqrt(sizes)).astype(np.int64)
    root += root * root < sizes  # where the float came out short
    shape = (len(ids), n)
    flat = [
        np.broadcast_to(part[:, None].astype(np.uint64), shape).ravel()
        for part in (sizes, -(-sizes // root), root)
    ]
    keys = [np.repeat(column, n) for column in children(ids, _TURNS).T]
    start = np.broadcast_to(np.arange(n, dtype=np.uint64), shape).ravel()
    return _walk(start, flat[0], flat[1], flat[2], keys).reshape(shape).astype(np.int64)


# --- permutations -------------------------------------------------------------------------------------


def permute(positions: NDArray[np.integer[Any]], n: int, key: int) -> Rows:
    """Where a keyed permutation of range(n) sends these positions; memory does not grow with n.

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]

    A Feistel network over a grid of a x b ≥ n cells with a ≈ b ≈ √n; what lands on a cell past n is sent
    through again until it does not (cycle walking), which meets less than one position in √n.
    """
    x = np.asarray(positions)
    if not 0 <= n <= _LARGEST:
        raise UsageError(f"A permutation of {n} things was asked for: from 0 to 2**48 are possible.")
    if x.size and (int(x.min()) < 0 or int(x.max()) >= n):
        raise UsageError(
            f"Positions {x.min()} to {x.max()} were asked of a permutation of {n}: expected 0 to {n - 1}."
        )
    key &= (1 << 64) - 1
    if n <= _SORTED:
        return _sorted_permutation(n, key)[x.astype(np.int64)]
    shape, (a, b) = x.shape, _grid(n)
    return _walk(x.astype(np.uint64).ravel(), _cell(n), a, b, _turn_keys(key)).astype(np.int64).reshape(shape)


@lru_cache(maxsize=32)
def _sorted_permutation(n: int, key: int) -> Rows:
    ids = children(np.array([key], np.uint64), n)[0]
    order = np.argsort(ids, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=64)
def _grid(n: int) -> tuple[Any, Any]:
    """a and b with the least a·b ≥ n among 64 near-squares: fewer cells past n, fewer second passes."""
    root = isqrt(n - 1) + 1
    waste, b = min((-n % b, b) for b in range(root, root + min(64, root)))
    return _cell((n + waste) // b), _cell(b)


@lru_cache(maxsize=64)
def _turn_keys(key: int) -> tuple[Any, ...]:
    return tuple(_cell(int(k)) for k in children(np.array([key], np.uint64), _TURNS)[0])


def _cell(value: int) -> Any:
    """A number as a 0-d array: a ufunc call takes 0.77 µs with it, 1.1 with a Python int or numpy scalar."""
    return np.array(value, np.uint64)


_C1, _C2 = _cell(0xFF51AFD7ED558CCD), _cell(0xC4CEB9FE1A85EC53)  # murmur3's finaliser
_S24, _S32, _S40 = _cell(24), _cell(32), _cell(40)


def _walk(x: KeyIds, n: Any, a: Any, b: Any, keys: Sequence[Any]) -> KeyIds:
    """Cycle walking. n, a, b and each key are scalars, or arrays that go with x element by element."""
    y = _feistel(x, a, b, keys)
    outside = np.flatnonzero(y >= n)
    while outside.size:
        n_, a_, b_, *keys_ = (part[outside] if part.ndim else part for part in (n, a, b, *keys))
        again = _feistel(y[outside], a_, b_, keys_)
        y[outside] = again
        outside = outside[again >= n_]
    return y


def _feistel(x: KeyIds, a: Any, b: Any, keys: Sequence[Any]) -> KeyIds:
    """One pass: left turns by a hash of right, right by a hash of left, and so on."""
    left: KeyIds = x // b
    right = x - left * b
    h, spare = np.empty_like(x), np.empty_like(x)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        _turn(left, right, a, even, h, spare)
        _turn(right, left, b, odd, h, spare)
    left *= b
    left += right
    return left


def _turn(side: KeyIds, other: KeyIds, size: Any, key: Any, h: KeyIds, spare: KeyIds) -> None:
    """side = (side + hash(other, key)) mod size, in place, without a division: 40 hash bits are scaled."""
    np.bitwise_xor(other, key, h)
    np.multiply(h, _C1, h)
    np.right_shift(h, _S32, spare)
    np.bitwise_xor(h, spare, h)
    np.multiply(h, _C2, h)
    np.right_shift(h, _S24, h)
    np.multiply(h, size, h)
    np.right_shift(h, _S40, h)
    np.add(h, side, h)
    np.subtract(h, size, spare)  # wraps to something huge where h is below size already
    np.minimum(h, spare, out=side)


def _mix(x: KeyIds) -> KeyIds:
    """The splitmix64 finaliser: spreads every bit over all 64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
