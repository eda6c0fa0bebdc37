"""The schedule's rates by hand."""

import pytest
import torch

from lightning_collider.superposition import WarmupStableDecay


def rates(steps, **settings):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = WarmupStableDecay(optimizer, steps, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_rates_by_hand():
    want = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates(10, warmup_steps=2, decay=0.4) == pytest.approx(want)
    assert rates(3, warmup_steps=0, decay=0.0) == [2.0] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 8, "decay": 0.3}, "do not fit into 10 steps"),
        ({"decay": 1.5}, r"\[0, 1\]"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        rates(10, **settings)
