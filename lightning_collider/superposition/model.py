"""A causal LM trained on bags: superposed embeddings in, one multi-hot prediction a bag out.

The input of a bag is the mean of its tokens' embeddings, summed in float32; the trunk sees L
positions instead of S = s L; the head predicts the next bag (arXiv 2605.06546, section 3).
``BagForward`` stands in for a Hugging Face model's forward, so that the module around it stays as
the user wrote it.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_collider.filtering.state import FilterState, mark
from lightning_collider.nn.causal_lm import (
    HEAD_ARGUMENTS,
    FilteredCausalLM,
    refuse_in_training,
)
from lightning_collider.nn.swapped import Swapped, why_not_plain
from lightning_collider.superposition.bags import (
    Bags,
    bag_positions,
    document_starts,
    make_bags,
)
from lightning_collider.superposition.loss import (
    bag_entropy,
    divisor_of,
    linear_multi_hot_cross_entropy,
    multi_hot_cross_entropy,
    pair_weights,
)

# Configuration keys of models whose logits are more than head(hidden), such as Gemma 2 and Granite.
LOGIT_TRANSFORM = re.compile(r"logit.*(cap|scal|multipl)|lm_head_multiplier|output_multiplier")


@dataclass(frozen=True)
class BagSettings:
    """How tokens become bags.

    Attributes:
        bag_size: s.
        weights: float (s,) of the targets in the loss, or None for equal ones.
        separator: id of the token that ends each document, or None.
        row_length: documents also end at each multiple of it, or None.
    """

    bag_size: int
    weights: Tensor | None = None
    separator: int | None = None
    row_length: int | None = None


@dataclass(frozen=True)
class BagLoss:
    """The loss of one superposed forward and what there is to report of it; all 0-d.

    Attributes:
        loss: mean over all valid (bag, target) pairs, differentiable.
        floor: the least that any model could reach, in nats (see ``bag_entropy``).
        pairs: weight of all valid pairs, which the loss is a mean over; their number when all
            weights are equal.
        tokens: data tokens in the bags.
        positions: bags, that is positions of the trunk.
    """

    loss: Tensor
    floor: Tensor
    pairs: Tensor
    tokens: Tensor
    positions: int


@dataclass
class BagOutput(CausalLMOutputWithPast):
    """What the model returns on bags: the loss, no logits, and what it is a loss of.

    Attributes:
        positions: bags of the batch, that is rows of the trunk, which are all in the backward.
    """

    positions: int | None = None


class PairCount(FilterState):
    """Tells a ColliderStrategy over how many pairs a loss is a mean.

    The strategies take the mean over all ranks and micro-batches of an optimizer step; this is the
    micro-batch's share of it. The backward is dense.
    """

    def __init__(self, pairs: Tensor) -> None:
        super().__init__([], (0, 0), "oracle")
        self.pairs = pairs

    def n_kept_targets(self) -> Tensor:
        return self.pairs

    def set_keep(self, keep: Tensor, device: torch.device) -> None:
        raise ValueError(
            "the superposed phase trains on bags and its backward is dense: call backward_filter "
            "only after the switch to single tokens"
        )


def superpose_embeddings(embedding: nn.Module, bags: Bags) -> Tensor:
    """Mean embedding of each bag: (B, L, D) in the embedding's dtype, summed in float32."""
    batch, n_bags, bag_size = bags.ids.shape
    embedded = embedding(bags.ids.view(batch, -1)).view(batch, n_bags, bag_size, -1)
    wide = torch.promote_types(embedded.dtype, torch.float32)
    embedded = embedded.masked_fill(~bags.member[..., None], 0)
    sums = embedded.sum(2, dtype=wide)
    return (sums / bags.member.sum(2, keepdim=True)).to(embedded.dtype)


def superposed_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    settings: BagSettings,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> BagLoss:
    """The loss of a Hugging Face causal LM on a batch that is cut into bags.

    Args:
        model: the plain model, or a converted one, whose backward is then dense.
        input_ids, labels: int64 (B, S); labels as Hugging Face has them, -100 ignored.
        settings: how to cut.
        position_ids: int64 (1 or B, S) or None; documents end where they do not go up by one.
        attention_mask: (B, S), 1 for tokens and 0 for padding, or None.
        inputs: passed to the model's backbone.

    Raises:
        ValueError: shapes that do not fit; S is not a multiple of the bag size.
    """
    for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if value is not None and (value.dim() != 2 or value.shape[1] != input_ids.shape[1]):
            raise ValueError(
                f"on bags {name} must be (B, S), one value a token, got {tuple(value.shape)}"
            )
    starts = document_starts(
        input_ids, position_ids, attention_mask, settings.separator, settings.row_length
    )
    bags = make_bags(input_ids, labels, settings.bag_size, starts)
    of_tokens = bags.member
    if position_ids is not None:
        inputs["position_ids"] = bag_positions(bags, position_ids)
    if attention_mask is not None:
        inputs["attention_mask"] = bags.of_first_token(attention_mask)
        of_tokens = bags.member & inputs["attention_mask"].bool()[..., None]
    inputs["inputs_embeds"] = superpose_embeddings(model.get_input_embeddings(), bags)

    targets = bags.targets.flatten(0, 1)
    pairs = pair_weights(targets, settings.weights, torch.float64)
    return BagLoss(
        loss=_loss(model, inputs, targets, settings.weights),
        floor=bag_entropy(targets, settings.weights),
        pairs=pairs.sum(),
        tokens=of_tokens.sum(),
        positions=targets.shape[0],
    )


def _loss(model: Any, inputs: dict[str, Any], targets: Tensor, weights: Tensor | None) -> Tensor:
    head = model.get_output_embeddings()
    if transforms_logits(model) or why_not_plain(head, nn.Linear, "lm_head") is not None:
        kind = model.original_class if isinstance(model, Swapped) else type(model)
        logits = kind.forward(model, **inputs, use_cache=False).logits
        return multi_hot_cross_entropy(logits.flatten(0, 1), targets, weights)
    if isinstance(model, FilteredCausalLM):
        hidden = model.dense_states(**inputs)
    else:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return linear_multi_hot_cross_entropy(
        hidden.flatten(0, 1), head.weight, head.bias, targets, weights
    )


def transforms_logits(model: Any) -> bool:
    """Whether a model scales or caps its head's output, so that its own forward must run."""
    settings = model.config.get_text_config().to_dict()
    return any(
        LOGIT_TRANSFORM.search(name) and value not in (None, False, 1, 1.0)
        for name, value in settings.items()
    )


class BagForward:
    """Stands in for a model's forward while ``settings`` is set, and else only counts tokens.

    In training with labels the model then returns the superposed loss and no logits. Without grad
    or in eval mode it is the model's own forward, so validation measures next-token loss in both
    phases.

    Args:
        model: a Hugging Face causal LM; its forward is replaced until ``remove``.
        observe: called after each forward in training with a BagLoss, whose pairs and floor are
            0 where the model's own forward ran.
    """

    def __init__(self, model: Any, observe: Callable[[BagLoss], None]) -> None:
        self.model = model
        self.observe = observe
        self.settings: BagSettings | None = None
        self.before = model.__dict__.get("forward")
        self.original = model.forward
        # generate() and others read the forward's signature.
        functools.update_wrapper(self, self.original)
        model.forward = self

    def remove(self) -> None:
        """Give the model its own forward back."""
        del self.model.forward
        if self.before is not None:
            self.model.forward = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model, such as an average of its weights, is an ordinary model.
        return copy.deepcopy(self.original, memo)

    # A graph compiled in one phase must not be used in the other.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        names = inspect.signature(self.original).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.settings is None:
            out = self.original(*args, **kwargs)
            if isinstance(given.get("input_ids"), Tensor):
                self.observe(_ordinary(given["input_ids"], given.get("attention_mask")))
            return out
        return self._superposed(self.settings, given)

    def _superposed(self, settings: BagSettings, given: dict[str, Any]) -> BagOutput:
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("input_ids", "labels"):
            if name not in given:
                raise ValueError(
                    f"the superposed phase needs the model to be called with {name} in "
                    "training_step, and trains on the loss that the model returns"
                )
        refuse_on_bags(given)
        passed = {
            name: value
            for name, value in given.items()
            if name not in (*HEAD_ARGUMENTS, "reference_losses")
        }
        found = superposed_loss(self.model, settings=settings, **passed)
        self.observe(found)
        divisor = divisor_of(found.pairs)
        loss = mark(found.loss, PairCount(found.pairs), zero_dropped=False, divisor=divisor)
        return BagOutput(loss=loss, positions=found.positions)


def _ordinary(input_ids: Tensor, attention_mask: Tensor | None) -> BagLoss:
    none = torch.zeros((), dtype=torch.float64, device=input_ids.device)
    padded = attention_mask is not None and attention_mask.shape == input_ids.shape
    tokens = attention_mask.bool().sum() if padded else none + input_ids.numel()  # type: ignore[union-attr]
    return BagLoss(none, none, none, tokens, input_ids.numel())


def refuse_on_bags(given: dict[str, Any]) -> None:
    """Raise ValueError for arguments of a forward that have no meaning on bags."""
    refuse_in_training(given)
    for name in ("inputs_embeds", "keep", "num_items_in_batch"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name} has no meaning in the superposed phase, where tokens are averaged in bags "
                "and the loss is the mean over all (bag, target) pairs: leave it out"
            )
    known = ("input_ids", "labels", "attention_mask", "position_ids", "reference_losses")
    shape = given["input_ids"].shape
    for name, value in given.items():
        if name not in known and isinstance(value, Tensor) and value.shape[:2] == shape:
            raise ValueError(f"{name} has one value a token, and bags hold several: leave it out")
