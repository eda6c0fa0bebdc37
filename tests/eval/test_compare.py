"""collider eval: a table over several checkpoints, and equal scores for equal weights."""

import json
import shutil

import pytest

from lightning_collider import cli
from lightning_collider.eval.compare import short_names, to_markdown
from lightning_collider.training.export import find_checkpoint

TASKS = ["heldout_bits", "heldout_choice"]


def run_eval(words, tmp_path, name):
    assert (
        cli.main(["eval", *map(str, words), "--tasks", *TASKS, "--json", str(tmp_path / name)]) == 0
    )
    return json.loads((tmp_path / name).read_text())


def test_exported_checkpoint_scores_as_the_runs_own(finished, tmp_path, capsys):
    """The run's folder, its checkpoint, what it exported and what `collider export` writes."""
    arm = finished[1] / "arms" / "filtered"
    checkpoint = find_checkpoint(arm)
    assert cli.main(["export", str(arm), str(tmp_path / "out")]) == 0
    paths = [arm, checkpoint, arm / "model", tmp_path / "out"]
    corpus = ["--corpus", finished[1] / "corpus"]
    found = run_eval([*paths, *corpus], tmp_path, "scores.json")
    assert list(found["checkpoints"]) == [str(path) for path in paths]
    expected = found["checkpoints"][str(checkpoint)]
    assert all(scores == expected for scores in found["checkpoints"].values())
    results = finished[2]["arms"]["filtered"]["eval"]
    assert expected == {task: pytest.approx(results[task]) for task in TASKS}
    assert {"lm-eval", "torch", "python"} <= found["versions"].keys()


def test_folder_of_a_comparison_means_its_arms(finished, tmp_path, capsys):
    found = run_eval([finished[1], "--limit", 3], tmp_path, "arms.json")
    names = [str(finished[1] / "arms" / name) for name in ("filtered", "regular")]
    assert list(found["checkpoints"]) == names
    assert found["checkpoints"][names[0]]["heldout_choice"]["items"] == 3
    assert "| filtered | regular |" in " ".join(capsys.readouterr().out.split())


def test_table_has_a_column_for_each_checkpoint():
    score = {"metric": "acc", "value": 0.25, "stderr": 0.01, "items": 40}
    bits = {"metric": "bits_per_byte", "value": 1.5, "stderr": None, "items": 7}
    lines = to_markdown(
        {"runs/a/model": {"x": score, "y": bits}, "runs/b": {"x": score, "y": bits}}
    )
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines.splitlines()]
    assert cells[0] == ["", "a/model", "b"]
    assert cells[2] == ["x: acc", *["0.2500 ± 0.0100 (40)"] * 2]
    assert cells[3] == ["y: bits_per_byte", *["1.5000 (7)"] * 2]


def test_names_lose_what_all_share():
    assert short_names(["runs/q/arms/a", "runs/q/arms/b"]) == ["a", "b"]
    assert short_names(["runs/q"]) == ["q"]
    assert short_names(["runs/q", "/other/q"]) == ["runs/q", "/other/q"]


def test_suite_and_tasks_exclude_each_other(tmp_path, capsys):
    assert cli.main(["eval", str(tmp_path), "--suite", "offline", "--tasks", "heldout_bits"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_models_that_would_be_asked_different_items_are_refused(finished, tmp_path, capsys):
    model = finished[1] / "arms" / "filtered" / "model"
    shutil.copytree(model, tmp_path / "alone")
    for name, count in (("same", None), ("other", 5)):
        shutil.copytree(model, tmp_path / name / "model")
        shutil.copytree(finished[1] / "corpus", tmp_path / name / "corpus")
        problems = tmp_path / name / "corpus" / "heldout.jsonl"
        problems.write_text("".join(problems.open().readlines()[:count]))
    for other in ("alone", "other/model"):
        words = ["eval", str(model), str(tmp_path / other), "--tasks", *TASKS]
        assert cli.main(words) == 2
        printed = capsys.readouterr().err
        assert "different items" in printed and "--corpus" in printed
        assert str(finished[1] / "corpus") in printed
    same = run_eval([model, tmp_path / "same/model", "--limit", 3], tmp_path, "same.json")
    first, second = same["checkpoints"].values()
    assert first == second
    corpus = ["--corpus", finished[1] / "corpus", "--limit", 3]
    given = run_eval([model, tmp_path / "alone", *corpus], tmp_path, "given.json")
    assert list(given["checkpoints"].values()) == [first, first]


def test_tasks_that_read_files_need_their_folder(finished, tmp_path, capsys):
    model, out = str(finished[1] / "arms" / "filtered" / "model"), tmp_path / "new" / "scores.json"
    words = ["eval", model, "--tasks", "gsm8k_text"]
    assert cli.main(words) == 2
    assert "gsm8k_text: name the folder of their files with --data" in capsys.readouterr().err
    assert cli.main([*words, "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: correct --data" in capsys.readouterr().err
    assert cli.main([*words, "--data", str(tmp_path)]) == 2
    assert "gsm8k_test.jsonl" in capsys.readouterr().err
    problem = {"question": "1 + 1?", "answer": "2\n#### 2"}
    (tmp_path / "gsm8k_test.jsonl").write_text(f"{json.dumps(problem)}\n" * 2)
    assert cli.main([*words, "--data", str(tmp_path), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["checkpoints"][model]["gsm8k_text"]["items"] == 2
