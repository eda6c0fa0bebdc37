"""Peak memory of a step beyond weights and their gradients, from torch's profiler."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


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
    activities = [ProfilerActivity.CPU]
    if next(model.parameters()).is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as prof:
        forward().backward()
    model.zero_grad(set_to_none=True)
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
