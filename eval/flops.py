"""FLOPs of a training step, counted from shapes and the keep mask: the floor that a bench is read
against.

Counted: every GEMM (a multiply-add is two), attention by its exact causal pairs. Not counted: what
is linear in the hidden states (norms, rotary, activations), and recomputation. A linear layer
costs one GEMM forward and two backward; attention two forward and five backward (scores, dV, dP,
dQ, dK), of which dropped keys need three (scores, dP, dQ). See Collider, arXiv 2502.00340.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one forward, its dense backward, and its backward over the kept rows."""

    forward: float
    dense_backward: float
    filtered_backward: float

    @property
    def floor_backward(self) -> float:
        """Filtered over dense backward."""
        return self.filtered_backward / self.dense_backward

    @property
    def floor_step(self) -> float:
        """Filtered over dense forward plus backward."""
        return (self.forward + self.filtered_backward) / (self.forward + self.dense_backward)


def causal_pairs(keep: Tensor) -> tuple[int, int, int]:
    """Query-key pairs of causal attention, summed over the sequences of a bool (B, T) mask.

    Returns:
        All pairs; pairs of a kept query and a kept key; pairs of a kept query and a dropped key.
    """
    batch, length = keep.shape
    kept = keep.long()
    kept_keys_seen = kept.cumsum(-1)
    dropped_keys_seen = (1 - kept).cumsum(-1)
    both = int((kept * kept_keys_seen).sum())
    mixed = int((kept * dropped_keys_seen).sum())
    return batch * length * (length + 1) // 2, both, mixed


def step_flops(
    linear_parameters: int, attention_width: int, layers: int, keep: Tensor
) -> StepFlops:
    """FLOPs of a step of a decoder.

    Args:
        linear_parameters: weights of all linear layers, the head among them (a tied one counts).
        attention_width: query heads times head size.
        layers: number of attention layers.
        keep: bool (B, T), the mask of the filtered backward.
    """
    return count_flops(
        linear_parameters,
        attention_width,
        layers,
        rows=keep.numel(),
        kept=int(keep.sum()),
        pairs=causal_pairs(keep),
    )


def count_flops(
    linear_parameters: int,
    attention_width: int,
    layers: int,
    rows: float,
    kept: float,
    pairs: tuple[float, float, float],
) -> StepFlops:
    """The same from counts: rows, kept rows, and pairs as `causal_pairs` returns them."""
    every, both, mixed = pairs
    per_pair = 2 * attention_width * layers  # one GEMM's share of a pair, in all layers
    return StepFlops(
        forward=2 * rows * linear_parameters + 2 * every * per_pair,
        dense_backward=4 * rows * linear_parameters + 5 * every * per_pair,
        filtered_backward=4 * kept * linear_parameters + (5 * both + 3 * mixed) * per_pair,
    )
