"""Single operators: layouts, dtypes, autocast, and what they refuse."""

import pytest
import torch
from torch.nn import functional as F

from lightning_collider import ops

B, T, D, V = 3, 11, 16, 37
KEEP = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.5


def kept_rows(keep=KEEP):
    rows = ops.kept_rows([T * b for b in range(B + 1)])
    if keep is not None:
        rows.set(keep, torch.device("cpu"))
    return rows


def leaf(*shape, dtype=torch.float64, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def head(x, w, b, targets, rows):
    return ops.linear_cross_entropy(x, w, b, targets, rows)


def reference_losses(x, w, b, targets):
    logits = F.linear(x, w, b).flatten(0, 1).double()
    return F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100).view(
        B, T
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_cross_entropy(dtype, bias, monkeypatch):
    x, w = leaf(B, T, D, dtype=dtype), leaf(V, D, dtype=dtype, seed=1)
    b = leaf(V, dtype=dtype, seed=2) if bias else None
    targets = torch.randint(0, V, (B, T)).masked_fill(torch.rand(B, T) < 0.3, -100)
    losses = head(x, w, b, targets, kept_rows())
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    weights = torch.rand(B, T)
    (losses * weights).sum().backward()
    want = [p.detach().double().requires_grad_() for p in (x, w, *([b] if bias else []))]
    wanted = reference_losses(want[0], want[1], want[2] if bias else None, targets)
    (wanted * weights * KEEP).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert torch.allclose(losses.double(), wanted, atol=tolerance, rtol=tolerance)
    for p, q in zip((x, w, *([b] if bias else [])), want, strict=True):
        assert p.grad.dtype == dtype
        assert (p.grad.double() - q.grad).abs().max() < tolerance * q.grad.abs().max()


@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [(torch.bfloat16, 60_000), (torch.float32, 120_000)],
    ids=["logits kept", "computed again"],
)
def test_linear_cross_entropy_never_holds_all_logits_in_float32(dtype, vocabulary):
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.numel = max(self.numel, out.numel())
            return out

    n = 600  # 36 and 72 million logits, 69 and 275 MiB: below and above the budget of 256 MiB
    x = torch.randn(1, n, 8, dtype=dtype, requires_grad=True)
    w = torch.randn(vocabulary, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, n))
    with Largest() as largest:
        head(x, w, None, targets, ops.kept_rows([0, n])).sum().backward()
    assert 0 < largest.numel <= 2**24
    logits = F.linear(x.float(), w.float())  # bfloat16 products are slow on many processors
    want = torch.autograd.grad(F.cross_entropy(logits[0], targets[0], reduction="sum"), (x, w))
    for p, q in zip((x, w), want, strict=True):
        assert (p.grad - q).norm() < 0.02 * q.norm()


def strided(shape, seed=0):
    """A leaf and a non-contiguous view of it with the given shape."""
    base = leaf(shape[0], shape[2], shape[1], 2, seed=seed)
    return base, base[..., 0].transpose(1, 2)


def mask_rows(x):
    return x * KEEP[..., None]


def test_non_contiguous_inputs_and_gradients():
    weights = [leaf(24, D, seed=1), leaf(24, D, seed=2), leaf(D, 24, seed=3)]
    norm = leaf(D, seed=4)
    outputs = []
    for filtered in (True, False):
        base, x = strided((B, T, D))
        assert not x.is_contiguous()
        if filtered:
            rows = kept_rows()
            y = ops.rms_norm(x, norm, 1e-6, rows)
            y = ops.swiglu_mlp(
                y.transpose(0, 1).contiguous().transpose(0, 1), weights, [None] * 3, rows
            )
            y = ops.linear(y, weights[0], None, rows)
        else:
            y = F.rms_norm(x, (D,), norm, 1e-6)
            y = F.linear(F.silu(F.linear(y, weights[0])) * F.linear(y, weights[1]), weights[2])
            y = F.linear(y, weights[0])
        gradient = torch.randn(
            24, T, B, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )
        gradient = mask_rows(gradient.permute(2, 1, 0))
        outputs.append((y, torch.autograd.grad(y, [base, *weights, norm], gradient)))
    (ours, our_grads), (theirs, their_grads) = outputs
    assert torch.allclose(ours, theirs, atol=1e-12)
    for p, q in zip(our_grads, their_grads, strict=True):
        assert torch.allclose(p, q, atol=1e-12)


def test_autocast_casts_as_linear_does():
    x, w = leaf(B, T, D, dtype=torch.float32), leaf(V, D, dtype=torch.float32, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ops.linear(x, w, None, kept_rows(None)), F.linear(x, w)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and ours.equal(theirs)
    gradient = torch.randn(B, T, V).bfloat16()
    want = torch.autograd.grad(theirs, (x, w), gradient, retain_graph=True)
    for inside in (False, True):  # where backward runs makes no difference
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            got = torch.autograd.grad(ours, (x, w), gradient, retain_graph=True)
        assert all(g.dtype == torch.float32 for g in got)
        assert all(torch.allclose(g, q, atol=1e-6) for g, q in zip(got, want, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        double = ops.linear(x.double(), w.double(), None, kept_rows(None))
    assert double.dtype == torch.float64


def test_embedding_sums_kept_rows_and_skips_padding():
    ids = torch.tensor([[1, 2, 1, 0]])
    w = leaf(3, 2)
    rows = ops.kept_rows([0, 4])
    rows.set(torch.tensor([[True, False, True, True]]), torch.device("cpu"))
    ops.embedding(ids, w, 0, rows).backward(
        torch.tensor([[[1.0, 2], [3, 4], [5, 6], [7, 8]]]).double()
    )
    assert w.grad.tolist() == [[0, 0], [6, 8], [0, 0]]


def test_kept_rows_counts_and_refuses():
    rows = kept_rows()
    assert rows.n_rows == B * T and rows.n_kept == int(KEEP.sum())
    with pytest.raises(RuntimeError, match="must be bool and hold one value"):
        rows.set(KEEP[:1], torch.device("cpu"))
    for starts in ([0], [1, 4], [0, 4, 4], [0, 4, 2]):
        with pytest.raises(RuntimeError, match="segments"):
            ops.kept_rows(starts)


@pytest.mark.parametrize("bias", [False, True])
def test_blocks_of_rows_in_bfloat16(bias):
    """Rows beyond 512 and 256 are products of their own (ops/products.h)."""
    rows = ops.kept_rows([0, 1000])
    keep = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) < 0.9
    x = leaf(1, 1000, D, dtype=torch.bfloat16)
    up, down = (
        leaf(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate([(V, D), (D, V)])
    )
    biases = [leaf(n, dtype=torch.bfloat16, seed=3 + n) if bias else None for n in (V, V, D)]
    out = ops.swiglu_mlp(x, [up, up, down], biases, rows)
    rows.set(keep, torch.device("cpu"))
    grad = leaf(1, 1000, D, dtype=torch.bfloat16, seed=4).detach()
    out.backward(grad)

    wide, *rest = (None if p is None else p.detach().double() for p in (x, up, down, *biases))
    wide.requires_grad_()
    w, w_down, b_gate, b_up, b_down = rest
    wanted = F.linear(F.silu(F.linear(wide, w, b_gate)) * F.linear(wide, w, b_up), w_down, b_down)
    wanted.backward(grad.double() * keep[..., None])
    for got, want in ((out, wanted), (x.grad, wide.grad)):
        sizes = want.norm(dim=-1)
        assert ((got.double() - want).norm(dim=-1) < 0.02 * (sizes + sizes.mean())).all()
    assert (x.grad[~keep] == 0).all()


def test_sharp_attention_in_bfloat16_is_as_close_as_torchs():
    """Scores rounded to bfloat16 would be some percent wrong where they are large."""
    length, d = 192, 64
    x = torch.randn(1, length, 3 * d, generator=torch.Generator().manual_seed(0))
    x[..., :d] *= 6  # queries
    x = x.bfloat16()
    keep = torch.rand(1, length, generator=torch.Generator().manual_seed(1)) < 0.6
    out_grad = torch.randn(1, length, d, generator=torch.Generator().manual_seed(2)).bfloat16()

    def torchs(dtype):
        q, k, v = (
            p.clone().requires_grad_() for p in x.to(dtype).view(1, 1, length, 3, d).unbind(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward((out_grad * keep[..., None]).to(dtype)[:, None])
        return [p.grad[0, 0][keep[0]].double() for p in (q, k, v)]

    rows = ops.kept_rows([0, length])
    given = x.clone().requires_grad_()
    projections = [w.contiguous() for w in torch.eye(3 * d).bfloat16().split(d)]
    cos, sin = torch.ones(1, length, d), torch.zeros(1, length, d)
    out = ops.attention(
        given,
        [*projections, torch.eye(d).bfloat16()],
        [None] * 4,
        [None] * 2,
        0.0,
        cos,
        sin,
        d,
        d**-0.5,
        rows,
    )
    rows.set(keep, torch.device("cpu"))
    out.backward(out_grad)
    ours = [p.double() for p in given.grad[0][keep[0]].split(d, -1)]
    for got, theirs, truth in zip(ours, torchs(torch.bfloat16), torchs(torch.float64), strict=True):
        assert (got - truth).norm() < 1.5 * (theirs - truth).norm()
