"""What a federation trains: a LightningModule, each client's data, and how the result is judged.

A recipe names one of `TASKS`, or a class of your own as `package.module:Class`.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch

from lightning_collider.federated.settings import TaskConfig, refuse_unknown_options

TASKS = {
    "digits": "lightning_collider.federated.digits:Digits",
    "code": "lightning_collider.federated.code:Code",
}


class Task(ABC):
    """A federated learning problem. All random choices follow from the `seed` it was made with.

    Its modules need `logits_and_targets`, see distillation.py, or a `correction_step` of their own,
    where the algorithm corrects.

    Attributes:
        seed: of everything that is random.
        clients: number of parts of the data.
        metric: the key of `evaluate` by which runs are compared.
        higher_is_better: whether a high value of it is a good one.
    """

    seed: int
    clients: int
    metric: str
    higher_is_better: bool

    @abstractmethod
    def module(self) -> L.LightningModule:
        """A module with the initial weights, the same at each call and on each machine."""

    @abstractmethod
    def examples(self, client: int) -> int:
        """Number of training examples of a client."""

    @abstractmethod
    def batches(self, client: int, seed: int) -> Iterable[Any]:
        """One pass over a client's data, in an order given by `seed`; batches as for Lightning."""

    @abstractmethod
    def evaluate(self, module: L.LightningModule) -> dict[str, float]:
        """Numbers on held-out data, `metric` among them."""

    def fabric(self, seed: int) -> L.Fabric:
        """A launched Fabric for one job of a client; this one has no state, and serves them all.

        `seed` is for a strategy that draws at random.
        """
        return self._stateless_fabric

    @functools.cached_property
    def _stateless_fabric(self) -> L.Fabric:
        fabric = L.Fabric(accelerator="auto", devices=1)
        fabric.launch()
        return fabric


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task of a recipe.

    Raises:
        ValueError: an unknown task, or options that it does not take.
    """
    path = TASKS.get(config.name, config.name)
    module_name, colon, class_name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name) if colon else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task.name={config.name!r} cannot be imported: {error}") from error
    if kind is None:
        raise ValueError(
            f"task.name must be one of {', '.join(TASKS)} or package.module:Class, "
            f"not {config.name!r}"
        )
    refuse_unknown_options(kind, config.options, "task.options")
    return kind(seed=seed, **config.options)


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers, the same on each machine."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch draws from this seed within, and goes on as before behind it.

    `torch.manual_seed` would queue a call, with its stack trace, for each kind of device that has
    not been used yet: milliseconds, and memory that is never freed.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def dirichlet_split(
    labels: np.ndarray, clients: int, alpha: float, seed: int, smallest: int
) -> list[np.ndarray]:
    """Divide examples among clients so that each has classes of its own.

    The share of each class that a client gets is drawn from a Dirichlet distribution (Hsu et al.,
    arXiv 1909.06335); it is drawn again until each client has `smallest` examples.

    Args:
        labels: int (N,).
        clients: number of parts.
        alpha: concentration; 0.1: few classes a client, 100: the same mixture for all.
        seed: of the draw.
        smallest: examples that each client gets at least.

    Returns:
        Indices of each client's examples, sorted.

    Raises:
        ValueError: no draw of 1,000 gave each client so many.
    """
    rng = np.random.default_rng(seed)
    for _ in range(1000 if len(labels) >= clients * smallest else 0):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
            for part, some in zip(parts, np.split(members, cuts), strict=True):
                part.extend(some.tolist())
        if min(map(len, parts)) >= smallest:
            return [np.sort(np.asarray(part)) for part in parts]
    raise ValueError(
        f"{len(labels)} examples cannot be split among {clients} clients of at least {smallest} "
        f"with alpha {alpha}: use a larger alpha, fewer clients or a smaller `smallest`"
    )
