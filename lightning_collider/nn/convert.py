"""convert(): swaps the modules of a Hugging Face causal LM in place, by a table of families."""

from dataclasses import dataclass
from importlib import import_module

from torch import nn

from lightning_collider.nn.causal_lm import FilteredCausalLM
from lightning_collider.nn.layer import FilteredLayer, attentions
from lightning_collider.nn.parts import (
    FilteredAttention,
    FilteredEmbedding,
    FilteredGeluMLP,
    FilteredLayerNorm,
    FilteredNormedAttention,
    FilteredPhiAttention,
    FilteredRMSNorm,
    FilteredSwigluMLP,
    is_attention,
)
from lightning_collider.nn.swapped import Swapped, swap

ENGINES = ("cpp", "oracle")


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        module: import path of the module that defines its classes.
        causal_lm, layer: names of the causal LM's and of the decoder layer's class.
        parts: name of a class inside the layers -> what it is swapped with.
    """

    module: str
    causal_lm: str
    layer: str
    parts: dict[str, type[Swapped]]

    def class_of(self, name: str) -> type[nn.Module]:
        """A class of the family by its name in its module, or in torch.nn."""
        return getattr(import_module(self.module), name, None) or getattr(nn, name)


def llama_like(name: str, attention: type[Swapped] = FilteredAttention) -> Family:
    """The row of a family whose classes are Llama's under another name."""
    return Family(
        module=f"transformers.models.{name.lower()}.modeling_{name.lower()}",
        causal_lm=f"{name}ForCausalLM",
        layer=f"{name}DecoderLayer",
        parts={
            f"{name}RMSNorm": FilteredRMSNorm,
            f"{name}Attention": attention,
            f"{name}MLP": FilteredSwigluMLP,
        },
    )


FAMILIES = [
    llama_like("Llama"),
    llama_like("Mistral"),
    llama_like("Qwen2"),
    llama_like("Qwen3", FilteredNormedAttention),
    Family(
        module="transformers.models.phi.modeling_phi",
        causal_lm="PhiForCausalLM",
        layer="PhiDecoderLayer",
        parts={
            "LayerNorm": FilteredLayerNorm,
            "PhiAttention": FilteredPhiAttention,
            "PhiMLP": FilteredGeluMLP,
        },
    ),
]


def family_of(model: nn.Module) -> Family:
    """The table row of a model.

    Raises:
        ValueError: no causal LM of a known family, or one whose forward is overridden.
    """
    rows = {family.class_of(family.causal_lm): family for family in FAMILIES}
    for base in type(model).__mro__:  # the nearest row: a family may be built on another
        if base in rows:
            if type(model).forward is not base.forward or "forward" in model.__dict__:
                raise ValueError(
                    f"{type(model).__name__} has a forward of its own, which convert() would "
                    f"replace: convert the plain {rows[base].causal_lm}"
                )
            return rows[base]
    known = ", ".join(family.causal_lm for family in FAMILIES)
    raise ValueError(
        f"{type(model).__name__} is not a causal language model that can be filtered. Known: "
        f"{known}. Give the Hugging Face model itself, as AutoModelForCausalLM loads it"
    )


def convert(model: nn.Module, engine: str = "cpp") -> nn.Module:
    """Swap a causal LM's modules for ones whose backward sees kept rows only.

    Parameter names and objects are unchanged, so checkpoints load with and without the plugin, an
    optimizer made before stays valid, and ``save_pretrained`` writes the ordinary folder. In eval
    mode or without grad the model computes what it computed before.

    Args:
        model: a Hugging Face causal LM, or a PEFT model around one; changed in place.
        engine: "cpp" for the C++ operators; "oracle" for plain autograd, slow and exact, without a
            compiler.

    Returns:
        The same model.

    Raises:
        ValueError: an unknown engine or model.
        RuntimeError: the C++ operators cannot be compiled; says what to install.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if hasattr(model, "get_base_model"):  # a PEFT model around the Hugging Face one
        convert(model.get_base_model(), engine)  # type: ignore[operator]
        return model
    if isinstance(model, FilteredCausalLM):
        if model.filter_engine != engine:
            raise ValueError(f"the model is already converted with engine={model.filter_engine!r}")
        return model
    family = family_of(model)
    refuse_head_layer_norms(model)
    refuse_other_layers(model, family)
    if engine == "cpp":
        from lightning_collider import ops

        ops.build()
        _swap_parts(model, family)
    for module in list(model.modules()):
        if isinstance(module, family.class_of(family.layer)):
            swap(module, FilteredLayer)
    swap(model, FilteredCausalLM)
    model.filter_engine = engine  # type: ignore[assignment]
    model.filter_family = family  # type: ignore[assignment]
    model.filter_window = sliding_window(model)  # type: ignore[assignment]
    return model


def _swap_parts(model: nn.Module, family: Family) -> None:
    mixins: list[tuple[type[nn.Module], type[Swapped]]] = [
        (family.class_of(name), mixin) for name, mixin in family.parts.items()
    ]
    for module in list(model.modules()):
        for original, mixin in mixins:
            if isinstance(module, original) and why_own_forward(module, original) is None:
                swap(module, mixin)
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    if why_own_forward(embeddings, nn.Embedding) is None:
        swap(embeddings, FilteredEmbedding)


def why_own_forward(module: nn.Module, original: type[nn.Module]) -> str | None:
    """Why a module does not compute what its family's class computes, or None when it does."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if not isinstance(module, original) or type(module).forward is not original.forward:
        return f"{type(module).__name__} has a forward of its own"
    return None


def refuse_other_layers(model: nn.Module, family: Family) -> None:
    """Raise ValueError for attention outside the family's layers: nobody would filter its keys."""
    layers = [m for m in model.modules() if isinstance(m, family.class_of(family.layer))]
    inside = set(attentions(layers))
    for name, module in model.named_modules():
        if is_attention(module) and module not in inside:
            raise ValueError(
                f"{name} is an attention outside a {family.layer}, so {type(model).__name__} is "
                f"not a plain {family.causal_lm}, and its dropped keys could not be held constant: "
                "add a row for it to FAMILIES"
            )


def refuse_head_layer_norms(model: nn.Module) -> None:
    """Raise ValueError for Phi's option of layer norms over heads, which no released model uses."""
    if getattr(model.config, "qk_layernorm", False):
        raise ValueError(
            "qk_layernorm=True is not supported: its norms come after queries and keys are split "
            "into heads; use a configuration without it"
        )


def sliding_window(model: nn.Module) -> int | None:
    """The number of tokens that some layer's attention is limited to, or None."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None
