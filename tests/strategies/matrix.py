"""Every set-up with every family on two gloo ranks: ``torchrun -m tests.strategies.matrix GROUP
FOLDER``. Rank 0 leaves FOLDER/SETUP-FAMILY.pt with the final weights and the reasons of those
hidden states whose gradients were full size.

A rank sees every second batch; test_matrix.py compares with one process on all of them.
"""

import re
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

import lightning_collider as lc
from lightning_collider.nn.layer import FilteredLayer
from lightning_collider.strategies import FSDP1Strategy
from tests.conftest import CONFIGS, small_model
from tests.strategies.lightning_module import UsersModule
from tests.strategies.ranks import N, fit, full_weights, rank

STEPS = N // 2
SHARE = 8  # what OneLine divides its sums by
FAMILIES = sorted(CONFIGS)


def reference(family):
    return small_model(family, seed=9, layers=2).double().requires_grad_(False)


def excess(family):
    return {"keep": 0.6, "selector": "excess_loss", "reference": reference(family)}


def even_targets(losses, reference_losses, labels):
    """A mask that no precision changes: rows whose target is an even token."""
    keep = torch.zeros_like(labels, dtype=torch.bool)
    keep[:, :-1] = labels[:, 1:] % 2 == 0
    return keep


class Checkpointed(UsersModule):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


class OneLine(UsersModule):
    """Converts by itself and calls backward_filter: any strategy of Lightning's will do."""

    def __init__(self, **settings):
        super().__init__(**settings)
        lc.convert(self.model)

    def training_step(self, batch, batch_idx):
        losses = lc.token_losses(self.model, batch["input_ids"], batch["labels"])
        loss = losses.sum() / SHARE
        lc.backward_filter(loss, even_targets(None, None, batch["labels"]))
        return loss


def fsdp2(module=UsersModule, trainer=None, selection=excess, double=True, **settings):
    """A function that trains a family under ColliderStrategy with these settings."""

    def run(family):
        strategy = lc.ColliderStrategy(**selection(family), **settings)
        kwargs = {"max_steps": STEPS, **(trainer or {})}
        return fit(strategy, module=module(family=family, double=double), **kwargs)

    return run


def fsdp1(**settings):
    def run(family):
        strategy = FSDP1Strategy(**excess(family), **settings)
        return fit(strategy, max_steps=STEPS, module=UsersModule(family=family))

    return run


def own_selector(family):
    return {"selector": even_targets}


def plain_ddp(family):
    return fit("ddp", max_steps=STEPS, module=OneLine(family=family))


GROUPS = {
    "sharded": {
        "fsdp2": fsdp2(),
        "fsdp2_checkpointing": fsdp2(Checkpointed),
        # 4 batches a rank in windows of 3: the last window is short
        "fsdp2_accumulation": fsdp2(trainer={"accumulate_grad_batches": 3, "max_steps": 2}),
        "fsdp2_bf16_mixed": fsdp2(
            trainer={"precision": "bf16-mixed"}, selection=own_selector, double=False
        ),
    },
    "sharded_otherwise": {
        "fsdp2_bf16_weights": fsdp2(
            selection=own_selector,
            double=False,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ),
        "fsdp2_cpu_offload": fsdp2(cpu_offload=True),
        "hybrid": fsdp2(sharding="hybrid"),
    },
    "replicated": {"ddp": fsdp2(sharding="none"), "plain_ddp": plain_ddp},
    "fsdp1": {
        "fsdp1": fsdp1(),
        "fsdp1_checkpointing": fsdp1(activation_checkpointing_policy={FilteredLayer}),
    },
}


def whole_weights(module, trainer) -> dict:
    root = trainer.strategy.model
    if not isinstance(root, FullyShardedDataParallel):
        return full_weights(module.model)
    with FullyShardedDataParallel.summon_full_params(root):
        weights = full_weights(module.model)
    wrappers = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    return {re.sub("|".join(wrappers), "", name): p for name, p in weights.items()}


def main(group: str, folder: Path) -> None:
    torch.set_num_threads(1)
    for setup, run in GROUPS[group].items():
        for family in FAMILIES:
            module, trainer = run(family)
            dense = [reason for _, reason in lc.coverage(module).edges if reason]
            weights = whole_weights(module, trainer)
            if rank() == 0:
                torch.save((weights, dense), folder / f"{setup}-{family}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
