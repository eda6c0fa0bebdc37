"""The parts of a model whose backward sees kept rows only: norm, MLP, attention, embedding."""

from collections.abc import Collection
from typing import Any

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


SILUS = (nn.SiLU, SiLUActivation)


class FilteredSwigluMLP(Swapped):
    """Gate, up and down projection with SiLU."""

    act_fn: nn.Module

    LINEARS = ("gate_proj", "up_proj", "down_proj")

    def why_dense(self) -> str | None:
        return plain_activation(self.act_fn, SILUS, "SiLU") or plain_linears(self, self.LINEARS)

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
        reason = plain_activation(self.activation_fn, GELUS, "GELU")
        return reason or plain_linears(self, self.LINEARS)

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


def plain_activation(
    module: nn.Module, kinds: Collection[type[nn.Module]], name: str
) -> str | None:
    """Why an MLP's activation is not one that the operator computes, or None."""
    kind = type(module)
    if kind not in kinds:
        return f"its activation is {kind.__name__}, not {name}"
    return why_not_plain(module, kind, "its activation")


def is_attention(module: nn.Module) -> bool:
    """Whether a module projects keys and values, which must get no gradient at dropped rows."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("k_proj", "v_proj"))
