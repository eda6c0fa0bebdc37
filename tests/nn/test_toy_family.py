"""A new family takes one row of the table; without the row it is refused, not half filtered."""

import pytest
import torch
from transformers import LlamaConfig

import lightning_collider as lc
from lightning_collider.nn import convert as table
from lightning_collider.nn.parts import (
    FilteredAttention,
    FilteredLayerNorm,
    FilteredRMSNorm,
    FilteredSwigluMLP,
)
from tests.conftest import (
    SMALL,
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
)
from tests.nn.toy_family import ToyForCausalLM

ROW = table.Family(
    module="tests.nn.toy_family",
    causal_lm="ToyForCausalLM",
    layer="ToyDecoderLayer",
    parts={
        "LayerNorm": FilteredLayerNorm,
        "LlamaRMSNorm": FilteredRMSNorm,
        "LlamaAttention": FilteredAttention,
        "LlamaMLP": FilteredSwigluMLP,
    },
)


def toy():
    torch.manual_seed(0)
    return ToyForCausalLM(LlamaConfig(**SMALL)).train()


def test_one_row_filters_a_new_family(monkeypatch):
    monkeypatch.setattr(table, "FAMILIES", [*table.FAMILIES, ROW])
    model = toy()
    reference = float64_reference(model)
    ids, labels = batch_of(2, 33)
    keep = random_keep(2, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum")
    model = lc.convert(model.double())
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10
    covered = lc.coverage(model)
    assert covered.dense == {} and covered.share == 1.0
    assert covered.edges and not [reason for _, reason in covered.edges if reason]


def test_a_subclass_with_other_layers_is_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn is an attention outside a Llama"):
        lc.convert(toy())
