"""The same server and client code on Flower's own runtimes."""

import pytest
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.server.superlink.fleet.vce.backend.backend import Backend

from lightning_collider.federated.app import write_app
from lightning_collider.federated.clock import WallClock
from lightning_collider.federated.flower import apps
from lightning_collider.federated.run import train
from lightning_collider.federated.state import Journal
from lightning_collider.training.config import to_yaml
from tests.federated.processes import deployment
from tests.federated.small import Federation, recipe, same_weights

# Flower's programs must not look for updates, or send usage data, out of a test.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name, value in {**QUIET, "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)


class InOrder:
    """A grid that hands replies over in a given order of parts of the data; early ones wait."""

    def __init__(self, grid, schedule):
        self.grid, self.schedule, self.kept = grid, list(schedule), []
        self.get_node_ids, self.push_messages = grid.get_node_ids, grid.push_messages

    def pull_messages(self, ids):
        kept = {reply.metadata.reply_to_message_id for reply in self.kept}
        asked = [i for i in ids if i not in kept]
        self.kept += self.grid.pull_messages(asked) if asked else []
        for reply in self.kept:
            assert not reply.has_error(), reply.error
            if self.schedule and reply.content["report"]["client"] == self.schedule[0]:
                del self.schedule[0]
                self.kept.remove(reply)
                return [reply]
        return []


def schedule_of(chosen):
    """Weights of a simulated run, and the parts of the data in the order of their replies."""
    federation, order = Federation(chosen), []
    take = federation.server._take

    def watch(reply):
        order.append(reply.content["report"]["client"])
        take(reply)

    federation.server._take = watch
    return federation.run().weights, order


def run_on_flower(chosen, order):
    """The same run on Flower's simulation engine, with replies taken in that order."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    _, client_app = apps(to_yaml(chosen))
    server_app, journal, found = ServerApp(), Journal(), {}

    @server_app.main()
    def main(grid, context):
        connect = lambda task: (InOrder(grid, order), WallClock())  # noqa: E731
        found.update(train(chosen, journal, connect=connect).weights)

    one_cpu = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1}}
    run_simulation(server_app, client_app, chosen.task.options["clients"], backend_config=one_cpu)
    return found, journal


class InThisProcess(Backend):
    """Runs client apps where the engine runs, in place of Ray's actors."""

    def __init__(self, config):
        self.app = None

    def build(self, app_fn):
        self.app = app_fn()

    @property
    def num_workers(self):
        return 1

    def is_worker_idle(self):
        return True

    def process_message(self, message, context):
        return self.app(message, context), context

    def terminate(self):
        pass


@pytest.mark.parametrize(
    "ray", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one process", "ray"]
)
def test_flower_gives_the_simulators_weights_for_the_same_arrivals(ray, monkeypatch):
    """To the bit: Flower's link, messages and Contexts, with and without its worker processes."""
    if not ray:
        monkeypatch.setattr(raybackend, "RayBackend", InThisProcess)
    chosen = recipe("fedadt", {"steps": 1}, simulation={"speed_sigma": 1.0})
    want, order = schedule_of(chosen)
    found, journal = run_on_flower(chosen, order)
    assert same_weights(found, want)
    rows = journal.of("update")
    assert len(rows) == 12 and any(row["corrected"] for row in rows)


@pytest.mark.slow
def test_superlink_and_three_supernodes(tmp_path):
    """Real processes on loopback; each message starts one that imports everything anew."""
    chosen = recipe(
        "fedadt",
        {"steps": 1},
        server={"max_updates": 6, "min_clients": 3, "job_timeout": 400.0, "patience": 400.0},
        client={"epochs": 8},
        task={"clients": 3},
    )
    simulated = Federation(chosen)
    simulated.run()
    chosen.out = str(tmp_path / "run")
    app = write_app(chosen, tmp_path / "app")
    with deployment(tmp_path / "flower", nodes=3) as flower:
        flower.submit(app)
        flower.wait_for(tmp_path / "run" / "results.json", seconds=900)
    journal = Journal(tmp_path / "run" / "metrics.jsonl")
    updates = journal.of("update")
    assert len(updates) == 6 and {row["part"] for row in updates} == {0, 1, 2}
    assert not journal.of("refused") and not journal.of("lost")
    accuracy, want = (j.of("evaluation")[-1]["accuracy"] for j in (journal, simulated.journal))
    assert want > 0.8 and abs(accuracy - want) < 0.1
