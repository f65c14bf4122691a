"""What trains and what is in train mode, without running anything."""

from __future__ import annotations

from torch import nn

from frostline.inspector.networks import mode_reasons, reads_training, training_reasons
from frostline.inspector.reach import reach


def test_the_frozen_part_ends_where_the_message_says() -> None:
    network = nn.ModuleDict({"stem": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    network["stem"].requires_grad_(False)
    told = training_reasons(reach(network), "in load")[0]
    assert "6 of 12 parameters (50%)" in told
    assert "(frozen up to stem.bias; head.weight trains). Call .requires_grad_(False) in load" in told
    assert training_reasons(reach(network.requires_grad_(False)), "") == []


def test_equal_faults_are_one_reason() -> None:
    network = nn.Sequential(*(nn.Dropout(0.1) for _ in range(5)), nn.Dropout(0.0), nn.Identity())
    assert mode_reasons(reach(network), "in load") == [
        "dropout '0', '1', '2' and 2 more (p=0.1) are in train mode: call .eval() in load"
    ]
    assert mode_reasons(reach(network.eval()), "") == []


def test_only_own_code_that_reads_training_counts() -> None:
    class Reads(nn.Module):
        def forward(self, x):
            return x if self.training else -x

    class Inherits(Reads):
        pass

    class DoesNot(nn.Linear):
        def forward(self, x):
            return x

    assert reads_training(Reads)
    assert reads_training(Inherits)
    assert not reads_training(DoesNot)
    assert not reads_training(nn.Linear)


def test_stochastic_depth_at_zero_is_harmless() -> None:
    class DropPath(nn.Module):
        def __init__(self, drop_prob: float) -> None:
            super().__init__()
            self.drop_prob = drop_prob

        def forward(self, x):
            return x * 0 if self.training and self.drop_prob else x

    assert mode_reasons(reach(DropPath(0.0)), "") == []
    assert len(mode_reasons(reach(DropPath(0.1)), "")) == 1
