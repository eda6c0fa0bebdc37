"""TokenFilter: the policy by which a forward's losses become its keep mask.

The strategies bind one to the model they convert; the model's forward calls it once its losses are
known. It holds what selection needs over a whole run: selector, reference, fraction and its
warm-up.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_collider.filtering import selectors
from lightning_collider.filtering.reference import LiveReference
from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.filtering.state import check_keep

NAMES = ("excess_loss", "top_loss", "random", "threshold")


class TokenFilter:
    """Chooses the rows that stay in the backward.

    Args:
        selector: "excess_loss" (RHO-1), "top_loss", "random", "threshold", or a callable
            ``(losses, reference_losses, labels) -> bool (B, T)``, in which losses are detached
            float (B, T) and reference_losses is None without a reference.
        keep: fraction of the rows with a target that stays, in (0, 1].
        reference: frozen model (module or folder) for reference losses, or a ScoreStore of losses
            computed before, for batches with their ``row`` numbers; not needed where each batch
            brings ``reference_losses``.
        over: rank over the "batch" (of one rank and micro-step) or over each "sequence".
        keep_warmup_steps: optimizer steps over which the fraction falls linearly from 1 to keep.
        threshold: for "threshold", the loss in nats above which a row is kept.
        seed: for "random".

    Raises:
        ValueError: an unknown selector, keep outside (0, 1], or a setting that the selector lacks.
    """

    def __init__(
        self,
        selector: str | Callable[..., Tensor],
        keep: float = 0.6,
        reference: nn.Module | str | Path | ScoreStore | None = None,
        over: str = "batch",
        keep_warmup_steps: int = 0,
        threshold: float | None = None,
        seed: int = 0,
    ) -> None:
        selectors.check_fraction(keep)
        if not callable(selector) and selector not in NAMES:
            raise ValueError(
                f"selector must be one of {', '.join(NAMES)} or a callable, got {selector!r}"
            )
        if over not in ("batch", "sequence"):
            raise ValueError(f"over must be 'batch' or 'sequence', got {over!r}")
        if keep_warmup_steps < 0:
            raise ValueError(f"keep_warmup_steps must be 0 or more, got {keep_warmup_steps}")
        if (selector == "threshold") != (threshold is not None):
            raise ValueError(
                "threshold= (a loss in nats) goes with selector='threshold', and only with it"
            )
        self.selector = selector
        self.keep = keep
        self.store = reference if isinstance(reference, ScoreStore) else None
        self.reference = (
            None
            if reference is None or isinstance(reference, ScoreStore)
            else LiveReference(reference)
        )
        self.over = over
        self.keep_warmup_steps = keep_warmup_steps
        self.threshold = threshold
        self.seed = seed
        self.step = 0  # optimizer steps done; the strategies count
        self.forwards = 0  # forwards since then: the micro-batches of a step draw different rows
        self.rank = 0
        self.stored: Tensor | None = None  # the batch's reference losses, when the Trainer has them

    def bring(self, batch: object) -> None:
        """Take the reference losses of a batch that has some, or whose rows are stored.

        A batch is a mapping: a dict, or what the collators of Hugging Face return.
        """
        self.stored = None
        if isinstance(batch, Mapping):
            self.stored = batch.get("reference_losses")
            if self.stored is None and self.store is not None and "row" in batch:
                self.stored = self.store.losses(batch["row"])

    def advance(self, step: int) -> None:
        """Say how many optimizer steps have been done."""
        if step != self.step:
            self.step, self.forwards = step, 0

    def fraction(self) -> float:
        """The fraction to keep at this step."""
        if self.step >= self.keep_warmup_steps:
            return self.keep
        return 1.0 - (1.0 - self.keep) * self.step / self.keep_warmup_steps

    def __call__(
        self,
        losses: Tensor,
        labels: Tensor,
        input_ids: Tensor | None,
        reference_losses: Tensor | None,
        **inputs: Tensor | None,
    ) -> Tensor:
        """The keep mask of a forward.

        Args:
            losses: detached float (B, T).
            labels: int64 (B, T).
            input_ids: int64 (B, T), for the reference model.
            reference_losses: float (B, T) when they were stored beforehand, else None.
            inputs: attention mask and position ids, for the reference model.

        Returns:
            bool (B, T).
        """
        reference_losses = self.reference_losses(input_ids, labels, reference_losses, inputs)
        keep = self.choose(losses, reference_losses, labels)
        self.forwards += 1
        check_keep(keep, tuple(labels.shape))
        return keep

    def choose(self, losses: Tensor, reference_losses: Tensor | None, labels: Tensor) -> Tensor:
        """The keep mask bool (B, T) for losses, reference losses and labels, each (B, T)."""
        fraction = self.fraction()
        if callable(self.selector):
            return self.selector(losses, reference_losses, labels)
        if self.selector == "threshold":
            assert self.threshold is not None
            return selectors.threshold(losses, reference_losses, labels, self.threshold)
        if self.selector == "random":
            return selectors.random(labels, fraction, self.over, self._generator())
        if self.selector == "top_loss":
            return selectors.top_loss(losses, labels, fraction, self.over)
        assert reference_losses is not None
        return selectors.select(losses, reference_losses, labels, fraction, self.over)

    def reference_losses(
        self,
        input_ids: Tensor | None,
        labels: Tensor,
        given: Tensor | None = None,
        inputs: dict[str, Tensor | None] | None = None,
    ) -> Tensor | None:
        """Losses (B, T): the given ones, those that `bring` took, or the reference model's.

        None where there is no reference and the selector needs none.
        """
        stored = self.stored if given is None else given
        if stored is not None:
            if stored.shape != labels.shape:
                raise ValueError(
                    f"reference_losses must have the batch's shape (B, T) = {tuple(labels.shape)}, "
                    f"got {tuple(stored.shape)}"
                )
            return stored.to(labels.device)
        if self.reference is None:
            if self.selector == "excess_loss":
                if self.store is not None:
                    raise ValueError(
                        'the stored reference losses are found by the batch\'s "row" (B,), which '
                        "this batch lacks; or pass reference_losses=store.losses(rows)"
                    )
                raise ValueError(
                    "selector='excess_loss' compares with a reference: give reference=a model or "
                    "its folder, or batches with reference_losses"
                )
            return None
        if input_ids is None:
            raise ValueError(
                "the reference model needs input_ids; the forward got inputs_embeds only"
            )
        return self.reference.losses(input_ids, labels, **(inputs or {}))

    def _generator(self) -> torch.Generator:
        # A function of (seed, step, forward, rank): the same rows after a resume, others on each
        # rank.
        mixed = hash((self.seed, self.step, self.forwards, self.rank)) & (2**63 - 1)
        return torch.Generator().manual_seed(mixed)
