"""The token shards of a recipe: made on first use, by one rank, and opened by all."""

import dataclasses
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from lightning_collider.data.shards import ShardWriter, TokenShards
from lightning_collider.data.text import BUILTIN, documents, local_files
from lightning_collider.training.files import sha256
from lightning_collider.training.settings import SourceConfig, TrainingRecipe

PARTS = ("train", "validation")
ENCODED_AT_ONCE = 512  # documents; the tokenizer's threads share them


def prepare(
    recipe: TrainingRecipe, tokenizer: Any, vocabulary: int
) -> dict[str, list[TokenShards]]:
    """Tokenise what is not tokenised yet; return the shards of each source under PARTS.

    The lists are in the order of `data.sources`; "validation" is empty where nothing is kept for
    it. Ranks that come second wait for the first. Raises ValueError for shards that do not fit.
    """
    folder = Path(recipe.data.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to data.folder={folder}: {error.strerror}") from error
    with FileLock(folder / ".lock"):
        for name, source in recipe.data.sources.items():
            if not _is_tokenised(source):
                _tokenise(recipe, tokenizer, source, folder / name)
    opened: dict[str, list[TokenShards]] = {part: [] for part in PARTS}
    for part in _parts(recipe):
        for name, source in recipe.data.sources.items():
            where = Path(source.path) if _is_tokenised(source) else folder / name
            shards = TokenShards(where / part, recipe.data.verify)
            shards.check(tokenizer, vocabulary)
            opened[part].append(shards)
    return opened


def _parts(recipe: TrainingRecipe) -> tuple[str, ...]:
    return PARTS[: 1 + (recipe.data.validation_fraction > 0)]


def _is_tokenised(source: SourceConfig) -> bool:
    """Whether the path is a folder that another recipe's run tokenised: DATA/NAME."""
    return (Path(source.path) / PARTS[0] / "manifest.json").is_file()


def _tokenise(recipe: TrainingRecipe, tokenizer: Any, source: SourceConfig, folder: Path) -> None:
    """Write both parts of a source in one pass over its documents, or what is left to do of it."""
    data = recipe.data
    # Weight and number of epochs do not change the tokens; all that does is part of the origin.
    origin = {k: v for k, v in dataclasses.asdict(source).items() if k != "weight"}
    origin |= {"validation_fraction": data.validation_fraction, "seed": recipe.seed}
    origin |= {"without": "asked items"} if source.path.startswith(BUILTIN) else {}
    writers = {
        part: ShardWriter(folder / part, tokenizer, {**origin, "part": part}, data.shard_tokens)
        for part in _parts(recipe)
    }
    _note_files(source, writers)
    todo = {part: w for part, w in writers.items() if not w.manifest["complete"]}
    if not todo:
        return
    read = min(w.manifest["read"] for w in todo.values())
    with tqdm(desc=f"tokenising {folder}", unit=" tokens", unit_scale=True) as bar:
        for batch in _batches(documents(source, recipe.seed, read)):
            numbers = range(read, read + len(batch))
            read = numbers.stop
            for part, writer in todo.items():
                done = writer.manifest["read"]
                mine = [
                    text
                    for number, text in zip(numbers, batch, strict=True)
                    if number >= done and _part_of(recipe, number) == part and text.strip()
                ]
                writer.add(mine, read)
            bar.update(sum(w.tokens for w in todo.values()) - bar.n)
    for part, writer in todo.items():
        writer.finish(read, may_be_empty=part != PARTS[0])


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of ENCODED_AT_ONCE documents. A shard ends with one, so a resumed pass has the same."""
    while batch := list(itertools.islice(texts, ENCODED_AT_ONCE)):
        yield batch


def _part_of(recipe: TrainingRecipe, number: int) -> str:
    draw = random.Random(f"{recipe.seed}-{number}").random()
    return PARTS[draw < recipe.data.validation_fraction]


def _note_files(source: SourceConfig, writers: dict[str, ShardWriter]) -> None:
    """Record the local files of a source before the first pass; later, refuse changed ones.

    Complete shards need their text no more: it may be gone, as on another machine.
    """
    if source.path.startswith(BUILTIN):
        return
    try:
        files = local_files(source.path)
    except FileNotFoundError:
        if all(writer.manifest["complete"] for writer in writers.values()):
            return
        raise
    begun = [writer for writer in writers.values() if "files" in writer.manifest]
    for writer in begun:
        _refuse_changed(writer.folder, writer.manifest["files"], files)
    if len(begun) < len(writers):
        facts = {name: _facts(name) for name in files}
        for writer in writers.values():
            writer.manifest["files"] = facts


def _facts(name: str) -> dict[str, Any]:
    about = os.stat(name)
    return {"bytes": about.st_size, "modified_ns": about.st_mtime_ns, "sha256": sha256(Path(name))}


def _refuse_changed(folder: Path, known: dict[str, Any], files: list[str]) -> None:
    """Raise ValueError when a file is not what it was when `folder` was tokenised."""
    for name in sorted({*known, *files}):
        if name in known and name in files and _is_unchanged(name, known[name]):
            continue
        what = "is new" if name not in known else "is gone" if name not in files else "has changed"
        raise ValueError(
            f"{name} {what} since {folder} was tokenised: use "
            f"another data.folder, or move {folder.parent} away to tokenise it again"
        )


def _is_unchanged(name: str, then: dict[str, Any]) -> bool:
    now = os.stat(name)
    if (now.st_size, now.st_mtime_ns) == (then["bytes"], then["modified_ns"]):
        return True
    return now.st_size == then["bytes"] and sha256(Path(name)) == then["sha256"]  # a copy
