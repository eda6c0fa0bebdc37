"""What every swapped module shares: its class is exchanged, its parameters are not touched.

``swap(module, Mixin)`` gives the module a class that inherits from the mixin and from what it was.
The mixin's forward takes over while a FilterState is bound to the module, and is the original one
otherwise.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_collider.filtering.state import FilterState


class Swapped(nn.Module):
    """Base of the mixins. ``filter_state`` is bound only while the forward that owns it runs.

    A mixin declares the attributes that it takes from the class it is swapped with.
    """

    filter_state: FilterState | None = None
    mixin: "type[Swapped]"  # what it was swapped with
    original_class: type[nn.Module]
    transient: tuple[str, ...] = ("filter_state", "last_state")  # of one forward: not copied

    def why_dense(self) -> str | None:
        """Why this module takes the dense path now, or None when its backward is filtered.

        Asked at each forward: an adapter or a hook may have come after the conversion.
        """
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The swapped class exists in no module: copy and pickle go through what it is made of.
        lasting = {k: v for k, v in self.__dict__.items() if k not in self.transient}
        return _rebuild, (self.mixin, self.original_class), lasting


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _swapped_class(mixin: type[Swapped], original: type[nn.Module]) -> type[nn.Module]:
    key = (mixin, original)
    if key not in _classes:
        # The name stays: Hugging Face writes it into config.json, and sharding policies look for
        # it.
        names = {
            "mixin": mixin,
            "original_class": original,
            "__module__": original.__module__,
            "__doc__": original.__doc__,
        }
        _classes[key] = type(original.__name__, (mixin, original), names)
    return _classes[key]


def _rebuild(mixin: type[Swapped], original: type[nn.Module]) -> nn.Module:
    swapped = _swapped_class(mixin, original)
    return swapped.__new__(swapped)


def swap(module: nn.Module, mixin: type[Swapped]) -> None:
    """Exchange a module's class in place."""
    module.__class__ = _swapped_class(mixin, type(module))


@contextmanager
def bound(modules: Iterable[nn.Module], state: FilterState) -> Iterator[None]:
    """Bind a state to the modules whose backward is filtered now, for the duration of a forward."""
    filtered = [m for m in modules if isinstance(m, Swapped) and m.why_dense() is None]
    for module in filtered:
        module.filter_state = state
    try:
        yield
    finally:
        for module in filtered:
            module.filter_state = None


def why_not_plain(module: nn.Module, kind: type[nn.Module], name: str) -> str | None:
    """Why an operator cannot read a child's parameters and skip its forward; None when it can."""
    if type(module) is not kind:
        return f"{name} is a {type(module).__name__}"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        return f"{name} has a hook"
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own"
    return None


def plain_linears(module: nn.Module, names: Iterable[str]) -> str | None:
    """Why one of a module's linear layers is not plain, or None."""
    for name in names:
        reason = why_not_plain(getattr(module, name), nn.Linear, name)
        if reason:
            return reason
    return None


def parameters_of(
    module: nn.Module, names: Iterable[str]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of a module's linear layers, in order."""
    linears = [getattr(module, name) for name in names]
    return [m.weight for m in linears], [m.bias for m in linears]
