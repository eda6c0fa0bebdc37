"""The report: its numbers against the run's, and what a page must not contain."""

import copy
import json
import math
import re
import shutil

import pytest
import torch
from PIL import Image

from lightning_collider import cli
from lightning_collider.eval.flops import step_flops
from lightning_collider.report.page import charts, table_html, to_page, turned
from lightning_collider.report.plots import write_plots
from lightning_collider.report.read import read_run, read_runs
from lightning_collider.report.tables import (
    Table,
    bench_table,
    precision,
    scores_table,
    selection_table,
    speed_table,
    step_cost,
)
from lightning_collider.report.write import write_report
from lightning_collider.training.utilisation import peak_of

BENCH = {
    "shape": "tinyllama",
    "layers": 4,
    "batch": 1,
    "seq": 2048,
    "keep": 0.6,
    "dtype": "bf16",
    "date": "2026-12-01",
    "machine": {"processor": "Xeon", "threads": 2},
    "floor_backward": 0.591,
    "floor_step": 0.726,
    "peak_memory_ratio": 0.549,
    **{
        key: number
        for name, value in {
            "backward_vs_hf": 0.615,
            "step_vs_hf": 0.721,
            "backward_vs_dense": 0.62,
            "step_vs_dense": 0.724,
            "dense_vs_hf": 1.0,
        }.items()
        for key, number in ((name, value), (f"{name}_iqr", [value - 0.01, value + 0.01]))
    },
}


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_main_job_writes_the_report(finished):
    page = (finished[1] / "report.html").read_text()
    data = embedded(page)
    assert data["arms"] == ["regular", "filtered"]
    assert [sample["name"] for sample in data["samples"]] == ["regular", "filtered"]
    own = page.replace(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1], "")
    assert not re.search(r'(src|href)="(?!data:)|url\((?!#)|@import|https?://', own)  # no network
    assert "$" not in re.sub(r"<script.*", "", page, flags=re.DOTALL)  # every blank is filled


def test_curves_are_those_of_the_log(finished):
    run = read_run(finished[1])
    drawn = {chart["title"]: chart for chart in charts(run.arms)}
    for number, arm in enumerate(("regular", "filtered")):
        rows = [json.loads(r) for r in (finished[1] / "arms" / arm / "metrics.jsonl").open()]
        rows = [row for row in rows if "tokens_per_s" in row]
        assert [row["input_tokens"] for row in rows] == [256, 512, 768]
        expected = [[row["input_tokens"], row["seconds"], row["loss_all"]] for row in rows]
        assert drawn["Training loss, all tokens"]["series"][number]["points"] == expected
    held = json.loads((finished[1] / "arms/filtered/heldout.jsonl").read_text().splitlines()[-1])
    target = held["sources"]["target"]
    bits = drawn["Held-out target, bits per byte"]["series"][1]["points"][-1][2]
    assert bits == pytest.approx(target["nats"] / math.log(2) / target["bytes"])
    assert [s["arm"] for s in drawn["Kept tokens that are not noise"]["series"]] == [1]


def test_precision_by_hand():
    """10 target, 4 general, 6 noise tokens; 8, 2 and 2 are kept."""
    counts = {
        "target": {"targets": 10, "kept": 8},
        "general": {"targets": 4, "kept": 2},
        "noise": {"targets": 6, "kept": 2},
    }
    found = precision(counts)
    assert found["kept"] == pytest.approx(10 / 12)
    assert found["kept_chance"] == pytest.approx(14 / 20)
    assert found["dropped"] == pytest.approx(4 / 8)
    assert found["dropped_chance"] == pytest.approx(6 / 20)
    assert found["share_general"] == 0.5
    nothing = precision({"target": {"targets": 3, "kept": 3}})
    assert nothing["kept"] == 1.0 and math.isnan(nothing["dropped"])


def test_tables_of_a_run(finished):
    _, folder, results = finished
    arms = read_run(folder).arms
    scores = scores_table(arms)
    assert scores.columns == ["heldout_bits ↓", "general_bits ↓", "heldout_choice ↑"]
    value = results["arms"]["filtered"]["eval"]["heldout_bits"]["value"]
    assert scores.rows[1][1] == f"{value:.3f}"
    assert [row[0] for row in selection_table(arms).rows] == ["filtered"]
    table = speed_table(arms)
    speed = {row[0]: dict(zip(table.columns, row[1:], strict=True)) for row in table.rows}
    assert speed["regular"]["time / regular"] == speed["regular"]["floor"] == "1.000"
    flops = arms[1].flops
    floor = (2 * flops.forward + flops.filtered_backward) / (flops.forward + flops.dense_backward)
    assert float(speed["filtered"]["floor"]) == pytest.approx(floor, abs=1e-3)
    tokens = float(speed["filtered"]["tokens/s"].replace(",", ""))
    kept = float(speed["filtered"]["kept rows/s"].replace(",", ""))
    assert kept / tokens == pytest.approx(76 / 128, abs=0.02)


def test_a_run_on_bags_costs_by_its_positions(finished):
    """Bags of 4 tokens for the same time: 4 times the tokens, and the time and FLOPs of a step."""
    base, bags = (copy.deepcopy(read_run(finished[1]).arms[0]) for _ in range(2))
    bags.name = "bags"
    last = bags.log[-1]
    last["positions"], last["input_tokens"] = last["input_tokens"], 4 * last["input_tokens"]
    base.log[-1].pop("positions")  # an older run's, on single tokens
    table = speed_table([base, bags])
    plain, bagged = (dict(zip(table.columns, row[1:], strict=True)) for row in table.rows)
    assert bagged["time / regular"] == "1.000"
    assert bagged["GFLOP/s executed"] == plain["GFLOP/s executed"]
    speeds = [float(row["tokens/s"].replace(",", "")) for row in (plain, bagged)]
    assert speeds[1] == pytest.approx(4 * speeds[0], rel=1e-3)


def test_flops_of_a_run_by_hand(finished):
    """Two blocks of width 32: q, o 32 x 32, k, v 32 x 16, MLP 3 x 32 x 48; head 32 x vocabulary."""
    arms = read_run(finished[1]).arms
    vocabulary = finished[2]["corpus"]["vocab_size"]
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * vocabulary
    keep = torch.ones(1, 64, dtype=torch.bool)
    assert arms[0].flops == step_flops(linear, 32, 2, keep)


def test_mfu_is_of_the_dense_peak_of_device_and_data_type(finished):
    """The runs are float32, so an H200's 66.9 TFLOP/s count, and not the 989.4 of bfloat16."""
    arms = copy.deepcopy(read_run(finished[1]).arms)
    for arm in arms:
        arm.log[-1]["seconds"], arm.log[-1]["positions"] = 1e-9, arm.length
    table = speed_table(arms, "NVIDIA H200")
    found = dict(zip(table.columns, table.rows[0][1:], strict=True))
    flops = arms[0].flops.forward + arms[0].flops.dense_backward
    assert found["MFU executed"] == found["MFU dense-equivalent"] == f"{flops / 66.9e3:.1%}"
    assert "MFU: part of the dense peak, 67 TFLOP/s." in table.notes
    for arm in arms:
        arm.precision, arm.devices = "bf16-mixed", 2
    halved = speed_table(arms, "NVIDIA H200").rows[0][3]
    assert halved == f"{flops / (2 * 989.4e3):.1%}"
    assert "GFLOP/s executed" in speed_table(arms, "Radeon").columns


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 PCIe", "bf16-true", 756),
        ("NVIDIA H100 NVL", "32-true", 60),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
        ("NVIDIA L40S", "32-true", 91.6),
        ("NVIDIA GH200 480GB", "bf16-mixed", None),  # names that a known one is only a part of
        ("NVIDIA RTX A4000", "bf16-mixed", None),
    ],
)
def test_peaks_by_name_and_data_type(name, precision, tera):
    assert peak_of(name, precision) == (None if tera is None else pytest.approx(tera * 1e12))


def test_the_floor_of_the_tile_is_the_tables(finished):
    """A token's FLOPs: a run of other sequences than the baseline's is compared a token."""
    run = copy.deepcopy(read_run(finished[1]))
    run.arms[1].length *= 2
    floor = step_cost(run.arms[1]) / step_cost(run.arms[0]) / 2
    assert f"floor {floor:.2f}<" in to_page([run], [])
    assert speed_table(run.arms).rows[1][6] == f"{floor:.3f}"


def test_several_runs_and_a_bench(finished, tmp_path, capsys):
    folder = finished[1]
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    out = tmp_path / "two.html"
    words = [str(folder), str(folder), "--out", str(out), "--bench", str(tmp_path / "bench.json")]
    assert cli.main(["report", *words]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    assert embedded(page)["arms"] == [f"{folder}/regular", f"{folder}/filtered"] * 2
    assert "0.615 (0.605 to 0.625)" in page and "0.591" in page
    assert bench_table(BENCH).rows[-1] == ["peak memory, filtered / Hugging Face", "0.549", "-"]


def test_report_of_several_runs_lies_where_they_do(finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished[1], tmp_path / "runs" / name)
    assert write_report([tmp_path / "runs/one", tmp_path / "runs/two"]).parent == tmp_path / "runs"
    names = [
        a.name for r in read_runs([tmp_path / "runs/one", tmp_path / "runs/two"]) for a in r.arms
    ]
    assert names == ["one/regular", "one/filtered", "two/regular", "two/filtered"]


def test_unfinished_run_is_shown(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    for path in ("results.json", "arms/filtered/train.json", "arms/filtered/eval.json"):
        (tmp_path / "run" / path).unlink()
    shutil.rmtree(tmp_path / "run/arms/regular")
    page = write_report([tmp_path / "run"]).read_text()
    assert embedded(page)["arms"] == ["filtered"] and "not finished: filtered" in page


def test_text_cannot_leave_its_place(finished):
    run = copy.deepcopy(read_run(finished[1]))
    run.title = "<b>run</b>"
    run.arms[1].sample["tokens"][0][0] = "</script><script>alert(1)"
    page = to_page([run], [])
    assert "<b>run" not in page and "<script>alert" not in page
    assert embedded(page)["samples"][1]["tokens"][0][0] == "</script><script>alert(1)"


def test_few_arms_are_columns():
    table = Table("t", ["x", "y"], [["a", "1", "2"], ["b", "3", "4"]], [])
    assert turned(table, {"a": 0, "b": 1}).rows == [["x", "1", "3"], ["y", "2", "4"]]
    assert turned(table, {}) is table
    assert "<td>4</td>" in table_html(table, {})


def test_plots_are_written(finished, tmp_path):
    paths = write_plots([finished[1]], tmp_path)
    assert {"training-loss-all-tokens.png", "held-out-target-bits-per-byte.png"} <= {
        path.name for path in paths
    }
    with Image.open(paths[0]) as image:
        assert image.size == (1020, 720)
        assert len(image.convert("RGB").getcolors(2**20)) > 50  # lines and text, no empty sheet


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is no run"),
        (lambda folder: (folder / "recipe.yaml").write_text("name: x\n"), "lacks"),
    ],
)
def test_mistakes_are_named(make, message, tmp_path, capsys):
    make(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_run_without_numbers_and_a_file_that_is_no_bench(finished, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text((finished[1] / "recipe.yaml").read_text())
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no numbers yet" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text("{}")
    words = [str(finished[1]), "--bench", str(tmp_path / "bench.json")]
    assert cli.main(["report", *words]) == 2
    assert "was not written by `collider bench --json`" in capsys.readouterr().err


def test_only_a_page_is_overwritten_and_a_bench_has_to_be_there(finished, tmp_path, capsys):
    folder, notes = str(finished[1]), tmp_path / "notes.txt"
    notes.write_text("mine\n")
    assert cli.main(["report", folder, "--out", str(notes)]) == 2
    assert "name another file, or one that ends in .html" in capsys.readouterr().err
    assert notes.read_text() == "mine\n"
    page = tmp_path / "new" / "page.html"
    assert [cli.main(["report", folder, "--out", str(page)]) for _ in range(2)] == [0, 0]
    assert embedded(page.read_text())["arms"] == ["regular", "filtered"]
    capsys.readouterr()
    assert cli.main(["report", folder, "--bench", str(tmp_path / "missing.json")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("collider: no file ") and printed.count("\n") == 1
