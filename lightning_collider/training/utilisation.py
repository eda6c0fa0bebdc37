"""Model FLOPs utilisation (MFU): which part of the devices' peak a run uses.

Two numbers. Dense-equivalent: as if every token went through the whole backward, so it compares
with other trainers' tokens per second. Executed: what the filtered backward really computes, so it
says how busy the device is. Counting is that of the bench (eval/flops.py), with kept rows spread
evenly over a sequence.
"""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn

from lightning_collider.eval.flops import StepFlops, count_flops

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Utilisation:
    """What the FLOPs of a token depend on, and the peak of all devices together.

    Attributes:
        linear_parameters: weights of all linear layers, the head among them.
        attention_width: query heads times head size.
        layers: decoder blocks.
        length: tokens of a sequence.
        peak: FLOPs a second of all devices; None where it is not known, as on a CPU.
    """

    linear_parameters: int
    attention_width: int
    layers: int
    length: int
    peak: float | None

    def flops(self, kept_share: float) -> StepFlops:
        """FLOPs of one sequence of which so large a part is kept."""
        pairs = self.length * (self.length + 1) / 2
        return count_flops(
            self.linear_parameters,
            self.attention_width,
            self.layers,
            rows=self.length,
            kept=self.length * kept_share,
            pairs=(pairs, pairs * kept_share**2, pairs * kept_share * (1 - kept_share)),
        )

    def row(self, tokens_per_s: float, kept_share: float) -> dict[str, float]:
        """`mfu` and `mfu_executed` for a row of the log; nothing where the peak is not known."""
        if self.peak is None:
            return {}
        flops, sequences_per_s = self.flops(kept_share), tokens_per_s / self.length
        dense = flops.forward + flops.dense_backward
        executed = flops.forward + flops.filtered_backward
        return {
            "mfu": sequences_per_s * dense / self.peak,
            "mfu_executed": sequences_per_s * executed / self.peak,
        }


def utilisation_of(model: nn.Module, length: int, precision: str, devices: int) -> Utilisation:
    """The utilisation of a Hugging Face causal LM, before it is sharded, on this kind of device."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head_size = getattr(config, "head_dim", None)
    width = config.num_attention_heads * (
        head_size or config.hidden_size // config.num_attention_heads
    )
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return Utilisation(linear, width, config.num_hidden_layers, length, _peak(precision, devices))


def _peak(precision: str, devices: int) -> float | None:
    if not torch.cuda.is_available():
        return None
    one = get_available_flops(torch.device("cuda"), DTYPES[precision])
    return None if one is None else float(one * devices)
