"""What the filtered backward makes of a recipe's model, without training it."""

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import lightning_collider as lc
from lightning_collider.nn.coverage import Coverage
from lightning_collider.training.config import Recipe, TrainingRecipe
from lightning_collider.training.fit import model_config
from lightning_collider.training.models import shape_of

LAYERS = 2  # of the model that tries a backward: all layers are alike
TOKENS = 32


def explain(recipe: Recipe | TrainingRecipe) -> Coverage:
    """Coverage of a recipe's model: its modules, and the hidden states of its first layers."""
    if isinstance(recipe, TrainingRecipe):
        config, engine = shape_of(recipe.model), recipe.trainer.engine
    else:
        config, engine = model_config(recipe, recipe.corpus.vocab_size), recipe.train.engine
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).train()
    modules = lc.coverage(lc.convert(model, engine))
    return Coverage(modules.entries, try_backward(config, engine).edges)


def try_backward(config: PretrainedConfig, engine: str) -> Coverage:
    """Coverage after one filtered backward of a model's first layers, on made-up tokens."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
    model = lc.convert(AutoModelForCausalLM.from_config(config).train(), engine)
    ids = torch.arange(TOKENS)[None] % config.vocab_size
    loss = lc.token_losses(model, ids, ids).sum()
    lc.backward_filter(loss, ids % 2 == 0)
    loss.backward()
    return lc.coverage(model)
