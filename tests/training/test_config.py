"""Recipes: every recipe is whole, and each kind of mistake is named with what to write instead."""

from pathlib import Path

import pytest

import lightning_collider.recipes
from lightning_collider.training.config import load_recipe, to_yaml

RECIPES = sorted(Path(lightning_collider.recipes.__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_whole_and_every_key_has_a_comment(path):
    load_recipe(path.stem)
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            assert "#" in line or line.rstrip().endswith(":"), f"{path.name}: no comment: {line}"


def test_quickstart_values():
    recipe = load_recipe("quickstart")
    assert recipe.out == "runs/quickstart"
    assert recipe.arms["regular"].selector == "none"
    assert (recipe.arms["filtered"].selector, recipe.arms["filtered"].keep) == ("excess_loss", 0.6)


def test_overrides_replace_values_and_add_arms():
    recipe = load_recipe(
        "quickstart", ["train.steps=7", "arms.r.selector=random", "arms.r.keep=0.5", "seed=3"]
    )
    assert (recipe.train.steps, recipe.seed) == (7, 3)
    assert (recipe.arms["r"].keep, recipe.arms["r"].over) == (0.5, "batch")


def test_resolved_recipe_reads_back_equal(tmp_path):
    recipe = load_recipe("quickstart", ["train.steps=7"])
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_defaults_come_from_another_recipe_and_overrides_come_last(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [quickstart]\nname: mine\ntrain: {steps: 9, batch_size: 4}\n")
    recipe = load_recipe(str(path), ["train.batch_size=5"])
    quickstart = load_recipe("quickstart")
    assert (recipe.name, recipe.train.steps, recipe.train.batch_size) == ("mine", 9, 5)
    assert recipe.model == quickstart.model


def test_defaults_that_lead_back_or_are_no_list_are_refused(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text(f"defaults: [{path}]\n")
    with pytest.raises(ValueError, match="lead back to itself"):
        load_recipe(str(path))
    path.write_text("defaults: quickstart\n")
    with pytest.raises(ValueError, match=r"must be a list .*\[quickstart\]"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ["'train.stepz'", "'train.steps'"]),
        ("learning_rate=3", ["'learning_rate'", "'train.learning_rate'"]),
        ("arms.filtered.kep=0.5", ["'arms.filtered.kep'", "'arms.filtered.keep'"]),
        ("modell.layers=3", ["'modell'", "'model'"]),
        ("train.steps=many", ["'train.steps'", "'many'"]),
        ("train.steps=1.5", ["'train.steps'", "'1.5'"]),
        ("train=5", ["'train'"]),
        ("arms.filtered.keep=big", ["'arms.filtered.keep'"]),
        ("arms.filtered.keep=0", ["arms.filtered.keep", "not 0.0"]),
        ("arms.filtered.keep=1.01", ["arms.filtered.keep", "not 1.01"]),
        ("arms.filtered.selector=best", ["arms.filtered.selector", "excess_loss"]),
        ("arms.filtered.over=rank", ["arms.filtered.over", "sequence"]),
        ("arms.regular.keep=0.5", ["arms.regular.keep", "selector"]),
        ("arms.a/b.selector=none", ["arms.a/b", "folder name"]),
        ("corpus.weights.images=1", ["corpus.weights", "target, general, noise"]),
        ("corpus.weights.noise=-1", ["corpus.weights", "negative"]),
        ("corpus.vocab_size=256", ["corpus.vocab_size", "257"]),
        ("model.heads=3", ["model.heads", "key_value_heads"]),
        ("model.hidden_size=28", ["model.hidden_size", "model.heads"]),
        ("train.steps=0", ["train.steps", "above 0"]),
        ("train.precision=16-mixed", ["train.precision", "bf16-mixed"]),
        ("train.engine=cuda", ["train.engine", "oracle"]),
        ("train.on_nan=warn", ["train.on_nan", "stop, skip", "'warn'"]),
        ("train.on_spike=shout", ["train.on_spike", "warn, stop, skip", "'shout'"]),
        ("train.spike_factor=0", ["train.spike_factor", "above 0", "not 0.0"]),
        ("train.spike_factor=-3", ["train.spike_factor", "above 0", "not -3.0"]),
        ("train.decay_fraction=1.5", ["train.decay_fraction", "not 1.5"]),
        ("train.decay_fraction=-0.1", ["train.decay_fraction", "not -0.1"]),
        # 25 of the reference's 150 steps are the warm-up.
        ("train.decay_fraction=0.84", ["train.decay_fraction", "0.833333", "not 0.84"]),
        ("eval.tasks=[]", ["eval.tasks", "at least one"]),
        ("train.steps", ["'train.steps'", "key=value"]),
        ("train.steps=[", ["train.steps=[", "YAML"]),
    ],
)
def test_mistake_is_named(override, words):
    with pytest.raises(ValueError) as error:
        load_recipe("quickstart", [override])
    for word in words:
        assert word in str(error.value)


def test_a_decay_that_fits_behind_the_warm_up():
    assert load_recipe("quickstart", ["train.decay_fraction=0.83"]).train.decay_fraction == 0.83


def test_unknown_and_missing_keys_of_a_file_are_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntrian: {steps: 3}\n")
    with pytest.raises(ValueError, match=r"'trian'; did you mean 'train'"):
        load_recipe(str(path))
    path.write_text("name: mine\nout: there\n")
    with pytest.raises(ValueError, match=r"lacks arms, corpus.*defaults: \[quickstart\]"):
        load_recipe(str(path))
    path.write_text("a: [1\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_recipe(str(path))


def test_unknown_recipe_lists_the_names_there_are():
    with pytest.raises(FileNotFoundError, match="quickstart"):
        load_recipe("quikstart")
