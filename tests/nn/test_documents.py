"""Packed documents equal the same documents one by one."""

import pytest
import torch

import lightning_collider as lc
from lightning_collider.nn.segments import separate_documents
from lightning_collider.strategies.filtering import Filtering
from tests.conftest import (
    CONFIGS,
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_model,
)

LENGTHS = [[12, 1, 20], [5, 28]]  # of the documents of each row
B, T = 2, 33
DOCUMENTS = torch.stack(
    [torch.tensor([7, 3, 9][: len(row)]).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
)


def one_by_one(of_document):
    """Results of a function of (row, slice) on every document."""
    for b, row in enumerate(LENGTHS):
        end = 0
        for n in row:
            start, end = end, end + n
            yield of_document(slice(b, b + 1), slice(start, end))


def test_positions_start_anew_and_first_tokens_are_no_target():
    positions, labels = separate_documents(
        torch.tensor([[4, 4, 4, 4, 1, 1, 4]]), torch.arange(7)[None]
    )
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 0]]
    assert labels.tolist() == [[-100, 1, 2, 3, -100, 5, -100]]


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_equal_the_documents_one_by_one(family):
    model = small_model(family)
    reference = float64_reference(model)
    ids, labels = batch_of(B, T)
    keep = random_keep(B, T)
    want: dict[str, torch.Tensor] = {}
    for grads in one_by_one(
        lambda b, t: lc.oracle.filtered_grads(reference, ids[b, t], labels[b, t], keep[b, t], "sum")
    ):
        want = {name: want.get(name, 0) + grad for name, grad in grads.items()}
    model = lc.convert(model.double())
    loss = lc.token_losses(model, ids, labels, document_ids=DOCUMENTS).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-10


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_losses_equal_the_documents_one_by_one(training, converted):
    model = small_model("llama").double()
    model = (lc.convert(model) if converted else model).train(training)
    ids, labels = batch_of(B, T)
    packed = lc.token_losses(model, ids, labels, document_ids=DOCUMENTS)
    alone = one_by_one(lambda b, t: lc.token_losses(model, ids[b, t], labels[b, t]))
    want = torch.cat([losses.flatten() for losses in alone])
    assert (packed.flatten() - want).abs().max() < 1e-6  # Hugging Face's norms are float32 inside


def test_the_selector_and_its_reference_see_the_documents():
    ids, labels = batch_of(B, T, holes=0.0)
    reference = small_model("llama", seed=5).double()
    module = torch.nn.Module()
    module.model = small_model("llama").double()
    Filtering(0.5, "excess_loss", reference).attach(module, 0, torch.device("cpu"))
    out = module.model(input_ids=ids, labels=labels, document_ids=DOCUMENTS)
    theirs = lc.token_losses(reference.eval(), ids, labels, document_ids=DOCUMENTS)
    _, masked = separate_documents(DOCUMENTS, labels)
    want = lc.select(out.token_losses, theirs, masked, keep=0.5)
    assert out.keep.equal(want)
    assert int(want.sum()) == 31  # half of 2 * 33 tokens less 5 that start a document, rounded up


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"document_ids": DOCUMENTS[:, :-1]}, r"document_ids must be \(B, T\) = \(2, 33\)"),
        ({"document_ids": DOCUMENTS, "position_ids": DOCUMENTS}, "leave position_ids out"),
        (
            {"document_ids": DOCUMENTS, "attention_mask": DOCUMENTS - 3},
            "a document id of its own and labels of -100",
        ),
    ],
)
def test_what_does_not_go_with_documents_is_refused(inputs, message):
    model = lc.convert(small_model("llama"))
    ids, labels = batch_of(B, T)
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, labels=labels, **inputs)
