"""How eval/federated.py reads a run: by hand, on curves of a few points."""

import json

import pytest

from lightning_collider.eval.federated import EQUAL, average, chosen, final, reached

RUN = {"name": "FedAsync", "options": {}, "alpha": 0.1, "seed": 100, "horizon": 10}


def run(*points, **changed):
    """A record with an evaluation for each (seconds, accuracy); ten updates lie between two."""
    curve = [
        {"seconds": seconds, "accuracy": accuracy, "updates": 10 * i, "work": 1.0}
        for i, (seconds, accuracy) in enumerate(points)
    ]
    return {**RUN, **changed, "curve": curve}


def test_average_weighs_by_simulated_time():
    # 0.1 for 4 s, 0.5 for 4 s, 0.9 for 2 s.
    assert average(run((0, 0.1), (4, 0.5), (8, 0.9))) == pytest.approx(0.42)
    # What is evaluated behind the horizon does not count.
    assert average(run((0, 0.1), (4, 0.5), (12, 0.9))) == pytest.approx(0.34)


def test_final_is_the_mean_of_the_last_fifth():
    assert final(run((0, 0.1), (7, 0.5), (8, 0.8), (9, 0.6))) == pytest.approx(0.7)
    assert final(run((0, 0.1), (7, 0.5))) == 0.5  # nothing there: the last


def test_the_target_counts_from_the_first_of_three_in_a_row():
    lucky = run((0, 0.1), (1, 0.8), (2, 0.5), (3, 0.75), (4, 0.9), (5, 0.8), (6, 0.2))
    assert reached(lucky, "seconds") == 3 and reached(lucky, "updates") == 30
    assert reached(run((0, 0.8), (1, 0.8)), "seconds") is None


def test_the_equal_control_has_the_mixing_and_steps_of_the_chosen_fedadt(tmp_path):
    good, bad = run((0, 0.5)), run((0, 0.1))
    adt = {"mixing": 0.6, "power": 0.5, "steps": 1, "temperature": 1.0}
    records = [{**good, "name": name} for name in ("FedAvg", "FedAsync", "FedAsync + CE")]
    records += [{**good, "name": "FedBuff"}, {**good, "name": "FedADT", "options": adt}]
    records += [{**bad, "name": "FedADT", "options": {**adt, "steps": 5}}]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    best = chosen(file)
    assert best["FedADT"] == [adt]
    assert best[EQUAL] == [{"mixing": 0.6, "power": 0.5, "extra_steps": 1}]
    file.write_text(json.dumps(good) + "\n")
    with pytest.raises(ValueError, match="no tuning run of FedAvg"):
        chosen(file)
