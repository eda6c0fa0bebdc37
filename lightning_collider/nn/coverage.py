"""coverage(): what a conversion swapped, what stays dense and why."""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from lightning_collider.nn.causal_lm import FilteredCausalLM
from lightning_collider.nn.convert import Family, why_own_forward
from lightning_collider.nn.layer import FilteredLayer
from lightning_collider.nn.swapped import Swapped


@dataclass(frozen=True)
class Entry:
    """One module: its name, its class, its GEMM weights, and why it is dense (None: filtered)."""

    name: str
    kind: str
    weights: int
    why_dense: str | None


@dataclass(frozen=True)
class Coverage:
    """What is filtered in a converted model; ``print`` it.

    Attributes:
        entries: the modules, as they are now.
        edges: hidden states of the newest backward with a mask, as (node, why its gradient was full
            size, or "" where it held kept rows only); empty before the first.
    """

    entries: tuple[Entry, ...]
    edges: tuple[tuple[str, str], ...] = ()

    @property
    def dense(self) -> dict[str, str]:
        """Names of the modules that stay dense, with the reason."""
        return {e.name: e.why_dense for e in self.entries if e.why_dense is not None}

    @property
    def filtered(self) -> list[str]:
        """Names of the modules whose backward sees kept rows only."""
        return [e.name for e in self.entries if e.why_dense is None]

    @property
    def share(self) -> float:
        """Share of the backward FLOPs of linear layers that kept rows alone pay for."""
        total = sum(e.weights for e in self.entries)
        return sum(e.weights for e in self.entries if e.why_dense is None) / max(total, 1)

    def summary(self) -> str:
        """One line."""
        return (
            f"{len(self.filtered)} of {len(self.entries)} modules filtered, {self.share:.1%} of "
            "the linear layers' backward FLOPs"
        )

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  dense: {name} ({reason})" for name, reason in self.dense.items()]
        if self.edges:
            full = Counter(reason for _, reason in self.edges if reason)
            compact = len(self.edges) - full.total()
            lines.append(f"{compact} of {len(self.edges)} hidden states with compact gradients")
            lines += [f"  full size: {n} ({reason})" for reason, n in full.most_common()]
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
            rows = None if module.last_state is None else module.last_state.rows
            edges = () if rows is None else tuple(rows.flow)
            return Coverage(tuple(_entries(module, prefix)), edges)
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
            reason = model.why_head_dense()
        elif original is not None:
            reason = _why_dense(module, original, model)
        else:
            continue
        weights = 0 if module is embeddings else gemm_weights(module)
        entries.append(Entry(name, type(module).__name__, weights, reason))
    return entries


def gemm_weights(module: nn.Module) -> int:
    """Numbers in a module's matrices: each costs four FLOPs a row in backward."""
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def _why_dense(module: nn.Module, original: type[nn.Module], model: FilteredCausalLM) -> str | None:
    if isinstance(module, Swapped) and not isinstance(module, FilteredLayer):
        return module.why_dense()
    if model.filter_engine == "oracle":
        return "engine='oracle'"
    return why_own_forward(module, original) or "not swapped"
