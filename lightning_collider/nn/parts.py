"""The parts of a model whose backward sees kept rows only: norm, MLP, attention, embedding."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from lightning_collider import ops
from lightning_collider.nn.swapped import Swapped, parameters_of, plain_linears, why_not_plain


class FilteredEmbedding(Swapped):
    """``torch.nn.Embedding``."""

    weight: Tensor
    padding_idx: int | None
    max_norm: float | None
    scale_grad_by_freq: bool
    sparse: bool

    def why_dense(self) -> str | None:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return "max_norm, scale_grad_by_freq and sparse gradients are not supported"
        return None

    def forward(self, ids: Tensor) -> Tensor:
        if self.filter_state is None:
            return super().forward(ids)
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        return ops.embedding(ids, self.weight, padding_idx, self.filter_state.rows)


class FilteredRMSNorm(Swapped):
    """Llama's norm and its copies."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.filter_state is None:
            return super().forward(hidden_states)
        return ops.rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.filter_state.rows
        )


class FilteredSwigluMLP(Swapped):
    """Gate, up and down projection with SiLU."""

    act_fn: nn.Module

    LINEARS = ("gate_proj", "up_proj", "down_proj")

    def why_dense(self) -> str | None:
        if not isinstance(self.act_fn, nn.SiLU | SiLUActivation):
            return f"its activation is {type(self.act_fn).__name__}, not SiLU"
        return plain_linears(self, self.LINEARS)

    def forward(self, x: Tensor) -> Tensor:
        if self.filter_state is None:
            return super().forward(x)
        weights, biases = parameters_of(self, self.LINEARS)
        return ops.swiglu_mlp(x, weights, biases, self.filter_state.rows)


class FilteredLayerNorm(Swapped):
    """``torch.nn.LayerNorm``."""

    weight: Tensor
    bias: Tensor
    eps: float

    def why_dense(self) -> str | None:
        if self.weight is None or self.bias is None:
            return "it has no weight or no bias"
        return None

    def forward(self, x: Tensor) -> Tensor:
        if self.filter_state is None:
            return super().forward(x)
        return ops.layer_norm(x, self.weight, self.bias, self.eps, self.filter_state.rows)


# Activations that are GELU, and whether they are its tanh approximation.
GELUS = {NewGELUActivation: True, GELUTanh: True, GELUActivation: False}


class FilteredGeluMLP(Swapped):
    """Two projections with GELU between them."""

    LINEARS = ("fc1", "fc2")

    activation_fn: nn.Module

    def why_dense(self) -> str | None:
        if type(self.activation_fn) not in GELUS:
            return f"its activation is {type(self.activation_fn).__name__}, not GELU"
        return plain_linears(self, self.LINEARS)

    def forward(self, x: Tensor) -> Tensor:
        if self.filter_state is None:
            return super().forward(x)
        weights, biases = parameters_of(self, self.LINEARS)
        tanh = GELUS[type(self.activation_fn)]
        return ops.gelu_mlp(x, weights, biases, tanh, self.filter_state.rows)


class FilteredAttention(Swapped):
    """Grouped-query causal attention with rotary embedding of all or of part of each head."""

    attention_dropout: float
    head_dim: int
    scaling: float

    LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")

    def why_dense(self) -> str | None:
        if self.training and self.attention_dropout > 0:
            return f"attention_dropout is {self.attention_dropout}"
        return plain_linears(self, self.LINEARS)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.filter_state is None:
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        # The mask is not needed: the state's segments say what may attend to what.
        assert position_embeddings is not None
        cos, sin = position_embeddings
        weights, biases = parameters_of(self, self.LINEARS)
        rows = self.filter_state.rows
        norms, eps = self.head_norms()
        out = ops.attention(
            hidden_states, weights, biases, norms, eps, cos, sin, self.head_dim, self.scaling, rows
        )
        return out, None

    def head_norms(self) -> tuple[list[Tensor | None], float]:
        """Weights of the norms over query and key heads, and their epsilon."""
        return [None, None], 0.0


class FilteredPhiAttention(FilteredAttention):
    """Phi's: another name for the output projection."""

    LINEARS = ("q_proj", "k_proj", "v_proj", "dense")


class FilteredNormedAttention(FilteredAttention):
    """Qwen3's: RMS norms over each query and key head."""

    q_norm: FilteredRMSNorm
    k_norm: FilteredRMSNorm

    def why_dense(self) -> str | None:
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            reason = why_not_plain(norm, type(norm), name)
            if reason or not isinstance(norm, FilteredRMSNorm):
                return reason or f"{name} is a {type(norm).__name__}"
        return super().why_dense()

    def head_norms(self) -> tuple[list[Tensor | None], float]:
        return [self.q_norm.weight, self.k_norm.weight], self.q_norm.variance_epsilon


def is_attention(module: nn.Module) -> bool:
    """Whether a module projects keys and values, which must get no gradient at dropped rows."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("k_proj", "v_proj"))


def segment_starts(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[int]:
    """First rows of the runs inside which attention is causal, then the number of rows.

    A run is a sequence; padding and tokens of a padded sequence are runs of their own; and without
    a padding mask, positions that do not go up by one start a new run, as in Hugging Face models.

    Args:
        shape: (B, T).
        attention_mask: (B, T), 1 for tokens and 0 for padding on the left or on the right, or None.
        position_ids: int64 (1 or B, T), or None.

    Raises:
        ValueError: a mask of another form, or with padding between tokens.
    """
    batch, length = shape
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    if attention_mask is not None:
        if tuple(attention_mask.shape) != shape:
            raise ValueError(
                f"in training the attention mask must be (B, T) = {shape} with 1 for tokens and 0 "
                f"for padding, got {tuple(attention_mask.shape)}"
            )
        tokens = attention_mask.to("cpu", torch.bool)
        starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        if ((starts & tokens).sum(-1) > 1).any():
            raise ValueError(
                "the attention mask has padding between tokens: put it on the left or on the right"
            )
    elif position_ids is not None:
        jumps = position_ids.to("cpu").diff(dim=-1) != 1
        starts[:, 1:] = jumps.expand(batch, length - 1)
    return [*starts.flatten().nonzero().flatten().tolist(), batch * length]
