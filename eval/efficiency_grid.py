"""The benches of the grid: a line each in eval/efficiency.csv, a fit of linearity and a plot.

    python -m lightning_collider.eval.efficiency_grid bf16 fp32 [--repeat 2] [--whole]
    python -m lightning_collider.eval.efficiency_grid            # only the table and the plot

Measure on a quiet machine. A line is appended as soon as its bench is done, so what is stopped
loses one bench; `--whole` adds TinyLlama with all of its 22 layers, once.
"""

import argparse
import csv
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_collider.eval.efficiency import DTYPES, KEEP_MEMORY, MIN_ROUNDS, bench, table

HERE = Path(__file__).parent
ROWS, FIGURE = HERE / "efficiency.csv", HERE / "results" / "efficiency.png"
# shape, layers, T, B, kept fractions
GATE = [
    ("tinyllama", 8, 1024, 1, (0.6, 0.5, 0.3)),
    ("tinyllama", 4, 2048, 1, (0.8, 0.6, 0.5, 0.3)),
]
OTHERS = [
    ("qwen2.5", 4, 1024, 1, (0.6,)),
    ("phi1.5", 4, 1024, 1, (0.6,)),
    ("tinyllama", 4, 1024, 2, (0.6,)),
]
WHOLE = [("tinyllama", 22, 1024, 1, (0.6,))]
CASE = ("shape", "layers", "seq", "batch", "dtype", "device", "memory", "processor")
GROUP = (*CASE, "date", "commit")
Row = dict[str, Any]


def measure(
    dtypes: Iterable[str],
    device: str,
    repeat: int,
    whole: bool,
    rows: Path,
    keep_memory: bool = False,
) -> None:
    """Run the benches, `repeat` times all of them, and append a line for each kept fraction."""
    at = commit()  # before the first line, which makes the checkout differ from it
    for dtype in dtypes:
        cases = [*GATE, *(OTHERS if dtype == "bf16" else [])]
        for shape, layers, seq, batch, keeps in [*cases * repeat, *(WHOLE if whole else [])]:
            for result in bench(
                shape,
                layers,
                seq,
                batch,
                keeps,
                dtype,
                device,
                MIN_ROUNDS,
                keep_memory=keep_memory,
            ):
                print(table(result), flush=True)
                append(rows, flat(result, at))


def flat(result: dict[str, Any], at: str) -> Row:
    """A bench's result as one line of the table: quartiles apart, versions and machine as text."""
    row: Row = {}
    for name, value in result.items():
        if name.endswith("_iqr"):
            ratio = name.removesuffix("_iqr")
            row[f"{ratio}_low"], row[f"{ratio}_high"] = value
        elif name not in ("versions", "machine", "load_average"):
            row[name] = value
    row["load"] = round(result["load_average"][0], 2)
    row |= result["machine"]
    row["versions"] = " ".join(f"{name} {number}" for name, number in result["versions"].items())
    row["commit"] = at
    return row


def commit() -> str:
    """The checkout's commit, with a + where files differ from it; empty outside of one."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def append(path: Path, row: Row) -> None:
    """Add a line; the first one brings the heads of the columns.

    Raises ValueError when the file has other columns.
    """
    new = not path.exists()
    if not new and list(row) != (heads := path.read_text().splitlines()[0].split(",")):
        different = sorted(set(row) ^ set(heads)) or ["their order"]
        raise ValueError(f"{path} has other columns ({', '.join(different)}): move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path) -> dict[tuple[str, ...], list[Row]]:
    """The lines of a file in groups that can be compared, by kept fraction."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return {key: sorted(rows, key=lambda row: float(row["keep"])) for key, rows in groups.items()}


def named(key: tuple[str, ...]) -> str:
    """A case in words, from its values in the order of CASE."""
    shape, layers, seq, batch, dtype, _, memory = key[: CASE.index("processor")]
    kept = ", memory kept" if memory == "kept" else ""
    return f"{shape}, {layers} x {seq}, B={batch}, {dtype}{kept}"


def latest(groups: dict[tuple[str, ...], list[Row]]) -> dict[tuple[str, ...], list[Row]]:
    """The last group of each case: what was measured at its newest commit."""
    return {key[: len(CASE)]: rows for key, rows in groups.items()}


def linearity(rows: list[Row]) -> tuple[float, float] | None:
    """How linear the filtered backward is in the kept rows, the dense one among its points.

    Returns:
        What zero kept rows would cost as a share of the dense backward, and R^2 of the line;
        None with fewer than two fractions.
    """
    points = [(float(r["keep"]), float(r["backward_vs_dense"])) for r in rows]
    if len({keep for keep, _ in points}) < 2:
        return None
    keeps, ratios = zip(*points, (1.0, 1.0), strict=True)
    line = statistics.linear_regression(keeps, ratios)
    return line.intercept, statistics.correlation(keeps, ratios) ** 2


def report(path: Path, figure: Path) -> str:
    """A Markdown table of the lines, with a fit for each group, and a figure."""
    names = ("backward_vs_hf", "step_vs_hf", "dense_vs_hf")
    lines = [
        "| | keep | backward / HF | step / HF | dense / HF | backward / dense (over its floor) | "
        "step / dense (over its floor) | memory / HF | selection |",
        "|" + " --- |" * 9,
    ]
    groups = read(path)
    for key, rows in groups.items():
        for r in rows:
            cells = [
                f"{float(r[n]):.3f} ({float(r[n + '_low']):.3f} to {float(r[n + '_high']):.3f})"
                for n in names
            ]
            for part in ("backward", "step"):
                ratio, floor = float(r[f"{part}_vs_dense"]), float(r[f"floor_{part}"])
                cells.append(f"{ratio:.3f} ({ratio / floor:.2f})")
            cells += [f"{float(r['peak_memory_ratio']):.3f}", f"{float(r['selection_share']):.2%}"]
            lines.append(f"| {named(key)} | {r['keep']} | " + " | ".join(cells) + " |")
    for key, rows in groups.items():
        fit = linearity(rows)
        if fit is not None:
            lines.append(
                f"\n{named(key)} ({key[-1]}): no kept rows would cost {fit[0]:.3f} of the dense "
                f"backward, R^2 {fit[1]:.4f}."
            )
    draw(groups, figure)
    return "\n".join(lines)


def draw(groups: dict[tuple[str, ...], list[Row]], path: Path) -> None:
    """Each case's last ratios to the dense step against the kept fraction, floors as lines."""
    cases = latest(groups)
    figure = Figure((7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, part in zip(figure.subplots(1, 2), ("backward", "step"), strict=True):
        for number, (key, rows) in enumerate(cases.items()):
            keeps = [float(r["keep"]) for r in rows]
            ratios = [float(r[f"{part}_vs_dense"]) for r in rows]
            lows = [y - float(r[f"{part}_vs_dense_low"]) for y, r in zip(ratios, rows, strict=True)]
            highs = [
                float(r[f"{part}_vs_dense_high"]) - y for y, r in zip(ratios, rows, strict=True)
            ]
            color = colormaps["tab20"](number % 20)
            beside = [keep + 0.003 * (number - len(cases) / 2) for keep in keeps]  # not on top
            axes.errorbar(
                beside, ratios, (lows, highs), fmt="o", ms=3, color=color, label=named(key)
            )
            floors = [float(r[f"floor_{part}"]) for r in rows]
            axes.plot([*keeps, 1.0], [*floors, 1.0], linewidth=0.8, color=color)
        axes.set(title=f"{part}: ours filtered / ours dense, lines: FLOP floor", xlabel="kept")
        axes.title.set_size(8)
        axes.grid(color="#dddddd", linewidth=0.5)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=6, frameon=False)
    figure.savefig(path, dpi=200)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="The benches that the results quote")
    # Not by choices=, which would refuse an empty list.
    parser.add_argument("dtypes", nargs="*", help=f"which are measured: {', '.join(DTYPES)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=1, help="times each is measured")
    parser.add_argument("--whole", action="store_true", help="all 22 layers of TinyLlama, too")
    parser.add_argument("--keep-memory", action="store_true", help=KEEP_MEMORY)
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV, a line a bench")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="PNG")
    given = parser.parse_args(arguments)
    if not set(given.dtypes) <= set(DTYPES):
        parser.error(f"dtypes are among {', '.join(DTYPES)}, got {' '.join(given.dtypes)}")
    if not given.dtypes and not given.rows.is_file():
        parser.error(f"nothing was measured yet (no {given.rows}): say which of bf16 and fp32")
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    measure(given.dtypes, given.device, given.repeat, given.whole, given.rows, given.keep_memory)
    print(report(given.rows, given.figure))


if __name__ == "__main__":
    main()
