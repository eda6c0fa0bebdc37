"""The `collider` command: what it prints, its exit status, and that a wheel has all it needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_collider import cli
from tests.training.conftest import TINY

ROOT = Path(__file__).parents[1]
NO_SOURCES = (".*", "build", "dist", "runs", "tests", "*.egg-info", "__pycache__")


def test_help_lists_the_sub_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_sub_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert cli.COMMANDS[command][0].split()[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "train.steps=7", "--print"],
        ["quickstart", "--print", "train.steps=7"],
        ["--print", "quickstart", "train.steps=7"],
    ],
)
def test_print_shows_the_resolved_recipe(words, capsys):
    assert cli.main(["train", *words]) == 0
    assert "  steps: 7\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "quickstart", "train.stepz=7"], "did you mean 'train.steps'?"),
        (["train", "slowstart"], "no recipe 'slowstart'"),
        (["train", "quickstart", "arms.filtered.keep=2"], "above 0 and at most 1"),
        (["eval", "nowhere"], "no checkpoint nowhere"),
        (["eval", "nowhere", "--json", __file__], "exists and is not overwritten"),
    ],
)
def test_mistake_of_the_user_is_one_message(words, message, capsys):
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("collider: ") and message in printed.err


def test_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "quickstart", "--pritn"])
    assert stop.value.code == 2
    assert "--pritn" in capsys.readouterr().err


def test_error_of_a_library_keeps_its_traceback(monkeypatch):
    broken = ("", cli._no_arguments, lambda args: json.loads("{"))
    monkeypatch.setitem(cli.COMMANDS, "build", broken)
    with pytest.raises(json.JSONDecodeError):
        cli.main(["build"])


def test_build_prints_the_compiled_file(capsys):
    assert cli.main(["build"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Environment of a shell in which only a wheel built from the checkout provides the package."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools would put files of an older build into the wheel.
    sources = shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*NO_SOURCES))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(sources)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    # Lightning leaves the address of this process's group in the environment.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
    return {**inherited, "PYTHONPATH": str(folder / "site")}


def collider(environment, folder, *words):
    """Run the installed command in a folder outside the checkout."""
    command = [f"{environment['PYTHONPATH']}/bin/collider", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_wheel_is_complete(installed, tmp_path):
    """The package, its recipes, tasks and C++ sources: it trains, and scores what it trained."""
    code = "import lightning_collider; print(lightning_collider.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=installed, capture_output=True, text=True
    )
    assert found.stdout.startswith(installed["PYTHONPATH"]), found.stderr
    done = collider(installed, tmp_path, "train", "quickstart", "out=here", *TINY)
    assert done.returncode == 0, done.stderr
    assert "heldout_bits: bits_per_byte" in done.stdout
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert results["arms"]["filtered"]["train"]["steps"] == 6
    model = "here/arms/filtered/model"
    expected = results["arms"]["filtered"]["eval"]
    words = ["eval", model, "--tasks", *expected, "--batch-size", "32", "--json", "scores.json"]
    scored = collider(installed, tmp_path, *words)
    assert scored.returncode == 0, scored.stderr
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["checkpoints"] == {model: expected}
    assert "heldout_bits: bits_per_byte" in scored.stdout
    assert (tmp_path / "here" / "report.html").is_file()
