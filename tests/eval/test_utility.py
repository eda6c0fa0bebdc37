"""The utility experiment: its arithmetic by hand, its recipes, and its tables from small runs."""

import json
import math
import shutil

import pytest

from lightning_collider.eval import utility, utility_smollm2
from lightning_collider.eval.harness import FILE_TASKS, evaluate
from lightning_collider.eval.tasks.files.published import GSM8K, blimp_pairs, gsm8k_texts
from lightning_collider.eval.utility_smollm2 import ARMS, precision_of
from lightning_collider.eval.utility_tables import (
    at_time,
    differences,
    equal_time,
    equal_tokens,
    interval,
    small_numbers,
    smollm2,
    with_interval,
)
from lightning_collider.report.read import Arm, Run
from lightning_collider.training.config import to_yaml
from lightning_collider.training.files import write_json
from lightning_collider.training.run import run_recipe
from tests.training.conftest import TINY


def test_reading_a_curve_at_a_time():
    points = [[0, 0.0, 8.0], [10, 2.0, 4.0], [20, 4.0, 3.0]]
    assert at_time(points, 1.0) == 6.0
    assert at_time(points, 3.0) == 3.5
    assert at_time(points, 4.0) == 3.0 and at_time(points, 9.0) == 3.0


def test_interval_is_students():
    """1, 2, 3: deviation 1, so 4.303 / sqrt(3) = 2.484 either side of 2."""
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.484, abs=1e-3))
    assert with_interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert with_interval([0.5], sign=True) == "+0.500 (one seed)"


def test_differences_are_within_a_seed():
    numbers = [
        {"seed": 0, "arm": "regular", "bits": 1.0},
        {"seed": 0, "arm": "filtered", "bits": 0.75},
        {"seed": 1, "arm": "filtered", "bits": 1.5},
        {"seed": 1, "arm": "regular", "bits": 2.0},
    ]
    assert differences(numbers, "bits") == {"regular": [0.0, 0.0], "filtered": [-0.25, -0.5]}


def arm_with_curve(name, bits, seconds, score):
    """An arm of a utility run whose held-out looks found so many bits per byte at such times."""
    count = {"nats": math.log(2), "targets": 10, "kept": 10}
    looks = [
        {"input_tokens": 100 * i, "seconds": s, "sources": {"target": {**count, "bytes": 1 / b}}}
        for i, (s, b) in enumerate(zip(seconds, bits, strict=True))
    ]
    scores = {"heldout_bits": {"metric": "bits_per_byte", "value": score}}
    nothing = {"log": [], "sample": {}, "memory": {}, "train": {}, "flops": None}
    plain = {"selector": "none", "keep": 1.0, "live_reference": False, "length": 64}
    about = {"precision": "32-true", "devices": 1}
    return Arm(name, heldout=looks, scores=scores, **nothing, **plain, **about)


def cells(table, arm):
    """The cells of an arm's row."""
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {arm} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_curves_are_not_called_what_lm_eval_scores_and_one_seeds_arms_set_no_budget(tmp_path):
    """Budget 4 s, random's: regular, done at 8 s, is read halfway; stored was done at 2 s."""
    arms = [
        arm_with_curve("regular", [8.0, 4.0], [0.0, 8.0], 1.5),
        arm_with_curve("random", [8.0, 5.0], [0.0, 4.0], 1.25),
        arm_with_curve("stored", [8.0, 3.0], [0.0, 2.0], 1.0),
    ]
    write_json(tmp_path / "results.json", {"recipe": {"seed": 7}})
    numbers = small_numbers(Run("utility", tmp_path, "", arms), tmp_path)
    assert {n["budget_seconds"] for n in numbers} == {4.0} and numbers[0]["seed"] == 7
    table = equal_time(numbers)
    assert cells(table, "arm") == [
        "arm",
        "target on packed held-out batches, bits/byte",
        "less regular's",
        "the same at the end",
        "seconds of all its steps",
    ]
    one = " (one seed)"
    assert cells(table, "regular")[1:] == [f"6.000{one}", "", f"4.000{one}", f"8{one}"]
    assert cells(table, "random")[1:4] == [f"5.000{one}", f"-1.000{one}", f"5.000{one}"]
    assert cells(table, "stored")[1:4] == [f"3.000{one}", f"-3.000{one}", f"3.000{one}"]
    assert "seed was done (4 s)" in table
    head, row = (cells(equal_tokens(numbers), name) for name in ("arm", "random"))
    assert head[2] == "target bits/byte" and row[2] == f"1.250{one}"
    assert head[3] == "less regular's" and "in the fourth column" in equal_tokens(numbers)


def test_recipes_are_those_that_the_question_asks(tmp_path):
    first, second = (utility.recipe_of(seed, tmp_path, []) for seed in (0, 1))
    wanted = {
        "regular": ("none", 1.0, False),
        "filtered": ("excess_loss", 0.6, False),
        "random": ("random", 0.6, False),
        "top_loss": ("top_loss", 0.6, False),
        "filtered_more": ("excess_loss", 0.8, False),
        "filtered_less": ("excess_loss", 0.4, False),
        "stored": ("excess_loss", 0.6, True),
    }
    found = {n: (a.selector, a.keep, a.stored_losses) for n, a in first.arms.items()}
    assert found == wanted
    assert list(second.arms) == ["regular", "filtered", "random", "top_loss"] and second.seed == 1
    assert first.corpus.weights["noise"] == 0.4  # chance of kept precision is 0.60


TINY_UTILITY = [
    *(word for word in TINY if not word.startswith("reference")),
    "reference.steps=2",
    "train.steps=4",
    "corpus.heldout_problems=24",
    "eval.tasks=[heldout_bits, heldout_choice]",
    "eval.heldout_batches=4",
    "eval.heldout_points=2",
]


@pytest.mark.slow
def test_all_runs_and_tables(tmp_path):
    results = utility.run(tmp_path, TINY_UTILITY, (0, 1), None, False)
    assert len(results["small"]) == 7 + 4
    text = (tmp_path / "utility.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| filtered ")]
    assert len(rows) == 3 and "±" in rows[0] and "one seed" not in rows[0]
    assert "of 2" in rows[0] and (tmp_path / "report.html").is_file()


def test_stored_losses_keep_what_a_live_reference_keeps(tiny_in, tmp_path):
    """float16 stores a loss to a thousandth: at most a few rows at the margin differ."""
    arms = ["arms.stored.selector=excess_loss", "arms.stored.keep=0.6"]
    arms += ["arms.stored.stored_losses=true", "train.steps=3"]
    recipe = tiny_in(tmp_path / "seed0", *arms)
    run_recipe(recipe)
    results = utility.collect(tmp_path)
    numbers = {n["arm"]: n for n in results["small"]}
    live, stored = numbers["filtered"], numbers["stored"]
    assert stored["bits"] == pytest.approx(live["bits"], rel=2e-3)
    assert stored["kept"] == pytest.approx(live["kept"], abs=0.02)
    assert live["kept_chance"] == pytest.approx(0.65, abs=0.02)  # 35 % noise
    seconds = json.loads((tmp_path / "seed0/reference/losses.json").read_text())["seconds"]
    assert seconds > 0
    text = (tmp_path / "utility.md").read_text()
    for title in ("At equal tokens: 384 ", "At equal wall-clock", "What is kept"):
        assert title in text
    shutil.rmtree(tmp_path / "seed0")


def test_published_files_as_tasks(finished, tmp_path):
    (tmp_path / "blimp").mkdir()
    for name in ("b", "a"):
        lines = [{"sentence_good": f"{name} {i}", "sentence_bad": "x"} for i in range(3)]
        (tmp_path / "blimp" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    problem = {"question": "1 + 1?", "answer": "2\n#### 2"}
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(problem) + "\n")
    pairs = blimp_pairs(tmp_path)["test"]
    assert pairs["sentence_good"][:4] == ["a 0", "b 0", "a 1", "b 1"]
    assert gsm8k_texts(tmp_path)["test"]["text"] == ["Question: 1 + 1?\nAnswer: 2\n#### 2\n"]
    model = finished[1] / "arms" / "filtered" / "model"
    scores = evaluate(model, FILE_TASKS, data_dir=tmp_path)
    assert scores["gsm8k_text"]["items"] == 1 and scores["blimp_pairs"]["items"] == 6


def test_smollm2_recipes(tmp_path):
    problems = tmp_path / "gsm8k_train.jsonl"
    problems.write_text("".join(f'{{"question": "{i}"}}\n' for i in range(5)))
    halves = utility_smollm2.split(problems, tmp_path / "data")
    assert [len(path.read_text().splitlines()) for path in halves.values()] == [3, 2]
    assert not set(halves["reference"].open()) & set(halves["target"].open())
    clean = utility_smollm2.recipe_of(
        "reference", tmp_path, halves["reference"], None, 4, ARMS["regular"]
    )
    assert list(clean.data.sources) == ["gsm8k"] and clean.filter.selector == "none"
    assert clean.data.sources["gsm8k"].template == GSM8K
    keys = [*ARMS["filtered"], "filter.reference=there"]
    mixed = utility_smollm2.recipe_of("filtered", tmp_path, halves["target"], tmp_path, 4, keys)
    assert {s.weight for s in mixed.data.sources.values()} == {1.0}
    assert (mixed.filter.selector, mixed.filter.keep) == ("excess_loss", 0.6)
    assert mixed.model.weights == clean.model.weights


def test_precision_is_decided_once_and_a_run_that_has_begun_keeps_its_own(tmp_path, monkeypatch):
    timed = iter(["bf16-mixed", "32-true"])
    monkeypatch.setattr(utility_smollm2, "quicker_precision", lambda: next(timed))
    new, begun = tmp_path / "new", tmp_path / "begun"
    assert [precision_of(new, name) for name in ("reference", "regular")] == ["bf16-mixed"] * 2
    assert json.loads((new / "precision.json").read_text()) == {"precision": "bf16-mixed"}
    recipe = utility_smollm2.recipe_of("regular", new, tmp_path / "x", None, 4, ARMS["regular"])
    (begun / "regular").mkdir(parents=True)
    (begun / "regular" / "recipe.yaml").write_text(to_yaml(recipe))  # of a time without the file
    assert [precision_of(begun, name) for name in ("regular", "random")] == ["bf16-mixed"] * 2
    write_json(new / "precision.json", {"precision": "32-true"})
    assert precision_of(new, "random") == "32-true" and list(timed) == ["32-true"]


def test_smollm2_results_are_of_the_runs_own_precision(tmp_path):
    assert utility_smollm2.collect(tmp_path) is None
    keys = [*ARMS["regular"], "trainer.precision=bf16-mixed"]
    recipe = utility_smollm2.recipe_of("regular", tmp_path, tmp_path / "x", None, 4, keys)
    (tmp_path / "regular").mkdir()
    (tmp_path / "regular" / "recipe.yaml").write_text(to_yaml(recipe))
    score = {"value": 0.5, "stderr": None}
    write_json(tmp_path / "base.eval.json", {"gsm8k_text": score, "blimp_pairs": score})
    results = utility_smollm2.collect(tmp_path)
    assert results["precisions"] == ["bf16-mixed"] and list(results["runs"]) == ["base"]
    assert "### SmolLM2-135M, bfloat16 matrices, one seed" in smollm2(results)
