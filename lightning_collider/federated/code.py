"""A byte-level language model on Python's standard library, each client with other packages of it.

Tokens are bytes, so that sites need not share a tokenizer. The library's modules are taken in the
order of their paths and cut into as many runs as there are clients: each has its own packages. The
backward is filtered: training selects by the strategy, the correction draws its kept rows itself
and distils on them only.
"""

import math
from collections.abc import Iterator

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_collider as lc
from lightning_collider.federated.distillation import distillation_loss
from lightning_collider.federated.tasks import Task, mixed_seed, seeded
from lightning_collider.filtering.selectors import NO_TARGET, shift_labels
from lightning_collider.filtering.selectors import random as random_rows
from lightning_collider.training.sources import library_documents

END = 256  # the token behind each document; 0 to 255 are bytes
HELD_OUT = 20  # every so manieth document is never trained on
Batch = dict[str, Tensor]  # input_ids and labels, int64 (B, T)


class CodeModel(L.LightningModule):
    """A small Llama over bytes, trained with AdamW.

    Args:
        width, layers: of the model; a head has 32 dimensions.
        length: T, the longest sequence.
        learning_rate: of AdamW.
        keep: part of the targets that the correction distils on.
    """

    def __init__(self, width: int, layers: int, length: int, learning_rate: float, keep: float):
        super().__init__()
        self.learning_rate, self.keep = learning_rate, keep
        config = LlamaConfig(
            vocab_size=END + 1,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def correction_step(self, teacher: "CodeModel", batch: Batch, lam: float, t: float) -> Tensor:
        """The distillation loss at temperature t over kept rows, with their filtered backward."""
        ids, labels = batch["input_ids"], batch["labels"]
        keep = random_rows(labels, self.keep, "batch", torch.default_generator)
        logits = self.model(input_ids=ids, use_cache=False).logits
        with torch.no_grad():
            teacher_logits = teacher.model(input_ids=ids, use_cache=False).logits
        targets = shift_labels(labels)
        rows = keep & (targets != NO_TARGET)
        loss = distillation_loss(logits[rows], teacher_logits[rows], targets[rows], lam, t)
        lc.backward_filter(loss, rows)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))


class Code(Task):
    """Sequences of bytes of the standard library's source.

    Args:
        seed: of the initial weights, the order of batches and the kept rows.
        clients: number of parts.
        sequences: sequences of each client, from the front of its part.
        length: T, bytes in one sequence.
        batch_size: sequences in one optimizer step.
        width, layers: of the model.
        learning_rate: of AdamW.
        selector, keep, engine: of :class:`lightning_collider.fabric.ColliderStrategy`; with
            keep = 1 nothing is filtered.

    Raises:
        ValueError: the library is too small for so many clients and sequences.
    """

    metric, higher_is_better = "bits_per_byte", False

    def __init__(
        self,
        seed: int,
        clients: int = 8,
        sequences: int = 64,
        length: int = 128,
        batch_size: int = 8,
        width: int = 128,
        layers: int = 2,
        learning_rate: float = 0.003,
        selector: str = "random",
        keep: float = 0.6,
        engine: str = "cpp",
    ):
        self.seed, self.clients, self.batch_size = seed, clients, batch_size
        self.shape = (width, layers, length, learning_rate, keep)
        self.filter = {"keep": keep, "selector": selector if keep < 1 else None, "engine": engine}
        documents = library_documents()
        # evenly from the whole library: the held-out text has something of every client's part
        held_out = documents[::HELD_OUT]
        self._test = _rows(held_out[:: max(1, len(held_out) // 64)], length, sequences)
        kept = [d for i, d in enumerate(documents) if i % HELD_OUT]
        size = len(kept) // clients
        self._parts = [
            _rows(kept[i * size : (i + 1) * size], length, sequences) for i in range(clients)
        ]
        if min(map(len, self._parts)) < sequences:
            raise ValueError(
                f"the standard library has fewer than {sequences} sequences of {length} bytes for "
                f"each of {clients} clients: lower task.options.sequences, length or clients"
            )

    def module(self) -> CodeModel:
        with seeded(self.seed):
            return CodeModel(*self.shape)

    def examples(self, client: int) -> int:
        return len(self._parts[client])

    def batches(self, client: int, seed: int) -> Iterator[Batch]:
        rows = self._parts[client]
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, seed))
        for some in torch.randperm(len(rows), generator=generator).split(self.batch_size):
            yield {"input_ids": rows[some], "labels": rows[some]}

    def evaluate(self, module: L.LightningModule) -> dict[str, float]:
        module.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for rows in self._test.to(module.device).split(self.batch_size):
                logits = module.model(input_ids=rows, use_cache=False).logits[:, :-1]
                targets = rows[:, 1:].flatten()
                total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
                count += len(targets)
        return {"bits_per_byte": total / count / math.log(2)}

    def fabric(self, seed: int) -> L.Fabric:
        """One with the filtering strategy, which counts steps and so serves one job only."""
        strategy = lc.fabric.ColliderStrategy(**self.filter, seed=seed)
        fabric = L.Fabric(accelerator="auto", devices=1, strategy=strategy)
        fabric.launch()
        return fabric


def _rows(documents: list[str], length: int, most: int) -> Tensor:
    """Bytes of documents, END behind each, as int64 (rows, length): at most so many rows."""
    tokens: list[int] = []
    for document in documents:
        tokens += (*document.encode(), END)
        if len(tokens) >= most * length:
            break
    rows = min(most, len(tokens) // length)
    return torch.tensor(tokens[: rows * length], dtype=torch.int64).view(rows, length)
