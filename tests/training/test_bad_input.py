"""The table of things that go wrong in a run: each is one clear message, and nothing is lost."""

import json
import os
import re
import resource
import signal

import numpy as np
import pytest
import torch

from lightning_collider import cli
from lightning_collider.data.shards import read_manifest
from lightning_collider.training.checkpoint import Checkpoints, complete_steps
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.pretrain import run_training
from tests.training.small_run import rows_of, small_recipe, write_inputs
from tests.training.test_resume import finish, start, train_rank


@pytest.fixture
def folder(tmp_path):
    write_inputs(tmp_path)
    return tmp_path


def train(folder, *overrides):
    return cli.main(["train", str(folder / "small.yaml"), "trainer.max_steps=2", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sources.words.path={}/nothing.jsonl"], "no file matches {}/nothing.jsonl"),
        (["data.sources.words.path={}/tokenizer/*.bin"], "no file matches"),
        (["data.sources.words.path=builtin:poems"], "builtin:target, builtin:general"),
        (["data.sources.words.path=builtin:noise"], "is endless: set"),
        (["data.sources.words.path={}/empty.jsonl"], "has no text"),
        (["data.sources.words.path={}/null.jsonl"], "has no text"),
        (["data.sources.words.path={}/broken.jsonl"], "{}/broken.jsonl cannot be read"),
        (["data.sources.words.template='{{body}}'"], "has no column 'body'"),
        (["data.sequence_length=80", "trainer.batch_tokens=160"], "max_position_embeddings=64"),
        (["model.config.vocab_size=200"], "a vocabulary of 300 tokens and the model one of 200"),
        (["model.tokenizer={}/nowhere"], "no tokenizer in {}/nowhere"),
        (["trainer.batch_tokens=100"], "must be a multiple of 32"),
        (["trainer.epochs=1", "trainer.batch_tokens=65536"], "less than one optimizer step"),
        (["out={}/words.jsonl/run"], "cannot write to {}/words.jsonl/run"),
        (["data.folder={}/words.jsonl/data"], "cannot write to data.folder={}/words.jsonl/data"),
    ],
)
def test_mistake_is_one_message(folder, capsys, overrides, message):
    (folder / "empty.jsonl").write_text(json.dumps({"text": " "}) + "\n")
    (folder / "null.jsonl").write_text(json.dumps({"text": None, "id": 1}) + "\n")
    (folder / "broken.jsonl").write_text('{"text": "a"\n{"te')
    assert train(folder, *(o.format(folder) for o in overrides)) == 2
    assert message.format(folder) in capsys.readouterr().err


def test_a_run_leaves_the_signals_as_they_were(folder):
    before = signal.getsignal(signal.SIGTERM)
    assert train(folder) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_run_has_an_exit_status_of_its_own(folder, monkeypatch, capsys):
    """A signal in step 1: the step is ended and saved, and its process leaves with status 75."""
    step = LanguageModel.training_step

    def signalled(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(LanguageModel, "training_step", signalled)
        train(folder)
    assert stopped.value.code == 75
    assert "SIGTERM at step 1, saved: start the same command" in capsys.readouterr().out
    assert complete_steps(folder / "run" / "checkpoints") == [1]
    assert train(folder) == 0


@pytest.mark.parametrize("documents", [0, 3])
def test_too_little_validation_is_told_and_the_run_goes_on(folder, documents):
    words = [f"data.validation_fraction={0.001 if documents == 0 else 0.02}"]
    words += ["trainer.validate_every=1", "trainer.max_steps=2"]
    with pytest.warns(UserWarning, match=r"the validation part has too few.*Raise"):
        assert run_training(small_recipe(folder, *words))["steps"] == 2
    held = read_manifest(folder / "data" / "words" / "validation")
    assert held["documents"] == documents


def test_corrupt_shard_is_named(folder, capsys):
    assert train(folder) == 0
    (shard,) = (folder / "data" / "words" / "train").glob("tokens-*.npy")
    tokens = np.load(shard)
    tokens[5] ^= 1
    np.save(shard, tokens)
    assert train(folder, f"out={folder}/other") == 2
    printed = capsys.readouterr().err
    assert f"{shard} is damaged" in printed and "tokenises it again" in printed


def test_two_runs_in_one_folder(folder, capsys):
    assert train(folder) == 0
    before = rows_of(folder)
    (folder / "run" / "train.json").unlink()  # as if it still went on
    assert train(folder, "seed=4") == 2
    assert "seed: 3 there, 4 here" in capsys.readouterr().err
    assert rows_of(folder) == before


def fill_the_disk(monkeypatch):
    """A limit on the size of files, as a quota sets it, from the second checkpoint on."""
    save = Checkpoints.save

    def save_with_quota(self, trainer):
        if trainer.global_step > 3:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        save(self, trainer)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    monkeypatch.setattr(Checkpoints, "save", save_with_quota)


def train_rank_with_full_disk(folder, overrides, environment):
    if environment["RANK"] == 0:
        fill_the_disk(pytest.MonkeyPatch())
    train_rank(folder, overrides, environment)


@pytest.mark.dist
@pytest.mark.parametrize("sharded", [False, True])
def test_full_disk_of_one_rank_ends_both(folder, sharded):
    """No rank is left waiting for the one that failed, and the same command goes on."""
    overrides = ("trainer.devices=2", f"trainer.sharded_checkpoints={sharded}")
    for process in start(folder, overrides, 2, train_rank_with_full_disk):
        process.join(60)
        assert process.exitcode == 1
    reason = "another rank could not|CheckpointException" if sharded else "another rank could not"
    for rank, words in ((0, "cannot write the checkpoint"), (1, reason)):
        printed = (folder / f"output-{rank}.txt").read_text()
        assert re.search(words, printed) and "that of step 3 is complete" in printed
    assert complete_steps(folder / "run" / "checkpoints") == [3]
    finish(folder, start(folder, overrides, 2))
    assert complete_steps(folder / "run" / "checkpoints") == [9, 12]


def test_full_disk_keeps_the_checkpoints_before(folder, capsys, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    try:
        fill_the_disk(monkeypatch)
        assert cli.main(["train", str(folder / "small.yaml")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    printed = capsys.readouterr().err
    assert "cannot write the checkpoint" in printed and "that of step 3 is complete" in printed
    checkpoints = folder / "run" / "checkpoints"
    assert complete_steps(checkpoints) == [3] and len(os.listdir(checkpoints)) == 1
    monkeypatch.undo()
    assert run_training(small_recipe(folder))["steps"] == 12


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradient_that_is_not_finite(folder, capsys, monkeypatch, policy):
    """The second micro-batch of step 3 has an infinite loss."""
    step = LanguageModel.training_step

    def spoilt(self, batch, batch_idx):
        return step(self, batch, batch_idx) * (float("inf") if batch_idx == 9 else 1.0)

    monkeypatch.setattr(LanguageModel, "training_step", spoilt)
    words = ["train", str(folder / "small.yaml"), "trainer.max_steps=4", f"trainer.on_nan={policy}"]
    place = f"optimizer step 3 is not finite.*{folder}/data/words/train, tokens from"
    if policy == "stop":
        assert cli.main(words) == 2
        printed = capsys.readouterr().err
        assert "optimizer step 3 is not finite" in printed and "words/train, tokens from" in printed
        assert "trainer.on_nan=skip" in printed
    else:
        with pytest.warns(UserWarning, match=f"(?s){place}"):
            assert cli.main(words) == 0
        rows = rows_of(folder)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert not np.isfinite(rows[2]["gradient_norm"]) and np.isfinite(rows[3]["loss_all"])
        model = torch.load(
            folder / "run" / "checkpoints" / "step=00000004" / "state.ckpt", weights_only=True
        )["state_dict"]
        assert all(torch.isfinite(weight).all() for weight in model.values())


def test_spike_of_the_gradient_is_left_out(folder, monkeypatch):
    """Step 20's loss is a thousand times too large; Adam's moments must not see it."""
    step = LanguageModel.training_step

    def spoilt(self, batch, batch_idx):
        return step(self, batch, batch_idx) * (1000.0 if batch_idx // 4 == 19 else 1.0)

    monkeypatch.setattr(LanguageModel, "training_step", spoilt)
    words = ["trainer.max_steps=21", "trainer.on_spike=skip", "trainer.checkpoint_every=1"]
    words += ["trainer.keep_checkpoints=9"]
    with pytest.warns(UserWarning, match=r"step 20 has a norm of.*words/train, tokens.*left out"):
        run_training(small_recipe(folder, *words))
    before, spike, after = (
        torch.load(
            folder / "run" / "checkpoints" / f"step={n:08d}" / "state.ckpt", weights_only=True
        )
        for n in (19, 20, 21)
    )
    for name, weight in before["state_dict"].items():
        assert torch.equal(weight, spike["state_dict"][name])
    assert any(not torch.equal(w, after["state_dict"][n]) for n, w in before["state_dict"].items())
    assert len(spike["gradient_norms"]) == 20 and spike["gradient_norms"][-1] > 100
