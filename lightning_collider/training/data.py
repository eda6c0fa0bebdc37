"""Batches of packed sequences in an order that is a function of the seed and the step alone.

Lightning's own resume starts an epoch's loader at batch 0 again. Here the data module's state holds
the number of batches that were trained on, and the resumed loader begins behind them.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class PackedRows(Dataset):
    """Rows of a (rows, T) array of token ids as `input_ids` and `labels`, both int64 (T,).

    With stored `losses` (rows, T) of a reference model, also `reference_losses`, float32 (T,).
    """

    def __init__(self, rows: np.ndarray, losses: np.ndarray | None = None):
        self.rows, self.losses = rows, losses

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        item = {"input_ids": ids, "labels": ids}  # transformers shifts the labels itself
        if self.losses is not None:
            item["reference_losses"] = torch.from_numpy(self.losses[index].astype(np.float32))
        return item


class BatchOrder(Sampler[list[int]]):
    """Row numbers of each batch: one pass over all rows, shuffled by `seed`, without repetition.

    `rank` of `world` ranks takes its own rows of each step. Iteration begins behind `done` batches,
    while the length stays that of the whole pass, as Lightning counts it when it resumes. Rows that
    do not fill a last batch of all ranks are left out.
    """

    def __init__(
        self, rows: int, batch_size: int, seed: int, done: int = 0, rank: int = 0, world: int = 1
    ):
        self.batch_size, self.seed, self.done = batch_size, seed, done
        self.rows, self.rank, self.world = rows, rank, world

    def __len__(self) -> int:
        return self.rows // (self.batch_size * self.world)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.seed).permutation(self.rows).tolist()
        for batch in range(self.done, len(self)):
            start = (batch * self.world + self.rank) * self.batch_size
            yield order[start : start + self.batch_size]


class PackedData(L.LightningDataModule):
    """The training rows of one arm; its state in a checkpoint is how many batches are done."""

    def __init__(self, data: PackedRows, batch_size: int, seed: int):
        super().__init__()
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.done = 0

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        order = BatchOrder(
            len(self.data),
            self.batch_size,
            self.seed,
            self.done,
            self.trainer.global_rank,
            self.trainer.world_size,
        )
        return DataLoader(self.data, batch_sampler=order)

    def state_dict(self) -> dict[str, Any]:
        # Checkpoints are written between optimizer steps, so whole steps are all there is to count.
        assert self.trainer is not None
        return {"done": self.trainer.global_step * self.trainer.accumulate_grad_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]
