"""The keys of a recipe that is one training run: which model, which data, how long, what is kept.

Sizes that depend on the number of devices follow from ones that do not: a recipe says how many
tokens one optimizer step sees over all ranks, and `plan` says what that is for each of them. So the
same recipe takes the same steps on one device and on sixty-four.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from lightning_collider.training.checks import decay_check, one_of, positive

OVER = ("batch", "sequence")
ENGINES = ("cpp", "oracle")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
SELECTORS = ("none", "excess_loss", "top_loss", "random")
SHARDINGS = ("auto", "full", "hybrid", "none")
ON_NAN = ("stop", "skip")
ON_SPIKE = ("warn", "stop", "skip")
SCORE_TYPES = ("float16", "float32")
BAG_WEIGHTS = ("uniform", "inverse")


@dataclass
class ModelSource:
    weights: str | None = MISSING  # HF folder, hub name, run, checkpoint or wheel:...; null: random
    # Local folder or hub name; "weights": the one beside the weights; builtin:SIZE: learned here
    tokenizer: str = MISSING
    config: dict[str, Any] = MISSING  # model_type and shape, by the names of transformers
    layers: int | None = None  # train a truncation with the first so many blocks; null: all


@dataclass
class SourceConfig:
    path: str = MISSING  # files of txt/jsonl/parquet, a hub name, builtin:NAME, or another run's
    # DATA/NAME, a folder of token shards
    weight: float = 1.0  # its part of the training sequences, relative to the other sources
    split: str = "train"  # split of a hub data set
    subset: str | None = None  # configuration of a hub data set
    template: str = "{text}"  # how a record becomes text; {column} stands for a column
    max_documents: int | None = None  # stop reading there; null: read all


@dataclass
class DataConfig:
    folder: str = MISSING  # receives one folder of token shards for each source
    sources: dict[str, SourceConfig] = MISSING  # name -> where its text comes from
    sequence_length: int = MISSING  # tokens in one training sequence
    separate_documents: bool = MISSING  # a token attends to its own document only
    validation_fraction: float = MISSING  # part of the documents kept for validation
    shard_tokens: int = MISSING  # tokens after which a new shard file begins
    verify: bool = True  # compare each shard with its checksum at the start


@dataclass
class TrainerConfig:
    # The first of the three limits counts. A step on bags reads bag_size times more text than
    # batch_tokens, which only epochs takes into account.
    max_tokens: int | None = None  # stop after so many tokens
    epochs: float | None = None  # stop after so many passes over the data
    max_steps: int | None = None  # stop after so many optimizer steps
    batch_tokens: int = MISSING  # tokens of one optimizer step, over all ranks
    micro_batch_size: int = MISSING  # sequences in one forward of one rank
    devices: int = 1  # processes on each node
    num_nodes: int = 1  # nodes
    sharding: str = "auto"  # one of SHARDINGS: FSDP2 over all ranks, or hybrid: within a node
    sharded_checkpoints: bool = False  # each rank writes its own part of a checkpoint
    engine: str = "cpp"  # one of ENGINES: C++ operators, or plain autograd without a compiler
    precision: str = MISSING  # Lightning's name, one of PRECISIONS
    log_every: int = MISSING  # optimizer steps between two rows of the log
    checkpoint_every: int = MISSING  # optimizer steps between two checkpoints
    keep_checkpoints: int = 2  # newest checkpoints that stay on disk
    validate_every: int | None = None  # optimizer steps between two validations; null: none
    validation_batches: int = 16  # micro-batches of one validation, on each rank
    on_nan: str = "stop"  # one of ON_NAN: what to do with a gradient that is not finite
    on_spike: str = "warn"  # one of ON_SPIKE: what to do with a gradient that is a spike
    spike_factor: float | None = 10.0  # times the usual norm from which it is one; null: never


@dataclass
class OptimizerConfig:
    learning_rate: float = MISSING  # AdamW's rate at the end of the warm-up
    final_learning_rate: float = MISSING  # AdamW's rate after the last step, where it falls to
    warmup_fraction: float = MISSING  # part of the optimizer steps with a linear warm-up
    decay_fraction: float | None = None  # last part, with a linear fall; null: a cosine all the way
    weight_decay: float = MISSING  # AdamW's decay, on matrices only
    clip_norm: float = MISSING  # largest norm of the whole gradient


@dataclass
class FilterConfig:
    selector: str = MISSING  # one of SELECTORS
    keep: float = 1.0  # part of the targets that stays in the backward, in (0, 1]
    over: str = "batch"  # rank tokens over the "batch" or over each "sequence"
    keep_warmup_steps: int = 0  # steps over which the kept part goes from 1 to keep
    reference: str | None = None  # excess_loss's reference model: as model.weights
    stored_losses: bool = False  # read what `collider score` stored, instead of running it beside
    stored_type: str = "float16"  # one of SCORE_TYPES, what `collider score` stores


@dataclass
class SuperpositionConfig:
    bag_size: int = MISSING  # contiguous tokens that share a position, s
    ratio: float = MISSING  # first part of the optimizer steps, which is trained on bags, in [0, 1)
    weights: str = "uniform"  # one of BAG_WEIGHTS: of a bag's tokens as targets; inverse: 1/i


@dataclass
class TrainingRecipe:
    kind: str = "training"  # tells this recipe from a comparison of arms
    name: str = MISSING  # what the run is called
    out: str = MISSING  # folder of the run
    seed: int = MISSING  # of random weights, the order of the data and the random selector
    model: ModelSource = MISSING
    data: DataConfig = MISSING
    trainer: TrainerConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    filter: FilterConfig = field(default_factory=lambda: FilterConfig(selector="none"))
    superposition: SuperpositionConfig | None = None  # first train on bags of tokens; null: do not


@dataclass(frozen=True)
class Plan:
    """What the recipe means for a given amount of data and number of ranks."""

    steps: int  # optimizer steps
    accumulate: int  # micro-batches in one optimizer step of one rank
    rows_a_step: int  # sequences in one optimizer step, over all ranks


def plan(recipe: TrainingRecipe, rows_of_data: int) -> Plan:
    """Steps and accumulation of a recipe; `rows_of_data` are the sequences of one pass.

    Raises ValueError when the batch does not divide among the ranks, or there is less than a step.
    """
    config, length = recipe.trainer, recipe.data.sequence_length
    ranks = config.devices * config.num_nodes
    rows = config.batch_tokens // length
    if config.batch_tokens % length or rows % (ranks * config.micro_batch_size):
        unit = ranks * config.micro_batch_size * length
        raise ValueError(
            f"trainer.batch_tokens={config.batch_tokens} must be a multiple of {unit}: "
            f"data.sequence_length {length} x trainer.micro_batch_size {config.micro_batch_size} x "
            f"{ranks} ranks"
        )
    limits = [config.max_steps]
    limits.append(None if config.max_tokens is None else config.max_tokens // config.batch_tokens)
    read = rows * _data_factor(recipe.superposition)
    limits.append(None if config.epochs is None else int(config.epochs * rows_of_data / read))
    steps = min(limit for limit in limits if limit is not None)
    if steps < 1:
        raise ValueError(
            f"the data has {rows_of_data} sequences of {length} tokens, less than one optimizer "
            f"step of {rows}: lower trainer.batch_tokens or data.sequence_length, or add text"
        )
    return Plan(steps, rows // (ranks * config.micro_batch_size), rows)


def _data_factor(config: SuperpositionConfig | None) -> float:
    """Text that a run reads, over what it would read without bags."""
    return 1.0 if config is None else 1.0 + config.ratio * (config.bag_size - 1)


CHOICES = {  # key -> the values it may have
    "trainer.engine": ENGINES,
    "trainer.precision": PRECISIONS,
    "trainer.sharding": SHARDINGS,
    "trainer.on_nan": ON_NAN,
    "trainer.on_spike": ON_SPIKE,
    "filter.selector": SELECTORS,
    "filter.over": OVER,
    "filter.stored_type": SCORE_TYPES,
}


def checks(recipe: TrainingRecipe) -> Iterator[tuple[str, bool]]:
    """Pairs of a message and whether the recipe is free of the mistake it names."""
    sizes = {
        "data": "sequence_length shard_tokens",
        "trainer": "batch_tokens micro_batch_size devices num_nodes log_every checkpoint_every "
        "keep_checkpoints validation_batches max_tokens epochs max_steps validate_every "
        "spike_factor",
        "optimizer": "learning_rate clip_norm",
        "model": "layers",
    }
    yield from positive(recipe, sizes)
    limits = (recipe.trainer.max_tokens, recipe.trainer.epochs, recipe.trainer.max_steps)
    yield (
        "give trainer.max_tokens, trainer.epochs or trainer.max_steps",
        any(limit is not None for limit in limits),
    )
    yield from one_of(recipe, CHOICES)
    yield from _data_checks(recipe.data)
    yield from _filter_checks(recipe.filter)
    yield from _superposition_checks(recipe.superposition)
    warmup, decay = recipe.optimizer.warmup_fraction, recipe.optimizer.decay_fraction
    yield f"optimizer.warmup_fraction must be in [0, 1], not {warmup}", 0 <= warmup <= 1
    yield decay_check("optimizer.decay_fraction", decay, warmup)
    for key in ("final_learning_rate", "weight_decay"):
        yield f"optimizer.{key} must not be negative", getattr(recipe.optimizer, key) >= 0
    yield "model.config must name a model_type", "model_type" in recipe.model.config


def _data_checks(data: DataConfig) -> Iterator[tuple[str, bool]]:
    yield "data.sources must name at least one source", bool(data.sources)
    yield "data.sequence_length must be at least 2", data.sequence_length >= 2
    part = data.validation_fraction
    yield f"data.validation_fraction must be in [0, 1), not {part}", 0 <= part < 1
    for name, source in data.sources.items():
        plain = name not in ("", ".", "..") and "/" not in name
        yield f"data.sources.{name}: the name must be a plain folder name", plain
        yield f"data.sources.{name}.weight must be above 0", source.weight > 0


def _filter_checks(config: FilterConfig) -> Iterator[tuple[str, bool]]:
    yield f"filter.keep must be above 0 and at most 1, not {config.keep}", 0 < config.keep <= 1
    filtered = config.selector != "none"
    yield "filter.keep below 1 needs a filter.selector", config.keep == 1 or filtered
    yield "filter.keep_warmup_steps must not be negative", config.keep_warmup_steps >= 0
    yield (
        "filter.selector=excess_loss needs filter.reference, the folder or hub name of a model",
        config.selector != "excess_loss" or config.reference is not None,
    )
    yield (
        "filter.stored_losses=true has no effect without filter.selector=excess_loss",
        not config.stored_losses or config.selector == "excess_loss",
    )


def _superposition_checks(config: SuperpositionConfig | None) -> Iterator[tuple[str, bool]]:
    if config is None:
        return
    yield f"superposition.bag_size must be 1 or more, not {config.bag_size}", config.bag_size >= 1
    yield f"superposition.ratio must be in [0, 1), not {config.ratio}", 0 <= config.ratio < 1
    yield (
        f"superposition.weights must be one of {', '.join(BAG_WEIGHTS)}, not {config.weights!r}",
        config.weights in BAG_WEIGHTS,
    )
