"""smollm2-135m from its real weights: what it starts with is what transformers makes of them."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_collider.data.packed import Windows, schedule
from lightning_collider.data.shards import TokenShards
from lightning_collider.training.config import load_training
from lightning_collider.training.models import local_weights
from lightning_collider.training.pretrain import run_training
from lightning_collider.training.settings import plan


def loss_of_documents(model, item):
    """Sum of the losses of a window's documents, each on its own, and how many targets they had."""
    starts = (item["position_ids"] == 0).nonzero().flatten().tolist()
    total, count = 0.0, 0
    for start, end in zip(starts, [*starts[1:], len(item["input_ids"])], strict=True):
        ids = item["input_ids"][start:end]
        if len(ids) > 1:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total += F.cross_entropy(logits.double(), ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return total, count


@pytest.mark.slow  # downloads 93 MB, and a step takes half a minute
def test_first_loss_equals_transformers(tmp_path):
    words = ["trainer.max_steps=1", "trainer.log_every=1", "data.sources.target.max_documents=300"]
    words += ["data.sources.general.max_documents=100", "data.sources.noise.max_documents=50"]
    recipe = load_training(
        "smollm2-135m", [*words, f"out={tmp_path}/run", f"data.folder={tmp_path}"]
    )
    run_training(recipe)
    (row,) = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").open()
        if "loss_all" in line
    ]
    assert 0.55 < row["kept_share"] < 0.6

    shards = [TokenShards(tmp_path / name / "train") for name in recipe.data.sources]
    windows = Windows(shards, recipe.data.sequence_length, recipe.data.separate_documents)
    weights = [source.weight for source in recipe.data.sources.values()]
    rows = schedule(windows.counts, weights, recipe.seed, plan(recipe, len(windows)).rows_a_step)
    model = AutoModelForCausalLM.from_pretrained(local_weights(recipe.model.weights))
    with torch.no_grad():
        sums = [loss_of_documents(model, windows[number]) for number in rows]
    total, count = map(sum, zip(*sums, strict=True))
    assert row["loss_all"] == pytest.approx(total / count, abs=1e-4)
