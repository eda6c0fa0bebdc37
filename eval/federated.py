"""FedADT against FedAvg, FedAsync, FedBuff and a control, on simulated clients.

    python -m lightning_collider.eval.federated RUNS.jsonl tune       # chooses options, one seed
    python -m lightning_collider.eval.federated RUNS.jsonl confirm    # other seeds, both splits
    python -m lightning_collider.eval.federated RUNS.jsonl table      # what is there, and a plot

One line a run is appended to the file, and runs that are in it are not done again. All algorithms
share the recipe fedadt-digits: model, learning rate, epochs, clients, speeds. `tune` tries some
options of each at Dirichlet 0.1 on a seed that `confirm` does not use, and takes those with the
highest accuracy on average over the simulated time. FedADT takes 1, 2 or 5 steps of distillation.
Controls are FedAsync with 2 more steps of plain training, tuned like the others, and FedAsync with
FedADT's own mixing and as many more steps as its choice distils.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from lightning_collider.federated.plots import plot_curves
from lightning_collider.federated.run import train
from lightning_collider.federated.state import Journal, read_rows
from lightning_collider.training.config import load_federated

HORIZON = {"tune": 40, "confirm": 80}  # simulated seconds of a run
TARGET = 0.75  # accuracy
TUNING_SEED, SEEDS = 100, (0, 1, 2)
SPLITS = (0.1, 0.5)  # Dirichlet's alpha
PAIRS = [(0.6, 0.5), (0.6, 0.25), (0.9, 0.25), (0.6, 0.0), (0.9, 0.5), (0.6, 0.75)]  # mixing, power
FEDASYNC = [{"mixing": a, "power": b} for a, b in PAIRS]
BUFFERS = [(3, 1.0), (3, 2.0), (6, 1.0), (6, 2.0), (2, 1.0), (3, 0.7)]  # buffer, server_rate
CORRECTIONS: list[dict[str, Any]] = [
    {"power": 0.25, "steps": 2, "lam_max": 0.5, "t_warm": 50},
    {"power": 0.25, "steps": 2, "lam_max": 0.9, "t_warm": 50},
    {"power": 0.25, "steps": 5, "lam_max": 0.5, "t_warm": 50},
    {"power": 0.25, "steps": 2, "lam_max": 0.5, "t_warm": 0},
    {"power": 0.25, "steps": 2, "lam_max": 0.5, "temperature": 1.0},
    {"power": 0.5, "steps": 2, "delay_from": "correction"},
    # the six above all lost: the teacher misleads for longer, and a high temperature is worse
    {"power": 0.5, "steps": 1, "temperature": 1.0, "lam_max": 0.5, "t_warm": 300},
    {"power": 0.5, "steps": 2, "temperature": 1.0, "lam_max": 0.3, "t_warm": 300},
    {"power": 0.5, "steps": 2, "temperature": 1.0, "lam_max": 0.9, "t_warm": 1000},
    {"power": 0.5, "steps": 2, "temperature": 1.0, "lam_max": 0.3, "delay_from": "correction"},
]
EQUAL = "FedAsync + CE, equal K"  # the control that is not tuned
# name in the tables -> the recipe's algorithm, and options to try
TRIALS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "FedAvg": ("fedavg", [{}]),
    "FedAsync": ("fedasync", FEDASYNC),
    "FedAsync + CE": ("fedasync", [{**pair, "extra_steps": 2} for pair in FEDASYNC[:4]]),
    EQUAL: ("fedasync", []),
    "FedBuff": ("fedbuff", [{"buffer": k, "server_rate": r} for k, r in BUFFERS]),
    "FedADT": ("fedadt", [{"mixing": 0.6, **choice} for choice in CORRECTIONS]),
}


def one_run(run: dict[str, Any]) -> dict[str, Any]:
    """Do a run of `plan`; its record for the file."""
    algorithm = TRIALS[run["name"]][0]
    words = [f"seed={run['seed']}", f"task.options.dirichlet={run['alpha']}"]
    words += [f"algorithm={algorithm}", "server.max_updates=null"]
    recipe = load_federated("fedadt-digits", [*words, f"server.max_seconds={run['horizon']}"])
    recipe.algorithms = {algorithm: run["options"]}
    journal = Journal()
    start = time.process_time()
    train(recipe, journal)
    delays = [row["delay"] for row in journal.of("update")]
    return {
        **run,
        "curve": journal.of("evaluation"),
        "mean_delay": statistics.fmean(delays),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def key(record: dict[str, Any]) -> str:
    """What makes two records the same run."""
    return json.dumps([record[k] for k in ("name", "options", "alpha", "seed", "horizon")])


def fill(path: Path, wanted: list[dict[str, Any]]) -> None:
    """Do the runs that are not in the file."""
    done = {key(r) for r in read_rows(path)} if path.is_file() else set()
    for run in wanted:
        if key(run) in done:
            continue
        record = one_run(run)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = {k: run[k] for k in ("name", "alpha", "seed", "options")}
        print(shown, f"{average(record):.3f}", f"{record['cpu_seconds']} s", flush=True)


def average(record: dict[str, Any]) -> float:
    """Accuracy on average over the simulated time of a run, constant between evaluations."""
    curve, area = record["curve"], 0.0
    times = [row["seconds"] for row in curve[1:]] + [record["horizon"]]
    for row, until in zip(curve, times, strict=True):
        area += row["accuracy"] * max(0.0, min(until, record["horizon"]) - row["seconds"])
    return area / record["horizon"]


def final(record: dict[str, Any]) -> float:
    """Mean accuracy of the last fifth of the simulated time."""
    rows = [r for r in record["curve"] if r["seconds"] >= 0.8 * record["horizon"]]
    return statistics.fmean(r["accuracy"] for r in rows or record["curve"][-1:])


def reached(record: dict[str, Any], what: str, target: float = TARGET) -> float | None:
    """`seconds` or `updates` of the first of three evaluations in a row at the target or above.

    The curves are noisy: one evaluation alone can be luck.
    """
    curve = record["curve"]
    for i in range(len(curve) - 2):
        if all(row["accuracy"] >= target for row in curve[i : i + 3]):
            return curve[i][what]
    return None


def plan(
    stage: str, names: dict[str, list[dict[str, Any]]], alphas: Any, seeds: Any
) -> list[dict[str, Any]]:
    """Runs of each name with each of its options, alpha and seed."""
    horizon = HORIZON[stage]
    return [
        {"name": name, "options": options, "alpha": alpha, "seed": seed, "horizon": horizon}
        for alpha in alphas
        for seed in seeds
        for name, trials in names.items()
        for options in trials
    ]


def chosen(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The best options of each algorithm in the tuning runs of a file, and the equal control's."""
    trials = [r for r in read_rows(path) if r["seed"] == TUNING_SEED]
    best = {}
    for name, (_, options) in TRIALS.items():
        own = [r for r in trials if r["name"] == name]
        if options and not own:
            raise ValueError(f"{path} has no tuning run of {name}: run `tune` first")
        best[name] = [max(own, key=average)["options"]] if own else []
    (adt,) = best["FedADT"]
    best[EQUAL] = [{"mixing": adt["mixing"], "power": adt["power"], "extra_steps": adt["steps"]}]
    return best


def table(path: Path) -> str:
    """Markdown tables of the tuning and of the confirmation in a file."""
    records = list(read_rows(path))
    best = chosen(path)
    lines = ["| algorithm | options tried on seed 100 | average accuracy |", "| --- | --- | --- |"]
    for r in records:
        if r["seed"] == TUNING_SEED:
            mark = " *" if r["options"] == best[r["name"]][0] else ""
            lines.append(f"| {r['name']} | {json.dumps(r['options'])} | {average(r):.3f}{mark} |")
    for alpha in SPLITS:
        lines += ["", f"Dirichlet {alpha}, median (range) of {len(SEEDS)} seeds", ""]
        lines.append(
            f"| algorithm | seconds to {TARGET} | updates to {TARGET} | accuracy, last fifth | "
            "average accuracy | updates | mean delay | work of corrections |"
        )
        lines.append("|" + " --- |" * 8)
        for name in TRIALS:
            own = [r for r in records if r["name"] == name and r["alpha"] == alpha]
            own = [r for r in own if r["seed"] in SEEDS and r["options"] == best[name][0]]
            if own:
                lines.append(_row(name, own))
    return "\n".join(lines)


def _row(name: str, records: list[dict[str, Any]]) -> str:
    last = [r["curve"][-1] for r in records]
    corrections = [row["correction_work"] / (row["work"] + row["correction_work"]) for row in last]
    cells = [
        _spread([reached(r, "seconds") for r in records], 1),
        _spread([reached(r, "updates") for r in records], 0),
        _spread([final(r) for r in records], 3),
        _spread([average(r) for r in records], 3),
        _spread([row["updates"] for row in last], 0),
        _spread([r["mean_delay"] for r in records], 1),
        f"{statistics.median(corrections):.0%}",
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def _spread(values: list[Any], digits: int) -> str:
    """Median and range; runs that never got there count as later than all others."""
    there = sorted(v for v in values if v is not None)
    missing = len(values) - len(there)
    middle = statistics.median([*there, *[float("inf")] * missing])
    text = "not reached" if middle == float("inf") else f"{middle:.{digits}f}"
    if there:
        text += f" ({there[0]:.{digits}f} to {there[-1]:.{digits}f}"
        text += f", {missing} not)" if missing else ")"
    return text


def plots(path: Path) -> None:
    """One picture a split, of the first seed of the confirmation."""
    best = chosen(path)
    for alpha in SPLITS:
        journals = {}
        for r in read_rows(path):
            same = r["seed"] == SEEDS[0] and r["alpha"] == alpha
            if same and r["options"] == best[r["name"]][0]:
                journals[r["name"]] = Journal()
                journals[r["name"]].rows = r["curve"]
        if journals:
            plot_curves(journals, path.with_name(f"{path.stem}-{alpha}.png"), TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="JSON-lines file of runs, made if it is not there")
    parser.add_argument("stage", choices=["tune", "confirm", "table"])
    args = parser.parse_args()
    if args.stage == "tune":
        trials = {name: options for name, (_, options) in TRIALS.items()}
        fill(args.file, plan("tune", trials, SPLITS[:1], [TUNING_SEED]))
    elif args.stage == "confirm":
        fill(args.file, plan("confirm", chosen(args.file), SPLITS, SEEDS))
    print(table(args.file))
    plots(args.file)


if __name__ == "__main__":
    main()
