"""Runs a recipe of `kind: training`: data, model, Trainer; goes on where an earlier run stopped.

    RUN/recipe.yaml             the resolved recipe this folder belongs to
    RUN/tokenizer/              the tokenizer, for `collider export`
    RUN/checkpoints/            see checkpoint.py
    RUN/metrics.jsonl           one row of the log a line; log/ has it for others
    RUN/sample.json, memory.json  see report/record.py
    RUN/model/                  the trained model as a Hugging Face folder, when all steps are done
    RUN/train.json              its numbers; written last but for the report
    RUN/report.html             curves, speed, and text under the filter

Every rank runs this; files are written by rank 0.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import lightning_collider as lc
from lightning_collider.data.bag_windows import BagWindows
from lightning_collider.data.packed import Schedule, Windows, schedule
from lightning_collider.data.prepare import prepare
from lightning_collider.data.shards import TokenShards
from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.ops import build
from lightning_collider.report.record import StepMemory, TextSample
from lightning_collider.report.write import write_report
from lightning_collider.superposition import TokenSuperposition
from lightning_collider.training.callbacks import (
    MetricsFile,
    ProgressBar,
    StepSeed,
    StopOnSignal,
    stopped_by_signal,
)
from lightning_collider.training.checkpoint import (
    ABOUT,
    STATE,
    Checkpoints,
    newest_usable,
    shape_identity,
)
from lightning_collider.training.config import TrainConfig
from lightning_collider.training.export import export
from lightning_collider.training.files import read_json, write_json
from lightning_collider.training.fit import make_trainer
from lightning_collider.training.folder import claimed
from lightning_collider.training.models import build_model, load_tokenizer, read_model
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.quiet import quiet
from lightning_collider.training.ranks import rank_of_process
from lightning_collider.training.scoring import open_store
from lightning_collider.training.settings import Plan, TrainingRecipe, plan
from lightning_collider.training.utilisation import utilisation_of


class WindowData(L.LightningDataModule):
    """The batches of a run; its state in a checkpoint is the number of optimizer steps done."""

    def __init__(self, recipe: TrainingRecipe, the_plan: Plan, windows: Windows, held: Any):
        super().__init__()
        self.config, self.plan, self.windows, self.held = recipe.trainer, the_plan, windows, held
        self.weights = [source.weight for source in recipe.data.sources.values()]
        self.seed = recipe.seed
        rows = the_plan.steps * the_plan.rows_a_step
        self.rows = schedule(windows.counts, self.weights, self.seed, rows)
        self.train: Dataset = windows
        self.steps_done = 0

    def superpose(self, bag_size: int, superposed: Callable[[int], bool]) -> None:
        """Let optimizer steps with `superposed(step)` have sequences `bag_size` times longer."""
        self.train = windows = BagWindows(self.windows, bag_size)
        a_step = self.plan.rows_a_step
        long = a_step * sum(map(superposed, range(self.plan.steps)))
        ordinary = a_step * self.plan.steps - long
        self.rows = windows.schedule(self.weights, self.seed, long, ordinary)

    def _loader(self, windows: Dataset, rows: Any, done: int = 0) -> DataLoader:
        assert self.trainer is not None
        size = self.config.micro_batch_size
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(windows, batch_sampler=Schedule(rows, size, rank, world, done))

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, self.rows, self.steps_done * self.plan.accumulate)

    def val_dataloader(self) -> Any:
        if self.held is None:
            return []
        return self._loader(self.held, schedule([len(self.held)], [1.0], 0, len(self.held)))

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"steps_done": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps_done = state_dict["steps_done"]


def run_training(recipe: TrainingRecipe) -> dict[str, Any]:
    """Train to the recipe's last step and return the numbers.

    Raises FileExistsError for a folder that is not this recipe's, RuntimeError for one in use,
    Stopped after a signal.
    """
    first = rank_of_process(recipe.trainer.devices) == 0
    with claimed(recipe) if first else contextlib.nullcontext(Path(recipe.out)) as folder:
        if (folder / "train.json").is_file():
            if first:
                print(f"{folder} is finished. To make another run, choose its folder: out=OTHER")
            return read_json(folder / "train.json")
        with stopped_by_signal(first):
            return _train(recipe, folder, first)


def _train(recipe: TrainingRecipe, folder: Path, first: bool) -> dict[str, Any]:
    if recipe.trainer.engine == "cpp":
        build()
    tokenizer, model = load_tokenizer(recipe.model), build_model(recipe)
    shards = prepare(recipe, tokenizer, model.config.vocab_size)
    windows = Windows(shards["train"], recipe.data.sequence_length, recipe.data.separate_documents)
    held = _held_out(recipe, shards["validation"])
    the_plan = plan(recipe, len(windows))
    identity = {
        "model": shape_identity(model.config),
        "tokens": windows.key,
        "seed": recipe.seed,
    }
    config = train_config(recipe, the_plan)
    module = LanguageModel(model, config, section="trainer")
    module.describe = windows.describe
    ranks = recipe.trainer.devices * recipe.trainer.num_nodes
    module.utilisation = utilisation_of(model, windows.length, recipe.trainer.precision, ranks)
    with quiet():
        checkpoint = newest_usable(folder / "checkpoints", identity, move=first)
        resumed = 0 if checkpoint is None else read_json(checkpoint / ABOUT)["step"]
        stop = StopOnSignal()
        saver = Checkpoints(
            folder / "checkpoints",
            config.checkpoint_every,
            recipe.trainer.keep_checkpoints,
            identity,
        )
        metrics = MetricsFile(folder / "metrics.jsonl")
        if first:
            metrics.drop_behind(resumed)
        every = None if held is None else recipe.trainer.validate_every
        data = WindowData(recipe, the_plan, windows, held)
        callbacks = [stop, saver, *_superposition(recipe)]
        callbacks += _records(recipe, windows, data, folder, tokenizer)
        trainer = _trainer(recipe, config, windows, metrics, every, callbacks)
        if trainer.is_global_zero:
            tokenizer.save_pretrained(folder / "tokenizer")
        trainer.fit(module, data, ckpt_path=None if checkpoint is None else checkpoint / STATE)
    stop.leave_if_received(trainer)
    return _finish(trainer, module, folder)


def _held_out(recipe: TrainingRecipe, shards: list[TokenShards]) -> Windows | None:
    """The validation sequences, or None where there are too few for one micro-batch a rank."""
    length, config = recipe.data.sequence_length, recipe.trainer
    # Of a small source, less than a sequence may have come to the validation part.
    enough = [source for source in shards if len(source) >= length]
    held = Windows(enough, length, recipe.data.separate_documents) if enough else None
    ranks = config.devices * config.num_nodes
    if held is not None and len(held) >= config.micro_batch_size * ranks:
        return held
    if recipe.data.validation_fraction > 0 and config.validate_every is not None:
        warnings.warn(
            "the validation part has too few tokens for one micro-batch on each rank: there is no "
            "validation. Raise data.validation_fraction, or say trainer.validate_every=null",
            stacklevel=2,
        )
    return None


def _finish(trainer: L.Trainer, module: LanguageModel, folder: Path) -> dict[str, Any]:
    """Write model and numbers, also where a kill came between the two."""
    steps = trainer.global_step
    numbers = {"steps": steps, **module.meter.totals, **module.meter.last}
    if trainer.is_global_zero:
        export(folder, folder / "model", replace=True)
        write_json(folder / "train.json", numbers)
        print(f"{folder}: {steps} steps; model/, metrics.jsonl and train.json are in it")
        print(f"Report: {write_report([folder])}")
    trainer.strategy.barrier()
    return numbers


def _records(
    recipe: TrainingRecipe, windows: Windows, data: WindowData, folder: Path, tokenizer: Any
) -> tuple[L.Callback, ...]:
    """What the run records for its report, on the micro-batch that it begins with."""
    rows = data.rows[: recipe.trainer.micro_batch_size].tolist()
    batch = default_collate([windows[row] for row in rows])
    names = np.array(list(recipe.data.sources))
    sources = np.repeat(names[[windows.place(row)[0] for row in rows]], windows.length)
    return (
        TextSample(folder / "sample.json", batch, tokenizer, sources.reshape(len(rows), -1)),
        StepMemory(folder / "memory.json", batch),
    )


def _trainer(
    recipe: TrainingRecipe,
    config: TrainConfig,
    windows: Windows,
    metrics: MetricsFile,
    every: int | None,
    callbacks: list[L.Callback],
) -> L.Trainer:
    return make_trainer(
        config,
        strategy_of(recipe, windows),
        devices=recipe.trainer.devices,
        num_nodes=recipe.trainer.num_nodes,
        logger=[metrics, *_loggers(Path(recipe.out))],
        callbacks=[StepSeed(recipe.seed), ProgressBar(refresh_rate=5), *callbacks],
        num_sanity_val_steps=0,
        limit_val_batches=0 if every is None else recipe.trainer.validation_batches,
        # Counted over the whole run, as there is one epoch of Lightning's.
        check_val_every_n_epoch=None,
        val_check_interval=None if every is None else every * config.accumulate,
    )


def _superposition(recipe: TrainingRecipe) -> list[L.Callback]:
    config = recipe.superposition
    if config is None:
        return []
    return [TokenSuperposition(config.bag_size, config.ratio, config.weights)]


def _loggers(folder: Path) -> list[Any]:
    """Files for other programs; Weights & Biases where it is installed, offline without a key."""
    loggers: list[Any] = [CSVLogger(folder, name="log"), TensorBoardLogger(folder, name="log")]
    with contextlib.suppress(ModuleNotFoundError):
        offline = "WANDB_API_KEY" not in os.environ
        loggers.append(WandbLogger(name=folder.name, save_dir=folder, offline=offline))
    return loggers


def strategy_of(recipe: TrainingRecipe, windows: Windows) -> lc.ColliderStrategy:
    """The strategy that the recipe's filter and trainer sections describe."""
    config, trainer = recipe.filter, recipe.trainer
    shared: dict[str, Any] = {
        "engine": trainer.engine,
        "sharding": trainer.sharding,
        "save_distributed_checkpoint": trainer.sharded_checkpoints,
    }
    if config.selector == "none":
        return lc.ColliderStrategy(**shared)
    reference: ScoreStore | nn.Module | None = None
    if config.stored_losses:
        reference = open_store(recipe, windows)
    elif config.selector == "excess_loss":
        assert config.reference is not None
        reference = read_model("filter.reference", config.reference)
    return lc.ColliderStrategy(
        keep=config.keep,
        selector=config.selector,
        reference=reference,
        over=config.over,
        keep_warmup_steps=config.keep_warmup_steps,
        seed=recipe.seed,
        **shared,
    )


def train_config(recipe: TrainingRecipe, the_plan: Plan) -> TrainConfig:
    """The settings of LanguageModel and Trainer that the recipe and its plan amount to."""
    optimizer, trainer = asdict(recipe.optimizer), recipe.trainer
    warmup = round(optimizer.pop("warmup_fraction") * the_plan.steps)
    return TrainConfig(
        steps=the_plan.steps,
        batch_size=trainer.micro_batch_size,
        accumulate=the_plan.accumulate,
        warmup_steps=warmup,
        engine=trainer.engine,
        precision=trainer.precision,
        log_every=trainer.log_every,
        checkpoint_every=trainer.checkpoint_every,
        on_nan=trainer.on_nan,
        on_spike=trainer.on_spike,
        spike_factor=trainer.spike_factor,
        **optimizer,
    )
