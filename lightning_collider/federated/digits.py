"""scikit-learn's handwritten digits, divided among clients, and a small convolutional network."""

from collections.abc import Iterator

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_collider.federated.tasks import Task, dirichlet_split, mixed_seed, seeded

Batch = tuple[Tensor, Tensor]  # images float32 (B, 1, 8, 8) in [0, 1], digits int64 (B,)


class SmallCNN(L.LightningModule):
    """Two convolutions and two linear layers: 10 thousand parameters, trained with SGD."""

    def __init__(self, learning_rate: float, momentum: float):
        super().__init__()
        self.learning_rate, self.momentum = learning_rate, momentum
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(*self.logits_and_targets(batch))

    def logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, digits = batch
        return self(images), digits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)


class Digits(Task):
    """1,797 images; a fifth is held out, the rest is divided by a Dirichlet distribution.

    Args:
        seed: of the initial weights, the split and the order of batches.
        clients: number of parts.
        dirichlet: alpha of the split; small: few digits a client.
        smallest: images that each client gets at least.
        batch_size: images in one optimizer step.
        learning_rate, momentum: of SGD.
    """

    metric, higher_is_better = "accuracy", True

    def __init__(
        self,
        seed: int,
        clients: int = 20,
        dirichlet: float = 0.1,
        smallest: int = 5,
        batch_size: int = 16,
        learning_rate: float = 0.05,
        momentum: float = 0.0,
    ):
        self.seed, self.clients, self.batch_size = seed, clients, batch_size
        self.learning_rate, self.momentum = learning_rate, momentum
        images, digits = _load()
        # The held-out fifth is the same for every seed: runs are judged by the same images.
        order = np.random.default_rng(0).permutation(len(digits))
        held_out, rest = order[: len(digits) // 5], order[len(digits) // 5 :]
        self._test = (images[held_out], digits[held_out])
        parts = dirichlet_split(digits[rest].numpy(), clients, dirichlet, seed, smallest)
        self._parts = [(images[rest[p]], digits[rest[p]]) for p in parts]

    def module(self) -> SmallCNN:
        with seeded(self.seed):
            return SmallCNN(self.learning_rate, self.momentum)

    def examples(self, client: int) -> int:
        return len(self._parts[client][1])

    def batches(self, client: int, seed: int) -> Iterator[Batch]:
        images, digits = self._parts[client]
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, seed))
        order = torch.randperm(len(digits), generator=generator)
        for rows in order.split(self.batch_size):
            yield images[rows], digits[rows]

    def evaluate(self, module: L.LightningModule) -> dict[str, float]:
        images, digits = self._test
        module.eval()
        with torch.no_grad():
            logits = module(images.to(module.device))
        correct = (logits.argmax(-1).cpu() == digits).float().mean().item()
        return {"accuracy": correct, "loss": F.cross_entropy(logits.cpu(), digits).item()}


def _load() -> Batch:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the task digits needs scikit-learn: pip install 'lightning-collider[federated]'",
            name="sklearn",
        ) from error
    data = load_digits()
    images = torch.from_numpy(data.images / 16.0).float().unsqueeze(1)
    return images, torch.from_numpy(data.target).long()
