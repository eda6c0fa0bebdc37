"""What a recipe may say: its keys with their types, and how a YAML file becomes a checked Recipe.

A recipe names every key it uses; only an arm has defaults, which mean "not filtered". A short
recipe takes its missing keys from another one with `defaults: [quickstart]` at its top.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import lightning_collider.recipes
from lightning_collider.training.sources import SOURCES

SELECTORS = ("none", "excess_loss", "top_loss", "random")
OVER = ("batch", "sequence")
ENGINES = ("cpp", "oracle")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


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
    final_learning_rate: float = MISSING  # AdamW's rate after the last step, where the cosine ends
    warmup_steps: int = MISSING  # optimizer steps of linear warm-up
    weight_decay: float = MISSING  # AdamW's decay, on matrices only
    clip_norm: float = MISSING  # largest norm of the whole gradient
    engine: str = MISSING  # one of ENGINES: C++ operators, or plain autograd without a compiler
    precision: str = MISSING  # Lightning's name, one of PRECISIONS
    log_every: int = MISSING  # optimizer steps between two rows of the log
    checkpoint_every: int = MISSING  # optimizer steps between two checkpoints


@dataclass
class ReferenceConfig:
    steps: int = MISSING  # optimizer steps on clean target text


@dataclass
class ArmConfig:
    selector: str = MISSING  # one of SELECTORS
    keep: float = 1.0  # part of the targets that stays in the backward, in (0, 1]
    over: str = "batch"  # rank tokens over the "batch" or over each "sequence"
    keep_warmup_steps: int = 0  # steps over which the kept part goes from 1 to keep


@dataclass
class EvalConfig:
    tasks: list[str] = MISSING  # names of lm-eval tasks in eval/tasks
    batch_size: int = MISSING  # sequences scored at once


@dataclass
class Recipe:
    name: str = MISSING  # title of the table
    out: str = MISSING  # folder of the run
    seed: int = MISSING  # of the corpus, of the initial weights and of the data order
    corpus: CorpusConfig = MISSING
    model: ModelConfig = MISSING
    train: TrainConfig = MISSING
    reference: ReferenceConfig = MISSING
    arms: dict[str, ArmConfig] = MISSING  # name -> how this run is filtered
    eval: EvalConfig = MISSING


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path, apply `key=value` overrides, check it.

    Raises FileNotFoundError for an unknown recipe and ValueError for a key that is unknown,
    missing, of the wrong type or out of range. The message names the key.
    """
    given: Any = _read_with_defaults(find_recipe(name_or_path), ())
    try:
        given = OmegaConf.merge(given, *(_parse_override(o) for o in overrides or []))
        _refuse_unknown_keys(OmegaConf.to_container(given))
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), given)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(
                f"recipe {name_or_path!r} lacks {', '.join(missing)}. Add the key, or start the "
                "recipe with `defaults: [quickstart]` to take what it lacks from there."
            )
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"recipe key {error.full_key!r}: {_first_line(error)}") from error
    assert isinstance(recipe, Recipe)
    _check_ranges(recipe)
    return recipe


def find_recipe(name_or_path: str) -> Path:
    """Path of a recipe given by name or by path; FileNotFoundError lists the names there are."""
    folder = Path(lightning_collider.recipes.__file__).parent
    for path in (folder / f"{name_or_path}.yaml", Path(name_or_path)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise FileNotFoundError(
        f"no recipe {name_or_path!r}: give one of the names [{names}] or the path of a YAML file"
    )


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested plain dicts and lists, as it is written to YAML and JSON."""
    return dataclasses.asdict(recipe)


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML text that `load_recipe` reads back to an equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(recipe)))


def _read_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    """One YAML file merged over the recipes it lists under `defaults`, later over earlier."""
    if path.resolve() in seen:
        raise ValueError(f"{path}: its defaults lead back to itself")
    try:
        given = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(given, DictConfig):
        raise ValueError(f"{path} must hold `key: value` lines")
    names = given.pop("defaults", ListConfig([]))
    if not isinstance(names, ListConfig):
        raise ValueError(
            f"{path}: defaults must be a list of recipes, as in defaults: [quickstart]"
        )
    parents = [_read_with_defaults(find_recipe(n), (*seen, path.resolve())) for n in names]
    merged = OmegaConf.merge(*parents, given)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} must read key=value, for example train.steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error


def _known_keys(kind: Any, given: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys that `kind` allows; the keys of a dict come from `given`."""
    given = given if isinstance(given, dict) else {}
    if dataclasses.is_dataclass(kind):
        children = get_type_hints(kind)
    elif getattr(kind, "__origin__", None) is dict:
        children = {str(name): get_args(kind)[1] for name in given}
    else:
        return
    for name, child in children.items():
        yield prefix + name
        yield from _known_keys(child, given.get(name), f"{prefix}{name}.")


def _given_keys(given: Any, prefix: str = "") -> Iterator[str]:
    for name, value in given.items() if isinstance(given, dict) else ():
        yield f"{prefix}{name}"
        yield from _given_keys(value, f"{prefix}{name}.")


def _refuse_unknown_keys(given: Any) -> None:
    known = list(_known_keys(Recipe, given))
    for key in _given_keys(given):
        if key not in known:
            raise ValueError(f"unknown recipe key {key!r}; did you mean {_nearest(key, known)!r}?")


def _nearest(key: str, known: list[str]) -> str:
    """The known key most like `key`; the last part counts most, so a forgotten section is found."""

    def likeness(candidate: str) -> float:
        last = difflib.SequenceMatcher(None, key.split(".")[-1], candidate.split(".")[-1]).ratio()
        return 2 * last + difflib.SequenceMatcher(None, key, candidate).ratio()

    return max(known, key=likeness)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _check_ranges(recipe: Recipe) -> None:
    """Raise ValueError for the first value that has the right type and makes no sense."""
    checks = [*_size_checks(recipe), *_corpus_checks(recipe.corpus), *_arm_checks(recipe.arms)]
    for message, holds in checks:
        if not holds:
            raise ValueError(f"recipe {recipe.name!r}: {message}")


def _size_checks(recipe: Recipe) -> Iterator[tuple[str, bool]]:
    """Pairs of a message and whether the recipe is free of the mistake it names."""
    model, train = recipe.model, recipe.train
    positive = {
        "model": "hidden_size intermediate_size layers heads key_value_heads",
        "train": "steps batch_size accumulate learning_rate clip_norm log_every checkpoint_every",
        "reference": "steps",
        "eval": "batch_size",
    }
    for section, keys in positive.items():
        for key in keys.split():
            value = getattr(getattr(recipe, section), key)
            yield f"{section}.{key} must be above 0, not {value}", value > 0
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
    yield f"train.engine must be one of {', '.join(ENGINES)}", train.engine in ENGINES
    yield f"train.precision must be one of {', '.join(PRECISIONS)}", train.precision in PRECISIONS


def _corpus_checks(corpus: CorpusConfig) -> Iterator[tuple[str, bool]]:
    weights = corpus.weights
    # the first token of a sequence is never a target, so one token has none
    yield "corpus.sequence_length must be at least 2", corpus.sequence_length >= 2
    yield "corpus.vocab_size must be at least 257: 256 bytes, end of text", corpus.vocab_size >= 257
    yield "corpus.tokenizer_characters must be above 0", corpus.tokenizer_characters > 0
    yield "corpus.heldout_problems must be above 0", corpus.heldout_problems > 0
    yield f"corpus.weights must name {', '.join(SOURCES)}", sorted(weights) == sorted(SOURCES)
    yield "corpus.weights must not be negative", min(weights.values()) >= 0
    yield "corpus.weights must not all be 0", sum(weights.values()) > 0


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
