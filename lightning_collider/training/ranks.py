"""What a process knows of the other ranks: its number before set-up, and agreement after it."""

import os
from typing import Any

import lightning as L
import torch


def rank_of_process(devices: int) -> int:
    """The rank that torchrun, SLURM or Lightning's launcher gave to this process, before set-up.

    devices: processes on each node. Lightning's own launcher numbers only those of its node.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if (rank := _number(name)) is not None:
            return rank
    node = next((n for n in map(_number, ("GROUP_RANK", "NODE_RANK")) if n is not None), 0)
    return node * devices + (_number("LOCAL_RANK") or 0)


def ranks_of_job() -> int:
    """How many processes torchrun or SLURM started; 1 without them."""
    return _number("WORLD_SIZE") or _number("SLURM_NTASKS") or 1


def device_of_process() -> torch.device:
    """The GPU that is this process's among those of its node, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = next((n for n in map(_number, ("LOCAL_RANK", "SLURM_LOCALID")) if n is not None), 0)
    return torch.device("cuda", local % torch.cuda.device_count())


def any_rank(trainer: L.Trainer, flag: bool) -> bool:
    """Whether the flag is set on any rank of a Trainer. All ranks call this, and wait for it."""
    if trainer.world_size == 1:
        return flag
    total: Any = torch.tensor(float(flag), device=trainer.strategy.root_device)
    torch.distributed.all_reduce(total)
    return bool(total > 0)


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
