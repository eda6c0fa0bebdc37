"""What the server knows, its checkpoint, and its log.

    RUN/server.ckpt      ServerState, the algorithm's state, and how long the log was
    RUN/metrics.jsonl    one row an update, a refusal, an evaluation of the global model

A checkpoint is written whole or not at all. Rows that were logged behind the newest one are dropped
on resume, as the updates they tell of are: those clients' work is done again.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_collider.federated.algorithms import Algorithm, Weights


@dataclass
class ServerState:
    """The global model and the counts of a run.

    Attributes:
        weights: of the global model.
        version: t, aggregations so far.
        updates: clients' updates taken in so far.
        seconds: on the server's clock, summed over restarts.
        next_job: by node id, the number of its next job.
        counted: by node id, the number of its last job whose update was taken in.
        work: passes of one example that clients have reported, in training.
        correction_work: the same, in corrections.
    """

    weights: Weights
    version: int = 0
    updates: int = 0
    seconds: float = 0.0
    next_job: dict[int, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    work: float = 0.0
    correction_work: float = 0.0


class Journal:
    """Rows of numbers, appended to a JSON-lines file, or kept in memory only.

    Args:
        path: of the file; None: no file.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.is_file():
            self.rows = list(read_rows(path))

    def write(self, event: str, **values: Any) -> None:
        """Append a row."""
        row = {"event": event, **values}
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def of(self, event: str) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [row for row in self.rows if row["event"] == event]

    def cut(self, rows: int) -> None:
        """Drop all rows behind the first so many."""
        self.rows = self.rows[:rows]
        if self.path is not None:
            draft = self.path.with_name(self.path.name + ".part")
            draft.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            os.replace(draft, self.path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that a crash cut short is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def save_checkpoint(path: Path, state: ServerState, algorithm: Algorithm, rows: int) -> None:
    """Write a checkpoint; `rows` is the length of the journal."""
    draft = path.with_name(path.name + ".part")
    saved = {"state": dataclasses.asdict(state), "algorithm": algorithm.state_dict(), "rows": rows}
    with draft.open("wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def load_checkpoint(path: Path, algorithm: Algorithm, journal: Journal) -> ServerState:
    """The state in a checkpoint; the algorithm and the journal are set back to it."""
    saved = torch.load(path, weights_only=True)
    algorithm.load_state_dict(saved["algorithm"])
    journal.cut(saved["rows"])
    return ServerState(**saved["state"])
