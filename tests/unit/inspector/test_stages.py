"""What makes a stage not frozen, planted one by one; and what must not be taken for it."""

from __future__ import annotations

import datetime
import logging
import os
import random
import secrets
import time
import uuid
from functools import cache, partial
from time import time as now

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import frostline as fl
from frostline.inspector import StageAudit, audit


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


class TinyViT(nn.Module):
    """Patches, attention, layer norm and dropout: what a frozen image encoder is made of."""

    def __init__(self, width: int = 16, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_B3HW: Tensor) -> Tensor:
        tokens_BLD = self.patches(x_B3HW).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(tokens_BLD))


def seeded(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


COUNT = 0
NETWORK = nn.Linear(4, 4)
HALF = nn.ModuleDict({"backbone": nn.Linear(4, 4).requires_grad_(False), "head": nn.Linear(4, 2)})
RNG = np.random.default_rng(0)


def look(fn, *example: Tensor) -> StageAudit:
    return audit(fn, *(example or (seeded((6, 4)),))).stages[0]


def reason(fn, *example: Tensor) -> str:
    found = look(fn, *example)
    assert not found.frozen
    return "\n".join(found.reasons)


# what is frozen


class OnlyLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def local_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = np.random.default_rng(7).normal(size=4) + random.Random(3).random()
    return x + torch.rand(4, generator=generator) + torch.from_numpy(noise).float()


def forks_the_generator(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return x + torch.rand(4)


def logs_its_time(x: Tensor) -> Tensor:
    start = time.perf_counter()
    y = x * 2
    logging.getLogger("frostline.test").debug("took %s s", time.perf_counter() - start)
    return y


class Caches:
    """Fills a cache at its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        self.table: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.table:
            self.table[x.shape[1]] = torch.arange(x.shape[1])
        return x + self.table[x.shape[1]]


images = partial(seeded, (4, 3, 8, 8))


@pytest.mark.parametrize(
    ("fn", "example"),
    [
        (frozen(TinyViT()), images()),
        (frozen(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d())), images()),
        (frozen(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))).train(), images()),
        (nn.LayerNorm(4).requires_grad_(False), seeded((6, 4))),
        (OnlyLinear().requires_grad_(False).train(), seeded((6, 4))),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(p=0.0)).requires_grad_(False).train(), seeded((6, 4))),
        (local_generator, seeded((6, 4))),
        (forks_the_generator, seeded((6, 4))),
        (logs_its_time, seeded((6, 4))),
        (Caches(), seeded((6, 4))),
        (frozen(nn.LSTM(4, 3, 2, batch_first=True, dropout=0.1)), seeded((6, 5, 4))),
        (frozen(nn.Embedding(10, 3)), torch.arange(6)),
        (lambda x: HALF.backbone(x), seeded((6, 4))),
        (lambda x: x.sum(1), torch.full((3, 2), float("nan"))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_frozen_is_not_refused(fn, example: Tensor) -> None:
    found = look(fn, example)
    assert found.reasons == ()


def test_a_generator_that_is_put_back_is_no_reason() -> None:
    assert look(forks_the_generator).reasons == ()


def test_a_clock_for_a_log_is_noted() -> None:
    assert "time.perf_counter in logs_its_time" in look(logs_its_time).notes[0]


# parameters and modes


def test_a_trained_network_is_refused_with_its_parameters() -> None:
    told = reason(nn.Linear(4, 4))
    assert "20 of 20 parameters (100%) require a gradient, from 'weight' to 'bias'" in told


def test_a_partly_trained_encoder_says_where_the_frozen_part_ends() -> None:
    encoder = nn.Sequential()
    encoder.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    encoder.blocks[:2].requires_grad_(False)
    encoder.forward = lambda x: encoder.blocks[3](encoder.blocks[0](x))
    assert "(blocks 0–1 are frozen, blocks.2.weight trains)" in reason(encoder.eval())


class Holder:
    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, x: Tensor) -> Tensor:
        return self.network(x)

    def method(self, x: Tensor) -> Tensor:
        return self.network(x)


def through_a_global(x: Tensor) -> Tensor:
    return two_calls_down(x)


def two_calls_down(x: Tensor) -> Tensor:
    return NETWORK(x)


def test_networks_are_found_wherever_a_function_has_them() -> None:
    network = nn.Linear(4, 4)
    holder = Holder(network)
    used = [
        holder,
        holder.method,
        lambda x: network(x),
        partial(lambda net, x: net(x), network),
        through_a_global,
        torch.no_grad()(lambda x: network(x)),
    ]
    for fn in used:
        assert "20 of 20 parameters" in reason(fn)


@cache
def hidden_away() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_a_network_that_no_name_leads_to_is_found_because_it_is_called() -> None:
    told = reason(lambda x: hidden_away()(x))
    assert "28 of 28 parameters" in told
    assert "'Sequential.1.running_mean'" in told
    assert int(hidden_away()[1].num_batches_tracked) <= 1  # the first call loads it: nothing was there before


def test_a_part_of_a_network_is_all_that_counts() -> None:
    assert "10 of 10 parameters" in reason(lambda x: HALF.head(x))


class AsksForTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (nn.Dropout(0.1), "dropout '0' (p=0.1) is in train mode: call .eval()"),
        (nn.BatchNorm1d(4), "batch norm '0' is in train mode"),
        (nn.AlphaDropout(0.5), "dropout '0' (p=0.5)"),
        (nn.RReLU(), "randomised activation '0'"),
        (AsksForTraining(), "'0', whose code asks for self.training"),
        (nn.LSTM(4, 4, 2, dropout=0.3), "dropout inside '0' (p=0.3)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_train_mode_is_refused_where_it_matters(network: nn.Module, told: str) -> None:
    whole = nn.Sequential(network).requires_grad_(False)
    assert told not in "\n".join(look(whole.eval()).reasons)
    assert told in reason(whole.train())


# randomness


def flips(x: Tensor) -> Tensor:
    return x.flip(1) if torch.rand(()) < 0.5 else x


def flips_by_python(x: Tensor) -> Tensor:
    return x.flip(1) if random.random() < 0.5 else x


def flips_by_numpy(x: Tensor) -> Tensor:
    return x.flip(1) if np.random.rand() < 0.5 else x


def functional_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def unseeded(x: Tensor) -> Tensor:
    return x + np.random.default_rng().normal()


def unseeded_but_unused(x: Tensor) -> Tensor:
    np.random.SeedSequence()
    return x


def imports_inside(x: Tensor) -> Tensor:
    from random import gauss

    return x + gauss(0, 1)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (flips, "aten.rand in flips (test_stages.py:"),
        (flips, "torch's CPU generator moved"),
        (flips_by_python, "random.random in flips_by_python"),
        (flips_by_python, "Python's random generator moved"),
        (flips_by_numpy, "np.random.rand in flips_by_numpy"),
        (functional_dropout, "Two runs under different seeds do not agree: 'output' differs by up to"),
        (unseeded, "asks the operating system for random bytes in unseeded"),
        (unseeded_but_unused, "asks the operating system for random bytes in unseeded_but_unused"),
        (imports_inside, "gauss in imports_inside"),
        (lambda x: x + secrets.randbelow(9), "secrets.randbelow"),
        (lambda x: x + random.SystemRandom().random(), "asks the operating system"),
        (lambda x: x + uuid.uuid4().int % 7, "uuid.uuid4"),
        (lambda x: x + len(os.urandom(2)), "os.urandom"),
        (lambda x: x + random.Random().random(), "two runs with the same inputs do not agree"),
    ],
)
def test_live_randomness_is_refused(fn, told: str) -> None:
    found = reason(fn)
    assert told in found
    assert "ark the stage random=True (it then runs every epoch), or make it a pure function" in found


def of_the_worker(x: Tensor) -> Tensor:
    info = torch.utils.data.get_worker_info()
    return x if info is None else x + info.id


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (of_the_worker, "torch.utils.data.get_worker_info (the worker of a DataLoader) in of_the_worker"),
        (lambda x: x + torch.initial_seed() % 2, "torch.initial_seed (the seed of the process)"),
        (lambda x: x + os.getpid(), "os.getpid (the process)"),
        (lambda x: x + datetime.datetime.now().hour * 0, "datetime.datetime.now"),
        (lambda x: x + datetime.date.today().year, "datetime.date.today"),
        (lambda x: x + time.time(), "its result depends on the clock (time.time"),
        (lambda x: x + int(time.time() / 1800) % 24, "depends on the clock"),
        (lambda x: x + now() // 3600 % 24, "depends on the clock (now in"),
        (lambda x: x + time.localtime().tm_hour, "depends on the clock"),
    ],
)
def test_dates_processes_and_clocks_are_refused(fn, told: str) -> None:
    assert told in reason(fn)


class OwnGenerator:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.rng.normal()


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CountsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def counts_globally(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x


def counting_closure():
    n = 0

    def count(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x

    return count


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (OwnGenerator(), "'rng' (a generator)"),
        (Counts(), "'calls' (1 → 2)"),
        (CountsInside(), "'calls' (1 → 2)"),
        (counts_globally, "'COUNT' (1 → 2)"),
        (partial(lambda log, x: log.append(1) or x, []), "len()' (1 → 2)"),
        (counting_closure(), "'n' (1 → 2)"),
        (lambda x: x + RNG.normal(), "'RNG' (a generator)"),
        (
            partial(lambda g, x: x + torch.rand(4, generator=g), torch.Generator().manual_seed(1)),
            "(a generator)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_kept_from_call_to_call_is_refused(fn, told: str) -> None:
    assert told in reason(fn)
    assert told in reason(fn)  # the first audit put everything back


# writes


def test_hidden_writes_of_batch_norm_are_named() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).train()
    assert "'1.running_mean', '1.running_var', '1.num_batches_tracked'" in reason(network)


class Drifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1
        return x


def test_a_buffer_that_is_exchanged_counts_as_moved() -> None:
    network = Drifts()
    mean = network.mean
    assert "buffers: 'mean'" in reason(network)
    assert network.mean is mean
    assert not mean.any()


def test_inputs_written_in_place_are_refused() -> None:
    x = seeded((6, 4))
    was = x.clone()
    assert "it writes into what it is given: 'argument 0'" in reason(lambda x: x.relu_().sum(1), x)
    assert torch.equal(x, was)


# rows


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.abs().max(),
        lambda x: x.softmax(0),
        lambda x: x.roll(1, 0),
        lambda x: (x.numpy() - x.numpy().mean(0),),
        lambda x: {"deep": [x.cumsum(0)]},
        nn.BatchNorm1d(4, track_running_stats=False, affine=False).eval(),
    ],
)
def test_a_row_that_depends_on_its_mates_is_refused(fn) -> None:
    assert "a row depends on the rows beside it: with" in reason(fn)


def test_a_row_that_depends_on_its_place_is_refused() -> None:
    told = reason(lambda x: x + torch.arange(len(x))[:, None])
    assert "a row depends on its place in the chunk: 'output' differs by up to" in told


def test_round_off_by_place_is_only_noted() -> None:
    found = look(lambda x: x * (1 + 1e-7 * torch.arange(len(x))[:, None]))
    assert found.frozen
    assert "round-off" in found.notes[0]


def test_memory_that_the_next_call_writes_to_is_refused() -> None:
    buffer = torch.zeros(3, 2)

    def reuses(x: Tensor) -> Tensor:
        return buffer.copy_(x)

    reasons = look(reuses, torch.randn(3, 2)).reasons
    assert any("its next call writes to" in reason for reason in reasons)


def test_a_decoder_that_reuses_its_buffer_is_refused() -> None:
    buffer = np.zeros(2, np.float32)

    def decode(x: float) -> np.ndarray:
        buffer[:] = x
        return buffer

    rows = fl.Source.table([{"key": str(i), "x": float(i)} for i in range(4)])
    report = fl.audit(fl.Pipeline(rows, fl.Stage("y", decode, reads="x", version="1")))
    assert any("its next call writes to" in reason for reason in report.stages[0].reasons)
