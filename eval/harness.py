"""Scores of a checkpoint on the local lm-eval tasks, through lm-eval's Python interface."""

import contextlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS_FOLDER = Path(__file__).parent / "tasks"
BOOTSTRAPS = 100  # resamplings for standard errors that have no formula
TASKS = tuple(sorted(path.stem for path in TASKS_FOLDER.glob("*.yaml")))


def evaluate(
    checkpoint_dir: str | Path,
    tasks: list[str] | tuple[str, ...] = TASKS,
    *,
    corpus_dir: str | Path | None = None,
    batch_size: int = 16,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Score a Hugging Face folder: task -> {"metric", "value", "stderr" (None: unknown), "items"}.

    `corpus_dir` is the corpus folder whose held-out problems are asked; by default it is that of
    the run the checkpoint lies in. `limit` scores only the first items of each task.
    Raises FileNotFoundError without a checkpoint or a corpus, ValueError for an unknown task.
    """
    checkpoint_dir = Path(checkpoint_dir)
    if not (checkpoint_dir / "config.json").is_file():
        raise FileNotFoundError(
            f"{checkpoint_dir} is no Hugging Face checkpoint (no config.json in it); "
            "give the model/ folder of an arm, for example runs/quickstart/arms/filtered/model"
        )
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown or not tasks:
        raise ValueError(f"unknown tasks {unknown}; there are: {', '.join(TASKS)}")
    corpus = find_corpus(checkpoint_dir) if corpus_dir is None else Path(corpus_dir)
    return _score(checkpoint_dir, list(tasks), corpus, batch_size, limit)


def find_corpus(checkpoint_dir: Path) -> Path:
    """The corpus folder of the run that a checkpoint lies in."""
    for parent in checkpoint_dir.resolve().parents:
        if (parent / "corpus" / "heldout.jsonl").is_file():
            return parent / "corpus"
    raise FileNotFoundError(
        f"no corpus/heldout.jsonl above {checkpoint_dir}: name the problems with --corpus DIR"
    )


def _score(
    checkpoint: Path, tasks: list[str], corpus: Path, batch_size: int, limit: int | None
) -> dict[str, dict[str, Any]]:
    # Everything is local. The libraries below read these when they are imported.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = HFLM(
        network.to(device).eval(),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        batch_size=batch_size,
        device=device,
        add_bos_token=False,  # lm-eval puts the prefix token in front itself
    )
    manager = TaskManager(
        include_path=str(TASKS_FOLDER),
        include_defaults=False,  # else it reads 15,000 files
        metadata={"corpus_dir": corpus},
    )
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for each batch
        report = lm_eval.evaluate(
            lm=model,
            task_dict=manager.load(tasks),
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    assert report is not None, "lm-eval returns nothing only on ranks other than 0"
    return {task: _main_metric(report, task) for task in tasks}


def _main_metric(report: Any, task: str) -> dict[str, Any]:
    """The one metric that the task's YAML lists, taken out of lm-eval's report."""
    numbers = report["results"][task]
    metric = report["configs"][task]["metric_list"][0]["metric"]
    error = numbers.get(f"{metric}_stderr,none")
    return {
        "metric": metric,
        "value": numbers[f"{metric},none"],
        "stderr": error if isinstance(error, float) else None,  # "N/A" where it has none
        "items": report["n-samples"][task]["effective"],
    }
