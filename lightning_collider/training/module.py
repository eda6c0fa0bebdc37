"""The LightningModule of a recipe: an ordinary one, that knows nothing of how tokens are filtered.

It calls a Hugging Face model with labels and returns the loss. Which rows stay in the backward is
the strategy's affair; the module only reads what the output says of it, to report it.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_collider.nn.causal_lm import token_losses
from lightning_collider.superposition.schedule import rate_factor
from lightning_collider.training.config import TrainConfig
from lightning_collider.training.guard import NOT_FINITE, GradientGuard
from lightning_collider.training.meter import Meter
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


class LanguageModel(L.LightningModule):
    """Trains a causal language model of transformers on batches of `input_ids` and `labels`.

    Args:
        model: not yet converted or sharded.
        config: what a recipe says of its training.
        section: the part of the recipe that says it, for what a message advises.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, section: str = "train"):
        super().__init__()
        self.model = model
        self.config, self.section = config, section
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
            row = dict(self.meter.flush())
            if self.utilisation is not None:
                row |= self.utilisation.row(row["positions_per_s"], row["kept_share"])
            self.log_dict(row, prog_bar=True)
            self.log_dict(self.step_numbers | self.meter.now())

    def on_validation_start(self) -> None:
        self.meter.clock.stop()

    def on_validation_end(self) -> None:
        self.meter.clock.go_on()

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
                f"{self.section}.{key}=skip to leave the step out"
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
