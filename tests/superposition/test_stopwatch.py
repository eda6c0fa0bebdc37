"""The clock of the speeds, by hand."""

from types import SimpleNamespace

import pytest

from lightning_collider.superposition import stopwatch
from lightning_collider.superposition.stopwatch import Stopwatch


@pytest.fixture
def wait(monkeypatch):
    """Function that lets so many seconds go by."""
    clock = SimpleNamespace(now=7.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(stopwatch, "time", fake)

    def go_by(seconds):
        clock.now += seconds

    return go_by


def test_stops_are_left_out(wait):
    clock = Stopwatch()
    wait(2)
    clock.stop()
    clock.stop()
    wait(10)
    assert clock.seconds == 2
    clock.go_on()
    wait(3)
    clock.go_on()  # it runs already
    wait(1)
    assert clock.seconds == 6
    clock.restart()
    wait(1)
    assert clock.seconds == 1


def test_a_restart_inside_a_stop_counts_from_its_end(wait):
    clock = Stopwatch()
    wait(2)
    with clock.stopped():
        wait(10)
        clock.restart()
        wait(20)
        with clock.stopped():  # the inner one does not let it run
            wait(1)
        wait(1)
        assert clock.seconds == 0
    wait(3)
    assert clock.seconds == 3


def test_an_error_inside_a_stop_lets_it_run_again(wait):
    clock = Stopwatch()
    with pytest.raises(KeyError), clock.stopped():
        raise KeyError
    wait(2)
    assert clock.seconds == 2
