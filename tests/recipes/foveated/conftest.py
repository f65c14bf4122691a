"""What tests of the recipe share: a little set of clips made once, the command line in one folder."""

from __future__ import annotations

import io
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from frostline.cli.main import main
from frostline.trainer.checkpoint import load

LITTLE = {
    "min_s": 1.0, "frame_size": 64, "num_frames": 8, "stored_frames": 12, "batch_size": 4,
    "warmup_steps": 1, "max_tokens": 16,
}  # fmt: skip
"""Parameters that suit clips of 64 pixels and 6 seconds, and two cores."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Networks as small as these are slower with several threads, on a machine that others use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of the embedded kind: ten clips to train on, three each for validation and test."""
    pytest.importorskip("av")
    from frostline_recipes.foveated import glyphs

    return glyphs.make(
        tmp_path_factory.mktemp("little"), n=16, size=64, seconds=6.0, fps=4, objects=3,
        splits=(0.625, 0.1875, 0.1875),
    )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """What was said, in one line."""
        return " ".join((self.out + self.err).split())


class Shell:
    """Calls of the command line in one folder, in this process."""

    def __init__(self, folder: Path, videos: Path) -> None:
        self.folder = folder
        self.given = {"videos": str(videos), **LITTLE}

    def __call__(self, *words: str) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, chdir(self.folder):
            patch.setattr(sys, "argv", ["/somewhere/bin/frostline", *words])
            patch.setattr(sys, "path", list(sys.path))
            patch.delenv("FROSTLINE_TRACEBACK", raising=False)
            patch.setattr("frostline.target.recipes", declared)
            with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
                main(list(words))
        return Answer(int(end.value.code or 0), out.getvalue(), err.getvalue())

    def foveated(self, verb: str, *options: str, **parameters: Any) -> Answer:
        """`frostline VERB foveated` on the little set, with other parameters where they are given."""
        given = [f"{name}={_text(value)}" for name, value in (self.given | parameters).items()]
        device = () if verb == "show" else ("--device", "cpu")
        threads = ("--workers", "threads") if verb == "freeze" else ()  # no time to measure processes
        return self(verb, "foveated", *given, *options, *device, *threads)

    def work(self, **parameters: Any) -> Any:
        """The workload on the little set."""
        from frostline_recipes.foveated.workload import workload

        return workload(**(self.given | parameters))

    def losses(self, run: str) -> list[float]:
        """Of every step that was logged."""
        lines = map(json.loads, (self.folder / run / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "train"]

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in load(self.folder / run).groups["model"].items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def declared() -> dict[str, EntryPoint]:
    """The recipes as pyproject.toml has them; what pip noted when it installed this may be older."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    listed = project["entry-points"]["frostline.recipes"]
    return {name: EntryPoint(name, value, "frostline.recipes") for name, value in listed.items()}


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory, little: Path) -> Shell:
    return Shell(tmp_path_factory.mktemp("foveated"), little)
