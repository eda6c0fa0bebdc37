"""The strategies, registered by name with the Trainer and with Fabric."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_collider.strategies.fabric import ColliderStrategy as FabricColliderStrategy
from lightning_collider.strategies.trainer import ColliderStrategy

NAME = "collider"
DESCRIPTION = "Token-filtered backward; FSDP2 on several devices"

StrategyRegistry.register(NAME, ColliderStrategy, DESCRIPTION, override=True)
STRATEGY_REGISTRY.register(NAME, FabricColliderStrategy, DESCRIPTION, override=True)

__all__ = ["ColliderStrategy", "FabricColliderStrategy"]
