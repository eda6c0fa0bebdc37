"""Documents of the two local lm-eval tasks, read from a run's corpus folder.

lm-eval calls these functions, named in the YAML files beside this one, with the metadata that the
harness gives to its TaskManager.
"""

import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from lightning_collider.training.corpus import load_heldout

CHOICES = 4


def texts(corpus_dir: Path, **_: Any) -> dict[str, Dataset]:
    """Each held-out problem with its answer as one `text`, for bits per byte."""
    return {"test": Dataset.from_list([{"text": p.text} for p in load_heldout(corpus_dir)])}


def questions(corpus_dir: Path, **_: Any) -> dict[str, Dataset]:
    """Each held-out problem with four answers: `prompt`, `choices` and `label` (0 to 3).

    A choice ends with its newline: without, 12 would be credited with all that 120 is worth.
    """
    documents = []
    for number, problem in enumerate(load_heldout(corpus_dir)):
        choices, label = near_answers(problem.answer, random.Random(number))
        lines = [f"{choice}\n" for choice in choices]
        documents.append({"prompt": problem.prompt, "choices": lines, "label": label})
    return {"test": Dataset.from_list(documents)}


def near_answers(answer: int, rng: random.Random) -> tuple[list[str], int]:
    """The answer among CHOICES distinct whole numbers near it, and its place among them.

    The others lie within a third of the answer, at least 3, and none is negative.
    """
    span = max(3, answer // 3)
    near = [n for n in range(max(0, answer - span), answer + span + 1) if n != answer]
    numbers = [answer, *rng.sample(near, CHOICES - 1)]
    rng.shuffle(numbers)
    return [str(n) for n in numbers], numbers.index(answer)
