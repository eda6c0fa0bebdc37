"""Compact flow: which hidden states carry (K, D) gradients, and that nobody else can tell."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_collider as lc
from lightning_collider.filtering.selectors import shift_labels
from lightning_collider.filtering.state import FilterState, marks_of
from lightning_collider.nn.causal_lm import FilteredCausalLM, logit_losses
from tests.conftest import (
    CONFIGS,
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_model,
)

B, T, LAYERS = 2, 17, 3
KEEP = random_keep(B, T)
IDS, LABELS = batch_of(B, T)


def forward(family="llama", prepare=lambda model: None, **inputs):
    """A filtered loss of a converted model, its state, and the oracle's gradient."""
    model = small_model(family, layers=LAYERS)
    reference = float64_reference(model)
    model = lc.convert(model.double())
    for m in (model, reference):
        prepare(m)
    want = lc.oracle.filtered_grads(reference, IDS, LABELS, KEEP, "sum")
    out = model(input_ids=IDS, labels=LABELS, **inputs)
    loss = out.token_losses.sum()
    lc.backward_filter(loss, KEEP)
    (mark,) = marks_of(loss)
    return model, out, loss, mark.state, want


def dense(state):
    return [reason for _, reason in state.rows.flow if reason]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_hidden_state_is_compact(family, monkeypatch):
    model, _, loss, state, want = forward(family)
    loss.backward()
    assert dense(state) == []
    # Embedding; a layer: norm, attention, residual, norm, MLP, residual (Phi: one norm, two sums);
    # final norm.
    per_layer = 5 if family == "phi" else 6
    assert len(state.rows.flow) == 1 + LAYERS * per_layer + 1
    assert relative_error(grads_of(model), want) < 1e-10
    compact = grads_of(model)
    monkeypatch.setattr(FilterState, "compact_flow", False)
    model, _, loss, state, _ = forward(family)
    loss.backward()
    assert state.rows.flow == []
    assert all(compact[n].equal(g) for n, g in grads_of(model).items())  # to the bit


def test_the_adds_between_operators_see_kept_rows(monkeypatch):
    class Shapes(TorchDispatchMode):
        full = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (B, T, 64):
                self.full += 1
            return out

    def count():
        _, _, loss, _, _ = forward()
        with Shapes() as shapes:
            loss.backward()
        return shapes.full

    assert count() == 0
    monkeypatch.setattr(FilterState, "compact_flow", False)
    assert count() >= 4 * LAYERS


def test_a_users_hook_sees_the_full_gradient_and_keeps_it_dense():
    grads = []

    def prepare(model):
        layer = model.model.layers[1]
        layer.register_forward_hook(lambda m, args, out: out.register_hook(grads.append) and None)

    model, _, loss, state, want = forward(prepare=prepare)
    grads.clear()  # the oracle's own
    loss.backward()
    (grad,) = grads
    assert grad.shape == (B, T, 64) and (grad[~KEEP] == 0).all() and (grad[KEEP] != 0).any()
    assert "a tensor hook" in dense(state)
    assert relative_error(grads_of(model), want) < 1e-10


def test_retain_grad_sees_the_full_gradient():
    model, out, loss, state, want = forward(output_hidden_states=True)
    hidden = out.hidden_states[1]
    hidden.retain_grad()
    loss.backward()
    assert hidden.grad.shape == (B, T, 64) and (hidden.grad[~KEEP] == 0).all()
    assert "retain_grad" in dense(state)
    assert relative_error(grads_of(model), want) < 1e-10


def test_autograd_grad_of_a_hidden_state_is_full_size():
    model, out, loss, state, want = forward(output_hidden_states=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    hidden, grad_w = torch.autograd.grad(loss, [out.hidden_states[2], weight])
    assert hidden.shape == (B, T, 64) and (hidden[~KEEP] == 0).all()
    assert "asked for by torch.autograd.grad" in dense(state)
    assert (grad_w - want["model.layers.0.mlp.up_proj.weight"]).abs().max() < 1e-10


def test_backward_twice_on_a_retained_graph():
    model, out, loss, state, want = forward(output_hidden_states=True)
    loss.backward(retain_graph=True)
    assert dense(state) == []
    # The shapes were put back: another backward of the same graph may ask for something else.
    (hidden,) = torch.autograd.grad(loss, [out.hidden_states[1]], retain_graph=True)
    assert hidden.shape == (B, T, 64)
    loss.backward()
    assert relative_error({n: g / 2 for n, g in grads_of(model).items()}, want) < 1e-10


def test_a_loss_on_hidden_states_beside_the_filtered_one():
    model, out, loss, state, _ = forward(output_hidden_states=True)
    reference = float64_reference(small_model("llama", layers=LAYERS))
    keep = KEEP[..., None]  # dropped rows leave the backward of this loss too
    with lc.oracle.oracle_attention(reference):
        theirs = reference(input_ids=IDS, oracle_keep=KEEP, output_hidden_states=True)
    losses = logit_losses(theirs.logits, shift_labels(LABELS))
    ((losses * KEEP).sum() + (theirs.hidden_states[1] * keep).square().sum()).backward()
    (loss + (out.hidden_states[1] * keep).square().sum()).backward()
    assert any("fed by MulBackward0" in reason for reason in dense(state))
    assert relative_error(grads_of(model), grads_of(reference)) < 1e-10


class Wiggle(nn.Module):
    """A user's module between the layers, which the walk does not know."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.sin(self.inner(x))


def test_an_unknown_node_stays_dense_and_exact():
    def prepare(model):
        model.model.layers[1].mlp = Wiggle(model.model.layers[1].mlp)

    model, _, loss, state, want = forward(prepare=prepare)
    loss.backward()
    assert any("SinBackward" in reason for reason in dense(state))
    compact = [node for node, reason in state.rows.flow if not reason]
    assert compact, "the rest of the model stays compact"
    assert relative_error(grads_of(model), want) < 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    def prepare(model):
        if isinstance(model, FilteredCausalLM) or not reentrant:  # the oracle uses autograd.grad
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    model, _, loss, state, want = forward(prepare=prepare)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10
    if reentrant:  # each layer runs a backward of its own, behind a node of its own
        assert any("CheckpointFunction" in reason for reason in dense(state))
    else:
        assert dense(state) == []


def test_a_backward_that_fails_leaves_the_graph_usable():
    model, out, loss, _, want = forward(output_hidden_states=True)
    fail = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    fail.remove()
    model.zero_grad()
    # Nothing is left of the failed one: another kind of backward finds full size gradients.
    (hidden,) = torch.autograd.grad(loss, [out.hidden_states[1]], retain_graph=True)
    assert hidden.shape == (B, T, 64)
    model.zero_grad()
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


def test_a_backward_beside_the_loss_after_a_filtered_one():
    """It meets no mark, so nothing prepares it: the filtered one must leave nothing behind."""
    reference = float64_reference(small_model("llama", layers=LAYERS))
    keep = KEEP[..., None]
    with lc.oracle.oracle_attention(reference):
        theirs = reference(input_ids=IDS, oracle_keep=KEEP, output_hidden_states=True)
        (theirs.hidden_states[1] * keep).square().sum().backward()
    want = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert "model.layers.0.mlp.up_proj.weight" in want
    model, out, loss, _, _ = forward(output_hidden_states=True)
    loss.backward(retain_graph=True)
    model.zero_grad()
    (out.hidden_states[1] * keep).square().sum().backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative_error(got, want) < 1e-10
