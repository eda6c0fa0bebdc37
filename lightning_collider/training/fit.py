"""One training run by Lightning's Trainer, which goes on from its last checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_collider.training.callbacks import MetricsFile, StopOnSignal
from lightning_collider.training.checkpoint import (
    ABOUT,
    STATE,
    Checkpoints,
    newest_usable,
    shape_identity,
)
from lightning_collider.training.config import Recipe, TrainConfig
from lightning_collider.training.data import PackedData, PackedRows
from lightning_collider.training.files import read_json
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.quiet import quiet

KEPT_CHECKPOINTS = 2  # of an arm: should one be damaged, there is another


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

    Goes on from the newest usable checkpoint in the job's folder; the batches that follow are those
    that an uninterrupted run would see. Raises Stopped behind a step, saved, after a signal.
    """
    config = replace(recipe.train, steps=job.steps)
    model = build_model(recipe, tokenizer)
    module = LanguageModel(model, config)
    folder, identity = job.folder / "checkpoints", {"model": shape_identity(model.config)}
    checkpoint = newest_usable(folder, identity)
    metrics = MetricsFile(job.folder / "metrics.jsonl")
    metrics.drop_behind(0 if checkpoint is None else read_json(checkpoint / ABOUT)["step"])
    stop = StopOnSignal()
    trainer = make_trainer(
        config,
        job.strategy,
        devices=1,
        logger=[metrics, CSVLogger(job.folder, name="log")],
        callbacks=[
            *job.callbacks,
            stop,
            Checkpoints(folder, config.checkpoint_every, KEPT_CHECKPOINTS, identity),
            LearningRateMonitor(logging_interval="step"),
            TQDMProgressBar(refresh_rate=5),
        ],
    )
    data = PackedData(job.data, config.batch_size, recipe.seed)
    with quiet():
        trainer.fit(module, data, ckpt_path=None if checkpoint is None else checkpoint / STATE)
    stop.leave_if_received(trainer)
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


def make_trainer(config: TrainConfig, strategy: Strategy, **settings: Any) -> L.Trainer:
    """A Trainer for `config.steps` steps over a loader that ends there; `settings` add to it."""
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"  # "auto" may take a Mac's GPU
    with quiet():
        return L.Trainer(
            accelerator=accelerator,
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
