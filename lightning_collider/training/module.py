"""The LightningModule of a recipe: an ordinary one, that knows nothing of how tokens are filtered.

It calls a Hugging Face model with labels and returns the loss. Which rows stay in the backward is
the strategy's affair; the module only reads what the output says of it, to report it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, SumMetric
from transformers import PreTrainedModel

from lightning_collider.nn.causal_lm import token_losses
from lightning_collider.superposition.schedule import rate_factor
from lightning_collider.training.config import TrainConfig
from lightning_collider.training.guard import NOT_FINITE, GradientGuard
from lightning_collider.training.utilisation import Utilisation


def cosine_with_warmup(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (0 is the first), as a part of `config.learning_rate`.

    It rises linearly over the warm-up, step 0 having 1/warmup_steps of it, then follows half a
    cosine down to `final_learning_rate`, which a step numbered `config.steps` would have.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    final = config.final_learning_rate / config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def rate_of_step(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` as a part of `config.learning_rate`.

    With a `decay_fraction` the full rate stands between the warm-up and a linear fall to
    `final_learning_rate`; else the fall is a cosine that begins behind the warm-up.
    """
    if config.decay_fraction is None or step < config.warmup_steps:
        return cosine_with_warmup(step, config)
    decay_steps = round(config.decay_fraction * config.steps)
    final = config.final_learning_rate / config.learning_rate
    return final + (1 - final) * rate_factor(step, config.steps, 0, decay_steps)


def inputs_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a batch goes to the model; the strategy and the log read the rest."""
    return {k: batch[k] for k in ("input_ids", "labels", "position_ids") if k in batch}


def kept_share(row: dict[str, float]) -> float:
    """Kept rows over input tokens of a row of the log."""
    return row["kept_per_s"] / row["tokens_per_s"]


class Meter(nn.Module):
    """Counts tokens and averages losses between two rows of the log, over all ranks.

    Two losses: over the rows that were kept, and over all rows that have a target. Two speeds:
    input tokens a second, and kept rows a second. Without filtering each pair is equal, up to the
    last token of a sequence, which is an input and has no target.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_loss, self.all_loss = MeanMetric(), MeanMetric()
        self.tokens, self.kept_rows = SumMetric(), SumMetric()
        self.totals = {"input_tokens": 0.0, "kept_rows": 0.0, "seconds": 0.0}
        self.last: dict[str, float] = {}  # the newest row of the log
        self.start()

    def start(self) -> None:
        """Measure time from here on."""
        self._batches, self._since = 0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that is spent inside out of the speeds."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def now(self) -> dict[str, float]:
        """Input tokens and seconds of training so far."""
        so_far = {name: self.totals[name] for name in ("input_tokens", "seconds")}
        if self._batches > 0:
            so_far["input_tokens"] += self.tokens.compute().item()
            so_far["seconds"] += time.perf_counter() - self._since
        return so_far

    def update(self, out: Any, labels: torch.Tensor) -> None:
        """Take in one batch: the model's output and its labels (B, T)."""
        has_target = labels[:, 1:] != -100
        targets = kept = has_target.sum()
        loss = loss_of_all = out.loss.detach()
        if getattr(out, "keep", None) is not None:
            kept = (out.keep[:, :-1] & has_target).sum()
            loss_of_all = out.token_losses.detach().sum() / targets
        self.kept_loss.update(loss, kept)
        self.all_loss.update(loss_of_all, targets)
        self.kept_rows.update(kept)
        self.tokens.update(labels.numel())
        self._batches += 1

    def flush(self) -> dict[str, float]:
        """Means and speeds since the last row, or the last row again when nothing came since.

        This is the only place that waits for the device.
        """
        if self._batches == 0:
            return self.last
        tokens, kept = self.tokens.compute().item(), self.kept_rows.compute().item()
        seconds = time.perf_counter() - self._since
        self.last = {
            "loss_kept": self.kept_loss.compute().item(),
            "loss_all": self.all_loss.compute().item(),
            "tokens_per_s": tokens / seconds,
            "kept_per_s": kept / seconds,
        }
        new = {"input_tokens": tokens, "kept_rows": kept, "seconds": seconds}
        self.totals = {name: self.totals[name] + new[name] for name in new}
        for metric in (self.kept_loss, self.all_loss, self.tokens, self.kept_rows):
            metric.reset()
        self.start()
        return self.last

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; ends the current row of the log."""
        self.flush()
        return {"totals": self.totals, "last": self.last}

    def restore(self, state: dict[str, Any]) -> None:
        self.totals, self.last = state["totals"], state["last"]


class LanguageModel(L.LightningModule):
    """Trains a causal language model of transformers on batches of `input_ids` and `labels`."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig):
        super().__init__()
        self.model = model
        self.config = config
        self.meter = Meter()
        self.guard = GradientGuard(config.on_nan, config.on_spike, config.spike_factor)
        self.utilisation: Utilisation | None = None  # for MFU in the log
        self.describe: Callable[[int], str] = str  # says where a row of the data lies
        self.window_rows: list[int] = []  # rows of this optimizer step, on this rank
        self.step_numbers: dict[str, float] = {}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.window_rows += batch["row"].tolist() if "row" in batch else []
        out = self.model(**inputs_of(batch), use_cache=False)
        self.meter.update(out, batch["labels"])
        return out.loss

    def on_train_start(self) -> None:
        self.meter.start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        at_step = (batch_idx + 1) % self.config.accumulate == 0
        step = self.trainer.global_step
        if at_step and (step % self.config.log_every == 0 or step == self.trainer.max_steps):
            row = self.meter.flush()
            row |= {"kept_share": kept_share(row)}
            if self.utilisation is not None:
                row |= self.utilisation.row(row["tokens_per_s"], row["kept_share"])
            self.log_dict(row, prog_bar=True)
            so_far = {name: self.meter.totals[name] for name in ("input_tokens", "seconds")}
            self.log_dict(self.step_numbers | so_far)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        loss = self.model(**inputs_of(batch), use_cache=False).loss
        self.log("validation_loss", loss, sync_dist=True, batch_size=len(batch["input_ids"]))

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int = 0) -> torch.Tensor:
        """Loss of the prediction made at each position, float (B, T)."""
        return token_losses(self.model, **inputs_of(batch))

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of the whole gradient, which is logged, unless the guard objects.

        Raises ValueError where the guard's policy is "stop".
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        rate = optimizer.param_groups[0]["lr"]
        self.step_numbers = {"gradient_norm": value, "learning_rate": rate}
        fault, policy = self.guard.judge(value) or ("", "")
        if fault:
            self._object(fault, policy)
        if policy == "skip":
            for p in parameters:
                p.grad = None  # the optimizer passes over parameters without a gradient
        elif gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self.window_rows = []

    def _object(self, fault: str, policy: str) -> None:
        """Say what is wrong with this step's gradient, and where its sequences lie."""
        places = "; ".join(self.describe(row) for row in self.window_rows)
        what = (
            f"the gradient of optimizer step {self.trainer.global_step + 1} {fault}. Its "
            f"sequences on rank {self.trainer.global_rank}: {places or 'unknown'}"
        )
        if policy == "stop":
            key = "on_nan" if fault == NOT_FINITE else "on_spike"
            raise ValueError(
                f"{what}. The weights are those before this step; start the same command with "
                f"trainer.{key}=skip to leave the step out"
            )
        warnings.warn(what + ". The step is left out" * (policy == "skip"), stacklevel=2)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]  # norms: decay would pull them to 0
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_of_step(step, self.config)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["meter"] = self.meter.state()
        checkpoint["gradient_norms"] = self.guard.state()
        checkpoint["model_config"] = self.model.config.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.meter.restore(checkpoint["meter"])
        self.guard.restore(checkpoint["gradient_norms"])
