"""One state a forward: masks never mix, and mistakes are named."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lightning_collider as lc
from tests.conftest import (
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
)


def losses_and_masks(model, n=2, seed=0):
    """Summed losses of n forwards of one model with different batches and masks, filtered."""
    losses = []
    for i in range(n):
        ids, labels = batch_of(2, 17, seed=seed + i)
        keep = random_keep(2, 17, share=0.3 + 0.4 * i, seed=i)
        loss = lc.token_losses(model, ids, labels).sum()
        lc.backward_filter(loss, keep)
        losses.append(loss)
    return losses


def oracle_sum(reference, n=2, seed=0):
    total = None
    for i in range(n):
        ids, labels = batch_of(2, 17, seed=seed + i)
        keep = random_keep(2, 17, share=0.3 + 0.4 * i, seed=i)
        grads = lc.oracle.filtered_grads(reference, ids, labels, keep, reduction="sum")
        total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
    return total


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
def test_two_forwards_one_backward(checkpointing):
    model = small_llama()
    reference = float64_reference(model)
    model = lc.convert(model.double())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    sum(losses_and_masks(model)).backward()
    assert relative_error(grads_of(model), oracle_sum(reference)) < 1e-10


def test_checkpoint_around_the_whole_model():
    model = small_llama()
    reference = float64_reference(model)
    model = lc.convert(model.double())
    ids, labels = batch_of(2, 17)
    keep = random_keep(2, 17)

    def forward(ids):
        return model(input_ids=ids, labels=labels, keep=keep).loss

    checkpoint(forward, ids, use_reentrant=False).backward()
    want = lc.oracle.filtered_grads(reference, ids, labels, keep)
    assert relative_error(grads_of(model), want) < 1e-10


def test_two_models_alive_and_a_reference_beside():
    first, second = small_llama(seed=0), small_llama(seed=1)
    references = [float64_reference(m) for m in (first, second)]
    first, second = lc.convert(first.double()), lc.convert(second.double())
    frozen = lc.convert(copy.deepcopy(references[0])).requires_grad_(False).eval()
    ids, labels = batch_of(2, 17)
    masks = [random_keep(2, 17, seed=s) for s in (3, 4)]
    losses = [lc.token_losses(m, ids, labels).sum() for m in (first, second)]
    with torch.no_grad():
        frozen(input_ids=ids)
    for loss, keep in zip(losses, masks, strict=True):
        lc.backward_filter(loss, keep)
    (losses[0] + losses[1]).backward()
    for model, reference, keep in zip((first, second), references, masks, strict=True):
        want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum")
        assert relative_error(grads_of(model), want) < 1e-10


def test_a_mask_does_not_outlive_its_forward():
    model = small_llama()
    reference = float64_reference(model)
    model = lc.convert(model.double())
    losses_and_masks(model, n=1)[0].backward()
    model.zero_grad()
    ids, labels = batch_of(2, 17)
    model(input_ids=ids, labels=labels).loss.backward()
    everything = torch.ones(2, 17, dtype=torch.bool)
    assert (
        relative_error(
            grads_of(model), lc.oracle.filtered_grads(reference, ids, labels, everything)
        )
        < 1e-10
    )


@pytest.fixture
def model_and_batch():
    return lc.convert(small_llama(layers=1)), *batch_of(2, 9)


def test_mask_of_another_shape_or_dtype(model_and_batch):
    model, ids, labels = model_and_batch
    loss = lc.token_losses(model, ids, labels).sum()
    with pytest.raises(ValueError, match=r"\(2, 9\).*\(9,\)"):
        lc.backward_filter(loss, torch.ones(9, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool"):
        lc.backward_filter(loss, torch.ones(2, 9))
    lc.backward_filter(
        loss, torch.ones(2, 9, dtype=torch.bool)
    )  # the refused ones left nothing behind
    loss.backward()


def test_a_second_mask_is_refused(model_and_batch):
    model, ids, labels = model_and_batch
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, random_keep(2, 9))
    with pytest.raises(ValueError, match="already has a keep mask"):
        lc.backward_filter(loss, random_keep(2, 9))


def test_a_mask_after_backward_is_refused(model_and_batch):
    model, ids, labels = model_and_batch
    loss = lc.token_losses(model, ids, labels).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="already run"):
        lc.backward_filter(loss, random_keep(2, 9))


def test_a_second_backward_is_refused_and_a_retained_one_doubles(model_and_batch):
    model, ids, labels = model_and_batch
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, random_keep(2, 9))
    loss.backward(retain_graph=True)
    once = grads_of(model)
    loss.backward()
    assert relative_error({n: g / 2 for n, g in grads_of(model).items()}, once) < 1e-6
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_loss_from_elsewhere_is_refused():
    with pytest.raises(ValueError, match="convert"):
        lc.backward_filter(
            torch.ones(1, requires_grad=True).sum(), torch.ones(1, 1, dtype=torch.bool)
        )


def test_a_sum_of_two_forwards_is_refused(model_and_batch):
    model, ids, labels = model_and_batch
    loss = lc.token_losses(model, ids, labels).sum() + lc.token_losses(model, ids, labels).sum()
    with pytest.raises(ValueError, match="2 forwards"):
        lc.backward_filter(loss, random_keep(2, 9))
