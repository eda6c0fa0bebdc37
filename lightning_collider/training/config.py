"""Recipes: a comparison of arms on text of its own (here), one training run (settings.py), or a
federated one (federated/settings.py).

`load_recipe` tells them apart by the key `kind`. A comparison names every key it uses; only an arm
has defaults, which mean "not filtered".
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from lightning_collider.federated import settings as federated_settings
from lightning_collider.federated.settings import FederatedRecipe
from lightning_collider.training import settings
from lightning_collider.training.checks import decay_check, one_of, positive
from lightning_collider.training.schema import read_recipe, to_object
from lightning_collider.training.settings import (
    ENGINES,
    ON_NAN,
    ON_SPIKE,
    OVER,
    PRECISIONS,
    SELECTORS,
    TrainingRecipe,
)
from lightning_collider.training.sources import SOURCES


@dataclass
class CorpusConfig:
    sequence_length: int = MISSING  # tokens in one packed training sequence
    vocab_size: int = MISSING  # tokens in the vocabulary the tokenizer learns
    tokenizer_characters: int = MISSING  # characters of mixed text the tokenizer learns from
    heldout_problems: int = MISSING  # target problems kept for evaluation, never trained on
    weights: dict[str, float] = MISSING  # source -> its part of the training tokens


@dataclass
class ModelConfig:
    hidden_size: int = MISSING  # width of the residual stream
    intermediate_size: int = MISSING  # width inside the MLP
    layers: int = MISSING  # decoder blocks
    heads: int = MISSING  # query heads
    key_value_heads: int = MISSING  # key and value heads, shared by groups of query heads
    tie_embeddings: bool = MISSING  # the head uses the embedding's weights


@dataclass
class TrainConfig:
    steps: int = MISSING  # optimizer steps of every arm
    batch_size: int = MISSING  # sequences in one micro-batch
    accumulate: int = MISSING  # micro-batches in one optimizer step
    learning_rate: float = MISSING  # AdamW's rate at the end of the warm-up
    final_learning_rate: float = MISSING  # AdamW's rate after the last step, where it falls to
    warmup_steps: int = MISSING  # optimizer steps of linear warm-up
    weight_decay: float = MISSING  # AdamW's decay, on matrices only
    clip_norm: float = MISSING  # largest norm of the whole gradient
    engine: str = MISSING  # one of ENGINES: C++ operators, or plain autograd without a compiler
    precision: str = MISSING  # Lightning's name, one of PRECISIONS
    log_every: int = MISSING  # optimizer steps between two rows of the log
    checkpoint_every: int = MISSING  # optimizer steps between two checkpoints
    on_nan: str = MISSING  # one of ON_NAN: what to do with a gradient that is not finite
    on_spike: str = "warn"  # one of ON_SPIKE: what to do with a gradient that is a spike
    spike_factor: float | None = None  # times the usual norm from which it is one; null: never
    decay_fraction: float | None = None  # last part, with a linear fall; null: a cosine all the way


@dataclass
class ReferenceConfig:
    steps: int = MISSING  # optimizer steps on clean text
    weights: dict[str, float] = MISSING  # source -> its part of that text


@dataclass
class ArmConfig:
    selector: str = MISSING  # one of SELECTORS
    keep: float = 1.0  # part of the targets that stays in the backward, in (0, 1]
    over: str = "batch"  # rank tokens over the "batch" or over each "sequence"
    keep_warmup_steps: int = 0  # steps over which the kept part goes from 1 to keep
    stored_losses: bool = False  # compute the reference's losses once, before the run


@dataclass
class EvalConfig:
    tasks: list[str] = MISSING  # names of lm-eval tasks in eval/tasks
    batch_size: int = MISSING  # sequences scored at once
    heldout_batches: int = MISSING  # micro-batches of held-out mixed text, looked at while training
    heldout_points: int = MISSING  # how often, beside the start


@dataclass
class Recipe:
    kind: str = "comparison"  # tells this recipe from one training run
    name: str = MISSING  # title of the table
    out: str = MISSING  # folder of the run
    seed: int = MISSING  # of the corpus, of the initial weights and of the data order
    corpus: CorpusConfig = MISSING
    model: ModelConfig = MISSING
    train: TrainConfig = MISSING
    reference: ReferenceConfig = MISSING
    arms: dict[str, ArmConfig] = MISSING  # name -> how this run is filtered
    eval: EvalConfig = MISSING


AnyRecipe = Recipe | TrainingRecipe | FederatedRecipe
KINDS: dict[str, type] = {
    "comparison": Recipe,
    "training": TrainingRecipe,
    "federated": FederatedRecipe,
}


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> AnyRecipe:
    """Read a recipe by its name in recipes/ or by its path, apply `key=value` overrides, check it.

    Raises FileNotFoundError for an unknown recipe and ValueError for a key that is unknown,
    missing, of the wrong type or out of range. The message names the key.
    """
    given = read_recipe(name_or_path, overrides or [])
    kind = given.get("kind", "comparison")
    if kind not in KINDS:
        raise ValueError(f"recipe key 'kind' must be one of {', '.join(KINDS)}, not {kind!r}")
    _drop_null_sources(given)
    recipe = to_object(KINDS[kind], given, name_or_path)
    for message, holds in CHECKS[kind](recipe):
        if not holds:
            raise ValueError(f"recipe {recipe.name!r}: {message}")
    return recipe


def _drop_null_sources(given: DictConfig) -> None:
    """Leave out the sources that are null: so a recipe drops one that its defaults have."""
    sources = OmegaConf.select(given, "data.sources")
    for name in list(sources or {}):
        if sources[name] is None:
            del sources[name]


def load_comparison(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """`load_recipe` for a recipe that compares arms, such as the quickstart."""
    recipe = load_recipe(name_or_path, overrides)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe {name_or_path!r} has kind {recipe.kind}, and no arms to compare")
    return recipe


def load_training(name_or_path: str, overrides: list[str] | None = None) -> TrainingRecipe:
    """`load_recipe` for a recipe that is one training run, such as tinyllama-1.1b."""
    recipe = load_recipe(name_or_path, overrides)
    if not isinstance(recipe, TrainingRecipe):
        federated = recipe.kind == "federated"
        what = "is a federated run" if federated else "compares runs on text of its own"
        raise ValueError(
            f"recipe {name_or_path!r} {what}; this command is for a "
            "recipe with `kind: training`, such as smollm2-135m"
        )
    return recipe


def load_federated(name_or_path: str, overrides: list[str] | None = None) -> FederatedRecipe:
    """`load_recipe` for a recipe that is a federated run, such as fedadt-digits."""
    recipe = load_recipe(name_or_path, overrides)
    if not isinstance(recipe, FederatedRecipe):
        raise ValueError(
            f"recipe {name_or_path!r} has kind {recipe.kind}; `collider federate` is for a recipe "
            "with `kind: federated`, such as fedadt-digits"
        )
    return recipe


def to_dict(recipe: AnyRecipe) -> dict[str, Any]:
    """The recipe as nested plain dicts and lists, as it is written to YAML and JSON."""
    return dataclasses.asdict(recipe)


def to_yaml(recipe: AnyRecipe) -> str:
    """The resolved recipe as YAML text that `load_recipe` reads back to an equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(recipe)))


CHOICES = {  # key -> the values it may have
    "train.engine": ENGINES,
    "train.precision": PRECISIONS,
    "train.on_nan": ON_NAN,
    "train.on_spike": ON_SPIKE,
}


def _checks(recipe: Recipe) -> Iterator[tuple[str, bool]]:
    """Pairs of a message and whether the recipe is free of the mistake it names."""
    yield from _size_checks(recipe)
    yield from one_of(recipe, CHOICES)
    # Their names are checked by run.py: lm-eval has thousands.
    yield "eval.tasks must name at least one task", bool(recipe.eval.tasks)
    yield from _corpus_checks(recipe.corpus)
    yield from _weight_checks("corpus.weights", recipe.corpus.weights)
    yield from _weight_checks("reference.weights", recipe.reference.weights)
    yield from _arm_checks(recipe.arms)


def _size_checks(recipe: Recipe) -> Iterator[tuple[str, bool]]:
    model, train = recipe.model, recipe.train
    sizes = {
        "model": "hidden_size intermediate_size layers heads key_value_heads",
        "train": "steps batch_size accumulate learning_rate clip_norm log_every checkpoint_every "
        "spike_factor",
        "reference": "steps",
        "eval": "batch_size heldout_batches heldout_points",
    }
    yield from positive(recipe, sizes)
    yield (
        "model.heads must be a multiple of model.key_value_heads",
        model.heads % model.key_value_heads == 0,
    )
    yield (
        "model.hidden_size must be an even multiple of model.heads (rotary embedding)",
        model.hidden_size % (2 * model.heads) == 0,
    )
    for key in ("warmup_steps", "final_learning_rate", "weight_decay"):
        yield f"train.{key} must not be negative", getattr(train, key) >= 0
    # The reference model has the same warm-up, mostly in fewer steps.
    fewest = max(1, min(train.steps, recipe.reference.steps))
    warmup = min(1.0, train.warmup_steps / fewest)
    yield decay_check("train.decay_fraction", train.decay_fraction, warmup)


def _corpus_checks(corpus: CorpusConfig) -> Iterator[tuple[str, bool]]:
    # the first token of a sequence is never a target, so one token has none
    yield "corpus.sequence_length must be at least 2", corpus.sequence_length >= 2
    yield "corpus.vocab_size must be at least 257: 256 bytes, end of text", corpus.vocab_size >= 257
    yield "corpus.tokenizer_characters must be above 0", corpus.tokenizer_characters > 0
    yield "corpus.heldout_problems must be above 0", corpus.heldout_problems > 0


def _weight_checks(name: str, weights: dict[str, float]) -> Iterator[tuple[str, bool]]:
    yield f"{name} must name {', '.join(SOURCES)}", sorted(weights) == sorted(SOURCES)
    yield f"{name} must not be negative", min(weights.values()) >= 0
    yield f"{name} must not all be 0", sum(weights.values()) > 0


def _arm_checks(arms: dict[str, ArmConfig]) -> Iterator[tuple[str, bool]]:
    yield "arms must name at least one run", bool(arms)
    for name, arm in arms.items():
        at = f"arms.{name}"
        yield f"{at}: the name must be a plain folder name", name == Path(name).name != ".."
        yield f"{at}.keep must be above 0 and at most 1, not {arm.keep}", 0 < arm.keep <= 1
        yield (
            f"{at}.selector must be one of {', '.join(SELECTORS)}, not {arm.selector!r}",
            arm.selector in SELECTORS,
        )
        yield (
            f"{at}.keep below 1 needs a selector that says which tokens to keep",
            arm.keep == 1 or arm.selector != "none",
        )
        yield f"{at}.over must be batch or sequence, not {arm.over!r}", arm.over in OVER
        yield f"{at}.keep_warmup_steps must not be negative", arm.keep_warmup_steps >= 0
        yield (
            f"{at}.stored_losses=true has no effect without selector: excess_loss",
            not arm.stored_losses or arm.selector == "excess_loss",
        )


# kind -> the pairs of a message and whether a recipe is free of the mistake it names
CHECKS: dict[str, Callable[[Any], Iterator[tuple[str, bool]]]] = {
    "comparison": _checks,
    "training": settings.checks,
    "federated": federated_settings.checks,
}
