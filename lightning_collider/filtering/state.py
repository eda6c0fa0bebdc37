"""FilterState: which rows of one forward stay in its backward.

One state is made for each forward of a converted model. The forward hands it to every module; a
selector fills it inside the forward, or ``backward_filter`` after it; the operators read it in
backward. Nothing else is shared between forward and backward, so forwards never mix masks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_collider import ops


class FilterState:
    """The keep mask of one forward over a (B, T) batch.

    Attributes:
        keep: bool (B, T), or None while the backward is dense.
        has_target: bool (B, T) of rows that have a loss, or None when the forward had no labels.
        rows: the C++ operators' view of the same mask, or None with ``engine="oracle"``.
        backward_ran: whether a backward has already read this state.
        compact_flow: let gradients of hidden states carry kept rows only between operators; the
            result is the same without.
    """

    compact_flow = True

    def __init__(self, segment_starts: list[int], shape: tuple[int, int], engine: str) -> None:
        self.shape = shape
        self.keep: Tensor | None = None
        self.has_target: Tensor | None = None
        self.rows: Any = ops.kept_rows(segment_starts) if engine == "cpp" else None
        self.backward_ran = False

    def set_keep(self, keep: Tensor, device: torch.device) -> None:
        """Fill the state.

        Args:
            keep: bool (B, T); True for rows that stay in the backward.
            device: where the model computes.

        Raises:
            ValueError: wrong shape or dtype, a mask is already there, or the backward has run.
        """
        check_keep(keep, self.shape)
        if self.backward_ran:
            raise ValueError(
                "this forward's backward has already run: call backward_filter between the forward "
                "and loss.backward()"
            )
        if self.keep is not None:
            raise ValueError(
                "this forward already has a keep mask: use either the strategy's selector or "
                "backward_filter, and call it once"
            )
        self.keep = keep.detach().to(device)
        if self.rows is not None:
            self.rows.set(self.keep, device)

    def n_kept_targets(self) -> Tensor | None:
        """Number of kept rows that have a target (0-d), or None while neither is known."""
        if self.keep is None:
            return None if self.has_target is None else self.has_target.sum()
        return (self.keep if self.has_target is None else self.keep & self.has_target).sum()


def check_keep(keep: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless keep is a bool tensor of the given (B, T)."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        kind = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(f"the keep mask must be a bool tensor (True = keep), got {kind}")
    if tuple(keep.shape) != tuple(shape):
        raise ValueError(
            f"the keep mask must have the batch's shape (B, T) = {tuple(shape)}, one value a "
            f"position, got {tuple(keep.shape)}"
        )


class _Mark(torch.autograd.Function):
    """Identity whose graph node carries a FilterState, and whose backward may zero dropped rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: FilterState, zero_dropped: bool, divisor: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.filter_state = state
        ctx.zero_dropped = zero_dropped
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        state: FilterState = ctx.filter_state
        state.backward_ran = True
        if state.rows is not None and state.compact_flow:
            # Before any operator of this forward runs, and after every hook is in place.
            state.rows.narrow()
        if grad is not None and state.keep is not None and ctx.zero_dropped:
            keep = state.keep.reshape(*state.keep.shape, *[1] * (grad.dim() - 2))
            grad = grad.masked_fill(~keep, 0)
        return grad, None, None, None


def mark(
    x: Tensor, state: FilterState, zero_dropped: bool = True, divisor: Tensor | None = None
) -> Tensor:
    """Return x unchanged, bound to a state: ``marks_of`` finds it from any later loss.

    Args:
        x: (B, T, ...), or a mean of it.
        zero_dropped: in backward, replace the gradient of dropped rows by zero. This is the
            filtered backward in plain autograd: enough after the losses, and on the keys and
            values of an attention that the C++ operators do not compute.
        divisor: number of rows that x is a mean of (0-d), where it is one.
    """
    return _Mark.apply(x, state, zero_dropped, divisor)


@dataclass(frozen=True)
class Mark:
    """Where a loss meets a forward: its state, and the rows of the mean that it goes through."""

    state: FilterState
    divisor: Tensor | None


def marks_of(loss: Tensor) -> list[Mark]:
    """The marks that a loss comes from, found by walking back from it; one for each state."""
    found: dict[int, Mark] = {}
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        state = getattr(node, "filter_state", None)
        if not isinstance(state, FilterState):
            todo.extend(parent for parent, _ in node.next_functions)
        elif id(state) not in found or found[id(state)].divisor is None:
            found[id(state)] = Mark(state, node.divisor)  # type: ignore[attr-defined]
    return list(found.values())


def backward_filter(loss: Tensor, keep: Tensor) -> None:
    """Drop rows from the backward of a loss: the one line before ``loss.backward()``.

    The gradient becomes that of the given loss with the dropped rows' terms removed, and with
    dropped tokens' keys and values held constant (Collider, arXiv 2502.00340). It is not rescaled:
    for the mean over kept rows, pass that mean.

    Args:
        loss: computed from one forward of a converted model in training mode.
        keep: bool (B, T); ``keep[b, t]`` speaks of the row at position t, that is of the
            prediction of token t + 1.

    Raises:
        ValueError: the loss does not come from a converted model, or from two forwards of one; the
            mask has another shape or dtype; a mask is already set; the backward has already run.
    """
    marks = marks_of(loss)
    if not marks:
        raise ValueError(
            "this loss does not come from a converted model in training mode: call "
            "lightning_collider.convert(model) and model.train() before the forward"
        )
    if len(marks) > 1:
        raise ValueError(
            f"this loss comes from {len(marks)} forwards: call backward_filter on the loss of each "
            f"of them before you add them up"
        )
    marks[0].state.set_keep(keep, loss.device)
