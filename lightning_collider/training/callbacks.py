"""What makes a long run comfortable: one file of numbers, clean stops, and reproducible steps."""

import contextlib
import json
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_collider.training.files import write_text
from lightning_collider.training.ranks import any_rank


class MetricsFile(Logger):
    """A logger that appends each row of the log to a JSON-lines file, `step` counting from 1."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def drop_behind(self, step: int) -> None:
        """Take out the rows behind a step: that part of the run is trained again."""
        if self.path.is_file():
            rows = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
            write_text(self.path, "".join(f"{row}\n" for row in rows))

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """The recipe is in the run's folder already."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": (step or 0) + 1, **{k: v for k, v in metrics.items() if k != "epoch"}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # the run was killed while it wrote this line
        return float("inf")


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with time left; "n/a" for MFU where the device's peak is not known."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown if "mfu" in shown or not shown else {**shown, "mfu": "n/a"}


class Stopped(SystemExit):
    """A signal ended the run, and the same command goes on; the process exits with STATUS.

    Whoever starts one run after another need not ask how each ended, and stops too.

    Args:
        where: what the run had reached, for the user.
    """

    STATUS = 75  # EX_TEMPFAIL

    def __init__(self, where: str) -> None:
        super().__init__(self.STATUS)
        self.where = where


class StopOnSignal(L.Callback):
    """Ends the run behind the current optimizer step on SIGTERM, or SLURM's SIGUSR1 before a limit.

    `received` is the signal's name afterwards. All ranks stop at the same step, whichever of them
    got the signal. Checkpoints saves when it sees the Trainer stop; then `leave_if_received`.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._seen = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen = trainer.global_step
        # The Trainer itself puts the handlers back that it found.
        _handle(dict.fromkeys(self.SIGNALS, self._note))

    def _note(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        if self._received(trainer):
            trainer.should_stop = True

    def _received(self, trainer: L.Trainer) -> bool:
        """Whether any rank got a signal."""
        if any_rank(trainer, self.received is not None):
            self.received = self.received or "a signal to another rank"
        return self.received is not None

    def leave_if_received(self, trainer: L.Trainer) -> None:
        """Behind `trainer.fit`, on all ranks: raise Stopped where a signal came meanwhile."""
        if self._received(trainer):
            raise Stopped(f"{self.received} at step {trainer.global_step}, saved")


@contextlib.contextmanager
def stopped_by_signal(first: bool = True) -> Iterator[None]:
    """Let StopOnSignal's signals raise Stopped wherever no Trainer waits for the end of a step.

    Then nothing is saved, and a stage that was cut off is done again. At the end all handlers are
    as they were. The `first` rank tells the user.
    """

    def leave(number: int, frame: Any) -> None:
        raise Stopped(signal.Signals(number).name)  # no print here: it may have cut off another one

    before = {number: signal.getsignal(number) for number in StopOnSignal.SIGNALS}
    _handle(dict.fromkeys(StopOnSignal.SIGNALS, leave))
    try:
        yield
    except Stopped as stopped:
        if first:
            print(f"{stopped.where}: start the same command to go on", flush=True)
        raise
    finally:
        _handle(before)


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set handlers of signals, which only the main thread can."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


class StepSeed(L.Callback):
    """Makes the random numbers of a micro-batch (dropout) a function of seed, number and rank.

    So a resumed run draws the same ones, without a generator's state in the checkpoint.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(hash((self.seed, batch_idx, trainer.global_rank)) & (2**63 - 1))
