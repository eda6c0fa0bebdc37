"""The main job of a recipe, in stages: corpus, reference model, arms, their evaluation, the table.

A stage leaves its numbers in a JSON file in the run folder as its very last act. Where that file
is, the stage is done; so the same command on the same folder goes on where the last one stopped.

    RUN/recipe.yaml                  the resolved recipe this folder belongs to
    RUN/corpus/                      see corpus.py
    RUN/reference/                   checkpoints/, log/, model/ and train.json
    RUN/arms/NAME/                   the same, and eval.json
    RUN/results.json, results.md     the table, also printed
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_collider as lc
from lightning_collider.ops import build
from lightning_collider.training.config import ArmConfig, Recipe
from lightning_collider.training.corpus import Corpus, build_corpus, load_corpus
from lightning_collider.training.files import read_json, write_json, write_text
from lightning_collider.training.fit import Job, fit
from lightning_collider.training.folder import claimed
from lightning_collider.training.results import collect, to_markdown


def run_recipe(recipe: Recipe) -> dict[str, Any]:
    """Do what is left to do of a recipe in its folder, print the table, return the results.

    Raises FileExistsError for a folder that is not this recipe's, RuntimeError for one in use.
    """
    with claimed(recipe) as folder:
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
    return results


def _do_stages(recipe: Recipe, folder: Path) -> None:
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
    for name, arm in recipe.arms.items():
        here = folder / "arms" / name

        def train(arm: ArmConfig = arm, here: Path = here) -> None:
            _fit_arm(recipe, arm, corpus, here, reference / "model")

        def score(here: Path = here) -> None:
            _evaluate(recipe, corpus, here)

        _stage(f"train {name}", here / "train.json", train)
        _stage(f"evaluate {name}", here / "eval.json", score)
    results = collect(recipe, folder, corpus.manifest)
    write_text(folder / "results.md", to_markdown(results))
    write_json(folder / "results.json", results)


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
    """The reference model: same shape and initial weights, trained on clean target text only."""
    strategy = lc.ColliderStrategy(engine=recipe.train.engine)
    job = Job(folder, corpus.reference, recipe.reference.steps, strategy)
    write_json(folder / "train.json", fit(recipe, job, corpus.tokenizer))


def _fit_arm(
    recipe: Recipe, arm: ArmConfig, corpus: Corpus, folder: Path, reference_model: Path
) -> None:
    if arm.selector == "none":
        strategy = lc.ColliderStrategy(engine=recipe.train.engine)
    else:
        strategy = lc.ColliderStrategy(
            keep=arm.keep,
            selector=arm.selector,
            reference=reference_model if arm.selector == "excess_loss" else None,
            engine=recipe.train.engine,
            over=arm.over,
            keep_warmup_steps=arm.keep_warmup_steps,
            seed=recipe.seed,
        )
    job = Job(folder, corpus.train, recipe.train.steps, strategy)
    write_json(folder / "train.json", fit(recipe, job, corpus.tokenizer))


def _evaluate(recipe: Recipe, corpus: Corpus, folder: Path) -> None:
    # imported here: lm-eval takes seconds to load, and only this stage needs it
    from lightning_collider.eval.harness import evaluate

    scores = evaluate(
        folder / "model",
        recipe.eval.tasks,
        corpus_dir=corpus.folder,
        batch_size=recipe.eval.batch_size,
    )
    write_json(folder / "eval.json", scores)
