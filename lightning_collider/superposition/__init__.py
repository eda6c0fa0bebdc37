"""Token-Superposition Training (arXiv 2605.06546): first bags of tokens, then single tokens."""

from lightning_collider.superposition.callback import TokenSuperposition
from lightning_collider.superposition.loss import (
    bag_entropy,
    bag_weights,
    linear_multi_hot_cross_entropy,
    multi_hot_cross_entropy,
)
from lightning_collider.superposition.model import BagForward, BagSettings, superposed_loss
from lightning_collider.superposition.schedule import WarmupStableDecay

__all__ = [
    "BagForward",
    "BagSettings",
    "TokenSuperposition",
    "WarmupStableDecay",
    "bag_entropy",
    "bag_weights",
    "linear_multi_hot_cross_entropy",
    "multi_hot_cross_entropy",
    "superposed_loss",
]
