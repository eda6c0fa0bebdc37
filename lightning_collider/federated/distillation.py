"""Correcting a stale update by distillation from the newest global model.

The loss of a row with the label y, the client's logits z and the global model's logits z_g is

    (1 - lam) CE(y, z) + lam T^2 KL(softmax(z_g / T) || softmax(z / T)),

and its mean over the rows is taken. T^2 keeps the gradient's size when T changes (Hinton et al.,
arXiv 1503.02531). The weight lam grows with the version t of the global model, which still misleads
in early stages: lam(t) = lam_max (1 - exp(-t / t_warm)). That distillation from the latest global
model corrects, and weakly at first, is from the abstract of FedADT (arXiv 2504.04081); both formulas
are ours.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class StageWeight:
    """lam(t) = lam_max (1 - exp(-t / t_warm)); with t_warm = 0, lam_max from the first version on.

    Args:
        lam_max: the weight of late stages, in [0, 1].
        t_warm: versions after which 63 % of it is reached, 0 or more.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, lam_max: float, t_warm: float) -> None:
        if not 0 <= lam_max <= 1:
            raise ValueError(f"lam_max must be in [0, 1], not {lam_max}")
        if t_warm < 0:
            raise ValueError(f"t_warm must not be negative, not {t_warm}")
        self.lam_max, self.t_warm = lam_max, t_warm

    def __call__(self, t: int) -> float:
        if self.t_warm == 0:
            return self.lam_max
        return -self.lam_max * math.expm1(-t / self.t_warm)


class Classifies(Protocol):
    """What a LightningModule needs for the correction, beside `training_step`."""

    def logits_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (N, C) of a batch's rows and their labels, int64 (N,), without -100 rows."""


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, lam: float, temperature: float
) -> Tensor:
    """The mean of the loss above over rows.

    Args:
        logits: the client's, float (N, C).
        teacher_logits: the global model's, float (N, C); no gradient flows into them.
        targets: int64 (N,).
        lam: weight of the teacher, in [0, 1].
        temperature: T, above 0.

    Returns:
        A scalar of the logits' dtype.

    Raises:
        ValueError: lam or the temperature is out of range, or the shapes differ.
    """
    if not 0 <= lam <= 1 or temperature <= 0:
        raise ValueError(
            f"lam must be in [0, 1] and the temperature above 0, not {lam}, {temperature}"
        )
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"the teacher's logits have shape {tuple(teacher_logits.shape)}, the client's "
            f"{tuple(logits.shape)}: they must come from the same model on the same batch"
        )
    log_p = F.log_softmax(logits / temperature, dim=-1)
    log_q = F.log_softmax(teacher_logits.detach() / temperature, dim=-1)
    divergence = F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    label_loss = F.cross_entropy(logits, targets)
    return (1 - lam) * label_loss + lam * temperature**2 * divergence


def correction_step(
    module: Any, teacher: Any, batch: Any, lam: float, temperature: float
) -> Tensor:
    """The loss of one correction step on a batch.

    A module may have a `correction_step(teacher, batch, lam, temperature)` of its own, for example
    to filter tokens; else its `logits_and_targets` are compared with the teacher's.
    """
    if hasattr(module, "correction_step"):
        return module.correction_step(teacher, batch, lam, temperature)
    logits, targets = module.logits_and_targets(batch)
    with torch.no_grad():
        teacher_logits, _ = teacher.logits_and_targets(batch)
    return distillation_loss(logits, teacher_logits, targets, lam, temperature)
