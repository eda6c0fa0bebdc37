"""The numbers of a finished run in one dict, and the dict as a table that reads well anywhere."""

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_collider.training.config import Recipe, to_dict
from lightning_collider.training.files import read_json
from lightning_collider.training.markdown import markdown_table

PACKAGES = ("lightning-collider", "torch", "lightning", "transformers", "lm-eval", "tokenizers")

# line of the table -> its number in an arm's training numbers, and how to print it
LINES = {
    "final training loss, kept rows": ("final_loss_kept", ".3f"),
    "final training loss, all rows": ("final_loss_all", ".3f"),
    "input tokens": ("input_tokens", ",d"),
    "kept rows": ("kept_rows", ",d"),
    "input tokens/s": ("tokens_per_s", ",.0f"),
    "kept rows/s": ("kept_per_s", ",.0f"),
    "training seconds": ("train_seconds", ",.0f"),
}


def collect(recipe: Recipe, folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Everything the stages left in a run folder, with the recipe, the versions and the machine."""
    reference = folder / "reference" / "train.json"
    return {
        "recipe": to_dict(recipe),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "corpus": manifest,
        "reference": read_json(reference) if reference.is_file() else None,
        "arms": {
            name: {
                "train": read_json(folder / "arms" / name / "train.json"),
                "eval": read_json(folder / "arms" / name / "eval.json"),
            }
            for name in recipe.arms
        },
    }


def to_markdown(results: dict[str, Any]) -> str:
    """The results as a Markdown table, one column an arm, padded to read well in a terminal."""
    recipe, arms = results["recipe"], results["arms"]
    columns = [_column(arm) for arm in arms.values()]
    rows = [["", *arms], *([line, *(c[line] for c in columns)] for line in columns[0])]
    train, versions = recipe["train"], results["versions"]
    counts = results["corpus"]["tokens_by_source"]
    mix = ", ".join(f"{count:,} {source}" for source, count in counts.items())
    notes = [
        f"Each arm: {train['steps']} steps from the same initial weights (seed {recipe['seed']}), "
        f"learning rate {train['learning_rate']},\nthe same tokens in the same order ({mix}).",
        "Bits per byte (lower is better) and accuracy are lm-eval's on held-out target problems;\n"
        f"± is one standard error. Losses are means over at most {train['log_every']} last steps.\n"
        "Training seconds of a filtered arm contain the forward of its reference model.",
        f"{results['date']}, {results['machine']['cores']} cores, "
        + ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return "\n".join([f"# {recipe['name']}", "", markdown_table(rows), "", "\n\n".join(notes), ""])


def _column(arm: dict[str, Any]) -> dict[str, str]:
    """Line of the table -> what it says of one arm."""
    lines = {}
    for task, score in arm["eval"].items():
        error = f" ± {score['stderr']:.3f}" if score["stderr"] is not None else ""
        lines[f"{task}: {score['metric']}"] = f"{score['value']:.3f}{error}"
    for line, (key, form) in LINES.items():
        lines[line] = format(arm["train"][key], form)
    return lines
