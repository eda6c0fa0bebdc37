"""A user's LightningModule, and one run of it as a list of losses and final weights."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from tests.conftest import batch_of, small_model


class Batches(Dataset):
    """Single sequences with labels (-100 holes differ, so kept counts differ)."""

    def __init__(self, n: int, length: int = 16, **extra) -> None:
        self.items = []
        for i in range(n):
            ids, labels = batch_of(1, length, seed=i, holes=0.1 + 0.6 * (i % 3) / 2)
            item = {"input_ids": ids[0], "labels": labels[0]}
            self.items.append({**item, **{k: f(i, length) for k, f in extra.items()}})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict:
        return self.items[i]


class UsersModule(L.LightningModule):
    """Calls its Hugging Face model with labels and returns the loss, as any user would."""

    def __init__(
        self, double: bool = True, optimizer=torch.optim.SGD, family: str = "llama", **config
    ) -> None:
        super().__init__()
        self.model = small_model(family, layers=2, **config)
        if double:
            self.model.double()
        self.make_optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        out = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        self.losses.append(out.loss.item())
        return out.loss

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=0.1)


def loader(n: int, batch_size: int = 1, **extra) -> DataLoader:
    return DataLoader(Batches(n, **extra), batch_size=batch_size, shuffle=False)


def fit(module, strategy, batches, max_steps: int, ckpt_path=None, **settings) -> L.Trainer:
    """Train on one CPU device without logs or files."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=max_steps,
        **{**quiet, **settings},
    )
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer
