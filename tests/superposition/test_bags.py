"""The label rule, documents and positions on examples written by hand."""

import pytest
import torch

from lightning_collider.superposition.bags import bag_positions, document_starts, make_bags

NO = -100


def row(*tokens):
    return torch.tensor([tokens])


TOKENS = row(*range(100, 112))


def test_a_bag_predicts_the_tokens_of_the_next():
    bags = make_bags(TOKENS, TOKENS, 4)
    assert bags.ids.tolist() == [[[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]]
    assert bags.targets.tolist() == [[[104, 105, 106, 107], [108, 109, 110, 111], [NO] * 4]]
    assert bags.member.all()
    assert bags.first.tolist() == [[0, 4, 8]]


def test_missing_labels_stay_missing():
    labels = TOKENS.clone()
    labels[0, [5, 8, 9, 10, 11]] = NO
    assert make_bags(TOKENS, labels, 4).targets.tolist() == [
        [[104, NO, 106, 107], [NO] * 4, [NO] * 4]
    ]


def test_bags_of_one_are_next_token_prediction():
    bags = make_bags(TOKENS, TOKENS, 1)
    assert bags.ids.flatten().tolist() == TOKENS[0].tolist()
    assert bags.targets.flatten().tolist() == [*range(101, 112), NO]


def test_rows_do_not_mix():
    ids = torch.arange(12).view(2, 6)
    bags = make_bags(ids, ids, 3)
    assert bags.ids.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert bags.targets.tolist() == [[[3, 4, 5], [NO] * 3], [[9, 10, 11], [NO] * 3]]


def test_neither_bag_nor_target_crosses_documents():
    # Documents of 5 and 7 tokens: bags of 4 + 1, then 4 + 3, of which the first three fit.
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, 5] = True
    bags = make_bags(TOKENS, TOKENS, 4, starts)
    assert bags.ids.tolist() == [[[100, 101, 102, 103], [104, 0, 0, 0], [105, 106, 107, 108]]]
    assert bags.member.sum(2).tolist() == [[4, 1, 4]]
    # The bag behind the last one is cut off with the tokens it holds, so it is no target either.
    assert bags.targets.tolist() == [[[104, NO, NO, NO], [NO] * 4, [NO] * 4]]
    assert bags.first.tolist() == [[0, 4, 5]]


def test_a_partial_bag_is_a_target_with_fewer_tokens():
    # Documents of 3, 2 and 1 tokens, bags of 2.
    starts = torch.tensor([[True, False, False, True, False, True]])
    bags = make_bags(row(1, 2, 3, 4, 5, 6), row(1, 2, 3, 4, 5, 6), 2, starts)
    assert bags.ids.tolist() == [[[1, 2], [3, 0], [4, 5]]]
    assert bags.targets.tolist() == [[[3, NO], [NO, NO], [NO, NO]]]


def test_documents_from_positions_padding_separators_and_rows():
    ids = row(7, 8, 9, 7, 8, 9)
    positions = row(0, 1, 2, 0, 1, 2)
    assert document_starts(ids, position_ids=positions).tolist() == [[1, 0, 0, 1, 0, 0]]
    mask = row(0, 0, 1, 1, 1, 1)
    assert document_starts(ids, attention_mask=mask).tolist() == [[0, 0, 1, 0, 0, 0]]
    # The separator ends its document.
    assert document_starts(ids, separator=8).tolist() == [[0, 0, 1, 0, 0, 1]]
    assert document_starts(ids, row_length=2).tolist() == [[1, 0, 1, 0, 1, 0]]
    assert document_starts(ids) is None


def test_positions_count_bags_and_begin_again_with_each_document():
    # Two packed documents of 7 and 5 tokens, bags of 2: 4 bags, then 3 of which 2 fit.
    positions = row(*range(7), *range(5))
    starts = document_starts(TOKENS, position_ids=positions)
    bags = make_bags(TOKENS, TOKENS, 2, starts)
    assert bag_positions(bags, positions).tolist() == [[0, 1, 2, 3, 0, 1]]
    # A separator inside a run of positions ends a bag, and positions go on.
    starts = document_starts(TOKENS, position_ids=row(*range(12)), separator=102)
    bags = make_bags(TOKENS, TOKENS, 2, starts)
    assert bags.member.sum(2).tolist() == [[2, 1, 2, 2, 2, 2]]
    assert bag_positions(bags, row(*range(12))).tolist() == [[0, 1, 2, 3, 4, 5]]
    # A window that begins at token position 8 begins at bag position 4.
    bags = make_bags(TOKENS, TOKENS, 2)
    assert bag_positions(bags, row(*range(8, 20))).tolist() == [[4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("bag_size", "message"),
    [(5, "12 tokens do not divide into bags of 5"), (0, "1 or more, got 0"), (2.0, "whole number")],
)
def test_mistakes(bag_size, message):
    with pytest.raises(ValueError, match=message):
        make_bags(TOKENS, TOKENS, bag_size)


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"same shape \(B, S\)"):
        make_bags(TOKENS, TOKENS[:, :8], 4)
