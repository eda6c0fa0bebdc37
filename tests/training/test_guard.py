"""Which gradient norms count as spikes, by hand."""

import pytest

from lightning_collider.training.guard import FEWEST, REMEMBERED, GradientGuard


def guard_after(norms, factor=10.0, on_spike="skip"):
    guard = GradientGuard("stop", on_spike, factor)
    for norm in norms:
        guard.judge(norm)
    return guard


def test_a_spike_is_a_multiple_of_the_median():
    norms = [1.0, 3.0] * (FEWEST // 2)  # median 2
    assert guard_after(norms).judge(20.0) is None
    fault, policy = guard_after(norms).judge(20.1)
    assert policy == "skip" and "a norm of 20.1" in fault and "16 had a median of 2" in fault


def test_the_first_steps_are_no_spikes():
    assert guard_after([1.0] * (FEWEST - 1)).judge(1e6) is None
    assert guard_after([1.0] * FEWEST).judge(1e6) is not None
    assert guard_after([1.0] * FEWEST, factor=None).judge(1e6) is None


def test_a_new_level_is_soon_the_usual_one():
    guard = guard_after([1.0] * REMEMBERED)
    verdicts = [guard.judge(50.0) is not None for _ in range(REMEMBERED)]
    # With half of the remembered norms at 50 the median is 25.5, with one less it is 1.
    assert verdicts == [True] * (REMEMBERED // 2) + [False] * (REMEMBERED // 2)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_not_finite_has_its_own_policy_and_is_forgotten(norm):
    guard = guard_after([1.0] * FEWEST)
    assert guard.judge(norm) == ("is not finite", "stop")
    assert guard.state() == [1.0] * FEWEST


def test_state_goes_on():
    guard = guard_after([1.0] * FEWEST)
    other = GradientGuard("stop", "skip", 10.0)
    other.restore(guard.state())
    assert other.judge(11.0) is not None
