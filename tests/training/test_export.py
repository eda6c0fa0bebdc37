"""collider export: the folder holds the trained weights bit for bit, from whole and split files."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_collider import cli
from lightning_collider.data.shards import TokenShards
from lightning_collider.training.checkpoint import STATE, checkpoint_path
from lightning_collider.training.models import build_model
from lightning_collider.training.pretrain import run_training
from tests.training.small_run import small_recipe, texts, write_inputs
from tests.training.test_resume import finish, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished small run of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    run_training(small_recipe(folder, "trainer.max_steps=6"))
    return folder


def saved_weights(folder, step):
    path = checkpoint_path(folder / "run" / "checkpoints", step) / STATE
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def assert_holds(folder, weights):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found = model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[n], w) and found[n].dtype == w.dtype for n, w in weights.items())


def test_the_folder_says_where_generation_stops(trained, tmp_path):
    assert cli.main(["export", str(trained / "run"), str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    eos = AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id
    assert eos is not None
    assert model.config.eos_token_id == eos and model.generation_config.eos_token_id == eos


def test_round_trip_is_bit_equal(trained, tmp_path, capsys):
    run = trained / "run"
    assert cli.main(["export", str(run), str(tmp_path / "newest")]) == 0
    assert "step=00000006" in capsys.readouterr().out
    assert_holds(tmp_path / "newest", saved_weights(trained, 6))
    older = checkpoint_path(run / "checkpoints", 3)
    assert cli.main(["export", str(older), str(tmp_path / "older")]) == 0
    assert_holds(tmp_path / "older", saved_weights(trained, 3))
    assert_holds(run / "model", saved_weights(trained, 6))
    assert (tmp_path / "newest" / "model.safetensors").is_file()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "newest")
    text = texts(1)[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.dist
def test_sharded_checkpoint_of_two_ranks_is_joined(tmp_path):
    """Without a filter, two ranks take one device's steps, up to the order of a sum.

    Neither the three shards nor their windows divide between two ranks.
    """
    dense = ("trainer.max_steps=6", "filter.selector=none", "filter.keep=1.0")
    dense += ("data.shard_tokens=1",)  # a shard for each 512 documents that are read
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write_inputs(folder, documents=1300)
    run_training(small_recipe(one, *dense))
    shards = TokenShards(one / "data" / "words" / "train")
    assert len(shards.manifest["shards"]) == 3 and len(shards) // 16 % 2 == 1
    split = (*dense, "trainer.devices=2", "trainer.sharded_checkpoints=true")
    finish(two, start(two, split, 2))
    state = checkpoint_path(two / "run" / "checkpoints", 6) / STATE
    assert len(list(state.glob("*.distcp"))) == 2
    assert cli.main(["export", str(two / "run"), str(tmp_path / "out")]) == 0
    joined = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    begun = build_model(small_recipe(one)).state_dict()
    for name, weight in saved_weights(one, 6).items():
        moved = (weight - begun[name]).abs().max()
        assert moved > 1e-3 and (joined[name] - weight).abs().max() < 1e-2 * moved


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nowhere", "out", "is no checkpoint and has no checkpoints"),
        ("run", "words", "is not empty"),
    ],
)
def test_mistakes_are_named(trained, tmp_path, capsys, source, target, message):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "thesis.tex").write_text("years of work")
    assert cli.main(["export", str(trained / source), str(tmp_path / target)]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "words" / "thesis.tex").read_text() == "years of work"
