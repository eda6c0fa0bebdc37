"""Two gloo ranks: steps, clipping, checkpoints; test_matrix.py has the set-ups and families."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import relative_error
from tests.strategies.lightning_module import Batches, UsersModule
from tests.strategies.ranks import N, reference
from tests.strategies.test_trainer import excess_loss_masks, steps_by_hand

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def launch(module: str, case: str, folder: Path) -> None:
    """Run a module's case on two ranks; a hang is a failure, not a wait."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", module, case, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


CASES = "nothing clip sharded own_parameter resume fsdp1_resume fsdp1_full fabric".split()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Final weights of a case of ranks.py; one launch runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    launch("tests.strategies.ranks", ",".join(CASES), folder)
    return {case: torch.load(folder / f"{case}.pt") for case in CASES}


def joined(masks_of, window):
    start = UsersModule().model
    return steps_by_hand(start, Batches(N).items, masks_of, window), start


def moved(after, start):
    return max(float((after[n] - p).abs().max()) for n, p in start.named_parameters())


@pytest.mark.dist
def test_fabrics_steps_equal_one_process_on_the_joined_batch(weights):
    want, start = joined(excess_loss_masks(reference()), window=4)
    assert relative_error(weights["fabric"], want) < 1e-6  # Fabric hands the loss over in float32
    assert moved(weights["fabric"], start) > 1e-3


@pytest.mark.dist
def test_a_rank_that_keeps_nothing(weights):
    calls = iter(range(N))

    def masks_of(model, ids, labels):
        on_rank_1 = next(calls) % 2 == 1
        return torch.full_like(labels, not on_rank_1, dtype=torch.bool)

    want, start = joined(masks_of, window=2)
    assert relative_error(weights["nothing"], want) < 1e-8
    assert moved(weights["nothing"], start) > 1e-3


@pytest.mark.dist
def test_clipping_by_norm_limits_the_step(weights):
    start = dict(UsersModule().model.named_parameters())
    step = torch.stack([(weights["clip"][n] - p).norm() for n, p in start.items()]).norm().item()
    assert step == pytest.approx(0.1 * 1e-3, rel=1e-4)  # learning rate times the clipped norm


@pytest.mark.dist
def test_student_and_reference_are_sharded(weights):
    assert "sharded" in weights  # the case itself looks at the parameters


@pytest.mark.dist
def test_the_users_own_parameters_stay_in_step(weights):
    assert weights["own_parameter"]["scale"].item() != 1.0


@pytest.mark.dist
@pytest.mark.parametrize("case", ["resume", "fsdp1_resume"])
def test_sharded_checkpoints_resume_exactly(weights, case):
    """The case compares the resumed run with an uninterrupted one, to the bit."""
    start = UsersModule().model
    assert weights[case] and (case == "fsdp1_resume" or moved(weights[case], start) > 1e-3)


@pytest.mark.dist
def test_full_fsdp1_checkpoints_are_refused_where_they_crash(weights):
    assert "fsdp1_full" in weights  # the case itself expects the error
