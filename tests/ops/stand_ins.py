"""What CUDA's fused kernels of ATen compute, in plain tensor operations on any device.

A ``StandIns`` mode puts them in the kernels' place, so that the code around the kernels runs, and
is checked, without a GPU. They also check what the kernels demand of their arguments.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def flash_forward(q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, *, scale):
    """Output (rows, H, d) and logsumexp (H, rows) of causal attention inside each sequence."""
    check_flash(q, k, v, starts, starts_k, longest, longest_k)
    assert dropout == 0 and causal and not debug
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows in sequences(starts):
        scores = visible_scores(q[rows], k[rows], scale)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), expand(v[rows], q))
    unused = torch.empty(0)
    return out, lse, unused, unused, unused


def flash_backward(
    grad, q, k, v, out, lse, starts, starts_k, longest, longest_k, dropout, causal, *_, scale
):
    """Gradients of q, k and v; softmax and its mean gradient come from the given lse and out."""
    check_flash(q, k, v, starts, starts_k, longest, longest_k)
    assert dropout == 0 and causal and grad.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and grad.is_contiguous()
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in sequences(starts):
        p = (visible_scores(q[rows], k[rows], scale) - lse[:, rows, None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
        dp = torch.einsum("qhd,khd->hqk", grad[rows], expand(v[rows], q))
        ds = p * (dp - delta) * scale
        grad_q[rows] = torch.einsum("hqk,khd->qhd", ds, expand(k[rows], q))
        grad_k[rows] = (
            torch.einsum("hqk,qhd->khd", ds, q[rows]).unflatten(1, (k.shape[1], -1)).sum(2)
        )
        grad_v[rows] = (
            torch.einsum("hqk,qhd->khd", p, grad[rows]).unflatten(1, (k.shape[1], -1)).sum(2)
        )
    return grad_q, grad_k, grad_v


def rms_backward(grad, x, shape, rstd, weight, needed):
    """Gradients of x and weight of ``weight * x * rstd``, rstd = 1 / sqrt(mean(x^2) + eps)."""
    assert list(shape) == [x.shape[-1]] and rstd.shape == (*x.shape[:-1], 1)
    unit, g = x * rstd, grad * weight
    grad_x = rstd * (g - unit * (g * unit).mean(-1, keepdim=True)) if needed[0] else None
    return grad_x, (grad * unit).sum(0) if needed[1] else None


def check_flash(q, k, v, starts, starts_k, longest, longest_k):
    lengths = starts.diff()
    assert starts.dtype == torch.int32 and starts.equal(starts_k) and starts[-1] == len(q) > 0
    assert longest == longest_k == int(lengths.max()) and (lengths >= 0).all()
    assert len(q) == len(k) == len(v) and all(x.stride(-1) == 1 for x in (q, k, v))


def sequences(starts):
    return [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


def expand(k, q):
    """Key heads, once for each query head that they serve."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def visible_scores(q, k, scale):
    scores = torch.einsum("qhd,khd->hqk", q, expand(k, q)) * scale
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf"))


KERNELS = {
    torch.ops.aten._flash_attention_forward.default: flash_forward,
    torch.ops.aten._flash_attention_backward.default: flash_backward,
    torch.ops.aten._fused_rms_norm_backward.default: rms_backward,
}


class StandIns(TorchDispatchMode):
    """Puts the functions above in the place of the kernels.

    Attributes:
        calls: how often each was called, by name.
        flash_rows: number of rows of each flash backward.
        ours: names of this project's own kernels that were called.
    """

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}
        self.flash_rows: list[int] = []
        self.ours: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lightning_collider":
            self.ours.add(func.overloadpacket.__name__)
        stand_in = KERNELS.get(func)
        if stand_in is None:
            return func(*args, **(kwargs or {}))
        name = stand_in.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        if stand_in is flash_backward:
            self.flash_rows.append(len(args[0]))
        return stand_in(*args, **(kwargs or {}))
