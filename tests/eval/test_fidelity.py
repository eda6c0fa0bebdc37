"""Gradient fidelity: cosines by hand, what must be exact, and a measurement end to end."""

import csv

import pytest
import torch

from lightning_collider.eval import fidelity
from lightning_collider.eval.fidelity import (
    cosines,
    dots,
    kind_of,
    layer_of,
    plain_grads,
    plot,
    summed,
    table,
)
from lightning_collider.oracle import filtered_grads
from tests.conftest import batch_of, random_keep, small_llama


def three_gradients(model, ids, keep):
    return {
        "filtered": filtered_grads(model, ids, ids, keep),
        "masked": plain_grads(model, ids, keep),
        "full": plain_grads(model, ids, torch.ones_like(keep)),
    }


def test_cosines_by_hand():
    """Two parameters: filtered (3, 0), masked (3, 4), full (0, 2)."""
    grads = {
        "filtered": {"a": torch.tensor([3.0]), "b": torch.tensor([0.0])},
        "masked": {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])},
        "full": {"a": torch.tensor([0.0]), "b": torch.tensor([2.0])},
    }
    products = dots(grads)
    together = cosines(products.values())
    assert together["filtered_masked"] == pytest.approx(9 / (3 * 5))
    assert together["filtered_full"] == 0.0
    assert together["masked_full"] == pytest.approx(8 / (5 * 2))
    assert together["length_ratio"] == pytest.approx(3 / 5)
    assert cosines([products["a"]])["filtered_masked"] == pytest.approx(1.0)
    twice = summed([grads, grads])
    assert twice["masked"]["b"].item() == 8.0


def test_names_of_layers_and_kinds():
    assert layer_of("model.layers.11.mlp.up_proj.weight") == "11"
    assert layer_of("model.embed_tokens.weight") == "embed"
    assert layer_of("model.norm.weight") == "norm" and layer_of("lm_head.weight") == "head"
    assert kind_of("model.layers.0.self_attn.q_proj.weight") == "q_proj"
    assert (
        kind_of("model.layers.0.input_layernorm.weight") == kind_of("model.norm.weight") == "norm"
    )


def test_exact_where_the_paper_says_so():
    """Head, final norm, and the last block's MLP, output projection and queries; nothing before."""
    model, (ids, _), keep = small_llama(), batch_of(2, 16, holes=0.0), random_keep(2, 16)
    products = dots(three_gradients(model, ids, keep))
    last = model.config.num_hidden_layers - 1
    exact = ("lm_head", "model.norm", f"layers.{last}.mlp", "o_proj", "q_proj", "post_attention")
    for name, product in products.items():
        cosine = cosines([product])["filtered_masked"]
        in_last = "layers." not in name or f"layers.{last}." in name
        if in_last and any(part in name for part in exact):
            assert cosine == pytest.approx(1.0, abs=1e-5), name
        elif "k_proj" in name or "v_proj" in name:
            assert cosine < 0.999, name


def test_all_three_are_one_when_everything_is_kept():
    model, (ids, _) = small_llama(), batch_of(2, 12, holes=0.0)
    found = cosines(dots(three_gradients(model, ids, torch.ones(2, 12, dtype=torch.bool))).values())
    assert all(value == pytest.approx(1.0, abs=1e-5) for value in found.values())


def test_measurement_end_to_end(finished, tmp_path, monkeypatch):
    folder = finished[1]
    monkeypatch.setattr("sys.argv", ["fidelity", str(folder), "--out", str(tmp_path)])
    fidelity.main()
    rows = list(csv.DictReader((tmp_path / "fidelity.csv").open()))
    assert {int(row["step"]) for row in rows} == {0, 1, 2, 6}
    parts = {row["part"] for row in rows}
    assert {"all", "0", "1", "embed", "norm", "q_proj", "down_proj"} <= parts
    for row in rows:
        assert -1.0 <= float(row["filtered_masked"]) <= 1.0
    whole = [row for row in rows if row["by"] == "all" and row["selector"] == "random"]
    assert all(float(row["filtered_masked"]) > float(row["filtered_full"]) > 0 for row in whole)
    assert (tmp_path / "fidelity.png").stat().st_size > 10_000
    fidelity.main()  # done before: nothing is trained again
    lines = table(fidelity.read_rows(tmp_path / "fidelity.jsonl"))
    assert len(lines) == len(rows)
    plot(lines, tmp_path / "again.png")


def test_mistakes_are_named(finished, tmp_path):
    with pytest.raises(ValueError, match="has no arm 'best'; it has: regular, filtered"):
        fidelity.measure(finished[1], "best", tmp_path)
