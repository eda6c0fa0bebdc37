"""The main job end to end on a tiny recipe: its files, going on after a stop, its refusals."""

import csv
import json
import os
import re
import signal

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from lightning_collider import cli
from lightning_collider.training import run as run_module
from lightning_collider.training.checkpoint import (
    ABOUT,
    STATE,
    checkpoint_path,
    complete_steps,
)
from lightning_collider.training.config import load_comparison, to_yaml
from lightning_collider.training.files import read_json, write_json
from lightning_collider.training.fit import build_model
from lightning_collider.training.folder import claimed
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.run import run_recipe


def weights(folder, arm):
    return load_file(folder / "arms" / arm / "model" / "model.safetensors")


def test_results_say_what_was_done(finished):
    _, folder, results = finished
    assert results == json.loads((folder / "results.json").read_text())
    regular, filtered = results["arms"]["regular"], results["arms"]["filtered"]
    for arm in (regular, filtered):
        assert arm["train"]["steps"] == 6
        assert arm["train"]["input_tokens"] == 6 * 2 * 64
        assert arm["eval"]["heldout_bits"]["value"] > 0
        assert arm["eval"]["heldout_choice"]["items"] == 12
    assert regular["train"]["kept_rows"] == 6 * 2 * 63
    assert filtered["train"]["kept_rows"] == 6 * int(0.6 * 2 * 63 + 0.5)
    assert regular["train"]["final_loss_kept"] == regular["train"]["final_loss_all"]
    assert results["corpus"]["train_tokens"] == 6 * 2 * 64
    assert {"torch", "lightning", "python"} <= results["versions"].keys()


def test_markdown_table_has_a_column_for_each_arm(finished):
    _, folder, results = finished
    lines = (folder / "results.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == ["", "regular", "filtered"]
    rows = {row[0]: row[1:] for row in cells[2:]}
    for number, arm in enumerate(results["arms"].values()):
        bits = rows["heldout_bits: bits_per_byte"][number]
        assert float(bits) == pytest.approx(arm["eval"]["heldout_bits"]["value"], abs=1e-3)
        assert rows["input tokens"][number] == "768"


def test_log_has_both_losses_and_both_speeds(finished):
    _, folder, _ = finished
    log = folder / "arms" / "filtered" / "log" / "version_0" / "metrics.csv"
    rows = [row for row in csv.DictReader(log.open()) if row["loss_kept"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    for row in rows:
        ratio = float(row["kept_per_s"]) / float(row["tokens_per_s"])
        assert ratio == pytest.approx(76 / 128)
        assert float(row["loss_all"]) > 0


def test_finished_run_is_shown_again_and_nothing_is_done(finished, monkeypatch, capsys):
    recipe, folder, results = finished
    monkeypatch.setattr(run_module, "_do_stages", lambda *_: pytest.fail("a stage ran again"))
    assert run_recipe(recipe) == results
    printed = capsys.readouterr().out
    assert "heldout_bits: bits_per_byte" in printed
    assert f"{folder} was finished before" in printed and "out=OTHER" in printed


def test_arms_start_from_the_same_weights(finished):
    recipe, folder, _ = finished
    tokenizer = run_module.load_corpus(folder / "corpus").tokenizer
    first, second = (build_model(recipe, tokenizer).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def run_with_power_cut(recipe, monkeypatch, batches):
    """Run a recipe whose first arm fails after so many batches."""
    step = LanguageModel.training_step

    def fails(self, batch, batch_idx):
        if self.config.steps == recipe.train.steps and batch_idx == batches:
            raise KeyError("power cut")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(LanguageModel, "training_step", fails)
        run_recipe(recipe)


def assert_same_training(one, other):
    """Two run folders have equal weights and counts in each arm."""
    for arm in ("regular", "filtered"):
        expected, found = weights(one, arm), weights(other, arm)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        numbers, others = (read_json(f / "arms" / arm / "train.json") for f in (one, other))
        for key in ("steps", "input_tokens", "kept_rows", "final_loss_all", "final_loss_kept"):
            assert numbers[key] == others[key]


@pytest.mark.parametrize("batches", [3, 4])
def test_stopped_run_goes_on_to_the_same_weights(finished, tiny, tmp_path, monkeypatch, batches):
    """A stop between two checkpoints, and one right behind a checkpoint."""
    run_with_power_cut(tiny(), monkeypatch, batches)
    assert complete_steps(tmp_path / "run/arms/regular/checkpoints")
    run_recipe(tiny())
    assert_same_training(finished[1], tmp_path / "run")


def test_stop_inside_an_accumulation_window(tiny_in, tmp_path, monkeypatch):
    recipes = [tiny_in(tmp_path / name, "train.accumulate=2") for name in ("whole", "cut")]
    run_recipe(recipes[0])
    run_with_power_cut(recipes[1], monkeypatch, 7)
    run_recipe(recipes[1])
    assert_same_training(tmp_path / "whole", tmp_path / "cut")


def test_stop_behind_the_last_step_keeps_its_numbers(finished, tiny, tmp_path, monkeypatch):
    """The last checkpoint is there, the model folder is not."""
    _, _, results = finished

    def fails(*_, **__):
        raise KeyError("disk full")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="disk full"):
        patch.setattr("transformers.PreTrainedModel.save_pretrained", fails)
        run_recipe(tiny())
    again = run_recipe(tiny())
    for key in ("steps", "input_tokens", "final_loss_all"):
        assert again["reference"][key] == results["reference"][key]
    assert again["arms"]["filtered"]["train"]["kept_rows"] == 6 * 76


def test_another_recipe_in_the_folder_is_refused(finished, tiny_in):
    _, folder, _ = finished
    before = sorted(path for path in folder.rglob("*"))
    with pytest.raises(FileExistsError) as error:
        run_recipe(tiny_in(folder, "train.learning_rate=0.5", "arms.r.selector=random"))
    message = str(error.value)
    assert str(folder) in message and "out=OTHER" in message
    assert "train.learning_rate: 0.002 there, 0.5 here" in message
    assert "arms.r.selector: absent there, random here" in message
    assert sorted(path for path in folder.rglob("*")) == before


def test_folder_with_other_files_is_refused(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="something else than a run"):
        run_recipe(tiny())


def test_folder_in_use_is_refused(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(RuntimeError, match="another process"):
        run_recipe(tiny())
    with claimed(tiny()) as folder:  # and free again
        assert (folder / "recipe.yaml").is_file()


def test_folder_in_which_nothing_has_begun_takes_the_corrected_recipe(tmp_path):
    first, second = (
        load_comparison("quickstart", [f"out={tmp_path / 'run'}", f"seed={seed}"])
        for seed in (1, 2)
    )
    with claimed(first):
        pass
    with claimed(second) as folder:
        assert "seed: 2" in (folder / "recipe.yaml").read_text()
        (folder / "corpus").mkdir()
    with pytest.raises(FileExistsError, match="seed: 2 there, 1 here"), claimed(first):
        pass


@pytest.mark.parametrize("spoil", ["truncate", "another model"])
def test_spoilt_checkpoint_of_an_arm_is_passed_over(finished, tiny, tmp_path, monkeypatch, spoil):
    run_with_power_cut(tiny(), monkeypatch, 5)
    folder = tmp_path / "run/arms/regular/checkpoints"
    assert complete_steps(folder) == [2, 4]
    path = checkpoint_path(folder, 4)
    if spoil == "truncate":
        (path / STATE).write_bytes((path / STATE).read_bytes()[:1000])
    else:
        about = read_json(path / ABOUT)
        about["identity"]["model"]["hidden_size"] = 40
        write_json(path / ABOUT, about)
    message = "is truncated" if spoil == "truncate" else "is of another run"
    with pytest.warns(UserWarning, match=f"step=00000004 {message}.*the checkpoint before"):
        run_recipe(tiny())
    assert_same_training(finished[1], tmp_path / "run")


def signal_at(monkeypatch, recipe, batches):
    """Let the first arm of a recipe get a SIGTERM in so many batches."""
    step = LanguageModel.training_step

    def signalled(self, batch, batch_idx):
        if self.config.steps == recipe.train.steps and batch_idx == batches:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", signalled)


# The second one is the last step: that arm is done, and the others are not begun.
@pytest.mark.parametrize("steps", [3, 6])
def test_sigterm_saves_with_a_status_and_the_same_command_goes_on(
    finished, tiny, tmp_path, monkeypatch, capsys, steps
):
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        signal_at(patch, tiny(), steps - 1)
        cli.main(["train", str(recipe_file(tiny(), tmp_path))])
    assert stopped.value.code == 75
    assert f"SIGTERM at step {steps}, saved: start the same command" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    assert complete_steps(tmp_path / "run/arms/regular/checkpoints")[-1] == steps
    assert not (tmp_path / "run/arms/filtered").exists()
    assert cli.main(["train", str(recipe_file(tiny(), tmp_path))]) == 0
    assert_same_training(finished[1], tmp_path / "run")


def recipe_file(recipe, folder):
    """A resolved recipe as a file, for the command line."""
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    return path


def test_sigterm_while_an_arm_is_scored(tiny, monkeypatch):
    """Nothing of the stage is kept, and those before it are."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(run_module, "evaluate", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        run_recipe(tiny())
    assert stopped.value.code == 75
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_fit_reference", lambda *_: pytest.fail("trained again"))
        assert set(run_recipe(tiny())["arms"]) == {"regular", "filtered"}


def test_what_a_bad_gradient_advises_lets_the_comparison_go_on(
    finished, tiny, tmp_path, monkeypatch
):
    """Step 4 of the first arm has an infinite loss."""
    step = LanguageModel.training_step

    def spoilt(self, batch, batch_idx):
        bad = self.config.steps == 6 and batch_idx == 3
        return step(self, batch, batch_idx) * (float("inf") if bad else 1.0)

    monkeypatch.setattr(LanguageModel, "training_step", spoilt)
    with pytest.raises(ValueError, match=r"step 4 is not finite.*start the same") as error:
        run_recipe(tiny())
    (advice,) = re.findall(r"\S+=skip", str(error.value))
    assert advice == "train.on_nan=skip"
    with pytest.warns(UserWarning, match="step 4 is not finite.*The step is left out"):
        results = run_recipe(tiny(advice))
    assert results["arms"]["regular"]["train"]["steps"] == 6
    expected, found = weights(finished[1], "regular"), weights(tmp_path / "run", "regular")
    assert any(not torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    "key", ["train.on_spike=skip", "train.spike_factor=20.0", "train.log_every=3"]
)
def test_a_comparison_may_go_on_with_other_words_about_its_log_and_spikes(tiny_in, tmp_path, key):
    with claimed(tiny_in(tmp_path / "run")) as folder:
        (folder / "corpus").mkdir()
    with claimed(tiny_in(tmp_path / "run", key, "train.checkpoint_every=1")) as folder:
        assert folder == tmp_path / "run"


@pytest.fixture
def untrained(monkeypatch):
    """A run must not begin its first stage."""
    monkeypatch.setattr(run_module, "build_corpus", lambda *_: pytest.fail("a stage was begun"))


def test_tasks_that_need_files_are_named_before_anything_is_trained(tiny, untrained):
    with pytest.raises(ValueError, match=r"eval\.tasks: gsm8k_text need files.*collider eval"):
        run_recipe(tiny("eval.tasks=[heldout_bits,gsm8k_text]"))


@pytest.mark.slow
def test_unknown_tasks_are_named_before_anything_is_trained(tiny, untrained):
    message = r"eval\.tasks: unknown tasks \['heldout_bitz'\].*heldout_bits"
    with pytest.raises(ValueError, match=message):
        run_recipe(tiny("eval.tasks=[heldout_bitz,general_bits]"))


def test_only_lm_evals_own_tasks_are_looked_up_there(tiny, untrained, monkeypatch):
    def look_up(tasks, places):
        raise ValueError(f"unknown tasks {tasks}")

    monkeypatch.setattr(run_module, "load_tasks", look_up)
    with pytest.raises(ValueError, match=r"eval\.tasks: unknown tasks \['arc_easi'\]"):
        run_recipe(tiny("eval.tasks=[arc_easi,general_bits]"))
