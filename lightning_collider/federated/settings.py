"""The keys of a recipe with `kind: federated`: the task, the algorithms, server and clients."""

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from lightning_collider.federated.algorithms import ALGORITHMS, Algorithm


@dataclass
class TaskConfig:
    name: str = MISSING  # digits, code, or package.module:Class of your own
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the task's class


@dataclass
class ClientConfig:
    epochs: int = MISSING  # E, passes over the local data between two updates
    keep_optimizer: bool = MISSING  # carry the optimizer's state from one update to the next


@dataclass
class ServerConfig:
    max_updates: int | None = None  # stop after so many updates of clients
    max_seconds: float | None = None  # stop after so many seconds; the first of both limits counts
    evaluate_every: int = MISSING  # updates between two evaluations of the global model
    checkpoint_every: int = MISSING  # updates between two checkpoints of the server
    min_clients: int = MISSING  # clients that must be there before the first gets work
    job_timeout: float = MISSING  # seconds after which a client that has not replied is given up
    patience: float = MISSING  # seconds without any client after which the run fails
    max_delay: int | None = None  # refuse updates with a larger delay; null: weight them all
    max_refusals: int = MISSING  # replies refused in a row after which a client gets no more work


@dataclass
class SimulationConfig:
    examples_per_second: float = MISSING  # median speed of clients in training, on the simulated clock
    speed_sigma: float = MISSING  # standard deviation of the logarithm of clients' speeds
    jitter_sigma: float = MISSING  # the same for one job of a client
    latency: float = MISSING  # simulated seconds of one message, either way
    dropout: float = MISSING  # probability that a client dies in a job
    absence: float = MISSING  # simulated seconds until a dead client is back
    late_share: float = MISSING  # part of the clients that join late
    late_by: float = MISSING  # simulated seconds within which they join, uniformly


@dataclass
class FederatedRecipe:
    kind: str = "federated"  # tells this recipe from one training run
    name: str = MISSING  # what the run is called
    out: str = MISSING  # folder of the run
    seed: int = MISSING  # of initial weights, data split, order of batches and simulated clients
    task: TaskConfig = MISSING
    client: ClientConfig = MISSING
    algorithm: str = MISSING  # one of the names below
    algorithms: dict[str, dict[str, Any]] = MISSING  # keyword arguments of each algorithm's class
    server: ServerConfig = MISSING
    simulation: SimulationConfig = MISSING


def make_algorithm(name: str, options: dict[str, Any]) -> Algorithm:
    """An algorithm by name and keyword arguments.

    Raises:
        ValueError: an unknown name or argument, or one out of range; the nearest name is given.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {name!r}")
    kind = ALGORITHMS[name]
    refuse_unknown_options(kind, options, f"algorithms.{name}")
    try:
        return kind(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"algorithms.{name}: {error}") from error


def refuse_unknown_options(kind: type, options: dict[str, Any], where: str) -> None:
    """Raise ValueError for the first option that a class's constructor does not take."""
    known = [p for p in inspect.signature(kind).parameters if p != "seed"]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"{where} has no option {key!r}; {hint}")


def checks(recipe: FederatedRecipe) -> Iterator[tuple[str, bool]]:
    """Pairs of a message and whether the recipe is free of the mistake it names."""
    positive = {
        "client": "epochs",
        "server": "max_updates max_seconds evaluate_every checkpoint_every min_clients job_timeout "
        "patience max_refusals",
        "simulation": "examples_per_second",
    }
    for section, keys in positive.items():
        for key in keys.split():
            value = getattr(getattr(recipe, section), key)
            yield f"{section}.{key} must be above 0, not {value}", value is None or value > 0
    for key in ("speed_sigma", "jitter_sigma", "latency", "absence", "late_by"):
        value = getattr(recipe.simulation, key)
        yield f"simulation.{key} must not be negative, not {value}", value >= 0
    for key in ("dropout", "late_share"):
        value = getattr(recipe.simulation, key)
        yield f"simulation.{key} must be in [0, 1), not {value}", 0 <= value < 1
    limits = (recipe.server.max_updates, recipe.server.max_seconds)
    yield "give server.max_updates or server.max_seconds", any(x is not None for x in limits)
    delay = recipe.server.max_delay
    yield f"server.max_delay must not be negative, not {delay}", delay is None or delay >= 0
    for name, options in {recipe.algorithm: {}, **recipe.algorithms}.items():
        make_algorithm(name, options)
