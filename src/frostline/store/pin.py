"""A reader's hold on its snapshot: a shared lock on the commit's file, which `store gc` respects."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from frostline.errors import StoreCorrupt, StoreError
from frostline.store.disk import is_still, open_inside
from frostline.store.manifest import commit_numbers, latest


class Pin:
    """Holds commit `number` (the newest, unless one is asked for) until it is closed or garbage."""

    def __init__(self, root: Path, wanted: int | None = None) -> None:
        self._fd, self._root = -1, root
        for _ in range(100):
            self.number = latest(commit_numbers(root)) if wanted is None else wanted
            if not self.number:
                raise StoreError(
                    f"The store at {root} was never begun: it has no commit. Make it with fl.Store.create."
                )
            if self._take(root, last_try=wanted is not None or self.number == latest(commit_numbers(root))):
                return
        raise StoreError(f"{root}: its commits were collected as fast as they could be opened. Try again.")

    def _take(self, root: Path, *, last_try: bool) -> bool:
        try:
            fd = open_inside(root, "commits", f"{self.number:08d}.json")
        except StoreCorrupt:
            if last_try:
                raise
            return False  # collected between listing and opening: look again
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                return False
            # No locks on this file system: the snapshot is read all the same, unseen by gc elsewhere.
        if not os.fstat(fd).st_nlink:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def refuse_other(self) -> None:
        """StoreError where another store stands in the place of the one that was opened.

        Its files have the same names and often the same sizes: rows of both would come, and nobody notice.
        """
        if self._fd >= 0 and not is_still(self._root / "commits" / f"{self.number:08d}.json", self._fd):
            raise StoreError(
                f"{self._root} was moved, deleted or made anew since it was opened. Open it again with "
                f"fl.Store.open."
            )

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()
