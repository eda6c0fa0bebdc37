"""``collider bench``: a filtered step against the dense one and against Hugging Face, side by side.

Real layer shapes, random weights, random tokens. Every round runs all three in turn, so that a
noisy machine is noisy for all; reported are medians over rounds of ratios taken within a round. A
step is forward plus backward, without the optimizer and without the reference model; selection is
part of it. With --alternatives also what users would take else: activation checkpointing, with and
without our filter, and dropping rows from the head alone.
"""

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lightning_collider as lc
from lightning_collider.eval.memory import peak_bytes
from lightning_collider.eval.output import check_output
from lightning_collider.eval.shapes import SHAPES
from lightning_collider.eval.steps import Forward, Steps, selection_share
from lightning_collider.training.files import write_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIN_ROUNDS = 7
WIDTH = 44  # of the names in the table


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
    parser.add_argument(
        "--alternatives", action="store_true", help="time what users would take else, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")


def main(args: argparse.Namespace) -> None:
    """Run the bench and print its table."""
    if args.json is not None:
        check_output(args.json)
    result = bench(
        args.shape,
        args.layers,
        args.seq,
        args.batch,
        args.keep,
        args.dtype,
        args.device,
        max(args.rounds, MIN_ROUNDS),
        args.alternatives,
    )
    print(table(result))
    if args.json is not None:
        write_json(args.json, result)


def bench(
    shape: str,
    layers: int | None,
    seq: int,
    batch: int,
    keep: float,
    dtype: str,
    device: str,
    rounds: int,
    alternatives: bool = False,
) -> dict[str, Any]:
    """Time Hugging Face, ours dense and ours filtered, and `alternatives` where they are wanted.

    Returns:
        Medians in seconds, ratios with quartiles, FLOP floors, peak memory ratio, selection's share
        of the filtered step, and where it ran; the keys are those of ``collider bench --json``.

    Raises:
        ValueError: device "cuda" where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch finds no CUDA device: use --device cpu")
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    steps = Steps(config, batch, seq, keep, DTYPES[dtype], torch.device(device))
    kinds = kinds_of(steps, alternatives)
    seen = run_rounds(steps, kinds, rounds)
    hugging_face = peak_bytes(steps.hugging_face, steps.model)
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
        "selection_share": selection_share(steps, rounds),
        "floor_backward": steps.flops.floor_backward,
        "floor_step": steps.flops.floor_step,
        **{
            f"{name}_peak_memory_ratio": peak_bytes(kinds[name], steps.model) / hugging_face
            for name in kinds
            if name in ALTERNATIVES
        },
        "peak_memory_ratio": peak_bytes(steps.filtered, steps.model) / hugging_face,
        **where(),
    }


Seen = dict[str, list[tuple[float, float]]]


# A method of Steps -> what it is compared with
ALTERNATIVES = {
    "head_only": "hf",
    "hf_checkpointed": "hf",
    "filtered_checkpointed": "hf_checkpointed",
}


def kinds_of(steps: Steps, alternatives: bool) -> dict[str, Callable[[], Forward]]:
    """The ways to run a step that are timed."""
    kinds = {"hf": steps.hugging_face, "dense": steps.dense, "filtered": steps.filtered}
    if alternatives:
        kinds |= {name: getattr(steps, name) for name in ALTERNATIVES}
    return kinds


def run_rounds(steps: Steps, kinds: dict[str, Callable[[], Forward]], rounds: int) -> Seen:
    """Forward and backward seconds of each kind of step, one of each a round, warm-up apart."""
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

    found: dict[str, Any] = {}
    for name, base in ALTERNATIVES.items():
        if name in seen:
            found |= ratio(f"{name}_backward_vs_{base}", name, base, step=False)
            found |= ratio(f"{name}_step_vs_{base}", name, base, step=True)
    return {
        **found,
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
    rows = [title, f"{'':{WIDTH}s}{'forward s':>11s}{'backward s':>12s}"]
    for name in ("hf", "dense", "filtered", *ALTERNATIVES):
        if f"{name}_forward_s" in result:
            forward, backward = result[f"{name}_forward_s"], result[f"{name}_backward_s"]
            rows.append(f"{name:{WIDTH}s}{forward:11.4f}{backward:12.4f}")
    rows.append(f"{'':{WIDTH}s}{'median':>11s}{'quartiles':>18s}{'floor':>9s}")
    floors = {"backward_vs_dense": "floor_backward", "step_vs_dense": "floor_step"}
    for name in [key.removesuffix("_iqr") for key in result if key.endswith("_iqr")]:
        low, high = result[f"{name}_iqr"]
        floor = f"{result[floors[name]]:9.3f}" if name in floors else ""
        rows.append(f"{name:{WIDTH}s}{result[name]:11.3f}{f'{low:.3f} .. {high:.3f}':>18s}{floor}")
    for name in [key for key in result if key.endswith("peak_memory_ratio")]:
        rows.append(f"{name:{WIDTH}s}{result[name]:11.3f}")
    rows.append(f"{'selection_share':{WIDTH}s}{result['selection_share']:11.4f}")
    return "\n".join(rows)
