"""The tables of a report: scores, what was kept, speed against the FLOP floor, a bench."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_collider.report.read import Arm
from lightning_collider.training.utilisation import peak_of

NOISE = "noise"  # the source whose tokens a selector should drop
NONE = "-"
LOWER_IS_BETTER = ("bits_per_byte", "word_perplexity", "byte_perplexity")


@dataclass(frozen=True)
class Table:
    """A table of text: the first cell of a row says what it is, the others belong to columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def baseline(arms: list[Arm]) -> Arm:
    """What the other arms are compared with: the first that is not filtered, or the first."""
    return next((arm for arm in arms if arm.selector == "none"), arms[0])


def scores_table(arms: list[Arm]) -> Table | None:
    """lm-eval's scores, one row an arm."""
    arms = [arm for arm in arms if arm.scores]
    if not arms:
        return None
    tasks = list(dict.fromkeys(task for arm in arms for task in arm.scores))
    arrows = {
        task: _arrow(next(a.scores[task] for a in arms if task in a.scores)) for task in tasks
    }
    rows = [[arm.name, *(score_text(arm.scores.get(task)) for task in tasks)] for arm in arms]
    return Table(
        "Scores",
        [f"{task} {arrows[task]}" for task in tasks],
        rows,
        [
            "lm-eval on text that was not trained on, ± one standard error. ↓: lower is better, "
            "in bits per byte; ↑: higher is better."
        ],
    )


def _arrow(score: dict[str, Any]) -> str:
    return "↓" if score["metric"] in LOWER_IS_BETTER else "↑"


def score_text(score: dict[str, Any] | None, digits: int = 3) -> str:
    """A score with its standard error, where it has one."""
    if score is None:
        return NONE
    error = score["stderr"]
    return f"{score['value']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def precision(counts: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How well a selector tells noise, from a row of heldout.jsonl; nan where nothing is counted.

    Returns:
        "kept": share of kept targets that are not noise, "dropped": share of dropped targets that
        are, each with its chance level, "kept_chance" and "dropped_chance"; and for each source the
        share of its targets that is kept, "share_SOURCE".
    """
    targets = {name: c["targets"] for name, c in counts.items()}
    kept = {name: c["kept"] for name, c in counts.items()}
    everything, all_kept = sum(targets.values()), sum(kept.values())
    noise, kept_noise = targets.get(NOISE, 0), kept.get(NOISE, 0)
    return {
        "kept": _share(all_kept - kept_noise, all_kept),
        "kept_chance": _share(everything - noise, everything),
        "dropped": _share(noise - kept_noise, everything - all_kept),
        "dropped_chance": _share(noise, everything),
        **{f"share_{name}": _share(kept[name], targets[name]) for name in targets},
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def selection_table(arms: list[Arm]) -> Table | None:
    """What the selectors keep of held-out text at the last look, one row an arm."""
    chosen = [(a, a.heldout[-1]) for a in arms if a.heldout and a.selector != "none"]
    if not chosen:
        return None
    found = [precision(row["sources"]) for _, row in chosen]
    sources = [name for name in chosen[0][1]["sources"]]
    rows = [
        [
            arm.name,
            *(f"{p[f'share_{name}']:.0%}" for name in sources),
            f"{p['kept']:.3f} ({p['kept_chance']:.3f})",
            f"{p['dropped']:.3f} ({p['dropped_chance']:.3f})",
        ]
        for (arm, _), p in zip(chosen, found, strict=True)
    ]
    return Table(
        "What is kept",
        [*(f"{name} kept" for name in sources), "kept precision", "dropped precision"],
        rows,
        [
            "On held-out text mixed as the training text is, at the last step. Kept precision is "
            "the share of kept tokens that are not noise, dropped precision the share of dropped "
            "tokens that are; the level of chance in brackets."
        ],
    )


def speed_table(arms: list[Arm], gpu: str | None = None) -> Table | None:
    """Times, FLOP floors and memory, one row an arm."""
    arms = [arm for arm in arms if arm.log]
    if not arms:
        return None
    base = baseline(arms)
    peaks = [_peak(arm, gpu) for arm in arms]
    known = [p for p in peaks if p is not None]
    if len(known) < len(arms):  # a column has one unit
        peaks, known = [None] * len(arms), []
    rows = [[a.name, *_speed_row(a, base, p)] for a, p in zip(arms, peaks, strict=True)]
    units = "MFU" if known else "GFLOP/s"
    notes = [
        "Kept rows are those that stay in the backward. Executed FLOPs are computed from shapes "
        "and kept rows, and contain a live reference's forward; dense-equivalent ones are those of "
        "an unfiltered step. The floor is the FLOPs of a step (forward, backward, and the forward "
        f"of a live reference of the same shape) over those of {base.name}'s; the optimizer is in "
        "the time and not in the floor.",
    ]
    parts = " / ".join(f"{peak / 1e12:,.0f}" for peak in sorted(set(known)))
    notes += [f"MFU: part of the dense peak, {parts} TFLOP/s."] if known else []
    kinds = {arm.memory.get("of") for arm in arms} - {None}
    notes += [f"Peak memory: {' / '.join(sorted(map(str, kinds)))}."] if kinds else []
    return Table(
        "Speed and memory",
        [
            "tokens/s",
            "kept rows/s",
            f"{units} executed",
            f"{units} dense-equivalent",
            f"time / {base.name}",
            "floor",
            "peak memory",
        ],
        rows,
        notes,
    )


def _peak(arm: Arm, gpu: str | None) -> float | None:
    """FLOP/s of all devices of a run; None where they are not known."""
    one = None if gpu is None else peak_of(gpu, arm.precision)
    return None if one is None else one * arm.devices


def _speed_row(arm: Arm, base: Arm, peak: float | None) -> list[str]:
    assert arm.tokens and arm.positions and arm.seconds
    speed = arm.positions / arm.seconds
    dense = (arm.flops.forward + arm.flops.dense_backward) / arm.length * speed
    executed = step_cost(arm) / arm.length * speed
    kept = sum(r["kept_share"] for r in arm.log) / len(arm.log)
    memory = arm.memory.get("peak_bytes")
    return [
        f"{arm.tokens / arm.seconds:,.0f}",
        f"{speed * kept:,.0f}",
        *(f"{x / peak:.1%}" if peak else f"{x / 1e9:,.1f}" for x in (executed, dense)),
        f"{time_ratio(arm, base):.3f}",
        f"{floor_of(arm, base):.3f}",
        NONE if memory is None else _bytes(memory),
    ]


def step_cost(arm: Arm) -> int:
    """FLOPs of a step on one sequence, with a live reference's forward."""
    flops = arm.flops
    backward = flops.dense_backward if arm.selector == "none" else flops.filtered_backward
    return flops.forward * (1 + arm.live_reference) + backward


def time_ratio(arm: Arm, base: Arm) -> float:
    """Seconds of a position of a run over those of another's."""
    assert arm.positions and arm.seconds and base.positions and base.seconds
    return (arm.seconds / arm.positions) / (base.seconds / base.positions)


def floor_of(arm: Arm, base: Arm) -> float:
    """FLOPs of a position of a run over those of another's: no time of it can be below."""
    return step_cost(arm) / arm.length / (step_cost(base) / base.length)


def _bytes(count: float) -> str:
    unit = "MiB" if count < 2**30 else "GiB"
    return f"{count / (2**20 if unit == 'MiB' else 2**30):,.1f} {unit}"


def bench_table(bench: dict[str, Any]) -> Table:
    """A bench of one step: ratios with quartiles and floors."""
    lines = {
        "backward_vs_hf": ("filtered / Hugging Face, backward", None),
        "step_vs_hf": ("filtered / Hugging Face, forward + backward", None),
        "backward_vs_dense": ("filtered / our dense, backward", "floor_backward"),
        "step_vs_dense": ("filtered / our dense, forward + backward", "floor_step"),
        "dense_vs_hf": ("our dense / Hugging Face, forward + backward", None),
    }
    rows = []
    for key, (text, floor) in lines.items():
        low, high = bench[f"{key}_iqr"]
        quartiles = f"{bench[key]:.3f} ({low:.3f} to {high:.3f})"
        rows.append([text, quartiles, NONE if floor is None else f"{bench[floor]:.3f}"])
    rows.append(["peak memory, filtered / Hugging Face", f"{bench['peak_memory_ratio']:.3f}", NONE])
    return Table(
        f"One step of {bench['shape']}, {bench['layers']} layers, keep {bench['keep']}",
        ["median (quartiles)", "FLOP floor"],
        rows,
        [
            f"{bench['batch']} x {bench['seq']} tokens, {bench['dtype']}, "
            f"{bench['machine']['processor']}, {bench['machine']['threads']} threads, "
            f"{bench['date']}."
        ],
    )
