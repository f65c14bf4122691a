"""Every exception that frostline raises on purpose, in one tree.

    FrostlineError
    ├── UsageError          (also ValueError)   arguments that cannot work; lists all that is wrong
    ├── MissingExtra        (also ImportError)  an optional package is not installed
    ├── StoreError                              something about a store on disk
    │   ├── StoreCorrupt                        bytes, sizes or checksums are not what was written
    │   ├── StoreVersion                        written in a format this version does not read
    │   ├── StoreLocked                         another process is writing
    │   ├── StoreFull                           the disk has no room
    │   ├── KeyMissing      (also KeyError)     no such key
    │   ├── KeyDuplicate                        the key is already in the store
    │   └── FieldError                          no such field, or a value that does not fit it
    ├── FeedError                               reading ahead failed; names the key and the shard
    ├── StageFailed                             a stage raised, or returned something unusable
    ├── ChunkTooLarge                           the device has no memory for a call of so many samples
    ├── CompileFailed                           torch.compile could not make a stage's network faster
    ├── CheckpointError                         a checkpoint that cannot be written, read or loaded
    │   └── CheckpointFull                      the disk has no room for it
    ├── OutOfMemory                             not even one row a pass fits into the device's memory
    ├── TrainStopped                            going on with a training makes no sense
    ├── ProfileFailed                           a command that gave nothing to profile
    ├── NotFrozen                               a stage is not what may be computed once; says why
    └── FreezeStopped                           freezing ended before all was done; what is whole is kept
        └── FreezePaused                        in order, by its time limit or a signal: the same goes on

A message says what was attempted, what was given, what was expected, and what to do about it. The built-in
bases are there so that code which catches `ValueError` or `KeyError` out of habit keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class FrostlineError(Exception):
    """The base of everything frostline raises on purpose.

    >>> try:
    ...     raise KeyMissing("Store 'feats' has no key 'clip-7'. `list(store.keys)` shows those it has.")
    ... except FrostlineError as error:
    ...     print(error)
    Store 'feats' has no key 'clip-7'. `list(store.keys)` shows those it has.
    """

    def __str__(self) -> str:
        # Without this, KeyMissing would print the repr of its message, as KeyError does.
        return Exception.__str__(self)


class UsageError(FrostlineError, ValueError):
    """Arguments that cannot work. With `problems`, says everything that is wrong at once.

    >>> print(UsageError("Feed(...) cannot start:", problems=["batch_size is 0", "rank 3 of world_size 2"]))
    Feed(...) cannot start:
      - batch_size is 0
      - rank 3 of world_size 2
    """

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([message, *self.problems]))


class MissingExtra(FrostlineError, ImportError):
    """An optional package is not installed; the message is the command that installs it."""

    @classmethod
    def needed(cls, what: str, *, package: str, extra: str) -> MissingExtra:
        """
        >>> print(MissingExtra.needed("Exporting to Parquet", package="pyarrow", extra="parquet"))
        Exporting to Parquet needs pyarrow: pip install 'frostline[parquet]'
        """
        return cls(f"{what} needs {package}: pip install 'frostline[{extra}]'")


class StoreError(FrostlineError):
    """Something about a store on disk."""


class StoreCorrupt(StoreError):
    """Bytes, sizes or checksums are not what was written."""


class StoreVersion(StoreError):
    """The store is in a format that this version of frostline does not read."""


class StoreLocked(StoreError):
    """Another process is writing to the store."""


class StoreFull(StoreError):
    """The disk has no room for what was to be written. Everything committed before is intact."""


class KeyMissing(StoreError, KeyError):
    """The store holds no row of that key."""


class KeyDuplicate(StoreError):
    """The key is already in the store; `replace` changes a row, `append` never does."""


class FieldError(StoreError):
    """The store has no such field, or a value does not fit the field's shape, dtype or codec."""


class FeedError(FrostlineError):
    """Reading ahead failed in a background thread; the message names the key and the shard."""


class StageFailed(FrostlineError):
    """A stage raised, or returned something unusable, for some samples. `__cause__` is what it raised."""

    def __init__(self, stage: str, keys: Sequence[str], reason: str) -> None:
        self.stage, self.keys, self.reason = stage, tuple(keys), reason
        some = ", ".join(map(repr, self.keys[:3])) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        super().__init__(f"Stage {stage!r} failed for {some}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...], str]]:
        return (StageFailed, (self.stage, self.keys, self.reason))


class ChunkTooLarge(FrostlineError):
    """The device has no memory for a call of this many samples."""

    def __init__(self, stage: str, chunk: int, reason: str) -> None:
        self.stage, self.chunk, self.reason = stage, chunk, reason
        super().__init__(
            f"Stage {stage!r} ran out of memory with {chunk} samples a call: {reason}. "
            f"Give it a smaller batch_size."
        )

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return (ChunkTooLarge, (self.stage, self.chunk, self.reason))


class CompileFailed(FrostlineError):
    """A network runs, but not through torch.compile."""

    def __init__(self, stage: str, reason: str) -> None:
        self.stage, self.reason = stage, reason
        super().__init__(f"Stage {stage!r} cannot be compiled: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return (CompileFailed, (self.stage, self.reason))


class ProfileFailed(FrostlineError):
    """A command ended without a step that could be looked at; says why as far as it is known."""


class NotFrozen(FrostlineError):
    """A stage that was to be computed once trains, draws random numbers, or depends on its batch-mates."""

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([message, *self.problems]))


class FreezeStopped(FrostlineError):
    """Freezing ended before all was done: too many bad inputs. Whole shards are kept."""


class FreezePaused(FreezeStopped):
    """Freezing ended in order before all was done: the time limit, or a signal. The same call goes on."""


_SHOWN = 60
"""Problems of a checkpoint that are told; a large model can have thousands."""


class CheckpointError(FrostlineError):
    """A checkpoint that cannot be written, read, or loaded into this model; lists all that is wrong.

    >>> print(CheckpointError("The checkpoint does not fit:", problems=["head.weight: missing"]))
    The checkpoint does not fit:
      - head.weight: missing
    """

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        shown = [*self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            shown.append(f"… and {len(self.problems) - _SHOWN:,} more (error.problems has all)")
        super().__init__("\n  - ".join([message, *shown]))


class CheckpointFull(CheckpointError):
    """The disk has no room for a checkpoint. Those written before are whole."""

    needed = free = missing = 0
    """Bytes."""

    @classmethod
    def told(cls, place: str, *, needed: int, free: int, why: str) -> CheckpointFull:
        missing = max(0, needed - free)
        error = cls(
            f"No room for a checkpoint in {place}: it needs {needed:,} bytes, {free:,} are free, {missing:,} "
            f"are missing ({why}). The checkpoints written before are whole; free some space, or keep fewer "
            f"of them, and run the same command again."
        )
        error.needed, error.free, error.missing = needed, free, missing
        return error


class OutOfMemory(FrostlineError):
    """Not even one row a pass fits into the device's memory."""


class TrainStopped(FrostlineError):
    """Training ended because going on makes no sense; checkpoints are kept."""
