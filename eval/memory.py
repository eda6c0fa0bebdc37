"""Peak memory of a step beyond weights and their gradients.

From torch's profiler on the CPU, from the allocator's own counter on CUDA. ``collider bench``
reports it beside times; alone, for shapes whose times are long:

    python -m lightning_collider.eval.memory --shape qwen2.5 --layers 4 8 [--seq 2048] [--keep 0.6]
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from lightning_collider.eval.shapes import SHAPES
from lightning_collider.eval.steps import Steps


def peak_bytes(step: Callable[[], Callable[[], Tensor]], model: nn.Module) -> int:
    """Largest number of bytes allocated between the start of forward and the end of backward.

    Gradients are allocated before, so that what is counted are activations and temporaries.

    Args:
        step: gives the forward, which gives the loss.
        model: whose parameters the step trains.
    """
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    forward = step()
    on_cuda = next(model.parameters()).is_cuda
    peak = cuda_peak(forward) if on_cuda else profiled_peak(forward)
    model.zero_grad(set_to_none=True)
    return peak


def cuda_peak(forward: Callable[[], Tensor]) -> int:
    """What the allocator handed out at most, beyond what it had handed out before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def profiled_peak(forward: Callable[[], Tensor]) -> int:
    """Highest sum of the CPU's allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        forward().backward()
    return largest_sum(allocations(prof))


def allocations(prof: Any) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in the order of time."""
    tree = prof.profiler.kineto_results.experimental_event_tree()
    events = [e for e in walk(tree) if e.typed[0] == _EventType.Allocation]
    events.sort(key=lambda e: e.start_time_ns)
    return [e.typed[1].alloc_size for e in events]


def walk(events: list[Any]) -> Iterator[Any]:
    """All events of a profiler's tree."""
    todo = list(events)
    while todo:
        event = todo.pop()
        yield event
        todo.extend(event.children)


def largest_sum(changes: list[int]) -> int:
    """Highest value of the running sum."""
    now = highest = 0
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest


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
        config = copy.deepcopy(SHAPES[given.shape])
        config.num_hidden_layers = layers
        steps = Steps(config, 1, given.seq, given.keep, torch.bfloat16, torch.device("cpu"))
        ways = (steps.hugging_face, steps.dense, steps.filtered)
        hf, dense, filtered = (peak_bytes(way, steps.model) for way in ways)
        title = f"{given.shape}, {layers} x {given.seq}"
        print(f"{title:24s}{hf / 2**20:10.0f}{dense / hf:12.3f}{filtered / hf:15.3f}", flush=True)


if __name__ == "__main__":
    main()
