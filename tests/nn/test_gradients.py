"""The filtered gradient of a converted Llama is the one that the oracle defines."""

import copy

import pytest
import torch
from torch.nn import functional as F

import lightning_collider as lc
from lightning_collider.filtering.selectors import has_target, shift_labels
from tests.conftest import (
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
)

MASKS = {
    "random": lambda b, t: random_keep(b, t),
    "all": lambda b, t: torch.ones(b, t, dtype=torch.bool),
    "one": lambda b, t: (torch.arange(b * t) == b * t // 2).view(b, t),
    "none": lambda b, t: torch.zeros(b, t, dtype=torch.bool),
}


def filtered_grads(model, ids, labels, keep, **inputs):
    """Gradients of the mean over kept rows, by backward_filter."""
    model.zero_grad()
    losses = lc.token_losses(model, ids, labels, **inputs)
    counted = keep & has_target(labels)
    loss = losses[counted].sum() / counted.sum().clamp(min=1)
    lc.backward_filter(loss, keep)
    loss.backward()
    return loss.detach(), grads_of(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 2, 33, 128])
@pytest.mark.parametrize("batch", [1, 3])
def test_float64_equals_the_oracle(batch, length, mask, tied):
    model = small_llama(tied)
    reference = float64_reference(model)
    ids, labels = batch_of(batch, length)
    keep = MASKS[mask](batch, length)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    loss, got = filtered_grads(lc.convert(model.double()), ids, labels, keep)
    assert all(g.isfinite().all() for g in got.values())
    assert relative_error(got, want) < 1e-10
    want_loss = lc.oracle.filtered_loss(reference, ids, labels, keep)
    assert loss == pytest.approx(want_loss.item(), rel=1e-12, abs=1e-12)
    if mask == "none":
        assert loss == 0 and all((g == 0).all() for g in got.values())


@pytest.mark.parametrize("mask", ["random", "all"])
def test_float64_is_close_to_untouched_hugging_face(mask):
    # Its norms and loss are float32 inside: 1e-6, not 1e-10.
    model = small_llama().double()
    untouched = copy.deepcopy(model)
    ids, labels = batch_of(3, 33)
    keep = MASKS[mask](3, 33)
    if mask == "all":
        untouched(input_ids=ids, labels=labels).loss.backward()
        want = grads_of(untouched)
    else:
        want = lc.oracle.filtered_grads(untouched, ids, labels, keep)
    _, got = filtered_grads(lc.convert(model), ids, labels, keep)
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("mask", MASKS)
def test_float32_equals_the_oracle(mask):
    model = small_llama()
    ids, labels = batch_of(3, 33)
    keep = MASKS[mask](3, 33)
    want = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep)
    _, got = filtered_grads(lc.convert(model), ids, labels, keep)
    assert relative_error(got, want) < 1e-5


def rms_error(got, want):
    """Root mean square difference over all parameters, relative to that of ``want``."""
    difference = sum(float((got[n].double() - g.double()).square().sum()) for n, g in want.items())
    return (difference / sum(float(g.double().square().sum()) for g in want.values())) ** 0.5


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("mask", ["random", "all", "one"])
def test_bfloat16_is_as_close_as_hugging_face(mask, autocast):
    # Head size 64 and 128 positions, so that rounding is that of a real shape.
    config = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
    model = small_llama(**config)
    if not autocast:
        model = model.bfloat16()
    ids, labels = batch_of(3, 128, holes=0.0)
    keep = MASKS[mask](3, 128)
    truth = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs = lc.oracle.filtered_grads(copy.deepcopy(model), ids, labels, keep)
        loss = lc.token_losses(lc.convert(model), ids, labels)
        counted = keep & has_target(labels)
        loss = loss[counted].sum() / counted.sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    ours = grads_of(model)
    assert all(g.dtype == p.dtype for g, p in zip(ours.values(), model.parameters(), strict=True))
    assert rms_error(ours, truth) < 2 * rms_error(theirs, truth)
    assert relative_error(ours, truth) < 2 * relative_error(theirs, truth)


def test_dense_without_a_mask():
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(3, 33)
    everything = torch.ones(3, 33, dtype=torch.bool)
    want = lc.oracle.filtered_grads(reference, ids, labels, everything)
    model = lc.convert(model.double())
    out = model(input_ids=ids, labels=labels)
    out.loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10
    assert out.logits is None and out.keep is None


def test_the_users_own_loss_on_logits():
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(2, 33)
    keep = random_keep(2, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep, reduction="sum")
    model = lc.convert(model.double())
    logits = model(input_ids=ids).logits
    targets = shift_labels(labels)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum")
    lc.backward_filter(loss, keep)  # the dropped rows' terms are removed from the gradient
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


def test_the_mask_may_come_with_the_forward():
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(2, 33)
    keep = random_keep(2, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    model = lc.convert(model.double())
    out = model(input_ids=ids, labels=labels, keep=keep)
    out.loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10
    assert out.keep.equal(keep)


def test_oracle_engine_gives_the_same_gradient_without_the_extension(monkeypatch):
    monkeypatch.setattr(
        "lightning_collider.ops.load", lambda: pytest.fail("the extension was used")
    )
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(3, 33)
    keep = random_keep(3, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    _, got = filtered_grads(lc.convert(reference, engine="oracle"), ids, labels, keep)
    assert relative_error(got, want) < 1e-12


def test_position_resets_separate_documents():
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(1, 33)
    positions = torch.cat([torch.arange(12), torch.arange(21)])[None]
    labels[0, 12] = -100  # no prediction across the border
    keep = random_keep(1, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum", position_ids=positions)
    parts = [slice(0, 12), slice(12, 33)]
    one_by_one = [
        lc.oracle.filtered_grads(reference, ids[:, p], labels[:, p], keep[:, p], "sum")
        for p in parts
    ]
    assert relative_error({n: one_by_one[0][n] + one_by_one[1][n] for n in want}, want) < 1e-10
    model = lc.convert(model.double())
    losses = lc.token_losses(model, ids, labels, position_ids=positions)
    loss = losses.sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


def test_frozen_parameters_get_no_gradient():
    model = small_llama()
    reference = float64_reference(model)
    ids, labels = batch_of(2, 33)
    keep = random_keep(2, 33)
    model = lc.convert(model.double())
    for m in (model, reference):
        m.model.embed_tokens.weight.requires_grad_(False)
        m.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        m.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    _, got = filtered_grads(model, ids, labels, keep)
    assert relative_error(got, want) < 1e-10
    assert model.model.embed_tokens.weight.grad is None


def test_biases():
    model = small_llama(attention_bias=True, mlp_bias=True)
    reference = float64_reference(model)
    ids, labels = batch_of(2, 33)
    keep = random_keep(2, 33)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    assert any(n.endswith("down_proj.bias") for n in want)
    _, got = filtered_grads(lc.convert(model.double()), ids, labels, keep)
    assert relative_error(got, want) < 1e-10
