"""Where reference losses come from: a frozen model that runs beside the student."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_collider.filtering.selectors import NO_TARGET, shift_labels

ROWS_AT_A_TIME = 2048  # rows whose float32 logits are held at once


class LiveReference:
    """A frozen causal LM that gives the reference loss of every position.

    Args:
        model: a Hugging Face causal LM, or the path of a folder that holds one. It is put in eval
            mode and gets no gradients.

    Raises:
        ValueError: neither a module nor a folder with a model.
    """

    def __init__(self, model: nn.Module | str | Path) -> None:
        self.model = model if isinstance(model, nn.Module) else load_model(Path(model))
        self.model.requires_grad_(False).eval()

    def check_vocabulary(self, student: nn.Module) -> None:
        """Raise ValueError when the student's vocabulary has another size."""
        ours, theirs = vocabulary_size(self.model), vocabulary_size(student)
        if ours != theirs:
            raise ValueError(
                f"the reference model's vocabulary has {ours} tokens and the trained model's "
                f"{theirs}: excess losses compare the same tokens, so train both with one "
                "tokenizer"
            )

    @torch.no_grad()
    def losses(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor | None) -> Tensor:
        """Loss of the prediction made at each position.

        Args:
            input_ids, labels: int64 (B, T).
            inputs: what else the student's forward was given: attention mask, position ids.

        Returns:
            float32 (B, T), 0 where there is no target.
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        logits = self.model(input_ids=input_ids, use_cache=False, **given).logits.flatten(0, 1)
        targets = shift_labels(labels).flatten()
        parts = [
            F.cross_entropy(z.float(), y, ignore_index=NO_TARGET, reduction="none")
            for z, y in zip(
                logits.split(ROWS_AT_A_TIME), targets.split(ROWS_AT_A_TIME), strict=True
            )
        ]
        return torch.cat(parts).view(labels.shape)


def reference_losses(folder: Path, rows: np.ndarray, batch_size: int) -> Tensor:
    """Losses of token ids (rows, T) by the model in a folder: float32 (rows, T)."""
    model = LiveReference(folder)
    ids = torch.from_numpy(rows.astype(np.int64))
    return torch.cat([model.losses(batch, batch) for batch in ids.split(batch_size)])


def vocabulary_size(model: nn.Module) -> int:
    """Vocabulary of a Hugging Face model, as its configuration says."""
    return int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]


def load_model(folder: Path) -> nn.Module:
    """Load a Hugging Face causal LM from a local folder."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no Hugging Face model in {folder}: give a folder with config.json and weights, as "
            f"save_pretrained writes it"
        )
    return AutoModelForCausalLM.from_pretrained(folder)
