"""Scores of one model on lm-eval tasks, through lm-eval's Python interface.

Our own tasks (eval/tasks) need no network; other names are lm-eval's, with data from the hub.
"""

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_collider.training.export import find_checkpoint, load_checkpoint, tokenizer_of
from lightning_collider.training.quiet import logger_level

TASKS_FOLDER = Path(__file__).parent / "tasks"
BOOTSTRAPS = 100  # resamplings for standard errors that have no formula
TASKS = tuple(sorted(path.stem for path in TASKS_FOLDER.glob("*.yaml")))
FILE_TASKS = tuple(sorted(path.stem for path in TASKS_FOLDER.glob("files/*.yaml")))
# The general and the maths suite of the Collider and RHO-1 papers, by lm-eval's names.
SUITES = {
    "offline": TASKS,
    "general": (
        "arc_easy",
        "arc_challenge",
        "boolq",
        "piqa",
        "hellaswag",
        "winogrande",
        "openbookqa",
        "mmlu",
    ),
    "maths": ("gsm8k", "minerva_math"),
}
METRICS = ("acc_norm", "exact_match", "bits_per_byte", "acc")  # of several, the first counts
LARGEST_BATCH = 64
LONGEST = 2048  # tokens of a text that a batch is sized for
COPIES = 4  # float32 copies of a batch's logits that lm-eval and torch may hold at once
MEMORY_SHARE = 0.25  # of what is free, for these


def evaluate(
    checkpoint: str | Path,
    tasks: list[str] | tuple[str, ...] = TASKS,
    *,
    corpus_dir: str | Path | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    data_dir: str | Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Score one model: task -> {"metric", "value", "stderr" (None: unknown), "items"}.

    Args:
        checkpoint: a Hugging Face folder, a checkpoint of a run, or a run folder (its newest).
        tasks: names in eval/tasks, or lm-eval's own.
        corpus_dir: corpus folder whose held-out text is asked; by default that of the run which the
            checkpoint lies in, and where there is none, generated items.
        batch_size: texts scored at once; None: as the free memory allows.
        limit: score only the first items of each task.
        data_dir: folder with the files that the tasks of eval/tasks/files read.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: an unknown task, or no `data_dir` where a task needs one.
        ConnectionError: the data of a task cannot be had from the hub.
    """
    checkpoint = Path(checkpoint)
    if not tasks:
        raise ValueError(f"no tasks given; ours are: {', '.join(TASKS)}")
    data = find_data(tasks, data_dir)
    model, tokenizer = open_model(checkpoint)
    corpus = find_corpus(checkpoint) if corpus_dir is None else Path(corpus_dir)
    if corpus is not None and not (corpus / "heldout.json").is_file():
        raise FileNotFoundError(f"{corpus} is no corpus folder (no heldout.json in it)")
    with logger_level("lm_eval", logging.ERROR):
        loaded = load_tasks(list(tasks), {"corpus_dir": corpus, "data_dir": data})
        return _score(model, tokenizer, list(tasks), loaded, batch_size, limit)


def open_model(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a Hugging Face folder, a checkpoint of a run, or a run folder."""
    if (path / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint {path}: give the folder of a run, or of a model")
    checkpoint = find_checkpoint(path)
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None:
        raise FileNotFoundError(f"no tokenizer beside {checkpoint}: `collider export` it first")
    return load_checkpoint(checkpoint), AutoTokenizer.from_pretrained(tokenizer)


def find_corpus(checkpoint: Path) -> Path | None:
    """The corpus folder of the run that a checkpoint lies in, or None."""
    path = checkpoint.resolve()
    for parent in (path, *path.parents):
        if (parent / "corpus" / "heldout.json").is_file():
            return parent / "corpus"
    return None


def find_data(tasks: list[str] | tuple[str, ...], data_dir: str | Path | None) -> Path | None:
    """The folder of the files that some tasks read.

    Raises ValueError when one of `tasks` reads files and no folder is given, FileNotFoundError for
    one that is none.
    """
    needed = sorted(set(tasks) & set(FILE_TASKS))
    if needed and data_dir is None:
        raise ValueError(f"{', '.join(needed)}: name the folder of their files with --data DIR")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"no folder {data_dir}: correct --data")
    return None if data_dir is None else Path(data_dir)


def load_tasks(tasks: list[str], places: dict[str, Any]) -> Any:
    """lm-eval's task objects; `places` go to the functions of ours that give their items.

    Raises ValueError and ConnectionError as `evaluate` does.
    """
    from lm_eval.tasks import TaskManager

    theirs = sorted(set(tasks) - {*TASKS, *FILE_TASKS})
    manager = TaskManager(
        include_path=str(TASKS_FOLDER),
        include_defaults=bool(theirs),  # 15,000 files, read one by one
        metadata=places,
    )
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ValueError(
            f"unknown tasks {unknown}; there are ours ({', '.join(TASKS)}) and those that "
            "`lm-eval ls tasks` lists"
        )
    try:
        return manager.load(tasks)
    except OSError as error:
        if not theirs:
            names = ", ".join(tasks)
            raise FileNotFoundError(f"the items of {names} cannot be read: {error}") from error
        raise ConnectionError(
            f"the data of {', '.join(theirs)} cannot be had from the hub "
            f"({error}). `--suite offline` needs no network"
        ) from error


def _score(
    network: Any,
    tokenizer: Any,
    tasks: list[str],
    loaded: Any,
    batch_size: int | None,
    limit: int | None,
) -> dict[str, dict[str, Any]]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(
        network.to(device).eval(),
        tokenizer=tokenizer,
        batch_size=batch_size or automatic_batch(network.config, free_memory(device)),
        device=device,
        add_bos_token=False,  # lm-eval puts the prefix token in front itself
    )
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for each batch
        report = lm_eval.evaluate(
            lm=model,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    assert report is not None, "lm-eval returns nothing only on ranks other than 0"
    return {task: main_metric(report, task) for task in tasks}


def automatic_batch(config: Any, free_bytes: float) -> int:
    """Texts scored at once, so that a share of the free memory holds their logits."""
    length = min(config.max_position_embeddings, LONGEST)
    text = length * config.vocab_size * 4 * COPIES
    return max(1, min(LARGEST_BATCH, int(MEMORY_SHARE * free_bytes / text)))


def free_memory(device: str) -> float:
    """Bytes that can be had."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


def main_metric(report: Any, task: str) -> dict[str, Any]:
    """The metric of a task or group that counts most by METRICS, out of lm-eval's report."""
    numbers = report["results"][task]
    names = [key for key in numbers if "," in key and "_stderr," not in key]
    key = min(names, key=lambda k: METRICS.index(m) if (m := k.split(",")[0]) in METRICS else 99)
    metric, filtered = key.split(",")
    error = numbers.get(f"{metric}_stderr,{filtered}")
    counts = report["n-samples"]
    members = [task] if task in counts else _leaves(report["group_subtasks"], task)
    return {
        "metric": metric,
        "value": numbers[key],
        "stderr": error if isinstance(error, float) else None,  # "N/A" where it has none
        "items": sum(counts[name]["effective"] for name in members),
    }


def _leaves(groups: dict[str, list[str]], name: str) -> list[str]:
    """Tasks inside a group of tasks and groups."""
    if name not in groups:
        return [name]
    return [leaf for member in groups[name] for leaf in _leaves(groups, member)]
