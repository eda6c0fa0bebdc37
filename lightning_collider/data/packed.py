"""Training sequences: windows of token shards, in an order that is a function of the seed.

Sequence number i of a run comes from a source drawn by weight; the k-th draw of a source with n
windows is window `permutation(epoch k // n)[k % n]`. Nothing depends on the number of ranks or on
where a run was interrupted, so a resumed run only has to know how many sequences it has seen.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_collider.data.shards import TokenShards
from lightning_collider.nn.segments import separate_documents


class Windows(Dataset):
    """Windows of T tokens over several sources; row numbers run through the sources in order.

    An item has `input_ids`, `labels`, `position_ids` (int64 (T,)) and `row` (its number). With
    `separate_documents`, positions restart with each document and its first token is no target, so
    that documents do not see each other; else positions count through the window.

    Raises:
        ValueError: a source has fewer than T tokens.
    """

    def __init__(self, sources: list[TokenShards], length: int, separate_documents: bool):
        self.sources, self.length, self.separate = sources, length, separate_documents
        self.counts = [len(source) // length for source in sources]
        for source, count in zip(sources, self.counts, strict=True):
            if count == 0:
                raise ValueError(
                    f"{source.folder} has {len(source)} tokens, less than one sequence of {length}:"
                    " add text, or lower data.sequence_length"
                )
        self._starts = np.cumsum([0, *self.counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def key(self) -> str:
        """Equal keys mean equal items: a hash of the tokens, the length and the packing."""
        parts = [*(s.key for s in self.sources), str(self.length), str(self.separate)]
        return hashlib.sha256("-".join(parts).encode()).hexdigest()

    def place(self, row: int) -> tuple[int, int]:
        """Source and number of the window within it."""
        source = int(np.searchsorted(self._starts, row, side="right")) - 1
        return source, row - int(self._starts[source])

    def describe(self, row: int) -> str:
        """Where a row's tokens lie, for messages."""
        source, window = self.place(row)
        return f"{self.sources[source].folder}, tokens from {window * self.length}"

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        source, window = self.place(row)
        shards, start = self.sources[source], window * self.length
        ids = torch.from_numpy(shards.window(start, self.length))
        labels, positions = ids.clone(), torch.arange(self.length)
        if self.separate:
            documents = torch.from_numpy(shards.document_ids(start, self.length))
            (positions,), apart = separate_documents(documents[None], labels[None])
            assert apart is not None
            (labels,) = apart
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "row": torch.tensor(row),
        }


def schedule(counts: list[int], weights: list[float], seed: int, n: int) -> np.ndarray:
    """Rows of the first n training sequences, int64 (n,); a longer schedule begins with these.

    Args:
        counts: windows of each source.
        weights: parts of the sequences, in any unit.
        seed: of the draws and of each epoch's permutation.
        n: sequences.
    """
    shares = np.cumsum(weights) / np.sum(weights)
    drawn = np.searchsorted(shares, np.random.default_rng([seed, 0]).random(n), side="right")
    rows, offset = np.empty(n, np.int64), 0
    for number, count in enumerate(counts):
        places = np.flatnonzero(drawn == number)
        for epoch in range(-(-len(places) // count)):
            now = places[epoch * count : (epoch + 1) * count]
            order = np.random.default_rng([seed, 1 + number, epoch]).permutation(count)
            rows[now] = offset + order[: len(now)]
        offset += count
    return rows


class Schedule:
    """Batches of one rank: an iterable of row lists that begins behind `done` micro-batches."""

    def __init__(self, rows: np.ndarray, batch_size: int, rank: int, world: int, done: int = 0):
        self.rows, self.batch_size, self.rank, self.world = rows, batch_size, rank, world
        self.done = done

    def __len__(self) -> int:
        return len(self.rows) // (self.batch_size * self.world)

    def __iter__(self) -> Any:
        for batch in range(self.done, len(self)):
            start = (batch * self.world + self.rank) * self.batch_size
            yield self.rows[start : start + self.batch_size].tolist()
