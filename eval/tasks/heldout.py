"""Documents of the local lm-eval tasks: held out of a run's corpus, or generated without one.

lm-eval calls these functions, named in the YAML files beside this one, with the metadata that the
harness gives to its TaskManager: `corpus_dir`, a run's corpus folder or None.
"""

import itertools
import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from lightning_collider.training.corpus import (
    heldout_documents,
    load_heldout,
    load_heldout_documents,
)
from lightning_collider.training.sources import Problem, generate_problems

CHOICES = 4
SEED = 2_000_000  # of the items for a model without a corpus: no recipe of ours uses it
PROBLEMS = 500  # for such a model
CONTEXT_LINES = 12  # of code before the line that is asked for
QUESTIONS_A_DOCUMENT = 5  # about a document of code


def texts(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Each held-out problem with its answer as one `text`, for bits per byte."""
    return _of([{"text": problem.text} for problem in _problems(corpus_dir)])


def general_texts(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Held-out general documents as `text`."""
    return _of([{"text": text} for text in _documents(corpus_dir, "general")])


def noise_texts(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Held-out noise as `text`."""
    return _of([{"text": text} for text in _documents(corpus_dir, "noise")])


def questions(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Each held-out problem with four answers: `prompt`, `choices` and `label` (0 to 3).

    A choice ends with its newline: without, 12 would be credited with all that 120 is worth.
    """
    documents = []
    for number, problem in enumerate(_problems(corpus_dir)):
        choices, label = near_answers(problem.answer, random.Random(number))
        lines = [f"{choice}\n" for choice in choices]
        documents.append({"prompt": problem.prompt, "choices": lines, "label": label})
    return _of(documents)


def answers(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Each held-out problem as `prompt`, with its `answer` as the model should go on.

    Compared without the blank before it.
    """
    return _of([{"prompt": p.prompt, "answer": str(p.answer)} for p in _problems(corpus_dir)])


def next_lines(corpus_dir: Path | None, **_: Any) -> dict[str, Dataset]:
    """Lines of code and four that may follow, all of the same document: as `questions`."""
    documents = []
    for number, text in enumerate(_documents(corpus_dir, "general")):
        documents += line_questions(text, random.Random(number))
    return _of(documents)


def near_answers(answer: int, rng: random.Random) -> tuple[list[str], int]:
    """The answer among CHOICES distinct whole numbers near it, and its place among them.

    The others lie within a third of the answer, at least 3, and none is negative.
    """
    span = max(3, answer // 3)
    near = [n for n in range(max(0, answer - span), answer + span + 1) if n != answer]
    numbers = [answer, *rng.sample(near, CHOICES - 1)]
    rng.shuffle(numbers)
    return [str(n) for n in numbers], numbers.index(answer)


def line_questions(text: str, rng: random.Random) -> list[dict[str, Any]]:
    """Up to QUESTIONS_A_DOCUMENT questions about a text; [] where too few of its lines differ.

    The wrong choices are other lines of the text, which stand neither in the context nor in two
    places; so that only what a line says tells them apart, not where it comes from.
    """
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if i >= 3 and len(line.strip()) >= 8]
    asked = []
    for place in sorted(rng.sample(places, min(QUESTIONS_A_DOCUMENT, len(places)))):
        context = lines[max(0, place - CONTEXT_LINES) : place]
        others = {lines[i] for i in places} - {*context, lines[place]}
        if len(others) >= CHOICES - 1 and lines[place] not in context:
            choices = [lines[place], *rng.sample(sorted(others), CHOICES - 1)]
            rng.shuffle(choices)
            label = choices.index(lines[place])
            asked.append({"prompt": "".join(context), "choices": choices, "label": label})
    return asked


def _problems(corpus_dir: Path | None) -> list[Problem]:
    if corpus_dir is None:
        return list(itertools.islice(generate_problems(SEED), PROBLEMS))
    return load_heldout(corpus_dir)


def _documents(corpus_dir: Path | None, source: str) -> list[str]:
    if corpus_dir is None:
        return heldout_documents(SEED)[source]
    return load_heldout_documents(corpus_dir, source)


def _of(documents: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(documents)}
