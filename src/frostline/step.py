"""THE step: one batch, one update. Training, profiling, tuning and verifying all go through it.

Nothing in it waits for the device: figures stay there until somebody reads them, a gradient that is no number
skips the update on the device (fused optimisers) or costs one counted look (others). A batch that does not
fit into memory is tried again in smaller parts: the same rows, the same update.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from frostline.batch import Batch
from frostline.errors import CompileFailed, OutOfMemory, UsageError
from frostline.scaling import Scaler
from frostline.training import Training

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
Figures = dict[str, Tensor]


class Ranks(Protocol):
    """What processes that train one model say to each other."""

    world: int

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        """Whether it fitted everywhere, and the rows of all ranks together."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the sum over all ranks."""

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes what it is on the first rank."""

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""

    def gather(self, value: Any) -> list[Any]:
        """What all ranks said; plain values."""


class Alone:
    """One process."""

    world = 1

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        return fits, rows

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        return

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        return

    def most(self, number: int) -> int:
        return number

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Step:
    """Calls of it train a model, batch by batch.

    >>> model = nn.Linear(2, 1)
    >>> step = Step(model, lambda model, batch: model(batch["x"]).square().mean(),
    ...             torch.optim.SGD(model.parameters(), 0.1), training=Training(microbatch=2))
    >>> figures = step(Batch({"x": torch.ones(6, 2)}, list("abcdef")))
    >>> sorted(figures)
    ['bad', 'grad_norm', 'loss']

    note:      told when something changes for good: smaller parts, no compilation.
    on_grads:  called before each update, while gradients are there.
    strict:    a compilation that fails is an error; otherwise the model runs without.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        training: Training,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
        note: Callable[[str], None] = print,
        strict: bool = False,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.training, self.device = training, torch.device(device)
        self.microbatch = training.microbatch
        self.syncs = 0
        """Times that an update waited for the device, to learn whether it may happen."""
        self.on_grads: Callable[[], None] | None = None
        self._ranks: Ranks = ranks or Alone()
        self._note, self._strict = note, strict
        self.called: nn.Module = torch.compile(model) if training.compile else model  # type: ignore[assignment]
        self.scaler = Scaler(self.device) if training.precision == "fp16" else None
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._buffers = _Buffers(model)
        self._fused = _fuse(optimizer)

    def __call__(self, batch: Batch) -> Figures:
        """Forward, backward, update. Figures are 0-dim tensors on the device, means over the rows."""
        rows = batch.n_rows
        moment = Moment(self.device)
        self._buffers.keep()
        while True:
            figures, error = self._tried(batch, rows)
            fits, all_rows = self._ranks.agree(fits=error is None, rows=rows)
            if fits:
                self._buffers.look(self._ranks)
                break
            moment.restore()
            self._buffers.restore()
            self.optimizer.zero_grad(set_to_none=True)
            self._smaller(rows, error)
        return self._updated(figures, rows, all_rows)

    def rehearse(self, batch: Batch) -> Figures:
        """Forward and backward without an update: everything is afterwards as it was. For warming up."""
        moment = Moment(self.device)
        self._buffers.keep()
        while True:
            figures, error = self._tried(batch, batch.n_rows)
            moment.restore()
            self._buffers.restore()
            self.optimizer.zero_grad(set_to_none=True)
            if self._ranks.agree(fits=error is None, rows=0)[0]:
                return figures
            self._smaller(batch.n_rows, error)

    def figures(self, batch: Batch) -> Figures:
        """What the loss gives, in the model's present mode; no gradient is asked for."""
        with self._autocast():
            return self._figures(self.loss(self.called, batch))

    # gradients

    def _tried(self, batch: Batch, rows: int) -> tuple[Figures, BaseException | None]:
        """Gradients of all parts of the batch; or the error, where memory did not do."""
        try:
            with _multiplying(self.training.precision):
                return self._gradients(batch, rows), None
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as e:
            if not _is_memory(e):
                raise
            error = e.with_traceback(None)  # its frames hold the memory that is to be freed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}, error

    def _gradients(self, batch: Batch, rows: int) -> Figures:
        total: Figures = {}
        for part in self._parts(batch, rows):
            share = part.n_rows / rows
            figures = self._forward(part)
            loss = figures["loss"] if share == 1 else figures["loss"] * share
            (loss if self.scaler is None else loss * self.scaler.scale).backward()  # type: ignore[no-untyped-call]
            for name, value in figures.items():
                held = value.detach() if share == 1 else value.detach() * share
                total[name] = held if name not in total else total[name] + held
        return total

    def _parts(self, batch: Batch, rows: int) -> Iterator[Batch]:
        size = self.microbatch or rows
        if size >= rows:
            return iter([batch] if rows else [])
        return (batch.part(start, min(rows, start + size)) for start in range(0, rows, size))

    def _forward(self, batch: Batch) -> Figures:
        try:
            with self._autocast():
                return self._figures(self.loss(self.called, batch))
        except Exception as e:
            if self.called is self.model or not _is_compiling(e):
                raise
            reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
            if self._strict:
                raise CompileFailed(type(self.model).__name__, reason) from e
            self._note(f"the model cannot be compiled and runs without from now on: {reason}")
            self.called = self.model
        return self._forward(batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _HALF.get(self.training.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()

    def _figures(self, result: Any) -> Figures:
        found = dict(result) if isinstance(result, Mapping) else {"loss": result}
        loss = found.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.requires_grad != torch.is_grad_enabled():
            raise UsageError(_no_loss(result, loss))
        tensors = {
            name: value if isinstance(value, Tensor) else torch.tensor(float(value), device=self.device)
            for name, value in found.items()
        }
        return {name: value.reshape(()) for name, value in tensors.items()}

    def _smaller(self, rows: int, error: BaseException | None) -> None:
        """Half as many rows a pass; all ranks do the same."""
        size = self._ranks.most(min(self.microbatch or rows, rows))  # shares of a batch may differ
        if size <= 1:
            raise OutOfMemory(
                f"A training step with one row a pass does not fit into memory: {error}. Use a smaller model "
                f"or input, precision bf16, or activation checkpointing."
            ) from error
        self.microbatch = (size + 1) // 2
        what = str(error).splitlines()[0] if error else "on another rank"
        self._note(
            f"out of memory with {size} rows a pass ({what}): {self.microbatch} from now on; the batch and "
            f"its update stay the same"
        )

    # the update

    def _updated(self, figures: Figures, rows: int, all_rows: int) -> Figures:
        if self._ranks.world > 1:
            self._add_up(figures, rows, all_rows)
        if self.on_grads is not None:
            self.on_grads()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            raise UsageError(_NO_GRADIENT)
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = _norm(gradients)
        if self.training.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.training.clip, norm)
        finite = torch.isfinite(norm)
        found = {**figures, "grad_norm": norm}
        found |= {"bad": (~(finite & torch.isfinite(figures["loss"]))).float()}
        self._apply(found["bad"])
        if self.scaler is not None:
            self.scaler.update(found["bad"])
            overflow = (~finite & torch.isfinite(figures["loss"])).float()
            usual = overflow * (self.scaler.scale >= 1).float()  # how a scaler finds its scale
            found |= {"overflow": overflow, "bad": found["bad"] - usual, "scale": self.scaler.scale.clone()}
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _add_up(self, figures: Figures, rows: int, all_rows: int) -> None:
        """Means over a rank's rows become means over all rows, of gradients and figures alike."""
        told = self._ranks.gather([[int(p.grad is not None) for p in self._parameters], [*figures]])
        anywhere = [any(flags) for flags in zip(*(one[0] for one in told), strict=True)]
        for parameter, has_one in zip(self._parameters, anywhere, strict=True):
            if parameter.grad is None and has_one:
                parameter.grad = torch.zeros_like(parameter)
        if not rows:  # a short last batch has nothing for this rank: zeros join the sums
            names = max((one[1] for one in told), key=len)
            figures |= {name: torch.zeros((), device=self.device) for name in names}
        values = torch.stack([value.float() for value in figures.values()])
        tensors = [values, *(p.grad for p in self._parameters if p.grad is not None)]
        torch._foreach_mul_(tensors, rows / all_rows)
        self._ranks.add_up(tensors)
        figures |= dict(zip(figures, values.unbind(), strict=True))
        self._ranks.copy_first(self._buffers.tensors())  # one model, also in what no gradient reaches

    def _apply(self, bad: Tensor) -> None:
        """The optimiser's step, unless it is bad; buffers go back as well then."""
        if self._fused and not _unborn(self.optimizer):
            self.optimizer.found_inf, self.optimizer.grad_scale = bad, None  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]
            self._buffers.restore(where=bad)
            return
        self.syncs += self.device.type != "cpu"
        if bool(bad):
            self._buffers.restore()
        else:
            self.optimizer.step()


@contextmanager
def _multiplying(precision: str) -> Iterator[None]:
    """tf32 inside a step only: frozen networks that run beside it have to give a store's bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- parts --------------------------------------------------------------------------------------------


class Moment:
    """Where the random numbers stood."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._device is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class _Buffers:
    """The buffers that a forward pass writes, as they were before the step. The first step shows which.

    Their values do: batch norm writes its statistics where no version counter of torch's sees it.
    """

    def __init__(self, model: nn.Module) -> None:
        # places, not tensors: a model may put another tensor under the same name
        self._places = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel()
        ]
        self._kept: list[Tensor] = []
        self._looked = False

    def tensors(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self._places]  # type: ignore[misc]

    def keep(self) -> None:
        now = self.tensors()
        same = len(self._kept) == len(now) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(self._kept, now, strict=True)
        )
        if not same:
            self._kept = [buffer.clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self._kept, now)

    def look(self, ranks: Ranks) -> None:
        """After the first pass: those that it left alone, on every rank, need no care."""
        if self._looked:
            return
        pairs = zip(self.tensors(), self._kept, strict=True)
        told = ranks.gather([int(not torch.equal(now, before)) for now, before in pairs])
        moved = [any(flags) for flags in zip(*told, strict=True)]
        self._places = [place for place, wrote in zip(self._places, moved, strict=True) if wrote]
        self._kept = [kept for kept, wrote in zip(self._kept, moved, strict=True) if wrote]
        self._looked = True

    def restore(self, where: Tensor | None = None) -> None:
        """As they were; where: 1.0 to put them back, 0.0 to leave them, without looking."""
        for (buffers, name), kept in zip(self._places, self._kept, strict=True):
            now = buffers[name]
            if now is None or now.shape != kept.shape or now.dtype != kept.dtype:
                buffers[name] = kept.clone()
            else:
                now.copy_(kept if where is None else torch.where(where.bool(), kept, now))


def _unborn(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step would make momentum out of memory that nobody has written.

    torch's fused SGD takes fresh memory for it and writes there in the first step. Skipped on the device,
    that step leaves it as it was found, and the next is no longer the first.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group["momentum"] and p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Use the fused kernel where the device has one and nobody chose otherwise; whether it is used.

    Only that kernel takes `found_inf`, with which an update is skipped without a look from the CPU.
    """
    if type(optimizer) not in _FUSED:
        return False
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    free = all(g.get("fused") is None and g.get("foreach") is None for g in groups)
    able = all(p.device.type == "cuda" and p.is_floating_point() for p in parameters)
    if free and able and not any(g.get("differentiable") for g in groups):
        for group in groups:
            group["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    fused = bool(groups) and all(g.get("fused") for g in groups)
    return fused and parameters[0].device.type == "cuda"


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all together; torch's own groups them by device and type first, which takes longer."""
    if len({gradient.dtype for gradient in gradients}) > 1:
        return torch.nn.utils.get_total_norm(gradients)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*gradients])))
    return norm


def _is_memory(error: BaseException) -> bool:
    told = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(t in str(error) for t in told)


def _is_compiling(error: BaseException) -> bool:
    """Whether it is torch.compile that failed."""
    home = type(error).__module__
    return home.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _no_loss(result: Any, loss: Any) -> str:
    expected = "expected a tensor of one number that gradients flow back from, or {'loss': that, …}"
    if isinstance(loss, Tensor):
        fault = "has no gradient" if loss.numel() == 1 else f"has shape {list(loss.shape)}"
        return f"The workload's loss {fault}; {expected}."
    got = f"a dict with {', '.join(result)}" if isinstance(result, Mapping) else type(result).__name__
    return f"The workload's loss function returned {got}; {expected}."


_NO_GRADIENT = (
    "No parameter of the optimiser got a gradient. Does optimizer(model) take model.parameters(), do they "
    "require gradients, and does the loss depend on them?"
)
