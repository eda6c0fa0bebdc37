"""``collider bench``: a filtered step against the dense one and against Hugging Face, side by side.

Real layer shapes, random weights, random tokens. Every round runs all three in turn, so that a
noisy machine is noisy for all; reported are medians over rounds of ratios taken within a round. A
step is forward plus backward, without the optimizer and without the reference model; selection is
part of it. With --alternatives also what users would take else: activation checkpointing, with and
without our filter, and dropping rows from the head alone. With --keep-memory no way pays for pages
that the process had given back, which on a CPU is a good part of Hugging Face's step.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import lightning_collider as lc
from lightning_collider.eval.memory import keep_freed_memory, peak_bytes
from lightning_collider.eval.output import check_output
from lightning_collider.eval.shapes import SHAPES, shape_of
from lightning_collider.eval.steps import Forward, Steps, selection_share
from lightning_collider.training.files import write_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIN_ROUNDS = 7
KEEP_MEMORY = "keep freed memory in the process, as a GPU's allocator does"
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
    parser.add_argument("--keep-memory", action="store_true", help=KEEP_MEMORY)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")


def main(args: argparse.Namespace) -> None:
    """Run the bench and print its table."""
    if args.json is not None:
        check_output(args.json)
    (result,) = bench(
        args.shape,
        args.layers,
        args.seq,
        args.batch,
        [args.keep],
        args.dtype,
        args.device,
        max(args.rounds, MIN_ROUNDS),
        args.alternatives,
        args.keep_memory,
    )
    print(table(result))
    if args.json is not None:
        write_json(args.json, result)


def bench(
    shape: str,
    layers: int | None,
    seq: int,
    batch: int,
    keeps: Sequence[float],
    dtype: str,
    device: str,
    rounds: int,
    alternatives: bool = False,
    keep_memory: bool = False,
) -> list[dict[str, Any]]:
    """Time Hugging Face, ours dense and ours filtered, and `alternatives` where they are wanted.

    Returns:
        For each kept fraction: medians in seconds, ratios with quartiles, FLOP floors, peak memory
        ratio, selection's share of the filtered step, and where it ran; the keys are those of
        ``collider bench --json``. The fractions share their rounds.

    Raises:
        ValueError: device "cuda" where there is none.
        OSError: `keep_memory` without glibc.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch finds no CUDA device: use --device cpu")
    if keep_memory:
        keep_freed_memory()
    torch.manual_seed(0)
    config = shape_of(shape, layers)
    first = Steps(config, batch, seq, keeps[0], DTYPES[dtype], torch.device(device))
    several = {keep: first.at(keep) for keep in keeps}
    ways = ways_of(several, alternatives)
    seen = run_rounds(first, ways, rounds)
    peaks = {key: peak_bytes(w, first.model) for key, w in ways.items() if key[0] != "dense"}
    ran = where()
    results = []
    for keep, steps in several.items():
        timed = at_fraction(seen, keep)
        results.append(
            {
                "shape": shape,
                "layers": config.num_hidden_layers,
                "seq": seq,
                "batch": batch,
                "keep": keep,
                "dtype": dtype,
                "device": device,
                "rounds": rounds,
                "memory": "kept" if keep_memory else "returned",
                **times(timed),
                **ratios(timed),
                "selection_share": selection_share(steps),
                "floor_backward": steps.flops.floor_backward,
                "floor_step": steps.flops.floor_step,
                **peak_ratios(at_fraction(peaks, keep)),
                **ran,
            }
        )
    return results


Way = tuple[str, float | None]  # a method of Steps, and the kept fraction where it matters
Found = TypeVar("Found")
Times = dict[str, list[tuple[float, float]]]  # seconds of forward and backward, one of each a round

# A method of Steps -> what it is compared with
ALTERNATIVES = {
    "head_only": "hf",
    "hf_checkpointed": "hf",
    "filtered_checkpointed": "hf_checkpointed",
}
ALL_TOKENS = ("hf", "hf_checkpointed", "dense")  # cost the same at every kept fraction


def ways_of(several: dict[float, Steps], alternatives: bool) -> dict[Way, Callable[[], Forward]]:
    """The ways to run a step that are timed."""
    methods = {"hf": "hugging_face", "dense": "dense", "filtered": "filtered"}
    if alternatives:
        methods |= {name: name for name in ALTERNATIVES}
    return {
        (name, None if name in ALL_TOKENS else keep): getattr(steps, method)
        for keep, steps in several.items()
        for name, method in methods.items()
    }


def at_fraction(found: dict[Way, Found], keep: float) -> dict[str, Found]:
    """What was found of the ways at one kept fraction, and of those that have none."""
    return {name: value for (name, at), value in found.items() if at in (None, keep)}


def run_rounds(
    steps: Steps, ways: dict[Way, Callable[[], Forward]], rounds: int
) -> dict[Way, list[tuple[float, float]]]:
    """Forward and backward seconds of each way, one of each a round, warm-up apart."""
    order = list(ways)
    seen: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way in order:
            seconds = steps.timed(ways[way])
            if i > 0:
                seen[way].append(seconds)
        order.append(order.pop(0))  # none always runs after the same other
    return seen


def times(seen: Times) -> dict[str, float]:
    """Median seconds."""
    return {
        f"{name}_{part}_s": statistics.median(pair[i] for pair in pairs)
        for name, pairs in seen.items()
        for i, part in enumerate(("forward", "backward"))
    }


def ratios(seen: Times) -> dict[str, Any]:
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


def peak_ratios(peaks: dict[str, int]) -> dict[str, float]:
    """Peak bytes over those of Hugging Face's step."""
    found = {f"{name}_peak_memory_ratio": peaks[name] for name in ALTERNATIVES if name in peaks}
    found["peak_memory_ratio"] = peaks["filtered"]
    return {name: peak / peaks["hf"] for name, peak in found.items()}


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
        f"{result['dtype']}, keep {result['keep']}, {result['device']}, {result['rounds']} rounds, "
        f"freed memory {result['memory']}"
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
