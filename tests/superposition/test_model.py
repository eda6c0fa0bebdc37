"""A model on bags equals a naive reference: loops over bags and targets in plain autograd."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lightning_collider as lc
from lightning_collider.superposition.bags import document_starts, make_bags
from lightning_collider.superposition.loss import bag_weights
from lightning_collider.superposition.model import (
    BagForward,
    BagSettings,
    superpose_embeddings,
    superposed_loss,
)
from tests.conftest import batch_of, float64_reference, grads_of, relative_error, small_model

NO = -100
PLACES = 4


def naive_bags(ids, labels, starts, bag_size):
    """Lists of (tokens, targets) of a row's first S / s bags, one token at a time."""
    bags = []
    for position, (token, label) in enumerate(zip(ids.tolist(), labels.tolist(), strict=True)):
        begins = position == 0 or bool(starts[position])
        if begins or len(bags[-1]["tokens"]) == bag_size:
            same = bool(bags) and not begins
            bags.append({"tokens": [], "labels": [], "follows": same})
        bags[-1]["tokens"].append(token)
        bags[-1]["labels"].append(label)
    bags = bags[: len(ids) // bag_size]
    behind = [*bags[1:], {"labels": [], "follows": False}]
    return [
        (bag["tokens"], after["labels"] if after["follows"] else [])
        for bag, after in zip(bags, behind, strict=True)
    ]


def naive_loss(model, ids, labels, starts, bag_size, weights=None, **inputs):
    """Sum over rows, bags and targets of cross-entropy, over the weight of the valid pairs."""
    weights = [1.0] * bag_size if weights is None else weights.tolist()
    rows = [naive_bags(*row, bag_size) for row in zip(ids, labels, starts, strict=True)]
    embed = model.get_input_embeddings()
    embeds = torch.stack(
        [
            torch.stack([embed(torch.tensor(tokens)).sum(0) / len(tokens) for tokens, _ in row])
            for row in rows
        ]
    )
    logits = model(inputs_embeds=embeds, use_cache=False, **inputs).logits
    total, count = 0.0, 0.0
    for b, row in enumerate(rows):
        for t, (_, targets) in enumerate(row):
            for weight, target in zip(weights, targets, strict=False):
                if target != NO:
                    total = total + weight * F.cross_entropy(logits[b, t], torch.tensor(target))
                    count += weight
    return total / count


def grads_from(model, loss):
    model.zero_grad()
    loss.backward()
    return grads_of(model)


FAMILIES = [("llama", False), ("llama", True), ("qwen2", False), ("phi", False)]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("weights", [None, "inverse"])
def test_loss_and_gradients_equal_the_naive_reference(family, tied, weights):
    model = float64_reference(small_model(family, tie_word_embeddings=tied))
    ids, labels = batch_of(2, 6 * PLACES)
    weights = None if weights is None else bag_weights(weights, PLACES)
    found = superposed_loss(model, ids, labels, BagSettings(PLACES, weights))
    got = grads_from(model, found.loss)
    none = torch.zeros_like(ids, dtype=torch.bool)
    want = naive_loss(model, ids, labels, none, PLACES, weights)
    assert abs(found.loss.item() - want.item()) < 1e-12
    assert relative_error(got, grads_from(model, want)) < 1e-12
    assert found.floor < found.loss
    assert (found.positions, int(found.tokens)) == (12, 48)


def test_bags_of_one_are_ordinary_training():
    model = float64_reference(small_model("llama"))
    ids, labels = batch_of(2, 24)
    found = superposed_loss(model, ids, labels, BagSettings(1))
    got = grads_from(model, found.loss)
    want = lc.token_losses(model, ids, labels).sum() / (labels[:, 1:] != NO).sum()
    assert abs(found.loss.item() - want.item()) < 1e-12
    assert relative_error(got, grads_from(model, want)) < 1e-12
    assert found.floor == 0


def packed(ids):
    """Positions of documents of 9 and 15 tokens in one row, of one of 24 in the other."""
    return torch.tensor([[*range(9), *range(15)], [*range(24)]])


def test_packed_documents_equal_the_naive_reference():
    model = float64_reference(small_model("llama"))
    ids, labels = batch_of(2, 24)
    positions = packed(ids)
    found = superposed_loss(model, ids, labels, BagSettings(PLACES), position_ids=positions)
    got = grads_from(model, found.loss)
    # 9 tokens are 3 bags, of which the third holds one token; 15 are 4, of which 3 fit.
    counted = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    starts = document_starts(ids, position_ids=positions)
    want = naive_loss(model, ids, labels, starts, PLACES, position_ids=counted)
    assert abs(found.loss.item() - want.item()) < 1e-12
    assert relative_error(got, grads_from(model, want)) < 1e-12
    assert int(found.tokens) == 9 + 12 + 24


def test_a_document_does_not_see_another():
    model = float64_reference(small_model("llama"))
    ids, labels = batch_of(1, 24)
    positions = packed(ids)[:1]
    labels[:, :9] = NO  # only the second document has a loss
    before = superposed_loss(model, ids, labels, BagSettings(PLACES), position_ids=positions).loss
    ids[:, :9] = (ids[:, :9] + 5) % 97
    after = superposed_loss(model, ids, labels, BagSettings(PLACES), position_ids=positions).loss
    assert abs(before - after).item() < 1e-12


def test_a_separator_ends_bags_and_targets():
    model = float64_reference(small_model("llama"))
    ids, labels = batch_of(2, 24)
    ids[0, 4], ids[1, [9, 10]] = 96, 96
    settings = BagSettings(PLACES, separator=96)
    found = superposed_loss(model, ids, labels, settings)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, :-1] == 96
    want = naive_loss(model, ids, labels, starts, PLACES)
    assert abs(found.loss.item() - want.item()) < 1e-12


def test_padding_on_the_right_changes_nothing():
    model = float64_reference(small_model("llama"))
    ids, labels = batch_of(1, 18)
    want = superposed_loss(model, ids[:, :16], labels[:, :16], BagSettings(PLACES))
    padded = [
        torch.cat([x[:, :16], torch.full((1, 8), fill)], 1) for x, fill in ((ids, 0), (labels, NO))
    ]
    mask = torch.tensor([[1] * 16 + [0] * 8])
    got = superposed_loss(model, *padded, BagSettings(PLACES), attention_mask=mask)
    assert abs(got.loss - want.loss).item() < 1e-12
    assert int(got.tokens) == 16


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_converted_model_takes_the_same_dense_step_by_the_operators(family, packed):
    model = small_model(family).double()
    converted = lc.convert(copy.deepcopy(model))
    model = float64_reference(model)
    ids, labels = batch_of(2, 24)
    inputs = {"position_ids": torch.arange(24).remainder(10)[None]} if packed else {}
    want = superposed_loss(model, ids, labels, BagSettings(PLACES), **inputs)
    got = superposed_loss(converted, ids, labels, BagSettings(PLACES), **inputs)
    # Only the operators compute norms in float64; Hugging Face's own are float32 inside.
    assert abs(got.loss.item() - want.loss.item()) < 1e-12
    got_grads, want_grads = (grads_from(m, x.loss) for m, x in ((converted, got), (model, want)))
    assert relative_error(got_grads, want_grads) < 1e-12


def test_embeddings_of_a_bag_are_summed_in_float32():
    embedding = torch.nn.Embedding(3, 1, dtype=torch.bfloat16)
    embedding.weight.data = torch.tensor([[256.0], [1.0], [2.0]], dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1, 1, 2]])
    found = superpose_embeddings(embedding, make_bags(ids, ids, 4))
    assert found.dtype == torch.bfloat16
    assert found.item() == 65.0  # in bfloat16 256 + 1 is 256, and the mean 64.5


def test_a_head_that_is_not_plain_is_called():
    model = small_model("llama").double()
    ids, labels = batch_of(2, 24)
    want = superposed_loss(model, ids, labels, BagSettings(PLACES)).loss
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    got = superposed_loss(model, ids, labels, BagSettings(PLACES)).loss
    assert abs(got - want).item() > 1e-3
    with torch.no_grad():
        model.lm_head._forward_hooks.clear()
        model.lm_head.weight *= 2
    want = superposed_loss(model, ids, labels, BagSettings(PLACES)).loss
    assert abs(got - want).item() < 1e-12


def test_a_model_that_caps_its_logits_keeps_its_cap():
    from transformers import AutoModelForCausalLM, Gemma2Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    config = Gemma2Config(
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        final_logit_softcapping=0.05,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    ids, labels = batch_of(1, 24)
    found = superposed_loss(model, ids, labels, BagSettings(PLACES))
    none = torch.zeros_like(ids, dtype=torch.bool)
    want = naive_loss(model, ids, labels, none, PLACES).item()
    assert found.loss.item() == pytest.approx(want, rel=1e-6)
    config.final_logit_softcapping = None
    uncapped = superposed_loss(model, ids, labels, BagSettings(PLACES)).loss.item()
    assert abs(uncapped - want) > 1e-3


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run().backward()
    return counter.get_total_flops()


def test_a_step_on_bags_costs_the_flops_of_an_ordinary_one():
    model = small_model("llama", attn_implementation="eager")
    ids, labels = batch_of(2, 32 * PLACES)
    superposed = flops(lambda: superposed_loss(model, ids, labels, BagSettings(PLACES)).loss)
    ordinary = flops(lambda: model(input_ids=ids[:, :32], labels=labels[:, :32]).loss)
    assert superposed == pytest.approx(ordinary, rel=0.02)


class Installed:
    """A small model with a BagForward, and what it observed."""

    def __init__(self, settings=None, family="llama"):
        self.model = small_model(family)
        self.seen = []
        self.forward = BagForward(self.model, self.seen.append)
        self.forward.settings = settings


def test_the_forward_comes_and_goes():
    ids, labels = batch_of(1, 24)
    case = Installed()
    want = small_model("llama")(input_ids=ids, labels=labels).loss
    assert case.model(input_ids=ids, labels=labels).loss.equal(want)
    assert [(int(x.tokens), x.positions) for x in case.seen] == [(24, 24)]
    case.forward.settings = BagSettings(PLACES)
    out = case.model(ids, labels=labels)
    assert out.logits is None and not out.loss.equal(want)
    assert [(int(x.tokens), x.positions) for x in case.seen[1:]] == [(24, 6)]
    case.forward.remove()
    assert "forward" not in case.model.__dict__
    assert case.model(input_ids=ids, labels=labels).loss.equal(want)


def test_evaluation_and_copies_are_ordinary():
    ids, labels = batch_of(1, 24)
    case = Installed(BagSettings(PLACES))
    plain = small_model("llama").eval()
    with torch.no_grad():
        assert case.model(input_ids=ids, labels=labels).loss.equal(
            plain(input_ids=ids, labels=labels).loss
        )
    copied = copy.deepcopy(case.model)
    assert copied(input_ids=ids, labels=labels).loss.equal(plain(input_ids=ids, labels=labels).loss)
    assert case.model.eval()(input_ids=ids).logits.equal(plain(input_ids=ids).logits)
    assert case.model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 27)
    assert case.seen == []


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"labels": None}, "called with labels"),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 24, 64)}, "called with input_ids"),
        ({"inputs_embeds": torch.ones(1, 24, 64)}, "inputs_embeds has no meaning"),
        ({"num_items_in_batch": 3}, "num_items_in_batch has no meaning"),
        ({"token_type_ids": torch.zeros(1, 24)}, "token_type_ids has one value a token"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, r"attention_mask must be \(B, S\)"),
        ({"position_ids": torch.arange(12)[None]}, r"position_ids must be \(B, S\)"),
    ],
)
def test_mistakes(extra, message):
    ids, labels = batch_of(1, 24)
    case = Installed(BagSettings(PLACES))
    with pytest.raises(ValueError, match=message):
        case.model(**{"input_ids": ids, "labels": labels, **extra})


def test_backward_filter_is_refused_on_bags():
    ids, labels = batch_of(1, 24)
    loss = Installed(BagSettings(PLACES)).model(input_ids=ids, labels=labels).loss
    with pytest.raises(ValueError, match="superposed phase trains on bags"):
        lc.backward_filter(loss, torch.ones_like(ids, dtype=torch.bool))
