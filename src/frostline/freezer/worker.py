"""A worker process: `python -m frostline.freezer.worker FD`. Reads samples from a pipe until it ends."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from frostline.execution import Early
from frostline.freezer.wire import send


def serve(pipe: Connection[Any, Any]) -> None:
    import torch

    torch.set_num_threads(1)  # there are as many workers as cores
    early: Early = ForkingPickler.loads(pipe.recv_bytes())
    while True:
        try:
            keys, places, raws = ForkingPickler.loads(pipe.recv_bytes())
        except EOFError:
            return
        if raws is None:
            raws = [early.raw(key, place) for key, place in zip(keys, places, strict=True)]
        send(pipe, early.block(keys, raws))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
