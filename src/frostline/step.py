"""THE step: one batch, one update. Training, profiling, tuning and verifying all go through it.

Nothing in it waits for the device: figures stay there until somebody reads them, a gradient that is no number
skips the update on the device (fused optimisers) or costs one counted look (others). A batch that does not
fit into memory is tried again in smaller parts: the same rows, the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from frostline.batch import Batch, Ragged
from frostline.errors import CompileFailed, OutOfMemory, UsageError
from frostline.ranks import Alone, Ranks
from frostline.rewind import Buffers, Extra
from frostline.rewind import Moment as Moment
from frostline.scaling import Scaler
from frostline.training import Training
from frostline.update import Figures, Update

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Step:
    """Calls of it train a model, batch by batch.

    >>> model = nn.Linear(2, 1)
    >>> step = Step(model, lambda model, batch: model(batch["x"]).square().mean(),
    ...             torch.optim.SGD(model.parameters(), 0.1), training=Training(microbatch=2))
    >>> figures = step(Batch({"x": torch.ones(6, 2)}, list("abcdef")))
    >>> sorted(figures)
    ['bad', 'loss']

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
        self.on_grads: Callable[[], None] | None = None
        self._ranks: Ranks = ranks or Alone()
        self._note, self._strict = note, strict
        self._called: nn.Module = torch.compile(model) if training.compile else model  # type: ignore[assignment]
        self.scaler = Scaler(self.device) if training.precision == "fp16" else None
        self._buffers = _Kept(model, optimizer, training.unused)
        self._update = Update(optimizer, clip=training.clip, scaler=self.scaler)

    def __call__(self, batch: Batch, *, norm: bool = False) -> Figures:
        """Forward, backward, update. Figures are 0-dim tensors on the device, means over the rows.

        norm: add `grad_norm`, the norm of all gradients. Hundreds of parameters make it the dearest figure.
        """
        rows = batch.n_rows
        moment = Moment(self.device)
        self._buffers.keep()
        while True:
            figures, error = self._tried(batch, rows, moment)
            fits, all_rows = self._ranks.agree(fits=error is None, rows=rows)
            if fits:
                self._buffers.look(self._ranks)
                break
            self._rewind(moment)
            self._smaller(rows, error)
        if self._ranks.world > 1:
            self._add_up(figures, rows, all_rows)
        if self.on_grads is not None:
            self.on_grads()
        return self._update(figures, self._buffers, norm=norm)

    @property
    def syncs(self) -> int:
        """Times that an update waited for the device, to learn whether it may happen."""
        return self._update.syncs

    def to_train_mode(self) -> list[str]:
        """Train mode; parts that stay in eval mode, by name.

        They are those without a parameter that trains which were in it while the model around them was not:
        somebody set a frozen encoder so, and its statistics are not to follow, nor is it to drop anything.
        """
        resting = [*_resting(self.model, "")] if self.model.training else []
        self.model.train()
        for _, part in resting:
            part.eval()
        return [name for name, _ in resting]

    def rehearse(self, batch: Batch) -> Figures:
        """Forward and backward without an update: everything is afterwards as it was. For warming up."""
        moment, extra = Moment(self.device), Extra(self.model)
        self._buffers.keep()
        while True:
            figures, error = self._tried(_copied(batch), batch.n_rows, moment)
            self._rewind(moment)
            extra.restore()
            if self._ranks.agree(fits=error is None, rows=0)[0]:
                return figures
            self._smaller(batch.n_rows, error)

    def figures(self, batch: Batch) -> Figures:
        """What the loss gives, in the model's present mode; no gradient is asked for.

        Never compiled: torch.compile may give up on code for good that leaves a graph in evaluations only.
        """
        return _detached(self._forward(_handed(batch), self.model))

    # gradients

    def _tried(self, batch: Batch, rows: int, moment: Moment) -> tuple[Figures, BaseException | None]:
        """Gradients of all parts of the batch; or the error, where memory did not do.

        torch.compile may fail as late as in a backward pass; all of the step is done again without it then.
        """
        error: BaseException | None = None
        try:
            with _multiplying(self.training.precision):
                return self._gradients(batch, rows), None
        except Exception as e:
            if not self._runs_without(e):
                if not _is_memory(e):
                    raise
                error = e.with_traceback(None)  # its frames hold the memory that is to be freed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if error is not None:
            return {}, error
        self._rewind(moment)
        return self._tried(batch, rows, moment)

    def _rewind(self, moment: Moment) -> None:
        """As it was before the step."""
        moment.restore()
        self._buffers.restore()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, batch: Batch, rows: int) -> Figures:
        total: Figures = {}
        for part in self._parts(batch, rows):
            share = part.n_rows / rows
            figures = self._forward(part, self._called)
            loss = figures["loss"] if share == 1 else figures["loss"] * share
            (loss if self.scaler is None else loss * self.scaler.scale).backward()  # type: ignore[no-untyped-call]
            for name, value in figures.items():
                held = value.detach() if share == 1 else value.detach() * share
                total[name] = held if name not in total else total[name] + held
        return total

    def _parts(self, batch: Batch, rows: int) -> Iterator[Batch]:
        """As few as do, and of even size: a last one of a single row is none that batch norm takes."""
        size = self.microbatch or rows
        if size >= rows:
            return iter([_handed(batch)] if rows else [])
        n = -(-rows // size)
        bounds = [-(-rows * i // n) for i in range(n + 1)]
        return (batch.part(start, stop) for start, stop in pairwise(bounds))

    def _forward(self, batch: Batch, model: nn.Module) -> Figures:
        with self._autocast():
            return self._figures(self.loss(model, batch))

    def _runs_without(self, error: Exception) -> bool:
        """Whether it was torch.compile that failed: the model runs without from now on, and that is said."""
        if self._called is self.model or not _is_compiling(error):
            return False
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if self._strict:
            raise CompileFailed(type(self.model).__name__, reason) from error
        self._note(f"the model cannot be compiled and runs without from now on: {reason}")
        self._called = self.model
        return True

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _HALF.get(self.training.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()

    def _figures(self, result: Any) -> Figures:
        found = dict(result) if isinstance(result, Mapping) else {"loss": result}
        loss = found.get("loss")
        # without gradients it may still have one: a loss of derivatives switches them on for itself
        lacks = isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex() or lacks:
            raise UsageError(_no_loss(result, loss))
        if problems := [wrong for name, value in found.items() if (wrong := _no_figure(name, value))]:
            raise UsageError(
                "The workload's loss function returned figures that cannot be logged; expected one number "
                "each under a name of its own, in a tensor or as it is. Take its mean, or leave it out:",
                problems=problems,
            )
        return {
            name: (value if value.dim() == 0 else value.reshape(()))
            if isinstance(value, Tensor)
            else torch.tensor(float(value), device=self.device)
            for name, value in found.items()
        }

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

    def _add_up(self, figures: Figures, rows: int, all_rows: int) -> None:
        """Means over a rank's rows become means over all rows, of gradients and figures alike."""
        if any(p.grad is not None and p.grad.is_sparse for p in self._update.parameters):
            raise UsageError(_SPARSE)
        told = self._ranks.gather([[int(p.grad is not None) for p in self._update.parameters], [*figures]])
        anywhere = [any(flags) for flags in zip(*(one[0] for one in told), strict=True)]
        for parameter, has_one in zip(self._update.parameters, anywhere, strict=True):
            if parameter.grad is None and has_one:
                parameter.grad = torch.zeros_like(parameter)
        if not rows:  # a short last batch has nothing for this rank: zeros join the sums
            names = max((one[1] for one in told), key=len)
            figures |= {name: torch.zeros((), device=self.device) for name in names}
        values = torch.stack([value.float() for value in figures.values()])
        tensors = [values, *(p.grad for p in self._update.parameters if p.grad is not None)]
        torch._foreach_mul_(tensors, rows / all_rows)
        self._ranks.add_up(tensors)
        figures |= dict(zip(figures, values.unbind(), strict=True))
        # one model, also in what no gradient reaches
        self._ranks.copy_first([*self._buffers.tensors(), *self._buffers.followers])


class _Kept(Buffers):
    """The buffers, and parameters that follow others instead of training, as an EMA teacher does.

    They are what `unused` names and the optimiser does not train. A first pass would not show them: a teacher
    that begins as a copy of its student does not move in it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, unused: Sequence[str]) -> None:
        super().__init__(model)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.followers: list[Tensor] = [
            parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in trained and any(fnmatch(name, pattern) for pattern in unused)
        ]
        self._before: list[Tensor] = []

    def keep(self) -> None:
        super().keep()
        with torch.no_grad():
            if not self._before:
                self._before = [follower.clone() for follower in self.followers]
            elif self.followers:
                torch._foreach_copy_(self._before, self.followers)

    def restore(self, where: Tensor | None = None) -> None:
        super().restore(where)
        with torch.no_grad():
            for follower, before in zip(self.followers, self._before, strict=True):
                follower.copy_(before if where is None else torch.where(where.bool(), before, follower))


def _handed(batch: Batch) -> Batch:
    """The same rows for a loss that may take fields out, or put others in: the step may need it again."""
    fields = {name: _handed(value) if isinstance(value, Batch) else value for name, value in batch.items()}
    return Batch(fields, batch._keys)


def _copied(batch: Batch) -> Batch:
    """In memory of its own, for a loss that writes into it, as one that masks tokens does."""
    fields: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Batch):
            value = _copied(value)
        elif isinstance(value, Ragged):
            value = Ragged(value.values.clone(), value.offsets)
        fields[name] = value.clone() if isinstance(value, Tensor) else value
    return Batch(fields, batch._keys)


def _resting(module: nn.Module, before: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost parts in eval mode that have nothing to train."""
    for name, child in module.named_children():
        if child.training:
            yield from _resting(child, f"{before}{name}.")
        elif not any(parameter.requires_grad for parameter in child.parameters()):
            yield before + name, child


@contextmanager
def _multiplying(precision: str) -> Iterator[None]:
    """tf32 inside a step only: frozen networks that run beside it have to give a store's bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _is_memory(error: BaseException) -> bool:
    told = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in told)


def _is_compiling(error: BaseException) -> bool:
    """Whether it is torch.compile that failed."""
    home = type(error).__module__
    return home.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


_SPARSE = (
    "A parameter has a sparse gradient, and gradients of several processes are added up dense. Train on one "
    "process, or make its embedding with sparse=False."
)


_TAKEN = frozenset(("step", "kind", "epoch", "lr", "grad_norm", "bad", "overflow"))
"""Figures of the step and its loop; another one of that name would be lost, or be taken for it."""


def _detached(figures: Figures) -> Figures:
    return {name: value.detach() for name, value in figures.items()}


def _no_loss(result: Any, loss: Any) -> str:
    expected = "expected a tensor of one number that gradients flow back from, or {'loss': that, …}"
    if isinstance(loss, Tensor):
        fault = "has no gradient" if loss.numel() == 1 else f"has shape {list(loss.shape)}"
        fault = "is complex" if loss.is_complex() else fault
        return f"The workload's loss {fault}; {expected}."
    names = ", ".join(map(str, result)) if isinstance(result, Mapping) else None
    got = type(result).__name__ if names is None else f"a dict with {names}"
    return f"The workload's loss function returned {got}; {expected}."


def _no_figure(name: Any, value: Any) -> str | None:
    """What is wrong with a figure beside the loss; None where it is one number."""
    if not isinstance(name, str):
        return f"{name!r} is {type(name).__name__}; a name is a text"
    if name in _TAKEN:
        return f"{name!r} is what every line has already: call it otherwise"
    if isinstance(value, Tensor):
        fault = f"has shape {list(value.shape)}" if value.numel() != 1 else "is complex"
        return f"{name!r} {fault}" if value.numel() != 1 or value.is_complex() else None
    try:
        if not isinstance(value, str | bytes):
            float(value)
            return None
    except (TypeError, ValueError, OverflowError):
        pass
    text = repr(value)
    return f"{name!r} is {type(value).__name__}: {text[:60]}{'…' if len(text) > 60 else ''}"
