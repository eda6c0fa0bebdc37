"""The utility experiment: its arithmetic by hand, its recipes, and its tables from small runs."""

import json
import shutil

import pytest

from lightning_collider.eval import utility, utility_smollm2
from lightning_collider.eval.harness import FILE_TASKS, evaluate
from lightning_collider.eval.tasks.files.published import GSM8K, blimp_pairs, gsm8k_texts
from lightning_collider.eval.utility_tables import at_time, differences, interval, with_interval
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
    clean = utility_smollm2.recipe_of("reference", tmp_path, halves["reference"], None, 4, [])
    assert list(clean.data.sources) == ["gsm8k"] and clean.filter.selector == "none"
    assert clean.data.sources["gsm8k"].template == GSM8K
    keys = [*utility_smollm2.ARMS["filtered"], "filter.reference=there"]
    mixed = utility_smollm2.recipe_of("filtered", tmp_path, halves["target"], tmp_path, 4, keys)
    assert {s.weight for s in mixed.data.sources.values()} == {1.0}
    assert (mixed.filter.selector, mixed.filter.keep) == ("excess_loss", 0.6)
    assert mixed.model.weights == clean.model.weights
