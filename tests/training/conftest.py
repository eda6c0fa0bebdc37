"""A recipe small enough to run whole in seconds."""

from functools import partial
from pathlib import Path

import pytest

TINY = [
    "corpus.sequence_length=64",
    "corpus.vocab_size=400",
    "corpus.tokenizer_characters=30000",
    "corpus.heldout_problems=12",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.layers=2",
    "model.heads=2",
    "model.key_value_heads=1",
    "train.steps=6",
    "train.batch_size=2",
    "train.warmup_steps=2",
    "train.log_every=2",
    "train.checkpoint_every=2",
    "reference.steps=3",
]


@pytest.fixture
def tiny(tiny_in, tmp_path: Path):
    """The same with its run in tmp_path/run."""
    return partial(tiny_in, tmp_path / "run")
