"""Token shards: a source tokenised once, in files that are memory-mapped.

Plain NumPy files, and no streaming format with a loader of its own: any window of tokens is then a
slice, so the order of training is a function of (seed, number) alone, resuming needs no state of a
loader, and a stored loss stands at the same place as its token.

    FOLDER/manifest.json         counts, checksums, tokenizer, source; renewed after each shard
    FOLDER/tokens-00000.npy      (n,) uint16 or uint32, documents end to end, each with its eos
    FOLDER/ends-00000.npy        (documents,) int64, where each document of the shard ends

Tokenising that was interrupted goes on behind the last shard in the manifest.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_collider.training.files import read_json, sha256, write_json

FORMAT = 2
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does: its rules where they are known, its vocabulary else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{rules}{tokenizer.eos_token_id}".encode()).hexdigest()


class ShardWriter:
    """Writes the shards of one folder, or goes on with them.

    Args:
        folder: made if needed.
        tokenizer: adds no special token; its eos goes behind each document.
        origin: what the text is, compared on resuming.
        shard_tokens: a shard ends with the documents that reach this.

    Raises:
        ValueError: the folder was begun with another tokenizer or other text.
    """

    def __init__(self, folder: Path, tokenizer: Any, origin: dict[str, Any], shard_tokens: int):
        self.folder, self.tokenizer, self.shard_tokens = folder, tokenizer, shard_tokens
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "complete": False,
            "tokenizer": tokenizer_hash(tokenizer),
            "vocab_size": len(tokenizer),
            "origin": origin,
            "read": 0,
            "tokens": 0,
            "documents": 0,
            "shards": [],
        }
        if (folder / "manifest.json").is_file():
            found = read_manifest(folder)
            for key in ("format", "tokenizer", "origin"):
                if found[key] != self.manifest[key]:
                    raise ValueError(
                        f"{folder} holds shards with another {key} ({found[key]}, now "
                        f"{self.manifest[key]}): use another data.folder"
                    )
            self.manifest = found
        self._tokens: list[np.ndarray] = []
        self._size = 0

    @property
    def tokens(self) -> int:
        """Tokens written, and those of the shard that is being filled."""
        return self.manifest["tokens"] + self._size

    def add(self, texts: list[str], read: int) -> None:
        """Tokenise the next documents; with them, `read` documents of the source are done.

        Raises OSError when the disk is full; complete shards stay.
        """
        for ids in self._encode(texts):
            self._tokens.append(ids)
            self._size += len(ids)
        if self._size >= self.shard_tokens:
            self._close_shard(read)

    def finish(self, read: int) -> None:
        """Write the last shard. Raises ValueError when no document came."""
        if self._size:
            self._close_shard(read)
        if self.manifest["tokens"] == 0:
            raise ValueError(
                f"{self.manifest['origin']} has no text: there is nothing for {self.folder}"
            )
        self.manifest["complete"] = True
        self._save_manifest()

    def _encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        if not texts:
            return
        kind = np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for ids in encoded:
            yield np.array([*ids, self.tokenizer.eos_token_id], kind)

    def _close_shard(self, read: int) -> None:
        number = len(self.manifest["shards"])
        arrays = {
            f"tokens-{number:05d}.npy": np.concatenate(self._tokens),
            f"ends-{number:05d}.npy": np.cumsum([len(t) for t in self._tokens], dtype=np.int64),
        }
        for name, array in arrays.items():
            save_array(self.folder / name, array)
        files = {
            name: {
                "bytes": (self.folder / name).stat().st_size,
                "sha256": sha256(self.folder / name),
            }
            for name in arrays
        }
        shard = {"tokens": self._size, "documents": len(self._tokens), "files": files}
        self.manifest["shards"].append(shard)
        self.manifest["tokens"] += self._size
        self.manifest["documents"] += len(self._tokens)
        self.manifest["read"] = read
        self._tokens, self._size = [], 0
        self._save_manifest()

    def _save_manifest(self) -> None:
        write_json(self.folder / "manifest.json", self.manifest)


class TokenShards:
    """A complete folder of shards as one sequence of tokens, read-only.

    Args:
        folder: as ShardWriter leaves it.
        verify: compare every file with its checksum; sizes are compared in any case.

    Raises:
        FileNotFoundError: there is no manifest. ValueError: not complete, or a damaged file.
    """

    def __init__(self, folder: Path, verify: bool = True):
        self.folder, self.manifest = folder, read_manifest(folder)
        if not self.manifest["complete"]:
            raise ValueError(f"{folder} is not complete: start the same command again to go on")
        for shard in self.manifest["shards"]:
            for name, about in shard["files"].items():
                _check_file(folder / name, about, verify)
        pairs = [[folder / name for name in s["files"]] for s in self.manifest["shards"]]
        self._tokens = [np.load(tokens, mmap_mode="r") for tokens, _ in pairs]
        self._starts = np.cumsum([0, *(len(t) for t in self._tokens)])
        ends = [np.load(e) + start for (_, e), start in zip(pairs, self._starts, strict=False)]
        self._ends = np.concatenate(ends)

    def __len__(self) -> int:
        """Tokens."""
        return int(self._starts[-1])

    @property
    def key(self) -> str:
        """SHA-256 over the checksums of all shards: equal keys mean equal tokens."""
        sums = [a["sha256"] for s in self.manifest["shards"] for a in s["files"].values()]
        return hashlib.sha256("".join(sums).encode()).hexdigest()

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens start to start + length as int64, also over the border of two shards."""
        parts, shard = [], int(np.searchsorted(self._starts, start, side="right")) - 1
        while length > 0:
            offset = start - self._starts[shard]
            part = self._tokens[shard][offset : offset + length]
            parts.append(part)
            start, length, shard = start + len(part), length - len(part), shard + 1
        return np.concatenate(parts).astype(np.int64)

    def document_ids(self, start: int, length: int) -> np.ndarray:
        """Number of the document that each token of a window belongs to: int64 (length,)."""
        return np.searchsorted(self._ends, np.arange(start, start + length), side="right")

    def check(self, tokenizer: Any, vocabulary: int) -> None:
        """Raise ValueError unless the shards were made with this tokenizer, for such a model."""
        if self.manifest["tokenizer"] != tokenizer_hash(tokenizer):
            raise ValueError(
                f"{self.folder} was tokenised with another tokenizer: use another data.folder, or "
                "the model.tokenizer that it was made with"
            )
        if self.manifest["vocab_size"] > vocabulary:
            raise ValueError(
                f"{self.folder} has a vocabulary of {self.manifest['vocab_size']} tokens and the "
                f"model one of {vocabulary}: use the model's own tokenizer, or a larger "
                "model.config.vocab_size"
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of shards; FileNotFoundError or ValueError when it is unusable."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no token shards (no manifest.json in it)")
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: move {folder} away to tokenise it again") from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an .npy file in one piece. Raises OSError that says so when the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            np.save(file, array)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno in DISK_ERRORS or error.errno is None:
            raise OSError(
                f"no space left for {path}: free some and start the same command"
            ) from error
        raise


def _check_file(path: Path, about: dict[str, Any], verify: bool) -> None:
    damaged = not path.is_file() or path.stat().st_size != about["bytes"]
    if damaged or (verify and sha256(path) != about["sha256"]):
        raise ValueError(
            f"{path} is damaged or missing: move {path.parent} away, and the same command "
            "tokenises it again"
        )
