"""One step: equal to the loop by hand, in parts, out of memory, with numbers that are none."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frostline.batch import Batch, Ragged
from frostline.errors import CompileFailed, OutOfMemory, UsageError
from frostline.step import Step
from frostline.training import Training


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    out = model(batch["x"])
    return {"loss": (out - batch["y"]).square().mean(), "size": out.abs().mean()}


def batch_of(rows: int, seed: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    fields = {"x": torch.randn(rows, 5, generator=make), "y": torch.randn(rows, 1, generator=make)}
    return Batch(fields, [f"k{i}" for i in range(rows)])


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, **how)


def step_of(model: nn.Module, **settings: Any) -> Step:
    return Step(model, loss, adamw(model), training=Training(**settings), note=lambda text: None)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("given", "how"), [({}, {"fused": True}), ({"fused": False}, {}), ({"foreach": True}, {"foreach": True})]
)
def test_a_step_is_the_loop_by_hand_bit_for_bit(given: dict[str, bool], how: dict[str, bool]) -> None:
    ours, theirs = net(norm=True), net(norm=True)
    step = Step(ours, loss, adamw(ours, **given), training=Training())
    by_hand = adamw(theirs, **how)
    for i in range(6):
        figures = step(batch_of(7, i))
        by_hand.zero_grad()
        value = loss(theirs, batch_of(7, i))
        value["loss"].backward()
        by_hand.step()
        assert torch.equal(figures["loss"], value["loss"].detach())
    assert same(ours, theirs)


@pytest.mark.parametrize("microbatch", [1, 2, 3, 7, 8, 100])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(microbatch: int) -> None:
    """Against float64: sums in another order may differ by rounding, 1e-6 of the largest gradient."""
    exact = net().double()
    whole = Batch({n: v.double() for n, v in batch_of(8, 3).items()}, [])
    loss(exact, whole)["loss"].backward()
    model, seen = net(), list[Tensor]()
    step = step_of(model, microbatch=microbatch)
    step.on_grads = lambda: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    figures = step(batch_of(8, 3))
    largest = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
    for got, parameter in zip(seen, exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert float((got.double() - parameter.grad).abs().max()) <= 1e-6 * largest
    assert float(figures["loss"]) == pytest.approx(loss(net(), batch_of(8, 3))["loss"].item(), rel=1e-5)


def test_texts_and_ragged_fields_are_split_too() -> None:
    rows = Batch(
        {"x": torch.ones(3, 5), "y": torch.zeros(3, 1), "t": ["a", "b", "c"],
         "r": Ragged(torch.arange(6), torch.tensor([0, 1, 3, 6]))}, ["k0", "k1", "k2"],
    )  # fmt: skip
    seen = []

    def look(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((batch["t"], [row.tolist() for row in batch["r"]], batch.keys_of_rows))
        return loss(model, batch)["loss"]

    model = net()
    Step(model, look, adamw(model), training=Training(microbatch=2))(rows)
    assert seen == [(["a", "b"], [[0], [1, 2]], ["k0", "k1"]), (["c"], [[3, 4, 5]], ["k2"])]


def limited(most: int) -> Callable[..., dict[str, Tensor]]:
    """A loss whose device holds so many rows."""

    def call(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        result = loss(model, batch)
        if batch.n_rows > most:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory with {batch.n_rows} rows. Tried to allocate 2 GB"
            )
        return result

    return call


def test_out_of_memory_halves_the_part_and_repeats_the_step_as_if_nothing_had_been() -> None:
    ours, theirs, told = net(dropout=0.5, norm=True), net(dropout=0.5, norm=True), list[str]()
    step = Step(ours, limited(3), adamw(ours), training=Training(), note=told.append)
    small = step_of(theirs, microbatch=2)
    for seed in range(3):
        torch.manual_seed(seed)
        step(batch_of(8, seed))
        torch.manual_seed(seed)
        small(batch_of(8, seed))
    assert step.microbatch == 2
    assert same(ours, theirs)
    assert [text.split(" (")[0] for text in told] == [
        "out of memory with 8 rows a pass", "out of memory with 4 rows a pass"
    ]  # fmt: skip
    assert "2 from now on" in told[1]


def test_not_even_one_row_fits() -> None:
    model = net()
    step = Step(model, limited(0), adamw(model), training=Training(), note=lambda text: None)
    with pytest.raises(
        OutOfMemory, match=r"one row a pass does not fit into memory: .*Tried to allocate 2 GB"
    ):
        step(batch_of(4, 0))
    assert all(p.grad is None for p in model.parameters())


def test_another_error_is_not_taken_for_memory() -> None:
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model = net()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Step(model, broken, adamw(model), training=Training())(batch_of(2, 0))


@pytest.mark.parametrize("where", ["x", "y"])
def test_a_number_that_is_none_skips_the_update_and_leaves_everything_alone(where: str) -> None:
    model = net(norm=True)
    step = step_of(model)
    step(batch_of(6, 0))
    before, state = copy.deepcopy(model), copy.deepcopy(step.optimizer.state_dict())
    poisoned = batch_of(6, 1)
    poisoned[where][2] = float("nan")
    assert float(step(poisoned)["bad"]) == 1
    assert same(model, before)
    after = step.optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[i][n]) for i, s in state["state"].items() for n, v in s.items())
    assert float(step(batch_of(6, 2))["bad"]) == 0
    assert not same(model, before)


def test_gradients_are_clipped_to_their_norm() -> None:
    model, norms = net(), list[float]()
    step = step_of(model, clip=0.01)
    optimizer_step = step.optimizer.step

    def look(*args: Any) -> Any:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return optimizer_step(*args)

    step.optimizer.step = look  # type: ignore[method-assign]
    figures = step(batch_of(6, 0), norm=True)
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert float(figures["grad_norm"]) > 0.1  # the norm before


def test_the_norm_is_there_where_it_is_asked_for() -> None:
    assert "grad_norm" not in step_of(net(), clip=1.0)(batch_of(6, 0))
    assert "grad_norm" in step_of(net())(batch_of(6, 0), norm=True)


def test_fp16_scales_the_loss_and_an_overflow_halves_the_scale() -> None:
    model = net()
    step = step_of(model, precision="fp16")
    assert step.scaler is not None
    step.scaler.scale.fill_(2.0**100)
    before = copy.deepcopy(model)
    figures = step(batch_of(6, 0))
    assert (float(figures["overflow"]), float(figures["bad"])) == (1, 0)
    assert float(figures["scale"]) == 2.0**99
    assert same(model, before)
    step.scaler.scale.fill_(1024.0)
    figures = step(batch_of(6, 0))
    assert (float(figures["overflow"]), float(figures["bad"]), float(figures["scale"])) == (0, 0, 1024)
    assert not same(model, before)


def test_gradients_of_fp16_are_those_of_fp32_within_its_rounding() -> None:
    found: dict[str, list[Tensor]] = {}
    for precision in ("fp32", "fp16", "bf16"):
        model = net()
        step = step_of(model, precision=precision)
        seen = found.setdefault(precision, [])

        def look(seen: list[Tensor] = seen, model: nn.Module = model, step: Step = step) -> None:
            scale = step.scaler.scale if step.scaler is not None else 1.0
            seen.extend(p.grad / scale for p in model.parameters() if p.grad is not None)

        step.on_grads = look
        step(batch_of(64, 0))
    for precision, bits in (("fp16", 10), ("bf16", 7)):
        for exact, got in zip(found["fp32"], found[precision], strict=True):
            # a few roundings of 2^-bits each, on sums whose terms are of the size of the largest
            assert float((exact - got).abs().max()) <= 8 * 2**-bits * float(exact.abs().max())


def test_rehearsing_changes_nothing() -> None:
    ours, theirs = net(dropout=0.5, norm=True), net(dropout=0.5, norm=True)
    rehearsed, plain = step_of(ours), step_of(theirs)
    torch.manual_seed(1)
    rehearsed.rehearse(batch_of(6, 5))
    assert all(p.grad is None for p in ours.parameters())
    rehearsed(batch_of(6, 0))
    torch.manual_seed(1)
    plain(batch_of(6, 0))
    assert same(ours, theirs)


def refusing(graph: Any, inputs: Any) -> Any:
    raise ValueError("no such instruction")


def test_a_model_that_cannot_be_compiled_runs_without_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, told = torch.compile, list[str]()
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=refusing))
    ours, theirs = net(), net()
    step = Step(ours, loss, adamw(ours), training=Training(compile=True), note=told.append)
    plain = step_of(theirs)
    for seed in range(2):
        step(batch_of(4, seed))
        plain(batch_of(4, seed))
    assert same(ours, theirs)
    assert len(told) == 1
    assert "cannot be compiled and runs without" in told[0]
    assert "no such instruction" in told[0]
    strict = Step(net(), loss, adamw(ours), training=Training(compile=True), strict=True)
    with pytest.raises(CompileFailed, match="no such instruction"):
        strict(batch_of(4, 0))


def late(error: Exception) -> Any:
    """A backend whose forward passes work and whose backward passes, compiled when they are run, do not."""
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: Any, inputs: Any) -> Any:
        raise error

    return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=refuse)


@pytest.fixture
def fails_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    real = torch.compile

    def patch(error: Exception) -> None:
        torch.compiler.reset()
        monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=late(error)))

    return patch


class Failed(Exception):
    """As torch's own are told: by the module they come from."""

    __module__ = "torch._inductor.exc"


def test_a_backward_pass_that_cannot_be_compiled_leaves_no_trace(
    fails_late: Callable[[Exception], None],
) -> None:
    """Numbers that dropout drew, statistics and gradients of the first try: as if it had not been."""
    fails_late(Failed("no such instruction"))
    ours, theirs, told = net(dropout=0.5, norm=True), net(dropout=0.5, norm=True), list[str]()
    step = Step(ours, loss, adamw(ours), training=Training(compile=True, microbatch=3), note=told.append)
    plain = step_of(theirs, microbatch=3)
    for each in (step, plain):
        torch.manual_seed(4)
        for seed in range(3):
            each(batch_of(6, seed))
    assert same(ours, theirs)
    assert len(told) == 1
    assert told[0] == (
        "the model cannot be compiled and runs without from now on: Failed: no such instruction"
    )


def test_a_backward_pass_that_cannot_be_compiled_shows_in_a_rehearsal(
    fails_late: Callable[[Exception], None],
) -> None:
    fails_late(Failed("no such instruction"))
    ours, told = net(dropout=0.5, norm=True), list[str]()
    before = copy.deepcopy(ours)
    step = Step(ours, loss, adamw(ours), training=Training(compile=True), note=told.append)
    state = torch.get_rng_state()
    for _ in range(2):
        step.rehearse(batch_of(6, 0))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(ours, before)
    assert all(p.grad is None for p in ours.parameters())
    assert len(told) == 1


def test_a_backward_pass_that_cannot_be_compiled_is_an_error_where_strict(
    fails_late: Callable[[Exception], None],
) -> None:
    fails_late(Failed("no such instruction"))
    model = net()
    step = Step(model, loss, adamw(model), training=Training(compile=True), strict=True)
    with pytest.raises(CompileFailed, match="no such instruction"):
        step(batch_of(4, 0))


def test_another_error_of_a_compiled_backward_pass_is_not_taken_for_its_compilation(
    fails_late: Callable[[Exception], None],
) -> None:
    fails_late(ZeroDivisionError("somebody else's"))
    model, told = net(), list[str]()
    step = Step(model, loss, adamw(model), training=Training(compile=True), note=told.append)
    with pytest.raises(ZeroDivisionError, match="somebody else's"):
        step(batch_of(4, 0))
    assert told == []


def test_figures_without_gradients_are_never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = torch.compile, list[str]()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=refusing))
    ours, theirs = net(), net()
    step = Step(ours, loss, adamw(ours), training=Training(compile=True), note=told.append)
    with torch.no_grad():
        found, expected = step.figures(batch_of(4, 0)), step_of(theirs).figures(batch_of(4, 0))
    assert torch.equal(found["loss"], expected["loss"])
    assert told == []


class Taught(nn.Module):
    """A student, and a teacher that follows it: by its data, or in place, in every training pass."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data, self.student = by_data, nn.Linear(5, 1)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.by_data:
                    mine.data = mine.data.lerp(other.data, 0.25)
                else:
                    mine.lerp_(other, 0.25)
            target = self.teacher(x)
        out: Tensor = self.student(x) - 0.5 * target
        return out


def taught(by_data: bool, unused: Sequence[str] = ("teacher.*",), **options: Any) -> tuple[Taught, Step]:
    torch.manual_seed(0)
    model = Taught(by_data)
    optimizer = torch.optim.AdamW(model.student.parameters(), 1e-2)
    settings = {"training": Training(unused=tuple(unused)), "note": lambda text: None} | options
    return model, Step(model, settings.pop("loss", loss), optimizer, **settings)


@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "data"])
def test_a_teacher_that_follows_is_put_back_by_a_rehearsal_and_by_a_step_that_is_tried_again(
    by_data: bool,
) -> None:
    (ours, step), (theirs, plain) = taught(by_data), taught(by_data)
    for seed in range(3):
        for _ in range(2):
            step.rehearse(batch_of(6, seed))
        step(batch_of(6, seed))
        plain(batch_of(6, seed))
    assert same(ours, theirs)
    assert not torch.equal(ours.teacher.weight, taught(by_data)[0].teacher.weight)
    ours, step = taught(by_data, loss=limited(3))
    theirs, plain = taught(by_data, training=Training(unused=("teacher.*",), microbatch=3))
    for seed in range(2):
        step(batch_of(6, seed))
        plain(batch_of(6, seed))
    assert step.microbatch == 3
    assert same(ours, theirs)


def test_a_teacher_does_not_follow_in_a_step_that_is_skipped() -> None:
    model, step = taught(False)
    for seed in range(2):  # in the first, it is the student that it follows
        step(batch_of(6, seed))
    before, poisoned = copy.deepcopy(model), batch_of(6, 2)
    poisoned["x"][2] = float("nan")
    assert float(step(poisoned)["bad"]) == 1
    assert same(model, before)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"- 'odd' has shape \[3\]"),
        (torch.ones(0), r"- 'odd' has shape \[0\]"),
        ("abc", "- 'odd' is str: 'abc'"),
        ("1.5", "- 'odd' is str: '1.5'"),
        (None, "- 'odd' is NoneType: None"),
        ([1.0, 2.0], r"- 'odd' is list: \[1.0, 2.0\]"),
        (torch.ones((), dtype=torch.complex64), "- 'odd' is complex"),
    ],
)
def test_a_figure_that_is_not_one_number_is_named(value: Any, message: str) -> None:
    model = net()
    step = Step(model, lambda m, b: loss(m, b) | {"odd": value}, adamw(model), training=Training())
    with pytest.raises(UsageError, match=rf"expected one number each(.|\n)*{message}$"):
        step(batch_of(4, 0))


def test_figures_may_be_numbers_of_every_kind() -> None:
    model, more = net(), {"a": 2, "b": 0.5, "c": True, "d": torch.ones(1, 1), "e": np.float32(0.25)}
    figures = Step(model, lambda m, b: loss(m, b) | more, adamw(model), training=Training())(batch_of(4, 0))
    assert [float(figures[name]) for name in more] == [2, 0.5, 1, 1, 0.25]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda out: out.square(), r"loss has shape \[4, 1\]"),
        (lambda out: out.detach().mean(), "loss has no gradient"),
        (lambda out: {"mse": out.mean()}, "returned a dict with mse"),
        (lambda out: None, "returned NoneType"),
        (lambda out: {3: out.mean()}, "returned a dict with 3"),
        (lambda out: out.mean() * 1j, "loss is complex"),
    ],
)
def test_what_is_no_loss_is_refused(result: Callable[[Tensor], Any], message: str) -> None:
    model = net()
    step = Step(model, lambda m, b: result(m(b["x"])), adamw(model), training=Training())
    with pytest.raises(UsageError, match=message):
        step(batch_of(4, 0))


def test_an_optimiser_of_another_model_is_noticed() -> None:
    model = net()
    step = Step(model, loss, adamw(net()), training=Training())
    with pytest.raises(UsageError, match="No parameter of the optimiser got a gradient"):
        step(batch_of(4, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_waits_for_the_device(precision: str, nothing_waits: Any) -> None:
    model = net(dropout=0.1, norm=True).cuda()
    step = Step(model, loss, adamw(model), training=Training(precision=precision, clip=1.0), device="cuda")  # type: ignore[arg-type]
    batches = [Batch({n: v.cuda() for n, v in batch_of(8, s).items()}, []) for s in range(4)]
    step(batches[0])
    with nothing_waits():
        for batch in batches[1:]:
            step(batch)
    assert step.syncs == 0


@pytest.mark.gpu
def test_a_bad_update_is_skipped_on_the_device() -> None:
    model = net(norm=True).cuda()
    step = Step(model, loss, adamw(model), training=Training(), device="cuda")
    good = Batch({n: v.cuda() for n, v in batch_of(8, 0).items()}, [])
    step(good)
    before = copy.deepcopy(model)
    steps = [float(s["step"]) for s in step.optimizer.state.values()]
    bad = Batch({n: v.clone() for n, v in good.items()}, [])
    bad["x"][0] = float("inf")
    assert float(step(bad)["bad"]) == 1
    assert same(model, before)
    assert [float(s["step"]) for s in step.optimizer.state.values()] == steps
    step(good)
    assert not same(model, before)


@pytest.mark.gpu
def test_memory_that_really_runs_out_makes_the_parts_smaller() -> None:
    free = torch.cuda.mem_get_info()[0]
    rows = 64
    width = int(free * 1.5) // rows // 4

    def hungry(model: nn.Module, batch: Batch) -> Tensor:
        room = torch.empty(batch.n_rows, width, device="cuda")  # 64 rows do not fit, 32 do
        return model(batch["x"]).square().mean() + 0 * room[0, 0]

    model, told = net().cuda(), list[str]()
    step = Step(model, hungry, adamw(model), training=Training(), device="cuda", note=told.append)
    step(Batch({n: v.cuda() for n, v in batch_of(rows, 0).items()}, []))
    assert step.microbatch == 32
    assert len(told) == 1


@pytest.mark.parametrize(("rows", "microbatch"), [(7, 3), (9, 8), (4, 3), (13, 4), (5, 2)])
def test_parts_are_of_even_size_so_that_no_single_row_is_left_for_a_norm(rows: int, microbatch: int) -> None:
    model = net(norm=True)
    seen = []

    def look(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(batch.n_rows)
        return loss(model, batch)["loss"]

    if rows == 5:
        model = net()  # 2, 2 and 1: there is no other way
    Step(model, look, adamw(model), training=Training(microbatch=microbatch))(batch_of(rows, 0))
    assert sum(seen) == rows
    assert len(seen) == -(-rows // microbatch)
    assert max(seen) - min(seen) <= 1


def slope(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    with torch.enable_grad():
        x = batch["x"].clone().requires_grad_()
        out = model(x).sum()
        (found,) = torch.autograd.grad(out, x, create_graph=True)
        return {"loss": (found - 1).square().mean(), "out": out}


def test_a_loss_of_derivatives_is_looked_at_without_gradients_too() -> None:
    model = net()
    step = Step(model, slope, adamw(model), training=Training())
    with torch.no_grad():
        figures = step.figures(batch_of(4, 0))
    assert not any(value.requires_grad for value in figures.values())
    assert torch.equal(figures["loss"], step(batch_of(4, 0))["loss"])


@pytest.mark.parametrize("name", ["step", "kind", "epoch", "lr", "grad_norm", "bad", "overflow", 3])
def test_a_figure_under_a_name_that_is_taken_is_refused_before_it_is_lost(name: Any) -> None:
    model = net()
    step = Step(model, lambda m, b: loss(m, b) | {name: 1.0}, adamw(model), training=Training())
    with pytest.raises(UsageError, match=rf"a name of its own(.|\n)*- {name!r} is "):
        step.rehearse(batch_of(4, 0))


class Stamped(Net):
    """Counts its calls, which is its extra state."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_rehearsal_leaves_a_models_extra_state_alone() -> None:
    model = Stamped()
    step = step_of(model)
    step.rehearse(batch_of(4, 0))
    assert model.calls == 0
    step(batch_of(4, 0))
    assert model.calls == 1


class Frozen(Net):
    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__(dropout=0.5, norm=True)
        self.body.eval().requires_grad_(not frozen)


def test_a_frozen_part_that_was_set_to_eval_mode_stays_so_in_training() -> None:
    model = Frozen()
    assert step_of(model).to_train_mode() == ["body"]
    assert (model.training, model.head.training) == (True, True)
    assert not any(part.training for part in model.body.modules())


@pytest.mark.parametrize("model", [Frozen(frozen=False), Frozen().eval()])
def test_parts_that_train_and_models_that_came_in_eval_mode_are_set_to_train_mode(model: nn.Module) -> None:
    assert step_of(model).to_train_mode() == []
    assert all(part.training for part in model.modules())


def popping(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = (model(batch.pop("x")) - batch.pop("y")).square().mean()
    return found


def replacing(model: nn.Module, batch: Batch) -> Tensor:
    batch["x"] = batch["x"] * 0.5
    return loss(model, batch)["loss"]


def writing(model: nn.Module, batch: Batch) -> Tensor:
    batch["x"].mul_(0.5)
    batch["r"].values.mul_(2)
    batch["inner"]["x"].add_(1)
    return loss(model, batch)["loss"]


@pytest.mark.parametrize("changes", [popping, replacing, writing])
def test_a_loss_may_change_its_batch_and_a_rehearsal_leaves_no_trace_of_that(changes: Any) -> None:
    def made() -> Batch:
        inner = Batch({"x": torch.ones(2)}, ["a", "b"])
        ragged = Ragged(torch.arange(6), torch.tensor([0, 1, 3, 6, 6]))
        return Batch({**batch_of(4, 0), "r": ragged, "inner": inner}, [*"abcd"])

    model, other, batch = net(), net(), made()
    rehearsed, at_once = (Step(m, changes, adamw(m), training=Training()) for m in (model, other))
    for _ in range(2):
        rehearsed.rehearse(batch)
    assert torch.equal(batch["x"], made()["x"])
    assert (batch["r"].values.tolist(), batch["inner"]["x"].tolist()) == ([*range(6)], [1.0, 1.0])
    rehearsed(batch)
    at_once(made())
    assert same(model, other)
    assert [*batch] == ["x", "y", "r", "inner"]


def test_what_a_loss_took_out_of_its_batch_is_there_when_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=refusing))
    for call in (Step.__call__, Step.figures):
        model, batch, told = net(), batch_of(4, 0), list[str]()
        step = Step(model, popping, adamw(model), training=Training(compile=True), note=told.append)
        assert math.isfinite(float(call(step, batch)["loss"]))
        assert len(told) == (call is Step.__call__)
        assert batch.n_rows == 4  # a mean over batches is weighted by it


def test_what_a_loss_wrote_into_its_batch_is_not_there_when_it_is_tried_again() -> None:
    full = True

    def writing_and_full(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal full
        batch["x"].mul_(0.5)
        if batch.n_rows > 3 and full:
            full = False
            raise torch.OutOfMemoryError("planted")
        return loss(model, batch)["loss"]

    ours, theirs = net(), net()
    step = Step(ours, writing_and_full, adamw(ours), training=Training(), note=lambda text: None)
    plain = Step(theirs, writing_and_full, adamw(theirs), training=Training(microbatch=3))
    full = False
    step.rehearse(batch_of(6, 0))  # shows that it writes
    plain(batch_of(6, 0))
    full = True
    step(batch_of(6, 0))
    assert step.microbatch == 3
    assert same(ours, theirs)


def test_a_figure_that_some_parts_lack_is_the_mean_of_those_that_have_it() -> None:
    def of_some(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        first = {"first": torch.tensor(8.0)} if "k0" in batch.keys_of_rows else {}
        return loss(model, batch) | first

    for microbatch in (None, 4, 2):
        model = net()
        step = Step(model, of_some, adamw(model), training=Training(microbatch=microbatch))
        assert float(step(batch_of(6, 0))["first"]) == 8.0


def test_a_figure_that_is_a_weight_is_that_of_before_the_update_however_the_batch_is_split() -> None:
    def with_bias(model: Any, batch: Batch) -> dict[str, Tensor]:
        return loss(model, batch) | {"bias": model.head.bias, "again": model.head.bias.detach()[0]}

    for microbatch in (None, 3):
        model = net()
        before = model.head.bias.item()
        step = Step(model, with_bias, adamw(model), training=Training(microbatch=microbatch))
        figures = step(batch_of(6, 0))
        assert model.head.bias.item() != before
        assert (float(figures["bias"]), float(figures["again"])) == (before, before)


def test_the_scale_of_fp16_is_no_name_for_another_figure() -> None:
    def scaled(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return loss(model, batch) | {"scale": torch.tensor(7.0)}

    model = net()
    assert float(Step(model, scaled, adamw(model), training=Training())(batch_of(4, 0))["scale"]) == 7.0
    with pytest.raises(UsageError, match="'scale' is what every line has already"):
        Step(model, scaled, adamw(model), training=Training(precision="fp16"))(batch_of(4, 0))


class Fitted(Net):
    """Takes a mean from its first batch, and knows that in an attribute; and a cache with its length."""

    mean: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.fitted, self.length = False, 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.fitted:
            self.mean.copy_(x.mean(0))
            self.fitted = True
        if len(x) > self.length:
            self.cache, self.length = torch.full((len(x),), 0.5), len(x)
        return super().forward(x - self.mean) * self.cache[: len(x), None]


def test_a_rehearsal_leaves_no_flag_that_says_of_a_buffer_what_is_not_so() -> None:
    torch.manual_seed(0)
    ours = Fitted()
    theirs = copy.deepcopy(ours)
    rehearsed, plain = step_of(ours), step_of(theirs)
    rehearsed.rehearse(batch_of(6, 5))
    assert (ours.fitted, ours.length, len(ours.cache)) == (False, 1, 1)
    rehearsed(batch_of(6, 0))
    plain(batch_of(6, 0))
    assert same(ours, theirs)
    assert torch.equal(ours.mean, batch_of(6, 0)["x"].mean(0))


class Warmed(Net):
    """Its mean begins to follow in the third pass."""

    passes: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes > 2:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


def test_a_buffer_that_begins_to_move_later_is_put_back_by_a_step_that_is_skipped() -> None:
    torch.manual_seed(0)
    model = Warmed()
    step = step_of(model)
    for seed in range(4):
        step(batch_of(6, seed))
    before, poisoned = copy.deepcopy(model), batch_of(6, 4)
    poisoned["x"][2] = float("nan")
    assert float(step(poisoned)["bad"]) == 1
    assert bool(before.mean.any())
    assert same(model, before)


class Shrinking(Net):
    """Writes a weight of its own before each pass, as one that normalises its prototypes does."""

    by_data = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.by_data:
                self.head.weight.data = self.head.weight.data * 0.5
            else:
                self.head.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "data"])
def test_weights_that_a_pass_writes_are_put_back_too(by_data: bool) -> None:
    def made(given: Callable[..., Any] = loss, **settings: Any) -> tuple[Shrinking, Step]:
        torch.manual_seed(0)
        model = Shrinking()
        model.by_data = by_data
        return model, Step(model, given, adamw(model), training=Training(**settings), note=lambda text: None)

    (ours, step), (theirs, plain) = made(), made()
    for _ in range(2):
        step.rehearse(batch_of(6, 0))
        assert same(ours, theirs)
    for seed in range(2):
        step(batch_of(6, seed))
        plain(batch_of(6, seed))
    assert same(ours, theirs)
    before, poisoned = copy.deepcopy(ours), batch_of(6, 2)
    poisoned["x"][2] = float("nan")
    assert float(step(poisoned)["bad"]) == 1
    assert same(ours, before)
    most = 6

    def sometimes_full(model: nn.Module, batch: Batch) -> Any:
        return limited(most)(model, batch)

    (ours, step), (theirs, plain) = made(sometimes_full), made(microbatch=3)
    step.rehearse(batch_of(6, 0))
    most = 3
    step(batch_of(6, 0))
    plain(batch_of(6, 0))
    assert step.microbatch == 3
    assert same(ours, theirs)
