"""Checkpoints that a kill cannot spoil: written under a temporary name, renamed in one act.

    FOLDER/step=00000100/state.ckpt    a file, or a folder with one part a rank
    FOLDER/step=00000100/about.json    whose it is, and size and checksum of each file

A folder `step=...` is complete by construction; what was damaged since is found by its checksums.
"""

import os
import shutil
import warnings
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

    The time that this takes is left out of the speeds that the module's `meter` measures.

    Args:
        folder: receives the checkpoints.
        every: optimizer steps between two of them.
        keep: how many of the newest stay.
        identity: what a checkpoint must have in common with a run that goes on from it.
    """

    def __init__(self, folder: Path, every: int, keep: int, identity: dict[str, Any]):
        self.folder, self.every, self.keep, self.identity = folder, every, keep, identity
        self._seen = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._seen:
            return  # inside an accumulation window
        self._seen = step
        if step % self.every == 0 or step == trainer.max_steps or trainer.should_stop:
            assert isinstance(pl_module.meter, Meter)
            with pl_module.meter.paused():
                self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of this step. Raises OSError when that fails; older ones stay.

        Where it fails on one rank, as on the one whose disk is full, it fails on all: none is left
        waiting.
        """
        target = checkpoint_path(self.folder, trainer.global_step)
        draft = target.with_name(target.name + ".part")
        first = trainer.is_global_zero
        acts = (
            (first, lambda: _empty(draft)),
            (True, lambda: _write_state(trainer, draft / STATE)),
            (first, lambda: self._finish(draft, target, trainer.global_step)),
        )
        for is_mine, act in acts:
            fault: BaseException | None = None
            try:
                if is_mine:
                    act()
            except (OSError, RuntimeError, CheckpointException) as error:
                fault = error
            if any_rank(trainer, fault is not None):
                self._give_up(target, draft, fault)

    def _give_up(self, target: Path, draft: Path, fault: BaseException | None) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        last = complete_steps(self.folder)
        kept = f"that of step {last[-1]} is complete" if last else "there is none before it"
        raise OSError(
            f"cannot write the checkpoint {target} ({fault or 'another rank could not'}); {kept}. "
            "Free space or correct the permissions, and start the same command to go on from there"
        ) from fault

    def _finish(self, draft: Path, target: Path, step: int) -> None:
        files = {
            str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(draft.rglob("*"))
            if path.is_file()
        }
        write_json(draft / ABOUT, {"step": step, "identity": self.identity, "files": files})
        for path in (p for p in draft.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
        for old in complete_steps(self.folder)[: -self.keep]:
            shutil.rmtree(checkpoint_path(self.folder, old))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_state(trainer: L.Trainer, path: Path) -> None:
    """`trainer.save_checkpoint` without its barrier, where ranks would wait for one that failed."""
    state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(state, path)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step={step:08d}"


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
