"""The numbers of the utility runs as tables with confidence intervals.

An interval is Student's 95 % one over seeds, of the difference to the regular run of the same seed.
Where one seed was run there is none, and the cell says so.
"""

import math
import statistics
from pathlib import Path
from typing import Any

from lightning_collider.report.page import bits_points
from lightning_collider.report.read import Run
from lightning_collider.report.tables import precision, score_text
from lightning_collider.training.files import read_json
from lightning_collider.training.markdown import markdown_table

BASE = "regular"
EVERY_SEED = (BASE, "filtered", "random", "top_loss")  # the other arms: the first seed only
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile, by number of seeds
PRECISIONS = {"bf16-mixed": "bfloat16 matrices", "32-true": "float32 (no fast bfloat16 here)"}
Number = dict[str, Any]


def small_numbers(run: Run, folder: Path) -> list[Number]:
    """What the runs of one seed came to, one dict an arm."""
    seed = read_json(folder / "results.json")["recipe"]["seed"]
    # Arms of one seed alone would give that seed another budget than the others have.
    budget = min(arm.heldout[-1]["seconds"] for arm in run.arms if arm.name in EVERY_SEED)
    numbers = []
    for arm in run.arms:
        last = arm.heldout[-1]
        chosen = precision(last["sources"]) if arm.selector != "none" else {}
        numbers.append(
            {
                "seed": seed,
                "arm": arm.name,
                "keep": arm.keep,
                "tokens": last["input_tokens"],
                "seconds": last["seconds"],
                "scores": arm.scores,
                "bits": arm.scores["heldout_bits"]["value"],
                "curve_bits": bits_points(arm, "target")[-1][2],
                "bits_at_time": at_time(bits_points(arm, "target"), budget),
                "budget_seconds": budget,
                **chosen,
            }
        )
    return numbers


def at_time(points: list[list[float]], seconds: float) -> float:
    """Value of a curve of [tokens, seconds, value] at a time, by straight lines between points."""
    before = points[0]
    for point in points:
        if point[1] >= seconds:
            span = point[1] - before[1]
            part = (seconds - before[1]) / span if span else 1.0
            return before[2] + part * (point[2] - before[2])
        before = point
    return before[2]


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half of the 95 % interval, None for a single value."""
    if len(values) < 2:
        return values[0], None
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def with_interval(values: list[float], form: str = ".3f", sign: bool = False) -> str:
    """Mean ± half interval."""
    mean, half = interval(values)
    text = format(mean, f"{'+' if sign else ''}{form}")
    return f"{text} (one seed)" if half is None else f"{text} ± {format(half, form)}"


def to_markdown(results: dict[str, Any]) -> str:
    """All tables with what they need to be read."""
    parts = []
    if results["small"]:
        parts += [equal_tokens(results["small"]), equal_time(results["small"])]
        parts += [selection(results["small"])]
    if results["smollm2"]:
        parts.append(smollm2(results["smollm2"]))
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts.append(f"{results['date']}, {results['machine']}, {versions}")
    return "\n\n".join(parts) + "\n"


def by_arm(numbers: list[Number]) -> dict[str, list[Number]]:
    """Numbers of each arm, seed by seed."""
    arms: dict[str, list[Number]] = {}
    for number in numbers:
        arms.setdefault(number["arm"], []).append(number)
    return arms


def differences(numbers: list[Number], key: str) -> dict[str, list[float]]:
    """Arm -> its value less the regular run's of the same seed."""
    base = {n["seed"]: n[key] for n in numbers if n["arm"] == BASE}
    return {
        arm: [n[key] - base[n["seed"]] for n in found] for arm, found in by_arm(numbers).items()
    }


def equal_tokens(numbers: list[Number]) -> str:
    """Scores after the same tokens."""
    gaps = differences(numbers, "bits")
    tasks = [task for task in numbers[0]["scores"] if task != "heldout_bits"]
    head = ["arm", "keep", "target bits/byte", "less regular's", "seeds better", *tasks]
    rows = [head]
    for arm, found in by_arm(numbers).items():
        better = "" if arm == BASE else f"{sum(gap < 0 for gap in gaps[arm])} of {len(found)}"
        scores = [with_interval([n["scores"][task]["value"] for n in found]) for task in tasks]
        gap = "" if arm == BASE else with_interval(gaps[arm], sign=True)
        bits = with_interval([n["bits"] for n in found])
        rows.append([arm, f"{found[0]['keep']:.1f}", bits, gap, better, *scores])
    tokens = {n["tokens"] for n in numbers}
    text = " and ".join(f"{t:,.0f}" for t in sorted(tokens))
    return (
        f"### At equal tokens: {text} input tokens each\n\n{markdown_table(rows)}\n\n"
        "lm-eval on held-out text, document by document. ±: 95 % interval over seeds, in the "
        "fourth column (less regular's) of the difference within a seed."
    )


def equal_time(numbers: list[Number]) -> str:
    """Target bits when the quickest run of a seed was done, and at the end of each run."""
    gaps = differences(numbers, "bits_at_time")
    head = ["arm", "target on packed held-out batches, bits/byte", "less regular's"]
    rows = [[*head, "the same at the end", "seconds of all its steps"]]
    for arm, found in by_arm(numbers).items():
        gap = "" if arm == BASE else with_interval(gaps[arm], sign=True)
        bits, end = (with_interval([n[k] for n in found]) for k in ("bits_at_time", "curve_bits"))
        rows.append([arm, bits, gap, end, with_interval([n["seconds"] for n in found], ".0f")])
    budgets = ", ".join(f"{n['budget_seconds']:.0f}" for n in numbers if n["arm"] == BASE)
    return (
        f"### At equal wall-clock: when the quickest run of a seed was done ({budgets} s)\n\n"
        f"{markdown_table(rows)}\n\n"
        f"The quickest of {', '.join(EVERY_SEED)}, which every seed has; an arm that was done "
        "before is read at its end. From the timed curves on packed held-out batches, cut into "
        "sequences of the training length: not lm-eval's value above, whose documents are whole. "
        "By straight lines between looks, on the same learning-rate schedule: a slower run is read "
        "before its rate has come down. Seconds of training, with a live reference's forward, "
        "without the training of the reference and without the forward that stores losses."
    )


def selection(numbers: list[Number]) -> str:
    """What the selectors keep of held-out text."""
    rows = [["arm", "kept precision", "chance", "dropped precision", "chance"]]
    rows[0] += ["target kept", "general kept", "noise kept"]
    for arm, found in by_arm([n for n in numbers if "kept" in n]).items():
        cells = [with_interval([n["kept"] for n in found]), f"{found[0]['kept_chance']:.3f}"]
        cells += [with_interval([n["dropped"] for n in found]), f"{found[0]['dropped_chance']:.3f}"]
        sources = ("target", "general", "noise")
        cells += [with_interval([n[f"share_{s}"] for n in found], ".2f") for s in sources]
        rows.append([arm, *cells])
    return (
        f"### What is kept, on held-out batches at the last step\n\n{markdown_table(rows)}\n\n"
        "Kept precision: share of kept tokens that are not noise. Dropped precision: share of "
        "dropped tokens that are noise."
    )


def smollm2(results: dict[str, Any]) -> str:
    """SmolLM2-135M on GSM8K beside WikiText."""
    rows = [["run", "tokens", "seconds", "GSM8K test bits/byte", "BLiMP accuracy"]]
    for name, found in results["runs"].items():
        count, seconds = found.get("tokens", 0), found.get("seconds", 0)
        scores = [score_text(found["scores"][t], 4) for t in ("gsm8k_text", "blimp_pairs")]
        rows.append([name, f"{count:,.0f}", f"{seconds:,.0f}", *scores])
    kind = " and ".join(PRECISIONS[name] for name in results["precisions"])
    return (
        f"### SmolLM2-135M, {kind}, one seed\n\n{markdown_table(rows)}\n\n"
        "Kept: 0.6. ±: one standard error of lm-eval's over items."
    )
