"""The table and the figure of the Token-Superposition comparison, from the lines of its results."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_collider.eval.superposition_run import CURVE_ROWS

Entry = dict[str, Any]  # a line of the results: "stage", "settings", "heldout_loss", "curve", ...


def baseline_of(entries: list[Entry], steps: int, seed: int = 0) -> Entry | None:
    """The best baseline of so many steps."""
    found = [e for e in entries if _is(e, arm="baseline", steps=steps, seed=seed)]
    return min(found, key=_loss, default=None)


def chosen_of(entries: list[Entry]) -> Entry | None:
    """The best cell of seed 0."""
    return min((e for e in entries if _is_cell(e)), key=_loss, default=None)


def table(entries: list[Entry], steps: int) -> str:
    """Markdown: learning rates, all cells, ablations, fresh seeds, as far as they are there.

    Args:
        entries: lines of the results, of one scale.
        steps: optimizer steps of the runs at equal FLOPs.
    """
    baseline, chosen = baseline_of(entries, steps), chosen_of(entries)
    if baseline is None:
        return "no results yet"
    parts = [_rates(entries, steps)]
    if chosen is not None:
        parts += [_cells(entries, baseline), _ablations(entries, baseline, chosen)]
        parts += [_seeds(entries, stage) for stage in ("confirmation", "longer")]
    return "\n\n".join(part for part in parts if part)


def _rates(entries: list[Entry], steps: int) -> str:
    rows = [
        [_name(e), f"{e['settings']['learning_rate']:g}", f"{_loss(e):.3f}"]
        for e in sorted(entries, key=lambda e: (_name(e), e["settings"]["learning_rate"]))
        if e["stage"] == "learning rate" and e["settings"]["steps"] == steps
    ]
    return _markdown(["seed 0", "learning rate", "held-out loss"], rows)


def _cells(entries: list[Entry], baseline: Entry) -> str:
    cells = _best_cells(entries)
    sizes, ratios = sorted({s for s, _ in cells}), sorted({r for _, r in cells})
    rows = [
        [
            f"s = {s}",
            *(_against(cells[s, r], baseline) if (s, r) in cells else "" for r in ratios),
        ]
        for s in sizes
    ]
    head = [f"seed 0, baseline {_loss(baseline):.3f}", *(f"r = {r:g}" for r in ratios)]
    return _markdown(head, rows)


def _ablations(entries: list[Entry], baseline: Entry, chosen: Entry) -> str:
    found = [e for e in entries if e["stage"] == "ablation"]
    rows = [[_name(e), _against(e, baseline)] for e in (chosen, *found)]
    return _markdown(["seed 0", "held-out loss (minus the baseline's)"], rows) if found else ""


def _seeds(entries: list[Entry], stage: str) -> str:
    by_seed: dict[int, dict[str, Entry]] = {}
    for e in entries:
        if e["stage"] == stage:
            by_seed.setdefault(e["settings"]["seed"], {})[e["settings"]["arm"]] = e
        elif e["stage"] == "equal data" and stage == "confirmation":
            by_seed.setdefault(e["settings"]["seed"], {})["same data"] = e
    rows, differences = [], []
    for seed, found in sorted(by_seed.items()):
        cells = [f"{_loss(found[k]):.3f}" if k in found else "" for k in COLUMNS]
        difference = ""
        if "baseline" in found and "tst" in found:
            differences.append(_loss(found["tst"]) - _loss(found["baseline"]))
            difference = f"{differences[-1]:+.3f}"
        rows.append([str(seed), *cells, difference])
    if len(differences) > 1:
        spread = f"{statistics.mean(differences):+.3f} ± {statistics.stdev(differences):.3f}"
        rows.append(["mean ± standard deviation", "", "", "", spread])
    head = ["fresh seed", *COLUMNS.values(), "TST minus baseline"]
    if stage == "longer":
        head[0] += ", more steps"
    return _markdown(head, rows) if rows else ""


COLUMNS = {
    "baseline": "baseline",
    "tst": "TST",
    "same data": "baseline, as much data as TST",
}


def draw(entries: list[Entry], steps: int, path: Path) -> None:
    """A PNG: losses over the steps of seed 0, and each cell's distance to the baseline.

    The curves are of a few held-out sequences, the distances of all.
    """
    baseline = baseline_of(entries, steps)
    if baseline is None:
        return
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, cells = figure.subplots(1, 2)
    _draw_curves(curves, entries, baseline)
    _draw_cells(cells, entries, baseline)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_curves(axes: Any, entries: list[Entry], baseline: Entry) -> None:
    shown = [e for e in entries if e["stage"] == "ablation" and e["settings"]["arm"] != "tst"]
    for e in filter(None, (baseline, chosen_of(entries), *shown)):
        axes.plot([int(x) for x in e["curve"]], list(e["curve"].values()), label=_name(e))
    axes.set(xlabel="optimizer step", title="seed 0")
    axes.set_ylabel(f"next-token loss of {CURVE_ROWS} held-out sequences (nats)")
    axes.legend(fontsize="small")


def _draw_cells(axes: Any, entries: list[Entry], baseline: Entry) -> None:
    cells = _best_cells(entries)
    for size in sorted({s for s, _ in cells}):
        ratios = sorted(r for s, r in cells if s == size)
        gaps = [_loss(cells[size, r]) - _loss(baseline) for r in ratios]
        axes.plot(ratios, gaps, marker="o", label=f"s = {size}")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="r, part of the steps on bags", title="below 0: superposition wins")
    axes.set_ylabel("held-out loss minus the baseline's (nats)")
    if cells:
        axes.legend(fontsize="small")


def _best_cells(entries: list[Entry]) -> dict[tuple[int, float], Entry]:
    """The best learning rate of each (s, r)."""
    ordered = sorted(filter(_is_cell, entries), key=_loss, reverse=True)
    return {(e["settings"]["bag_size"], e["settings"]["ratio"]): e for e in ordered}


def _loss(entry: Entry) -> float:
    return entry["heldout_loss"]


def _is(entry: Entry, **settings: Any) -> bool:
    return settings.items() <= entry["settings"].items()


def _is_cell(entry: Entry) -> bool:
    return entry["stage"] in ("learning rate", "grid") and _is(entry, arm="tst", seed=0)


def _name(entry: Entry) -> str:
    s = entry["settings"]
    if s["arm"] == "baseline":
        return "baseline"
    name = f"{ARMS[s['arm']]}, s={s['bag_size']}, r={s['ratio']:g}"
    name += ", weights 1/i" if s["weights"] == "inverse" else ""
    return name + (", bags cross documents" if s["straddle"] else "")


ARMS = {
    "tst": "TST",
    "input": "bags as input only",
    "output": "bags as target only",
    "reinit": "TST, embeddings and head fresh at the switch",
}


def _against(entry: Entry, baseline: Entry) -> str:
    return f"{_loss(entry):.3f} ({_loss(entry) - _loss(baseline):+.3f})"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
