"""Shapes of published models, as their authors' configurations give them."""

import copy

from transformers import LlamaConfig, PhiConfig, PretrainedConfig, Qwen2Config

SHAPES: dict[str, PretrainedConfig] = {
    "tinyllama": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_hidden_layers=22,
        vocab_size=32000,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    ),
    "qwen2.5": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_attention_heads=12,
        num_key_value_heads=2,
        num_hidden_layers=28,
        vocab_size=151936,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "phi1.5": PhiConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_hidden_layers=24,
        vocab_size=51200,
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        hidden_act="gelu_new",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
}


def shape_of(name: str, layers: int | None = None) -> PretrainedConfig:
    """A copy of one of SHAPES, with so many layers instead of its own where they are given."""
    config = copy.deepcopy(SHAPES[name])
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config
