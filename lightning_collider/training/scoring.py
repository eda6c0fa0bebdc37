"""`collider score`: the reference model's losses of a recipe's data, computed once and stored.

The store lies beside the tokens, in a folder named after both hashes. Ranks share the blocks; what
is there already is not computed again.
"""

import hashlib
from pathlib import Path

import torch
from tqdm import tqdm

from lightning_collider.data.packed import Windows
from lightning_collider.data.prepare import prepare
from lightning_collider.filtering.reference import LiveReference, vocabulary_size
from lightning_collider.filtering.scores import (
    BLOCK,
    ScoreStore,
    block_path,
    missing_blocks,
    write_block,
)
from lightning_collider.training.checkpoint import ABOUT
from lightning_collider.training.files import sha256, write_json
from lightning_collider.training.models import (
    checkpoint_of,
    load_tokenizer,
    local_weights,
    read_model,
)
from lightning_collider.training.ranks import device_of_process, rank_of_process
from lightning_collider.training.settings import TrainingRecipe


def score(recipe: TrainingRecipe, rank: int | None = None, world: int = 1) -> Path:
    """Compute what is missing of the recipe's stored losses; return the folder of the store.

    Raises ValueError when the recipe names no reference, or its vocabulary is not the tokens'.
    """
    if recipe.filter.reference is None:
        raise ValueError(
            f"recipe {recipe.name!r} names no filter.reference, the folder or hub name of the "
            "model whose losses are stored"
        )
    rank = rank_of_process(recipe.trainer.devices) if rank is None else rank
    model = LiveReference(read_model("filter.reference", recipe.filter.reference))
    device = device_of_process()
    model.model.to(device)
    tokenizer = load_tokenizer(recipe.model)
    shards = prepare(recipe, tokenizer, vocabulary_size(model.model))
    windows = Windows(shards["train"], recipe.data.sequence_length, recipe.data.separate_documents)
    folder = store_folder(recipe, windows)
    about = _about(recipe, windows)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "about.json", about)
    order = _my_order(missing_blocks(folder, about), rank, world)
    for number in tqdm(order, desc=f"scoring {folder}", unit=" blocks", disable=rank != 0):
        if not block_path(folder, number).is_file():
            losses = _block_losses(model, windows, number, recipe.trainer.micro_batch_size, device)
            write_block(folder, number, losses, recipe.filter.stored_type)
    return folder


def _my_order(missing: list[int], rank: int, world: int) -> list[int]:
    """This rank's blocks, then what others have not done by then, from its far end.

    So the store is whole when a rank ends, also if another one died or was never started.
    """
    mine = [n for n in missing if n % world == rank]
    return mine + [n for n in reversed(missing) if n % world != rank]


def _block_losses(
    model: LiveReference, windows: Windows, number: int, batch: int, device: torch.device
) -> torch.Tensor:
    """Losses of the rows of one block: float32 (rows, T) on the CPU."""
    rows = range(number * BLOCK, min((number + 1) * BLOCK, len(windows)))
    losses = []
    for first in range(0, len(rows), batch):
        items = [windows[row] for row in rows[first : first + batch]]
        columns = {k: torch.stack([i[k] for i in items]).to(device) for k in items[0]}
        columns.pop("row")
        losses.append(model.losses(**columns).cpu())
    return torch.cat(losses)


def open_store(recipe: TrainingRecipe, windows: Windows) -> ScoreStore:
    """The stored losses of a recipe. Raises FileNotFoundError or ValueError as ScoreStore does."""
    about = _about(recipe, windows)
    folder = store_folder(recipe, windows)
    return ScoreStore(folder, about["tokens"], about["reference"])


def store_folder(recipe: TrainingRecipe, windows: Windows) -> Path:
    """DATA/scores/ and the beginnings of both hashes."""
    name = f"{reference_key(recipe)[:12]}-{windows.key[:12]}-{recipe.filter.stored_type}"
    return Path(recipe.data.folder) / "scores" / name


def reference_key(recipe: TrainingRecipe) -> str:
    """SHA-256 of a local reference's files, or of the name of one on the hub."""
    assert recipe.filter.reference is not None
    checkpoint = checkpoint_of(recipe.filter.reference)
    if checkpoint is not None:
        return sha256(checkpoint / ABOUT)  # it holds the checksums of all files
    name = local_weights(recipe.filter.reference)
    files = [p for s in ("*.safetensors", "*.bin", "config.json") for p in Path(name).glob(s)]
    parts = [sha256(path) for path in sorted(files)] if files else [name]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _about(recipe: TrainingRecipe, windows: Windows) -> dict:
    return {
        "tokens": windows.key,
        "reference": reference_key(recipe),
        "shape": [len(windows), windows.length],
        "type": recipe.filter.stored_type,
        "block": BLOCK,
    }
