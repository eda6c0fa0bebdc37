"""Triton kernels for what ATen has no fused CUDA kernel for; kernels.cpp declares their operators.

Each gathers the kept rows that it needs by itself. They are registered where Triton and a GPU are
found; without them the operators use ATen calls. Tested on the CPU, through Triton's interpreter;
not yet run on a GPU.

Shapes: N rows, K kept rows, M dropped rows, D width, F MLP width, H query heads, G key heads, d
head width, r rotated width. Everything is computed in float32 and rounded once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


def register(library: torch.library.Library, key: str) -> None:
    """Make the kernels those of a device.

    Args:
        library: of the namespace ``lightning_collider``; the kernels live as long as it does.
        key: "CUDA", or "CPU" for Triton's interpreter.
    """
    kernels: list[Callable] = [dropped_keys, rotate, swiglu_backward, rms_backward]
    for kernel in kernels:
        library.impl(kernel.__name__, kernel, key)


def _on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be a tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit(do_not_specialize=["n_queries"])  # it changes with every mask
def _dropped_keys(
    grad_q_ptr, q_ptr, grad_ptr, out_ptr, lse_ptr, k_ptr, v_ptr, dropped_ptr, first_ptr, last_ptr,
    scale, n_queries, n_heads, n_groups, d,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1)
    group = head // (n_heads // n_groups)
    dims = tl.arange(0, DIMS)
    is_query = query < n_queries
    is_dim = (dims < d)[None, :]
    at_q = (query[:, None] * n_heads + head) * d + dims[None, :]
    mask_q = is_query[:, None] & is_dim
    q = tl.load(q_ptr + at_q, mask_q, 0.0)
    grad = tl.load(grad_ptr + at_q, mask_q, 0.0)
    out = tl.load(out_ptr + at_q, mask_q, 0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + query * n_heads + head, is_query, 0.0)
    first = tl.load(first_ptr + query, is_query, 0)
    last = tl.load(last_ptr + query, is_query, 0)
    # Neither first nor last falls from one query to the next.
    begin = tl.load(first_ptr + tl.program_id(0).to(tl.int64) * QUERIES)
    end = tl.max(last, 0)
    grad_q = tl.zeros([QUERIES, DIMS], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        row = tl.load(dropped_ptr + key, is_key, 0)
        at_k = (row[:, None] * n_groups + group) * d + dims[None, :]
        mask_k = is_key[:, None] & is_dim
        k = tl.load(k_ptr + at_k, mask_k, 0.0)
        v = tl.load(v_ptr + at_k, mask_k, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
        p = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        grad_q += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    grad_q += tl.load(grad_q_ptr + at_q, mask_q, 0.0).to(tl.float32)
    tl.store(grad_q_ptr + at_q, grad_q.to(grad_q_ptr.dtype.element_ty), mask_q)


def dropped_keys(
    grad_q: Tensor,
    q: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    dropped: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
) -> None:
    """Add the dropped keys' share to the queries' gradient (part 2 in causal.cpp).

    Args:
        grad_q, q, grad_out, out: (K, H, d) of kept rows, contiguous.
        lse: (K, H) float32, logsumexp of the scaled scores over all keys.
        k, v: (N, G, d) of all rows, contiguous.
        dropped: int64 (M,), the rows of dropped keys.
        first, last: int64 (K,): query i sees dropped keys first[i] .. last[i].
        scale: factor on the scores.
    """
    n_queries, n_heads, d = q.shape
    block = 64
    grid = (triton.cdiv(n_queries, block), n_heads)
    tensors = (grad_q, q, grad_out.contiguous(), out, lse, k, v, dropped, first, last)
    with _on(q):
        _dropped_keys[grid](
            *tensors, scale, n_queries, n_heads, k.shape[1], d,
            QUERIES=block, KEYS=block, DIMS=max(16, triton.next_power_of_2(d)),
        )  # fmt: skip


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, n_heads, d, r, period, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = r // 2
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    is_pair = i < half
    mask = (head < n_heads) & is_pair
    at = (row * n_heads + head) * d + i
    angle = (row % period) * r + i
    a = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half, mask, 0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, is_pair, 0.0)
    sin_b = tl.load(sin_ptr + angle + half, is_pair, 0.0)
    if INVERSE:  # the transpose uses the other half's sine, with its sign turned
        sin_a, sin_b = -sin_b, -sin_a
    rotated_a = a * tl.load(cos_ptr + angle, is_pair, 0.0) - b * sin_a
    rotated_b = b * tl.load(cos_ptr + angle + half, is_pair, 0.0) + a * sin_b
    tl.store(x_ptr + at, rotated_a.to(x_ptr.dtype.element_ty), mask)
    tl.store(x_ptr + at + half, rotated_b.to(x_ptr.dtype.element_ty), mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Rotary embedding of x (N, H, d), contiguous, in place (rotary.cpp).

    Args:
        x: of any floating dtype.
        cos, sin: float32 (P, r), contiguous; row n of x uses row n % P.
        inverse: rotate back.
    """
    n_rows, n_heads, d = x.shape
    with _on(x):
        _rotate[(n_rows,)](
            x, cos, sin, n_heads, d, cos.shape[1], cos.shape[0], INVERSE=inverse,
            HEADS=triton.next_power_of_2(n_heads), HALF=triton.next_power_of_2(cos.shape[1] // 2),
        )  # fmt: skip


@triton.jit
def _swiglu_backward(
    grad_ptr, gate_ptr, up_ptr, rows_ptr, act_ptr, grad_gate_ptr, grad_up_ptr, width,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    kept = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + kept) if GATHER else kept
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at_kept = kept * width + column
    at_row = row * width + column
    grad = tl.load(grad_ptr + at_kept, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at_row, mask, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at_row, mask, 0.0).to(tl.float32)
    sigma = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigma
    grad_gate = grad * up * sigma * (1.0 + gate * (1.0 - sigma))
    dtype = act_ptr.dtype.element_ty
    tl.store(act_ptr + at_kept, (silu * up).to(dtype), mask)
    tl.store(grad_gate_ptr + at_kept, grad_gate.to(dtype), mask)
    tl.store(grad_up_ptr + at_kept, (grad * silu).to(dtype), mask)


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation again, and the gradients of gate and up, at kept rows (swiglu_mlp.cpp).

    Args:
        grad: of the activation, (K, F).
        gate, up: (N, F), contiguous.
        rows: int64 (K,), or None where all rows are kept.
    """
    n_kept, width = grad.shape
    grad = grad.contiguous()
    act, grad_gate, grad_up = (torch.empty_like(grad) for _ in range(3))
    block = 1024
    if n_kept > 0:
        with _on(grad):
            _swiglu_backward[(n_kept, triton.cdiv(width, block))](
                grad, gate, up, grad if rows is None else rows, act, grad_gate, grad_up, width,
                GATHER=rows is not None, BLOCK=block,
            )  # fmt: skip
    return act, grad_gate, grad_up


@triton.jit(do_not_specialize=["n_kept"])
def _rms_backward(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, rows_ptr, grad_x_ptr, partial_ptr, n_kept, width,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = tl.load(weight_ptr + column, mask, 0.0).to(tl.float32)
    grad_w = tl.zeros([BLOCK], tl.float32)
    program = tl.program_id(0)
    for kept in range(program, n_kept, tl.num_programs(0)):
        row = tl.load(rows_ptr + kept) if GATHER else kept
        at_kept = tl.cast(kept, tl.int64) * width + column
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * width + column, mask, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at_kept, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        unit = x * rstd
        g = grad * weight
        grad_x = rstd * (g - unit * (tl.sum(g * unit, 0) / width))
        tl.store(grad_x_ptr + at_kept, grad_x.to(grad_x_ptr.dtype.element_ty), mask)
        grad_w += grad * unit
    tl.store(partial_ptr + program * width + column, grad_w, mask)


def rms_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x at kept rows and of the weight (rms_norm.cpp).

    Args:
        grad: (K, D).
        x: (N, D).
        weight: (D,).
        rstd: (N, 1) float32.
        rows: int64 (K,), or None where all rows are kept.
    """
    n_kept, width = grad.shape
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(grad)
    # Each program sums its share of the rows: enough of them to fill a GPU.
    partial = torch.zeros(min(max(n_kept, 1), 256), width, dtype=torch.float32, device=x.device)
    if n_kept > 0:
        with _on(x):
            _rms_backward[(len(partial),)](
                grad, x, weight, rstd, grad if rows is None else rows, grad_x, partial, n_kept,
                width, GATHER=rows is not None, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)
