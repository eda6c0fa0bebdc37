"""Every training recipe: parameter counts as published, one step of a truncation, what it says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import lightning_collider as lc
import lightning_collider.recipes
from lightning_collider.superposition import BagSettings, superposed_loss
from lightning_collider.training.config import load_recipe, load_training
from lightning_collider.training.models import build_model, shape_of
from lightning_collider.training.module import rate_of_step
from lightning_collider.training.pretrain import train_config
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
# Token superposition: the paper's 270M and 600M, which only fit with as many key-value heads as
# heads. Per block 4 d^2 + 3 d f + 2 d; the last norm, embedding and head.
SUPERPOSED = {
    "tst-270m": 30 * (4 * 576**2 + 3 * 576 * 1536 + 2 * 576) + 576 + 2 * 128256 * 576,
    "tst-600m": 32 * (4 * 960**2 + 3 * 960 * 2560 + 2 * 960) + 960 + 2 * 128256 * 960,
    "tst-tiny": 4 * (2.5 * 256**2 + 3 * 256 * 512 + 2 * 256) + 256 + 2 * 4096 * 256,
}


def test_the_promised_recipes_are_there():
    twins = [f"{n}{t}" for n in PARAMETERS for t in ("", "-regular")]
    references = [f"{n}-reference" for n in PARAMETERS if n != "smollm2-135m"]
    bags = [f"{n}{t}" for n in SUPERPOSED for t in ("", "-baseline")]
    assert sorted(TRAINING) == sorted([*twins, *references, *bags])
    assert PARAMETERS["tinyllama-1.1b"] == 1_100_048_384


@pytest.mark.parametrize("name", TRAINING)
def test_model_has_the_published_number_of_parameters(name):
    counts = PARAMETERS | SUPERPOSED
    base = next(n for n in counts if name.startswith(n))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(load_training(name).model))
    assert sum(p.numel() for p in model.parameters()) == counts[base]


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


def test_superposed_runs_have_the_values_of_the_paper():
    for name, rate in (("tst-270m", 2e-3), ("tst-600m", 1e-3)):
        recipe, twin = load_training(name), load_training(f"{name}-baseline")
        assert recipe.optimizer.learning_rate == rate
        assert (recipe.superposition.bag_size, recipe.superposition.ratio) == (6, 0.3)
        assert twin.superposition is None
        for section in ("model", "data", "trainer", "optimizer", "seed"):
            assert getattr(recipe, section) == getattr(twin, section)
        found = plan(recipe, rows_of_data=10**9)
        assert found == plan(twin, rows_of_data=10**9)
        config = train_config(recipe, found)
        assert (found.steps, config.warmup_steps) == (20000, 2000)
        assert [rate_of_step(n, config) for n in (0, 1999, 2000, 17999, 18000, 19000)] == (
            pytest.approx([1 / 2000, 1, 1, 1, 1, 0.5])
        )


def test_passes_over_the_data_count_what_bags_read():
    # A step of 4 rows reads 4 x (1 + .3 x 5) = 10 rows on average.
    words = ["trainer.epochs=1", "trainer.max_steps=null"]
    assert plan(load_training("tst-tiny", words), rows_of_data=64).steps == 6
    assert plan(load_training("tst-tiny-baseline", words), rows_of_data=64).steps == 16


@pytest.mark.parametrize("name", sorted(SUPERPOSED))
def test_two_layers_take_a_superposed_step(name):
    small = ["model.layers=2", "data.sequence_length=8", "model.config.vocab_size=320"]
    recipe = load_training(name, small)
    model = lc.convert(build_model(recipe), engine="oracle")
    settings = BagSettings(recipe.superposition.bag_size)
    ids = torch.randint(0, 320, (1, 8 * settings.bag_size))
    loss = superposed_loss(model, ids, ids, settings).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


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
        ("optimizer.decay_fraction=1", ["optimizer.decay_fraction"]),
        ("superposition={bag_size: 0, ratio: 0.3}", ["superposition.bag_size must be 1"]),
        ("superposition={bag_size: 4, ratio: 1.0}", ["superposition.ratio must be in [0, 1)"]),
        ("superposition={bag_size: 4, ratio: 0.3, weights: x}", ["superposition.weights"]),
        ("superposition={bag_sise: 4}", ["'superposition.bag_sise'", "'superposition.bag_size'"]),
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
