"""What run folders hold, in the one form that the page, the tables and the plots are made from."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lightning_collider.eval.flops import StepFlops
from lightning_collider.report.record import read_rows
from lightning_collider.training.config import Recipe, TrainingRecipe, load_recipe
from lightning_collider.training.files import read_json
from lightning_collider.training.fit import model_config
from lightning_collider.training.models import shape_of
from lightning_collider.training.utilisation import utilisation_of


@dataclass
class Arm:
    """One training run: a whole folder, or an arm of a comparison.

    Attributes:
        name: unique in a report.
        selector, keep: how it was filtered; "none" and 1 where it was not.
        live_reference: whether a reference model ran beside.
        log: rows with step, input_tokens, positions, seconds and kept_share; loss_all and loss_kept
            where the run trained on single tokens.
        heldout: rows of heldout.jsonl; sample, memory, train: the files of these names, or {}.
        scores: task -> metric, value, stderr, items.
        flops: of one sequence, forward and backward.
        length: tokens of one sequence.
        precision, devices: what its peak depends on, the first as Lightning names it.
        finished: whether its last step is done.
    """

    name: str
    selector: str
    keep: float
    live_reference: bool
    log: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    sample: dict[str, Any]
    memory: dict[str, Any]
    train: dict[str, Any]
    scores: dict[str, Any]
    flops: StepFlops
    length: int
    precision: str
    devices: int

    @property
    def finished(self) -> bool:
        return bool(self.train)

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far."""
        return self.log[-1]["seconds"] if self.log else None

    @property
    def tokens(self) -> float | None:
        """Input tokens so far."""
        return self.log[-1]["input_tokens"] if self.log else None

    @property
    def positions(self) -> float | None:
        """Rows of the trunk so far: fewer than tokens where it trained on bags."""
        return self.log[-1].get("positions", self.tokens) if self.log else None  # older: no bags


@dataclass
class Run:
    """A run folder: its arms and what describes it."""

    title: str
    folder: Path
    recipe: str  # YAML
    arms: list[Arm]
    about: dict[str, Any] = field(default_factory=dict)  # date, machine, versions, where known


def read_run(folder: str | Path) -> Run:
    """Read a run folder, finished or not.

    Raises FileNotFoundError for a folder that is no run, or one in which no step was logged yet,
    ValueError for a run of another kind.
    """
    folder = Path(folder)
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} is no run (no recipe.yaml in it): give the folder of one, for example "
            "runs/quickstart"
        )
    recipe = load_recipe(str(file))
    if isinstance(recipe, Recipe):
        arms = _arms(recipe, folder)
    elif isinstance(recipe, TrainingRecipe):
        arms = [_training(recipe, folder)]
    else:
        raise ValueError(f"{folder} is a run of kind {recipe.kind!r}, which has no report")
    arms = [arm for arm in arms if arm.log or arm.heldout]
    if not arms:
        raise FileNotFoundError(f"{folder} has no numbers yet: wait for the first rows of its log")
    results = folder / "results.json"
    known = read_json(results) if results.is_file() else {}
    about = {key: known[key] for key in ("date", "machine", "versions") if key in known}
    return Run(recipe.name, folder, file.read_text(encoding="utf-8"), arms, about)


def read_runs(folders: list[Path]) -> list[Run]:
    """Read several folders; with more than one, arms are named RUN/ARM."""
    runs = [read_run(folder) for folder in folders]
    if len(runs) > 1:
        distinct = len({run.folder.name for run in runs}) == len(runs)
        for run in runs:
            name = run.folder.name if distinct else str(run.folder)
            for arm in run.arms:
                arm.name = name if len(run.arms) == 1 else f"{name}/{arm.name}"
    return runs


def _arms(recipe: Recipe, folder: Path) -> list[Arm]:
    """The arms of a comparison that have begun."""
    manifest = folder / "corpus" / "manifest.json"
    vocabulary = (
        read_json(manifest)["vocab_size"] if manifest.is_file() else recipe.corpus.vocab_size
    )
    config = model_config(recipe, vocabulary)
    return [
        _arm(
            folder / "arms" / name,
            name=name,
            selector=arm.selector,
            keep=arm.keep,
            live_reference=arm.selector == "excess_loss" and not arm.stored_losses,
            flops=flops_of(config, recipe.corpus.sequence_length, arm.keep),
            length=recipe.corpus.sequence_length,
            precision=recipe.train.precision,
            devices=1,
        )
        for name, arm in recipe.arms.items()
    ]


def _training(recipe: TrainingRecipe, folder: Path) -> Arm:
    chosen, length = recipe.filter, recipe.data.sequence_length
    return _arm(
        folder,
        name=recipe.name,
        selector=chosen.selector,
        keep=chosen.keep,
        live_reference=chosen.selector == "excess_loss" and not chosen.stored_losses,
        flops=flops_of(shape_of(recipe.model), length, chosen.keep),
        length=length,
        precision=recipe.trainer.precision,
        devices=recipe.trainer.devices * recipe.trainer.num_nodes,
    )


def _arm(folder: Path, **known: Any) -> Arm:
    """Add to what the recipe says of an arm what is in its folder."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "tokens_per_s" in row]
    return Arm(
        log=rows,
        heldout=read_rows(folder / "heldout.jsonl"),
        sample=_read_or_empty(folder / "sample.json"),
        memory=_read_or_empty(folder / "memory.json"),
        train=_read_or_empty(folder / "train.json"),
        scores=_read_or_empty(folder / "eval.json"),
        **known,
    )


def _read_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def flops_of(config: Any, length: int, keep: float) -> StepFlops:
    """FLOPs of a step on one sequence of a model, keeping so large a part of its rows."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return utilisation_of(model, length, "32-true", devices=1).flops(keep)


def read_bench(path: Path) -> dict[str, Any]:
    """What `collider bench --json` wrote.

    Raises ValueError for another file, FileNotFoundError where there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give what `collider bench --json` wrote")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["backward_vs_hf_iqr"], found["floor_backward"], found["peak_memory_ratio"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by `collider bench --json`") from error
    return found
