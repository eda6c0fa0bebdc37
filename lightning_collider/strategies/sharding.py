"""How models are laid out over the ranks: the device mesh, and what FSDP2 shards as one unit."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_collider.nn.layer import FilteredLayer

SHARDINGS = ("auto", "full", "hybrid", "none")


def check_sharding(sharding: str) -> None:
    """Raise ValueError for an unknown sharding."""
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, got {sharding!r}")


def check_tensor_parallel(tensor_parallel_size: int) -> None:
    """Raise ValueError when tensor parallelism is asked for."""
    if tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} is not supported: the operators compute "
            "whole layers on one device; shard with FSDP2 (sharding='full') instead"
        )


def data_parallel_mesh(device_mesh: Any, sharding: str, num_nodes: int, num_processes: int) -> Any:
    """The mesh to shard over.

    One dimension for full sharding; (copies, shards of each) otherwise: a copy a node for
    "hybrid", a copy a device for "none", which is data parallelism without sharding.
    """
    if sharding in ("auto", "full"):
        return device_mesh["data_parallel"]
    n_devices = num_nodes * num_processes
    shape = (num_nodes, num_processes) if sharding == "hybrid" else (n_devices, 1)
    return torch.distributed.init_device_mesh(
        device_mesh.device_type, shape, mesh_dim_names=("replicate", "shard")
    )


def offload_policy(cpu_offload: bool) -> OffloadPolicy:
    """FSDP2's policy for keeping parameters, gradients and optimizer state on the CPU, or not."""
    # Pinned memory makes the copies asynchronous, and needs a GPU.
    return (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    )


def shard(
    module: nn.Module,
    models: Iterable[nn.Module],
    reference: nn.Module | None,
    mesh: Any,
    mp_policy: MixedPrecisionPolicy | None,
    cpu_offload: bool,
) -> None:
    """Shard causal LMs with FSDP2: each decoder layer, then the rest.

    Args:
        module: what holds the models; parameters of its own are sharded as one more unit.
        models: to train.
        reference: a frozen one, or None.
        mesh, mp_policy, cpu_offload: see ``data_parallel_mesh`` and ``torch.distributed.fsdp``.
    """
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": offload_policy(cpu_offload)}
    if mp_policy is not None:
        settings["mp_policy"] = mp_policy
    inside: set[int] = set()
    for model in models:
        inside |= {id(p) for p in model.parameters()}
    alone = any(p.requires_grad and id(p) not in inside for p in module.parameters())
    for model in models:
        shard_model(model, reshard_root=False, **settings)
    if reference is not None:
        # No backward follows, which would need its embedding and head again.
        shard_model(reference, reshard_root=True, **settings)
    if alone:
        # The user's own parameters beside the model have to be reduced over the ranks too.
        fully_shard(module, **settings)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if hasattr(module, step):
                register_fsdp_forward_method(module, step)


def shard_model(model: nn.Module, reshard_root: bool, **settings: Any) -> None:
    """Shard one causal LM; ``reshard_root``: free the embedding and head after a forward."""
    for layer in decoder_layers(model):
        fully_shard(layer, **settings)
    fully_shard(model, reshard_after_forward=reshard_root, **settings)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, converted or not."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if isinstance(m, FilteredLayer) or type(m).__name__ in names]
