"""The language model in a federation: its correction's filtered gradient, and a short run."""

import math

import pytest
import torch

import lightning_collider as lc
from lightning_collider.federated.client import Trainer
from lightning_collider.federated.code import Code
from lightning_collider.federated.distillation import correction_step
from lightning_collider.federated.messages import weights_of
from lightning_collider.federated.run import train
from lightning_collider.federated.settings import TaskConfig
from lightning_collider.federated.state import Journal
from lightning_collider.federated.tasks import seeded
from tests.conftest import relative_error
from tests.federated.small import recipe, same_weights

TINY = {
    "clients": 3,
    "sequences": 8,
    "length": 32,
    "batch_size": 4,
    "width": 32,
    "layers": 2,
    "engine": "oracle",
}


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_correction_has_the_filtered_gradient(keep):
    """With lam = 0 it is cross-entropy: the oracle's gradient for the same kept rows."""
    task = Code(seed=0, keep=keep, **TINY)
    trainer = Trainer(task, weights_of(task.module()), seed=5)
    (batch, _) = task.batches(0, seed=1)
    kept = []
    original = lc.backward_filter

    def watch(loss, rows):
        kept.append(rows)
        return original(loss, rows)

    lc.backward_filter = watch
    try:
        with seeded(7):
            loss = correction_step(trainer.wrapped, task.module().eval(), batch, 0.0, 1.0)
    finally:
        lc.backward_filter = original
    trainer.fabric.backward(loss)
    trainer.fabric.clip_gradients(trainer.wrapped, trainer.optimizer, max_norm=1e9)  # normalises
    plain = task.module().model
    want = lc.oracle.filtered_grads(plain, batch["input_ids"], batch["labels"], kept[0])
    got = {n: p.grad for n, p in trainer.module.model.named_parameters()}
    assert kept[0].sum() == round(keep * 4 * 31)
    assert relative_error(got, want) < 1e-5


def test_tied_weights_are_sent_once():
    sent = weights_of(Code(seed=0, **TINY).module())
    assert "model.model.embed_tokens.weight" in sent and "model.lm_head.weight" not in sent


def test_federation_of_language_models_learns_and_repeats(caplog):
    caplog.set_level("INFO", "lightning.pytorch")
    chosen = recipe("fedadt", {"steps": 1}, server={"max_updates": 9})
    chosen.task = TaskConfig("code", TINY)
    first, again = Journal(), Journal()
    weights = train(chosen, first).weights
    assert same_weights(weights, train(chosen, again).weights) and first.rows == again.rows
    bits = [row["bits_per_byte"] for row in first.of("evaluation")]
    # A byte costs log2(257) = 8.0 untrained, and less where spaces follow spaces: the tied head
    # prefers the byte that it has just read.
    assert bits[0] == pytest.approx(math.log2(257), abs=0.5) and bits[-1] < bits[0] - 0.5
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert "modules filtered" not in caplog.text  # once a message would bury the progress


def test_too_many_clients_for_the_library_are_named():
    with pytest.raises(ValueError, match=r"fewer than 8 sequences of 9999999 bytes"):
        Code(seed=0, **{**TINY, "length": 9_999_999})
