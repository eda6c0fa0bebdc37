"""Stored reference losses: computed once for a data set, read instead of running the reference.

    FOLDER/about.json            which tokens and which reference, (rows, T), type, rows of a block
    FOLDER/block-00000.npy       (rows of a block, T) losses of the prediction made at each place;
                                 then the SHA-256 of these bytes, compared when it is opened

A block is written in one piece, checksum and all, so ranks on several machines may write blocks of
one store at the same time.
"""

import hashlib
import io
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHECKSUM = hashlib.sha256().digest_size  # bytes at the end of a block
BLOCK = 256  # rows of a block of a new store
OPEN_BLOCKS = 64  # mapped at once: a large store has more blocks than a process may open files


class ScoreStore:
    """Reference losses of the rows of a data set.

    Args:
        folder: as `collider score` leaves it.
        tokens, reference: keys that the store must have been made for; None: any.

    Raises:
        FileNotFoundError: no store in the folder, or blocks are missing.
        ValueError: it belongs to other tokens or to another reference.
    """

    def __init__(self, folder: str | Path, tokens: str | None = None, reference: str | None = None):
        self.folder = Path(folder)
        self.about = read_about(self.folder)
        for key, value in (("tokens", tokens), ("reference", reference)):
            if value is not None and self.about[key] != value:
                raise ValueError(
                    f"{self.folder} holds losses for other {key} ({self.about[key][:12]}, needed "
                    f"{value[:12]}): run `collider score` for this recipe"
                )
        missing = missing_blocks(self.folder, self.about)
        if missing:
            raise FileNotFoundError(
                f"{self.folder} lacks {len(missing)} blocks of losses: run `collider score` again, "
                "which goes on where it stopped"
            )
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        """Rows."""
        return self.about["shape"][0]

    def losses(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Losses of some rows by their numbers: float32 (B, T)."""
        numbers = rows.tolist() if isinstance(rows, Tensor) else rows
        return torch.from_numpy(np.stack([self._row(n) for n in numbers]).astype(np.float32))

    def _row(self, number: int) -> np.ndarray:
        if not 0 <= number < len(self):
            raise ValueError(f"{self.folder} has {len(self)} rows, there is no row {number}")
        block, place = divmod(number, self.about["block"])
        if block not in self._blocks:
            self._blocks[block] = read_block(self.folder, block, self.about)
            if len(self._blocks) > OPEN_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block][place]


def block_path(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05d}.npy"


def missing_blocks(folder: Path, about: dict[str, Any]) -> list[int]:
    """Numbers of the blocks that are still to be computed."""
    count = -(-about["shape"][0] // about["block"])
    return [n for n in range(count) if not block_path(folder, n).is_file()]


def read_block(folder: Path, number: int, about: dict[str, Any]) -> np.ndarray:
    """Map one block. Raises ValueError for a file that is not the block the store describes."""
    path = block_path(folder, number)
    advice = f"delete {path} and run `collider score` again, which computes it anew"
    content = path.read_bytes()
    if hashlib.sha256(content[:-CHECKSUM]).digest() != content[-CHECKSUM:]:
        raise ValueError(f"{path} is damaged (it differs from its checksum): {advice}")
    losses = np.load(path, mmap_mode="r")
    rows, length = about["shape"]
    shape = (min(about["block"], rows - number * about["block"]), length)
    if losses.shape != shape or losses.dtype != about["type"]:
        raise ValueError(
            f"{path} holds {losses.dtype} {losses.shape}, needed {about['type']} {shape}: {advice}"
        )
    return losses


def write_block(folder: Path, number: int, losses: Tensor, kind: str) -> None:
    """Store one block of losses (rows, T) as `kind`, "float16" or "float32"."""
    path = block_path(folder, number)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    content = io.BytesIO()
    np.save(content, losses.numpy().astype(kind))
    draft.write_bytes(content.getvalue() + hashlib.sha256(content.getbuffer()).digest())
    os.replace(draft, path)


def read_about(folder: Path) -> dict[str, Any]:
    """What a store says of itself. Raises FileNotFoundError when there is none."""
    path = folder / "about.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no stored reference losses in {folder}: run `collider score RECIPE` first, or set "
            "filter.stored_losses=false to run the reference model beside"
        )
    return json.loads(path.read_text(encoding="utf-8"))
