"""What the log says of the two phases: a loss beside its floor, and two speeds."""

from typing import Any

import torch
from torch import Tensor

from lightning_collider.superposition.model import BagLoss
from lightning_collider.superposition.stopwatch import Stopwatch


class Meter:
    """Sums what the forwards observe between two rows of the log, without waiting for a device.

    Attributes:
        clock: of the speeds; stopped while something else than training goes on.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._device = torch.device("cpu")
        self.clock = Stopwatch()

    def start(self, device: torch.device) -> None:
        """Begin a row."""
        self._sums, self._device = [], device
        self.clock.restart()

    def observe(self, found: BagLoss) -> None:
        """Take in one forward."""
        pairs = found.pairs
        positions = torch.full_like(pairs, found.positions)
        loss = found.loss.detach().to(pairs)
        parts = [loss * pairs, found.floor * pairs, pairs, found.tokens.to(pairs), positions]
        self._sums.append(torch.stack(parts))

    def flush(self, strategy: Any, superposed: bool) -> dict[str, float]:
        """The row over all ranks: losses as means over all pairs, speeds as sums over the ranks.

        Data tokens and positions of the trunk are different things: on bags there are s tokens to
        a position.
        """
        seconds = self.clock.seconds
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        if self._sums:
            sums = torch.stack(self._sums).sum(0)
        loss, floor, pairs, tokens, positions = strategy.reduce(sums, reduce_op="sum").tolist()
        row = {
            "tst/data_tokens_per_s": tokens / seconds,
            "tst/positions_per_s": positions / seconds,
        }
        if superposed and pairs > 0:
            row = {"tst/loss": loss / pairs, "tst/floor": floor / pairs, **row}
        self.start(self._device)
        return row
