"""One self-contained HTML page of several runs: page.html with page.css, page.js and numbers."""

import dataclasses
import html
import json
import math
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from string import Template
from typing import Any

from lightning_collider.report.read import Arm, Run
from lightning_collider.report.tables import (
    LOWER_IS_BETTER,
    Table,
    baseline,
    bench_table,
    floor_of,
    precision,
    scores_table,
    selection_table,
    speed_table,
    time_ratio,
)
from lightning_collider.training.tokens import END_OF_TEXT

FEW = 3  # up to so many runs are the columns of a table, more are its rows


def to_page(runs: list[Run], benches: list[dict[str, Any]]) -> str:
    """The page as text."""
    arms = [arm for run in runs for arm in run.arms]
    gpu = next((r.about["machine"].get("gpu") for r in runs if "machine" in r.about), None)
    tables = [scores_table(arms), selection_table(arms), speed_table(arms, gpu)]
    names = {arm.name: number for number, arm in enumerate(arms)}
    parts = [table_html(turned(t, names), names) for t in tables if t is not None]
    parts += [table_html(bench_table(bench), {}) for bench in benches]
    source = files(__package__)
    title = ", ".join(dict.fromkeys(run.title for run in runs))
    return Template((source / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        subtitle=html.escape(_subtitle(arms)),
        tiles=_tiles(arms),
        tables="\n".join(parts),
        details="\n".join(_details(run) for run in runs),
        style=(source / "page.css").read_text(encoding="utf-8"),
        script=(source / "page.js").read_text(encoding="utf-8"),
        data=_embedded(
            {
                "arms": [arm.name for arm in arms],
                "charts": charts(arms),
                "samples": [_sample(arm) for arm in arms if arm.sample],
            }
        ),
    )


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _sample(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "end": END_OF_TEXT, **arm.sample}


def _subtitle(arms: list[Arm]) -> str:
    tokens = max((arm.tokens or 0 for arm in arms), default=0)
    unfinished = [arm.name for arm in arms if not arm.finished]
    text = f"{len(arms)} run{'s' * (len(arms) > 1)} of up to {tokens:,.0f} tokens"
    return text + (f"; not finished: {', '.join(unfinished)}" if unfinished else "")


# Curves


def charts(arms: list[Arm]) -> list[dict[str, Any]]:
    """What is drawn: title, percent, level (of chance), and series of an arm's number and points.

    A point is [input tokens, seconds, value].
    """
    found = [
        _chart("Training loss, all tokens", arms, _log("loss_all")),
        _chart("Training loss, kept tokens", arms, _log("loss_kept")),
        _chart("Kept share of tokens", arms, _log("kept_share"), percent=True),
    ]
    sources = next((list(arm.heldout[0]["sources"]) for arm in arms if arm.heldout), [])
    found += [
        _chart(f"Held-out {name}, bits per byte", arms, partial(bits_points, source=name))
        for name in sources
    ]
    kept = _chart("Kept tokens that are not noise", arms, _precision_points, percent=True)
    looked = next((a for a in arms if a.heldout and a.selector != "none"), None)
    if looked is not None:
        kept["level"] = precision(looked.heldout[-1]["sources"])["kept_chance"]
    return [chart for chart in (*found, kept) if chart["series"]]


Points = list[list[float]]


def _chart(
    title: str, arms: list[Arm], points: Callable[[Arm], Points], percent: bool = False
) -> dict[str, Any]:
    drawn = [(number, points(arm)) for number, arm in enumerate(arms)]
    return {
        "title": title,
        "percent": percent,
        "level": None,
        "series": [{"arm": n, "points": p} for n, p in drawn if len(p) > 1],  # one is no curve
    }


def _log(key: str) -> Callable[[Arm], Points]:
    return lambda arm: [[r["input_tokens"], r["seconds"], r[key]] for r in arm.log if key in r]


def bits_points(arm: Arm, source: str) -> Points:
    """Bits per byte of held-out text of a source along a run."""
    points = []
    for row in arm.heldout:
        counts = row["sources"][source]
        if counts["bytes"]:
            bits = counts["nats"] / math.log(2) / counts["bytes"]
            points.append([row["input_tokens"], row["seconds"], bits])
    return points


def _precision_points(arm: Arm) -> Points:
    if arm.selector == "none":
        return []
    found = [(row, precision(row["sources"])["kept"]) for row in arm.heldout]
    return [[row["input_tokens"], row["seconds"], value] for row, value in found]


# Tiles and tables


def _tiles(arms: list[Arm]) -> str:
    """A few large numbers: the first filtered run against the unfiltered one."""
    base = baseline(arms)
    other = next((a for a in arms if a.selector != "none"), None)
    if other is None or base is other:
        return ""
    tiles = []
    for task, score in list(other.scores.items())[:2]:
        if task in base.scores:
            change = score["value"] / base.scores[task]["value"] - 1
            good = "lower" if score["metric"] in LOWER_IS_BETTER else "higher"
            tiles.append((f"{task}, {good} is better", f"{change:+.1%}"))
    if other.log and base.log:
        kept = sum(r["kept_share"] for r in other.log) / len(other.log)
        ratio = time_ratio(other, base)
        tiles.append(("tokens in the backward", f"{kept:.0%}"))
        tiles.append((f"time of a step; floor {floor_of(other, base):.2f}", f"{ratio:.2f} x"))
    if other.memory and base.memory:
        ratio = other.memory["peak_bytes"] / base.memory["peak_bytes"]
        tiles.append(("peak memory of a step", f"{ratio:.2f} x"))
    inner = "".join(
        f'<div class="tile"><p class="value">{html.escape(value)}</p>'
        f'<p class="what">{html.escape(what)}</p></div>'
        for what, value in tiles
    )
    caption = f"{other.name} against {base.name}"
    return f'<p class="note">{html.escape(caption)}</p><div class="tiles">{inner}</div>'


def turned(table: Table, arms: dict[str, int]) -> Table:
    """The table with its rows as columns, where these are few arms."""
    if len(table.rows) > FEW or any(row[0] not in arms for row in table.rows):
        return table
    columns = [row[0] for row in table.rows]
    rows = [[name, *(row[i + 1] for row in table.rows)] for i, name in enumerate(table.columns)]
    return dataclasses.replace(table, columns=columns, rows=rows)


def table_html(table: Table, arms: dict[str, int]) -> str:
    """A section with the table; names of arms get the dot of their colour."""

    def cell(text: str, kind: str) -> str:
        dot = ""
        if text in arms:
            color = f"var(--series-{arms[text] % 6})"
            dot = f'<i class="dot" style="background:{color}"></i>'
        return f"<{kind}>{dot}{html.escape(text)}</{kind}>"

    head = "".join(cell(text, "th") for text in ["", *table.columns])
    body = "".join(
        f"<tr>{cell(row[0], 'th')}{''.join(cell(text, 'td') for text in row[1:])}</tr>"
        for row in table.rows
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return (
        f'<section><h2>{html.escape(table.title)}</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}</section>"
    )


def _details(run: Run) -> str:
    """When, where, with what, and the recipe."""
    machine, versions = run.about.get("machine", {}), run.about.get("versions", {})
    known = [run.about.get("date"), machine.get("system"), machine.get("gpu")]
    known += [f"{machine['cores']} cores"] if "cores" in machine else []
    known += [f"{name} {number}" for name, number in versions.items()]
    text = ", ".join(str(part) for part in known if part)
    return (
        f'<p class="note">{html.escape(f"{run.title}: {text}" if text else run.title)}</p>'
        f"<details><summary>Recipe of {html.escape(run.title)}</summary>"
        f"<pre>{html.escape(run.recipe)}</pre></details>"
    )
