"""Windows for a run on bags: what they hold, and that no token is seen twice."""

import numpy as np
import pytest
import torch

from lightning_collider.data.bag_windows import BagWindows
from lightning_collider.data.packed import Windows


class Counting:
    """Shards whose token number i is first + i, with a document of 7 tokens after another."""

    def __init__(self, first, tokens):
        self.first, self.tokens, self.folder, self.key = first, tokens, "here", f"{first}"

    def __len__(self):
        return self.tokens

    def window(self, start, length):
        return self.first + np.arange(start, start + length)

    def document_ids(self, start, length):
        return np.arange(start, start + length) // 7


def bag_windows(*tokens, bag_size=3, separate=False):
    sources = [Counting(1000 * i, n) for i, n in enumerate(tokens)]
    return BagWindows(Windows(sources, 4, separate), bag_size)


def test_a_long_window_holds_the_text_of_its_short_ones():
    windows = bag_windows(30, 25)  # 7 and 6 short windows, 2 and 2 long ones
    assert len(windows) == 13 + 4
    assert windows[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert windows[14]["input_ids"].tolist() == list(range(12, 24))
    assert windows[16]["input_ids"].tolist() == list(range(1012, 1024))
    assert "row" not in windows[14] and windows[1]["row"] == 1
    apart = bag_windows(30, separate=True)[8]
    assert apart["position_ids"].tolist() == [0, 1, *range(7), 0, 1, 2]
    assert torch.where(apart["labels"] == -100)[0].tolist() == [0, 2, 9]


@pytest.mark.parametrize("seed", [0, 1])
def test_no_token_is_seen_twice_and_the_short_windows_are_shuffled(seed):
    windows = bag_windows(121, 121)  # 10 long windows of each
    rows = windows.schedule([1.0, 1.0], seed, superposed=6, ordinary=20)
    assert [len(windows[row]["input_ids"]) for row in rows] == [12] * 6 + [4] * 20
    tokens = torch.cat([windows[row]["input_ids"] for row in rows])
    assert len(tokens.unique()) == len(tokens) == 6 * 12 + 20 * 4
    assert {int(t) // 1000 for t in tokens} == {0, 1}
    steps = np.diff(rows[6:])
    assert (steps == 1).sum() < 6  # in order, two of three would follow their neighbour
    assert rows.tolist() == windows.schedule([1.0, 1.0], seed, 6, 20).tolist()
    assert rows.tolist() != windows.schedule([1.0, 1.0], seed + 1, 6, 20).tolist()


def test_text_too_short_for_one_long_window_is_refused():
    with pytest.raises(ValueError, match=r"has 11 tokens, less than one sequence of 12.*bag_size"):
        bag_windows(11)
