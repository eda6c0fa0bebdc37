"""Options and what all tests share: small models, and a reference that is float64 throughout."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def small_llama(tied: bool = False, seed: int = 0, layers: int = 3, **config) -> LlamaForCausalLM:
    """A Llama with 8 query heads on 2 key heads, vocabulary 97, in training mode."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "attn_implementation": "sdpa",
        **config,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings)).train()


class Float64Norm(nn.Module):
    """RMSNorm in the input's own precision; Hugging Face's is float32 even in a float64 model."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def float64_reference(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A float64 copy of an unconverted model whose norms are float64 too."""
    reference = copy.deepcopy(model).double()
    for parent in list(reference.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, Float64Norm(child))
    return reference


def batch_of(batch: int, length: int, seed: int = 0, holes: float = 0.2):
    """Token ids and labels (B, T), a share of the labels at -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 97, (batch, length), generator=generator)
    labels = ids.masked_fill(torch.rand(batch, length, generator=generator) < holes, -100)
    return ids, labels


def random_keep(batch: int, length: int, share: float = 0.6, seed: int = 1) -> torch.Tensor:
    """A random keep mask; sequences keep different numbers of rows."""
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of gradients, relative to the largest gradient of ``want``."""
    assert got.keys() == want.keys()
    scale = max(float(g.detach().abs().max()) for g in want.values())
    worst = max(float((got[n].double() - g.double()).detach().abs().max()) for n, g in want.items())
    return worst / scale if scale else worst


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name; every trainable parameter must have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
