"""What tests of the command line share: its calls in one folder, in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from frostline.cli.main import main

Answer = tuple[int, str, str]


class Shell:
    """Calls of the command line in one folder, in this process."""

    def __init__(self, folder: Path, target: str, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.target, self._patch = folder, target, patch

    def __call__(self, *words: str) -> Answer:
        """The exit status, and what was written to the two outputs."""
        self._patch.setattr(sys, "argv", ["/somewhere/bin/frostline", *words])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(list(words))
        return int(end.value.code or 0), out.getvalue(), err.getvalue()

    def train(self, *words: str) -> Answer:
        return self("train", self.target, *words, "--device", "cpu")

    def run(self, *words: str) -> Answer:
        return self("run", *words, "--device", "cpu")


@contextmanager
def shell_with(folder: Path, file: str, text: str) -> Iterator[Shell]:
    """A shell in a folder that holds this one target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("FROSTLINE_CACHE", str(folder / "cache"))
        patch.delenv("FROSTLINE_TRACEBACK", raising=False)
        (folder / file).write_text(text)
        yield Shell(folder, file, patch)
        sys.modules.pop(Path(file).stem, None)
