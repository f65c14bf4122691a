"""THE step: one batch, one update. Training, profiling, tuning and verifying all go through it.

Nothing in it waits for the device: figures stay there until somebody reads them, a gradient that is no number
skips the update on the device (fused optimisers) or costs one counted look (others). A batch that does not
fit into memory is tried again in smaller parts: the same rows, the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from frostline.batch import Batch, copied, handed, written
from frostline.errors import CompileFailed, OutOfMemory, UsageError
from frostline.ranks import Alone, Ranks
from frostline.rewind import Attributes, Extra, Kept, Weights
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
        self._buffers = Kept(model, optimizer, training.unused)
        self._update = Update(optimizer, clip=training.clip, scaler=self.scaler)
        self.built = {parameter: parameter.requires_grad for parameter in model.parameters()}
        """Which parameters trained when it was made: a model may change that on its way."""
        self.buffers = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name, _ in module._buffers.items()
        )
        """Names of the buffers that it had a place for then."""
        self._rehearsed = False
        self._writes = False
        """Whether a rehearsal saw the loss write into its batch: every try gets a copy then."""
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in self._update.parameters}
        self._given: dict[str, int] = {}
        """Rows that the figures of the last pass are means over: a part may lack one."""

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
        moment, attributes, extra = Moment(self.device), Attributes(self.model), Extra(self.model)
        weights = Weights([p for p in self._update.parameters if p.requires_grad and not self._rehearsed])
        self._buffers.keep()
        while True:
            mine = copied(batch)
            figures, error = self._tried(mine, batch.n_rows, moment)
            self._writes = self._writes or written(mine)
            attributes.restore()
            self._rewind(moment)
            extra.restore()
            self._buffers.follow(weights.restore(self._ranks))
            self._rehearsed = True
            if self._ranks.agree(fits=error is None, rows=0)[0]:
                return figures
            self._smaller(batch.n_rows, error)

    def figures(self, batch: Batch) -> Figures:
        """What the loss gives, in the model's present mode; no gradient is asked for.

        Never compiled: torch.compile may give up on code for good that leaves a graph in evaluations only.
        """
        return _detached(self._forward(handed(batch), self.model))

    # gradients

    def _tried(self, batch: Batch, rows: int, moment: Moment) -> tuple[Figures, BaseException | None]:
        """Gradients of all parts of the batch; or the error, where memory did not do.

        torch.compile may fail as late as in a backward pass; all of the step is done again without it then.
        """
        error: BaseException | None = None
        try:
            with _multiplying(self.training.precision):
                return self._gradients(copied(batch) if self._writes else batch, rows), None
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
        given: dict[str, int] = {}
        for part in self._parts(batch, rows):
            n = part.n_rows  # asked before the loss, which may take fields out
            share = n / rows
            figures = self._forward(part, self._called)
            loss = figures["loss"] if share == 1 else figures["loss"] * share
            (loss if self.scaler is None else loss * self.scaler.scale).backward()  # type: ignore[no-untyped-call]
            for name, value in figures.items():
                held = self._held(value) if share == 1 else value.detach() * share
                total[name] = held if name not in total else total[name] + held
                given[name] = given.get(name, 0) + n
        self._given = given
        return {
            name: value if given[name] == rows else value * (rows / given[name])
            for name, value in total.items()
        }

    def _held(self, value: Tensor) -> Tensor:
        """A figure as it is now: one that is a weight itself, as a temperature may be, is about to change."""
        is_weight = value.untyped_storage().data_ptr() in self._weights
        return value.detach().clone() if is_weight else value.detach()

    def _parts(self, batch: Batch, rows: int) -> Iterator[Batch]:
        """As few as do, and of even size: a last one of a single row is none that batch norm takes."""
        size = self.microbatch or rows
        if size >= rows:
            return iter([handed(batch)] if rows else [])
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
        taken = _TAKEN if self.scaler is None else _TAKEN | {"scale"}
        if problems := [wrong for name, value in found.items() if (wrong := _no_figure(name, value, taken))]:
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
            f"out of memory with {size} rows a pass ({what}): {self.microbatch} from now on; the batch stays "
            f"the same, and so does its update where the loss is a mean over rows"
        )

    def _add_up(self, figures: Figures, rows: int, all_rows: int) -> None:
        """Means over a rank's rows become means over all rows, of gradients and figures alike."""
        if any(p.grad is not None and p.grad.is_sparse for p in self._update.parameters):
            raise UsageError(_SPARSE)
        grads = [int(p.grad is not None) for p in self._update.parameters]
        told = self._ranks.gather([grads, self._given, self._buffers.stirred()])
        anywhere = [any(flags) for flags in zip(*(one[0] for one in told), strict=True)]
        for parameter, has_one in zip(self._update.parameters, anywhere, strict=True):
            if parameter.grad is None and has_one:
                parameter.grad = torch.zeros_like(parameter)
        # a short last batch has nothing for some rank, and a figure may be that of some ranks only
        over = {name: sum(one[1].get(name, 0) for one in told) for one in told for name in one[1]}
        mine, none = self._given, torch.zeros((), device=self.device)
        values = torch.stack(
            [
                figures[n].float() * (mine[n] / rows_of_n) if n in mine else none
                for n, rows_of_n in over.items()
            ]
        )
        gradients = [p.grad for p in self._update.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, rows / all_rows)
        self._ranks.add_up([values, *gradients])
        figures |= dict(zip(over, values.unbind(), strict=True))
        self._buffers.watch({i for one in told for i in one[2]})
        # one model, also in what no gradient reaches
        self._ranks.copy_first([*self._buffers.tensors(), *self._buffers.followers])


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


def _no_figure(name: Any, value: Any, taken: frozenset[str]) -> str | None:
    """What is wrong with a figure beside the loss; None where it is one number."""
    if not isinstance(name, str):
        return f"{name!r} is {type(name).__name__}; a name is a text"
    if name in taken:
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
