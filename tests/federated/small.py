"""A tiny federation for tests: digits on a few clients, and the parts of a simulated run."""

from dataclasses import replace

import torch

from lightning_collider.federated.digits import Digits
from lightning_collider.federated.run import client_function
from lightning_collider.federated.server import Server
from lightning_collider.federated.settings import (
    ClientConfig,
    FederatedRecipe,
    ServerConfig,
    SimulationConfig,
    TaskConfig,
    make_algorithm,
)
from lightning_collider.federated.simulator import Simulator
from lightning_collider.federated.state import Journal

OPTIONS = {"clients": 4, "dirichlet": 10.0, "batch_size": 64, "learning_rate": 0.3}


def recipe(algorithm="fedasync", options=None, server=None, simulation=None, client=None, task=None):
    """A recipe of 4 fast clients and 12 updates; each argument changes some of its keys."""
    plain_server = ServerConfig(
        max_updates=12,
        evaluate_every=4,
        checkpoint_every=1,
        min_clients=1,
        job_timeout=1e6,
        patience=50.0,
        max_refusals=3,
    )
    plain_simulation = SimulationConfig(
        examples_per_second=100.0,
        speed_sigma=0.5,
        jitter_sigma=0.1,
        latency=0.0,
        dropout=0.0,
        absence=30.0,
        late_share=0.0,
        late_by=0.0,
    )
    return FederatedRecipe(
        name="small",
        out="unused",
        seed=3,
        task=TaskConfig("digits", {**OPTIONS, **(task or {})}),
        client=replace(ClientConfig(epochs=1, keep_optimizer=False), **(client or {})),
        algorithm=algorithm,
        algorithms={algorithm: options or {}},
        server=replace(plain_server, **(server or {})),
        simulation=replace(plain_simulation, **(simulation or {})),
    )


class Federation:
    """A simulated federation whose clients' answers a test can change.

    `app(message, context)` answers in place of the client; by default it is the client.
    """

    def __init__(self, chosen, change=None, journal=None, checkpoint=None):
        self.recipe = chosen
        self.task = Digits(seed=chosen.seed, **chosen.task.options)
        honest = client_function(self.task, chosen)
        app = honest if change is None else lambda m, c: change(m, c, honest(m, c))
        self.simulator = Simulator(app, self.task.clients, chosen.simulation, chosen.seed)
        self.journal = journal or Journal()
        self.start_server(checkpoint)

    def start_server(self, checkpoint=None, grid=None):
        """A new server on the same clients."""
        chosen = self.recipe
        algorithm = make_algorithm(chosen.algorithm, chosen.algorithms[chosen.algorithm])
        self.server = Server(
            grid or self.simulator,
            self.simulator,
            self.task,
            algorithm,
            chosen.server,
            self.journal,
            checkpoint,
        )

    def run(self):
        return self.server.run()


def same_weights(a, b):
    """Whether two dicts of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
