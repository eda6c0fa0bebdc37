"""The Triton kernels, through Triton's interpreter on the CPU: alone, and inside the operators."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import lightning_collider as lc
from lightning_collider import ops
from tests.conftest import (
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
)
from tests.ops.stand_ins import StandIns

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[triton]'")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run compiled, in test_gpu.py", allow_module_level=True)

from lightning_collider.ops import triton_kernels


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS = torch.tensor([0, 3, 4, 8])  # of 9


@pytest.mark.parametrize("rows", [ROWS, None], ids=["gathered", "all"])
def test_swiglu_backward(rows):
    gate, up = randn(9, 20).requires_grad_(), randn(9, 20, seed=1).requires_grad_()
    kept = slice(None) if rows is None else rows
    act = (F.silu(gate) * up)[kept]
    grad = randn(*act.shape, seed=2)
    want = torch.autograd.grad(act, (gate, up), grad)
    got = triton_kernels.swiglu_backward(grad, gate.detach(), up.detach(), rows)
    for g, w in zip(got, (act, want[0][kept], want[1][kept]), strict=True):
        assert torch.allclose(g, w, atol=1e-6)


@pytest.mark.parametrize("rows", [ROWS, None], ids=["gathered", "all"])
def test_rms_backward(rows):
    x, weight = randn(9, 20).requires_grad_(), randn(20, seed=1).requires_grad_()
    rstd = (x.detach().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    kept = slice(None) if rows is None else rows
    y = F.rms_norm(x, (20,), weight, 1e-5)[kept]
    grad = randn(*y.shape, seed=2)
    want = torch.autograd.grad(y, (x, weight), grad)
    got = triton_kernels.rms_backward(grad, x.detach(), weight.detach(), rstd, rows)
    assert torch.allclose(got[0], want[0][kept], atol=1e-6)
    assert torch.allclose(got[1], want[1], atol=1e-5)


def test_no_kept_rows():
    none = torch.empty(0, dtype=torch.int64)
    grads = triton_kernels.rms_backward(randn(0, 20), randn(9, 20), randn(20), randn(9, 1), none)
    assert grads[0].shape == (0, 20) and (grads[1] == 0).all()
    for grad in triton_kernels.swiglu_backward(randn(0, 20), randn(9, 20), randn(9, 20), none):
        assert grad.shape == (0, 20)


@pytest.mark.parametrize("r", [8, 6], ids=["whole heads", "a part"])
def test_rotate(r):
    x = randn(6, 3, 8)
    angle = randn(3, r // 2, seed=1)
    cos, sin = (torch.cat([f(angle), f(angle)], -1) for f in (torch.cos, torch.sin))
    got = x.clone()
    triton_kernels.rotate(got, cos, sin, False)
    first, second = x[..., : r // 2], x[..., r // 2 : r]
    turned = (
        torch.complex(first, second)
        * torch.polar(torch.ones(6, r // 2), angle.repeat(2, 1))[:, None]
    )
    want = torch.cat([turned.real, turned.imag, x[..., r:]], -1)
    assert torch.allclose(got, want, atol=1e-6)
    triton_kernels.rotate(got, cos, sin, True)
    assert torch.allclose(got, x, atol=1e-6)


def test_dropped_keys():
    # Two segments that share blocks of queries and of keys; heads of 12, padded to 16 inside.
    keep = random_keep(1, 250, share=0.5)[0]
    segment = (torch.arange(250) >= 90).long()
    rows, dropped = keep.nonzero()[:, 0], (~keep).nonzero()[:, 0]
    q, grad, out, start = (randn(len(rows), 4, 12, seed=seed) for seed in range(4))
    k, v = randn(250, 2, 12, seed=4), randn(250, 2, 12, seed=5)
    lse, scale = randn(len(rows), 4, seed=6) + 3, 0.3
    seen = (dropped < rows[:, None]) & (segment[dropped] == segment[rows][:, None])
    first = torch.searchsorted(segment[dropped], segment[rows])
    last = first + seen.sum(1)
    got = start.clone()
    triton_kernels.dropped_keys(got, q, grad, out, lse, k, v, dropped, first, last, scale)

    k_heads, v_heads = (x[dropped].repeat_interleave(2, dim=1) for x in (k, v))
    p = (torch.einsum("qhd,khd->qhk", q, k_heads) * scale - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->qhk", grad, v_heads) - (grad * out).sum(-1, keepdim=True)
    ds = p * dp * scale * seen[:, None]
    want = start + torch.einsum("qhk,khd->qhd", ds, k_heads)
    assert len(rows) > 64 < len(dropped) and torch.allclose(got, want, atol=1e-4)


def test_a_model_with_them(monkeypatch):
    plain = ops.kept_rows

    def kept_rows(starts):
        rows = plain(starts)
        rows.forced_path = ops.load().Path.fused
        return rows

    monkeypatch.setattr(ops, "kept_rows", kept_rows)
    batch, length = 2, 20
    keep = random_keep(batch, length)
    model = small_llama(layers=1)
    reference = float64_reference(model)
    ids, labels = batch_of(batch, length)
    want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum")
    model = lc.convert(model)
    with (
        torch.library._scoped_library("lightning_collider", "IMPL") as library,
        StandIns() as stand_ins,
    ):
        triton_kernels.register(library, "CPU")
        loss = lc.token_losses(model, ids, labels).sum()
        lc.backward_filter(loss, keep)
        loss.backward()
    assert relative_error(grads_of(model), want) < 1e-5
    assert stand_ins.flash_rows == [int(keep.sum())]  # the dropped keys are our kernel's part
    assert stand_ins.ours == {"dropped_keys", "rotate", "swiglu_backward", "rms_backward"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_they_compile_for_gpus(architecture):
    command = [sys.executable, "-m", "tests.ops.compile_kernels", str(architecture)]
    plain = {**os.environ, "TRITON_INTERPRET": "0"}
    out = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0 and len(out.stdout.splitlines()) == 4, out.stderr
