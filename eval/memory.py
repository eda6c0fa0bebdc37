"""Memory of a step: its peak beyond weights and their gradients, and what is freed and used again.

The peak is from torch's profiler on the CPU, from the allocator's own counter on CUDA.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from lightning_collider.ops import release_gradient_memory


def peak_bytes(step: Callable[[], Callable[[], Tensor]], model: nn.Module) -> int:
    """Largest number of bytes allocated between the start of forward and the end of backward.

    Gradients are allocated before, so that what is counted are activations and temporaries. Memory
    that an earlier step left for gradients is given back first: what this one takes counts.

    Args:
        step: gives the forward, which gives the loss.
        model: whose parameters the step trains.
    """
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    release_gradient_memory()
    forward = step()
    on_cuda = next(model.parameters()).is_cuda
    peak = cuda_peak(forward) if on_cuda else profiled_peak(forward)
    model.zero_grad(set_to_none=True)
    return peak


def keep_freed_memory() -> None:
    """Let this process keep what it frees, as a GPU's allocator does.

    glibc gives large blocks back to the system, and each page of the next one costs a fault: up to
    a tenth of a backward, in some steps and not in others (eval/RESULTS.md).

    Raises:
        OSError: the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError) as error:
        raise OSError("only glibc can be told to keep freed memory") from error
    trim_threshold, mmap_max = -1, -4  # glibc's malloc.h
    mallopt(trim_threshold, -1)  # never
    mallopt(mmap_max, 0)


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
