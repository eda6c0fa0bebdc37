"""A model family of a user's own: parallel residuals around Llama's attention and MLP."""

from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

__all__ = ["LlamaAttention", "LlamaMLP", "LlamaRMSNorm", "ToyDecoderLayer", "ToyForCausalLM"]


class ToyDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states, **kwargs):
        normed = self.norm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + attended + self.mlp(normed)


class ToyForCausalLM(LlamaForCausalLM):
    """Llama's forward over other layers."""

    def __init__(self, config):
        super().__init__(config)
        assert isinstance(self.model, LlamaModel)
        layers = [ToyDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.model.layers = nn.ModuleList(layers)
        self.post_init()
