"""Models and optimisers of unusual kinds: they go on exactly, or are refused before a step is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import CheckpointError, FrostlineError, UsageError
from frostline.trainer.checkpoint import weights
from frostline.trainer.state import load_model, model_state, model_tensors

ROWS = [
    {"key": f"k{i:02d}", "x": [i % 7 / 7, i % 5 / 5, i % 3 / 3, 1.0], "y": float(i % 2)} for i in range(40)
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def loss(model: nn.Module, batch: fl.Batch) -> Any:
    return (model(torch.tensor(batch["x"])).squeeze(1) - batch["y"]).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def work(model: Callable[[], nn.Module] = Net, **options: Any) -> fl.Workload:
    values = {"loss": loss, "optimizer": adamw, "batch_size": 8, "training": {"log_every": 2}}
    return fl.Workload(fl.Pipeline(fl.Source.table(ROWS)), model=fl.lazy(model), **(values | options))


def train(workload: fl.Workload, out: Path, steps: int, **options: Any) -> Any:
    return fl.train(
        workload, out=out, steps=steps, **({"device": "cpu", "quiet": True, "live": True} | options)
    )


class Remembering(Net):
    """Its buffer comes with the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return super().forward(x - self.mean)


class OnAGraph(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((self.graph @ x.T).T)


class Drawing(Net):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def get_extra_state(self) -> Tensor:
        return self.own.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.own.set_state(state)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.own))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Conv2d(2, 6, (2, 1)), nn.Linear(6, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.head(self.filter(image).flatten(1))
        return out


def scripted() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    made: nn.Module = torch.jit.script(inner)
    return made


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("model", [Remembering, OnAGraph, Drawing, Image, scripted])
def test_it_goes_on_exactly(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    whole = train(work(model), tmp_path / "whole", 9)
    train(work(model), tmp_path / "parts", 4)
    parts = train(work(model), tmp_path / "parts", 9)
    pairs = zip(whole.model.state_dict().values(), parts.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_buffer_that_came_later_is_not_given_to_a_norm_without_statistics() -> None:
    with pytest.raises(CheckpointError, match="running_mean: in the checkpoint, but not here"):
        load_model(nn.BatchNorm1d(2, track_running_stats=False), model_tensors(nn.BatchNorm1d(2)))
    net, other = Remembering(), Remembering()
    net(torch.ones(3, 4))
    groups, about = model_state(net)
    load_model(other, groups["model"], about=about)
    assert torch.equal(other.mean, net.mean)  # type: ignore[arg-type]
    net(torch.zeros(3, 4))
    assert not torch.equal(other.mean, net.mean)  # type: ignore[arg-type]


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(2).to_sparse())


class Registering(Net):
    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", x.detach().mean(0))
        return super().forward(x)


class Odd(Net):
    def get_extra_state(self) -> object:
        return {"made by": print}

    def set_extra_state(self, state: object) -> None:
        pass


MARGIN = nn.Parameter(torch.ones(()))


class Holding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["made by"] = print
        return super().step(closure)


def with_margin(model: nn.Module, batch: fl.Batch) -> Tensor:
    found: Tensor = loss(model, batch) * MARGIN
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": Wide}, "phase: safetensors has no torch.complex128"),
        ({"model": Sparse}, r"graph: a sparse_coo tensor \(a buffer may be left out: persistent=False\)"),
        ({"model": Registering}, r"registered buffers while it ran: mean\."),
        ({"model": Odd}, "_extra_state/made by: a builtin_function_or_method cannot be kept"),
        (
            {
                "loss": with_margin,
                "optimizer": lambda model: torch.optim.SGD([*model.parameters(), MARGIN], 0.1),
            },
            r"parameters that the model does not have(.|\n)*parameter 2 of group 0, \[\]",
        ),
        (
            {"optimizer": lambda model: Holding(model.parameters(), 0.1)},
            "layer.weight/made by: a builtin_function_or_method cannot be kept",
        ),
    ],
)
def test_what_cannot_be_saved_shows_in_the_first_step_and_not_with_the_first_save(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    steps = 0
    given = options.get("loss", loss)

    def counted(model: nn.Module, batch: fl.Batch) -> Any:
        nonlocal steps
        steps += 1
        return given(model, batch)

    with pytest.raises(FrostlineError, match=message):
        train(work(**(options | {"loss": counted})), tmp_path / "run", 50)
    assert steps <= 3  # two rehearsals, and one that counts


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("norm", [nn.Identity, nn.LazyBatchNorm1d])
def test_lazy_modules_are_refused_since_no_checkpoint_could_be_loaded_into_them(
    tmp_path: Path, norm: Callable[[], nn.Module]
) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(5), norm(), nn.LazyLinear(1))

    def settled() -> nn.Module:
        model = lazy()
        model(torch.zeros(2, 4))
        return model

    with pytest.raises(UsageError, match=r"without a shape yet: 0\.weight(.|\n)*where it is made"):
        train(work(lazy), tmp_path / "run", 2)
    assert train(work(settled), tmp_path / "run", 2).step == 2


class Without(torch.optim.SGD):
    """Finds its rate by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS.step"),
        (
            lambda model: Without(model.parameters()),
            r"Without has no learning rate(.|\n)*group 0: lr is None",
        ),
        (lambda model: [adamw(model), adamw(model)], "returned list; expected one torch optimiser"),
    ],
)
def test_optimisers_that_a_step_cannot_call_are_refused(
    tmp_path: Path, optimizer: Callable[[nn.Module], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(work(optimizer=optimizer), tmp_path / "run", 2)


def test_a_scheduler_of_torchs_is_said_never_to_be_stepped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        made = adamw(model)
        torch.optim.lr_scheduler.OneCycleLR(made, 1e-2, total_steps=100)
        return made

    train(work(), tmp_path / "plain", 2, quiet=False)
    assert "scheduler" not in capsys.readouterr().err
    train(work(optimizer=scheduled), tmp_path / "run", 2, quiet=False)
    assert "a torch scheduler, which is never stepped: the peak is 0.0004" in capsys.readouterr().err


class Failing:
    """A loss that fails at one step."""

    def __init__(self, at: int) -> None:
        self.left = at + 2  # rehearsals

    def __call__(self, model: nn.Module, batch: fl.Batch) -> Any:
        self.left -= 1
        if not self.left:
            raise ValueError("my own")
        return loss(model, batch)


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (-1, r"in step 1, keys 'k\d\d', .*…; no checkpoint was written yet"),
        (3, r"in step 3, keys 'k\d\d', .*…; no checkpoint was written yet"),
        (7, r"in step 7, keys 'k\d\d', .*…; the checkpoint of step 5 is kept"),
    ],
)
def test_an_error_of_the_loss_says_at_which_step_and_samples_and_what_is_left(
    tmp_path: Path, at: int, told: str
) -> None:
    settings = {"save_every": 5, "log_every": 2}
    with pytest.raises(ValueError, match="my own") as caught:
        train(work(loss=Failing(at), training=settings, batch_size=9), tmp_path / "run", 20)
    (note,) = caught.value.__notes__
    assert re.fullmatch(rf"\({told}\)", note)


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def test_weights_of_a_tied_model_begin_one_that_is_not_under_both_names(tmp_path: Path) -> None:
    tied = train(work(Tied), tmp_path / "tied", 3)
    found = weights(tmp_path / "tied")
    assert torch.equal(found["second.weight"], tied.model.first.weight)
    still = {"training": {"warmup_steps": 10**9}}
    loose = train(work(lambda: Tied(tied=False), **still), tmp_path / "loose", 1, init_from=tmp_path / "tied")
    assert torch.allclose(loose.model.second.weight, tied.model.first.weight, atol=1e-6)


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.encoder.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def test_a_frozen_encoder_in_eval_mode_is_not_trained_on_statistics_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = work(Encoded, optimizer=lambda model: torch.optim.SGD(model.head.parameters(), 0.1))
    model = train(made, tmp_path / "run", 3, quiet=False).model
    assert model.encoder[1].running_mean.tolist() == [0.0] * 4
    assert (model.head.training, model.encoder[2].training) == (True, False)
    assert "nothing in it trains: encoder stays so" in capsys.readouterr().err
