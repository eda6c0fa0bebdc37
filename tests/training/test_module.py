"""The learning rate and the order of batches, against values by hand."""

import numpy as np
import pytest
import torch

from lightning_collider.training.config import load_comparison
from lightning_collider.training.data import BatchOrder, PackedRows
from lightning_collider.training.module import LanguageModel, cosine_with_warmup


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.25e-3),  # a quarter of the warm-up
        (3, 1e-3),  # its end
        (4, 1e-3),  # the cosine's top
        (12, 0.55e-3),  # half way: the mean of 1e-3 and 1e-4
        (8, 1e-4 + 0.9e-3 * 0.5 * (1 + 2**-0.5)),  # a quarter: cos(pi/4)
        (20, 1e-4),  # the end
        (25, 1e-4),  # behind it
    ],
)
def test_learning_rate(step, rate):
    config = load_comparison(
        "quickstart",
        [
            "train.steps=20",
            "train.warmup_steps=4",
            "train.learning_rate=1e-3",
            "train.final_learning_rate=1e-4",
        ],
    ).train
    assert config.learning_rate * cosine_with_warmup(step, config) == pytest.approx(rate, rel=1e-12)


def test_no_warmup_starts_at_the_top():
    config = load_comparison("quickstart", ["train.warmup_steps=0"]).train
    assert cosine_with_warmup(0, config) == 1


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    config = load_comparison("quickstart", ["train.weight_decay=0.3"]).train
    groups = LanguageModel(model, config).configure_optimizers()["optimizer"].param_groups
    decay = {tuple(p.shape): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay == {(2, 3): 0.3, (2,): 0.0}


def test_batches_are_one_pass_and_a_resumed_pass_is_its_rest():
    whole = list(BatchOrder(10, 3, seed=1))
    assert [len(batch) for batch in whole] == [3, 3, 3]  # the tenth row fills no batch
    assert len({row for batch in whole for row in batch}) == 9
    resumed = BatchOrder(10, 3, seed=1, done=2)
    assert list(resumed) == whole[2:]
    assert len(resumed) == 3
    assert list(BatchOrder(10, 3, seed=2)) != whole


def test_ranks_divide_the_batches_of_one_device():
    whole = list(BatchOrder(12, 4, seed=1))
    ranks = [list(BatchOrder(12, 2, seed=1, rank=rank, world=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


def test_rows_are_inputs_and_labels():
    item = PackedRows(np.array([[1, 2], [3, 60_000]], np.uint16))[1]
    assert item["input_ids"].tolist() == item["labels"].tolist() == [3, 60_000]
    assert item["input_ids"].dtype == torch.int64
