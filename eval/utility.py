"""Does filtering help, and what does it drop? All runs of the question, and one table.

    python -m lightning_collider.eval.utility [--out DIR] [--data DIR] [--quick]

Part one: a Llama of 4 million parameters from random weights on text that is 40 % noise; regular,
filtered by excess loss, random and top loss at keep 0.6 with three seeds, other keeps and stored
losses with one (recipes/utility.yaml). Part two, with --data: SmolLM2-135M (utility_smollm2.py).

The same command goes on where it was stopped; every run and every checkpoint inside one is kept.
After each seed DIR/utility.json and DIR/utility.md are written anew from the runs that are there.
"""

import argparse
from pathlib import Path
from typing import Any

from lightning_collider.eval import utility_smollm2
from lightning_collider.eval.compare import where
from lightning_collider.eval.utility_tables import EVERY_SEED, small_numbers, to_markdown
from lightning_collider.report.read import read_run
from lightning_collider.report.write import write_report
from lightning_collider.training.config import Recipe, load_comparison
from lightning_collider.training.files import write_json, write_text
from lightning_collider.training.run import run_recipe

SEEDS = (0, 1, 2)
QUICK = [
    "train.steps=120",
    "train.warmup_steps=15",
    "reference.steps=80",
    "corpus.heldout_problems=200",
    "eval.heldout_batches=6",
    "eval.heldout_points=6",
]


def recipe_of(seed: int, out: Path, overrides: list[str]) -> Recipe:
    """The runs of one seed: all arms for the first, those of EVERY_SEED for the others."""
    given = [f"seed={seed}", f"out={out / f'seed{seed}'}", *overrides]
    recipe = load_comparison("utility", given)
    if seed != SEEDS[0]:
        recipe.arms = {name: recipe.arms[name] for name in EVERY_SEED}
    return recipe


def run(
    out: Path, overrides: list[str], seeds: tuple[int, ...], data: Path | None, quick: bool
) -> dict[str, Any]:
    """Do what is left to do, write results after each part, and return them."""
    for seed in seeds:
        run_recipe(recipe_of(seed, out, overrides))
        results = collect(out)
    if data is not None:
        utility_smollm2.run(out / "smollm2", data, quick)
        results = collect(out)
    return results


def collect(out: Path) -> dict[str, Any]:
    """Numbers of the finished runs in a folder; writes them and their tables there."""
    folders = [out / f"seed{seed}" for seed in SEEDS]
    folders = [folder for folder in folders if (folder / "results.json").is_file()]
    results = {
        **where(),
        "small": [number for f in folders for number in small_numbers(read_run(f), f)],
        "smollm2": utility_smollm2.collect(out / "smollm2"),
    }
    write_json(out / "utility.json", results)
    write_text(out / "utility.md", to_markdown(results))
    write_report(folders, out / "report.html")
    return results


def main() -> None:
    """Run it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="default: runs/utility, or runs/utility-quick")
    parser.add_argument(
        "--data", type=Path, help="folder of gsm8k_*.jsonl, blimp/ and wikitext2_valid.txt"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: 20 minutes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a recipe's key")
    args = parser.parse_intermixed_args()
    out = args.out or Path("runs/utility-quick" if args.quick else "runs/utility")
    overrides = [*(QUICK if args.quick else []), *args.overrides]
    seeds = SEEDS[:1] if args.quick else SEEDS
    results = run(out, overrides, seeds, args.data, args.quick)
    print(to_markdown(results))
    print(f"{out}/utility.md, utility.json, report.html")


if __name__ == "__main__":
    main()
