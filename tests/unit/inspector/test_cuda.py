"""The same on a GPU: its generator is watched, fused attention is no randomness, and nothing stays there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import frostline as fl

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (1, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1) * self.scale


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_attention_is_frozen_and_goes_back_where_it_was(precision) -> None:
    network = Attention().eval().requires_grad_(False)
    rows = [{"key": str(i), "x": torch.randn(16, 64)} for i in range(4)]
    stage = fl.Stage("y", network, reads="x", on="device", batch_size=8, precision=precision)
    report = fl.audit(fl.Pipeline(fl.Source.table(rows), stage), device="cuda")
    assert report.ok, str(report)
    assert {t.device.type for t in network.state_dict().values()} == {"cpu"}


def test_the_generator_of_the_device_is_watched_and_put_back() -> None:
    x = torch.randn(4, 64, device="cuda")
    before = torch.cuda.get_rng_state()
    (stage,) = fl.audit(lambda x: x + torch.rand_like(x), x).stages
    assert "torch's generator of cuda:0 moved" in stage.reasons[0]
    assert torch.equal(before, torch.cuda.get_rng_state())
