"""A recipe with bags: both phases, their data, and kills on either side of the switch."""

import pytest

from lightning_collider.data.bag_windows import BagWindows
from lightning_collider.data.packed import Windows
from lightning_collider.data.prepare import prepare
from lightning_collider.training.models import build_model, load_tokenizer
from lightning_collider.training.pretrain import WindowData, run_training
from lightning_collider.training.settings import plan
from lightning_collider.training.tokens import builtin_tokenizer
from tests.training.small_run import rows_of, small_recipe, write_inputs
from tests.training.test_resume import assert_equal_runs, finish, kill_after, start

BAGS = "superposition={bag_size: 3, ratio: 0.5}"


def test_each_step_reads_its_sequences(tmp_path):
    write_inputs(tmp_path)
    recipe = small_recipe(tmp_path, BAGS)
    tokenizer, model = load_tokenizer(recipe.model), build_model(recipe)
    shards = prepare(recipe, tokenizer, model.config.vocab_size)["train"]
    windows = Windows(shards, 16, True)
    data = WindowData(recipe, plan(recipe, len(windows)), windows, None)
    ordinary = data.rows
    data.superpose(3, lambda step: step < 6)
    # 12 steps of 8 rows; the first 6 are long.
    assert len(data.rows) == len(ordinary) == 96
    assert isinstance(data.train, BagWindows)
    lengths = [len(data.train[row]["input_ids"]) for row in data.rows]
    assert lengths == [48] * 48 + [16] * 48


@pytest.mark.parametrize("selector", ["random", "none"])
def test_the_log_shows_both_phases_and_the_filter_begins_with_the_second(tmp_path, selector):
    write_inputs(tmp_path)
    words = [BAGS, f"filter.selector={selector}", f"filter.keep={0.6 if selector != 'none' else 1}"]
    run_training(small_recipe(tmp_path, *words))
    rows = rows_of(tmp_path)
    assert len(rows) == 12
    # Single tokens have no label at the first of each document and sequence; a bag is all kept.
    dense = [row["kept_share"] > 0.8 for row in rows]
    assert dense == [True] * 6 + [selector == "none"] * 6
    # The losses of the two phases cannot be compared, so they have different names.
    assert ["loss_all" in row for row in rows] == [False] * 6 + [True] * 6
    assert ["loss_kept" in row for row in rows] == [False] * 6 + [True] * 6
    for row in rows[:6]:
        assert 0 < row["tst/floor"] < row["tst/loss"]


def test_kills_on_both_sides_of_the_switch_leave_the_loss_curve_bit_equal(tmp_path):
    overrides = (BAGS, "trainer.max_steps=24")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_inputs(folder)
    finish(whole, start(whole, overrides, 1))
    killed = 0
    for rows in (5, 12):  # the switch is at step 12; each time up to 3 steps are lost
        killed += kill_after(cut, start(cut, overrides, 1), rows, 0.005)
    assert killed == 2
    finish(cut, start(cut, overrides, 1))
    assert len(rows_of(whole)) == 24
    assert_equal_runs(whole, cut)


def test_the_builtin_tokenizer():
    tokenizer = builtin_tokenizer("builtin:300")
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer("def f(x):\n    return 1")["input_ids"]) == (
        "def f(x):\n    return 1"
    )
    with pytest.raises(ValueError, match=r"model.tokenizer=builtin:many.*builtin:4096"):
        builtin_tokenizer("builtin:many")
