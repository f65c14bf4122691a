"""The head that predicts the next frame's latent."""

from __future__ import annotations

import pytest
import torch

from frostline.errors import UsageError
from frostline_recipes.foveated.head import Head


def pair(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, size, size, generator=draw), torch.randn(3, 16, generator=draw)


def started() -> Head:
    torch.manual_seed(0)
    head = Head(4, 16, widths=(8, 16, 24))
    torch.nn.init.normal_(head.out.weight, std=0.1)
    return head


def test_a_fresh_head_predicts_that_nothing_changes() -> None:
    latents, condition = pair()
    assert torch.equal(Head(4, 16)(latents, condition), latents)


@pytest.mark.parametrize("size", [8, 12, 17, 32])
def test_any_size_comes_back_as_it_went_in(size: int) -> None:
    latents, condition = pair(size)
    assert started()(latents, condition).shape == latents.shape


def test_condition_and_latent_both_matter_and_rows_do_not_mix() -> None:
    head, (latents, condition) = started(), pair()
    told = head(latents, condition)
    other = condition.clone()
    other[1] += 1
    changed = head(latents, other)
    assert torch.allclose(changed[[0, 2]], told[[0, 2]], atol=1e-5)
    assert (changed[1] - told[1]).abs().max() > 1e-3
    moved = head(latents.roll(1, -1), condition) - latents.roll(1, -1)
    assert (moved - (told - latents)).abs().max() > 1e-3


def test_it_learns_a_change_that_the_condition_names() -> None:
    torch.manual_seed(0)
    head, (latents, condition) = Head(4, 16, widths=(8, 16)), pair()
    target = latents + condition[:, :4, None, None]
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    losses = []
    for _ in range(80):
        loss = (head(latents, condition) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_widths_that_no_norm_can_group_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 8"):
        Head(4, 16, widths=(12, 16))
