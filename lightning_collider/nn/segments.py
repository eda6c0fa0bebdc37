"""Segments: the runs of a batch inside which attention is causal.

A sequence is one, so is each document packed into it, and so are the tokens beside its padding.
"""

import torch
from torch import Tensor

from lightning_collider.filtering.selectors import NO_TARGET


def separate_documents(
    document_ids: Tensor,
    labels: Tensor | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What makes packed documents equal to the same documents one by one.

    Args:
        document_ids: integers (B, T); a run of equal numbers is a document.
        labels: int64 (B, T), or None.
        attention_mask, position_ids: what else was given, to be refused beside document ids.

    Returns:
        Positions int64 (B, T) that start at 0 in each document, and the labels without the first
        token of each document: nothing inside it predicts that one.

    Raises:
        ValueError: document ids of another shape, padding, or positions given as well.
    """
    if labels is not None and document_ids.shape != labels.shape:
        raise ValueError(
            f"document_ids must be (B, T) = {tuple(labels.shape)}, got {tuple(document_ids.shape)}"
        )
    if position_ids is not None:
        raise ValueError("document_ids decide the positions: leave position_ids out")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "document_ids and a padding mask do not go together: give the padding a document id "
            "of its own and labels of -100, and leave attention_mask out"
        )
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(first)
    positions = index - index.masked_fill(~first, 0).cummax(dim=1).values
    return positions, None if labels is None else labels.masked_fill(first, NO_TARGET)


def predicted_by_tokens(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Labels (B, T) without those that padding would predict: a padding position is no row.

    Hugging Face trains on such labels unless they are -100: the first token behind padding on the
    left, and padding itself. What it predicts there is of no text.

    Args:
        attention_mask: (B, T), 1 for tokens and 0 for padding, or None. A mask of another form,
            which only an unconverted model takes, says nothing of padding.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return labels
    labels = labels.clone()
    labels[:, 1:].masked_fill_(attention_mask[:, :-1].to(labels.device) == 0, NO_TARGET)
    return labels


def segment_starts(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[int]:
    """First rows of the runs inside which attention is causal, then the number of rows.

    A run is a sequence; padding and tokens of a padded sequence are runs of their own; and without
    a padding mask, positions that do not go up by one start a new run, as in Hugging Face models.

    Args:
        shape: (B, T).
        attention_mask: (B, T), 1 for tokens and 0 for padding on the left or on the right, or None.
        position_ids: int64 (1 or B, T), or None.

    Raises:
        ValueError: a mask of another form, or with padding between tokens.
    """
    batch, length = shape
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    if attention_mask is not None:
        if tuple(attention_mask.shape) != shape:
            raise ValueError(
                f"in training the attention mask must be (B, T) = {shape} with 1 for tokens and 0 "
                f"for padding, got {tuple(attention_mask.shape)}"
            )
        tokens = attention_mask.to("cpu", torch.bool)
        starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        if ((starts & tokens).sum(-1) > 1).any():
            raise ValueError(
                "the attention mask has padding between tokens: put it on the left or on the right"
            )
    elif position_ids is not None:
        jumps = position_ids.to("cpu").diff(dim=-1) != 1
        starts[:, 1:] = jumps.expand(batch, length - 1)
    return [*starts.flatten().nonzero().flatten().tolist(), batch * length]
