"""Time of a step on bags over that of an ordinary step of as many positions.

    python -m lightning_collider.eval.superposition_speed tst-tiny [key=value ...]

takes model, sequence length and micro-batch from a recipe. A step is forward plus backward. Every
round runs one of each kind in turn, so that a busy machine is busy for all; reported are medians
and quartiles of ratios within a round.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import lightning_collider as lc
from lightning_collider.superposition import BagSettings, superposed_loss
from lightning_collider.training.config import load_training
from lightning_collider.training.models import build_model

BAG_SIZES = (2, 4, 6, 8)


def step(model: Any, ids: Tensor, bag_size: int | None) -> float:
    """Seconds of one step on tokens (B, T), or (B, s T) in bags of s."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    if bag_size is None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    else:
        loss = superposed_loss(model, ids, ids, BagSettings(bag_size)).loss
    loss.backward()
    return time.perf_counter() - start


def ratios(model: Any, batch: int, length: int, rounds: int) -> dict[int, list[float]]:
    """For each s, step on bags over ordinary step of every round; a first round warms up."""
    vocabulary = model.config.vocab_size
    ids = {s: torch.randint(0, vocabulary, (batch, s * length)) for s in (1, *BAG_SIZES)}
    found: dict[int, list[float]] = {s: [] for s in BAG_SIZES}
    order = [None, *BAG_SIZES]
    for number in range(rounds + 1):
        seconds = {s: step(model, ids[s or 1], s) for s in order}
        order.append(order.pop(0))  # no kind always runs after the same other
        for s in BAG_SIZES if number else ():
            found[s].append(seconds[s] / seconds[None])
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Time of a step on bags over an ordinary one")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--convert", action="store_true", help="the model as the recipe trains it")
    given = parser.parse_intermixed_args(arguments)
    recipe = load_training(given.recipe, given.overrides)
    model: Any = build_model(recipe).train()
    if given.convert:
        model = lc.convert(model, engine=recipe.trainer.engine)
    size = recipe.trainer.micro_batch_size, recipe.data.sequence_length
    print("| s | step on bags / ordinary step, median (quartiles) |\n| --- | --- |")
    for s, values in ratios(model, *size, given.rounds).items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"| {s} | {middle:.3f} ({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    main()
