"""Selectors against hand computations."""

import pytest
import torch

import lightning_collider as lc
from lightning_collider.filtering import selectors
from lightning_collider.filtering.token_filter import TokenFilter

NONE = -100


def test_a_row_has_a_target_where_the_next_label_is_one():
    labels = torch.tensor([[5, 6, NONE, 8], [NONE, 2, 3, 4]])
    expected = torch.tensor([[True, False, True, False], [True, True, True, False]])
    assert selectors.has_target(labels).equal(expected)


def test_select_keeps_the_highest_excess_loss():
    # Targets at t = 0..4; excess losses 1, 4, 0, 3, 2: of n = 5, floor(.6 * 5 + .5) = 3 stay.
    losses = torch.tensor([[2.0, 5.0, 1.0, 4.0, 3.0, 9.0]])
    reference = torch.ones(1, 6)
    labels = torch.arange(6)[None]
    keep = lc.select(losses, reference, labels, keep=0.6)
    assert keep.tolist() == [[False, True, False, True, True, False]]


@pytest.mark.parametrize(
    ("n", "keep", "expected"),
    [(5, 0.5, 3), (5, 0.1, 1), (4, 0.1, 0), (10, 0.25, 3), (7, 0.6, 4), (1, 0.5, 1), (1, 0.4, 0)],
)
def test_select_rounds_half_up(n, keep, expected):
    labels = torch.arange(n + 1)[None]
    losses = torch.rand(1, n + 1)
    kept = lc.select(losses, torch.zeros(1, n + 1), labels, keep=keep)
    assert int(kept.sum()) == expected == int(keep * n + 0.5)


def test_ties_go_to_the_earlier_row():
    labels = torch.zeros(2, 4, dtype=torch.long)
    keep = lc.select(torch.ones(2, 4), torch.zeros(2, 4), labels, keep=0.5)
    # 6 rows with a target in reading order, the first three stay.
    assert keep.tolist() == [[True, True, True, False], [False] * 4]


def test_over_the_batch_or_each_sequence():
    labels = torch.zeros(2, 5, dtype=torch.long)
    losses = torch.tensor([[9.0, 8.0, 7.0, 6.0, 0.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    zero = torch.zeros(2, 5)
    batch = lc.select(losses, zero, labels, keep=0.5)
    assert batch.tolist() == [[True] * 4 + [False], [False] * 5]
    sequence = lc.select(losses, zero, labels, keep=0.5, over="sequence")
    assert sequence.tolist() == [[True, True, False, False, False]] * 2


def test_rows_without_a_target_stay_only_at_keep_1():
    labels = torch.full((1, 4), NONE)
    losses = torch.rand(1, 4)
    assert not lc.select(losses, torch.zeros(1, 4), labels, keep=0.9).any()
    assert lc.select(losses, torch.zeros(1, 4), labels, keep=1.0).all()


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_keep_outside_its_range_is_refused(keep):
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        lc.select(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long), keep=keep)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        lc.ColliderStrategy(keep=keep, selector="top_loss")


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="same shape"):
        lc.select(torch.ones(1, 3), torch.ones(1, 2), torch.ones(1, 3, dtype=torch.long))


def test_top_loss_and_threshold():
    labels = torch.zeros(1, 5, dtype=torch.long)
    losses = torch.tensor([[0.1, 3.0, 2.0, 1.0, 9.0]])
    assert selectors.top_loss(losses, labels, 0.5, "batch").tolist() == [
        [False, True, True, False, False]
    ]
    above = TokenFilter("threshold", threshold=0.5)(losses, labels, None, None)
    assert above.tolist() == [[False, True, True, True, False]]
    excess = TokenFilter("threshold", threshold=0.5)(losses, labels, None, torch.full((1, 5), 1.6))
    assert excess.tolist() == [[False, True, False, False, False]]


def test_random_is_a_function_of_seed_step_forward_and_rank():
    labels = torch.zeros(1, 101, dtype=torch.long)
    losses = torch.rand(1, 101)

    def draws(seed=0, step=3, rank=0):
        token_filter = TokenFilter("random", keep=0.5, seed=seed)
        token_filter.rank = rank
        token_filter.advance(step)
        return [token_filter(losses, labels, None, None) for _ in range(2)]

    first, second = draws()
    assert int(first.sum()) == int(second.sum()) == 50
    assert not first.equal(second)
    assert first.equal(draws()[0]) and second.equal(draws()[1])
    assert not first.equal(draws(seed=1)[0])
    assert not first.equal(draws(step=4)[0])
    assert not first.equal(draws(rank=1)[0])


def test_keep_warmup_falls_linearly_from_1():
    token_filter = TokenFilter("top_loss", keep=0.6, keep_warmup_steps=4)
    fractions = []
    for step in (0, 1, 2, 4, 9):
        token_filter.advance(step)
        fractions.append(token_filter.fraction())
    assert fractions == pytest.approx([1.0, 0.9, 0.8, 0.6, 0.6])


def test_a_callable_sees_losses_and_is_checked():
    labels = torch.zeros(1, 3, dtype=torch.long)
    losses = torch.tensor([[1.0, 2.0, 0.0]])
    token_filter = TokenFilter(lambda losses, reference, labels: losses > 1.5)
    assert token_filter(losses, labels, None, None).tolist() == [[False, True, False]]
    wrong = TokenFilter(lambda losses, reference, labels: losses[:, :2] > 1.5)
    with pytest.raises(ValueError, match="shape"):
        wrong(losses, labels, None, None)
    with pytest.raises(ValueError, match="bool"):
        TokenFilter(lambda losses, reference, labels: losses)(losses, labels, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selector": "excess"}, "excess_loss"),
        ({"selector": "top_loss", "over": "rank"}, "over must be"),
        ({"selector": "top_loss", "keep_warmup_steps": -1}, "keep_warmup_steps"),
        ({"selector": "threshold"}, "threshold="),
        ({"selector": "random", "threshold": 1.0}, "threshold="),
        ({"selector": "excess_loss", "reference": "no/such/folder"}, "config.json"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenFilter(**settings)


def test_excess_loss_asks_for_a_reference():
    labels = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="reference"):
        TokenFilter("excess_loss")(torch.ones(1, 3), labels, None, None)
    with pytest.raises(ValueError, match="reference_losses"):
        TokenFilter("excess_loss")(torch.ones(1, 3), labels, None, torch.ones(1, 2))
