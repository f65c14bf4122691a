"""What is prepared ahead: in order, failures in their place, never more than is wanted, and it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from frostline.errors import FeedError, UsageError
from frostline.supply.ahead import READY, Ahead, Pool, n_threads


def numbers(n: int, finish: Callable[[int], Any] = lambda i: i) -> Iterator[Callable[[], Any]]:
    for i in range(n):
        yield partial(finish, i)


def test_results_come_in_order_and_end() -> None:
    ahead = Ahead(numbers(20))
    assert [*ahead] == [*range(20)]
    assert [*ahead] == []
    ahead.close()


def test_no_more_is_prepared_than_is_kept_ready() -> None:
    done: list[int] = []
    ahead = Ahead(numbers(50, lambda i: done.append(i) or i))
    next(ahead)
    for _ in range(50):
        time.sleep(0.01)
    assert len(done) <= 1 + READY + 1  # handed out, ready, and one in hand
    ahead.close()


def fail_at(where: int, error: Exception, i: int) -> int:
    if i == where:
        raise error
    return i


@pytest.mark.parametrize("error", [UsageError("this is wrong"), KeyError("that")])
def test_a_failure_arrives_in_the_place_of_its_batch(error: Exception) -> None:
    ahead = Ahead(numbers(9, partial(fail_at, 3, error)))
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    told = "this is wrong" if isinstance(error, UsageError) else "Preparing batches failed: KeyError: 'that'"
    with pytest.raises((UsageError, FeedError), match=told):
        next(ahead)
    ahead.close()


def test_where_beginning_fails_the_batches_before_come_first() -> None:
    def begun() -> Iterator[Callable[[], int]]:
        yield from numbers(2)
        raise UsageError("the order is wrong")

    ahead = Ahead(begun())
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(UsageError, match="the order is wrong"):
        next(ahead)
    ahead.close()


def test_closing_ends_the_thread_and_closes_what_it_read_from() -> None:
    closed = threading.Event()

    def begun() -> Iterator[Callable[[], int]]:
        try:
            yield from numbers(1000)
        finally:
            closed.set()

    ahead = Ahead(begun())
    next(ahead)
    ahead.close()
    ahead.close()
    assert closed.is_set()
    assert not ahead._thread.is_alive()


def test_a_pool_computes_with_one_of_torchs_threads_each() -> None:
    usual = torch.get_num_threads()
    pool = Pool(3)
    try:
        assert {pool.submit(torch.get_num_threads).result() for _ in range(12)} == {1}
        assert torch.get_num_threads() == usual
    finally:
        pool.close()


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12), raising=False)
    found = []
    for ranks in ("1", "4", "64", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(n_threads())
    assert found == [12, 3, 1, 12]
