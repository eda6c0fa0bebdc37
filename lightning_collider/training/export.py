"""`collider export`: from a checkpoint of a run to a Hugging Face folder, on one machine.

A sharded checkpoint is joined here without the ranks that wrote it; only the weights are read, so
it needs memory for one copy of the model.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightning_collider.training.checkpoint import (
    STATE,
    checkpoint_path,
    complete_steps,
    why_unusable,
)

PREFIX = "model."  # the LightningModule's attribute
EXTRA = "meta.pt"  # Lightning's file beside the shards: everything that is no weight


def export(source: Path, target: Path, replace: bool = False) -> Path:
    """Write the model of a run folder (its newest checkpoint) or of one checkpoint to `target`.

    Returns the checkpoint used. Raises FileNotFoundError without one, FileExistsError when the
    target has files that it may not `replace`, ValueError for a damaged checkpoint.
    """
    checkpoint = find_checkpoint(source)
    if not replace and target.exists() and any(target.iterdir()):
        raise FileExistsError(
            f"{target} is not empty and nothing in it is overwritten: name another"
        )
    model, tokenizer = load_checkpoint(checkpoint), tokenizer_of(checkpoint)
    if tokenizer is not None:
        _name_special_tokens(model, AutoTokenizer.from_pretrained(tokenizer))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a folder that is there is complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as work:
        draft = Path(work) / "model"
        model.save_pretrained(draft)
        if tokenizer is not None:
            shutil.copytree(tokenizer, draft, dirs_exist_ok=True)
        if target.exists():
            target.rename(Path(work) / "before")  # goes with the temporary folder
        draft.rename(target)
    return checkpoint


def load_checkpoint(checkpoint: Path) -> PreTrainedModel:
    """The Hugging Face model of a checkpoint, in its precision. Raises as `read_weights` does."""
    weights, config = read_weights(checkpoint)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=next(iter(weights.values())).dtype
    )
    model.load_state_dict(weights)
    return model


def tokenizer_of(checkpoint: Path) -> Path | None:
    """The folder with the tokenizer of a checkpoint's run; arms of a comparison share one."""
    for parent in checkpoint.resolve().parents:
        for folder in (parent / "tokenizer", parent / "corpus" / "tokenizer"):
            if (folder / "tokenizer_config.json").is_file():
                return folder
    return None


def _name_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Where generation starts and stops: with the tokens that began and ended documents here."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        for config in (model.config, model.generation_config):
            given = getattr(config, name, None)
            if value is not None and value not in (given if isinstance(given, list) else [given]):
                setattr(config, name, value)


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run folder."""
    if (source / STATE).exists():
        return source
    folder = source / "checkpoints"
    steps = complete_steps(folder)
    if not steps:
        raise FileNotFoundError(
            f"{source} is no checkpoint and has no checkpoints/step=*: give the folder of a run, "
            "for example runs/smollm2-135m"
        )
    return checkpoint_path(folder, steps[-1])


def read_weights(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights by their Hugging Face names, and the model's configuration as a dict.

    Raises ValueError for a checkpoint that is damaged or not of `collider train`.
    """
    fault = why_unusable(checkpoint)
    if fault is not None:
        raise ValueError(f"{checkpoint} {fault}: use an older one")
    state = checkpoint / STATE
    if state.is_dir():
        saved, weights = torch.load(state / EXTRA, weights_only=True), _join(state)
    else:
        saved = torch.load(state, map_location="cpu", weights_only=True, mmap=True)
        weights = saved["state_dict"]
    if "model_config" not in saved:
        raise ValueError(f"{checkpoint} was not written by `collider train`")
    names = {n: n.removeprefix(PREFIX) for n in weights if n.startswith(PREFIX)}
    return {short: weights[name] for name, short in names.items()}, saved["model_config"]


def _join(folder: Path) -> dict[str, torch.Tensor]:
    """The full weights of a sharded checkpoint, without its optimizer."""
    reader = FileSystemReader(folder)
    head = "state_dict."
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in described.items()
        if name.startswith(head) and isinstance(about, TensorStorageMetadata)
    }
    load_sharded(weights, storage_reader=reader, no_dist=True)
    return {name.removeprefix(head): tensor for name, tensor in weights.items()}
