"""Multi-hot cross-entropy: one row of logits predicts the s tokens of a bag.

For logits z and targets y_1 .. y_s with weights w_i (0 where a target is missing) it is
``sum_i w_i CE(z, y_i) / sum_i w_i = logsumexp(z) - sum_i w_i z[y_i] / sum_i w_i``: one logsumexp
for all s targets (Token-Superposition Training, arXiv 2605.06546, section 3). Over many rows,
numerator and denominator are summed first, so every (row, target) pair counts the same.

Shapes: N rows, V vocabulary, s targets a row, D hidden width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_collider.filtering.selectors import NO_TARGET
from lightning_collider.ops import check_targets

CHUNK_ELEMENTS = 2**24  # logits in memory at once: 64 MB in float32


def bag_weights(weights: str | Sequence[float], bag_size: int) -> Tensor | None:
    """Weights (s,) of the places in a bag, with mean 1, or None when all are equal.

    Args:
        weights: "uniform", "inverse" (1/i for the i-th token), or s numbers.
        bag_size: s.

    Raises:
        ValueError: an unknown name, another number of weights, or weights that are negative or 0.
    """
    if weights == "uniform":
        return None
    if weights == "inverse":
        weights = [1 / i for i in range(1, bag_size + 1)]
    if isinstance(weights, str):
        raise ValueError(
            f"weights must be 'uniform', 'inverse' or {bag_size} numbers, got {weights!r}"
        )
    values = torch.tensor(list(weights), dtype=torch.float64)
    if values.shape != (bag_size,):
        raise ValueError(f"a bag of {bag_size} tokens needs {bag_size} weights, got {len(values)}")
    if not bool((values >= 0).all() and values.sum() > 0 and values.isfinite().all()):
        raise ValueError(f"weights must be 0 or more, and not all 0, got {values.tolist()}")
    return values / values.mean()


def pair_weights(targets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weight (N, s) of each (row, target) pair, 0 where the target is missing."""
    valid = (targets != NO_TARGET).to(dtype)
    return valid if weights is None else valid * weights.to(valid)


def multi_hot_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy over all valid (row, target) pairs.

    Args:
        logits: float (N, V); computed in float32, or float64 where they are float64.
        targets: int64 (N, s), -100 where a target is missing.
        weights: float (s,), or None for equal ones.

    Returns:
        0-d float32 or float64; 0 when there is no valid pair.

    Raises:
        ValueError: shapes that do not fit, or a target outside the vocabulary.
    """
    _check_shapes(logits, targets, weights)
    check_targets(targets, logits.shape[1])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    pairs = pair_weights(targets, weights, wide.dtype)
    losses = wide.logsumexp(1, keepdim=True) - wide.gather(1, targets.clamp(min=0))
    return (losses * pairs).sum() / divisor_of(pairs)


def divisor_of(pairs: Tensor) -> Tensor:
    """The sum of the pairs' weights (0-d), or 1 where there is none to divide by."""
    total = pairs.sum()
    return total.where(total > 0, 1)


def bag_entropy(targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The floor of the multi-hot cross-entropy: no logits of any model give less.

    Each row's best prediction is the empirical distribution of its own targets, and its loss is
    then that distribution's entropy: log s for s different tokens, less where some repeat.

    Args:
        targets: int64 (N, s), -100 where a target is missing.
        weights: float (s,), or None.

    Returns:
        0-d float64, nats: the mean over all valid pairs; 0 when there is none.
    """
    pairs = pair_weights(targets, weights, torch.float64)
    repeats = (targets[:, :, None] == targets[:, None, :]).to(pairs)
    mass = (repeats * pairs[:, None, :]).sum(2)  # (N, s): weight of all places with the same token
    surprise = pairs.sum(1, keepdim=True).log() - mass.log()
    return (surprise * pairs).where(pairs > 0, 0.0).sum() / divisor_of(pairs)


def linear_multi_hot_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """:func:`multi_hot_cross_entropy` of ``hidden @ weight.T + bias``, without holding all logits.

    Logits exist for one chunk of rows at a time, and their gradient goes into those of hidden and
    weight right there, in the forward: three GEMMs of the head, as in an ordinary step.

    Args:
        hidden: float (N, D).
        weight: float (V, D).
        bias: float (V,) or None.
        targets: int64 (N, s), -100 where a target is missing.
        weights: float (s,), or None for equal ones.
        chunk_rows: rows of a chunk; None chooses some 64 MB of logits.

    Returns:
        0-d float32 or float64; 0 when there is no valid pair.

    Raises:
        ValueError: shapes that do not fit, or a target outside the vocabulary.
    """
    _check_shapes(hidden, targets, weights)
    check_targets(targets, weight.shape[0])
    if chunk_rows is None:
        chunk_rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be 1 or more, got {chunk_rows}")
    return _LinearMultiHot.apply(hidden, weight, bias, targets, weights, chunk_rows)


class _LinearMultiHot(torch.autograd.Function):
    """Loss and gradients of the head, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        chunk_rows: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        pairs = pair_weights(targets, weights, wide)
        pairs = pairs / divisor_of(pairs)
        needs = ctx.needs_input_grad
        loss = hidden.new_zeros((), dtype=wide)
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = of_bias = None
        # Once even without rows: gradients that are 0 are defined.
        for start in range(0, max(1, hidden.shape[0]), chunk_rows):
            rows = slice(start, start + chunk_rows)
            narrow = F.linear(hidden[rows], weight, bias)  # cast here under autocast
            loss_of_rows, grad = _logits_loss(narrow.to(wide), targets[rows], pairs[rows])
            loss += loss_of_rows
            grad = grad.to(narrow.dtype)
            if of_hidden is not None:
                of_hidden[rows] = grad @ weight
            if needs[1]:
                of_weight = _plus(of_weight, (grad.t() @ hidden[rows]).to(wide))
            if needs[2]:
                of_bias = _plus(of_bias, grad.sum(0, dtype=wide))
        ctx.save_for_backward(
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return (*grads, None, None, None)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _logits_loss(logits: Tensor, targets: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of the pairs' losses (0-d), and its gradient, which overwrites the logits."""
    targets = targets.clamp(min=0)
    largest = logits.amax(1, keepdim=True)
    chosen = logits.gather(1, targets) - largest
    # In place and with one exponential: at small widths these passes are a good part of the step.
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    loss = ((total.log() - chosen) * pairs).sum()
    grad = exponentials.mul_(pairs.sum(1, keepdim=True) / total)
    return loss, grad.scatter_add_(1, targets, -pairs)


def _check_shapes(rows: Tensor, targets: Tensor, weights: Tensor | None) -> None:
    if rows.dim() != 2 or targets.dim() != 2 or rows.shape[0] != targets.shape[0]:
        raise ValueError(
            f"multi-hot cross-entropy takes rows (N, ...) and targets (N, s), got "
            f"{tuple(rows.shape)} and {tuple(targets.shape)}"
        )
    if targets.shape[1] < 1:
        raise ValueError("targets (N, s) must have at least one column")
    if weights is not None and weights.shape != (targets.shape[1],):
        raise ValueError(
            f"weights must have one value for each of the {targets.shape[1]} targets of a row, "
            f"got {tuple(weights.shape)}"
        )
