"""What a run records: against the saved model's own losses, and that training does not notice."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightning_collider as lc
from lightning_collider.report.record import MixedText, append_row, mixed, read_rows, token_sizes
from lightning_collider.training import run as run_module
from lightning_collider.training.corpus import load_corpus
from lightning_collider.training.files import read_json, write_json
from lightning_collider.training.run import run_recipe


def losses_of(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return lc.token_losses(model, ids, ids)


def test_sample_holds_the_models_losses_and_the_selectors_rows(finished):
    recipe, folder, _ = finished
    sample = read_json(folder / "arms/filtered/sample.json")
    assert [record["step"] for record in sample["records"]] == [0, 1, 3, 6]
    corpus = load_corpus(folder / "corpus")
    ids = torch.from_numpy(corpus.train[: recipe.train.batch_size].astype(np.int64))
    losses = losses_of(folder / "arms/filtered/model", ids)
    reference = losses_of(folder / "reference/model", ids)
    last = sample["records"][-1]
    rows = mixed(corpus.sources[: recipe.train.batch_size])
    torch.testing.assert_close(torch.tensor(last["losses"]), losses[rows], atol=1e-3, rtol=0)
    torch.testing.assert_close(
        torch.tensor(sample["reference"]), reference[rows], atol=1e-3, rtol=0
    )
    keep = lc.select(losses, reference, ids, keep=0.6)
    assert (torch.tensor(last["keep"]) != keep[rows]).sum() <= 2  # the saved losses are rounded
    text = "".join(sample["tokens"][0])
    tokenizer = AutoTokenizer.from_pretrained(folder / "arms/filtered/model")
    assert text == tokenizer.decode(ids[rows[0]].tolist())


def test_regular_runs_sample_has_no_mask(finished):
    sample = read_json(finished[1] / "arms/regular/sample.json")
    assert sample["reference"] is None
    assert all(record["keep"] is None for record in sample["records"])


def test_held_out_losses_by_source(finished):
    recipe, folder, _ = finished
    rows = read_rows(folder / "arms/filtered/heldout.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 5, 6]
    assert [row["input_tokens"] for row in rows] == [128 * row["step"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[1] > 0
    corpus = load_corpus(folder / "corpus")
    losses = losses_of(
        folder / "arms/filtered/model", torch.from_numpy(corpus.heldout.astype(np.int64))
    )
    for number, name in enumerate(("target", "general", "noise")):
        here = torch.tensor(corpus.heldout_sources[:, 1:]) == number
        found = rows[-1]["sources"][name]
        assert found["targets"] == int(here.sum()) > 0
        assert found["nats"] == pytest.approx(float(losses[:, :-1][here].sum()), rel=1e-4)
        words = corpus.tokenizer.convert_ids_to_tokens(corpus.heldout[:, 1:][here.numpy()].tolist())
        assert found["bytes"] == sum(len(w) for w in words if w != corpus.tokenizer.eos_token)
    kept = sum(found["kept"] for found in rows[-1]["sources"].values())
    batches, size = recipe.eval.heldout_batches, recipe.train.batch_size
    assert kept == batches * int(0.6 * size * 63 + 0.5)


def test_counts_by_source_by_hand():
    text = MixedText(
        rows=np.array([[0, 1, 2, 1]]),
        sources=np.array([[0, 0, 1, 1]], np.uint8),
        names=("a", "b"),
        token_bytes=np.array([0, 2, 3]),
    )
    losses = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
    keep = torch.tensor([[True, False, True, True]])
    assert text.by_source(losses, keep) == {
        "a": {"targets": 1, "bytes": 2, "nats": 1.0, "kept": 1},
        "b": {"targets": 2, "bytes": 5, "nats": 6.0, "kept": 1},
    }
    assert text.by_source(losses, None)["b"]["kept"] is None


def test_token_sizes_are_bytes(finished):
    tokenizer = load_corpus(finished[1] / "corpus").tokenizer
    ids = tokenizer("naïve 12 ✓\n")["input_ids"]
    assert token_sizes(tokenizer)[ids].sum() == len("naïve 12 ✓\n".encode())
    assert token_sizes(tokenizer)[tokenizer.eos_token_id] == 0


def test_step_memory_is_measured(finished):
    for arm in ("regular", "filtered"):
        memory = read_json(finished[1] / "arms" / arm / "memory.json")
        logits = 2 * 64 * 400 * 4  # the smallest thing that must have been there: bytes
        assert logits / 4 < memory["peak_bytes"] < 2**30


def test_training_does_not_notice(tiny_in, tmp_path, monkeypatch):
    """Equal weights with and without looks, also for the selector that draws random rows."""
    monkeypatch.setattr(
        run_module, "_evaluate", lambda recipe, corpus, folder: write_json(folder / "eval.json", {})
    )
    random = ["arms.filtered.selector=random", "train.steps=4", "reference.steps=1"]
    run_recipe(tiny_in(tmp_path / "with", *random))
    monkeypatch.setattr(run_module, "_records", lambda *_: ())
    run_recipe(tiny_in(tmp_path / "without", *random))
    for arm in ("regular", "filtered"):
        one, other = (
            load_file(tmp_path / name / "arms" / arm / "model" / "model.safetensors")
            for name in ("with", "without")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_of_an_earlier_try_go(tmp_path):
    path = tmp_path / "rows.jsonl"
    for step in (1, 2, 3, 2):
        append_row(path, {"step": step})
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    assert json.loads(path.read_text().splitlines()[0]) == {"step": 1}
    assert read_rows(tmp_path / "none.jsonl") == []


def test_shown_rows_have_every_source():
    sources = np.array([["a", "a"], ["a", "a"], ["a", "b"], ["c", "c"]])
    assert mixed(sources) == [0, 2, 3, 1]
