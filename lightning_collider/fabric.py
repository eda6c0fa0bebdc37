"""The Fabric side: ``Fabric(strategy=lightning_collider.fabric.ColliderStrategy(...))``."""

from lightning_collider.strategies.fabric import ColliderStrategy

__all__ = ["ColliderStrategy"]
