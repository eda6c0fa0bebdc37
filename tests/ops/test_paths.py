"""The operators' code for other devices, run on the CPU against the oracle.

The path in plain ATen calls runs as it is; the fused one on stand-ins for CUDA's kernels, which
shows that the code around the kernels is right, and not that the kernels are.
"""

import contextlib

import pytest
import torch

import lightning_collider as lc
from lightning_collider import ops
from tests.conftest import (
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_model,
)
from tests.ops.stand_ins import StandIns

B, T = 3, 150  # 450 rows, 270 of them kept: more than the 256 queries of a chunk
LAYERS = 2
KEEPS = {
    "random": random_keep(B, T),
    "a sequence without": random_keep(B, T) & (torch.arange(B) != 1)[:, None],
    "none": torch.zeros(B, T, dtype=torch.bool),
    "all": torch.ones(B, T, dtype=torch.bool),
}


@pytest.fixture
def on(monkeypatch):
    """Gives a context in which every forward and backward takes a path."""
    plain = ops.kept_rows

    def forced(path):
        def kept_rows(starts):
            rows = plain(starts)
            rows.forced_path = getattr(ops.load().Path, path)
            return rows

        monkeypatch.setattr(ops, "kept_rows", kept_rows)
        return StandIns() if path == "fused" else contextlib.nullcontext()

    return forced


def grads(family, keep, context, **inputs):
    """Gradients of a converted float64 model, and the oracle's."""
    model = small_model(family, layers=LAYERS)
    reference = float64_reference(model)
    ids, labels = batch_of(B, T)
    model = lc.convert(model.double())
    with context:
        loss = lc.token_losses(model, ids, labels, **inputs).sum()
        lc.backward_filter(loss, keep)
        loss.backward()
    return grads_of(model), lc.oracle.filtered_grads(reference, ids, labels, keep, "sum", **inputs)


@pytest.mark.parametrize("path", ["aten", "fused"])
@pytest.mark.parametrize("mask", KEEPS)
def test_masks(path, mask, on):
    got, want = grads("llama", KEEPS[mask], on(path))
    assert relative_error(got, want) < 1e-10


@pytest.mark.parametrize("path", ["aten", "fused"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi"])
def test_families(path, family, on):
    got, want = grads(family, KEEPS["random"], on(path))
    assert relative_error(got, want) < 1e-10


@pytest.mark.parametrize("path", ["aten", "fused"])
def test_documents_of_several_lengths(path, on):
    lengths = [1, 40, 109]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(B, T)
    got, want = grads("llama", KEEPS["random"], on(path), position_ids=positions)
    assert relative_error(got, want) < 1e-10


def test_a_target_outside_the_vocabulary_stops_the_kernel():
    """A GPU's targets are not looked at beforehand, which would wait for it: gather refuses."""
    rows = ops.kept_rows([0, 3])
    rows.forced_path = ops.load().Path.aten
    hidden, weight = torch.randn(1, 3, 4), torch.randn(5, 4)
    for wrong in (-1, -101, 5):
        targets = torch.tensor([[0, -100, wrong]])
        with pytest.raises(RuntimeError, match="out of bounds"):
            ops.load().linear_cross_entropy(hidden, weight, None, targets, rows)


def test_the_fused_path_calls_the_fused_kernels(on):
    context = on("fused")
    grads("llama", KEEPS["random"], context)
    norms = 2 * LAYERS + 1
    assert context.calls == {
        "flash_forward": LAYERS,
        "flash_backward": LAYERS,
        "rms_backward": norms,
    }
