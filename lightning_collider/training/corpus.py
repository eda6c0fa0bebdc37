"""The corpus of one run: held-out problems, a tokenizer, and packed tokens on disk.

Files of a corpus folder (T = sequence length; rows are in the order in which they are trained on):

    heldout.jsonl    problems for evaluation, one a line; none of them is in the tokens below
    heldout.json     general and noise documents for evaluation, likewise
    heldout.npy      (rows, T) token ids of all three, mixed by weight as train.npy is
    heldout_sources.npy  (rows, T) uint8, as sources.npy
    tokenizer/       what `PreTrainedTokenizerFast.from_pretrained` reads
    train.npy        (rows, T) token ids of the arms: all sources, mixed by weight
    sources.npy      (rows, T) uint8, which source each of those tokens comes from
    reference.npy    (rows, T) token ids of the reference model: other documents, clean ones
    manifest.json    counts, hashes and versions; written last, so its presence means "complete"
"""

import dataclasses
import itertools
import json
import math
import platform
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from lightning_collider.training.config import CorpusConfig, Recipe
from lightning_collider.training.files import read_json, sha256, write_json, write_text
from lightning_collider.training.sources import (
    HELD_OUT,
    SOURCES,
    Problem,
    general_documents,
    generate_problems,
    noise_documents,
)
from lightning_collider.training.tokens import encode, load_tokenizer, pack, train_tokenizer

ENCODED_AT_ONCE = 256  # documents
ARRAYS = ("train", "sources", "reference", "heldout", "heldout_sources")  # NAME.npy


@dataclass(frozen=True)
class Corpus:
    """A complete corpus folder. The arrays are memory-mapped, read-only."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray  # (rows, T) token ids
    sources: np.ndarray  # (rows, T) uint8
    reference: np.ndarray  # (rows, T) token ids
    heldout: np.ndarray  # (rows, T) token ids
    heldout_sources: np.ndarray  # (rows, T) uint8


def build_corpus(recipe: Recipe, folder: Path) -> None:
    """Make every file of the corpus folder from the recipe's seed; equal seeds give equal files.

    Raises ValueError when a source has less text than the recipe's steps and weights ask for.
    """
    problems = generate_problems(recipe.seed)
    heldout = list(itertools.islice(problems, recipe.corpus.heldout_problems))
    streams = _document_streams(problems, recipe.seed)
    tokenizer = _learn_tokenizer(recipe.corpus, streams)

    length, rows_a_step = recipe.corpus.sequence_length, recipe.train.batch_size
    heldout_rows = recipe.eval.heldout_batches * rows_a_step
    rows_a_step *= recipe.train.accumulate
    rows, reference_rows = recipe.train.steps * rows_a_step, recipe.reference.steps * rows_a_step
    shares, clean_shares = _shares(recipe.corpus.weights), _shares(recipe.reference.weights)
    mixed = _mix(streams, tokenizer, shares, rows * length, recipe.seed)
    clean = _mix(streams, tokenizer, clean_shares, reference_rows * length, recipe.seed)
    held = heldout_documents(recipe.seed)
    held_streams = {name: iter(texts) for name, texts in held.items()}
    held_streams["target"] = (problem.text for problem in heldout)
    held_mixed = _mix(held_streams, tokenizer, shares, heldout_rows * length, recipe.seed, True)

    folder.mkdir(parents=True, exist_ok=True)
    train, sources = pack(mixed, length, rows)
    arrays = {"train": train, "sources": sources}
    arrays["reference"], _ = pack(clean, length, reference_rows)
    arrays["heldout"], arrays["heldout_sources"] = pack(held_mixed, length, heldout_rows)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    tokenizer.save_pretrained(folder / "tokenizer")
    lines = (json.dumps(dataclasses.asdict(problem)) + "\n" for problem in heldout)
    write_text(folder / "heldout.jsonl", "".join(lines))
    write_json(folder / "heldout.json", held)
    write_json(folder / "manifest.json", _manifest(recipe.seed, folder, sources, len(tokenizer)))


def load_corpus(folder: Path) -> Corpus:
    """Open a complete corpus folder. Raises ValueError when a file differs from its manifest."""
    manifest = read_json(folder / "manifest.json")
    for name, expected in manifest["sha256"].items():
        if sha256(folder / name) != expected:
            raise ValueError(
                f"{folder / name} is not the file that was written: start again in another folder "
                "with out=OTHER"
            )
    arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in ARRAYS}
    return Corpus(folder, manifest, load_tokenizer(folder / "tokenizer"), **arrays)


def heldout_documents(seed: int) -> dict[str, list[str]]:
    """General and noise documents that no corpus of this seed trains on."""
    noise = itertools.islice(noise_documents(seed, held_out=True), HELD_OUT)
    return {"general": general_documents(seed, held_out=True), "noise": list(noise)}


def load_heldout_documents(folder: Path, source: str) -> list[str]:
    """The held-out documents of a corpus folder, of source "general" or "noise"."""
    return read_json(folder / "heldout.json")[source]


def load_heldout(folder: Path) -> list[Problem]:
    """The held-out problems of a corpus folder, in their fixed order."""
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [Problem(**json.loads(line)) for line in lines]


def _document_streams(problems: Iterator[Problem], seed: int) -> dict[str, Iterator[str]]:
    return {
        "target": (problem.text for problem in problems),
        "general": iter(general_documents(seed)),
        "noise": noise_documents(seed),
    }


def _learn_tokenizer(
    config: CorpusConfig, streams: dict[str, Iterator[str]]
) -> PreTrainedTokenizerFast:
    """A tokenizer from the head of each stream, which is then put back in front of it."""
    samples: list[str] = []
    for name, share in _shares(config.weights).items():
        head = _take_characters(streams[name], share * config.tokenizer_characters)
        streams[name] = itertools.chain(head, streams[name])
        samples += head
    return train_tokenizer(samples, config.vocab_size, config.sequence_length)


def _shares(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weights[name] / total for name in SOURCES}


def _take_characters(documents: Iterator[str], wanted: float) -> list[str]:
    """Documents from the front of a stream up to `wanted` characters, or all there are."""
    taken: list[str] = []
    count = 0
    while count < wanted:
        document = next(documents, None)
        if document is None:
            break
        taken.append(document)
        count += len(document)
    return taken


def _mix(
    streams: Mapping[str, Iterator[str]],
    tokenizer: PreTrainedTokenizerFast,
    shares: dict[str, float],
    tokens: int,
    seed: int,
    exact: bool = False,
) -> list[tuple[int, list[int]]]:
    """Encoded documents of all sources by share, shuffled, each with its source's number.

    `exact` cuts the last document of a source, so that few documents have the right shares too.
    """
    mixed: list[tuple[int, list[int]]] = []
    for name, share in shares.items():
        wanted = math.ceil(share * tokens)
        taken = _take_tokens(streams[name], tokenizer, wanted, name)
        if exact and taken:
            taken[-1] = taken[-1][: wanted - sum(map(len, taken[:-1]))]
        mixed += [(SOURCES.index(name), ids) for ids in taken]
    random.Random(seed).shuffle(mixed)
    return mixed


def _take_tokens(
    documents: Iterator[str], tokenizer: PreTrainedTokenizerFast, wanted: float, source: str
) -> list[list[int]]:
    """Encoded documents from the front of a stream, until they hold at least `wanted` tokens."""
    taken: list[list[int]] = []
    count = 0
    while count < wanted:
        batch = list(itertools.islice(documents, ENCODED_AT_ONCE))
        if not batch:
            raise ValueError(
                f"source {source!r} has {count:,} tokens, the recipe asks for {round(wanted):,}: "
                f"lower corpus.weights.{source}, train.steps, train.batch_size or "
                "eval.heldout_batches, or raise corpus.heldout_problems"
            )
        for ids in encode(tokenizer, batch):
            if count < wanted:
                taken.append(ids)
                count += len(ids)
    return taken


def _manifest(seed: int, folder: Path, sources: np.ndarray, vocab_size: int) -> dict[str, Any]:
    files = [
        *(f"{name}.npy" for name in ARRAYS),
        "heldout.jsonl",
        "heldout.json",
        "tokenizer/tokenizer.json",
    ]
    counts = np.bincount(sources.reshape(-1), minlength=len(SOURCES))
    return {
        "seed": seed,
        "vocab_size": vocab_size,
        "sequence_length": sources.shape[1],
        "train_tokens": int(sources.size),
        "tokens_by_source": dict(zip(SOURCES, counts.tolist(), strict=True)),
        "sha256": {name: sha256(folder / name) for name in files},
        "python": platform.python_version(),  # general text is this version's standard library
        "reasoning_gym": version("reasoning-gym"),
    }
