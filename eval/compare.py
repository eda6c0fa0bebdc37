"""`collider eval`: scores of several checkpoints in one table, with standard errors."""

import argparse
import datetime
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_collider.eval.harness import SUITES, TASKS, evaluate, find_corpus
from lightning_collider.eval.output import check_output
from lightning_collider.training.files import sha256, write_json
from lightning_collider.training.markdown import markdown_table

PACKAGES = ("lightning-collider", "torch", "transformers", "lm-eval", "datasets")
ITEMS = ("heldout.jsonl", "heldout.json")  # files of a corpus folder that tasks of ours ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``collider eval``."""
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="+",
        metavar="CHECKPOINT",
        help="a Hugging Face folder, a checkpoint of a run, or a run folder",
    )
    parser.add_argument(
        "--suite", choices=sorted(SUITES), help="tasks of a kind (default: offline)"
    )
    parser.add_argument("--tasks", nargs="+", help="names of tasks, ours or lm-eval's")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="corpus with held-out text")
    parser.add_argument("--data", type=Path, metavar="DIR", help="files that tasks of ours read")
    parser.add_argument("--batch-size", type=int, help="texts at once (default: automatic)")
    parser.add_argument("--limit", type=int, help="only so many items of each task")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores there as well")


def main(args: argparse.Namespace) -> None:
    """Score every checkpoint and print the table."""
    if args.json is not None:
        check_output(args.json)
    if args.tasks and args.suite:
        raise ValueError("--suite names tasks, and so does --tasks: give one of them")
    tasks = args.tasks or SUITES[args.suite or "offline"]
    models = [model for path in args.checkpoints for model in models_of(path)]
    if args.corpus is None and not set(tasks).isdisjoint(TASKS):
        refuse_different_items(models)
    scores = {
        str(model): evaluate(
            model,
            tasks,
            corpus_dir=args.corpus,
            batch_size=args.batch_size,
            limit=args.limit,
            data_dir=args.data,
        )
        for model in models
    }
    print(to_markdown(scores))
    if args.json is not None:
        write_json(args.json, {"tasks": list(tasks), **where(), "checkpoints": scores})


def models_of(path: Path) -> list[Path]:
    """What a path means: itself, or the arms of a comparison's folder."""
    return sorted(arm.parent for arm in path.glob("arms/*/model")) or [path]


def refuse_different_items(models: list[Path]) -> None:
    """Raise ValueError unless all models lie beside corpora with the same held-out text, or none.

    Scores on different items, side by side, would be taken for a difference of the models.
    """
    corpora = {model: find_corpus(model) for model in models}
    items = {
        corpus: None if corpus is None else [sha256(corpus / name) for name in ITEMS]
        for corpus in corpora.values()
    }
    first = items[corpora[models[0]]]
    if any(found != first for found in items.values()):
        asked = (f"{model}: {corpus or 'generated items'}" for model, corpus in corpora.items())
        raise ValueError(
            "these models would be asked different items, so name a corpus for all with --corpus "
            f"({'; '.join(asked)})"
        )


def where() -> dict[str, Any]:
    """Date, versions and machine of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "machine": platform.platform(),
    }


def to_markdown(scores: dict[str, dict[str, Any]]) -> str:
    """Scores by checkpoint and task as a table, one row a task."""
    names = short_names(list(scores))
    tasks = next(iter(scores.values()))
    head = ["", *names]
    rows = [
        [f"{task}: {about['metric']}", *(_text(found[task]) for found in scores.values())]
        for task, about in tasks.items()
    ]
    return markdown_table([head, *rows])


def _text(score: dict[str, Any]) -> str:
    error = "" if score["stderr"] is None else f" ± {score['stderr']:.4f}"
    return f"{score['value']:.4f}{error} ({score['items']})"


def short_names(paths: list[str]) -> list[str]:
    """Paths without what all of them begin with, at least their last part."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return [str(Path(*part[shared:])) for part in parts]
