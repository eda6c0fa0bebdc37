"""SIGKILL at random moments leaves the loss curve bit-equal; spoilt checkpoints are passed over."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file

from lightning_collider.training import pretrain
from lightning_collider.training.callbacks import MetricsFile, Stopped
from lightning_collider.training.checkpoint import (
    ABOUT,
    STATE,
    checkpoint_path,
    complete_steps,
    newest_usable,
)
from lightning_collider.training.files import read_json
from lightning_collider.training.pretrain import run_training
from tests.training.small_run import rows_of, small_recipe, train_here, write_inputs

CONTEXT = multiprocessing.get_context("forkserver")  # a fresh process without fresh imports
TIMEOUT_S = 240


def rank_environment(rank, world, port):
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
    }


def train_rank(folder, overrides, environment):
    # A Trainer of this test session may have left its port here, and still listens on it.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({k: str(v) for k, v in environment.items()})
    with open(folder / f"output-{environment.get('RANK', 0)}.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    train_here(folder, overrides)


def free_port():
    """A port below those that the system hands out by itself, so that nobody takes it meanwhile."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 30000")


def start(folder, overrides, ranks, target=train_rank):
    """Start the run's processes as torchrun would."""
    port = free_port()
    environments = [{}] if ranks == 1 else [rank_environment(r, ranks, port) for r in range(ranks)]
    CONTEXT.set_forkserver_preload(["lightning_collider.training.pretrain"])
    processes = [CONTEXT.Process(target=target, args=(folder, overrides, e)) for e in environments]
    for process in processes:
        process.start()
    return processes


def finish(folder, processes, status=0):
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == status, (folder / "output-0.txt").read_text()[-3000:]


def lines_written(folder):
    """Bytes of the log: they grow with each step, also where a step is trained again."""
    path = folder / "run" / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0


def kill_after(folder, processes, steps, delay):
    """SIGKILL all ranks a moment after the log grew by about so many rows."""
    size, seen, deadline = lines_written(folder), 0, time.monotonic() + TIMEOUT_S
    while seen < steps and any(p.is_alive() for p in processes):
        assert time.monotonic() < deadline, (folder / "output-0.txt").read_text()[-3000:]
        time.sleep(0.002)
        if lines_written(folder) != size:
            size, seen = lines_written(folder), seen + 1
    time.sleep(delay)
    killed = 0
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed = 1
        process.join()
    return killed


def assert_equal_runs(one, other):
    assert rows_of(one) == rows_of(other)
    weights, others = (load_file(f / "run/model/model.safetensors") for f in (one, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def kill_often(tmp_path, kills, steps, ranks, *overrides):
    """An undisturbed run, and one that is killed so often; they must be equal."""
    overrides = (f"trainer.max_steps={steps}", f"trainer.devices={ranks}", *overrides)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_inputs(folder)
    finish(whole, start(whole, overrides, ranks))
    rng, done = random.Random(0), 0
    while done < kills and not (cut / "run" / "train.json").is_file():
        # At most two rows: less than a checkpoint's distance goes by, more is lost and redone.
        at = rng.randint(3, 5) if done % 2 else rng.randint(0, 2)
        done += kill_after(cut, start(cut, overrides, ranks), at, rng.random() * 0.02)
    assert done == kills, f"the run ended after {done} kills: it needs more steps"
    finish(cut, start(cut, overrides, ranks))
    assert len(rows_of(whole)) == steps
    assert_equal_runs(whole, cut)


def test_ten_kills_leave_the_loss_curve_bit_equal(tmp_path):
    """Accumulation windows of four micro-batches, several epochs, dropout in the attention."""
    kill_often(tmp_path, 10, 80, 1, "model.config.attention_dropout=0.1")


@pytest.mark.dist
def test_kills_of_two_ranks_leave_the_loss_curve_bit_equal(tmp_path):
    kill_often(tmp_path, 2, 14, 2, "trainer.sharded_checkpoints=true")


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    kill_often(tmp_path, 50, 400, 1)


def test_a_kill_between_checkpoint_and_row_leaves_no_row_out(tmp_path, monkeypatch):
    """Lightning writes a step's row behind the hooks in which its checkpoint is saved."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_inputs(folder)
    train_here(whole)
    write = MetricsFile.log_metrics

    def killed_at_6(self, metrics, step=None):
        if step == 5:  # counted from 0
            raise RuntimeError("killed")
        write(self, metrics, step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(MetricsFile, "log_metrics", killed_at_6)
        train_here(cut)
    assert complete_steps(cut / "run" / "checkpoints") == [3]  # the draft of step 6 does not count
    train_here(cut)
    assert_equal_runs(whole, cut)


def spoil_by_truncation(path):
    state = path / STATE
    state.write_bytes(state.read_bytes()[:1000])


def spoil_by_one_bit(path):
    data = bytearray((path / STATE).read_bytes())
    data[len(data) // 2] ^= 1
    (path / STATE).write_bytes(data)


def spoil_by_identity(path):
    about = read_json(path / ABOUT)
    about["identity"]["seed"] = 99
    (path / ABOUT).write_text(json.dumps(about))


def spoil_by_absence(path):
    (path / ABOUT).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_by_truncation, "is truncated"),
        (spoil_by_one_bit, "is damaged .*differs from its checksum"),
        (spoil_by_identity, "is of another run.*seed is 99"),
        (spoil_by_absence, "has no readable about.json"),
    ],
)
def test_spoilt_checkpoint_is_named_and_the_one_before_is_used(tmp_path, spoil, message):
    write_inputs(tmp_path)
    run_training(small_recipe(tmp_path, "trainer.max_steps=6"))
    folder = tmp_path / "run" / "checkpoints"
    assert complete_steps(folder) == [3, 6]
    identity = read_json(checkpoint_path(folder, 3) / ABOUT)["identity"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_usable(folder, identity) == checkpoint_path(folder, 6)
    spoil(checkpoint_path(folder, 6))
    with pytest.warns(UserWarning, match=f"(?s)step=00000006 {message}.*the checkpoint before"):
        assert newest_usable(folder, identity) == checkpoint_path(folder, 3)
    assert complete_steps(folder) == [3]


def test_a_draft_is_no_checkpoint(tmp_path):
    draft = tmp_path / "step=00000009.part"
    draft.mkdir()
    (draft / ABOUT).write_text("{}")
    assert complete_steps(tmp_path) == []
    assert newest_usable(tmp_path, {}) is None


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    overrides = ("trainer.checkpoint_every=1000",)
    for folder in (whole, cut):
        write_inputs(folder)
    run_training(small_recipe(whole, *overrides))
    (process,) = start(cut, overrides, 1)
    while lines_written(cut) == 0:
        assert process.is_alive(), (cut / "output-0.txt").read_text()[-3000:]
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    finish(cut, [process], Stopped.STATUS)
    (step,) = complete_steps(cut / "run" / "checkpoints")
    assert 0 < step < 12
    assert f"SIGTERM at step {step}, saved" in (cut / "output-0.txt").read_text()
    run_training(small_recipe(cut, *overrides))
    assert_equal_runs(whole, cut)


def test_a_signal_while_the_data_are_prepared_has_the_same_status(tmp_path, monkeypatch, capsys):
    """No step was taken, so there is nothing to save."""
    write_inputs(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(pretrain, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        run_training(small_recipe(tmp_path))
    assert stopped.value.code == 75
    assert "SIGTERM: start the same command to go on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    assert run_training(small_recipe(tmp_path))["steps"] == 12


@pytest.mark.parametrize("stale", [False, True])
def test_a_kill_between_model_and_numbers_is_made_good(tmp_path, monkeypatch, stale):
    """The model is there and train.json is not; or somebody exported an earlier one there."""
    whole, folder = tmp_path / "whole", tmp_path / "cut"
    for place in (whole, folder):
        write_inputs(place)
    expected = run_training(small_recipe(whole))
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(pretrain, "write_json", lambda *_: {}["power cut"])
        run_training(small_recipe(folder))
    model = folder / "run" / "model"
    assert model.is_dir() and not (folder / "run" / "train.json").exists()
    if stale:
        (model / "model.safetensors").write_bytes(b"of another step")
    found = run_training(small_recipe(folder))
    for name in ("steps", "input_tokens", "kept_rows", "loss_all"):
        assert found[name] == expected[name]
    assert_equal_runs(whole, folder)
    assert (folder / "run" / "train.json").is_file()
