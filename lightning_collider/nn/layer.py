"""The decoder layer: it keeps the state of its forward and binds it to its parts.

The state comes as an argument, so that an activation checkpoint keeps it in its closure: a
recompute runs in backward, when another forward may be the newest. The layer's own forward is
Hugging Face's.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_collider.filtering.state import FilterState, mark
from lightning_collider.nn.parts import is_attention
from lightning_collider.nn.swapped import Swapped, bound


class FilteredLayer(Swapped):
    """A decoder layer of any family."""

    def forward(self, *args: Any, filter_state: FilterState | None = None, **kwargs: Any) -> Any:
        if filter_state is None:
            return super().forward(*args, **kwargs)
        parts = list(self.children())
        dense_attention = [m for m in parts if is_attention(m) and why_dense(m) is not None]
        with ExitStack() as stack:
            stack.enter_context(bound(parts, filter_state))
            for module in dense_attention:
                stack.enter_context(constant_dropped_keys(module, filter_state))
            return super().forward(*args, **kwargs)


def why_dense(module: nn.Module) -> str | None:
    """Why a module's backward is dense, or None when it is filtered."""
    return module.why_dense() if isinstance(module, Swapped) else "not swapped"


@contextmanager
def constant_dropped_keys(attention: nn.Module, state: FilterState) -> Iterator[None]:
    """Filter an attention that the operators do not compute, exactly and without saving time.

    Keys and values of dropped rows get no gradient, as the definition asks (see oracle.py). Rotary
    embedding acts on each row alone and has no parameters, so what comes before it is as good a
    place: the keys' norm where there is one, else the projection.
    """
    names = ("k_norm" if hasattr(attention, "k_norm") else "k_proj", "v_proj")
    called: set[str] = set()

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            called.add(name)
            return mark(output, state)

        return hook

    handles = [getattr(attention, name).register_forward_hook(hook_of(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in names if name not in called]
    if missing:
        raise ValueError(
            f"{type(attention).__name__} has a forward that does not call {' and '.join(missing)}: "
            "its dropped keys cannot be held constant, so this model cannot be filtered"
        )


def attentions(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The attention modules among the children of the given modules."""
    return [child for m in modules for child in m.children() if is_attention(child)]
