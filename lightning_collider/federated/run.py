"""`collider federate RECIPE`: one federated run on simulated clients, in a folder of its own.

    RUN/recipe.yaml      the resolved recipe this folder belongs to
    RUN/metrics.jsonl    one row an update, a refusal, an evaluation; see state.py
    RUN/server.ckpt      the newest checkpoint: the same command goes on from it
    RUN/model.pt         the global weights at the end
    RUN/results.json     what came out; where it is, the run is finished
    RUN/curves.png       the metric against simulated time and against updates

Clients have no checkpoints: a run that goes on gives all of them new work, as when a server starts
again in the field. Its numbers are those of such a run, not of one that was never stopped.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from lightning_collider.federated.client import Client
from lightning_collider.federated.clock import Clock
from lightning_collider.federated.jobs import Mailbox
from lightning_collider.federated.messages import CORRECT
from lightning_collider.federated.plots import plot_curves
from lightning_collider.federated.server import Server
from lightning_collider.federated.settings import FederatedRecipe, make_algorithm
from lightning_collider.federated.simulator import App, Simulator
from lightning_collider.federated.state import Journal, ServerState
from lightning_collider.federated.tasks import Task, make_task
from lightning_collider.training.files import read_json, write_json
from lightning_collider.training.folder import claimed

log = logging.getLogger(__name__)


Connect = Callable[[Task], tuple[Mailbox, Clock]]


def run_federated(recipe: FederatedRecipe, connect: Connect | None = None) -> dict[str, Any]:
    """Do what is left of a run, and return its results.

    Args:
        recipe: what is run.
        connect: gives the grid and the clock of the clients; None: the simulator.

    Raises:
        FileExistsError: the folder is not this recipe's.
        RuntimeError: the folder is in use, or the clients stay away.
    """
    with claimed(recipe) as folder:
        finished = (folder / "results.json").is_file()
        if not finished:
            journal = Journal(folder / "metrics.jsonl")
            state = train(recipe, journal, folder / "server.ckpt", connect, say=print)
            torch.save(state.weights, folder / "model.pt")
            plot_curves({recipe.algorithm: journal}, folder / "curves.png")
            write_json(folder / "results.json", summary(recipe, journal))
        results = read_json(folder / "results.json")
        for key, value in results.items():
            print(f"{key}: {value}")
        if finished:
            print(
                f"{folder} was finished before. To make another run, choose its folder: out=OTHER"
            )
    return results


def train(
    recipe: FederatedRecipe,
    journal: Journal,
    checkpoint: Path | None = None,
    connect: Connect | None = None,
    say: Callable[[str], Any] = log.info,
) -> ServerState:
    """Run a recipe's server; its rows go to the journal. Arguments as in `run_federated`."""
    task = make_task(recipe.task, recipe.seed)
    grid, clock = connect(task) if connect else _simulated(task, recipe)
    algorithm = make_algorithm(recipe.algorithm, recipe.algorithms.get(recipe.algorithm, {}))
    return Server(grid, clock, task, algorithm, recipe.server, journal, checkpoint, say).run()


def _simulated(task: Task, recipe: FederatedRecipe) -> tuple[Mailbox, Clock]:
    app = client_function(task, recipe)
    simulator = Simulator(app, task.clients, recipe.simulation, recipe.seed)
    return simulator, simulator


def client_function(task: Task, recipe: FederatedRecipe) -> App:
    """What answers a message, as a Flower ClientApp does."""
    client = Client(task, recipe.client)

    def answer(message: Message, context: Context) -> Message:
        correct = message.metadata.message_type == CORRECT
        return client.correct(message, context) if correct else client.train(message, context)

    return answer


def summary(recipe: FederatedRecipe, journal: Journal) -> dict[str, Any]:
    """The numbers of a finished run."""
    last = journal.of("evaluation")[-1]
    updates = journal.of("update")
    return {
        "name": recipe.name,
        "algorithm": recipe.algorithm,
        **{key: value for key, value in last.items() if key != "event"},
        "mean_delay": sum(row["delay"] for row in updates) / max(1, len(updates)),
        "refused": len(journal.of("refused")),
        "lost": len(journal.of("lost")),
    }
