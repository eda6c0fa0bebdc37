"""The main job of a recipe, in stages: corpus, reference model, arms, their evaluation, the table.

A stage leaves its numbers in a JSON file in the run folder as its very last act. Where that file
is, the stage is done; so the same command on the same folder goes on where the last one stopped.

    RUN/recipe.yaml                  the resolved recipe this folder belongs to
    RUN/corpus/                      see corpus.py
    RUN/reference/                   checkpoints/, log/, metrics.jsonl, model/ and train.json;
                                     losses.npy where an arm reads stored losses
    RUN/arms/NAME/                   the same, eval.json, and what report/record.py writes
    RUN/results.json, results.md     the table, also printed
    RUN/report.html                  the same with pictures
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

import lightning_collider as lc
from lightning_collider.eval.harness import FILE_TASKS, TASKS, evaluate, load_tasks
from lightning_collider.filtering.reference import reference_losses
from lightning_collider.ops import build
from lightning_collider.report.record import (
    HeldOut,
    MixedText,
    StepMemory,
    TextSample,
    token_sizes,
)
from lightning_collider.report.write import write_report
from lightning_collider.training.callbacks import stopped_by_signal
from lightning_collider.training.config import ArmConfig, Recipe
from lightning_collider.training.corpus import Corpus, build_corpus, load_corpus
from lightning_collider.training.data import PackedRows
from lightning_collider.training.files import read_json, write_json, write_text
from lightning_collider.training.fit import Job, fit
from lightning_collider.training.folder import claimed
from lightning_collider.training.results import collect, to_markdown
from lightning_collider.training.sources import SOURCES


def run_recipe(recipe: Recipe) -> dict[str, Any]:
    """Do what is left to do of a recipe in its folder, print the table, return the results.

    Raises FileExistsError for a folder that is not this recipe's, RuntimeError for one in use,
    ValueError for a task that there is not, Stopped after a signal.
    """
    with claimed(recipe) as folder, stopped_by_signal():
        finished = (folder / "results.json").is_file()
        if not finished:
            _do_stages(recipe, folder)
        results = read_json(folder / "results.json")
        print("\n" + to_markdown(results))
        if finished:
            print(
                f"{folder} was finished before. To make another run, choose its folder: out=OTHER"
            )
        print(f"Table and numbers: {folder / 'results.md'}, {folder / 'results.json'}")
        print(f"Report: {write_report([folder])}")
    return results


def _do_stages(recipe: Recipe, folder: Path) -> None:
    _check_tasks(recipe.eval.tasks)
    if recipe.train.engine == "cpp":
        print("== C++ operators: compiled on first use, which takes a minute or two", flush=True)
        build()
    corpus_folder = folder / "corpus"
    _stage("corpus", corpus_folder / "manifest.json", lambda: build_corpus(recipe, corpus_folder))
    corpus = load_corpus(corpus_folder)
    reference = folder / "reference"
    if any(arm.selector == "excess_loss" for arm in recipe.arms.values()):
        _stage(
            "reference", reference / "train.json", lambda: _fit_reference(recipe, corpus, reference)
        )
    if any(arm.stored_losses for arm in recipe.arms.values()):
        losses = reference / "losses.npy"
        _stage("store losses", losses, lambda: _store_losses(recipe, corpus, reference))
    for name, arm in recipe.arms.items():
        here = folder / "arms" / name

        def train(arm: ArmConfig = arm, here: Path = here) -> None:
            _fit_arm(recipe, arm, corpus, here, reference)

        def score(here: Path = here) -> None:
            _evaluate(recipe, corpus, here)

        _stage(f"train {name}", here / "train.json", train)
        _stage(f"evaluate {name}", here / "eval.json", score)
    results = collect(recipe, folder, corpus.manifest)
    write_text(folder / "results.md", to_markdown(results))
    write_json(folder / "results.json", results)


def _check_tasks(tasks: list[str]) -> None:
    """Raise ValueError for tasks that a run cannot be scored by, ConnectionError without data."""
    with_files = sorted(set(tasks) & set(FILE_TASKS))
    if with_files:
        raise ValueError(
            f"eval.tasks: {', '.join(with_files)} need files that a run does not have; train "
            "without them, and score the run by `collider eval` then"
        )
    theirs = sorted(set(tasks) - set(TASKS))
    if theirs:  # only lm-eval knows them, and looks for a while
        try:
            load_tasks(theirs, {})
        except ValueError as error:
            raise ValueError(f"eval.tasks: {error}") from error


def _stage(name: str, marker: Path, work: Callable[[], None]) -> None:
    """Do a stage unless its marker is there, and say so."""
    if marker.is_file():
        print(f"== {name}: done before", flush=True)
        return
    print(f"== {name}", flush=True)
    start = time.perf_counter()
    work()
    assert marker.is_file(), f"stage {name} left no {marker}"
    print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)


def _fit_reference(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    """The reference model: same shape and initial weights, trained on clean text only."""
    strategy = lc.ColliderStrategy(engine=recipe.train.engine)
    job = Job(folder, PackedRows(corpus.reference), recipe.reference.steps, strategy)
    write_json(folder / "train.json", fit(recipe, job, corpus.tokenizer))


def _store_losses(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    """The reference's losses of all training tokens, and how long they took."""
    start = time.perf_counter()
    losses = reference_losses(folder / "model", corpus.train, recipe.train.batch_size)
    write_json(folder / "losses.json", {"seconds": time.perf_counter() - start})
    draft = folder / "losses.part.npy"
    np.save(draft, losses.numpy().astype(np.float16))
    draft.replace(folder / "losses.npy")


def strategy_of(recipe: Recipe, arm: ArmConfig, reference: Path) -> lc.ColliderStrategy:
    """The strategy that an arm's keys describe; `reference` is the reference model's run folder."""
    if arm.selector == "none":
        return lc.ColliderStrategy(engine=recipe.train.engine)
    live = arm.selector == "excess_loss" and not arm.stored_losses
    return lc.ColliderStrategy(
        keep=arm.keep,
        selector=arm.selector,
        reference=reference / "model" if live else None,
        engine=recipe.train.engine,
        over=arm.over,
        keep_warmup_steps=arm.keep_warmup_steps,
        seed=recipe.seed,
    )


def _fit_arm(recipe: Recipe, arm: ArmConfig, corpus: Corpus, folder: Path, reference: Path) -> None:
    stored = heldout = None
    if arm.stored_losses:
        stored = np.load(reference / "losses.npy", mmap_mode="r")
        size = recipe.train.batch_size
        heldout = reference_losses(reference / "model", corpus.heldout, size)
    data = PackedRows(corpus.train, stored)
    records = _records(recipe, corpus, folder, data, heldout)
    strategy = strategy_of(recipe, arm, reference)
    job = Job(folder, data, recipe.train.steps, strategy, records)
    write_json(folder / "train.json", fit(recipe, job, corpus.tokenizer))


def _records(
    recipe: Recipe, corpus: Corpus, folder: Path, data: PackedRows, heldout: Tensor | None
) -> tuple[L.Callback, ...]:
    """What an arm records for the report; `heldout` are stored reference losses, where needed."""
    size = recipe.train.batch_size
    batch = default_collate([data[row] for row in range(size)])
    sources = np.array(SOURCES)[corpus.sources[:size]]
    text = MixedText(corpus.heldout, corpus.heldout_sources, SOURCES, token_sizes(corpus.tokenizer))
    return (
        TextSample(folder / "sample.json", batch, corpus.tokenizer, sources),
        HeldOut(folder / "heldout.jsonl", text, size, recipe.eval.heldout_points, heldout),
        StepMemory(folder / "memory.json", batch),
    )


def _evaluate(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    scores = evaluate(
        folder / "model",
        recipe.eval.tasks,
        corpus_dir=corpus.folder,
        batch_size=recipe.eval.batch_size,
    )
    write_json(folder / "eval.json", scores)
