"""The store of reference losses: open files and blocks that are not what the store describes."""

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_collider.filtering import scores
from lightning_collider.filtering.scores import ScoreStore, block_path, write_block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    about = {"tokens": "a", "reference": "b", "shape": [11, 3], "type": "float16", "block": 2}
    (tmp_path / "about.json").write_text(json.dumps(about))
    losses = torch.arange(33.0).view(11, 3)
    for number, block in enumerate(losses.split(2)):
        write_block(tmp_path, number, block, "float16")
    return tmp_path


def test_few_blocks_are_open_at_once(folder: Path, monkeypatch):
    monkeypatch.setattr(scores, "OPEN_BLOCKS", 2)
    store, rows = ScoreStore(folder), [10, 0, 5, 9, 1, 7]
    assert torch.equal(store.losses(rows), torch.arange(33.0).view(11, 3)[rows])
    assert len(store._blocks) == 2


@pytest.mark.parametrize(
    ("rows", "kind", "found"), [(1, "float16", "float16 (1, 3)"), (2, "float32", "float32 (2, 3)")]
)
def test_a_block_of_another_kind_is_refused(folder: Path, rows, kind, found):
    write_block(folder, 1, torch.zeros(rows, 3), kind)
    message = f"{block_path(folder, 1)} holds {found}, needed float16 (2, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ScoreStore(folder).losses([2])


def test_a_truncated_block_is_refused(folder: Path):
    path = block_path(folder, 1)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged")):
        ScoreStore(folder).losses([2])
