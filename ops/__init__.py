"""The C++ operators: forwards are dense, backwards run over kept rows only.

Every operator takes the ``KeptRows`` of its forward as its last argument and asks it, when its
backward runs, which rows stay. Shapes: B sequences, T positions, D hidden width, F MLP width, V
vocabulary, H query heads, G key/value heads, d head width, r rotated width. Floating tensors are
float64, float32 or bfloat16; under autocast inputs are cast as ``torch.nn.functional.linear``
would cast them.

On the CPU they run vectorised loops and ATen's CPU kernels; on CUDA ATen's fused kernels, flash
attention among them, and the Triton kernels of ``triton_kernels.py`` where Triton is installed; on
any other device plain ATen calls (the strategies ask for one with float64). The code for CUDA is
tested on the CPU, with stand-ins for the kernels of ATen that exist on CUDA only, and has not been
run on a GPU yet.

The extension is compiled on first use (see ``extension.py``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_collider.ops.extension import build, load, loaded

__all__ = [
    "attention",
    "boundary",
    "build",
    "embedding",
    "gelu_mlp",
    "kept_rows",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "release_gradient_memory",
    "rms_norm",
    "swiglu_mlp",
]


def kept_rows(segment_starts: Sequence[int]) -> Any:
    """A ``KeptRows`` for one forward, without a mask yet.

    Args:
        segment_starts: first row of each run of rows inside which attention is causal, in order,
            then the number of rows. Rows are those of the flattened (B, T) batch.

    Returns:
        An object with ``set(keep, device)`` (bool, one value a row), ``n_rows`` and ``n_kept``.
    """
    return load().KeptRows(list(segment_starts))


def boundary(x: Tensor, rows: Any) -> Tensor:
    """x (B, T, D) itself, at the border of a module that is not one of these operators.

    In backward the gradient of dropped rows is zero on both sides of it.
    """
    return load().boundary(x, rows)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int, rows: Any) -> Tensor:
    """``weight[ids]``: int64 (B, T) and (V, D) to (B, T, D); no gradient at ``padding_idx``."""
    return load().embedding(ids, weight, padding_idx, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rows: Any) -> Tensor:
    """Root mean square norm of x (B, T, D) over D, computed in float32 or wider."""
    return load().rms_norm(x, weight, eps, rows)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: Any) -> Tensor:
    """Layer norm of x (B, T, D) over D."""
    return load().layer_norm(x, weight, bias, eps, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Any) -> Tensor:
    """``x @ weight.T + bias``: (B, T, D) and (E, D) to (B, T, E)."""
    return load().linear(x, weight, bias, rows)


def swiglu_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: Any
) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` with weights (gate, up, down): (F, D), (F, D), (D, F)."""
    return load().swiglu_mlp(x, weights, biases, rows)


def gelu_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tanh: bool, rows: Any
) -> Tensor:
    """``down(gelu(up(x)))`` with weights (up, down): (F, D), (D, F); tanh: GELU's approximation."""
    return load().gelu_mlp(x, weights, biases, tanh, rows)


def attention(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norms: Sequence[Tensor | None],
    norm_eps: float,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    scale: float,
    rows: Any,
) -> Tensor:
    """Grouped-query causal attention with rotary embedding, from hidden states to hidden states.

    Args:
        x: (B, T, D).
        weights: q (H d, D), k (G d, D), v (G d, D), output (D, H d).
        biases: of the same four, None where there is none.
        norms: weights (d,) of the RMS norms over each query and key head, None without.
        norm_eps: of those norms.
        cos, sin: (1 or B, T, r); the first r of the d numbers of each head are rotated.
        head_dim: d.
        scale: factor on the scores, usually ``d ** -0.5``.
        rows: the forward's ``KeptRows``; attention stays inside its segments.
    """
    return load().attention(x, weights, biases, norms, norm_eps, cos, sin, head_dim, scale, rows)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Any
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` at every position, without holding all logits.

    Args:
        hidden: (B, T, D).
        weight: (V, D).
        bias: (V,) or None.
        targets: int64 (B, T), in [0, V), or -100 where there is none.

    Returns:
        (B, T) float32 (float64 where hidden is), 0 where there is no target.

    Raises:
        ValueError: a target outside the vocabulary (checked where the check costs no device sync).
    """
    check_targets(targets, weight.shape[0])
    return load().linear_cross_entropy(hidden, weight, bias, targets, rows)


def release_gradient_memory() -> int:
    """Give back the memory that is kept on the CPU for the next backward's weight gradients.

    It is as large as those gradients, and is kept because fetching it anew each time costs up to a
    fifth of a filtered backward. A Trainer's strategy gives it back as the run ends; what is idle
    for thousands of gradients is given back by itself. Gradients in use stay valid.

    Returns:
        Bytes given back at once; the memory of gradients in use follows as they are freed.
    """
    module = loaded()
    return 0 if module is None else module.release_gradient_memory()


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Refuse targets outside [0, vocabulary) but -100. On a GPU a kernel's own assert does."""
    if targets.device.type != "cpu":
        return
    wrong = torch.logical_and(targets != -100, (targets < 0) | (targets >= vocabulary))
    if wrong.any():
        example = int(targets[wrong][0])
        raise ValueError(
            f"labels hold {example}, outside the model's vocabulary of {vocabulary}: use a "
            "tokenizer that fits the model, and -100 for positions without a target"
        )
