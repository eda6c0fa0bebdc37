"""From text to token ids: a byte-level BPE tokenizer learned from the corpus, and packing."""

import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_collider.ops.extension import cache_dir
from lightning_collider.training.sources import general_documents

BUILTIN = "builtin:"
TOKENIZER_DOCUMENTS = 1500  # of builtin:general, some 3 MB of text
LONGEST = 2**20  # tokens; the model says how long a sequence may be
END_OF_TEXT = "<|endoftext|>"  # ends each document, and starts a text that is scored on its own


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, sequence_length: int
) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of at most `vocab_size` tokens. It adds no special token to a text.

    Each digit is a token of its own, so that a number's digits mean the same wherever they stand.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=sequence_length,
        clean_up_tokenization_spaces=False,
    )


def builtin_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer `builtin:SIZE`: learned from Python's standard library, kept in the cache.

    Raises ValueError for a size that is no number of tokens.
    """
    size = name.removeprefix(BUILTIN)
    if not size.isdecimal() or int(size) <= 256:
        raise ValueError(f"model.tokenizer={name}: say how many tokens, as in {BUILTIN}4096")
    folder = cache_dir() / f"tokenizer-{size}-python-{platform.python_version()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            texts = general_documents(0)[:TOKENIZER_DOCUMENTS]
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                tokenizer = train_tokenizer(texts, int(size), LONGEST)
                tokenizer.save_pretrained(Path(work) / "tokenizer")
                os.replace(Path(work) / "tokenizer", folder)
    return load_tokenizer(folder)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Token ids of each document with the end-of-text token behind them."""
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def pack(
    documents: list[tuple[int, list[int]]], sequence_length: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay (source id, token ids) end to end and cut them into `rows` sequences; drop the rest.

    Returns token ids and source ids (uint8), both (rows, sequence_length). Token ids are uint16
    where they fit, else int32. Raises ValueError when there are too few tokens.
    """
    wanted = rows * sequence_length
    total = sum(len(ids) for _, ids in documents)
    if total < wanted:
        raise ValueError(f"{total} tokens do not fill {rows} sequences of {sequence_length}")
    tokens = np.fromiter((t for _, ids in documents for t in ids), np.int32, total)[:wanted]
    sources = np.repeat(
        np.array([source for source, _ in documents], np.uint8), [len(ids) for _, ids in documents]
    )[:wanted]
    kind = np.uint16 if tokens.max(initial=0) < 2**16 else np.int32
    shape = (rows, sequence_length)
    return tokens.astype(kind).reshape(shape), sources.reshape(shape)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a run's corpus folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
