"""Multi-hot cross-entropy and its floor against loops, hand-computed values and plain autograd."""

import math

import pytest
import torch
from torch.nn import functional as F

from lightning_collider.superposition.loss import (
    bag_entropy,
    bag_weights,
    linear_multi_hot_cross_entropy,
    multi_hot_cross_entropy,
)

N, V, S, D = 11, 13, 4, 6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def some_targets(holes=0.3, seed=0):
    targets = torch.randint(0, V, (N, S), generator=generator(seed))
    targets = targets.masked_fill(torch.rand(N, S, generator=generator(seed)) < holes, -100)
    targets[3] = -100  # a bag without any target
    return targets


def by_loop(logits, targets, weights=None):
    """One cross-entropy a target place, summed, over the weight of the valid pairs."""
    weights = [1.0] * targets.shape[1] if weights is None else weights.tolist()
    total, count = torch.zeros((), dtype=logits.dtype), 0.0
    for i, weight in enumerate(weights):
        column = targets[:, i]
        total = total + weight * F.cross_entropy(logits, column, reduction="sum", ignore_index=-100)
        count += weight * int((column != -100).sum())
    return total / count


def some_logits():
    return torch.randn(N, V, dtype=torch.float64, generator=generator(1)).requires_grad_()


@pytest.mark.parametrize("weights", [None, "inverse", [0.5, 0.0, 2.0, 1.0]])
def test_loss_and_gradient_equal_a_loop_over_the_targets(weights):
    weights = None if weights is None else bag_weights(weights, S)
    ours, loops = some_logits(), some_logits()
    loss = multi_hot_cross_entropy(ours, some_targets(), weights)
    want = by_loop(loops, some_targets(), weights)
    loss.backward()
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-12
    assert (ours.grad - loops.grad).abs().max() < 1e-12
    assert ours.grad[3].abs().max() == 0


def test_values_by_hand():
    # z = (log 1, log 2, log 5): probabilities 1/8, 2/8, 5/8.
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    both = multi_hot_cross_entropy(logits[:1], torch.tensor([[0, 2]]))
    assert both.item() == pytest.approx((math.log(8) + math.log(8 / 5)) / 2, rel=1e-14)
    # Three valid pairs over two rows: each pair counts the same, not each row.
    three = multi_hot_cross_entropy(logits, torch.tensor([[0, 2], [1, -100]]))
    assert three.item() == pytest.approx((math.log(8) + math.log(1.6) + math.log(3)) / 3, rel=1e-14)
    weighted = multi_hot_cross_entropy(
        logits[:1], torch.tensor([[0, 2]]), torch.tensor([1.0, 3.0], dtype=torch.float64)
    )
    assert weighted.item() == pytest.approx((math.log(8) + 3 * math.log(1.6)) / 4, rel=1e-14)


def test_one_target_a_row_is_ordinary_cross_entropy():
    targets = some_targets()[:, :1]
    loss = multi_hot_cross_entropy(some_logits(), targets)
    assert abs(loss - F.cross_entropy(some_logits(), targets[:, 0])).item() < 1e-12


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_plain_autograd(chunk_rows, bias):
    def inputs():
        shapes = [(N, D), (V, D), (V,)] if bias else [(N, D), (V, D)]
        drawn = generator(2)
        return [
            torch.randn(shape, dtype=torch.float64, generator=drawn).requires_grad_()
            for shape in shapes
        ]

    ours, plain = inputs(), inputs()
    weights = bag_weights("inverse", S)
    args = ours if bias else [*ours, None]
    loss = linear_multi_hot_cross_entropy(*args, some_targets(), weights, chunk_rows)
    want = by_loop(F.linear(*plain), some_targets(), weights)
    (3 * loss).backward()
    (3 * want).backward()
    assert abs(loss.item() - want.item()) < 1e-12
    for x, y in zip(ours, plain, strict=True):
        assert (x.grad - y.grad).abs().max() < 1e-12


def test_without_any_target_loss_and_gradients_are_zero():
    hidden = torch.randn(2, D).requires_grad_()
    weight = torch.randn(V, D).requires_grad_()
    none = torch.full((2, S), -100)
    loss = linear_multi_hot_cross_entropy(hidden, weight, None, none)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    assert multi_hot_cross_entropy(torch.randn(2, V), none).item() == 0
    assert bag_entropy(none).item() == 0


def test_under_autocast_the_gradients_are_close_to_float32s():
    hidden = torch.randn(N, D, generator=generator(3)).requires_grad_()
    weight = torch.randn(V, D, generator=generator(4)).requires_grad_()
    want = torch.autograd.grad(
        linear_multi_hot_cross_entropy(hidden, weight, None, some_targets()), (hidden, weight)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_multi_hot_cross_entropy(hidden, weight, None, some_targets())
    got = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        assert 0 < (x - y).abs().max() < 0.03 * y.abs().max()


def test_the_floor_by_hand():
    # Four different tokens: log 4. A token three times of four, and three of which one is missing.
    assert bag_entropy(torch.tensor([[5, 6, 7, 8]])).item() == pytest.approx(math.log(4), rel=1e-14)
    repeats = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert bag_entropy(torch.tensor([[5, 5, 7, 5]])).item() == pytest.approx(repeats, rel=1e-14)
    two = bag_entropy(torch.tensor([[5, 5, 7, 5], [5, 6, -100, -100]]))
    assert two.item() == pytest.approx((4 * repeats + 2 * math.log(2)) / 6, rel=1e-14)
    assert bag_entropy(torch.tensor([[9, 9, 9]])).item() == 0
    # Weights 1 and 3 on two different tokens: a distribution of 1/4 and 3/4.
    weighted = bag_entropy(torch.tensor([[1, 2]]), torch.tensor([1.0, 3.0]))
    assert weighted.item() == pytest.approx(repeats, rel=1e-14)


@pytest.mark.parametrize("weights", [None, "inverse"])
def test_the_best_logits_reach_the_floor(weights):
    weights = None if weights is None else bag_weights(weights, S)
    targets = some_targets(holes=0.2)
    pairs = (targets != -100).double() * (1 if weights is None else weights)
    mass = torch.zeros(N, V, dtype=torch.float64).scatter_add_(1, targets.clamp(min=0), pairs)
    best = multi_hot_cross_entropy((mass + 1e-300).log(), targets, weights).item()
    assert best == pytest.approx(bag_entropy(targets, weights).item(), abs=1e-12)
    worse = multi_hot_cross_entropy((mass + 0.1).log(), targets, weights).item()
    assert worse > best + 0.01


def test_inverse_weights_are_one_over_i_with_mean_one():
    weights = bag_weights("inverse", 3)
    assert weights.mean().item() == pytest.approx(1)
    assert (weights[0] / weights).tolist() == pytest.approx([1, 2, 3])
    assert bag_weights("uniform", 3) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multi_hot_cross_entropy(torch.ones(2, V), torch.ones(3, S).long()), "takes rows"),
        (lambda: multi_hot_cross_entropy(torch.ones(2, V), torch.ones(2).long()), "takes rows"),
        (lambda: multi_hot_cross_entropy(torch.ones(2, V), torch.full((2, S), V)), "vocabulary"),
        (lambda: multi_hot_cross_entropy(torch.ones(2, V), torch.ones(2, 0).long()), "one column"),
        (
            lambda: multi_hot_cross_entropy(
                torch.ones(2, V), torch.ones(2, S).long(), torch.ones(S + 1)
            ),
            "one value for each of the 4",
        ),
        (lambda: bag_weights("squares", S), "'uniform', 'inverse' or 4 numbers"),
        (lambda: bag_weights([1.0], S), "needs 4 weights"),
        (lambda: bag_weights([1.0, -1.0, 1.0, 1.0], S), "0 or more"),
        (lambda: bag_weights([0.0] * S, S), "not all 0"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_rows_the_gradients_are_zero():
    hidden, weight, bias = (
        torch.zeros(shape, requires_grad=True) for shape in ((0, 3), (5, 3), (5,))
    )
    loss = linear_multi_hot_cross_entropy(hidden, weight, bias, torch.zeros(0, 2, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.shape == (5, 3) and weight.grad.abs().max() == 0
    assert bias.grad.shape == (5,) and bias.grad.abs().max() == 0
