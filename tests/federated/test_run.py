"""`collider federate`: the folder of a run, mistakes, and life without Flower."""

import itertools
import subprocess
import sys

import pytest
import torch

from lightning_collider.cli import main
from lightning_collider.federated.client import Trainer
from lightning_collider.federated.digits import Digits
from lightning_collider.federated.messages import weights_of
from lightning_collider.federated.settings import TaskConfig, make_algorithm
from lightning_collider.federated.state import read_rows
from lightning_collider.federated.tasks import make_task
from lightning_collider.training.config import load_federated
from lightning_collider.training.files import read_json

FEW = ["server.max_updates=6", "server.evaluate_every=3", "client.epochs=1"]


def test_run_leaves_its_folder_and_is_done_once(tmp_path, capsys):
    words = ["federate", "fedadt-digits", f"out={tmp_path / 'run'}", *FEW]
    assert main(words) == 0
    assert "version 6  updates 6" in capsys.readouterr().out
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files >= {"recipe.yaml", "metrics.jsonl", "server.ckpt", "model.pt", "curves.png"}
    results = read_json(tmp_path / "run" / "results.json")
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    last = [row for row in rows if row["event"] == "evaluation"][-1]
    assert results["updates"] == 6 and results["accuracy"] == last["accuracy"]
    saved = torch.load(tmp_path / "run" / "model.pt")
    assert saved.keys() == weights_of(Digits(seed=0).module()).keys()
    assert main(words) == 0 and "was finished before" in capsys.readouterr().out
    assert main([*words, "seed=1"]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err


def test_app_folder_holds_the_resolved_recipe(tmp_path, capsys):
    words = ["federate", "fedadt-digits", "server.min_clients=3", "--app", str(tmp_path / "app")]
    assert main(words) == 0
    assert load_federated(str(tmp_path / "app" / "recipe.yaml")).server.min_clients == 3
    assert {p.name for p in (tmp_path / "app").iterdir()} == {
        "pyproject.toml",
        "federation.py",
        "recipe.yaml",
    }
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err


def test_recipes_of_the_issue_are_there():
    digits, code = load_federated("fedadt-digits"), load_federated("fedadt-code")
    assert digits.task.options["clients"] == 20 and digits.task.options["dirichlet"] == 0.1
    assert code.task.name == "code" and code.task.options["keep"] < 1
    assert digits.algorithm == code.algorithm == "fedadt"
    assert set(digits.algorithms) == {"fedavg", "fedasync", "fedbuff", "fedadt"}


@pytest.mark.parametrize("name", ["fedadt-digits", "fedadt-code"])
def test_recipes_options_are_those_of_task_and_algorithms(name):
    """Their first job, too: a client's first steps at the recipe's full size."""
    recipe = load_federated(name)
    task = make_task(recipe.task, recipe.seed)
    for algorithm, options in recipe.algorithms.items():
        make_algorithm(algorithm, options)
    trainer = Trainer(task, weights_of(task.module()), seed=0)
    trainer.train(itertools.islice(task.batches(0, seed=0), 1))
    assert trainer.seen == recipe.task.options["batch_size"] and trainer.loss() > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["federate", "quickstart"], "`collider federate` is for a recipe"),
        (["train", "fedadt-digits"], "`collider federate fedadt-digits`"),
        (["explain", "fedadt-digits"], "is a federated run"),
        (["score", "fedadt-digits"], "is a federated run"),
        (["federate", "fedadt-digits", "algorithm=fedsgd"], "one of fedavg, fedasync"),
        (["federate", "fedadt-digits", "algorithms.fedadt.stps=1"], "did you mean 'steps'"),
        (["federate", "fedadt-digits", "server.max_seconds=null"], "server.max_updates or"),
        (["federate", "fedadt-digits", "simulation.dropout=1"], "dropout must be in"),
        (["federate", "fedadt-digits", "client.epochs=0"], "client.epochs must be above 0"),
    ],
)
def test_mistake_is_named(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("letters", {}, "one of digits, code or package.module:Class"),
        ("nowhere:Task", {}, "cannot be imported"),
        ("digits", {"dirichlett": 1}, "did you mean 'dirichlet'"),
    ],
)
def test_unknown_task_is_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(TaskConfig(name, options), seed=0)


def test_task_of_ones_own_is_found_by_its_path():
    task = make_task(TaskConfig("lightning_collider.federated.digits:Digits", {"clients": 3}), 0)
    assert isinstance(task, Digits) and task.clients == 3


WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = sys.modules["flwr.app"] = None
import lightning_collider as lc
lc.federated.FedADT(), lc.federated.FedAvg(), lc.federated.FedAsync(), lc.federated.FedBuff()
from lightning_collider.cli import main
sys.exit(main(["federate", "fedadt-digits", "out=unused"]))
"""


def test_package_works_without_flower_and_says_what_to_install(tmp_path):
    command = [sys.executable, "-c", WITHOUT_FLOWER]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert "pip install 'lightning-collider[federated]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
