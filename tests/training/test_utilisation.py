"""MFU against a count by hand, and what a CPU shows."""

import pytest
import torch

from lightning_collider.eval.flops import step_flops
from lightning_collider.training.callbacks import ProgressBar
from lightning_collider.training.utilisation import Utilisation, utilisation_of
from tests.conftest import small_llama


def test_mfu_by_hand():
    """10 linear weights, attention of width 4, 1 block, 3 tokens: 6 causal pairs, 8 FLOPs each.

    A sequence's forward is 2*3*10 + 2*6*8 = 156, its dense backward 4*3*10 + 5*6*8 = 360. With half
    of the rows: 4*1.5*10 + (5*1.5 + 3*1.5)*8 = 156.
    """
    found = Utilisation(10, 4, 1, length=3, peak=1000.0)
    assert found.row(tokens_per_s=3.0, kept_share=1.0) == {"mfu": 0.516, "mfu_executed": 0.516}
    half = found.row(tokens_per_s=3.0, kept_share=0.5)
    assert half == pytest.approx({"mfu": 0.516, "mfu_executed": 0.312})


def test_executed_flops_are_those_of_random_masks():
    found = Utilisation(1000, 64, 2, length=128, peak=None).flops(0.6)
    masks = torch.rand(400, 128, generator=torch.Generator().manual_seed(0)) < 0.6
    counted = step_flops(1000, 64, 2, masks)
    assert found.forward == counted.forward / 400
    assert found.filtered_backward == pytest.approx(counted.filtered_backward / 400, rel=0.01)


def test_a_model_is_counted_and_a_cpu_has_no_peak():
    model = small_llama()  # the head is one of its linear layers
    config = model.config
    found = utilisation_of(model, 16, "32-true", devices=2)
    linear = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert found.linear_parameters == linear and found.layers == config.num_hidden_layers
    assert found.attention_width == model.model.layers[0].self_attn.q_proj.out_features
    if not torch.cuda.is_available():
        assert found.row(100.0, 0.6) == {}


def test_the_bar_says_what_it_does_not_know(monkeypatch):
    shown = {"v_num": 3, "loss_kept": 2.0}
    bar = "lightning.pytorch.callbacks.TQDMProgressBar.get_metrics"
    monkeypatch.setattr(bar, lambda *_: dict(shown))
    assert ProgressBar().get_metrics(None, None) == {"loss_kept": 2.0, "mfu": "n/a"}
    shown["mfu"] = 0.4
    assert ProgressBar().get_metrics(None, None) == {"loss_kept": 2.0, "mfu": 0.4}
