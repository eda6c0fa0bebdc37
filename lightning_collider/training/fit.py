"""One training run by Lightning's Trainer, which goes on from its last checkpoint."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_collider.training.callbacks import MetricsFile
from lightning_collider.training.config import Recipe, TrainConfig
from lightning_collider.training.data import PackedData, PackedRows
from lightning_collider.training.module import LanguageModel

# Warnings that would mislead, or that are for Lightning's own developers.
QUIET = (
    ".*does not have many workers",  # reading a memory-mapped array needs none
    ".*your dataloader is not resumable",  # PackedData is
    ".*exists and is not empty",  # the checkpoints that this run goes on from
    ".*LeafSpec.* is deprecated",
)

# What a checkpoint must share with the recipe's model, in transformers' words.
MODEL_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Job:
    """What distinguishes one training run of a recipe from another."""

    folder: Path  # receives checkpoints/, log/, metrics.jsonl and model/
    data: PackedRows
    steps: int  # optimizer steps
    strategy: Strategy
    callbacks: tuple[L.Callback, ...] = ()


def model_config(recipe: Recipe, vocab_size: int, **special_tokens: Any) -> LlamaConfig:
    """The shape of a recipe's model; special tokens by their names in transformers."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.model.hidden_size,
        intermediate_size=recipe.model.intermediate_size,
        num_hidden_layers=recipe.model.layers,
        num_attention_heads=recipe.model.heads,
        num_key_value_heads=recipe.model.key_value_heads,
        max_position_embeddings=recipe.corpus.sequence_length,
        tie_word_embeddings=recipe.model.tie_embeddings,
        **special_tokens,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights that the recipe's seed decides: every run starts from these."""
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = model_config(recipe, len(tokenizer), **special)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def fit(recipe: Recipe, job: Job, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Train a fresh model on the job's rows, save it as a Hugging Face folder, return its numbers.

    Goes on from the newest checkpoint in the job's folder; the batches that follow are those that
    an uninterrupted run would see. Raises ValueError when that checkpoint is another model's.
    """
    config = replace(recipe.train, steps=job.steps)
    module = LanguageModel(build_model(recipe, tokenizer), config)
    checkpoint = newest_checkpoint(job.folder / "checkpoints")
    if checkpoint is not None:
        check_checkpoint(checkpoint, module)
    trainer = make_trainer(
        config,
        job.strategy,
        devices=1,
        logger=[
            CSVLogger(job.folder, name="log"),
            MetricsFile(job.folder / "metrics.jsonl", step_of(checkpoint)),
        ],
        callbacks=[
            *job.callbacks,
            ModelCheckpoint(
                job.folder / "checkpoints", "{step}", every_n_train_steps=config.checkpoint_every
            ),
            LearningRateMonitor(logging_interval="step"),
            TQDMProgressBar(refresh_rate=5),
        ],
    )
    data = PackedData(job.data, config.batch_size, recipe.seed)
    with quiet():
        trainer.fit(module, data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        module.model.save_pretrained(job.folder / "model")
        tokenizer.save_pretrained(job.folder / "model")
    totals, last = module.meter.totals, module.meter.last
    return {
        "steps": trainer.global_step,
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "input_tokens": int(totals["input_tokens"]),
        "kept_rows": int(totals["kept_rows"]),
        "train_seconds": totals["seconds"],
        "tokens_per_s": totals["input_tokens"] / totals["seconds"],
        "kept_per_s": totals["kept_rows"] / totals["seconds"],
        "final_loss_kept": last["loss_kept"],
        "final_loss_all": last["loss_all"],
    }


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the largest step in a folder, or None when there is none."""
    return max(folder.glob("step=*.ckpt"), key=step_of, default=None)


def step_of(checkpoint: Path | None) -> int:
    """Optimizer steps done in a checkpoint of this module's, 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.stem.partition("=")[2])


def check_checkpoint(path: Path, module: LanguageModel) -> None:
    """Raise ValueError, naming file and difference, if the checkpoint is not this model's."""
    advice = "Move it away to train this arm again, or use another folder with out=OTHER."
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged. {advice}") from error
    if "model_config" not in saved:
        raise ValueError(f"{path} was not written by `collider train`. {advice}")
    config, theirs = module.model.config.to_dict(), saved["model_config"]
    for key in MODEL_KEYS:
        if theirs.get(key) != config[key]:
            raise ValueError(
                f"{path} is of another model: its {key} is {theirs.get(key)}, the recipe's is "
                f"{config[key]}. {advice}"
            )
    shapes, found = (
        {name: tuple(tensor.shape) for name, tensor in state.items()}
        for state in (module.state_dict(), saved["state_dict"])
    )
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"{path} is of another model: {name} has the shape {found.get(name)}, the "
                f"recipe's is {shapes.get(name)}. {advice}"
            )


def make_trainer(config: TrainConfig, strategy: Strategy, **settings: Any) -> L.Trainer:
    """A Trainer for `config.steps` steps over a loader that ends there; `settings` add to it."""
    # Lightning's notes on devices and its advertisements would bury the stages of the run.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",  # "auto" may take a Mac's GPU
        strategy=strategy,
        precision=cast(Any, config.precision),  # its names are checked with the recipe
        max_epochs=1,
        max_steps=config.steps,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.clip_norm,
        log_every_n_steps=config.log_every,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the data modules divide the rows among the ranks
        **settings,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of Lightning's that would mislead here."""
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        yield
