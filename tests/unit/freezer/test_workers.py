"""Threads and processes begin the same blocks; what cannot travel is told before a process is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.execution import Early
from frostline.execution.slab import SLOTS, Layout, Slab
from frostline.freezer.child import WorkerDied
from frostline.freezer.workers import Processes, Threads, cores, packed

Module = Callable[[str], ModuleType]


def source(n: int = 6) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": i} for i in range(n)])


STAGES = """
    import numpy as np
    import torch

    def parts(x):
        if x == 3:
            raise ValueError("three")
        return torch.arange(x, dtype=torch.bfloat16), np.float64(x) / 3, np.full((2, 2), x), f"text {x}"
"""
WRITES = ["t", "f", "a", "s"]


def test_threads_and_processes_give_the_same_blocks(module: Module) -> None:
    stage = fl.Stage("parts", module(STAGES).parts, reads="x", writes=WRITES)
    early = Early(source(), [stage], ["x"], ["x", *WRITES])
    blocks = []
    for workers in (Threads(early, 2), Processes(early, 1)):
        begun = [workers.begin(places, group=2) for places in ([0, 1], [2, 3, 4], [5])]
        blocks.append([pending.result() for pending in begun if pending is not None])
        workers.close()
    for one, other in zip(*blocks, strict=True):
        assert one.keys == other.keys
        assert {k: str(e) for k, e in one.failed.items()} == {k: str(e) for k, e in other.failed.items()}
        for name in one.columns:
            for a, b in zip(one.columns[name], other.columns[name], strict=True):
                assert type(a) is type(b)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                assert not isinstance(a, np.ndarray)


def test_threads_are_given_rows_of_a_store() -> None:
    early = Early(source(), [fl.Stage("y", lambda x, h: x + h, reads=["x", "h"])], ["x"], ["y", "h"])
    threads = Threads(early, 1, lambda keys: {"h": [10 * int(key[1:]) for key in keys]})
    assert threads.begin([2, 4], group=2).result().columns == {"y": [22, 44], "h": [20, 40]}
    threads.close()


def early_of(fn: Any) -> Early:
    return Early(source(), [fl.Stage("y", fn, reads="x")], ["x"], ["y"])


def test_what_cannot_travel_is_told_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent to worker processes.*use threads"):
        packed(early_of(lambda x: x))

    def in_script(x: int) -> int:
        return x

    in_script.__module__ = "__main__"
    with pytest.raises(
        UsageError, match="'y' is defined in the script itself: processes need it in a module"
    ):
        packed(early_of(in_script))
    assert packed(early_of(abs))


def test_there_is_a_core() -> None:
    assert cores() >= 1


def test_closed_threads_begin_nothing() -> None:
    threads = Threads(early_of(abs), 1)
    done = threads.begin([1], group=1)
    assert done is not None
    assert done.result().columns == {"y": [1]}
    threads.close()
    with pytest.raises(RuntimeError):
        threads.begin([1], group=1)


def test_worker_threads_compute_with_one_thread_each_and_nobody_else_does() -> None:
    before = torch.get_num_threads()
    threads = Threads(early_of(lambda x: torch.get_num_threads()), 3)
    found = threads.begin([0, 1, 2, 3, 4, 5], group=1)
    assert found is not None
    assert found.result().columns == {"y": [1] * 6}
    threads.close()
    assert torch.get_num_threads() == before
    later: list[int] = []
    other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert later == [before]


FIXED = """
    import os
    import signal
    from pathlib import Path

    import torch

    def pixels(x, mark):
        if x == 4 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)  # once: as from outside
        if x == 7:
            raise ValueError("seven")
        return torch.full((2, 3), x, dtype=torch.bfloat16)
"""


def test_rows_of_a_fixed_shape_come_through_shared_memory(module: Module, tmp_path: Path) -> None:
    rows = [{"key": f"k{i}", "x": i, "mark": str(tmp_path / "mark")} for i in range(40)]
    stage = fl.Stage("p", module(FIXED).pixels, reads=["x", "mark"])
    early = Early(fl.Source.table(rows), [stage], ["x", "mark"], ["p", "x"])
    layout = Layout.of(8, {"p": torch.zeros(2, 3, dtype=torch.bfloat16), "x": 1})
    assert layout is not None
    workers = Processes(early, 2, layout=layout)
    kept = []
    for start in range(0, 40, 8):
        pending = workers.begin(range(start, start + 8), group=3)
        assert pending is not None
        kept.append(pending.result())
    for start, block in zip(range(0, 40, 8), kept, strict=True):
        good = [i for i in range(start, start + 8) if i != 7]
        assert block.keys == [f"k{i}" for i in good]
        assert isinstance(block.columns["p"], torch.Tensor)
        assert block.columns["p"][:, 0, 0].tolist() == good
        assert block.columns["x"] == good
    assert "seven" in str(kept[0].failed["k7"])
    assert (tmp_path / "mark").exists()  # it was killed, and nothing shows of it
    workers.close()


def test_a_slot_is_used_again_when_nobody_has_its_rows_any_more() -> None:
    layout = Layout.of(4, {"x": torch.zeros(2)})
    assert layout is not None
    slab = Slab(layout)
    leases = [slab.lease(wait=False) for _ in range(SLOTS)]
    assert None not in leases
    assert slab.lease(wait=False) is None
    rows = leases[3].rows("x", [0, 1])
    leases.clear()
    again = [slab.lease(wait=False) for _ in range(SLOTS)]
    assert again.count(None) == 1  # one is still read
    number = {*range(SLOTS)} - {lease.number for lease in again if lease}
    del rows
    assert {slab.lease(wait=True).number} == number
    slab.close()


def test_workers_that_cannot_start_are_no_sample_s_fault(module: Module, tmp_path: Path) -> None:
    stage = fl.Stage("p", module(FIXED).pixels, reads=["x", "mark"])
    early = Early(fl.Source.table([{"key": "a", "x": 1, "mark": ""}]), [stage], ["x", "mark"], ["p"])
    workers = Processes(early, 1)
    workers._setup = b"no such message"
    pending = workers.begin([0], group=1)
    assert pending is not None
    with pytest.raises(WorkerDied, match="could not start"):
        pending.result()
    workers.close()


DYING = """
    import os

    def die(x):
        if x in (9, 11):
            os.kill(os.getpid(), x)
        return x
"""


def test_a_sample_that_kills_two_workers_is_told_with_how_they_died(module: Module) -> None:
    early = Early(source(12), [fl.Stage("y", module(DYING).die, reads="x")], ["x"], ["y"])
    workers = Processes(early, 1)
    pending = workers.begin([8, 9, 10, 11], group=4)
    assert pending is not None
    block = pending.result()
    workers.close()
    assert block.columns == {"y": [8, 10]}
    told = {key: str(error) for key, error in block.failed.items()}
    killed = "the worker process was killed (signal 9: perhaps for memory) on this sample, twice"
    assert killed in told["k9"]
    assert "the worker process died (signal 11) on this sample, twice" in told["k11"]


def test_a_sample_that_ends_a_worker_with_its_first_task_is_told(module: Module) -> None:
    leave = "import os\ndef leave(x):\n    if x == 1:\n        os._exit(3)\n    return x\n"
    early = Early(source(4), [fl.Stage("y", module(leave).leave, reads="x")], ["x"], ["y"])
    workers = Processes(early, 1)
    pending = workers.begin(range(4), group=4)
    assert pending is not None
    block = pending.result()
    workers.close()
    assert block.keys == ["k0", "k2", "k3"]
    assert "died (exit status 3) on this sample, twice" in str(block.failed["k1"])


def test_a_worker_that_would_run_another_text_is_refused(module: Module) -> None:
    made = module("def helper(x):\n    return x + 1\ndef fn(x):\n    return helper(x)\n")
    workers = Processes(Early(source(4), [fl.Stage("y", made.fn, reads="x")], ["x"], ["y"]), 1)
    Path(str(made.__file__)).write_text(
        "def helper(x):\n    return x + 20\ndef fn(x):\n    return helper(x)\n"
    )
    pending = workers.begin(range(4), group=4)
    assert pending is not None
    with pytest.raises(UsageError, match=r"compute 'y' otherwise.*there, \S+\.helper is not what it is here"):
        pending.result()
    workers.close()


LARGER = """
    import frostline as fl

    K, CACHE = 1, {}

    def larger(x):
        return CACHE.setdefault(x, K * x)

    class Rows:
        FIRST = 0
        def __len__(self): return 8
        def __getitem__(self, i): return {"key": f"k{i}", "x": self.FIRST + i}
"""


def test_values_set_at_run_time_are_not_lost_in_a_worker(module: Module, tmp_path: Path) -> None:
    """A new interpreter imports the module anew, and would compute with what stands in its file."""
    made = module(LARGER)

    def freeze(name: str, workers: Any) -> list[int]:
        data = fl.Pipeline(source(8), fl.Stage("y", made.larger, reads="x"))
        store = fl.freeze(data, tmp_path / name, workers=workers, quiet=True, device="cpu")
        return [int(store[f"k{i}"]["y"]) for i in range(8)]

    assert freeze("as it is", "processes") == [*range(8)]  # a cache that the audit filled is no difference
    made.CACHE.clear()
    made.K = 20
    with pytest.raises(UsageError, match=r"compute 'y' otherwise .* there, \S+\.K is not what it is here"):
        freeze("processes", "processes")
    assert freeze("processes", "threads") == [20 * i for i in range(8)]


def test_values_of_a_data_set_too(module: Module, tmp_path: Path) -> None:
    made = module(LARGER)
    made.Rows.FIRST = 5
    data = fl.Pipeline(fl.Source.dataset(made.Rows(), version="1"), fl.Stage("y", made.larger, reads="x"))
    with pytest.raises(UsageError, match=r"compute 'source' otherwise .* \S+\.Rows\.FIRST is not what"):
        fl.freeze(data, tmp_path / "s", workers="processes", quiet=True, device="cpu")


PASSED_ON = """
    import torch

    def pixels(x):
        return torch.full((2, 3), float(x))

    def seen(pixels):
        return pixels[:, :1]  # a view
"""


def test_rows_that_are_stored_as_they_came_do_not_keep_the_shared_memory(
    module: Module, tmp_path: Path
) -> None:
    """A shard of more blocks than the slab has slots: the writer would wait for rows, and they for a slot."""
    stages, n = module(PASSED_ON), 32 * (SLOTS + 3)
    data = fl.Pipeline(
        fl.Source.table([{"key": f"k{i:03d}", "x": i} for i in range(n)]),
        fl.Stage("p", stages.pixels, reads="x"),
        fl.Stage("v", stages.seen, reads="p", on="device", batch_size=32),
        outputs=["p", "v"],
    )
    stores = [
        fl.freeze(data, tmp_path / kind, workers=kind, n_workers=2, quiet=True)
        for kind in ("threads", "processes")
    ]
    assert stores[0].rows_per_shard > n
    rows = [store.rows(range(n)) for store in stores]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in ("p", "v"))
    assert rows[1]["p"][:, 1, 2].tolist() == [*range(n)]
