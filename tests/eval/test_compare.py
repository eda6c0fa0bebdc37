"""collider eval: a table over several checkpoints, and equal scores for equal weights."""

import json

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
