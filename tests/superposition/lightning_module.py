"""A user's run with TokenSuperposition: 10 steps, of which 4 on bags of 3."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_collider.superposition import TokenSuperposition, WarmupStableDecay
from tests.conftest import batch_of
from tests.strategies.lightning_module import UsersModule, fit

STEPS, SWITCH, BAG, LENGTH = 10, 4, 3, 12


class Rows(Dataset):
    """Rows of 12 tokens; different numbers of labels are missing."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids, labels = batch_of(1, LENGTH, seed=i, holes=0.1 + 0.2 * (i % 3))
        return {"input_ids": ids[0], "labels": labels[0]}


class Recorder(UsersModule):
    """The user's module; it also writes down what it saw. Adam with the schedule of the paper."""

    def __init__(self, max_steps: int = STEPS, **settings) -> None:
        super().__init__(optimizer=torch.optim.Adam, **settings)
        self.max_steps = max_steps
        self.shapes: list[tuple[int, ...]] = []
        self.first_tokens: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.shapes.append(tuple(batch["input_ids"].shape))
        self.first_tokens.append(batch["input_ids"].flatten().tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters(), lr=0.01)
        schedule = WarmupStableDecay(optimizer, self.max_steps, warmup_steps=2, decay=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(n: int = 60, batch_size: int = 1, **settings) -> DataLoader:
    return DataLoader(Rows(n), batch_size=batch_size, **settings)


def callback(**settings) -> TokenSuperposition:
    return TokenSuperposition(**{"bag_size": BAG, "ratio": SWITCH / STEPS, **settings})


def run(strategy="auto", batches=None, callbacks=(), module=None, tst=None, **settings):
    """One run on one device; returns the module."""
    module = module or Recorder()
    callbacks = [tst or callback(), *callbacks]
    batches = rows() if batches is None else batches
    settings = {"max_steps": STEPS, **settings}
    fit(module, strategy, batches, callbacks=callbacks, **settings)
    return module


class SaveAt(L.Callback):
    """A checkpoint behind one optimizer step."""

    def __init__(self, path, step: int) -> None:
        self.path, self.step, self.saved = path, step, False

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)


def row_tokens(first: int, last: int) -> list[int]:
    """Tokens of rows first .. last - 1 of the data, laid end to end."""
    return torch.cat(
        [item["input_ids"] for item in Subset(Rows(last), range(first, last))]
    ).tolist()
