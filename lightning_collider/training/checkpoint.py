"""Checkpoints that a kill cannot spoil: written under a temporary name, renamed in one act.

    FOLDER/step=00000100/state.ckpt    a file, or a folder with one part a rank
    FOLDER/step=00000100/about.json    whose it is, and size and checksum of each file

A folder `step=...` is complete by construction; what was damaged since is found by its checksums.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from lightning_collider.training.files import read_json, sha256, write_json
from lightning_collider.training.meter import Meter
from lightning_collider.training.ranks import any_rank

STATE, ABOUT = "state.ckpt", "about.json"
SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def shape_identity(config: Any) -> dict[str, Any]:
    """The keys of a transformers configuration that decide the shape of the weights."""
    return {key: config.to_dict().get(key) for key in SHAPE_KEYS}


class Checkpoints(Checkpoint):
    """Saves every `every` optimizer steps, at the last one, and where the Trainer is told to stop.

    A checkpoint counts once the row of its step is in the log, which Lightning writes behind the
    hooks of a batch: a run that goes on from it leaves no row out. The time that saving takes is
    left out of the speeds that the module's `meter` measures.

    Args:
        folder: receives the checkpoints.
        every: optimizer steps between two of them.
        keep: how many of the newest stay.
        identity: what a checkpoint must have in common with a run that goes on from it.
    """

    def __init__(self, folder: Path, every: int, keep: int, identity: dict[str, Any]):
        self.folder, self.every, self.keep, self.identity = folder, every, keep, identity
        self._seen = -1
        self._written: int | None = None  # step of the draft that does not count yet

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._seen:
            return  # inside an accumulation window
        self._seen = step
        if step % self.every == 0 or step == trainer.max_steps or trainer.should_stop:
            with _meter(trainer).paused():
                self.save(trainer)

    # What comes behind the log's row: the next batch, a validation, or the end.
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.publish(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.publish(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.publish(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write a draft of this step's checkpoint. Raises OSError when that fails; older ones stay.

        Where it fails on one rank, as on the one whose disk is full, it fails on all: none is left
        waiting.
        """
        step = trainer.global_step
        draft = draft_path(self.folder, step)
        first = trainer.is_global_zero
        self._on_all(trainer, step, first, lambda: _empty(draft))
        self._on_all(trainer, step, True, lambda: _write_state(trainer, draft / STATE))
        self._on_all(trainer, step, first, lambda: self._describe(draft, step))
        self._written = step

    def publish(self, trainer: L.Trainer) -> None:
        """Let the draft count, if there is one. Raises OSError as `save` does."""
        if self._written is not None:
            step, self._written = self._written, None
            with _meter(trainer).paused():
                self._on_all(trainer, step, trainer.is_global_zero, lambda: self._move(step))

    def _on_all(
        self, trainer: L.Trainer, step: int, is_mine: bool, act: Callable[[], None]
    ) -> None:
        """Do an act of saving on the ranks whose it is; where one fails, all give up."""
        fault: BaseException | None = None
        try:
            if is_mine:
                act()
        except (OSError, RuntimeError, CheckpointException) as error:
            fault = error
        if any_rank(trainer, fault is not None):
            self._give_up(step, fault)

    def _give_up(self, step: int, fault: BaseException | None) -> None:
        target = checkpoint_path(self.folder, step)
        shutil.rmtree(draft_path(self.folder, step), ignore_errors=True)
        last = complete_steps(self.folder)
        kept = f"that of step {last[-1]} is complete" if last else "there is none before it"
        raise OSError(
            f"cannot write the checkpoint {target} ({fault or 'another rank could not'}); {kept}. "
            "Free space or correct the permissions, and start the same command to go on from there"
        ) from fault

    def _describe(self, draft: Path, step: int) -> None:
        files = {
            str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(draft.rglob("*"))
            if path.is_file()
        }
        write_json(draft / ABOUT, {"step": step, "identity": self.identity, "files": files})
        for path in (p for p in draft.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _move(self, step: int) -> None:
        target = checkpoint_path(self.folder, step)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft_path(self.folder, step), target)
        for old in complete_steps(self.folder)[: -self.keep]:
            shutil.rmtree(checkpoint_path(self.folder, old))


def _meter(trainer: L.Trainer) -> Meter:
    meter = trainer.lightning_module.meter
    assert isinstance(meter, Meter)
    return meter


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_state(trainer: L.Trainer, path: Path) -> None:
    """`trainer.save_checkpoint` without its barrier, where ranks would wait for one that failed."""
    state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(state, path)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step={step:08d}"


def draft_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is until it counts."""
    return folder / f"step={step:08d}.part"


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint was written to its end, in order."""
    found = (path.parent.name for path in folder.glob(f"step=*/{ABOUT}"))
    return sorted(int(n.removeprefix("step=")) for n in found if not n.endswith(".part"))


def newest_usable(folder: Path, identity: dict[str, Any], move: bool = True) -> Path | None:
    """The newest checkpoint that is whole and this run's, or None; says what is wrong with others.

    Those newer than the one returned are moved aside, so that the run does not stumble over them.
    Of several ranks only one may `move`. The others decide by the same checksums, and a folder that
    is moved while they read it was unusable anyway, so all choose the same checkpoint.
    """
    for step in reversed(complete_steps(folder)):
        path = checkpoint_path(folder, step)
        fault = why_unusable(path, identity)
        if fault is None:
            return path
        if not move:
            continue
        aside = path.with_name(f"unusable-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
        warnings.warn(f"{path} {fault}: the checkpoint before it is used", stacklevel=2)
    return None


def why_unusable(path: Path, identity: dict[str, Any] | None = None) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        about = read_json(path / ABOUT)
        files, theirs = about["files"], about["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"has no readable {ABOUT}"
    for name, expected in files.items():
        file = path / name
        try:
            if file.stat().st_size != expected["bytes"]:
                return f"is truncated ({name})"
            if sha256(file) != expected["sha256"]:
                return f"is damaged ({name} differs from its checksum)"
        except (FileNotFoundError, NotADirectoryError):  # also: moved aside while it is read
            return f"is incomplete ({name} is missing)"
    for key, value in (identity or {}).items():
        if theirs.get(key) != value:
            return f"is of another run (its {key} is {theirs.get(key)}, here it is {value})"
    return None
