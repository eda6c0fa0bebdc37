"""A client: trains the task's LightningModule with Fabric on its part of the data.

Nothing stays in the process between two messages. What must outlive one is in Flower's
`Context.state`: the trained weights until they are asked for, and the optimizer's state where the
recipe keeps it. So the same code runs under the simulator, Flower's engine and a SuperNode.
"""

import io
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Tensor

from lightning_collider.federated.algorithms import Weights
from lightning_collider.federated.distillation import correction_step
from lightning_collider.federated.messages import (
    ORDER,
    REPORT,
    CorrectOrder,
    Report,
    TrainOrder,
    load_weights,
    pack,
    to_record,
    to_weights,
    unpack,
    weights_in,
    weights_of,
)
from lightning_collider.federated.settings import ClientConfig
from lightning_collider.federated.tasks import Task, mixed_seed, seeded
from lightning_collider.training.quiet import quiet

PARTITION = "partition-id"  # Flower's name for the number of a node's part of the data
TRAINED, TRAINED_JOB, OPTIMIZER = "trained", "trained-job", "optimizer"  # in Context.state
DISTILLED_EXAMPLE = 4 / 3  # cost of a correction's example: a pass is 1/3 forward, teacher included


class Trainer:
    """A module and its optimizer in a Fabric, for one message."""

    def __init__(self, task: Task, weights: Weights, seed: int):
        self.fabric = task.fabric(seed)
        self.module = task.module()
        load_weights(self.module, weights)
        optimizer = self.module.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{type(self.module).__name__}.configure_optimizers must return one optimizer: a "
                "client starts anew with each update, and has no place for a schedule"
            )
        self.module.train()
        self.wrapped, self.optimizer = self.fabric.setup(self.module, optimizer)
        for name in ("logits_and_targets", "correction_step"):
            if hasattr(self.module, name):
                self.wrapped.mark_forward_method(name)
        self.seen = 0  # examples, in all steps
        self._losses: list[Tensor] = []

    def train(self, batches: Iterable[Any]) -> None:
        """One optimizer step on each batch."""
        for index, batch in enumerate(batches):
            batch = self.fabric.to_device(batch)
            out = self.wrapped.training_step(batch, index)
            self._step(out["loss"] if isinstance(out, dict) else out, batch)

    def correct(
        self, batches: Iterable[Any], teacher: L.LightningModule, order: CorrectOrder
    ) -> None:
        """One correction step on each batch."""
        teacher.to(self.fabric.device).eval().requires_grad_(False)
        for batch in batches:
            batch = self.fabric.to_device(batch)
            loss = correction_step(self.wrapped, teacher, batch, order.lam, order.temperature)
            self._step(loss, batch)

    def _step(self, loss: Tensor, batch: Any) -> None:
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._losses.append(loss.detach())
        self.seen += _rows(batch)

    def loss(self) -> float:
        """Mean loss of the steps; 0 without any."""
        return torch.stack(self._losses).mean().item() if self._losses else 0.0

    def optimizer_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.optimizer.state_dict(), buffer)
        return buffer.getvalue()

    def restore_optimizer(self, saved: bytes) -> None:
        self.optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))


class Client:
    """Answers the server's orders for one task.

    Args:
        task: what is trained.
        config: passes over the local data, and whether the optimizer's state is kept.
    """

    def __init__(self, task: Task, config: ClientConfig):
        self.task, self.config = task, config

    def train(self, message: Message, context: Context) -> Message:
        """Train as a TrainOrder says; keep the weights, or send them if it says so."""
        order = unpack(message, ORDER, TrainOrder)
        number = self._number(context)
        seed = mixed_seed(self.task.seed, number, order.job, 0)
        with self._trainer(weights_in(message), seed, context) as trainer:
            for epoch in range(self.config.epochs):
                trainer.train(self.task.batches(number, mixed_seed(seed, epoch)))
            more = self._endless_batches(number, seed, self.config.epochs)
            trainer.train(itertools.islice(more, order.extra_steps))
        report = self._report(number, order.job, trainer.loss(), float(trainer.seen))
        weights = to_record(weights_of(trainer.module))
        if order.upload:
            return Message(pack(REPORT, report, weights), reply_to=message)
        context.state[TRAINED] = weights
        context.state[TRAINED_JOB] = ConfigRecord({"job": order.job})
        return Message(pack(REPORT, report), reply_to=message)

    def correct(self, message: Message, context: Context) -> Message:
        """Distil from the teacher of a CorrectOrder, and send the weights that `train` kept.

        Raises ValueError when this client has not trained for the order's job.
        """
        order = unpack(message, ORDER, CorrectOrder)
        number = self._number(context)
        kept = context.state.config_records.get(TRAINED_JOB)
        if kept is None or kept["job"] != order.job:
            raise ValueError(f"client {number} holds no trained weights of its job {order.job}")
        del context.state[TRAINED_JOB]
        weights = context.state.array_records.pop(TRAINED)
        loss, seen = 0.0, 0
        if order.steps:
            teacher = self.task.module()
            load_weights(teacher, weights_in(message))
            seed = mixed_seed(self.task.seed, number, order.job, 1)
            with self._trainer(to_weights(weights), seed, context) as trainer:
                batches = self._endless_batches(number, seed, 0)
                trainer.correct(itertools.islice(batches, order.steps), teacher, order)
            loss, seen = trainer.loss(), trainer.seen
            weights = to_record(weights_of(trainer.module))
        report = self._report(number, order.job, loss, seen * DISTILLED_EXAMPLE)
        return Message(pack(REPORT, report, weights), reply_to=message)

    @contextmanager
    def _trainer(self, weights: Weights, seed: int, context: Context) -> Iterator[Trainer]:
        """A trainer under a seed of its own, with the kept optimizer's state if there is one."""
        with seeded(seed):
            with quiet():  # what the strategy says of the model would be said for each message
                trainer = Trainer(self.task, weights, seed)
            if self.config.keep_optimizer and OPTIMIZER in context.state:
                saved = context.state.config_records[OPTIMIZER]["state"]
                assert isinstance(saved, bytes)
                trainer.restore_optimizer(saved)
            yield trainer
        if self.config.keep_optimizer:
            context.state[OPTIMIZER] = ConfigRecord({"state": trainer.optimizer_bytes()})

    def _endless_batches(self, number: int, seed: int, epoch: int) -> Iterator[Any]:
        for later in itertools.count(epoch):
            yield from self.task.batches(number, mixed_seed(seed, later))

    def _report(self, number: int, job: int, loss: float, work: float) -> Report:
        return Report(job, number, self.task.examples(number), loss, work)

    def _number(self, context: Context) -> int:
        number = context.node_config.get(PARTITION)
        if not isinstance(number, int) or not 0 <= number < self.task.clients:
            raise ValueError(
                f"a client needs the number of its part of the data, 0 to {self.task.clients - 1}, "
                f"not {number!r}: start the SuperNode with --node-config '{PARTITION}=0'"
            )
        return number


def _rows(batch: Any) -> int:
    """Examples in a batch: the first tensor's first dimension."""
    if isinstance(batch, Tensor):
        return len(batch)
    return _rows(next(iter(batch.values() if isinstance(batch, dict) else batch)))
