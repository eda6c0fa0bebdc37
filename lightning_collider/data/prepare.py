"""The token shards of a recipe: made on first use, by one rank, and opened by all."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from lightning_collider.data.shards import ShardWriter, TokenShards
from lightning_collider.data.text import documents
from lightning_collider.training.settings import SourceConfig, TrainingRecipe

PARTS = ("train", "validation")


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
            for part in PARTS[: 1 + (recipe.data.validation_fraction > 0)]:
                _tokenise(recipe, tokenizer, source, folder / name / part, part)
    opened = {
        part: [
            TokenShards(folder / name / part, recipe.data.verify) for name in recipe.data.sources
        ]
        for part in PARTS[: 1 + (recipe.data.validation_fraction > 0)]
    }
    for shards in (s for part in opened.values() for s in part):
        shards.check(tokenizer, vocabulary)
    return {"validation": [], **opened}


def _tokenise(
    recipe: TrainingRecipe, tokenizer: Any, source: SourceConfig, folder: Path, part: str
) -> None:
    data = recipe.data
    # Weight and number of epochs do not change the tokens; all that does is part of the origin.
    origin = {k: v for k, v in dataclasses.asdict(source).items() if k != "weight"}
    origin |= {"part": part, "validation_fraction": data.validation_fraction, "seed": recipe.seed}
    writer = ShardWriter(folder, tokenizer, origin, data.shard_tokens)
    if writer.manifest["complete"]:
        return
    texts = _parted(recipe, source, part, writer.manifest["read"])
    with tqdm(desc=f"tokenising {folder}", unit=" tokens", unit_scale=True) as bar:
        for total in writer.write(texts):
            bar.update(total - bar.n)


def _parted(
    recipe: TrainingRecipe, source: SourceConfig, part: str, skip: int
) -> Iterator[tuple[bool, str]]:
    """Texts behind the first `skip`, each with whether it belongs to the part."""
    for number, text in enumerate(documents(source, recipe.seed, skip), skip):
        draw = random.Random(f"{recipe.seed}-{number}").random()
        is_validation = draw < recipe.data.validation_fraction
        yield is_validation == (part == "validation"), text
