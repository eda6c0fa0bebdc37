"""The strategies, registered by name with the Trainer and with Fabric."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_collider.strategies.fabric import ColliderStrategy as FabricColliderStrategy
from lightning_collider.strategies.fsdp1 import FSDP1Strategy
from lightning_collider.strategies.trainer import ColliderStrategy

NAME = "collider"
DESCRIPTION = "Token-filtered backward; FSDP2 on several devices"
FSDP1_DESCRIPTION = "Token-filtered backward; FullyShardedDataParallel"

StrategyRegistry.register(NAME, ColliderStrategy, DESCRIPTION, override=True)
StrategyRegistry.register(f"{NAME}_fsdp1", FSDP1Strategy, FSDP1_DESCRIPTION, override=True)
STRATEGY_REGISTRY.register(NAME, FabricColliderStrategy, DESCRIPTION, override=True)

__all__ = ["ColliderStrategy", "FSDP1Strategy", "FabricColliderStrategy"]
