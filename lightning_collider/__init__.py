"""lightning-collider: token-filtered LLM training, filtered in every layer's backward."""

from lightning_collider import fabric, federated, oracle, superposition
from lightning_collider.filtering.selectors import select
from lightning_collider.filtering.state import backward_filter
from lightning_collider.nn.causal_lm import token_losses
from lightning_collider.nn.convert import convert
from lightning_collider.nn.coverage import coverage
from lightning_collider.strategies.trainer import ColliderStrategy

__version__ = "0.1.0"

__all__ = [
    "ColliderStrategy",
    "backward_filter",
    "convert",
    "coverage",
    "fabric",
    "federated",
    "oracle",
    "select",
    "superposition",
    "token_losses",
]
