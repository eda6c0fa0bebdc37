"""The launchers of docs/scale-out.md, on two processes, against the same run in one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.training.config import to_yaml
from lightning_collider.training.models import build_model
from lightning_collider.training.pretrain import run_training
from lightning_collider.training.ranks import rank_of_process, ranks_of_job
from lightning_collider.training.scoring import score
from tests.training.small_run import rows_of, small_recipe, write_inputs
from tests.training.test_resume import TIMEOUT_S, free_port

pytestmark = pytest.mark.dist
CLI = ["-m", "lightning_collider.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DENSE = ("trainer.max_steps=4", "filter.selector=none", "filter.keep=1.0")


def start(command):
    inherited = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    return subprocess.Popen(
        command,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes):
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, words in zip(processes, printed, strict=True):
        assert process.returncode == 0, words[-4000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The rows of the log of one process."""
    folder = tmp_path_factory.mktemp("alone")
    write_inputs(folder)
    run_training(small_recipe(folder, *DENSE))
    return rows_of(folder)


def commands(launcher, words):
    """The processes that a launcher needs, in words of the shell."""
    if launcher == "lightning":
        return [[sys.executable, *CLI, *words, "trainer.devices=2"]]
    if launcher == "torchrun":
        one_node = ["--standalone", "--nproc-per-node", "2"]
        return [[*TORCHRUN, *one_node, *CLI, *words, "trainer.devices=2"]]
    words = [*words, "trainer.num_nodes=2", "trainer.devices=1", "trainer.sharding=hybrid"]
    port = str(free_port())
    agents = []
    for node in ("0", "1"):
        about = ["--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1"]
        about += ["--master-addr", "127.0.0.1", "--master-port", port]
        agents.append([*TORCHRUN, *about, *CLI, *words])
    return agents


# Scoring, below, covers the start by torchrun on one node.
ONE_NODE = pytest.param("torchrun", marks=pytest.mark.slow)


@pytest.mark.parametrize("launcher", ["lightning", ONE_NODE, "two nodes"])
def test_launched_run_takes_the_steps_of_one_process(tmp_path, alone, launcher):
    write_inputs(tmp_path)
    words = ["train", str(tmp_path / "small.yaml"), *DENSE]
    finish([start(command) for command in commands(launcher, words)])
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, alone, strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_scoring_under_torchrun_equals_one_process(tmp_path):
    write_inputs(tmp_path, documents=800)
    build_model(small_recipe(tmp_path)).save_pretrained(tmp_path / "reference")
    about = ["filter.selector=excess_loss", f"filter.reference={tmp_path}/reference"]
    recipe = small_recipe(tmp_path, *about)
    (tmp_path / "scored.yaml").write_text(to_yaml(recipe))
    words = ["score", str(tmp_path / "scored.yaml")]
    finish([start([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *CLI, *words])])
    folder = next((tmp_path / "data" / "scores").iterdir())
    assert len(list(folder.glob("block-*.npy"))) == 3
    folder.rename(tmp_path / "together")
    alone = ScoreStore(score(recipe))
    together = ScoreStore(tmp_path / "together")
    rows = range(len(alone))
    assert (alone.losses(rows) - together.losses(rows)).abs().max() < 2e-2  # float16 of about 6


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        ({}, 0, 1),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 5, 8),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, 3, 4),
        ({"LOCAL_RANK": "1", "NODE_RANK": "2", "WORLD_SIZE": "12"}, 9, 12),
        ({"NODE_RANK": "1"}, 4, 1),  # the process that the user starts on the second node
    ],
)
def test_rank_of_each_launcher(monkeypatch, environment, rank, world):
    names = "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK NODE_RANK SLURM_PROCID SLURM_NTASKS"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (rank_of_process(devices=4), ranks_of_job()) == (rank, world)


SLURM = Path(__file__).parents[2] / "docs" / "scale-out.md"


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (2, False), (75, True)])
def test_slurm_template_requeues_a_run_that_was_stopped(tmp_path, status, requeued):
    """Stand-ins for srun, which ends with a status, and for scontrol, which writes its words."""
    (script,) = re.findall(r"```\n(#!/bin/bash\n#SBATCH.*?)```", SLURM.read_text(), re.DOTALL)
    words = tmp_path / "words"
    for name, line in (("srun", f"exit {status}"), ("scontrol", f'echo "$@" > {words}')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", "-c", script], env=environment, timeout=TIMEOUT_S)
    assert done.returncode == status
    assert words.exists() == requeued
    if requeued:
        assert words.read_text() == "requeue 17\n"
