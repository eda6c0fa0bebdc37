"""The recipe as a pair of Flower apps: for its simulation engine, or SuperLink and SuperNodes.

Flower starts a process for an app when it needs one, so nothing here outlives a message but the
task, which is made from the recipe once a process.
"""

import functools

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig, OmegaConf

from lightning_collider.federated.client import Client
from lightning_collider.federated.clock import WallClock
from lightning_collider.federated.messages import CORRECT
from lightning_collider.federated.run import run_federated
from lightning_collider.federated.settings import FederatedRecipe
from lightning_collider.federated.tasks import make_task
from lightning_collider.training.schema import to_object


def apps(recipe: str) -> tuple[ServerApp, ClientApp]:
    """Server and client app of a resolved recipe, as YAML text.

    A client's part of the data is its node's `partition-id`, which the simulation engine gives, and
    which a SuperNode is given by --node-config 'partition-id=0'.
    """
    server_app, client_app = ServerApp(), ClientApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        run_federated(_parsed(recipe), lambda task: (grid, WallClock()))

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        return _client(recipe).train(message, context)

    @client_app.train(CORRECT.partition(".")[2])
    def correct(message: Message, context: Context) -> Message:
        return _client(recipe).correct(message, context)

    return server_app, client_app


@functools.lru_cache(maxsize=1)
def _client(recipe: str) -> Client:
    parsed = _parsed(recipe)
    return Client(make_task(parsed.task, parsed.seed), parsed.client)


def _parsed(recipe: str) -> FederatedRecipe:
    given = OmegaConf.create(recipe)
    assert isinstance(given, DictConfig)
    return to_object(FederatedRecipe, given, "recipe.yaml")
