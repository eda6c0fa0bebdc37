"""Two gloo ranks take the same steps on both sides of the switch as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.conftest import relative_error
from tests.strategies.lightning_module import UsersModule, fit
from tests.superposition.lightning_module import BAG, Rows, callback
from tests.superposition.ranks import STEPS, N

ROOT = Path(__file__).parents[2]


def joined_order():
    """Rows as one process reads them: for each step, rank 0's and then rank 1's."""
    order, used = [], 0
    for step in range(STEPS):
        count = BAG if step < STEPS // 2 else 1
        for rank in range(2):
            order += [2 * i + rank for i in range(used, used + count)]
        used += count
    return order


@pytest.mark.dist
def test_two_ranks_equal_one_process_and_resume_exactly(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", "tests.superposition.ranks", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    # One process takes the ranks' micro-batches as one window. Like DDP over the ranks, Lightning's
    # own strategy averages their losses; a ColliderStrategy averages over all of their pairs.
    for ranks, alone in (("collider", "collider"), ("ddp", "auto")):
        got = torch.load(tmp_path / f"{ranks}.pt")
        module = UsersModule()
        start = {name: p.detach().clone() for name, p in module.model.named_parameters()}
        batches = DataLoader(Rows(N), sampler=joined_order())
        callbacks = [callback(ratio=0.5)]
        settings = {"max_steps": STEPS, "accumulate_grad_batches": 2, "callbacks": callbacks}
        fit(module, alone, batches, **settings)
        assert relative_error(got, dict(module.model.named_parameters())) < 1e-8
        assert max(float((got[name] - p).abs().max()) for name, p in start.items()) > 1e-3
