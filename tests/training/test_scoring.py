"""Stored reference losses select as the live reference does; stores that do not fit are refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import lightning_collider as lc
from lightning_collider.data.packed import Windows
from lightning_collider.data.prepare import prepare
from lightning_collider.filtering.reference import LiveReference
from lightning_collider.filtering.scores import ScoreStore, block_path
from lightning_collider.filtering.selectors import select
from lightning_collider.filtering.token_filter import TokenFilter
from lightning_collider.training import scoring
from lightning_collider.training.checkpoint import ABOUT, checkpoint_path
from lightning_collider.training.export import find_checkpoint, load_checkpoint
from lightning_collider.training.files import read_json
from lightning_collider.training.models import build_model, load_tokenizer
from lightning_collider.training.pretrain import run_training
from lightning_collider.training.scoring import open_store, score, store_folder
from tests.training.small_run import rows_of, small_recipe, write_inputs


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Function that makes a recipe with a random reference and scores its data, 16 rows a block."""
    monkeypatch.setattr(scoring, "BLOCK", 16)
    write_inputs(tmp_path)
    other = small_recipe(tmp_path, "seed=8")
    build_model(other).save_pretrained(tmp_path / "reference")

    def make(*overrides):
        recipe = small_recipe(
            tmp_path,
            "filter.selector=excess_loss",
            f"filter.reference={tmp_path}/reference",
            "filter.stored_type=float32",
            *overrides,
        )
        return recipe, score(recipe)

    return make


def windows_of(recipe):
    shards = prepare(recipe, load_tokenizer(recipe.model), 300)
    return Windows(shards["train"], 16, recipe.data.separate_documents)


def batch_of_rows(windows, rows):
    items = [windows[row] for row in rows]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_stored_losses_select_as_the_live_reference(scored, kind):
    recipe, folder = scored(f"filter.stored_type={kind}")
    windows, store = windows_of(recipe), ScoreStore(folder)
    live = LiveReference(recipe.filter.reference)
    student = build_model(recipe).eval()
    rows = [40, 3, 17, 0, 31]
    batch = batch_of_rows(windows, rows)
    inputs = {k: batch[k] for k in ("input_ids", "labels", "position_ids")}
    with torch.no_grad():
        losses = lc.token_losses(student, **inputs)
    alive, stored = live.losses(**inputs), store.losses(batch["row"])
    assert len(store) == len(windows) and stored.dtype == torch.float32
    rounding = 1e-5 if kind == "float32" else float(alive.max()) * 2**-11
    assert (alive - stored).abs().max() <= rounding
    one, other = (select(losses, r, batch["labels"], keep=0.6) for r in (alive, stored))
    assert one.sum() == other.sum()
    # Rows may change places only where their excess losses are as near as the rounding.
    excess = losses - alive
    limit = excess[one].min()
    assert ((excess[one != other] - limit).abs() <= 2 * rounding).all()
    assert (one != other).sum() <= (0 if kind == "float32" else 4)


def test_training_with_stored_losses_equals_training_with_the_live_reference(scored, tmp_path):
    steps = ("trainer.max_steps=4",)
    recipe, _ = scored("filter.stored_losses=true", *steps)
    run_training(recipe)
    with_store = rows_of(tmp_path)
    (tmp_path / "run").rename(tmp_path / "first")
    live, _ = scored(*steps)
    run_training(live)
    for one, other in zip(with_store, rows_of(tmp_path), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_scoring_goes_on_and_ranks_share_the_blocks(scored):
    recipe, folder = scored()
    whole = {path.name: path.read_bytes() for path in folder.glob("block-*.npy")}
    assert len(whole) == -(-len(windows_of(recipe)) // 16) > 2
    for number in (0, 2):
        block_path(folder, number).unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 2 blocks.*`collider score` again"):
        ScoreStore(folder)
    kept = block_path(folder, 1).stat().st_mtime_ns
    score(recipe, rank=1, world=2)  # blocks 0 and 2 are those of rank 0, which never comes
    assert {path.name: path.read_bytes() for path in folder.glob("block-*.npy")} == whole
    assert block_path(folder, 1).stat().st_mtime_ns == kept


def test_ranks_begin_with_blocks_of_their_own():
    """And go on from the far end of the others', where those come last."""
    assert scoring._my_order([0, 1, 2, 3, 5], rank=1, world=2) == [1, 3, 5, 2, 0]
    assert scoring._my_order([0, 1, 2, 3, 5], rank=0, world=2) == [0, 2, 5, 3, 1]


def test_damaged_block_is_named(scored):
    _, folder = scored()
    path = block_path(folder, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one loss is another
    path.write_bytes(content)
    store = ScoreStore(folder)
    store.losses([0])
    with pytest.raises(ValueError, match=r"block-00001.npy is damaged.*delete .* computes it anew"):
        store.losses([17])


def test_a_run_of_ours_is_a_reference(scored, tmp_path):
    """By its folder: the newest checkpoint. Its key changes with its weights."""
    run_training(small_recipe(tmp_path, f"out={tmp_path}/teacher", "trainer.max_steps=3"))
    teacher = f"filter.reference={tmp_path}/teacher"
    recipe, folder = scored(teacher)
    model = LiveReference(load_checkpoint(find_checkpoint(tmp_path / "teacher")))
    batch = batch_of_rows(windows_of(recipe), [3, 20])
    alive = model.losses(**{k: batch[k] for k in ("input_ids", "labels", "position_ids")})
    assert (alive - ScoreStore(folder).losses([3, 20])).abs().max() < 1e-5
    checkpoint = checkpoint_path(tmp_path / "teacher" / "checkpoints", 3)
    about = read_json(checkpoint / ABOUT)
    about["files"]["state.ckpt"]["sha256"] = "0" * 64
    (checkpoint / ABOUT).write_text(json.dumps(about))
    assert store_folder(recipe, windows_of(recipe)) != folder


def test_store_of_other_tokens_or_another_reference_is_refused(scored, tmp_path):
    recipe, folder = scored()
    windows = windows_of(recipe)
    assert len(open_store(recipe, windows)) == len(windows)
    with pytest.raises(ValueError, match="holds losses for other tokens"):
        ScoreStore(folder, tokens="0" * 64)
    shorter = dataclasses.replace(recipe.data, sequence_length=8)
    other = dataclasses.replace(recipe, data=shorter)
    assert store_folder(other, Windows(windows.sources, 8, True)) != folder
    with pytest.raises(FileNotFoundError, match="run `collider score RECIPE` first"):
        open_store(other, Windows(windows.sources, 8, True))
    build_model(small_recipe(tmp_path, "seed=9")).save_pretrained(tmp_path / "reference")
    with pytest.raises(FileNotFoundError, match="run `collider score RECIPE` first"):
        open_store(recipe, windows)


def test_a_batch_without_rows_is_told_so(scored):
    _, folder = scored()
    store = ScoreStore(folder)
    token_filter = TokenFilter("excess_loss", 0.6, store)
    labels = torch.zeros(1, 16, dtype=torch.int64)
    token_filter.bring({"input_ids": labels})
    with pytest.raises(ValueError, match=r'"row" \(B,\), which this batch lacks'):
        token_filter(torch.zeros(1, 16), labels, labels, None)
    token_filter.bring({"row": torch.tensor([5])})
    assert np.array_equal(token_filter.stored, np.load(block_path(folder, 0))[5:6])
    with pytest.raises(ValueError, match="there is no row"):
        store.losses([len(store)])


def test_recipe_without_a_reference_is_named(tmp_path):
    write_inputs(tmp_path)
    with pytest.raises(ValueError, match=r"names no filter\.reference"):
        score(small_recipe(tmp_path))
