"""What a run records for its report: fixed text under the filter, held-out scores, peak memory.

    sample.json      a piece of text with, at some steps, each token's loss and whether it was kept
    heldout.jsonl    at some steps, loss and kept rows of held-out text by source
    memory.json      peak bytes of one step

Each looks at the model without a gradient, and outside the time that the log counts.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_collider.eval.memory import peak_bytes
from lightning_collider.filtering.selectors import NO_TARGET, shift_labels
from lightning_collider.training.files import read_json, write_json, write_text
from lightning_collider.training.module import LanguageModel, inputs_of

SAMPLE_ROWS, SAMPLE_TOKENS = 4, 384  # what of a batch is written: rows, and tokens of each
SAMPLE_POINTS = (0.0, 0.05, 0.2, 0.5, 1.0)  # parts of the run at which a sample is taken


@dataclass(frozen=True)
class Seen:
    """A batch under the current model: losses and reference losses (B, T), keep bool (B, T)."""

    losses: Tensor
    reference: Tensor | None
    keep: Tensor | None


def look(module: LanguageModel, batch: dict[str, Tensor]) -> Seen:
    """Losses of a batch without a gradient, and the rows that the run's selector would keep."""
    model, was_training = module.model, module.model.training
    batch = {name: tensor.to(module.device) for name, tensor in batch.items()}
    precision = module.trainer.strategy.precision_plugin
    with torch.no_grad(), precision.forward_context():
        model.eval()
        losses = module.predict_step(batch)  # through the module, which FSDP2 may have sharded
        model.train(was_training)
        chooser = getattr(model, "token_filter", None)
        if chooser is None:
            return Seen(losses, None, None)
        chooser.bring(batch)
        ids, labels = batch["input_ids"], batch["labels"]
        inputs = {"position_ids": batch.get("position_ids")}
        reference = chooser.reference_losses(ids, labels, inputs=inputs)
        chooser.stored = None
        return Seen(losses, reference, chooser.choose(losses, reference, labels))


class AtSteps(L.Callback, ABC):
    """Calls `record` at given parts of a run: 0 is before the first step, 1 behind the last."""

    def __init__(self, points: Sequence[float]):
        self.points = points
        self._seen = -1

    @abstractmethod
    def record(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Look at the model after `step` optimizer steps."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen = -1
        self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        step = trainer.global_step
        if step == self._seen:
            return  # inside an accumulation window
        self._seen = step
        assert isinstance(module, LanguageModel)
        if step in {round(point * trainer.max_steps) for point in self.points}:
            with module.meter.paused():
                self.record(trainer, module, step)


class TextSample(AtSteps):
    """Writes losses and keep mask of a fixed batch, its first rows and tokens, to `path`.

    Args:
        batch: tensors (B, T) as the run's loader gives them; the selector ranks all of it.
        tokenizer: turns ids back into text.
        sources: names (B, T) of where each token comes from.
    """

    def __init__(
        self, path: Path, batch: dict[str, Tensor], tokenizer: Any, sources: np.ndarray
    ) -> None:
        super().__init__(SAMPLE_POINTS)
        self.path, self.batch = path, batch
        self.rows = mixed(sources)[:SAMPLE_ROWS]
        ids = self._shown(batch["input_ids"])
        self.about = {
            "tokens": [[tokenizer.decode([i]) for i in row] for row in ids],
            "sources": self._shown(sources),
            "has_target": self._shown(shift_labels(batch["labels"]) != NO_TARGET),
        }

    def record(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        seen = look(module, self.batch)
        if not trainer.is_global_zero:
            return
        before = read_json(self.path)["records"] if self.path.is_file() else []
        now = {
            "step": step,
            "losses": self._rounded(seen.losses),
            "keep": None if seen.keep is None else self._shown(seen.keep.cpu()),
        }
        reference = None if seen.reference is None else self._rounded(seen.reference)
        records = [r for r in before if r["step"] < step] + [now]
        write_json(self.path, {**self.about, "reference": reference, "records": records})

    def _shown(self, values: Any) -> list[list[Any]]:
        return values[self.rows, :SAMPLE_TOKENS].tolist()

    def _rounded(self, values: Tensor) -> list[list[float]]:
        return [[round(x, 3) for x in row] for row in self._shown(values.float().cpu())]


def mixed(sources: np.ndarray) -> list[int]:
    """All rows of (B, T) names, beginning with a few that have every name among them."""
    seen: set[str] = set()
    first = []
    for number, row in enumerate(sources):
        if not seen.issuperset(row):
            first.append(number)
            seen.update(row)
    return first + [n for n in range(len(sources)) if n not in first]


@dataclass(frozen=True)
class MixedText:
    """Held-out tokens of several sources.

    Attributes:
        rows, sources: token ids and numbers of their sources, (rows, T).
        names: of the sources, by number.
        token_bytes: bytes of each token of the vocabulary.
    """

    rows: np.ndarray
    sources: np.ndarray
    names: Sequence[str]
    token_bytes: np.ndarray

    def by_source(self, losses: Tensor, keep: Tensor | None) -> dict[str, dict[str, Any]]:
        """Targets, bytes, nats and kept rows of each source, for (rows, T) losses and mask."""
        source = torch.from_numpy(self.sources[:, 1:].astype(np.int64))
        size = torch.from_numpy(self.token_bytes[self.rows[:, 1:]])
        counts = {}
        for number, name in enumerate(self.names):
            here = source == number
            counts[name] = {
                "targets": int(here.sum()),
                "bytes": int(size[here].sum()),
                "nats": float(losses[:, :-1][here].double().sum()),
                "kept": None if keep is None else int(keep[:, :-1][here].sum()),
            }
        return counts


class HeldOut(AtSteps):
    """Appends to `path`, by source, what held-out text costs and how many of its rows are kept.

    A line: step, input_tokens, positions, seconds, and for each source targets (rows that predict
    a token of it), bytes of these tokens, nats (their summed loss) and kept (None without a
    selector).

    Args:
        text: mixed as the training text is.
        batch_size: rows that the selector ranks together.
        points: how often it looks, evenly over the run, apart from the start.
        reference: losses (rows, T) where the run has no reference model of its own at hand.
    """

    def __init__(
        self,
        path: Path,
        text: MixedText,
        batch_size: int,
        points: int,
        reference: Tensor | None = None,
    ) -> None:
        super().__init__([i / points for i in range(points + 1)])
        self.path, self.text = path, text
        self.ids = torch.from_numpy(text.rows.astype(np.int64)).split(batch_size)
        self.reference = None if reference is None else reference.split(batch_size)

    def record(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        so_far = module.meter.now()  # before the time that this takes
        seen = [look(module, batch) for batch in self._batches()]
        if self.reference is None and seen[0].reference is not None:  # it does not change
            self.reference = tuple(s.reference.cpu() for s in seen if s.reference is not None)
        losses = torch.cat([s.losses.cpu() for s in seen])
        keeps = [s.keep.cpu() for s in seen if s.keep is not None]
        counts = self.text.by_source(losses, torch.cat(keeps) if keeps else None)
        if trainer.is_global_zero:
            append_row(self.path, {"step": step, **so_far, "sources": counts})

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        for number, ids in enumerate(self.ids):
            batch = {"input_ids": ids, "labels": ids}
            if self.reference is not None:
                batch["reference_losses"] = self.reference[number]
            yield batch


class StepMemory(L.Callback):
    """Writes the peak memory of a step to `path` when training ends.

    On a GPU it is the allocator's peak over the run, weights and optimizer among it. On one CPU
    device a further forward and backward on `batch` is profiled, and only what it needs beyond
    weights and gradients counts. Several CPU ranks are not measured.
    """

    def __init__(self, path: Path, batch: dict[str, Tensor]):
        self.path, self.batch = path, batch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        module = pl_module
        if module.device.type == "cuda":
            peak, what = torch.cuda.max_memory_allocated(module.device), "whole run"
        elif trainer.world_size == 1 and trainer.global_step >= trainer.max_steps:
            peak, what = self._profiled(trainer, module), "beyond weights and gradients"
        else:
            return
        if trainer.is_global_zero:
            write_json(self.path, {"peak_bytes": peak, "of": what})

    def _profiled(self, trainer: L.Trainer, module: LanguageModel) -> int:
        chooser = getattr(module.model, "token_filter", None)
        if chooser is not None:
            chooser.bring(self.batch)
        given = inputs_of(self.batch)

        def forward() -> Tensor:
            with trainer.strategy.precision_plugin.forward_context():
                return module.model(**given, use_cache=False).loss

        return peak_bytes(lambda: forward, module.model)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a JSON-lines file; rows of its step or behind, of an earlier try, go."""
    before = [r for r in read_rows(path) if r["step"] < row["step"]]
    write_text(path, "".join(json.dumps(r) + "\n" for r in [*before, row]))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, [] where there is none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def token_sizes(tokenizer: Any) -> np.ndarray:
    """Bytes of each token of a byte-level vocabulary, int64 (V,); a special token has none."""
    special = set(tokenizer.all_special_ids)
    # In a byte-level vocabulary one character stands for one byte.
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return np.array([0 if i in special else len(word) for i, word in enumerate(words)])
