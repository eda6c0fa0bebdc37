"""Two gloo ranks with FSDP2 take the same steps as one process on the joined batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import relative_error
from tests.strategies.lightning_module import Batches, UsersModule
from tests.strategies.ranks import N, reference
from tests.strategies.test_trainer import excess_loss_masks, keep_everything, steps_by_hand

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def run_ranks(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run a case of ranks.py on two ranks; a hang is a failure, not a wait."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", "tests.strategies.ranks", case, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return torch.load(folder / "weights.pt")


def joined(masks_of, window, items=None):
    start = UsersModule().model
    return steps_by_hand(start, items or Batches(N).items, masks_of, window), start


def moved(after, start):
    return max(float((after[n] - p).abs().max()) for n, p in start.named_parameters())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "window", "tolerance"),
    # Fabric hands the loss over in float32.
    [("trainer", 2, 1e-8), ("accumulation", 6, 1e-8), ("fabric", 4, 1e-6)],
)
def test_steps_equal_one_process_on_the_joined_batch(tmp_path, case, window, tolerance):
    want, start = joined(excess_loss_masks(reference()), window)
    got = run_ranks(case, tmp_path)
    assert relative_error(got, want) < tolerance
    assert moved(got, start) > 1e-3


@pytest.mark.dist
def test_a_rank_that_keeps_nothing(tmp_path):
    calls = iter(range(N))

    def masks_of(model, ids, labels):
        on_rank_1 = next(calls) % 2 == 1
        return torch.full_like(labels, not on_rank_1, dtype=torch.bool)

    want, start = joined(masks_of, window=2)
    got = run_ranks("nothing", tmp_path)
    assert relative_error(got, want) < 1e-8
    assert moved(got, start) > 1e-3


@pytest.mark.dist
def test_clipping_by_norm_limits_the_step(tmp_path):
    got = run_ranks("clip", tmp_path)
    start = dict(UsersModule().model.named_parameters())
    step = torch.stack([(got[n] - p).norm() for n, p in start.items()]).norm().item()
    assert step == pytest.approx(0.1 * 1e-3, rel=1e-4)  # learning rate times the clipped norm


@pytest.mark.dist
def test_bf16_mixed_is_close_to_the_float64_steps(tmp_path):
    want, start = joined(keep_everything, window=2, items=Batches(4).items)
    got = run_ranks("mixed", tmp_path)
    moves = {n: got[n].double() - p for n, p in start.named_parameters()}
    want_moves = {n: want[n] - p for n, p in start.named_parameters()}
    assert relative_error(moves, want_moves) < 0.03
    assert all(p.dtype == torch.float32 for p in got.values())


@pytest.mark.dist
def test_the_users_own_parameters_stay_in_step(tmp_path):
    got = run_ranks("own_parameter", tmp_path)
    assert got["scale"].item() != 1.0


@pytest.mark.dist
def test_sharded_checkpoints_resume_exactly(tmp_path):
    got = run_ranks("resume", tmp_path)
    assert moved(got, UsersModule().model) > 1e-3
