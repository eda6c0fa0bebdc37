"""Published shapes, cut to two layers: all of the backward is filtered, every gradient compact."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen3Config

import lightning_collider as lc
from lightning_collider.eval.shapes import SHAPES
from tests.conftest import random_keep

MISTRAL_7B = MistralConfig(sliding_window=None)  # the library's defaults are this model's
QWEN3_06B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    num_hidden_layers=28,
    vocab_size=151936,
    tie_word_embeddings=True,
)
CONFIGS = {**SHAPES, "mistral": MISTRAL_7B, "qwen3": QWEN3_06B}
PARAMETERS = {"tinyllama": 1.100e9, "qwen2.5": 1.544e9, "phi1.5": 1.418e9, "mistral": 7.242e9}
T = 24


def on_meta(config: PretrainedConfig):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    counted = sum(p.numel() for p in on_meta(CONFIGS[name]).parameters())
    assert counted == pytest.approx(PARAMETERS[name], rel=5e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_layers_are_filtered_and_compact(name):
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = on_meta(config).to_empty(device="cpu")  # values do not matter here, and take minutes
    model.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model = lc.convert(model)
    ids = torch.arange(T)[None]
    loss = lc.token_losses(model, ids, ids).sum()
    lc.backward_filter(loss, random_keep(1, T))
    loss.backward()
    covered = lc.coverage(model)
    assert covered.dense == {} and covered.share >= 0.99
    assert len(covered.edges) >= 2 * 4 + 2
    assert not [edge for edge in covered.edges if edge[1]], "compact share 100 %"
