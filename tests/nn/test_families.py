"""Every family against Hugging Face and the oracle; a new one takes one table row."""

import copy

import pytest
import torch

import lightning_collider as lc
from lightning_collider.filtering.selectors import has_target
from tests.conftest import (
    CONFIGS,
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_model,
)


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


def test_against_hf(family):
    """Logits, loss and dense gradients of the untouched model; its norms are float32 inside."""
    model = small_model(family).double()
    plain = copy.deepcopy(model)
    lc.convert(model)
    assert lc.coverage(model).dense == {}
    ids, labels = batch_of(2, 33)
    assert (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max() < 1e-6
    ours, theirs = (
        model(input_ids=ids, labels=labels).loss,
        plain(input_ids=ids, labels=labels).loss,
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    ours.backward()
    theirs.backward()
    assert relative_error(grads_of(model), grads_of(plain)) < 1e-6


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_float64_equals_the_oracle(family, share, tied):
    if family == "phi" and tied:
        tied = False  # its head has a bias: released models do not tie it
    model = small_model(family, tie_word_embeddings=tied)
    reference = float64_reference(model)
    ids, labels = batch_of(3, 33)
    keep = random_keep(3, 33, share)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    model = lc.convert(model.double())
    losses = lc.token_losses(model, ids, labels)
    counted = keep & has_target(labels)
    loss = losses[counted].sum() / counted.sum().clamp(min=1)
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-true", "bf16-mixed"])
def test_bfloat16_is_as_close_as_hugging_face(family, autocast):
    model = small_model(family)
    if not autocast:
        model = model.bfloat16()
    ids, labels = batch_of(3, 64, holes=0.0)
    keep = random_keep(3, 64)
    truth = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep, "sum")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs = lc.oracle.filtered_grads(copy.deepcopy(model), ids, labels, keep, "sum")
        loss = lc.token_losses(lc.convert(model), ids, labels).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), truth) < 2 * relative_error(theirs, truth)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family, side):
    model = small_model(family)
    reference = float64_reference(model)
    ids, labels = batch_of(3, 17)
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[2, 4:] = 0
    mask = mask.flip(1) if side == "left" else mask
    keep = random_keep(3, 17)
    real = labels.clone()
    real[:, 1:][mask[:, :-1] == 0] = -100  # what padding would predict is no target
    assert (real != labels).any()
    want = lc.oracle.filtered_grads(reference, ids, real, keep, "sum", attention_mask=mask)
    model = lc.convert(model.double())
    loss = lc.token_losses(model, ids, labels, attention_mask=mask).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


@pytest.mark.parametrize("family_with_window", ["mistral", "qwen2"])
def test_an_active_sliding_window_is_refused_by_name(family_with_window):
    settings = {"sliding_window": 8}
    if family_with_window == "qwen2":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    model = lc.convert(small_model(family_with_window, **settings))
    ids, labels = batch_of(1, 8)
    model(input_ids=ids, labels=labels).loss.backward()  # the window sees all of it
    ids, labels = batch_of(1, 9)
    with pytest.raises(ValueError, match="sliding-window attention is active"):
        model(input_ids=ids, labels=labels)


def test_phi_with_head_norms_is_refused():
    with pytest.raises(ValueError, match="qk_layernorm"):
        lc.convert(small_model("phi", qk_layernorm=True))


def test_a_hooked_projection_keeps_attention_dense_and_exact(family):
    """Where keys have a norm, dropped keys give its weight no gradient either."""
    model, plain = small_model(family), small_model(family)
    reference = float64_reference(plain)
    for m in (model, reference):
        for layer in m.model.layers:
            layer.self_attn.q_proj.register_forward_hook(lambda m, args, out: out * 1.5)
    model = lc.convert(model.double())
    assert set(lc.coverage(model).dense.values()) == {"q_proj has a hook"}
    ids, labels = batch_of(2, 17)
    keep = random_keep(2, 17)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum")
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-6  # live Qwen3 norms are float32 inside
