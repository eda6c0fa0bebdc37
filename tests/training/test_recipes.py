"""Every training recipe: parameter counts as published, one step of a truncation, what it says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import lightning_collider as lc
import lightning_collider.recipes
from lightning_collider.training.config import load_recipe, load_training
from lightning_collider.training.models import build_model, shape_of
from lightning_collider.training.schema import read_recipe
from lightning_collider.training.settings import plan

FOLDER = Path(lightning_collider.recipes.__file__).parent
NAMES = sorted(p.stem for p in FOLDER.glob("*.yaml"))
TRAINING = [name for name in NAMES if read_recipe(name, []).get("kind") == "training"]
# As the models' authors publish them, and by hand. TinyLlama, per block: q and o 2 x 2048^2, k and
# v 2 x 2048 x 256, MLP 3 x 2048 x 5632, norms 2 x 2048; 22 blocks, the last norm, and embedding and
# head 2 x 32000 x 2048.
BLOCK = 2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
PARAMETERS = {
    "tinyllama-1.1b": 22 * BLOCK + 2048 + 2 * 32000 * 2048,
    "qwen2.5-1.5b": 1_543_714_304,
    "phi1.5-1.4b": 1_418_270_720,
    "smollm2-135m": 134_515_008,
}


def test_the_promised_recipes_are_there():
    twins = [f"{n}{t}" for n in PARAMETERS for t in ("", "-regular")]
    references = [f"{n}-reference" for n in PARAMETERS if n != "smollm2-135m"]
    assert sorted(TRAINING) == sorted([*twins, *references])
    assert PARAMETERS["tinyllama-1.1b"] == 1_100_048_384


@pytest.mark.parametrize("name", TRAINING)
def test_model_has_the_published_number_of_parameters(name):
    base = next(n for n in PARAMETERS if name.startswith(n))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(load_training(name).model))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[base]


@pytest.mark.parametrize("name", TRAINING)
def test_two_layers_take_a_step(name):
    """The recipe's own widths with two blocks and a short sequence, filtered as it says."""
    small = ["model.weights=null", "model.layers=2", "data.sequence_length=8"]
    small += ["model.config.vocab_size=320", "trainer.engine=oracle"]
    recipe = load_training(name, small)
    model = lc.convert(build_model(recipe).train(), engine="oracle")
    assert model.config.num_hidden_layers == 2
    ids = torch.randint(0, 320, (1, 8), generator=torch.Generator().manual_seed(0))
    keep = torch.arange(8)[None] < 8 * recipe.filter.keep
    before = model.model.embed_tokens.weight.detach().clone()
    loss = model(input_ids=ids, labels=ids, keep=keep).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.isfinite(loss) and not torch.equal(before, model.model.embed_tokens.weight)


@pytest.mark.parametrize("name", TRAINING)
def test_twins_differ_in_the_filter_only(name):
    recipe = load_training(name)
    if name.endswith("-regular"):
        twin = load_training(name.removesuffix("-regular"))
        assert recipe.filter.selector == "none" != twin.filter.selector
        for section in ("model", "data", "trainer", "optimizer", "seed"):
            assert getattr(recipe, section) == getattr(twin, section)
    if recipe.filter.selector == "excess_loss":
        reference = load_training(f"{name}-reference")
        assert recipe.filter.reference == f"{reference.out}/model"
        assert (reference.trainer.epochs, reference.optimizer.learning_rate) == (3, 5e-5)
        assert reference.model == recipe.model


def test_main_runs_have_the_values_of_the_paper():
    for name in ("tinyllama-1.1b", "qwen2.5-1.5b", "phi1.5-1.4b"):
        recipe = load_training(name)
        assert recipe.trainer.max_tokens == 15_000_000_000
        assert recipe.trainer.batch_tokens == 2**20
        assert (recipe.filter.selector, recipe.filter.keep) == ("excess_loss", 0.6)
        # 15e9 // 2^20 steps; 512 sequences over 8 ranks by 4 are 16 micro-batches each.
        found = plan(recipe, rows_of_data=10**9)
        assert (found.steps, found.accumulate, found.rows_a_step) == (14305, 16, 512)
    assert load_training("tinyllama-1.1b").optimizer.learning_rate == 8e-5


def test_the_first_limit_ends_a_run():
    recipe = load_training("smollm2-135m", ["trainer.epochs=2"])  # 4 sequences a step, max 100
    assert plan(recipe, rows_of_data=30).steps == 15
    assert plan(recipe, rows_of_data=3000).steps == 100
    with pytest.raises(ValueError, match="has 1 sequences of 512 tokens, less than one"):
        plan(recipe, rows_of_data=1)
    recipe.trainer.batch_tokens = 1000
    with pytest.raises(ValueError, match="must be a multiple of 1024"):
        plan(recipe, rows_of_data=30)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_stepz=3", ["'trainer.max_stepz'", "'trainer.max_steps'"]),
        ("model.config.hiden_size=3", ["model.config.hiden_size", "'hidden_size'"]),
        ("model.config.model_type=lama", ["model_type='lama'"]),
        ("model.layers=31", ["model.layers=31"]),
        ("data.sequence_length=8193", ["data.sequence_length=8193", "8192"]),
        ("data.sources.target.weight=0", ["data.sources.target.weight"]),
        ("data.validation_fraction=1", ["data.validation_fraction"]),
        ("filter.selector=excess_loss", ["filter.reference"]),
        ("filter.stored_losses=true", ["filter.stored_losses"]),
        ("filter.keep=0", ["filter.keep"]),
        ("trainer.on_nan=ignore", ["trainer.on_nan", "skip"]),
        ("trainer.max_steps=null", ["trainer.max_tokens", "trainer.epochs"]),
        ("kind=tuning", ["'kind'", "comparison, training"]),
    ],
)
def test_mistake_is_named(override, words):
    with pytest.raises(ValueError) as error:
        build_model(load_training("smollm2-135m", ["model.weights=null", override]))
    for word in words:
        assert word in str(error.value)


def test_wrong_kind_of_recipe_is_named():
    assert load_recipe("quickstart").kind == "comparison"
    with pytest.raises(ValueError, match=r"'quickstart' compares runs.*kind: training"):
        load_training("quickstart")


def test_a_null_source_leaves_the_defaults_one_out():
    words = ["data.sources.openwebmath=null", "data.sources.mine.path=mine.jsonl"]
    assert list(load_training("tinyllama-1.1b", words).data.sources) == ["mine"]
