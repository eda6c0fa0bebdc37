"""Selectors: from the losses of a batch to the rows that stay in its backward.

A selector is a function ``(losses, reference_losses, labels, keep) -> bool (B, T)``. ``losses[b,
t]`` is the loss of the prediction made at position t; labels follow Hugging Face, so a row has a
target where ``labels[b, t + 1]`` is not -100.
"""

import torch
from torch import Tensor

NO_TARGET = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Targets (B, T) of the rows of labels (B, T): the next position's label, -100 for the last."""
    targets = torch.full_like(labels, NO_TARGET)
    targets[:, :-1] = labels[:, 1:]
    return targets


def has_target(labels: Tensor) -> Tensor:
    """Bool (B, T): rows of a batch that predict something."""
    return shift_labels(labels) != NO_TARGET


def check_fraction(keep: float) -> None:
    """Raise ValueError unless keep is in (0, 1]."""
    if not 0.0 < keep <= 1.0:
        raise ValueError(
            "keep is the fraction of tokens that stay in the backward and must be in (0, 1], got "
            f"{keep}"
        )


def keep_highest(scores: Tensor, labels: Tensor, keep: float, over: str) -> Tensor:
    """Keep the rows with the highest scores: floor(keep n + 0.5) of the n rows that have a target.

    Args:
        scores: float (B, T).
        labels: int64 (B, T).
        keep: fraction in (0, 1]; at 1 every row is kept, those without a target too.
        over: "batch" ranks all rows together (RHO-1), "sequence" each row of the batch alone.

    Returns:
        bool (B, T). Ties go to the earlier row.
    """
    check_fraction(keep)
    if over not in ("batch", "sequence"):
        raise ValueError(f"over must be 'batch' or 'sequence', got {over!r}")
    if keep == 1.0:
        return torch.ones_like(labels, dtype=torch.bool)
    valid = has_target(labels)
    scores = scores.detach().to(torch.float64).masked_fill(~valid, -torch.inf)
    if over == "batch":
        scores, valid = scores.reshape(1, -1), valid.reshape(1, -1)
    n_kept = torch.floor(keep * valid.sum(-1, keepdim=True).to(torch.float64) + 0.5)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    kept = torch.zeros_like(valid).scatter(-1, order, ranks < n_kept)
    return kept.reshape(labels.shape)


def select(
    losses: Tensor,
    reference_losses: Tensor,
    labels: Tensor,
    keep: float = 0.6,
    over: str = "batch",
) -> Tensor:
    """RHO-1's rule: keep the rows with the highest excess loss (arXiv 2404.07965, section 2).

    Args:
        losses: float (B, T), the model's loss at each position.
        reference_losses: float (B, T), the reference model's.
        labels: int64 (B, T), -100 where there is no target.
        keep: fraction of the rows with a target that stays.
        over: "batch" or "sequence".

    Returns:
        bool (B, T): floor(keep n + 0.5) rows of the n that have a target; ties go to the earlier
        row.

    Raises:
        ValueError: keep outside (0, 1], shapes that differ, or an unknown ``over``.
    """
    if not losses.shape == reference_losses.shape == labels.shape:
        raise ValueError(
            f"losses {tuple(losses.shape)}, reference losses {tuple(reference_losses.shape)} and "
            f"labels {tuple(labels.shape)} must have the same shape (B, T)"
        )
    return keep_highest(losses.detach() - reference_losses, labels, keep, over)


def top_loss(losses: Tensor, labels: Tensor, keep: float, over: str) -> Tensor:
    """Keep the rows with the highest loss: selection without a reference."""
    return keep_highest(losses, labels, keep, over)


def random(labels: Tensor, keep: float, over: str, generator: torch.Generator) -> Tensor:
    """Keep a random subset of the same size: the baseline that any selector has to beat."""
    scores = torch.rand(labels.shape, generator=generator).to(labels.device)
    return keep_highest(scores, labels, keep, over)


def threshold(
    losses: Tensor, reference_losses: Tensor | None, labels: Tensor, value: float
) -> Tensor:
    """Keep the rows whose loss (excess loss, given a reference) is above a value in nats."""
    scores = losses if reference_losses is None else losses - reference_losses
    return has_target(labels) & (scores.detach() > value)
