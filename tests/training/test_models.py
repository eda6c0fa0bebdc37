"""Where a recipe's initial weights and its tokenizer come from, and what is refused."""

import pytest
import torch

from lightning_collider.training.checkpoint import STATE, checkpoint_path
from lightning_collider.training.config import load_training
from lightning_collider.training.models import (
    build_model,
    load_tokenizer,
    refuse_other_shape,
    shape_of,
)
from lightning_collider.training.pretrain import run_training
from tests.training.small_run import rows_of, small_recipe, write_inputs


def test_weights_of_another_shape_and_missing_weights_are_named(tmp_path):
    small = ["model.config.num_hidden_layers=2", "data.sequence_length=8"]
    small += ["model.config.vocab_size=320"]
    recipe = load_training("smollm2-135m", [*small, "model.weights=null"])
    build_model(recipe).save_pretrained(tmp_path)
    again = load_training("smollm2-135m", [*small, f"model.weights={tmp_path}"])
    for one, other in zip(
        build_model(recipe).parameters(), build_model(again).parameters(), strict=True
    ):
        assert torch.equal(one, other)
    again.model.config["hidden_size"] = 288
    with pytest.raises(ValueError, match=r"has hidden_size=576, the recipe says .*hidden_size=288"):
        build_model(again)
    again.model.weights = str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no Hugging Face model in .*nothing"):
        build_model(again)
    again.model.weights = "runs/smollm2-135m-reference/model"
    with pytest.raises(FileNotFoundError, match="`collider train smollm2-135m-reference` makes it"):
        build_model(again)


def test_numbers_rounded_to_float32_are_the_recipes():
    """What a GGUF file makes of 1e-5."""
    source = load_training("smollm2-135m").model
    found = shape_of(source)
    found.rms_norm_eps = 9.999999747378752e-06
    refuse_other_shape(source, found)
    found.rms_norm_eps = 1.1e-5
    with pytest.raises(ValueError, match=r"has rms_norm_eps=1.1e-05, the recipe says .*1e-05"):
        refuse_other_shape(source, found)


def test_weights_of_a_run_of_ours(tmp_path):
    """By the run's folder or one of its checkpoints, tokenizer and all."""
    write_inputs(tmp_path)
    run_training(small_recipe(tmp_path, "trainer.max_steps=6"))
    run = tmp_path / "run"
    for name, trained in ((run, 6), (checkpoint_path(run / "checkpoints", 3), 3)):
        words = [f"model.weights={name}", "model.tokenizer=weights", f"out={tmp_path}/{trained}"]
        recipe = small_recipe(tmp_path, *words)
        state = torch.load(
            checkpoint_path(run / "checkpoints", trained) / STATE, weights_only=True
        )["state_dict"]
        model = build_model(recipe)
        assert model.training
        assert all(torch.equal(w, state[f"model.{n}"]) for n, w in model.state_dict().items())
        assert load_tokenizer(recipe.model).eos_token_id is not None
    wider = small_recipe(tmp_path, f"model.weights={run}", "model.config.hidden_size=32")
    with pytest.raises(ValueError, match="has hidden_size=16"):
        build_model(wider)


def test_loaded_weights_are_in_train_mode(tmp_path):
    """`from_pretrained` leaves eval mode, in which nothing is filtered."""
    write_inputs(tmp_path)
    build_model(small_recipe(tmp_path)).save_pretrained(tmp_path / "weights")
    recipe = small_recipe(tmp_path, f"model.weights={tmp_path}/weights")
    assert all(m.training for m in build_model(recipe).modules())
    run_training(recipe)
    assert all(0.5 < row["kept_share"] < 0.6 for row in rows_of(tmp_path))


def test_a_hub_out_of_reach_is_told(monkeypatch):
    """The libraries' own error, without their waits between attempts."""

    def unreachable(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(OSError, match=r"model.weights=TinyLlama/.* is no local folder.*or give"):
        build_model(load_training("tinyllama-1.1b"))
