"""Peak memory of steps without their times, for shapes that ``collider bench`` takes long over.

python -m lightning_collider.eval.memory_grid --shape qwen2.5 --layers 4 8 [--seq T] [--keep F]
"""

import argparse

import torch

from lightning_collider.eval.memory import peak_bytes
from lightning_collider.eval.shapes import SHAPES, shape_of
from lightning_collider.eval.steps import Steps


def main() -> None:
    """Peaks of Hugging Face's step and of ours, dense and filtered, in bfloat16 on the CPU."""
    parser = argparse.ArgumentParser(description="Peak memory of a step, without its time")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--seq", type=int, default=2048, help="tokens of the one sequence")
    parser.add_argument("--keep", type=float, default=0.6, help="fraction of tokens kept")
    given = parser.parse_args()
    print(f"{'':24s}{'hf MiB':>10s}{'dense / hf':>12s}{'filtered / hf':>15s}")
    for layers in given.layers:
        config = shape_of(given.shape, layers)
        steps = Steps(config, 1, given.seq, given.keep, torch.bfloat16, torch.device("cpu"))
        ways = (steps.hugging_face, steps.dense, steps.filtered)
        hf, dense, filtered = (peak_bytes(way, steps.model) for way in ways)
        title = f"{given.shape}, {layers} x {given.seq}"
        print(f"{title:24s}{hf / 2**20:10.0f}{dense / hf:12.3f}{filtered / hf:15.3f}", flush=True)


if __name__ == "__main__":
    main()
