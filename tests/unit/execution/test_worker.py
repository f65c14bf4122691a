"""What a worker process does with what comes through its pipe; here in a thread."""

from __future__ import annotations

import json
import threading
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.execution import Early
from frostline.execution.wire import receive
from frostline.execution.worker import serve
from frostline.fingerprint.code import parts_of
from frostline.freezer.workers import packed


class Data:
    """Raw fields that are expensive to get: a worker gets them itself."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, int]:
        if i == 2:
            raise OSError("no such sample")
        return {"x": -10 * i}


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    yield ours
    ours.close()  # a worker that reads the end of its pipe goes
    thread.join(120)
    theirs.close()
    assert not thread.is_alive()
    assert asked == [1]  # there are as many workers as cores


def begin(pipe: Connection, early: Early) -> None:
    """It answers with what its stages stand on."""
    pipe.send_bytes(packed(early))
    assert json.loads(pipe.recv_bytes()) == parts_of(early.called)


def ask(pipe: Connection, keys: list[str], places: list[int], raws: Any) -> Any:
    pipe.send_bytes(ForkingPickler.dumps((keys, places, raws, None)))
    return receive(pipe)


def test_a_worker_gets_raw_fields_itself_or_is_given_them(pipe: Any) -> None:
    early = Early(fl.Source.dataset(Data()), [fl.Stage("y", abs, reads="x")], ["x"], ["y"])
    begin(pipe, early)
    found = ask(pipe, ["b", "c", "d"], [1, 2, 3], None)
    assert (found.keys, found.columns) == (["b", "d"], {"y": [10, 30]})
    assert str(found.failed["c"]) == "Stage 'source' failed for 'c': OSError: no such sample"
    assert ask(pipe, ["a"], [0], [{"x": -1}]).columns == {"y": [1]}


def test_what_cannot_come_back_is_refused_and_the_worker_goes_on(pipe: Any) -> None:
    begin(pipe, Early(fl.Source.dataset(Data()), [fl.Stage("y", set, reads="x")], ["x"], ["y"]))
    with pytest.raises(UsageError, match="'y' is a set"):
        ask(pipe, ["a"], [0], [{"x": "text"}])
    assert list(ask(pipe, ["a"], [0], [{"x": 1}]).failed) == ["a"]  # a number is not iterable
