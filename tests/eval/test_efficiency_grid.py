"""The table of benches: its lines come back, the fit is right, a small grid runs to its plot."""

import pytest

from lightning_collider.eval import efficiency, efficiency_grid
from lightning_collider.eval.efficiency_grid import GROUP, append, latest, linearity, read
from tests.eval.test_efficiency import TINY


def row(keep, ratio, **changed):
    return {"keep": keep, "backward_vs_dense": ratio, **changed}


def test_fit_is_that_of_a_line_through_the_dense_step():
    # On y = 0.1 + 0.9 x, on which the dense step lies too.
    intercept, fit = linearity([row(0.2, 0.28), row(0.6, 0.64)])
    assert intercept == pytest.approx(0.1) and fit == pytest.approx(1.0)
    assert linearity([row(0.6, 0.6), row(0.6, 0.7)]) is None
    # x = 0, 0.5, 1 and y = 0, 1, 1: slope 1, intercept 1/6, R^2 = 0.5^2 / (0.5 x 2/3) = 3/4.
    intercept, fit = linearity([row(0.0, 0.0), row(0.5, 1.0)])
    assert intercept == pytest.approx(1 / 6) and fit == pytest.approx(0.75)


def test_the_plot_shows_what_was_measured_last(tmp_path):
    file = tmp_path / "rows.csv"
    for commit, dtype, keep in [
        ("old", "bf16", 0.6),
        ("old", "fp32", 0.6),
        ("new", "bf16", 0.5),
        ("new", "bf16", 0.3),
    ]:
        append(file, dict.fromkeys(GROUP, "x") | {"dtype": dtype, "commit": commit, "keep": keep})
    shown = {key[4]: [row["keep"] for row in rows] for key, rows in latest(read(file)).items()}
    assert shown == {"bf16": ["0.3", "0.5"], "fp32": ["0.6"]}


def test_other_columns_are_refused(tmp_path):
    file = tmp_path / "rows.csv"
    append(file, {"shape": "a", "keep": 0.5})
    with pytest.raises(ValueError, match=r"other columns \(commit\)"):
        append(file, {"shape": "a", "keep": 0.5, "commit": "x"})
    with pytest.raises(ValueError, match="their order"):
        append(file, {"keep": 0.5, "shape": "a"})
    assert len(file.read_text().splitlines()) == 2


def test_without_rows_it_asks_what_to_measure(tmp_path, capsys):
    with pytest.raises(SystemExit):
        efficiency_grid.main(["--rows", str(tmp_path / "rows.csv")])
    assert "nothing was measured yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        efficiency_grid.main(["fp16"])
    assert "dtypes are among" in capsys.readouterr().err


def test_grid_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(efficiency.SHAPES, "tiny", TINY)
    monkeypatch.setattr(efficiency_grid, "GATE", [("tiny", 2, 32, 1, (0.6, 0.3))])
    rows, figure = tmp_path / "rows.csv", tmp_path / "plot.png"
    efficiency_grid.main(["fp32", "--rows", str(rows), "--figure", str(figure)])
    printed = capsys.readouterr().out
    ((key, found),) = read(rows).items()
    assert key[:6] == ("tiny", "2", "32", "1", "fp32", "cpu")
    assert [r["keep"] for r in found] == ["0.3", "0.6"]  # sorted
    for r in found:
        low, middle, high = (float(r[f"step_vs_hf{end}"]) for end in ("_low", "", "_high"))
        assert 0 < low <= middle <= high and r["versions"].startswith("python 3")
    assert "| tiny, 2 x 32, B=1, fp32 | 0.3 |" in printed and "R^2" in printed
    assert figure.stat().st_size > 1000
    efficiency_grid.main(["--rows", str(rows), "--figure", str(figure)])  # prints them again
    assert "| tiny, 2 x 32, B=1, fp32 | 0.3 |" in capsys.readouterr().out


def test_lines_of_one_run_bear_the_commit_that_it_began_at(tmp_path, monkeypatch):
    """The first line makes a checkout differ from its commit, which is no other code."""
    found = iter(["abc", "abc+", "abc+"])
    monkeypatch.setattr(efficiency_grid, "commit", lambda: next(found))
    result = {"keep": 0.5, "load_average": [1.0], "machine": {}, "versions": {}}
    monkeypatch.setattr(efficiency_grid, "bench", lambda *_, **__: [result, result])
    monkeypatch.setattr(efficiency_grid, "table", lambda _: "")
    efficiency_grid.measure(["fp32"], "cpu", 1, False, tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert len(lines) == 4 and {line.rsplit(",", 1)[1] for line in lines} == {"abc"}
