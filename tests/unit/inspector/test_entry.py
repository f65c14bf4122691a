"""fl.audit on pipelines, workloads and networks; and that it leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import NotFrozen, StageFailed, UsageError
from frostline.execution import Ready
from frostline.inspector import audit


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def rows(n: int = 10) -> list[dict[str, object]]:
    return [{"key": f"k{i}", "x": torch.arange(4.0) + i, "label": i % 2} for i in range(n)]


def load_encoder() -> nn.Module:
    return frozen(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1)))


def load_in_train_mode() -> nn.Module:
    return load_encoder().train()


def crop(x: Tensor, rng: np.random.Generator) -> Tensor:
    return x[..., : int(rng.integers(3, 4))]


def pipeline(loader=load_encoder, **options) -> fl.Pipeline:
    return fl.Pipeline(
        fl.Source.table(rows()),
        fl.Stage("scaled", lambda x: x / 10, reads="x"),
        fl.Stage("features", fl.lazy(loader), reads="scaled", on="device", batch_size=4, **options),
        fl.Stage("view", crop, reads="features", random=True),
        outputs=["view", "label"],
    )


def test_a_pipeline_is_looked_at_below_the_line() -> None:
    report = audit(pipeline())
    assert [stage.name for stage in report.stages] == ["scaled", "features"]
    assert report.ok, str(report)
    report.raise_if_not_frozen()


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"compile": True}])
def test_a_fault_is_named_with_its_place_and_refused(options) -> None:
    report = audit(pipeline(load_in_train_mode, **options))
    assert not report.ok
    assert report.stages[0].frozen
    assert "dropout '1' (p=0.1) is in train mode: call .eval() in load_in_train_mode" in str(report)
    with pytest.raises(NotFrozen, match="features: dropout") as caught:
        report.raise_if_not_frozen()
    assert len(caught.value.problems) == len(report.stages[1].reasons)
    report.raise_if_not_frozen(["scaled"])
    with pytest.raises(UsageError, match="'feature'"):
        report.raise_if_not_frozen(["feature"])


def test_an_unmarked_random_flip_is_refused() -> None:
    data = fl.Pipeline(
        fl.Source.table(rows()),
        fl.Stage("flipped", lambda x: x.flip(0) if random.random() < 0.5 else x, reads="x"),
    )
    told = str(audit(data))
    assert "random.random" in told
    assert "mark the stage random=True" in told


def test_one_sample_at_a_time_names_the_keys_that_differ() -> None:
    data = fl.Pipeline(
        fl.Source.table(rows()), fl.Stage("noisy", lambda x: x + torch.rand(()) * (x[0] > 6), reads="x")
    )
    assert "'noisy' differs by up to" in str(audit(data))
    assert "for 'k7'" in str(audit(data))


def test_samples_that_fail_are_left_out_and_noted() -> None:
    def picky(x: Tensor) -> Tensor:
        if x[0] in (1, 2):
            raise ValueError("no such luck")
        return x

    data = fl.Pipeline(
        fl.Source.table(rows()), fl.Stage("picky", picky, reads="x"), fl.Stage("y", torch.abs, reads="picky")
    )
    report = audit(data, samples=4)
    assert report.ok, str(report)
    assert report.stages[0].notes == ("2 samples were left out, failing with: ValueError: no such luck",)
    assert report.stages[1].notes == ()


def test_a_stage_that_always_fails_says_so() -> None:
    data = fl.Pipeline(fl.Source.table(rows()), fl.Stage("y", lambda x: x[99], reads="x"))
    with pytest.raises(StageFailed, match="IndexError"):
        audit(data)


LATE = fl.lazy(lambda: nn.BatchNorm1d(4))


def test_a_network_that_the_first_call_loads_is_looked_at_and_put_back() -> None:
    report = audit(lambda x: LATE.get()(x), torch.randn(5, 4))
    told = str(report)
    assert "8 of 8 parameters" in told
    assert "'LATE.running_mean'" in told or "running_mean" in told


def test_text_that_is_padded_to_the_longest_depends_on_its_mates() -> None:
    def tokens(texts: list[str]) -> Tensor:
        longest = max(map(len, texts))
        return torch.tensor([[*map(ord, text.ljust(longest))] for text in texts])

    source = fl.Source.table([{"key": str(i), "text": "abc"} for i in range(3)])
    report = audit(fl.Pipeline(source, fl.Stage("ids", tokens, reads="text", batch_size=3)))
    assert "a row depends on the rows beside it" in str(report)


def test_two_inputs_and_several_outputs() -> None:
    data = fl.Pipeline(
        fl.Source.table(rows()),
        fl.Stage(
            "both", lambda x, y: (x * y[:, None], x - x.mean(0)), reads=["x", "label"],
            writes=["good", "bad"], batch_size=4,
        ),
    )  # fmt: skip
    told = str(audit(data))
    assert "'bad' differs" in told
    assert "'good'" not in told


# no trace


def state_of(network: nn.Module) -> tuple:
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    flags = [(p.requires_grad, p.grad) for p in network.parameters()]
    return tensors, flags, [m.training for m in network.modules()]


def rng_states() -> tuple:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def test_an_audit_leaves_no_trace() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    network[0].requires_grad_(False)
    network[2].eval()
    holder = {"calls": 0, "log": []}

    def busy(x: Tensor) -> Tensor:
        holder["calls"] += 1
        holder["log"].append(x.sum())
        holder["cache"] = x
        np.random.rand()
        return network(x) + random.random()

    source = fl.Source.table(rows())
    data = fl.Pipeline(source, fl.Stage("busy", busy, reads="x", batch_size=4))
    tensors, flags, modes = state_of(network)
    before = rng_states()
    assert not audit(data).ok
    assert not audit(busy, torch.ones(3, 4)).ok
    after = state_of(network)
    assert rng_states() == before
    assert (flags, modes) == after[1:]
    assert all(torch.equal(tensors[name], after[0][name]) for name in tensors)
    assert holder == {"calls": 0, "log": []}


def test_it_cleans_up_when_the_stage_raises() -> None:
    import os
    import time

    network = nn.BatchNorm1d(4)

    def fails_at_last(x: Tensor) -> Tensor:
        network(x)
        raise RuntimeError(f"after {time.time()}")

    names = os.urandom, time.time, random._urandom
    before = rng_states()
    with pytest.raises(StageFailed):
        audit(fails_at_last, torch.ones(3, 4))
    assert (os.urandom, time.time, random._urandom) == names
    assert rng_states() == before
    assert int(network.num_batches_tracked) == 0


# workloads


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.forgotten = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def loss(model: nn.Module, batch: fl.Batch) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch["view"]), batch["label"])}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def work(data, **options) -> fl.Workload:
    given = {"model": fl.lazy(Head), "loss": loss, "optimizer": sgd, "batch_size": 4}
    return fl.Workload(data, **(given | options))


def test_a_workload_is_looked_at_with_its_training_step() -> None:
    report = audit(work(pipeline()))
    assert all(stage.frozen for stage in report.stages)
    assert report.training is not None
    assert report.training.findings[0].startswith("2 trainable parameters got no gradient: forgotten (weight")
    assert not report.ok
    assert "one training step: look at this" in str(report)
    assert audit(work(pipeline()), training=False).ok


def test_picks_and_several_pipelines_reach_the_loss() -> None:
    seen = {}

    def look(model: nn.Module, batch: fl.Batch) -> Tensor:
        seen.update(batch)
        return model(batch["a"]["x"][:, :3]).sum()

    one = fl.Pipeline(fl.Source.table(rows()), fl.Stage("y", torch.abs, reads="x"), fl.Pick("x", n=3))
    other = fl.Pipeline(fl.Source.table([{"key": str(i), "t": "abc"[: i + 1]} for i in range(3)]))
    report = audit(work({"a": one, "b": other}, loss=look))
    assert report.stages[0].name == "a/y"
    report.raise_if_not_frozen(["y"])
    assert seen["a"]["x"].shape == (8, 3)
    assert seen["a"].keys_of_rows[0] == "k0"
    assert seen["b"]["t"] == ["a", "ab", "abc"]


def test_a_random_stage_without_eval_is_refused_in_evaluation() -> None:
    report = audit(work(pipeline()), evaluation=True, training=False)
    assert not report.ok
    assert "stage 'view' is random and has no eval=: it would be random in evaluation" in str(report)


def test_an_experiment_has_no_training_step() -> None:
    assert audit(fl.Workload(pipeline(), run=print)).training is None


# wrong arguments


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        audit(nn.Linear(2, 2), samples=0, loss=loss)
    assert len(caught.value.problems) == 3
    with pytest.raises(UsageError, match="it is int"):
        audit(3, torch.ones(1))
    with pytest.raises(UsageError, match="equally many rows"):
        audit(torch.add, torch.ones(2), torch.ones(3))
    with pytest.raises(UsageError, match="brings its own"):
        audit(pipeline(), torch.ones(2))


@pytest.mark.parametrize("chunk", [8, 32])
def test_a_good_stage_of_chunks_is_called_six_times(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = Ready._chunk
    monkeypatch.setattr(Ready, "_chunk", lambda *a: [sizes.append(a[3]), real(*a)][1])
    network = nn.Linear(4, 3).requires_grad_(False).eval()
    stage = fl.Stage("y", network, reads="x", on="device", batch_size=chunk)
    assert fl.audit(fl.Pipeline(vectors(), stage)).ok
    assert sizes == [chunk] * 6


def vectors() -> fl.Source:
    return fl.Source.table([{"key": str(i), "x": torch.arange(4.0) + i} for i in range(20)])


def test_several_chunks_of_few_rows_are_compared_too() -> None:
    for fn, told in (
        (lambda x: x - x.mean(0), "a row depends on the rows beside it"),
        (lambda x: x + torch.arange(len(x))[:, None], "a row depends on its place"),
    ):
        for chunk in (2, 3, 4):
            stage = fl.Stage("y", fn, reads="x", batch_size=chunk)
            (reason,) = fl.audit(fl.Pipeline(vectors(), stage)).stages[0].reasons
            assert told in reason


@pytest.mark.parametrize("chunk", [8, 32])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x - x.mean(0),
        lambda x: x - x.amin(),
        lambda x: x / x.amax(),
        lambda x: x + (x == 0).all(1).sum(),
        lambda x: torch.cat([x[:-2], x[-2:] + x[0]]),  # rows that stay together with the one they depend on
        lambda x: x + x.unique(dim=0).shape[0],
    ],
)
def test_what_depends_on_other_rows_is_refused_in_chunks_of_any_size(fn, chunk: int) -> None:
    stage = fl.Stage("y", fn, reads="x", on="device", batch_size=chunk)
    assert not fl.audit(fl.Pipeline(vectors(), stage)).ok


def test_it_says_what_it_looks_at() -> None:
    said: list[str] = []
    rows = fl.Source.table([{"key": str(i), "x": float(i)} for i in range(3)])
    stages = [fl.Stage("a", lambda x: x, reads="x"), fl.Stage("b", lambda a: a, reads="a")]
    assert fl.audit(fl.Pipeline(rows, *stages), progress=said.append).ok
    assert said == ["computing 8 samples", "looking at stage 'a'", "looking at stage 'b'"]


def test_read_only_arrays_and_results_give_no_warning(warnings_always: None) -> None:
    def read_only(x: object) -> np.ndarray:
        array = np.asarray(x, np.float32) * 2
        array.flags.writeable = False
        return array

    given = [{"x": read_only([i, i + 1])} for i in range(9)]
    stage = fl.Stage("y", lambda x: x.sum(1), reads="x", on="device", batch_size=4)
    assert fl.audit(fl.Pipeline(fl.Source.dataset(given), stage)).ok
    assert audit(lambda x: read_only(x.numpy()), torch.ones(7, 2)).ok
    assert not audit(lambda x: read_only(x.numpy() - x.numpy().mean()), torch.arange(14.0).view(7, 2)).ok


def test_sparse_results_are_refused_with_what_to_do() -> None:
    rows = fl.Source.table([{"key": str(i), "x": float(i)} for i in range(3)])
    stage = fl.Stage("y", lambda x: (torch.eye(3) * x).to_sparse(), reads="x")
    with pytest.raises(StageFailed, match=r"'y' is a sparse tensor .* Return y.to_dense\(\)"):
        fl.audit(fl.Pipeline(rows, stage))
