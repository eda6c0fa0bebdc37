"""What a run did between two rows of its log: mean losses, and tokens, rows and seconds."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric, SumMetric

from lightning_collider.superposition.stopwatch import Stopwatch


class Meter(nn.Module):
    """Counts tokens and averages losses between two rows of the log, over all ranks.

    Two losses: over the rows that were kept, and over all rows that have a target. Three speeds:
    input tokens, positions of the trunk, and kept rows a second. On single tokens a position is a
    token, and without filtering all rows are kept, up to the last token of a sequence, which is an
    input and has no target. On bags a position has several tokens and is always kept; their loss
    cannot be compared with that of single tokens, and is left out.

    Attributes:
        clock: of the speeds; stopped while something else than training goes on.
        totals: input_tokens, positions, kept_rows and seconds, up to the newest row of the log.
        last: the newest row of the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_loss, self.all_loss = MeanMetric(), MeanMetric()
        self.tokens, self.positions, self.kept_rows = SumMetric(), SumMetric(), SumMetric()
        self.totals = dict.fromkeys(("input_tokens", "positions", "kept_rows", "seconds"), 0.0)
        self.last: dict[str, float] = {}
        self.clock = Stopwatch()
        self.start()

    def start(self) -> None:
        """Measure time from here on."""
        self._batches = self._of_single_tokens = 0
        self.clock.restart()

    def paused(self) -> AbstractContextManager[None]:
        """Leave the time that is spent inside out of the speeds."""
        return self.clock.stopped()

    def now(self) -> dict[str, float]:
        """Input tokens, positions and seconds of training so far."""
        new = self._counted() if self._batches > 0 else {}
        names = ("input_tokens", "positions", "seconds")
        return {name: self.totals[name] + new.get(name, 0.0) for name in names}

    def update(self, out: Any, labels: torch.Tensor) -> None:
        """Take in one batch: the model's output and its labels (B, T)."""
        positions: Any = getattr(out, "positions", None)  # of a model that trains on bags
        kept = positions
        if positions is None:
            positions, kept = labels.numel(), self._update_losses(out, labels)
        self.tokens.update(labels.numel())
        self.positions.update(positions)
        self.kept_rows.update(kept)
        self._batches += 1

    def _update_losses(self, out: Any, labels: torch.Tensor) -> torch.Tensor:
        """Take in the losses of a batch of single tokens; returns how many rows are kept, 0-d."""
        has_target = labels[:, 1:] != -100
        targets = kept = has_target.sum()
        loss = loss_of_all = out.loss.detach()
        if getattr(out, "keep", None) is not None:
            kept = (out.keep[:, :-1] & has_target).sum()
            loss_of_all = out.token_losses.detach().sum() / targets
        self.kept_loss.update(loss, kept)
        self.all_loss.update(loss_of_all, targets)
        self._of_single_tokens += 1
        return kept

    def _counted(self) -> dict[str, float]:
        """Tokens, rows and seconds since the last row of the log. Waits for the device."""
        return {
            "input_tokens": self.tokens.compute().item(),
            "positions": self.positions.compute().item(),
            "kept_rows": self.kept_rows.compute().item(),
            "seconds": self.clock.seconds,
        }

    def flush(self) -> dict[str, float]:
        """Means and speeds since the last row, or the last row again when nothing came since."""
        if self._batches == 0:
            return self.last
        new, self.last = self._counted(), {}
        if self._of_single_tokens > 0:
            self.last["loss_kept"] = self.kept_loss.compute().item()
            self.last["loss_all"] = self.all_loss.compute().item()
        self.last |= {
            "kept_share": new["kept_rows"] / new["positions"],
            "tokens_per_s": new["input_tokens"] / new["seconds"],
            "positions_per_s": new["positions"] / new["seconds"],
            "kept_per_s": new["kept_rows"] / new["seconds"],
        }
        self.totals = {name: self.totals[name] + new[name] for name in new}
        for metric in (self.kept_loss, self.all_loss, self.tokens, self.positions, self.kept_rows):
            metric.reset()
        self.start()
        return self.last

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; ends the current row of the log."""
        self.flush()
        return {"totals": self.totals, "last": self.last}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint's numbers."""
        totals = state["totals"]
        # Older checkpoints do not count positions, which without bags are the tokens.
        self.totals = {"positions": totals["input_tokens"], **totals}
        self.last = state["last"]
