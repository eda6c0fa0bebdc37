"""The callback on one device: the switch, accumulation, resume, logs, mistakes."""

import copy
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler

import lightning_collider as lc
from lightning_collider.superposition.bags import make_bags
from lightning_collider.superposition.loss import bag_entropy
from lightning_collider.superposition.model import BagSettings, superposed_loss
from tests.conftest import relative_error
from tests.strategies.lightning_module import UsersModule, fit
from tests.superposition.lightning_module import (
    BAG,
    LENGTH,
    STEPS,
    SWITCH,
    Recorder,
    Rows,
    SaveAt,
    callback,
    row_tokens,
    rows,
    run,
)

STRATEGIES = ["auto", "collider"]


def weights(module):
    return {name: p.detach() for name, p in module.model.named_parameters()}


def same_weights(one, other):
    return all(weights(one)[name].equal(p) for name, p in weights(other).items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_switch_is_at_its_step_and_no_token_is_lost(strategy):
    module = run(strategy)
    assert module.shapes == [(1, BAG * LENGTH)] * SWITCH + [(1, LENGTH)] * (STEPS - SWITCH)
    read = [token for batch in module.first_tokens for token in batch]
    assert read == row_tokens(0, BAG * SWITCH + STEPS - SWITCH)
    assert "forward" not in module.model.__dict__


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_equal_a_loop_by_hand(strategy):
    module = Recorder()
    model = copy.deepcopy(module.model)
    run(strategy, module=module)
    hand = Recorder()
    hand.model = model
    settings = hand.configure_optimizers()
    optimizer, schedule = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    used, losses = 0, []
    for step in range(STEPS):
        count = BAG if step < SWITCH else 1
        items = [Rows(100)[i] for i in range(used, used + count)]
        used += count
        ids, labels = (
            torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels")
        )
        if step < SWITCH:  # the seams between the loader's rows end bags' targets
            bags = BagSettings(BAG, row_length=LENGTH)
            loss = superposed_loss(model, ids, labels, bags).loss
        else:
            counted = (labels[:, 1:] != -100).sum()
            loss = lc.token_losses(model, ids, labels).sum() / counted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    # Hugging Face's own loss and norms are float32 inside; the converted model's are not.
    assert module.losses == pytest.approx(losses, rel=1e-5)
    assert module.losses[:SWITCH] == pytest.approx(losses[:SWITCH], rel=1e-6)
    assert relative_error(weights(module), dict(model.named_parameters())) < 1e-4


@pytest.mark.parametrize("window", [2, 4])
def test_accumulation_switches_between_steps(window):
    batches = rows(BAG * SWITCH * window + (STEPS - SWITCH) * window)
    module = run(batches=batches, accumulate_grad_batches=window)
    assert module.shapes == [(1, BAG * LENGTH)] * SWITCH * window + [(1, LENGTH)] * (
        (STEPS - SWITCH) * window
    )


def test_under_the_collider_strategy_the_mean_is_over_all_pairs_of_the_window():
    # Three micro-batches with different numbers of pairs are one step on the joined batch.
    def one_step(batch_size, window):
        module = UsersModule()
        batches = rows(9, batch_size)
        fit(
            module,
            "collider",
            batches,
            max_steps=1,
            accumulate_grad_batches=window,
            callbacks=[callback(ratio=0.9)],
        )
        return weights(module)

    got, want = one_step(1, 3), one_step(3, 1)
    assert relative_error(got, want) < 1e-12
    start = weights(UsersModule())
    assert max(float((got[n] - p).abs().max()) for n, p in start.items()) > 1e-3


def test_bags_of_one_are_ordinary_training():
    plain, ones = UsersModule(), UsersModule()
    fit(plain, "collider", rows(), max_steps=5)
    fit(ones, "collider", rows(), max_steps=5, callbacks=[callback(bag_size=1, ratio=0.8)])
    assert relative_error(weights(ones), weights(plain)) < 1e-12
    assert ones.losses == pytest.approx(plain.losses, rel=1e-12)


def test_ratio_zero_is_ordinary_training():
    plain = Recorder()
    fit(plain, "auto", rows(), max_steps=STEPS)
    assert same_weights(run(tst=callback(ratio=0.0)), plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("saved", [SWITCH - 2, SWITCH, SWITCH + 3])
def test_resume_equals_the_uninterrupted_run(tmp_path, strategy, saved):
    whole = run(strategy, callbacks=[SaveAt(tmp_path / "x.ckpt", saved)])
    resumed = run(strategy, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.first_tokens == whole.first_tokens[saved:]
    assert resumed.losses == whole.losses[saved:]
    assert same_weights(resumed, whole)


class SaveAtPassEnd(L.Callback):
    """A checkpoint behind the first pass over the data, in a hook after its last batch."""

    def __init__(self, path, hook):
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer, module):
        if not trainer.sanity_checking and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class WithValidation(Recorder):
    def val_dataloader(self):
        return rows(1)

    def validation_step(self, batch, batch_idx):
        self.model(input_ids=batch["input_ids"], labels=batch["labels"])


def shuffled(n):
    return DataLoader(Rows(n), sampler=DistributedSampler(Rows(n), 1, 0, shuffle=True))


# 16 rows a pass: the first holds 5 long rows and one left over. In windows of 2 micro-batches the
# last one is short, and step 3 is behind it; in windows of 1 that is step 5.
@pytest.mark.parametrize(("window", "saves"), [(2, (1, 2, 3, 4, 5)), (1, (4, 5, 6))])
@pytest.mark.parametrize("loader", [rows, shuffled])
def test_resume_with_accumulation_and_passes(tmp_path, window, saves, loader):
    settings = {"accumulate_grad_batches": window, "batches": loader(16)}
    settings["tst"] = callback(ratio=0.6)
    callbacks = [SaveAt(tmp_path / f"{step}.ckpt", step) for step in saves]
    whole = run(callbacks=callbacks, **settings)
    for step in saves:
        later = tmp_path / f"{step}-later.ckpt"
        resumed = run(ckpt_path=tmp_path / f"{step}.ckpt", callbacks=[SaveAt(later, 7)], **settings)
        assert resumed.first_tokens == whole.first_tokens[-len(resumed.losses) :]
        assert resumed.losses == whole.losses[-len(resumed.losses) :]
        assert same_weights(resumed, whole)
        again = run(ckpt_path=later, **settings)
        assert again.losses == whole.losses[-len(again.losses) :]
    # The short window at the end of the first pass is a step too: phase 1 has 6 steps in all.
    assert whole.shapes[:5] == [(1, BAG * LENGTH)] * 5
    assert sum(shape == (1, BAG * LENGTH) for shape in whole.shapes) == {1: 6, 2: 10}[window]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_resume_from_the_end_of_a_pass(tmp_path, hook):
    path = tmp_path / "x.ckpt"

    def trained(**settings):
        module = WithValidation()
        settings = {"max_steps": STEPS, "accumulate_grad_batches": 2, **settings}
        return module, fit(module, "auto", rows(16), **settings)

    whole, trainer = trained(callbacks=[callback(), SaveAtPassEnd(path, hook)])
    resumed, other = trained(callbacks=[callback()], ckpt_path=path)
    assert resumed.losses == whole.losses[5:]
    assert same_weights(resumed, whole)
    assert other.current_epoch == trainer.current_epoch
    assert other.fit_loop.epoch_progress.total == trainer.fit_loop.epoch_progress.total


def test_a_loader_that_begins_behind_what_was_used(tmp_path):
    whole = run(callbacks=[SaveAt(tmp_path / "x.ckpt", 2)])
    rest = DataLoader(torch.utils.data.Subset(Rows(60), range(2 * BAG, 60)))
    tst = callback(skip_seen=False)
    resumed = run(ckpt_path=tmp_path / "x.ckpt", batches=rest, tst=tst)
    assert resumed.losses == whole.losses[2:]


class AsksEarly(Recorder):
    """Asks for the number of steps while optimizers are made, which makes the loader early."""

    def configure_optimizers(self):
        self.max_steps = int(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


def test_resume_of_a_module_that_asks_for_the_number_of_steps(tmp_path):
    whole = run(module=AsksEarly(), callbacks=[SaveAt(tmp_path / "x.ckpt", 2)])
    assert whole.max_steps == STEPS
    resumed = run(module=AsksEarly(), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.first_tokens == whole.first_tokens[2:]
    assert resumed.losses == whole.losses[2:]


class LongRows(L.LightningDataModule):
    """Brings its own longer sequences, and remembers itself where it is."""

    def superpose(self, bag_size, superposed):
        self.bag_size, self.superposed = bag_size, superposed

    def train_dataloader(self):
        used = 0
        for step in range(STEPS):
            count = self.bag_size if self.superposed(step) else 1
            used += count
            if step >= self.trainer.global_step:
                ids, labels = batch_rows(used - count, used)
                yield {"input_ids": ids, "labels": labels}


def batch_rows(first, last):
    items = [Rows(last)[i] for i in range(first, last)]
    return [torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels")]


def test_a_data_module_may_bring_the_long_sequences(tmp_path):
    whole = run(batches=LongRows(), callbacks=[SaveAt(tmp_path / "x.ckpt", 2)])
    assert run(tst=callback(contiguous=True)).losses == whole.losses
    resumed = run(batches=LongRows(), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.losses == whole.losses[2:]


def test_the_selector_begins_with_phase_2():
    module = Recorder()
    kept = []

    class Kept(L.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            kept.append(module.model.last_state)

    strategy = lc.ColliderStrategy(keep=0.5, selector="top_loss")
    run(strategy, module=module, callbacks=[Kept()])
    assert kept[:SWITCH] == [None] * SWITCH
    assert all(0 < state.keep.float().mean() < 0.7 for state in kept[SWITCH:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_trains_its_adapters_in_both_phases(strategy):
    peft = pytest.importorskip("peft", reason="peft is in the dev extra")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    module = Recorder()
    module.model = peft.get_peft_model(module.model, config)
    start = copy.deepcopy(module.model)
    run(strategy, module=module)
    assert module.shapes == [(1, BAG * LENGTH)] * SWITCH + [(1, LENGTH)] * (STEPS - SWITCH)
    ids, labels = batch_rows(0, BAG)
    settings = BagSettings(BAG, row_length=LENGTH)
    first = superposed_loss(start.get_base_model(), ids, labels, settings).loss
    assert module.losses[0] == pytest.approx(first.item(), rel=1e-6)
    for name, after in module.model.named_parameters():
        assert start.get_parameter(name).equal(after) != ("lora" in name), name


def logged(folder):
    lines = (folder / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]


def test_the_log_holds_phase_loss_floor_and_both_speeds(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    module = run(logger=logger, log_every_n_steps=2)
    found = logged(tmp_path)
    assert [row["step"] for row in found] == ["1", "3", "5", "7", "9"]
    assert [float(row["tst/phase"]) for row in found] == [1, 1, 2, 2, 2]
    for row, factor in zip(found, [BAG, BAG, 1, 1, 1], strict=True):
        ratio = float(row["tst/data_tokens_per_s"]) / float(row["tst/positions_per_s"])
        assert ratio == pytest.approx(factor, rel=1e-6)
    # The mean over the pairs of steps 2 and 3, and the entropy of their bags.
    floors, pairs = [], []
    for step in (2, 3):
        ids, labels = batch_rows(step * BAG, (step + 1) * BAG)
        starts = torch.zeros_like(ids, dtype=torch.bool)
        starts[:, ::LENGTH] = True
        targets = make_bags(ids, labels, BAG, starts).targets.flatten(0, 1)
        floors.append(bag_entropy(targets).item())
        pairs.append(int((targets != -100).sum()))
    for name, values in (("loss", module.losses[2:4]), ("floor", floors)):
        mean = sum(v * n for v, n in zip(values, pairs, strict=True)) / sum(pairs)
        assert float(found[1][f"tst/{name}"]) == pytest.approx(mean, rel=1e-6)
    assert all(row["tst/loss"] == "" for row in found[2:])


def test_validation_is_ordinary_in_phase_1():
    class Validates(Recorder):
        def validation_step(self, batch, batch_idx):
            out = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
            self.validated.append((tuple(batch["input_ids"].shape), out.logits is None))

    module = Validates()
    module.validated = []
    tst = callback()
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        val_check_interval=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[tst],
        **quiet,
    )
    trainer.fit(module, rows(), rows(1))
    assert module.validated == [((1, LENGTH), False)] * 2


def test_an_exception_gives_the_model_its_forward_back():
    class Fails(Recorder):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("on purpose")

    module = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        run(module=module)
    assert "forward" not in module.model.__dict__


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bag_size": 0}, "1 or more, got 0"),
        ({"ratio": 1.0}, r"\[0, 1\)"),
        ({"ratio": -0.1}, r"\[0, 1\)"),
        ({"weights": "squares"}, "'uniform', 'inverse' or 3 numbers"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        callback(**settings)


class Odd(L.LightningDataModule):
    def superpose(self, bag_size, superposed):
        pass

    def train_dataloader(self):
        return rows(4)


class TwoModels(Recorder):
    def __init__(self):
        super().__init__()
        self.second = copy.deepcopy(self.model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": -1, "max_epochs": 1}, r"Trainer\(max_steps=...\)"),
        ({"batches": rows(BAG - 1)}, "too short for sequences of 3 times the length"),
        ({"batches": rows(17), "max_epochs": 1}, "needs 18 of the loader's batches"),
        ({"batches": Odd(), "tst": callback(bag_size=5)}, "12 tokens do not divide into bags of 5"),
        ({"module": TwoModels()}, "2 trainable Hugging Face causal LMs"),
    ],
)
def test_mistakes_in_a_run(change, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message):
            run(**change)


def test_a_pass_that_is_just_long_enough():
    assert len(run(batches=rows(18), max_epochs=1).losses) == STEPS


def test_a_checkpoint_of_another_bag_size_is_refused(tmp_path):
    run(callbacks=[SaveAt(tmp_path / "x.ckpt", 2)])
    with pytest.raises(ValueError, match="trained with bag_size=3"):
        run(ckpt_path=tmp_path / "x.ckpt", tst=callback(bag_size=2))


def test_the_checkpoints_switch_stands(tmp_path):
    run(callbacks=[SaveAt(tmp_path / "x.ckpt", 2)])
    with pytest.warns(UserWarning, match="superposed phase has 4 steps"):
        module = run(ckpt_path=tmp_path / "x.ckpt", tst=callback(ratio=0.8))
    assert [shape[1] for shape in module.shapes] == [BAG * LENGTH] * 2 + [LENGTH] * 6
