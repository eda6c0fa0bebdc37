"""`collider report`: the page of one run or of several, written where the first of them lies."""

import os
from pathlib import Path
from typing import Any

from lightning_collider.eval.output import check_output
from lightning_collider.report.page import to_page
from lightning_collider.report.read import read_bench, read_runs
from lightning_collider.training.files import write_text

NAME = "report.html"


def write_report(
    folders: list[Path], out: Path | None = None, benches: list[Path] | None = None
) -> Path:
    """Write the page and return its path.

    Args:
        folders: of runs, finished or not.
        out: the file; by default report.html in the run's folder, or in the one that several have
            in common.
        benches: files of `collider bench --json`, shown beside.

    Raises FileNotFoundError for a folder that is no run or a bench that is not there, ValueError
    for a file that is no bench, FileExistsError where `out` is there and is no page.
    """
    if out is not None:
        check_output(out, replaces=".html")
    shown: list[dict[str, Any]] = [read_bench(path) for path in benches or []]
    page = to_page(read_runs(folders), shown)
    if out is None:
        together = os.path.commonpath([folder.resolve() for folder in folders])
        out = folders[0] / NAME if len(folders) == 1 else Path(together) / NAME
    write_text(out, page)
    return out
