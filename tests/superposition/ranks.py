"""What each of two gloo ranks runs: ``torchrun ranks.py FOLDER``; rank 0 leaves full weights there.

Each rank sees every second row; the first half of the run is on bags, and a checkpoint of each
phase is resumed. First under FSDP2, then under Lightning's own DDP.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from tests.strategies.lightning_module import UsersModule
from tests.strategies.ranks import QUIET, full_weights, rank
from tests.superposition.lightning_module import BAG, Rows, SaveAt, callback

STEPS = 4
N = 2 * (BAG + 1) * STEPS // 2  # rows of both ranks together


class RanksRows(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Subset(Rows(N), range(rank(), N, 2)))


def fit(strategy, callbacks, ckpt_path=None):
    module = UsersModule(optimizer=torch.optim.SGD)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        use_distributed_sampler=False,
        callbacks=[callback(ratio=0.5), *callbacks],
        **QUIET,
    )
    trainer.fit(module, RanksRows(), ckpt_path=ckpt_path)
    return module


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    saved = (1, 3)
    for strategy in ("collider", "ddp"):
        paths = {step: folder / f"{strategy}-{step}.ckpt" for step in saved}
        whole = fit(strategy, [SaveAt(path, step) for step, path in paths.items()])
        want = full_weights(whole.model)
        for step, path in paths.items():
            resumed = fit(strategy, [], path)
            assert resumed.losses == whole.losses[step:]
            after = full_weights(resumed.model)
            assert all(after[name].equal(p) for name, p in want.items())
        if rank() == 0:
            torch.save(want, folder / f"{strategy}.pt")
