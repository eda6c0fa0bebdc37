"""``collider explain``: the coverage of a recipe's model, before anything is trained."""

import pytest

from lightning_collider import cli
from lightning_collider.training.config import load_recipe
from lightning_collider.training.explain import explain


def test_quickstart_is_filtered_throughout(capsys):
    assert cli.main(["explain", "quickstart", "model.layers=6"]) == 0
    printed = capsys.readouterr().out
    # Embedding, final norm and head; two norms, attention and MLP a layer.
    assert "27 of 27 modules filtered, 100.0% of the linear layers' backward FLOPs" in printed
    # Embedding's output and the last norm's; norm, attention, sum, norm, MLP, sum a layer.
    assert "14 of 14 hidden states with compact gradients" in printed
    assert "dense:" not in printed and "full size:" not in printed


@pytest.mark.parametrize("recipe", ["tinyllama-1.1b", "qwen2.5-1.5b", "phi1.5-1.4b"])
def test_the_papers_models_are_filtered_throughout(recipe):
    covered = explain(load_recipe(recipe))
    assert covered.dense == {} and covered.share == 1.0
    assert covered.edges and not [reason for _, reason in covered.edges if reason]


def test_the_oracle_engine_is_dense_and_says_why():
    covered = explain(load_recipe("quickstart", ["train.engine=oracle"]))
    assert covered.share == 0.0
    assert set(covered.dense.values()) == {"engine='oracle'"}


def test_an_unknown_recipe_is_one_message(capsys):
    assert cli.main(["explain", "slowstart"]) == 2
    assert "no recipe 'slowstart'" in capsys.readouterr().err
