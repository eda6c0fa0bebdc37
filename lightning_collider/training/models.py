"""The model and the tokenizer of a recipe: a shape by transformers' names, and initial weights.

Weights come from a local Hugging Face folder, from the hub, from a run of ours or one of its
checkpoints, from a GGUF file inside a wheel of a package index (`wheel:NAME==VERSION`), or are
random, decided by the recipe's seed.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightning_collider.training.export import (
    find_checkpoint,
    load_checkpoint,
    read_weights,
    tokenizer_of,
)
from lightning_collider.training.hub import fetching
from lightning_collider.training.schema import nearest
from lightning_collider.training.settings import ModelSource, TrainingRecipe
from lightning_collider.training.tokens import BUILTIN, builtin_tokenizer
from lightning_collider.training.wheels import PREFIX, model_from_wheel

INSTEAD = "the folder of a Hugging Face model, of a run, or of a checkpoint"


def shape_of(source: ModelSource) -> Any:
    """The transformers configuration of a recipe's `model.config`.

    Raises ValueError for an unknown model_type, or a key that the family does not have.
    """
    given = dict(source.config)
    kind = given.pop("model_type")
    try:
        known = AutoConfig.for_model(kind)
    except ValueError as error:
        raise ValueError(
            f"model.config.model_type={kind!r} is no family of transformers"
        ) from error
    names = sorted(known.to_dict())
    for key in given:
        if key not in names:
            raise ValueError(
                f"model.config.{key} is no key of {kind}; did you mean {nearest(key, names)!r}?"
            )
    if source.layers is not None:
        if source.layers > known.__class__(**given).num_hidden_layers:
            raise ValueError(f"model.layers={source.layers}: the model has fewer blocks")
        given["num_hidden_layers"] = source.layers
    return known.__class__(**given)


def build_model(recipe: TrainingRecipe) -> PreTrainedModel:
    """The model that a run starts from, in float32 and train mode.

    Raises ValueError when the weights are of another shape than the recipe says, or the model is
    too small for the recipe's sequences.
    """
    config = shape_of(recipe.model)
    length = recipe.data.sequence_length
    if length > config.max_position_embeddings:
        raise ValueError(
            f"data.sequence_length={length} is longer than the model's longest sequence, "
            f"model.config.max_position_embeddings={config.max_position_embeddings}"
        )
    if recipe.model.weights is None:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    name = recipe.model.weights
    refuse_other_shape(recipe.model, _config_of("model.weights", name))
    model = read_model("model.weights", name, config=config, dtype=torch.float32)
    return model.float().train()


def read_model(key: str, name: str, **settings: Any) -> PreTrainedModel:
    """A causal LM with the weights that `name` means; `settings` are `from_pretrained`'s.

    A checkpoint of ours has its own configuration and precision.

    Raises FileNotFoundError or OSError, with the recipe's `key`, when there is none.
    """
    checkpoint = checkpoint_of(name)
    if checkpoint is not None:
        return load_checkpoint(checkpoint)
    name = local_weights(name)
    with fetching(key, name, INSTEAD):
        return AutoModelForCausalLM.from_pretrained(name, **settings)


def _config_of(key: str, name: str) -> Any:
    checkpoint = checkpoint_of(name)
    if checkpoint is not None:
        return AutoConfig.for_model(**read_weights(checkpoint)[1])
    name = local_weights(name)
    with fetching(key, name, INSTEAD):
        return AutoConfig.from_pretrained(name)


def checkpoint_of(name: str) -> Path | None:
    """The checkpoint of ours that a name means, by its own path or its run's; None for others."""
    path = Path(name)
    if (path / "config.json").is_file() or not path.is_dir():
        return None
    try:
        return find_checkpoint(path)
    except FileNotFoundError:
        return None


def load_tokenizer(source: ModelSource) -> Any:
    """The recipe's tokenizer. Raises ValueError when it has no end-of-text token."""
    name = source.tokenizer
    if name.startswith(BUILTIN):
        return builtin_tokenizer(name)
    if name == "weights":
        if source.weights is None:
            raise ValueError(
                "model.tokenizer=weights needs model.weights: with random weights name a "
                "tokenizer's folder"
            )
        checkpoint = checkpoint_of(source.weights)
        name = (
            local_weights(source.weights) if checkpoint is None else str(tokenizer_of(checkpoint))
        )
    if not name.startswith(PREFIX) and Path(name).is_absolute() and not Path(name).is_dir():
        raise FileNotFoundError(f"no tokenizer in {name}: correct model.tokenizer")
    with fetching("model.tokenizer", name, "the folder of a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name} has no end-of-text token to put behind documents")
    return tokenizer


def local_weights(name: str) -> str:
    """What `from_pretrained` can read: a folder, or a hub name that it downloads itself.

    Raises FileNotFoundError for what looks like a path and holds no model.
    """
    if name.startswith(PREFIX):
        return str(model_from_wheel(name))
    path = Path(name)
    if (path / "config.json").is_file():
        return name
    if path.exists() or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        hint = ""
        if path.name == "model" and path.parent.name.endswith("-reference"):
            hint = f"; `collider train {path.parent.name}` makes it"
        raise FileNotFoundError(
            f"no Hugging Face model in {name} (no config.json in it), nor a checkpoint{hint}"
        )
    return name


def refuse_other_shape(source: ModelSource, found: Any) -> None:
    """Raise ValueError, naming the key, when the weights' configuration is not the recipe's."""
    theirs = found.to_dict()
    for key, value in source.config.items():
        other = theirs.get(key)
        if not _agree(value, other):
            raise ValueError(
                f"model.weights={source.weights} has {key}={other}, the recipe says "
                f"model.config.{key}={value}: use other weights, or change the recipe"
            )


def _agree(value: Any, other: Any) -> bool:
    """Whether weights' setting `other` is the recipe's; GGUF files round numbers to float32."""
    if isinstance(value, dict):
        return isinstance(other, dict) and all(_agree(v, other.get(k)) for k, v in value.items())
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    return value == other
