"""Fabric's strategy on one device."""

import copy

import lightning as L
import pytest
import torch

import lightning_collider as lc
from tests.conftest import relative_error, small_llama
from tests.strategies.lightning_module import Batches
from tests.strategies.test_trainer import excess_loss_masks, steps_by_hand

LR = 0.1


def setup(strategy, **settings):
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy, **settings)
    fabric.launch()
    model = small_llama(layers=2).double()
    start = copy.deepcopy(model)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LR))
    return fabric, model, optimizer, start


def batches(n):
    return [{k: v[None] for k, v in item.items()} for item in Batches(n).items]


def weights(model):
    return {n: p.detach().clone() for n, p in model.module.named_parameters()}


@pytest.mark.parametrize("window", [1, 2])
def test_filtered_steps_equal_the_oracles(window):
    reference = small_llama(seed=9, layers=2).double()
    strategy = lc.fabric.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference)
    fabric, model, optimizer, start = setup(strategy)
    for i, batch in enumerate(batches(4)):
        with fabric.no_backward_sync(model, enabled=(i + 1) % window != 0):
            fabric.backward(model(**batch).loss)
        if (i + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    want = steps_by_hand(start, Batches(4).items, excess_loss_masks(reference), window)
    assert relative_error(weights(model), want) < 1e-6  # Fabric hands the loss over in float32
    assert any(not weights(model)[n].equal(p) for n, p in start.named_parameters())


def test_a_model_in_eval_mode_is_put_in_train_mode():
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="collider")
    fabric.launch()
    model = fabric.setup_module(small_llama(layers=2).eval())
    assert all(m.training for m in model.module.modules())
    (batch,) = batches(1)
    loss = model(**batch).loss
    lc.backward_filter(loss, batch["labels"] > 0)  # raises for a model in eval mode


def test_clipping_sees_the_normalised_gradient():
    fabric, model, optimizer, start = setup("collider")
    (batch,) = batches(1)
    fabric.backward(model(**batch).loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
    keep = torch.ones_like(batch["labels"], dtype=torch.bool)
    want = lc.oracle.filtered_grads(start, batch["input_ids"], batch["labels"], keep)
    assert norm.item() == pytest.approx(
        torch.stack([g.norm() for g in want.values()]).norm().item(), rel=1e-5
    )
    optimizer.step()  # normalises once only
    change = [(p - q).norm() for p, q in zip(model.parameters(), start.parameters(), strict=True)]
    assert torch.stack(change).norm().item() == pytest.approx(LR * 1e-3, rel=1e-4)


def test_backward_filter_with_the_registered_name():
    fabric, model, optimizer, start = setup("collider")
    (batch,) = batches(1)
    keep = torch.rand(batch["labels"].shape) < 0.5
    loss = model(**batch).loss
    lc.backward_filter(loss, keep)
    fabric.backward(loss)
    optimizer.step()
    want = steps_by_hand(start, Batches(1).items, lambda *_: keep, window=1)
    assert relative_error(weights(model), want) < 1e-6


def test_save_load_and_resume(tmp_path):
    def run(n, resume=None):
        strategy = lc.fabric.ColliderStrategy(keep=0.5, selector="random", keep_warmup_steps=6)
        fabric, model, optimizer, _ = setup(strategy)
        done = 0
        if resume is not None:
            state = {"model": model, "optimizer": optimizer, "done": 0}
            fabric.load(resume, state)
            done = state["done"]
        for i in range(done, n):
            fabric.backward(model(**batches(6)[i]).loss)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(tmp_path / f"{n}.ckpt", {"model": model, "optimizer": optimizer, "done": n})
        return weights(model)

    whole = run(6)
    run(3)
    resumed = run(6, resume=tmp_path / "3.ckpt")
    assert all(resumed[n].equal(p) for n, p in whole.items())


def test_losses_of_one_step_must_come_from_one_model():
    fabric, model, _, _ = setup("collider")
    (batch,) = batches(1)
    fabric.backward(model(**batch).loss)
    with pytest.raises(ValueError, match="one optimizer step"):
        fabric.backward(next(iter(model.parameters())).sum())
