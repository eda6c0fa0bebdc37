"""``collider bench``: a filtered step against the dense one and against Hugging Face, side by side.

Real layer shapes, random weights, random tokens. Every round runs all three in turn, so that a
noisy machine is noisy for all; reported are medians over rounds of ratios taken within a round. A
step is forward plus backward, without the optimizer and without the reference model; selection is
part of it.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import lightning_collider as lc
from lightning_collider.eval.flops import StepFlops, step_flops
from lightning_collider.eval.memory import peak_bytes
from lightning_collider.eval.shapes import SHAPES
from lightning_collider.filtering.token_filter import TokenFilter

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIN_ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``collider bench``."""
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="default: all of the model's")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--keep", type=float, default=0.6, help="fraction of tokens kept")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"at least {MIN_ROUNDS}")
    parser.add_argument("--json", type=Path, help="write the result here too")


def main(args: argparse.Namespace) -> None:
    """Run the bench and print its table."""
    result = bench(
        args.shape,
        args.layers,
        args.seq,
        args.batch,
        args.keep,
        args.dtype,
        args.device,
        max(args.rounds, MIN_ROUNDS),
    )
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def bench(
    shape: str,
    layers: int | None,
    seq: int,
    batch: int,
    keep: float,
    dtype: str,
    device: str,
    rounds: int,
) -> dict[str, Any]:
    """Time Hugging Face, ours dense and ours filtered.

    Returns:
        Medians in seconds, ratios with quartiles, FLOP floors, peak memory ratio, and where it
        ran; the keys are those of ``collider bench --json``.

    Raises:
        ValueError: device "cuda" where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch finds no CUDA device: use --device cpu")
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    steps = Steps(config, batch, seq, keep, DTYPES[dtype], torch.device(device))
    seen = run_rounds(steps, rounds)
    return {
        "shape": shape,
        "layers": config.num_hidden_layers,
        "seq": seq,
        "batch": batch,
        "keep": keep,
        "dtype": dtype,
        "device": device,
        "rounds": rounds,
        **times(seen),
        **ratios(seen),
        "floor_backward": steps.flops.floor_backward,
        "floor_step": steps.flops.floor_step,
        "peak_memory_ratio": peak_bytes(steps.filtered, steps.model)
        / peak_bytes(steps.hugging_face, steps.model),
        **where(),
    }


class Steps:
    """One batch and three ways to run a step on it, on the same weights."""

    def __init__(
        self,
        config: PretrainedConfig,
        batch: int,
        seq: int,
        keep: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config._attn_implementation = "sdpa"
        self.device = device
        with device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            self.ids = torch.randint(0, config.vocab_size, (batch, seq))
            self.reference_losses = 20 * torch.rand(batch, seq)  # so that the mask is random
        self.labels = self.ids.clone()
        ours = share_parameters(copy.deepcopy(self.model), self.model)
        self.ours: Any = lc.convert(ours)
        self.token_filter = TokenFilter("excess_loss", keep)
        self.mask = self._mask()
        self.kept_labels = labels_of_kept(self.labels, self.mask)
        linears = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        self.flops: StepFlops = step_flops(
            sum(m.weight.numel() for m in linears),
            attention_width(config),
            config.num_hidden_layers,
            self.mask,
        )

    def _mask(self) -> Tensor:
        self.ours.token_filter = self.token_filter
        out = self.ours(
            input_ids=self.ids, labels=self.labels, reference_losses=self.reference_losses
        )
        return out.keep

    def hugging_face(self) -> Callable[[], Tensor]:
        """Hugging Face's forward, with dropped labels at -100."""
        return lambda: self.model(self.ids, labels=self.kept_labels, use_cache=False).loss

    def dense(self) -> Callable[[], Tensor]:
        """Ours without a mask."""
        self.ours.token_filter = None
        return lambda: self.ours(self.ids, labels=self.labels).loss

    def filtered(self) -> Callable[[], Tensor]:
        """Ours, selecting by excess loss over stored reference losses."""
        self.ours.token_filter = self.token_filter
        return lambda: (
            self.ours(self.ids, labels=self.labels, reference_losses=self.reference_losses).loss
        )

    def timed(self, step: Callable[[], Callable[[], Tensor]]) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        forward = step()
        self.model.zero_grad(set_to_none=True)
        start = self._now()
        loss = forward()
        middle = self._now()
        loss.backward()
        return middle - start, self._now() - middle

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def share_parameters(model: nn.Module, source: nn.Module) -> nn.Module:
    """Give a copy the parameter objects of its source: one set of weights and of gradients."""
    for name, module in model.named_modules():
        module._parameters = source.get_submodule(name)._parameters
    return model


def labels_of_kept(labels: Tensor, keep: Tensor) -> Tensor:
    """Hugging Face labels whose loss is that of the kept rows: label t + 1 belongs to row t."""
    kept = labels.clone()
    kept[:, 1:][~keep[:, :-1]] = -100
    return kept


def attention_width(config: PretrainedConfig) -> int:
    """Query heads times head size."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head_dim


Seen = dict[str, list[tuple[float, float]]]


def run_rounds(steps: Steps, rounds: int) -> Seen:
    """Forward and backward seconds of each kind of step, one of each a round, warm-up apart."""
    kinds = {"hf": steps.hugging_face, "dense": steps.dense, "filtered": steps.filtered}
    order = list(kinds)
    seen: Seen = {name: [] for name in kinds}
    for i in range(rounds + 1):
        for name in order:
            seconds = steps.timed(kinds[name])
            if i > 0:
                seen[name].append(seconds)
        order.append(order.pop(0))  # no kind always runs after the same other
    return seen


def times(seen: Seen) -> dict[str, float]:
    """Median seconds."""
    return {
        f"{name}_{part}_s": statistics.median(pair[i] for pair in pairs)
        for name, pairs in seen.items()
        for i, part in enumerate(("forward", "backward"))
    }


def ratios(seen: Seen) -> dict[str, Any]:
    """Medians and quartiles of ratios within a round."""

    def ratio(name: str, above: str, below: str, step: bool) -> dict[str, Any]:
        def seconds(pair: tuple[float, float]) -> float:
            return sum(pair) if step else pair[1]

        both = zip(seen[above], seen[below], strict=True)
        values = [seconds(a) / seconds(b) for a, b in both]
        low, middle, high = statistics.quantiles(values, n=4)
        return {name: middle, f"{name}_iqr": [low, high]}

    return {
        **ratio("backward_vs_hf", "filtered", "hf", step=False),
        **ratio("step_vs_hf", "filtered", "hf", step=True),
        **ratio("backward_vs_dense", "filtered", "dense", step=False),
        **ratio("step_vs_dense", "filtered", "dense", step=True),
        **ratio("dense_vs_hf", "dense", "hf", step=True),
    }


def where() -> dict[str, Any]:
    """Load, versions and machine of a measurement."""
    import lightning
    import transformers

    versions = {m.__name__: m.__version__ for m in (torch, lightning, transformers, lc)}
    return {
        "load_average": list(os.getloadavg()),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def processor_name() -> str:
    """The processor's model name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(result: dict[str, Any]) -> str:
    """The bench as text."""
    title = (
        f"{result['shape']}, {result['layers']} layers, B={result['batch']}, T={result['seq']}, "
        f"{result['dtype']}, keep {result['keep']}, {result['device']}, {result['rounds']} rounds"
    )
    rows = [title, f"{'':18s}{'forward s':>11s}{'backward s':>12s}"]
    for name in ("hf", "dense", "filtered"):
        forward, backward = result[f"{name}_forward_s"], result[f"{name}_backward_s"]
        rows.append(f"{name:18s}{forward:11.4f}{backward:12.4f}")
    rows.append(f"{'':18s}{'median':>11s}{'quartiles':>18s}{'floor':>9s}")
    floors = {"backward_vs_dense": "floor_backward", "step_vs_dense": "floor_step"}
    names = ("backward_vs_hf", "step_vs_hf", "backward_vs_dense", "step_vs_dense", "dense_vs_hf")
    for name in names:
        low, high = result[f"{name}_iqr"]
        floor = f"{result[floors[name]]:9.3f}" if name in floors else ""
        rows.append(f"{name:18s}{result[name]:11.3f}{f'{low:.3f} .. {high:.3f}':>18s}{floor}")
    rows.append(f"{'peak_memory_ratio':18s}{result['peak_memory_ratio']:11.3f}")
    return "\n".join(rows)
