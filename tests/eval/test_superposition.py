"""The comparison of bags with ordinary training, in its quick form, and what only it has."""

import dataclasses
import json

import pytest
import torch

from lightning_collider.eval.superposition import (
    Plan,
    carry_out,
    main,
)
from lightning_collider.eval.superposition_run import (
    HELDOUT_FILES,
    Run,
    Scale,
    Text,
    _files,
    divide,
    next_tokens,
)
from lightning_collider.eval.superposition_speed import BAG_SIZES, ratios
from tests.conftest import small_model


def test_a_killed_command_goes_on_and_repeats_itself(tmp_path, capsys):
    results, figure = tmp_path / "results.jsonl", tmp_path / "figure.png"
    command = ["--quick", "--results", str(results), "--figure", str(figure)]
    command += ["--work", str(tmp_path)]
    main(command)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    arms = [line["settings"]["arm"] for line in lines]
    assert {"baseline", "tst", "input", "output", "reinit"} == set(arms)
    assert all(0 < line["heldout_loss"] < 8 and len(line["curve"]) == 10 for line in lines)
    assert figure.stat().st_size > 1000
    table = capsys.readouterr().out
    assert "| fresh seed | baseline | TST |" in table

    kept = results.read_text().splitlines(keepends=True)[:-2]  # a confirmation and an ablation
    results.write_text("".join(kept))
    main(command)
    again = [json.loads(line) for line in results.read_text().splitlines()]
    assert [x["settings"] for x in again] == [x["settings"] for x in lines]
    assert [x["heldout_loss"] for x in again] == [x["heldout_loss"] for x in lines]
    main([*command, "--report"])
    assert len(results.read_text().splitlines()) == len(lines)

    lines[0]["text"] = "of another Python"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="has runs on other text"):
        main(command)
    main([*command, "--report"])


def losses_of(best_rate, best_cell):
    """A made-up loss that is least at a learning rate and a cell."""

    def loss(run):
        far = abs(run.learning_rate / best_rate - 1)
        return far + (0 if (run.bag_size, run.ratio) == best_cell else 1) + run.seed

    return loss


def test_the_plan_follows_the_losses():
    plan, seen = Plan(first_rate=2e-3), []
    loss = losses_of(5e-4, (6, 0.2))

    def measure(run, stage):
        seen.append((stage, run))
        return loss(run)

    carry_out(plan, measure, longer=True)
    rates = [run.learning_rate for stage, run in seen if stage == "learning rate"]
    assert rates == [2e-3, 4e-3, 1e-3, 5e-4] * 2  # goes on while the best is at an end
    cells = {(run.bag_size, run.ratio) for stage, run in seen if stage == "grid"}
    assert cells >= {(s, r) for s in (2, 4, 6, 8) for r in (0.2, 0.3, 0.4)}
    chosen = [run for stage, run in seen if stage in ("confirmation", "ablation")]
    assert {(run.bag_size, run.ratio) for run in chosen} == {(1, 0.0), (6, 0.2)}
    assert {run.learning_rate for run in chosen} == {5e-4}
    same_data = [run for stage, run in seen if stage == "equal data"]
    assert [run.seed for run in same_data] == [1, 2, 3]
    assert {run.steps for run in same_data} == {720 + 5 * 144}  # s - 1 more in a fifth of them
    longer = [run for stage, run in seen if stage == "longer"]
    assert [(run.arm, run.steps) for run in longer] == [("baseline", 2880), ("tst", 2880)] * 3


def test_data_read_by_each_arm():
    run = Run("tst", 1e-3, 100, bag_size=4, ratio=0.25)
    assert (run.phase1, run.data_steps()) == (25, 175)
    assert dataclasses.replace(run, arm="output").data_steps() == 100
    assert Run("baseline", 1e-3, 100).data_steps() == 100


def test_targets_of_the_output_ablation():
    ids = torch.tensor([[10, 11, 0, 12, 13]])  # 0 ends a document
    no = -100
    assert next_tokens(ids, 2, separator=0).tolist() == [
        [11, 0],
        [0, no],
        [no, no],
        [13, no],
        [no, no],
    ]


def test_sequences_never_repeat_a_token():
    documents = [torch.arange(7 * i, 7 * i + 7).numpy() for i in range(6)]
    text = Text(documents, torch.zeros(1, 4), 0)
    rows = text.rows(10, 4, seed=0)
    assert len(rows.unique()) == 40
    assert not rows.equal(text.rows(10, 4, seed=1))
    with pytest.raises(ValueError, match="42 tokens of text are too few for 11 sequences of 4"):
        text.rows(11, 4, seed=0)


def test_held_out_parts_are_not_trained_on_and_only_tables_are_left_out():
    """Every file begins with the same licence, a part of its own: held out, and not trained on."""
    licence, count = "# Permission is granted\n" * 83, 2 * HELDOUT_FILES
    files = [f"{licence}value_{i} = {i}\n" + "#\n" * 100 for i in range(count)]
    heldout, train = divide(files)
    assert licence in heldout and set(heldout).isdisjoint(train)
    text = "".join(heldout + train)
    assert all(f"value_{i} = {i}\n" in text for i in range(count))
    assert "".join(train).count("value_") == count - 2 == len(train)

    library = "".join(_files(Scale(plays=False)))
    assert "Lambda expressions (sometimes called lambda forms)" in library  # pydoc's, generated
    assert "def literal_eval(" in library and "gencodec" not in library
    assert "charmap_encode(input,errors,encoding_table)" not in library


def test_speed_is_a_ratio_for_each_bag_size():
    found = ratios(small_model("llama"), 1, 8, rounds=3)
    assert list(found) == list(BAG_SIZES)
    assert all(len(values) == 3 and min(values) > 0 for values in found.values())
