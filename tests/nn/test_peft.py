"""LoRA adapters, put in before or after the conversion: exact gradients, and named as dense."""

import pytest
import torch

import lightning_collider as lc
from tests.conftest import CONFIGS, batch_of, grads_of, random_keep, relative_error, small_model

peft = pytest.importorskip("peft", reason="peft is in the dev extra")


def with_adapters(model, targets):
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"]], ids=lambda t: "+".join(t))
@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_are_exact_and_dense(family, targets, when):
    oracle = with_adapters(small_model(family).double(), targets)
    model = small_model(family).double()
    if when == "before":
        model = lc.convert(with_adapters(model, targets))
    else:
        model = with_adapters(lc.convert(model), targets)
    model.train()
    oracle.train()
    coverage = lc.coverage(model)
    assert len(coverage.dense) == 3 and all("self_attn" in name for name in coverage.dense)
    assert all(f"{targets[0]} is a Linear" in reason for reason in coverage.dense.values())
    assert 0.3 < coverage.share < 0.9

    ids, labels = batch_of(2, 17)
    keep = random_keep(2, 17)
    want = lc.oracle.filtered_grads(oracle, ids, labels, keep, "sum")
    assert want and all("lora" in name for name in want)
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-6  # live norms are float32 inside
    # Each attention is an island: what the residual stream hands on between them stays compact.
    full = [node for node, reason in lc.coverage(model).edges if reason]
    compact = [node for node, reason in lc.coverage(model).edges if not reason]
    assert full.count("AddBackward0") == 3 * len(targets)  # inside the adapters
    assert compact.count("AddBackward0") == 3 * 2
