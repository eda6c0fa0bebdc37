"""From a row of S tokens to L = S / s bags of s contiguous tokens, and what each bag predicts.

Bag t holds the tokens s t .. s t + s - 1 of its row and predicts those of bag t + 1: next-token
labels shifted left by s - 1 more (Token-Superposition Training, arXiv 2605.06546, section 3). The
paper does not say how packed documents are treated. Here a bag never mixes two of them and is never
told to predict another one's tokens: a document's last bag may hold fewer than s tokens, and
the row keeps its first L bags, so that a step costs what an ordinary one costs.

Shapes: B rows, S tokens, L bags, s tokens of a bag.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_collider.filtering.selectors import NO_TARGET


@dataclass(frozen=True)
class Bags:
    """A batch cut into bags.

    Attributes:
        ids: int64 (B, L, s), 0 where ``member`` is False.
        member: bool (B, L, s), False in the empty places of a document's last bag.
        targets: int64 (B, L, s), -100 where a target is missing.
        first: int64 (B, L), position in the row of each bag's first token.
        index: int64 (B, S), number of the bag that each token is in; L and more are left out.
    """

    ids: Tensor
    member: Tensor
    targets: Tensor
    first: Tensor
    index: Tensor

    def of_first_token(self, values: Tensor) -> Tensor:
        """Values (B, S) of tokens as values (B, L) of bags: those of each bag's first token."""
        return values.gather(1, self.first)


def check_bag_size(bag_size: int) -> None:
    """Raise ValueError unless the bag size is a whole number of 1 or more."""
    if not isinstance(bag_size, int) or bag_size < 1:
        raise ValueError(f"bag_size must be a whole number of tokens, 1 or more, got {bag_size!r}")


def make_bags(
    input_ids: Tensor, labels: Tensor, bag_size: int, starts: Tensor | None = None
) -> Bags:
    """Cut rows into bags.

    Args:
        input_ids, labels: int64 (B, S); labels as Hugging Face has them, not shifted, -100 ignored.
        bag_size: s.
        starts: bool (B, S), True at the first token of each document; None: a row is one document.

    Raises:
        ValueError: S is not a multiple of s, or the shapes differ.
    """
    check_bag_size(bag_size)
    if input_ids.dim() != 2 or input_ids.shape != labels.shape:
        raise ValueError(
            f"input_ids and labels must have the same shape (B, S), got {tuple(input_ids.shape)} "
            f"and {tuple(labels.shape)}"
        )
    batch, length = input_ids.shape
    if length == 0 or length % bag_size:
        raise ValueError(
            f"sequences of {length} tokens do not divide into bags of {bag_size}: use a sequence "
            f"length that is a multiple of bag_size"
        )
    n_bags = length // bag_size
    begins = torch.zeros_like(input_ids, dtype=torch.bool)
    begins[:, 0] = True
    if starts is not None:
        begins |= starts
    position = torch.arange(length, device=input_ids.device).expand(batch, length)
    in_document = position - position.where(begins, 0).cummax(1).values
    slot = in_document % bag_size
    index = (slot == 0).cumsum(1) - 1
    # Tokens behind the last bag all go to one place that is cut off: no sync, unlike a mask.
    place = (index * bag_size + slot).clamp(max=length)

    def scattered(values: Tensor, empty: int) -> Tensor:
        out = values.new_full((batch, length + 1), empty).scatter(1, place, values)
        return out[:, :length].view(batch, n_bags, bag_size)

    document = begins.cumsum(1)
    first = scattered(position, 0)[..., 0]
    labels_of_bags = scattered(labels, NO_TARGET)
    document_of_bag = document.gather(1, first)
    same = document_of_bag[:, 1:] == document_of_bag[:, :-1]
    targets = torch.full_like(labels_of_bags, NO_TARGET)
    targets[:, :-1] = labels_of_bags[:, 1:].where(same[..., None], NO_TARGET)
    member = scattered(torch.ones_like(input_ids), 0).bool()
    return Bags(scattered(input_ids, 0), member, targets, first, index)


def document_starts(
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    separator: int | None = None,
    row_length: int | None = None,
) -> Tensor | None:
    """Where documents begin, by all that is known of them.

    Args:
        input_ids: int64 (B, S).
        position_ids: int64 (1 or B, S), or None; a document begins where they do not go up by one.
        attention_mask: (B, S) of 1 for tokens and 0 for padding, or None; padding counts as a
            document of its own.
        separator: id of the token that ends each document, or None.
        row_length: a document begins at each multiple of it: S is made of shorter sequences.

    Returns:
        bool (B, S), or None when nothing is known.
    """
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    if position_ids is not None:
        starts |= run_starts(position_ids)
    if attention_mask is not None:
        starts[:, 1:] |= attention_mask[:, 1:].bool() != attention_mask[:, :-1].bool()
    if separator is not None:
        starts[:, 1:] |= input_ids[:, :-1] == separator
    if row_length is not None:
        starts[:, ::row_length] = True
    known = (position_ids, attention_mask, separator, row_length)
    return None if all(source is None for source in known) else starts


def run_starts(position_ids: Tensor) -> Tensor:
    """Bool (B, S): positions that do not go up by one, as Hugging Face marks packed documents."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    return starts


def bag_positions(bags: Bags, position_ids: Tensor) -> Tensor:
    """Positions (B, L) that count bags, from position ids (1 or B, S) that count tokens.

    They begin again where the token positions do, so attention stays inside the same documents.
    """
    position_ids = position_ids.expand(bags.index.shape)
    token = torch.arange(position_ids.shape[1], device=position_ids.device)
    begin = token.expand_as(position_ids).where(run_starts(position_ids), 0).cummax(1).values
    bag_size = bags.ids.shape[-1]
    before = bags.index.gather(1, begin)
    return bags.of_first_token(bags.index - before + position_ids.gather(1, begin) // bag_size)
