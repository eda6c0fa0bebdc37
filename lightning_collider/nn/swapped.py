"""What every swapped module shares: its class is exchanged, its parameters are not touched.

``swap(module, Mixin)`` gives the module a class that inherits from the mixin and from what it was.
The mixin's forward takes over while a FilterState is bound to the module, and is the original one
otherwise.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_collider import ops
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
    """Bind a state, for the duration of a forward, to the modules whose backward is filtered now.

    The others get a border, so that gradients are full size inside them only.
    """
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, Swapped) and module.why_dense() is None:
                module.filter_state = state
                stack.callback(setattr, module, "filter_state", None)
            elif state.rows is not None and not passes_through(module):
                stack.enter_context(bordered(module, state))
        yield


def passes_through(module: nn.Module) -> bool:
    """Whether a module returns what it gets, and leaves no node in the graph."""
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


@contextmanager
def bordered(module: nn.Module, state: FilterState) -> Iterator[None]:
    """Put ``ops.boundary`` on the hidden states that a module takes and returns."""

    def border(x: Any) -> Any:
        is_hidden = isinstance(x, Tensor) and x.requires_grad and x.shape[:-1] == state.shape
        return ops.boundary(x, state.rows) if is_hidden else x

    def on_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(border, args)), {name: border(value) for name, value in kwargs.items()}

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(map(border, output)) if isinstance(output, tuple) else border(output)

    with (
        module.register_forward_pre_hook(on_input, with_kwargs=True),
        module.register_forward_hook(on_output),
    ):
        yield


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
