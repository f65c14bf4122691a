"""`fl.cached`: what is read and what is computed, the same bits either way, and what it refuses."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import NotFrozen, StoreError, UsageError
from frostline.execution import Ready
from frostline.freezer import wrapped
from frostline.store.session import Session

KEYS = [f"k{i}" for i in range(11)]


def encoder(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return net.requires_grad_(False).eval()


def inputs(n: int = len(KEYS)) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_rows_are_computed_once_and_read_afterwards(root: Path) -> None:
    x = inputs()
    with fl.cached(encoder(), root, batch_size=4) as fast:
        first = fast(x, keys=KEYS)
        assert (fast.computed, fast.read) == (11, 0)
        assert torch.equal(fast(x, keys=KEYS), first)  # not written yet
        assert (fast.computed, fast.read) == (11, 11)
        fast.flush()
        assert torch.equal(fast(x, keys=KEYS), first)
        assert (fast.computed, fast.read) == (11, 22)
    torch.testing.assert_close(first, encoder()(x))
    assert len(fl.Store.open(root)) == 11


def test_one_number_of_any_stride(root: Path) -> None:
    net = nn.Linear(1, 2).requires_grad_(False)
    with fl.cached(net, root) as fast:
        fast(torch.arange(9.0).reshape(1, 9)[:, 4:5], keys=["a"])
        fast(torch.tensor([[4.0]]), keys=["a"])
        assert (fast.computed, fast.read) == (1, 1)


def test_autocast_around_a_call_changes_no_row(root: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16), fl.cached(encoder(), root) as fast:
        assert fast(inputs(), keys=KEYS).dtype is torch.float32
    with fl.cached(encoder(), root) as fast:
        torch.testing.assert_close(fast(inputs(), keys=KEYS), encoder()(inputs()))
        assert fast.read == len(KEYS)


def test_the_bits_are_those_of_chunks_of_one_size_whatever_batch_asked(root: Path) -> None:
    x = inputs()
    stage = fl.Stage("output", encoder(), reads="x", on="device", batch_size=4)
    expected = Ready(stage, torch.device("cpu")).many(KEYS, [x])["output"]
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2)).tolist()
    with fl.cached(encoder(), root, batch_size=4) as fast:
        for some in (order[:1], order[1:4], order[2:9], order[9:]):
            assert torch.equal(fast(x[some], keys=[KEYS[i] for i in some]), expected[some])
        assert (fast.computed, fast.read) == (11, 2)
        back = list(reversed(range(11)))
        assert torch.equal(fast(x[back], keys=[KEYS[i] for i in back]), expected[back])


def test_a_new_object_reads_what_an_earlier_one_stored(root: Path) -> None:
    with fl.cached(encoder(), root) as fast:
        first = fast(inputs(), keys=KEYS)
    again = fl.cached(encoder(), root)
    assert torch.equal(again(inputs(), keys=KEYS), first)
    assert (again.computed, again.read) == (0, 11)
    again.close()


def test_another_process_goes_on_where_one_ended(root: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import sys, torch, frostline as fl\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Linear(16, 8).requires_grad_(False).eval()\n"
        "x = torch.randn(11, 16, generator=torch.Generator().manual_seed(1))\n"
        "def run(n):\n"
        "    with fl.cached(net, sys.argv[1], batch_size=4) as fast:\n"
        "        out = fast(x[:n], keys=[f'k{i}' for i in range(n)])\n"
        "    return fast.computed, fast.read, out.double().sum().item()\n"
        "print(run(int(sys.argv[2])))\n"
    )
    source = str(Path(fl.__file__).parents[1])
    found = []
    for n in (6, 11):
        command = [sys.executable, str(tmp_path / "job.py"), str(root), str(n)]
        done = subprocess.run(
            command, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found[0].startswith("(6, 0, ")
    assert found[1].startswith("(5, 6, ")


def test_it_writes_when_enough_has_come_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "_FLUSH_BYTES", 8 * 4 * 6)  # six rows
    fast = fl.cached(encoder(), root, batch_size=4)
    fast(inputs()[:5], keys=KEYS[:5])
    assert not root.exists() or not len(fl.Store.open(root))
    fast(inputs()[5:7], keys=KEYS[5:7])
    assert list(fl.Store.open(root).keys) == KEYS[:7]
    fast.close()


@pytest.mark.parametrize("codec", ["int8/token", "float16"])
def test_a_lossy_codec_shows_from_the_first_epoch_on(root: Path, codec: str) -> None:
    with fl.cached(encoder(), root, codec=codec) as fast:
        first = fast(inputs(), keys=KEYS)
        waiting = fast(inputs(), keys=KEYS)
        fast.flush()
        stored = fast(inputs(), keys=KEYS)
    assert torch.equal(first, waiting)
    assert torch.equal(first, stored)
    assert not torch.equal(first, encoder()(inputs()))
    assert fl.Store.open(root).fields["output"].codec == codec


def test_another_input_under_a_key_is_computed_again(root: Path) -> None:
    x = inputs()
    other = x.clone()
    other[3] += 1
    for flush in (False, True):
        with fl.cached(encoder(), root / str(flush), batch_size=4) as fast:
            fast(x, keys=KEYS)
            if flush:
                fast.flush()
            found = fast(other, keys=KEYS)
            assert (fast.computed, fast.read) == (12, 10)
            torch.testing.assert_close(found, encoder()(other))
        assert torch.equal(fl.cached(encoder(), root / str(flush), batch_size=4)(other, keys=KEYS), found)


def test_the_type_of_an_input_counts_too(root: Path) -> None:
    with fl.cached(lambda x: x.float() + 1, root) as fast:
        for x in (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32)):
            fast(x, keys=["a", "b"])
        assert (fast.computed, fast.read) == (4, 2)  # the bytes of the last are the same


@pytest.mark.parametrize("flush", [False, True])
def test_rows_of_another_shape_are_refused_at_once_and_the_others_kept(root: Path, flush: bool) -> None:
    with fl.cached(lambda x: x * 2, root) as fast:
        fast(inputs()[:2], keys=["a", "b"])
        if flush:
            fast.flush()
        with pytest.raises(
            UsageError, match=r"gave float32 \[5\] for \['c'\], and float32 \[16\] for the rows before"
        ):
            fast(torch.zeros(1, 5), keys=["c"])
    assert list(fl.Store.open(root).keys) == ["a", "b"]


def test_keys_are_believed_when_inputs_are_not_checked(root: Path) -> None:
    with fl.cached(encoder(), root, check_inputs=False) as fast:
        first = fast(inputs(), keys=KEYS)
        assert torch.equal(fast(inputs() + 1, keys=KEYS), first)
        assert torch.equal(fast(None, keys=KEYS[3:5]), first[3:5])
        fast.flush()
        assert torch.equal(fast(None, keys=KEYS[::-1]), first.flip(0))
        with pytest.raises(UsageError, match=r"lacks \['new'\] \(1 in all\); give x"):
            fast(None, keys=["k1", "new"])


def test_what_comes_out_can_be_trained_on(root: Path) -> None:
    head = nn.Linear(8, 2)
    with fl.cached(encoder(), root) as fast:
        for _ in range(2):  # computed, then read
            out = fast(inputs(), keys=KEYS)
            assert not out.requires_grad
            head(out).sum().backward()
            out += 1  # and changing it changes nothing stored
        fast.flush()
        head(fast(inputs(), keys=KEYS)).sum().backward()
        torch.testing.assert_close(fast(inputs(), keys=KEYS), encoder()(inputs()))


def test_a_copy_in_another_precision_is_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda *a: [made.append(1), real(*a)][1])
    net = encoder()
    with fl.cached(net, root, precision="bf16") as fast:
        made.clear()
        for i in range(4):
            assert fast(inputs()[i : i + 1], keys=[KEYS[i]]).dtype == torch.bfloat16
        calls = len(made)
        fast(inputs()[5:7], keys=KEYS[5:7])
        assert len(made) == calls
    assert net[0].weight.dtype == torch.float32


def test_a_lazy_encoder_and_a_function(root: Path) -> None:
    with fl.cached(fl.lazy(encoder), root / "lazy") as fast:
        torch.testing.assert_close(fast(inputs(), keys=KEYS), encoder()(inputs()))
    with fl.cached(lambda x: x * 2, root / "function") as fast:
        assert torch.equal(fast(inputs(), keys=KEYS), inputs() * 2)
    again = fl.cached(lambda x: x * 2, root / "function")
    assert torch.equal(again(inputs(), keys=KEYS), inputs() * 2)
    assert again.computed == 0


@pytest.mark.parametrize(
    ("x", "keys", "told"),
    [
        (inputs(2), ["a"], "1 keys for 2 rows of x"),
        (inputs(2), ["a", "a"], "each once"),
        (inputs(0), [], "at least one"),
        (None, ["a"], "check_inputs=False"),
        (inputs(2), [0, 1], r"key 0 \(int\) is not valid Unicode text"),
        (inputs(2), ["a", "\ud800"], r"key '\\ud800' \(str\) is not valid Unicode text"),
        (inputs(1), [["a"]], r"1 of 1 are no text; give for instance str\(number\)"),
    ],
)
def test_what_cannot_be_encoded_is_told(root: Path, x: Any, keys: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        fl.cached(encoder(), root)(x, keys=keys)
    with pytest.raises(UsageError) as caught:
        fl.cached(encoder(), root)(None, keys=["a", "a"])
    assert len(caught.value.problems) == 2


def test_an_encoder_that_is_not_frozen_is_refused_and_nothing_kept(root: Path) -> None:
    for net in (nn.Linear(16, 8), nn.Sequential(nn.Dropout(0.5)).train()):
        with fl.cached(net, root) as fast, pytest.raises(NotFrozen):
            fast(inputs(), keys=KEYS)
    assert not root.exists()


def test_an_encoder_that_gives_no_tensor_is_refused(root: Path) -> None:
    with fl.cached(lambda x: ["text"] * len(x), root) as fast:
        with pytest.raises(UsageError, match=r"returned list; fl\.cached needs one that gives a tensor"):
            fast(inputs(), keys=KEYS)
        assert fast.computed == 0


def test_another_encoder_is_told_or_its_rows_computed_again(root: Path) -> None:
    with fl.cached(encoder(), root) as fast:
        fast(inputs(), keys=KEYS)
    with pytest.raises(
        StoreError, match=r"rows of another encoder: weights of stage output.*stale='recompute'"
    ):
        fl.cached(encoder(1), root)
    with fl.cached(encoder(1), root, stale="recompute") as fast:
        found = fast(inputs(), keys=KEYS)
        assert (fast.computed, fast.read) == (11, 0)
    torch.testing.assert_close(found, encoder(1)(inputs()))
    assert torch.equal(fl.cached(encoder(1), root)(inputs(), keys=KEYS), found)


class Killed(BaseException):
    """What stands for the end of the process: nothing catches it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, commit: int, *, before: bool) -> list[int]:
    """The process ends at the commit of that number, counted from now: before it is made, or after it."""
    made: list[int] = []
    publish = Session.publish

    def killing(self: Session, *args: Any) -> None:
        made.append(1)
        if len(made) == commit and before:
            raise Killed
        publish(self, *args)
        if len(made) == commit:
            raise Killed

    monkeypatch.setattr(Session, "publish", killing)
    return made


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("commit", [1, 2, 3, 4])
@pytest.mark.parametrize("stale", ["recompute", "error"])
def test_killed_while_rows_are_computed_again_it_goes_on_and_serves_nothing_stale(
    root: Path, monkeypatch: pytest.MonkeyPatch, commit: int, before: bool, stale: Any
) -> None:
    with fl.cached(encoder(), root) as fast:
        fast(inputs(), keys=KEYS)
    with monkeypatch.context() as patch:
        made = killed_at(patch, commit, before=before)
        with pytest.raises(Killed), fl.cached(encoder(1), root, stale="recompute") as fast:
            fast(inputs(), keys=KEYS)
        fast._forget()  # what is dead writes nothing later
    assert len(made) == commit  # rows go, the field goes, the new field comes, rows come: four commits
    whole = commit == 1 and before
    if whole and stale == "error":  # the old rows are all there
        with pytest.raises(StoreError, match="rows of another encoder"):
            fl.cached(encoder(1), root)
        return
    with fl.cached(encoder(1), root, stale=stale) as fast:
        torch.testing.assert_close(fast(inputs(), keys=KEYS), encoder(1)(inputs()))
    again = fl.cached(encoder(1), root)
    torch.testing.assert_close(again(inputs(), keys=KEYS), encoder(1)(inputs()))
    assert (again.computed, again.read) == (0, 11)
    assert fl.Store.open(root).check(deep=True).ok


def test_computing_again_takes_four_commits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fl.cached(encoder(), root) as fast:
        fast(inputs(), keys=KEYS)
    made = killed_at(monkeypatch, 0, before=True)
    with fl.cached(encoder(1), root, stale="recompute") as fast:
        fast(inputs(), keys=KEYS)
    assert len(made) == 4


def test_an_encoder_of_another_width_can_take_over(root: Path) -> None:
    with fl.cached(lambda x: x * 2, root) as fast:
        fast(inputs(), keys=KEYS)
    with fl.cached(lambda x: x[:, :3] * 2, root, stale="recompute") as fast:
        assert fast(inputs(), keys=KEYS).shape == (11, 3)
    assert fl.Store.open(root).fields["output"].shape == (3,)


def test_a_store_of_something_else_is_refused(root: Path) -> None:
    with fl.Store.create(root, {"x": fl.Field((), "int64")}) as writer:
        writer.append("a", {"x": 1})
    with pytest.raises(StoreError, match=r"holds x; fl\.cached did not make it"):
        fl.cached(encoder(), root)


class Keeps:
    """A callable object with a network, and one that a call loads."""

    def __init__(self, *, late: bool = False) -> None:
        self.net = None if late else encoder()

    def __call__(self, x: Tensor) -> Tensor:
        if self.net is None:
            self.net = encoder()
        return self.net(x)


def used(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


def ways() -> dict[str, Any]:
    """An encoder by another name, and the tensor that it computes with."""
    method, closed, given, kept, late = encoder(), encoder(), encoder(), Keeps(), Keeps(late=True)
    table, scale = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)), np.ones(1)
    return {
        "bound method": (method.forward, lambda: method[2].weight),
        "lambda": (lambda x: closed(x), lambda: closed[2].weight),
        "partial": (functools.partial(used, given), lambda: given[2].weight),
        "object": (kept, lambda: kept.net[2].weight),
        "object that loads": (late, lambda: late.net[2].weight),
        "tensor": (functools.partial(nn.functional.linear, weight=table), lambda: table),
        "array": (lambda x: x * torch.from_numpy(scale), lambda: torch.from_numpy(scale)),
    }


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("way", [*ways()])
def test_weights_changed_in_place_are_noticed_whatever_holds_them(root: Path, way: str, flush: bool) -> None:
    fn, weight = ways()[way]
    with fl.cached(fn, root / "told") as fast, fl.cached(fn, root / "again", stale="recompute") as again:
        before = fast(inputs(), keys=KEYS)
        again(inputs(), keys=KEYS)
        assert torch.equal(fast(inputs(), keys=KEYS), before)
        assert fast.computed == 11
        if flush:
            again.flush()
        with torch.inference_mode():  # as what a call loads was made in
            weight().mul_(2)
        with pytest.raises(StoreError, match="rows of another encoder"):
            fast(inputs(), keys=KEYS)
        torch.testing.assert_close(again(inputs(), keys=KEYS), fn(inputs()))
        assert again.computed == 22


@pytest.mark.parametrize("way", ["bound method", "lambda", "partial", "object"])
def test_dropout_switched_on_is_noticed_whatever_holds_it(root: Path, way: str) -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5)).requires_grad_(False).eval()
    kept = Keeps()
    kept.net = net
    holders = {"bound method": net.forward, "lambda": lambda x: net(x), "object": kept}
    with fl.cached(holders.get(way, functools.partial(used, net)), root) as fast:
        fast(inputs()[:5], keys=KEYS[:5])
        net.train()
        with pytest.raises(NotFrozen):
            fast(inputs()[5:], keys=KEYS[5:])


def test_a_table_that_is_made_later_is_no_change(root: Path) -> None:
    tables: dict[int, Tensor] = {}

    def positions(x: Tensor) -> Tensor:
        wide = x.shape[1]
        if wide not in tables:
            tables[wide] = torch.arange(wide).float()
        return (x + tables[wide])[:, :4]

    with fl.cached(positions, root) as fast:
        for wide in (16, 12, 16, 12):
            fast(torch.zeros(2, wide), keys=[f"a{wide}", f"b{wide}"])
        assert (fast.computed, fast.read) == (4, 4)


def test_keys_that_no_store_has_are_refused_before_anything_is_computed(root: Path) -> None:
    with fl.cached(encoder(), root) as fast:
        with pytest.raises(UsageError) as caught:
            fast(inputs(2), keys=[0, 1])
        assert len(caught.value.problems) == 3
        assert fast.computed == 0
    assert not root.exists()


def test_rows_of_one_that_nobody_closed_are_written_when_it_goes(root: Path) -> None:
    fast = fl.cached(encoder(), root)
    fast(inputs(), keys=KEYS)
    del fast
    gc.collect()
    assert list(fl.Store.open(root).keys) == KEYS


ENDING = """
import sys, torch, frostline as fl
net = torch.nn.Linear(16, 8).requires_grad_(False).eval()
fast = fl.cached(net, sys.argv[1])
cycle = [fast]
cycle.append(cycle)
fast(torch.ones(2, 16), keys=["a", "b"])
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('the loop failed')", "sys.exit(4)"])
def test_rows_of_one_that_nobody_closed_are_written_when_the_program_ends(root: Path, end: str) -> None:
    done = in_a_process(ENDING + end, root)
    assert done.returncode == {"": 0, "sys.exit(4)": 4}.get(end, 1)
    assert ("the loop failed" in done.stderr) == ("failed" in end)
    assert "Exception ignored" not in done.stderr
    assert list(fl.Store.open(root).keys) == ["a", "b"]


def test_rows_that_cannot_be_written_when_the_program_ends_are_told(root: Path) -> None:
    done = in_a_process(ENDING + "open(sys.argv[1], 'w').close()  # a file where the store must be", root)
    assert done.stderr.count("Traceback") >= 1
    assert str(root) in done.stderr


def in_a_process(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(root)],
        env={"PYTHONPATH": str(Path(fl.__file__).parents[1])}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_waiting_bytes_are_those_of_the_rows_that_wait(root: Path) -> None:
    with fl.cached(encoder(), root) as fast:
        fast(inputs(), keys=KEYS)
        fast(inputs() + 1, keys=KEYS)  # in their place
        assert fast._waiting_bytes == 11 * 8 * 4
        fast.flush()
        assert fast._waiting_bytes == 0
