"""The definition of the filtered gradient, in plain autograd, for any Hugging Face causal LM.

The filtered gradient is that of ``mean over kept rows of CE`` where every attention layer sees
``K, V = where(keep, K, K.detach()), where(keep, V, V.detach())``: dropped tokens run as constants
that kept tokens attend to (Collider, arXiv 2502.00340). Every operator of this project is tested
against
this file. It changes no module of the model: the mask enters through its attention interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_collider.filtering.selectors import NO_TARGET, shift_labels
from lightning_collider.filtering.state import check_keep

_ATTENTION = "collider_oracle"
_INNER = "sdpa"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    oracle_keep: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    keep = oracle_keep[:, None, :, None]
    key = torch.where(keep, key, key.detach())
    value = torch.where(keep, value, value.detach())
    inner = ALL_ATTENTION_FUNCTIONS[_INNER]
    return inner(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[_INNER])


@contextmanager
def oracle_attention(model: nn.Module) -> Iterator[None]:
    """Hold dropped keys and values constant in every attention of a model.

    Forwards inside take ``oracle_keep``, a bool (B, T).
    """
    # Sub-models hold configurations of their own, or share the model's.
    configs: dict[int, Any] = {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = _ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def filtered_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    keep: Tensor,
    reduction: str = "mean",
    **inputs: Any,
) -> Tensor:
    """The loss whose plain autograd gradient is the filtered gradient.

    Args:
        model: an unconverted Hugging Face causal LM.
        input_ids, labels: int64 (B, T); labels are shifted inside, -100 is ignored.
        keep: bool (B, T).
        reduction: "mean" over kept rows that have a target, or "sum".
        inputs: passed to the model (attention mask, position ids).

    Returns:
        0-d loss, float32 or wider; 0 when no kept row has a target.

    Raises:
        ValueError: an unknown reduction, a mask of another shape or dtype, or a converted model.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if hasattr(model, "filter_engine"):
        raise ValueError("the oracle takes an unconverted model: keep a copy from before convert()")
    check_keep(keep, tuple(input_ids.shape))
    with oracle_attention(model):
        logits = model(input_ids=input_ids, use_cache=False, oracle_keep=keep, **inputs).logits
    targets = shift_labels(labels).masked_fill(~keep, NO_TARGET)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(
        logits.flatten(0, 1).to(wide), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )
    return loss / (targets != NO_TARGET).sum().clamp(min=1) if reduction == "mean" else loss


def filtered_grads(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    keep: Tensor,
    reduction: str = "mean",
    **inputs: Any,
) -> dict[str, Tensor]:
    """The filtered gradient of every parameter, by plain autograd; ``.grad`` is left alone.

    Arguments and errors are those of :func:`filtered_loss`.

    Returns:
        Parameter name to gradient, zeros where nothing depends on the parameter.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with oracle_attention(model):  # in backward too: an activation checkpoint runs forwards there
        loss = filtered_loss(model, input_ids, labels, keep, reduction, **inputs)
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(named.items(), grads, strict=True)
    }
