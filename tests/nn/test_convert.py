"""What convert() changes, and what it leaves alone."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import lightning_collider as lc
from lightning_collider.filtering.selectors import has_target
from tests.conftest import (
    batch_of,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
)


def test_names_objects_and_classes_stay():
    model = small_llama(tied=True)
    before = dict(model.named_parameters())
    converted = lc.convert(model)
    assert converted is model and isinstance(model, LlamaForCausalLM)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert lc.convert(model) is model  # a second time is no mistake


def test_save_pretrained_and_reload(tmp_path):
    model = lc.convert(small_llama())
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is LlamaForCausalLM
    weights = model.state_dict()
    assert reloaded.state_dict().keys() == weights.keys()
    assert all(value.equal(weights[name]) for name, value in reloaded.state_dict().items())


def test_eval_is_the_hugging_face_model():
    model = small_llama()
    plain = copy.deepcopy(model).eval()
    model = lc.convert(model).eval()
    ids, labels = batch_of(2, 9)
    ours, theirs = model(input_ids=ids, labels=labels), plain(input_ids=ids, labels=labels)
    assert ours.logits.equal(theirs.logits) and ours.loss.equal(theirs.loss)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    assert model(ids, attention_mask=mask).logits.equal(plain(ids, attention_mask=mask).logits)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **settings).equal(plain.generate(ids, **settings))
    model.train()
    with torch.no_grad():
        assert model(ids).logits.equal(plain(ids).logits)


def test_training_forward_gives_hugging_faces_loss_and_logits():
    model = small_llama().double()
    plain = copy.deepcopy(model)
    model = lc.convert(model)
    ids, labels = batch_of(2, 9)
    out, theirs = model(input_ids=ids, labels=labels), plain(input_ids=ids, labels=labels)
    assert out.logits is None
    assert out.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert (model(input_ids=ids).logits - theirs.logits).abs().max() < 1e-6
    assert out.token_losses.shape == ids.shape
    assert (out.token_losses[~has_target(labels)] == 0).all()
    n_items = torch.tensor(7)
    ours = model(input_ids=ids, labels=labels, num_items_in_batch=n_items).loss
    assert ours.item() == pytest.approx(out.token_losses.sum().item() / 7)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), labels=labels)
    assert embedded.loss.item() == pytest.approx(out.loss.item())
    states = model(input_ids=ids, labels=labels, output_hidden_states=True).hidden_states
    want = plain(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == len(want)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(states, want, strict=True))


def test_token_losses_of_an_unconverted_model():
    model = small_llama().double()
    ids, labels = batch_of(2, 9)
    plain = lc.token_losses(model, ids, labels)
    assert plain.requires_grad and plain.shape == ids.shape
    converted = lc.token_losses(lc.convert(model), ids, labels)
    assert (plain - converted).abs().max() < 1e-6


@pytest.mark.parametrize("convert", [False, True])
def test_token_losses_are_zero_where_padding_would_predict(convert):
    model = small_llama().double()
    model = lc.convert(model) if convert else model
    ids, labels = batch_of(2, 9, holes=0.0)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 7:] = 0
    losses = lc.token_losses(model, ids, labels, attention_mask=mask)
    padding = [(0, 0), (0, 1), (0, 2), (1, 7), (1, 8)]
    expected = torch.ones(2, 9, dtype=torch.bool)
    expected[:, -1] = False
    for place in padding:
        expected[place] = False
    assert (losses > 0).equal(expected)


def test_copy_and_pickle():
    model = lc.convert(small_llama(layers=1))
    ids, labels = batch_of(1, 5)
    want = model(input_ids=ids, labels=labels).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert twin(input_ids=ids, labels=labels).loss.equal(want)
        assert twin.lm_head.weight is not model.lm_head.weight


class TwiceMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def adapter(model):
    class LowRank(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.extra = base, nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.extra(x)

    attention = model.model.layers[1].self_attn
    attention.k_proj = LowRank(attention.k_proj).to(attention.k_proj.weight.dtype)
    return "model.layers.1.self_attn", "k_proj is a LowRank"


def own_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.__class__ = TwiceMLP
    return "model.layers.0.mlp", "TwiceMLP"


def hook(model):
    model.model.layers[2].mlp.down_proj.register_forward_hook(lambda m, args, out: out * 1.5)
    return "model.layers.2.mlp", "down_proj has a hook"


def activation_hook(model):
    model.model.layers[2].mlp.act_fn.register_forward_hook(lambda m, args, out: out * 1.5)
    return "model.layers.2.mlp", "its activation has a hook"


class TwiceSiLU(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def own_activation(model):
    model.model.layers[0].mlp.act_fn = TwiceSiLU()
    return "model.layers.0.mlp", "its activation is TwiceSiLU, not SiLU"


def head_hook(model):
    model.lm_head.register_forward_hook(lambda m, args, out: out * 1.5)
    return "lm_head", "lm_head has a hook"


def parametrised(model):
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", Double())
    return "model.layers.0.self_attn", "ParametrizedLinear"


def replaced_forward(model):
    norm = model.model.layers[0].input_layernorm
    original = norm.forward
    norm.forward = lambda x: original(x) * 0.5
    return "model.layers.0.input_layernorm", "its forward was replaced"


# A class or a forward exchanged after conversion is the user's own business: it wraps the swapped
# one.
BOTH = (adapter, hook, activation_hook, own_activation, head_hook, parametrised)
EXTRAS = [(extra, "before") for extra in (*BOTH, own_forward, replaced_forward)]
EXTRAS += [(extra, "after") for extra in BOTH]


@pytest.mark.parametrize(("extra", "when"), EXTRAS, ids=lambda x: getattr(x, "__name__", x))
def test_what_cannot_be_swapped_stays_dense_exact_and_named(extra, when):
    model, oracle = small_llama().double(), small_llama().double()
    if when == "after":
        lc.convert(model)
    for target in (model, oracle):
        torch.manual_seed(5)
        name, reason = extra(target)
    lc.convert(model)
    dense = lc.coverage(model).dense
    assert list(dense) == [name] and reason in dense[name]
    assert name in str(lc.coverage(model))
    ids, labels = batch_of(2, 17)
    keep = random_keep(2, 17)
    want = lc.oracle.filtered_grads(oracle, ids, labels, keep, "sum")
    loss = lc.token_losses(model, ids, labels).sum()
    lc.backward_filter(loss, keep)
    loss.backward()
    assert relative_error(grads_of(model), want) < 1e-6  # Hugging Face's norms are float32 inside


def test_dropout_keeps_attention_dense():
    model = lc.convert(small_llama(attention_dropout=0.1))
    dense = lc.coverage(model).dense
    assert set(dense) == {f"model.layers.{i}.self_attn" for i in range(3)}
    assert all("attention_dropout is 0.1" in reason for reason in dense.values())


def test_an_attention_whose_keys_cannot_be_reached_is_refused():
    class Fused(LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model = small_llama()
    model.model.layers[0].self_attn.__class__ = Fused
    model = lc.convert(model)
    ids, labels = batch_of(1, 5)
    with pytest.raises(ValueError, match="k_proj and v_proj"):
        model(input_ids=ids, labels=labels)


def test_coverage_of_a_converted_model():
    coverage = lc.coverage(lc.convert(small_llama()))
    # 3 layers of 2 norms, attention and MLP; final norm; embedding; head.
    assert len(coverage.filtered) == 3 * 4 + 3 and coverage.dense == {}
    assert coverage.share == 1.0 and coverage.edges == ()
    oracle = lc.coverage(lc.convert(small_llama(), engine="oracle"))
    assert oracle.filtered == [] and set(oracle.dense.values()) == {"engine='oracle'"}
    with pytest.raises(ValueError, match="not converted"):
        lc.coverage(small_llama())


def test_coverage_counts_what_a_dense_module_costs_and_the_edges_of_the_last_backward():
    model = small_llama(layers=1)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, args, out: out)
    model = lc.convert(model)
    ids, labels = batch_of(2, 9)
    model(input_ids=ids, labels=labels, keep=random_keep(2, 9)).loss.backward()
    coverage = lc.coverage(model)
    # Width 64, MLP 96, key width 16, vocabulary 97.
    mlp, attention, head = 3 * 64 * 96, 2 * 64 * 64 + 2 * 64 * 16, 64 * 97
    assert coverage.share == pytest.approx((attention + head) / (mlp + attention + head))
    reasons = [reason for _, reason in coverage.edges if reason]
    # The dense MLP is an island: what it takes behind its border, and what it returns before it.
    # Compact: embedding, two norms and their two sums, attention, the border's outside, last norm.
    assert len(coverage.edges) == 10 and len(reasons) == 2
    assert "8 of 10 hidden states with compact gradients" in str(coverage)


def own_forward_model(**kwargs):
    class Mine(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    return Mine(small_llama(layers=1).config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "not a causal language model"),
        (lambda: LlamaForSequenceClassification(small_llama(layers=1).config), "not a causal"),
        (own_forward_model, "Mine has a forward of its own"),
    ],
)
def test_models_that_cannot_be_converted(model, message):
    with pytest.raises(ValueError, match=message):
        lc.convert(model())


def test_engines():
    with pytest.raises(ValueError, match="engine must be one of"):
        lc.convert(small_llama(layers=1), engine="cuda")
    with pytest.raises(ValueError, match="already converted"):
        lc.convert(lc.convert(small_llama(layers=1)), engine="oracle")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"labels": torch.full((1, 4), 97)},
            "labels hold 97, outside the model's vocabulary of 97",
        ),
        ({"labels": torch.full((1, 4), -3)}, "labels hold -3"),
        ({"attention_mask": torch.ones(1, 4, 4)}, "attention mask must be"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "padding between tokens"),
        ({"past_key_values": object()}, "generation"),
        ({"output_attentions": True}, "output_attentions"),
        ({"inputs_embeds": torch.ones(1, 4, 64)}, "exactly one of"),
        ({"keep": torch.ones(1, 3, dtype=torch.bool)}, "shape"),
    ],
)
def test_inputs_that_training_refuses(inputs, message):
    model = lc.convert(small_llama(layers=1))
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), **inputs)


def test_float16_is_refused_by_name():
    model = lc.convert(small_llama(layers=1)).half()
    ids, labels = batch_of(1, 4)
    with pytest.raises(ValueError, match="float16"):
        model(input_ids=ids, labels=labels)
