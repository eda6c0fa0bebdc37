"""Options and what all tests share: small models, and a reference that is float64 throughout."""

import copy
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which transformers may do

from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

# Tensors of tests are tiny: two threads would mostly wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_in():
    """Function that makes a tiny quickstart recipe with its run in a given folder."""
    from lightning_collider.training.config import load_comparison
    from tests.training.conftest import TINY

    def make(folder: Path, *overrides: str):
        return load_comparison("quickstart", [*TINY, f"out={folder}", *overrides])

    return make


@pytest.fixture(scope="session")
def finished(tiny_in, tmp_path_factory):
    """A finished tiny comparison, which tests read and leave alone: recipe, folder and results."""
    from lightning_collider.training.run import run_recipe

    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = tiny_in(folder)
    return recipe, folder, run_recipe(recipe)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
# Families with what their small model adds: Qwen3's head size is not width over heads.
CONFIGS: dict[str, tuple[type, dict]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "phi": (PhiConfig, {"num_key_value_heads": 8, "hidden_act": "gelu_new"}),
}


def small_model(family: str, seed: int = 0, layers: int = 3, **config):
    """A causal LM of a family in training mode: width 64, 8 query heads, vocabulary 97.

    Biases and norm weights are drawn at random, so that an operator that forgets one is found out.
    """
    config_class, extra = CONFIGS[family]
    settings = {**SMALL, "num_hidden_layers": layers, **extra, **config}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**settings)).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.add_(torch.randn_like(p), alpha=0.1)
            elif name.endswith("bias"):
                p.normal_(std=0.1)
    return model


def small_llama(tied: bool = False, **settings):
    """The small Llama."""
    return small_model("llama", tie_word_embeddings=tied, **settings)


class Float64Norm(nn.Module):
    """RMSNorm in the input's own precision; Hugging Face's is float32 even in a float64 model."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def float64_reference(model):
    """A float64 copy of an unconverted model whose norms are float64 too."""
    reference = copy.deepcopy(model).double()
    for parent in list(reference.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
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
