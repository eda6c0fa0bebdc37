"""What the log says of tokens, positions, losses and time, against values by hand."""

from types import SimpleNamespace

import pytest
import torch

from lightning_collider.superposition import stopwatch
from lightning_collider.superposition.model import BagOutput
from lightning_collider.training import checkpoint, pretrain
from lightning_collider.training.checkpoint import STATE, checkpoint_path
from lightning_collider.training.meter import Meter
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.pretrain import run_training
from lightning_collider.training.utilisation import Utilisation
from tests.training.small_run import logged_by_step, small_recipe, write_inputs

BAGS = "superposition={bag_size: 3, ratio: 0.5}"


class Clock:
    """A clock that goes on where a test says so, instead of time.perf_counter."""

    def __init__(self, monkeypatch):
        self.now = 10.0
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(stopwatch, "time", fake)

    def takes(self, seconds, function):
        """The same function, which takes so long."""

        def slow(*args, **kwargs):
            result = function(*args, **kwargs)
            self.now += seconds
            return result

        return slow


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_by_hand(clock):
    """Two batches of one row of four tokens; two rows kept of three, then one."""
    meter = Meter()
    labels = torch.tensor([[1, 2, 3, 4]])
    losses = torch.tensor([[1.0, 2.0, 6.0, 0.0]], requires_grad=True)
    for keep in ([True, False, True, True], [False, True, False, False]):
        mask = torch.tensor([keep])
        loss = losses[:, :3][mask[:, :3]].mean()
        meter.update(SimpleNamespace(loss=loss, token_losses=losses, keep=mask), labels)
    clock.now += 4
    assert meter.now() == {"input_tokens": 8, "positions": 8, "seconds": 4}
    row = meter.flush()
    assert row["loss_kept"] == pytest.approx((1 + 6 + 2) / 3)
    assert row["loss_all"] == pytest.approx(3)
    assert row["tokens_per_s"] == row["positions_per_s"] == 8 / 4
    assert row["kept_per_s"] == 3 / 4
    assert row["kept_share"] == 3 / 8
    assert meter.totals == {"input_tokens": 8, "positions": 8, "kept_rows": 3, "seconds": 4}
    assert meter.flush() == row  # nothing came since


def test_a_plain_model_counts_targets():
    meter = Meter()
    meter.update(SimpleNamespace(loss=torch.tensor(2.5)), torch.tensor([[1, 2, -100, 4]]))
    row = meter.flush()
    assert row["loss_kept"] == row["loss_all"] == 2.5
    assert (meter.totals["input_tokens"], meter.totals["kept_rows"]) == (4, 2)


def test_bags_have_positions_and_no_loss_of_tokens(clock):
    """Six tokens in two bags; then, in the same row of the log, four single tokens."""
    meter = Meter()
    meter.update(BagOutput(loss=torch.tensor(9.0), positions=2), torch.arange(6)[None])
    clock.now += 2
    speeds = {"tokens_per_s": 3, "positions_per_s": 1, "kept_per_s": 1, "kept_share": 1}
    assert meter.flush() == speeds
    meter.update(BagOutput(loss=torch.tensor(9.0), positions=2), torch.arange(6)[None])
    meter.update(SimpleNamespace(loss=torch.tensor(2.5)), torch.arange(4)[None])
    clock.now += 2
    row = meter.flush()
    assert row["loss_kept"] == row["loss_all"] == 2.5
    assert (row["tokens_per_s"], row["positions_per_s"], row["kept_share"]) == (5, 3, 5 / 6)


def test_a_checkpoint_inside_a_pause_keeps_the_time_of_training(clock):
    """3 s of training, 5 s of a checkpoint that flushes the meter, 2 s of training."""
    meter, batch = Meter(), (SimpleNamespace(loss=torch.tensor(1.0)), torch.arange(4)[None])
    meter.update(*batch)
    clock.now += 3
    with meter.paused():
        clock.now += 1
        saved = meter.state()
        clock.now += 4
    assert saved["totals"]["seconds"] == 3
    meter.update(*batch)
    clock.now += 2
    meter.flush()
    assert meter.totals == {"input_tokens": 8, "positions": 8, "kept_rows": 6, "seconds": 5}
    resumed = Meter()
    resumed.restore(saved)
    clock.now += 50  # up to the first batch
    resumed.start()
    resumed.update(*batch)
    clock.now += 2
    resumed.flush()
    assert resumed.totals == meter.totals and resumed.last == meter.last


def test_a_checkpoint_without_positions_goes_on(clock):
    meter = Meter()
    totals = {"input_tokens": 4.0, "kept_rows": 3.0, "seconds": 2.0}
    meter.restore({"totals": totals, "last": {}})
    meter.update(SimpleNamespace(loss=torch.tensor(1.0)), torch.arange(4)[None])
    clock.now += 1
    meter.flush()
    assert meter.totals == {"input_tokens": 8, "positions": 8, "kept_rows": 6, "seconds": 3}


@pytest.fixture
def timed(tmp_path, monkeypatch, clock):
    """A micro-batch of training takes 1 s, one of validation 100 s and a checkpoint 10,000 s."""
    write_inputs(tmp_path)
    for name, seconds in (("training_step", 1), ("validation_step", 100)):
        slow = clock.takes(seconds, getattr(LanguageModel, name))
        monkeypatch.setattr(LanguageModel, name, slow)
    monkeypatch.setattr(checkpoint, "_write_state", clock.takes(10_000, checkpoint._write_state))
    return tmp_path


WORDS = (BAGS, "trainer.validate_every=2", "trainer.validation_batches=1")


def test_validation_and_checkpoints_are_not_timed(timed, monkeypatch):
    """12 steps of 4 micro-batches; phase 1 is 6 of them; a checkpoint each 3 steps."""
    peak = 1e9
    known = Utilisation(1000, 16, 2, length=16, peak=peak)
    monkeypatch.setattr(pretrain, "utilisation_of", lambda *_: known)
    numbers = run_training(small_recipe(timed, *WORDS, "trainer.log_every=2"))
    assert numbers["seconds"] == 48
    assert numbers["input_tokens"] == 6 * 128 * 3 + 6 * 128 and numbers["positions"] == 12 * 128
    rows = logged_by_step(timed)
    assert [step for step in rows if "tokens_per_s" in rows[step]] == [2, 4, 6, 8, 10, 12]
    # 2 sequences of 16 positions in a micro-batch; forward and dense backward in FLOPs by hand.
    pairs = 16 * 17 / 2
    dense = 6 * 16 * 1000 + 7 * pairs * 2 * 16 * 2
    for step in (2, 4, 6, 8, 10, 12):
        row, superposed = rows[step], step <= 6
        assert row["positions_per_s"] == row["tst/positions_per_s"] == 32
        assert row["tokens_per_s"] == (96 if superposed else 32)
        assert row["mfu"] == pytest.approx(2 * dense / peak)
        assert (row["positions"], row["seconds"]) == (128 * step, 4 * step)
        for name in ("loss_kept", "loss_all"):
            assert (name in row) != superposed
        for name in ("tst/loss", "tst/floor"):
            assert (name in row) == superposed
        assert (row["kept_share"] == 1) == superposed


def test_the_time_of_training_goes_on_with_the_checkpoint(timed, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(pretrain, "export", lambda *_, **__: {}["power cut"])
        run_training(small_recipe(timed, *WORDS, "trainer.keep_checkpoints=9"))
    folder = timed / "run" / "checkpoints"
    for step in (3, 6, 9, 12):
        state = torch.load(checkpoint_path(folder, step) / STATE, weights_only=True)
        assert state["meter"]["totals"]["seconds"] == 4 * step
    for step in (9, 12):  # as if the kill had come behind step 6
        checkpoint_path(folder, step).rename(timed / f"later-{step}")
    assert run_training(small_recipe(timed, *WORDS))["seconds"] == 48
