"""What each of two gloo ranks runs: ``torchrun -m tests.strategies.ranks CASE,CASE FOLDER``; rank 0
leaves FOLDER/CASE.pt with full weights.

Each rank sees every second batch; the tests compare with one process on all of them.
"""

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

import lightning_collider as lc
from lightning_collider.strategies import FSDP1Strategy
from tests.conftest import small_llama
from tests.strategies.lightning_module import Batches, UsersModule

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
N = 8  # batches of all ranks together


def reference():
    return small_llama(seed=9, layers=2).double().requires_grad_(False)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def keep_nothing_on_rank_1(losses, reference_losses, labels):
    keep = torch.zeros_like(labels, dtype=torch.bool)
    return keep if rank() == 1 else ~keep


class RanksBatches(L.LightningDataModule):
    """Every second batch for each rank, in order."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first

    def train_dataloader(self):
        return DataLoader(Subset(Batches(N), range(self.first + rank(), N, 2)))


def fit(strategy, max_steps, ckpt_path=None, first=0, module=None, **settings):
    module = module or UsersModule()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=max_steps,
        use_distributed_sampler=False,
        **{**QUIET, **settings},
    )
    trainer.fit(module, RanksBatches(first), ckpt_path=ckpt_path)
    return module, trainer


def full_weights(model) -> dict:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def excess(**settings):
    return lc.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference(), **settings)


def nothing_case(folder):
    module, _ = fit(lc.ColliderStrategy(selector=keep_nothing_on_rank_1), max_steps=N // 2)
    return full_weights(module.model)


def clip_case(folder):
    module, _ = fit(excess(), max_steps=1, gradient_clip_val=1e-3)
    return full_weights(module.model)


def sharded_case(folder):
    strategy = excess()
    module, _ = fit(strategy, max_steps=1)
    assert all(isinstance(p, DTensor) for p in module.model.parameters())
    assert all(isinstance(p, DTensor) for p in strategy.filtering.reference.parameters())
    return {}


class WithOwnHead(UsersModule):
    """A trainable parameter beside the model, which the ranks have to keep in step."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale.sum()


def own_parameter_case(folder):
    module, _ = fit("collider", max_steps=N // 2, module=WithOwnHead())
    mine = full_weights(module)["scale"]
    everyones = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(everyones, mine)
    assert everyones[0].equal(everyones[1])
    return full_weights(module)


def resume_case(folder, strategy=excess):
    half = folder / f"{strategy.__name__}.ckpt"

    class SaveHalf(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(half)

    def module():
        return UsersModule(optimizer=torch.optim.AdamW)

    whole, _ = fit(strategy(), 4, module=module(), callbacks=[SaveHalf()])
    resumed, _ = fit(strategy(), 4, half, first=4, module=module())
    assert len(whole.losses) == 4 and resumed.losses == whole.losses[2:]
    after, want = full_weights(resumed.model), full_weights(whole.model)
    assert all(after[name].equal(p) for name, p in want.items())
    return want


def fsdp1():
    return FSDP1Strategy(keep=0.6, selector="excess_loss", reference=reference())


def fsdp1_resume_case(folder):
    return resume_case(folder, fsdp1)


def fsdp1_full_case(folder):
    """The crash that a full checkpoint would end in is refused before anything is trained."""
    with pytest.raises(ValueError, match="use state_dict_type='sharded'"):
        fit(FSDP1Strategy(state_dict_type="full"), max_steps=1)
    return {}


def fabric_case(folder):
    strategy = lc.fabric.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference())
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = small_llama(layers=2).double()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i, item in enumerate(Subset(Batches(N), range(rank(), N, 2))):
        batch = {name: value[None] for name, value in item.items()}
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            fabric.backward(model(**batch).loss)
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(model.module)


if __name__ == "__main__":
    cases, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    for case in cases:
        weights = globals()[f"{case}_case"](folder)
        if rank() == 0:
            torch.save(weights, folder / f"{case}.pt")
