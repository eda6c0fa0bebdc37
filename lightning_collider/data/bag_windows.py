"""Sequences of a run whose first part is trained on bags: windows of s x T tokens, then of T.

Both are cut from the same text, and a run that ends within one pass over it sees no token twice.
"""

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_collider.data.packed import Windows, schedule


class BagWindows(Dataset):
    """Windows of T tokens, and behind them windows of s x T tokens over the same sources.

    A long window's item has no `row`: what is stored for rows is stored for those of T tokens.

    Args:
        windows: those of T tokens.
        bag_size: s; the long window with number k of a source holds its windows s k .. s k + s - 1.

    Raises:
        ValueError: a source has fewer than s x T tokens.
    """

    def __init__(self, windows: Windows, bag_size: int):
        self.short, self.bag_size = windows, bag_size
        try:
            self.long = Windows(windows.sources, bag_size * windows.length, windows.separate)
        except ValueError as error:
            raise ValueError(f"{error} or superposition.bag_size") from error

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if row < len(self.short):
            return self.short[row]
        item = self.long[row - len(self.short)]
        del item["row"]
        return item

    def schedule(
        self, weights: list[float], seed: int, superposed: int, ordinary: int
    ) -> np.ndarray:
        """Rows of a run, int64 (superposed + ordinary,): long ones, then short ones.

        Sources are drawn by weight in units of long windows. The short windows of those that are
        not trained on as a whole are shuffled, so that a batch is not of one place in the text.

        Args:
            weights: parts of the sources, in any unit.
            seed: of the draws and of the order.
            superposed, ordinary: sequences of the two kinds.
        """
        drawn = schedule(
            self.long.counts, weights, seed, superposed + -(-ordinary // self.bag_size)
        )
        long, cut = drawn[:superposed], drawn[superposed:]
        of_long, of_short = (np.cumsum([0, *w.counts]) for w in (self.long, self.short))
        source = np.searchsorted(of_long, cut, side="right") - 1
        first = of_short[source] + (cut - of_long[source]) * self.bag_size
        short = (first[:, None] + np.arange(self.bag_size)).reshape(-1)
        order = np.random.default_rng([seed, 1 + len(weights)]).permutation(len(short))
        return np.concatenate([len(self.short) + long, short[order][:ordinary]])
