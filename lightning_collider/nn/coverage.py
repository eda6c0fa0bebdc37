"""coverage(): what a conversion swapped, what stays dense and why."""

from dataclasses import dataclass

from torch import nn

from lightning_collider.nn.causal_lm import FilteredCausalLM
from lightning_collider.nn.convert import Family, why_own_forward
from lightning_collider.nn.layer import FilteredLayer
from lightning_collider.nn.swapped import Swapped


@dataclass(frozen=True)
class Entry:
    """One module: its name, its class, and why its backward is dense (None: filtered)."""

    name: str
    kind: str
    why_dense: str | None


@dataclass(frozen=True)
class Coverage:
    """What is filtered in a converted model; ``print`` it."""

    entries: tuple[Entry, ...]

    @property
    def dense(self) -> dict[str, str]:
        """Names of the modules that stay dense, with the reason."""
        return {e.name: e.why_dense for e in self.entries if e.why_dense is not None}

    @property
    def filtered(self) -> list[str]:
        """Names of the modules whose backward sees kept rows only."""
        return [e.name for e in self.entries if e.why_dense is None]

    def __str__(self) -> str:
        lines = [f"filtered: {len(self.filtered)} of {len(self.entries)} modules"]
        lines += [f"  dense: {name} ({reason})" for name, reason in self.dense.items()]
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """List the parts of a converted model, as they are now.

    Args:
        model: a converted model, or a module that holds one.

    Raises:
        ValueError: nothing in it is converted.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, FilteredCausalLM):
            return Coverage(tuple(_entries(module, prefix)))
    raise ValueError("this model is not converted: call lightning_collider.convert(model) first")


def _entries(model: nn.Module, prefix: str) -> list[Entry]:
    assert isinstance(model, FilteredCausalLM)
    family: Family = model.filter_family
    parts = {family.class_of(name): mixin for name, mixin in family.parts.items()}
    embeddings = model.get_input_embeddings()
    entries = []
    for name, module in model.named_modules(prefix=prefix):
        original = next((c for c in parts if isinstance(module, c)), None)
        if module is embeddings:
            original = nn.Embedding
        if module is model.get_output_embeddings():
            entries.append(Entry(name, type(module).__name__, model.why_head_dense()))
        elif original is not None:
            entries.append(Entry(name, type(module).__name__, _why_dense(module, original, model)))
    return entries


def _why_dense(module: nn.Module, original: type[nn.Module], model: FilteredCausalLM) -> str | None:
    if isinstance(module, Swapped) and not isinstance(module, FilteredLayer):
        return module.why_dense()
    if model.filter_engine == "oracle":
        return "engine='oracle'"
    return why_own_forward(module, original) or "not swapped"
