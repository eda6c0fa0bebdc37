"""Model FLOPs utilisation (MFU): which part of the devices' peak a run uses.

Two numbers. Dense-equivalent: as if every token went through the whole backward, so it compares
with other trainers' tokens per second. Executed: what the filtered backward really computes, so it
says how busy the device is. Counting is that of the bench (eval/flops.py), with kept rows spread
evenly over a sequence.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn

from lightning_collider.eval.flops import StepFlops, count_flops

# FLOP/s of one device without sparsity, of bfloat16 (float32 sums), TF32 and float32, out of
# NVIDIA's data sheets, by a part of the name that CUDA gives it; of several the first counts.
# Lightning has such a table, too: for some it holds what a data sheet says with sparsity, twice as
# much, and the H200 it does not find.
PEAKS = {
    "H200 NVL": (835.5e12, 417.5e12, 60e12),
    "H200": (989.4e12, 494.7e12, 66.9e12),
    "H100 NVL": (835.5e12, 417.5e12, 60e12),
    "H100 PCIe": (756e12, 378e12, 51.2e12),
    "H100": (989.4e12, 494.7e12, 66.9e12),
    "A100": (312e12, 156e12, 19.5e12),
    "L40S": (362e12, 183e12, 91.6e12),
    "L40": (181e12, 90.5e12, 90.5e12),
    "L4": (121e12, 60e12, 30.3e12),
    "A40": (149.7e12, 74.8e12, 37.4e12),
    "A10": (125e12, 62.5e12, 31.2e12),
}


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


def peak_of(gpu: str, precision: str) -> float | None:
    """FLOP/s of one device by its CUDA name and Lightning's name of a precision; None: not known.

    float32 counts as TF32 where torch may multiply so here.
    """
    known = next((p for name, p in PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)
    if known is None:
        return None
    bfloat16, tf32, float32 = known
    if precision != "32-true":
        return bfloat16
    return float32 if torch.get_float32_matmul_precision() == "highest" else tf32


def _peak(precision: str, devices: int) -> float | None:
    """FLOP/s of as many devices as this process's."""
    if not torch.cuda.is_available():
        return None
    one = peak_of(torch.cuda.get_device_name(), precision)
    return None if one is None else one * devices
