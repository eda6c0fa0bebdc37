"""Token-Superposition Training against ordinary training, at equal FLOPs and at equal data.

    python -m lightning_collider.eval.superposition

trains some 35 models of 4.3 million parameters, one after the other (under two hours on one core),
prints a table and draws a figure. Each run adds a line to a file of results; the command, killed
and started again, skips what is there, and refuses a file of runs on other text, such as that of
another Python. `--report` only prints and draws, and `--quick` is a rehearsal of half a minute.

What is compared is the next-token loss on held-out files, in float32, after the same number of
optimizer steps of as many positions. In this order:

1. on seed 0, the baseline's learning rate, and TST's at s=4, r=.3, up and down in factors of 2;
2. on seed 0, all (s, r), the best of which is chosen;
3. on fresh seeds, the choice and the baseline;
4. on seed 0, ablations of the choice;
5. on fresh seeds, a longer baseline that reads as many tokens as the choice;
6. with `--longer` only, which takes another hour: 3. with four times the steps.
"""

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_collider.eval.efficiency import where
from lightning_collider.eval.superposition_report import draw, table
from lightning_collider.eval.superposition_run import Run, Scale, key_of, load_text, train
from lightning_collider.training.quiet import quiet

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "superposition.jsonl"
FIGURE = HERE / "results" / "superposition.png"


@dataclass(frozen=True)
class Plan:
    """Which runs there are."""

    steps: int = 720
    first_rate: float = 2e-3
    rates: int = 4  # at most so many learning rates are tried for each kind of training
    middle: tuple[int, float] = (4, 0.3)  # the (s, r) that TST's learning rate is chosen at
    bag_sizes: tuple[int, ...] = (2, 4, 6, 8)
    ratios: tuple[float, ...] = (0.2, 0.3, 0.4)
    small: tuple[tuple[int, float], ...] = ((2, 0.1), (4, 0.1))  # below the paper's ratios
    seeds: tuple[int, ...] = (1, 2, 3)
    longer: int = 4  # times the steps, with --longer


QUICK_SCALE = Scale(
    hidden_size=32,
    intermediate_size=48,
    layers=1,
    heads=2,
    vocab_size=300,
    length=16,
    batch_size=2,
    heldout_rows=16,
    plays=False,
    library_files=20,
)
QUICK_PLAN = Plan(
    steps=20,
    rates=3,
    middle=(2, 0.2),
    bag_sizes=(2, 4),
    ratios=(0.2,),
    small=(),
    seeds=(1,),
)

Measure = Callable[[Run, str], float]  # the held-out loss of a run, and what it is part of


def carry_out(plan: Plan, measure: Measure, longer: bool = False) -> None:
    """Measure every run of the plan; later ones depend on the losses of earlier ones."""
    baseline = best_rate(Run("baseline", plan.first_rate, plan.steps), plan, measure)
    s, r = plan.middle
    middle = Run("tst", plan.first_rate, plan.steps, bag_size=s, ratio=r)
    middle = best_rate(middle, plan, measure)

    cells = [(s, r) for s in plan.bag_sizes for r in plan.ratios]
    grid = [dataclasses.replace(middle, bag_size=s, ratio=r) for s, r in (*cells, *plan.small)]
    chosen = min(grid, key=lambda run: measure(run, "grid"))

    for seed in plan.seeds:
        for run in (baseline, chosen):
            measure(dataclasses.replace(run, seed=seed), "confirmation")

    for arm in ("input", "output", "reinit"):
        measure(dataclasses.replace(chosen, arm=arm), "ablation")
    measure(dataclasses.replace(chosen, weights="inverse"), "ablation")
    measure(dataclasses.replace(chosen, straddle=True), "ablation")

    for seed in plan.seeds:
        same_data = dataclasses.replace(baseline, steps=chosen.data_steps(), seed=seed)
        measure(same_data, "equal data")

    for seed in plan.seeds if longer else ():
        for run in (baseline, chosen):
            long = dataclasses.replace(run, steps=plan.longer * plan.steps, seed=seed)
            measure(long, "longer")


def best_rate(run: Run, plan: Plan, measure: Measure) -> Run:
    """The run with the best learning rate: goes on by factors of 2 while the best is at an end."""
    losses: dict[float, float] = {}

    def take(rate: float) -> None:
        losses[rate] = measure(dataclasses.replace(run, learning_rate=rate), "learning rate")

    for factor in (1.0, 2.0, 0.5):
        take(factor * run.learning_rate)
    while len(losses) < plan.rates:
        best = min(losses, key=losses.__getitem__)
        if best == max(losses):
            take(2 * best)
        elif best == min(losses):
            take(best / 2)
        else:
            break
    return dataclasses.replace(run, learning_rate=min(losses, key=losses.__getitem__))


class Ledger:
    """The file of results: one JSON line a run, found again by all of its settings."""

    def __init__(self, path: Path, scale: Scale) -> None:
        self.path, self.scale, self.text = path, scale, ""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.done: dict[str, dict[str, Any]] = {}
        for line in lines:
            entry = json.loads(line)
            self.done[json.dumps(entry["settings"], sort_keys=True)] = entry

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The lines that are of this scale."""
        return [entry for entry in self.done.values() if same_scale(entry, self.scale)]

    def measured_on(self, text: str) -> None:
        """Take lines for runs on text of this SHA-256. Raises ValueError where one has other."""
        if any(entry.get("text") != text for entry in self.entries):
            raise ValueError(
                f"{self.path} has runs on other text, whose losses do not compare with new ones: "
                "name another file with --results, or print these with --report"
            )
        self.text = text

    def key(self, run: Run) -> str:
        """Equal for equal settings."""
        return json.dumps(key_of(self.scale, run), sort_keys=True)

    def add(self, run: Run, stage: str, result: dict[str, Any]) -> None:
        """Write a finished run down."""
        about = {"stage": stage, "settings": key_of(self.scale, run), "text": self.text}
        entry = {**about, **result, **where()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.done[self.key(run)] = entry


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Token-Superposition Training against ordinary")
    parser.add_argument("--results", type=Path, default=RESULTS, help="one JSON line a run")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="PNG")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/superposition"), help="keeps the tokens of the text"
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal; says nothing")
    parser.add_argument("--longer", action="store_true", help="also compare longer runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args(arguments)
    scale, plan = (QUICK_SCALE, QUICK_PLAN) if given.quick else (Scale(), Plan())
    ledger = Ledger(given.results, scale)
    if not given.report:
        text = load_text(scale, given.work / ("quick" if given.quick else "full"))
        ledger.measured_on(text.sha256())

        def measure(run: Run, stage: str) -> float:
            if ledger.key(run) not in ledger.done:
                with quiet():
                    ledger.add(run, stage, train(scale, run, text))
                gc.collect()  # a Trainer is full of cycles, and holds model and optimizer
                print(time.strftime("%H:%M:%S"), stage, run, flush=True)
            return ledger.done[ledger.key(run)]["heldout_loss"]

        carry_out(plan, measure, given.longer)
    print(table(ledger.entries, plan.steps))
    draw(ledger.entries, plan.steps, given.figure)


def same_scale(entry: dict[str, Any], scale: Scale) -> bool:
    """Whether a line of the results is of this scale."""
    return dataclasses.asdict(scale).items() <= entry["settings"].items()


if __name__ == "__main__":
    main()
