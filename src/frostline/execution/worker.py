"""A worker process: `python -m frostline.execution.worker FD`. Reads samples from a pipe until it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle
from typing import Any

import torch

from frostline.execution.early import Early
from frostline.execution.slab import Mapped
from frostline.execution.wire import Put, send


def serve(pipe: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)  # there are as many workers as cores
    early: Early
    try:
        early, layout, told = ForkingPickler.loads(pipe.recv_bytes())
        pipe.send_bytes(json.dumps(told(early.called)).encode())  # before anything is called
        slab = None
        if layout is not None:
            fd = recv_handle(pipe)
            slab = Mapped(fd, layout)
            os.close(fd)
        while True:
            keys, places, raws, where = ForkingPickler.loads(pipe.recv_bytes())
            if raws is None:
                raws = [early.raw(key, place) for key, place in zip(keys, places, strict=True)]
            put = Put(slab.layout, slab.slot(where[0]), where[1]) if slab and where else None
            send(pipe, keys, early.block(keys, raws), put)
    except EOFError:
        return  # the parent is done, or gone


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the parent waits for all of them, and taking torch apart takes each a second
