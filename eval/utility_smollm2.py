"""The part of the utility experiment that trains SmolLM2-135M on GSM8K beside general text.

One half of GSM8K's training problems trains the reference model, the other half is the target of
the runs, with WikiText beside it in equal parts. Scored are bits per byte of GSM8K's test problems
and BLiMP: does the target improve, and is general ability kept?

    DIR/data/*.jsonl                  the two halves
    DIR/reference/, regular/, ...     training runs, see training/pretrain.py; NAME.eval.json
    DIR/precision.json                in which all of them train: the faster one, timed once
    DIR/results.json                  numbers of those that are done
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from lightning_collider.eval.harness import evaluate
from lightning_collider.eval.tasks.files.published import GSM8K
from lightning_collider.report.read import read_run
from lightning_collider.training.config import TrainingRecipe, load_training
from lightning_collider.training.files import read_json, write_json, write_text
from lightning_collider.training.models import local_weights
from lightning_collider.training.pretrain import run_training

ARMS = {
    "regular": ["filter.selector=none", "filter.keep=1.0"],
    "filtered": ["filter.selector=excess_loss", "filter.keep=0.6"],
    "random": ["filter.selector=random", "filter.keep=0.6"],
}
RUNS = ("reference", *ARMS)
TIMINGS = 20  # the quickest of so many products counts
SHARED = [
    "data.sequence_length=256",
    "trainer.batch_tokens=2048",
    "trainer.micro_batch_size=4",
    "trainer.checkpoint_every=10",
    "data.validation_fraction=0",
    "data.sources.target=null",
    "data.sources.noise=null",
]
STEPS = {False: 40, True: 6}  # optimizer steps, by --quick
# Items scored, by --quick: all of BLiMP's 1,600 pairs, and part of GSM8K's 1,319 problems.
ITEMS = {
    False: {"gsm8k_text": 400, "blimp_pairs": 1600},
    True: {"gsm8k_text": 40, "blimp_pairs": 200},
}


def run(out: Path, data: Path, quick: bool) -> None:
    """Do what is left to do: the reference, the runs, their scores and the base model's."""
    halves = split(data / "gsm8k_train.jsonl", out / "data")
    steps = STEPS[quick]
    plain = ARMS["regular"]
    reference = recipe_of("reference", out, halves["reference"], None, steps // 2, plain)
    run_training(reference)
    assert reference.model.weights is not None
    score(Path(local_weights(reference.model.weights)), out, "base", data, quick)
    for name, keys in ARMS.items():
        extra = list(keys)
        if name == "filtered":
            extra.append(f"filter.reference={out / 'reference' / 'model'}")
        run_training(recipe_of(name, out, halves["target"], data, steps, extra))
        score(out / name / "model", out, name, data, quick)
        collect(out)


def split(problems: Path, folder: Path) -> dict[str, Path]:
    """Two files with every second problem each, "reference" and "target"."""
    lines = problems.read_text(encoding="utf-8").splitlines(keepends=True)
    files = {}
    for number, name in enumerate(("reference", "target")):
        files[name] = folder / f"gsm8k_{name}.jsonl"
        write_text(files[name], "".join(lines[number::2]))
    return files


def recipe_of(
    name: str, out: Path, target: Path, data: Path | None, steps: int, keys: list[str]
) -> TrainingRecipe:
    """One training run; without `data` there is no general text beside the target."""
    template = json.dumps(GSM8K)
    given = [
        f"out={out / name}",
        f"name={name}",
        f"data.folder={out / 'tokens' / target.stem}",
        f"trainer.max_steps={steps}",
        f"trainer.precision={precision_of(out, name)}",
        f"data.sources.gsm8k.path={target}",
        f"data.sources.gsm8k.template={template}",
    ]
    if data is None:
        given += ["data.sources.general=null"]
    else:
        given += [f"data.sources.general.path={data / 'wikitext2_valid.txt'}"]
        given += ["data.sources.general.max_documents=null", "data.sources.general.weight=1.0"]
    return load_training("smollm2-135m", [*SHARED, *given, *keys])


def precision_of(out: Path, name: str) -> str:
    """The trainer.precision of a run: its own once it has begun, else what precision.json says.

    A folder without that file gets it: from the runs that are there, or else from a timing.
    """
    recipe, file = out / name / "recipe.yaml", out / "precision.json"
    if recipe.is_file():
        return load_training(str(recipe)).trainer.precision
    if not file.is_file():
        begun = begun_in(out)
        chosen = precision_of(out, begun[0]) if begun else quicker_precision()
        write_json(file, {"precision": chosen})
    return read_json(file)["precision"]


def begun_in(out: Path) -> list[str]:
    """The runs of a folder that have a recipe."""
    return [run for run in RUNS if (out / run / "recipe.yaml").is_file()]


def quicker_precision() -> str:
    """That of bfloat16, unless this machine multiplies float32 matrices more quickly."""
    matrices = {kind: torch.ones(512, 512, dtype=kind) for kind in (torch.float32, torch.bfloat16)}
    seconds = dict.fromkeys(matrices, math.inf)
    for _ in range(TIMINGS):
        for kind, x in matrices.items():
            start = time.perf_counter()
            x @ x
            seconds[kind] = min(seconds[kind], time.perf_counter() - start)
    return "bf16-mixed" if seconds[torch.bfloat16] <= seconds[torch.float32] else "32-true"


def score(model: Path, out: Path, name: str, data: Path, quick: bool) -> None:
    """Write NAME.eval.json, unless it is there."""
    path = out / f"{name}.eval.json"
    if not path.is_file():
        scores: dict[str, Any] = {}
        for task, limit in ITEMS[quick].items():
            scores |= evaluate(model, [task], limit=limit, data_dir=data)
        write_json(path, scores)


def collect(out: Path) -> dict[str, Any] | None:
    """Scores, tokens, seconds and precisions of the runs that are done; writes results.json.

    None where none is.
    """
    found: dict[str, Any] = {}
    for name in ("base", *RUNS):
        scores = out / f"{name}.eval.json"
        if scores.is_file():
            found[name] = {"scores": read_json(scores)}
            if (out / name / "train.json").is_file():
                (arm,) = read_run(out / name).arms
                found[name] |= {"tokens": arm.tokens, "seconds": arm.seconds, "keep": arm.keep}
    if not found:
        return None
    precisions = {precision_of(out, run) for run in begun_in(out)}
    results = {"precisions": sorted(precisions), "runs": found}
    write_json(out / "results.json", results)
    return results
