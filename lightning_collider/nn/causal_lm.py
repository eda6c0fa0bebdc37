"""The causal LM: from a batch to a loss, with one FilterState a forward.

In training, hidden states go through fused head and cross-entropy, so logits are never all in
memory; the selector, where one is bound, turns the losses into the keep mask. In eval mode or
without grad the model is the Hugging Face one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_collider import ops
from lightning_collider.filtering.selectors import NO_TARGET, shift_labels
from lightning_collider.filtering.state import FilterState, mark
from lightning_collider.filtering.token_filter import TokenFilter
from lightning_collider.nn.layer import FilteredLayer, attentions, why_dense
from lightning_collider.nn.segments import predicted_by_tokens, segment_starts, separate_documents
from lightning_collider.nn.swapped import Swapped, bound, why_not_plain


@dataclass
class FilteredOutput(CausalLMOutputWithPast):
    """What a converted model returns in training.

    Attributes:
        loss: mean over the kept rows when a selector is bound, else over all rows with a target.
        logits: None with labels; (B, T, V) without.
        token_losses: float (B, T), differentiable, 0 where there is no target; None without labels.
        keep: bool (B, T), or None while nothing is filtered.
    """

    token_losses: Tensor | None = None
    keep: Tensor | None = None


class FilteredCausalLM(Swapped):
    """A Hugging Face ``...ForCausalLM``: backbone in ``base_model``, head in ``lm_head``."""

    base_model: nn.Module
    get_input_embeddings: Callable[[], nn.Module]
    get_output_embeddings: Callable[[], nn.Linear]
    filter_engine: str = "cpp"
    filter_family: Any  # the row of convert.py's table
    filter_window: int | None = None  # longest sequence that a sliding window sees whole
    token_filter: TokenFilter | None = None
    last_state: FilterState | None = None  # of the newest forward in training, for reports

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        keep: Tensor | None = None,
        reference_losses: Tensor | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hugging Face's forward, with three arguments more.

        In training a padding position predicts nothing, whatever its label says.

        Args:
            keep: bool (B, T), the rows that stay in the backward; instead of a selector.
            reference_losses: float (B, T) for the strategy's selector, stored beforehand.
            document_ids: integers (B, T), the document each token is of: attention does not cross
                documents, positions start anew in each, and no token predicts another document's.
        """
        if document_ids is not None:
            position_ids, labels = separate_documents(
                document_ids, labels, attention_mask, position_ids
            )
            attention_mask, kwargs["use_cache"] = None, False
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        kwargs["logits_to_keep"] = logits_to_keep
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(**given, labels=labels, **kwargs)
        return self._filtered_forward(given, labels, keep, reference_losses, kwargs)

    # Not compiled: a traced backward would hold on to what it read of the mask while it was traced.
    @torch.compiler.disable
    def _filtered_forward(
        self,
        given: dict[str, Tensor | None],
        labels: Tensor | None,
        keep: Tensor | None,
        reference_losses: Tensor | None,
        kwargs: dict[str, Any],
    ) -> FilteredOutput:
        refuse_in_training(kwargs)
        self.last_state = state = self._new_state(given)
        if keep is not None:
            state.set_keep(keep, _one_of(given["input_ids"], given["inputs_embeds"]).device)
        hidden, outputs = self._hidden_states(given, state, kwargs)
        if labels is None:
            logits = self._logits(hidden, state, kwargs["logits_to_keep"])
            return FilteredOutput(logits=logits, hidden_states=outputs.hidden_states, keep=keep)

        labels = predicted_by_tokens(labels, given["attention_mask"])
        losses = self._token_losses(hidden, shift_labels(labels), state)
        state.has_target = shift_labels(labels) != NO_TARGET
        if self.token_filter is not None and keep is None:
            inputs = {name: given[name] for name in ("attention_mask", "position_ids")}
            mask = self.token_filter(
                losses.detach(), labels, given["input_ids"], reference_losses, **inputs
            )
            state.set_keep(mask, losses.device)
        return FilteredOutput(
            loss=self._mean_loss(losses, state, kwargs.get("num_items_in_batch")),
            hidden_states=outputs.hidden_states,
            token_losses=losses,
            keep=state.keep,
        )

    def dense_states(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states (B, T, D) of embeddings (B, T, D), by the operators and never filtered."""
        given = {
            "input_ids": None,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self._hidden_states(given, self._new_state(given), kwargs)[0]

    def _new_state(self, given: dict[str, Tensor | None]) -> FilterState:
        batch, length = _one_of(given["input_ids"], given["inputs_embeds"]).shape[:2]
        if batch * length == 0:
            raise ValueError(f"the batch is empty: (B, T) = {(batch, length)}")
        if self.filter_window is not None and length > self.filter_window:
            raise ValueError(
                f"sliding-window attention is active for sequences of {length} tokens (the window "
                f"is {self.filter_window}) and cannot be filtered: use shorter sequences, or a "
                "model with full attention"
            )
        starts = segment_starts((batch, length), given["attention_mask"], given["position_ids"])
        return FilterState(starts, (batch, length), self.filter_engine)

    def _hidden_states(
        self, given: dict[str, Tensor | None], state: FilterState, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        backbone = self.base_model
        layers = [m for m in backbone.modules() if isinstance(m, FilteredLayer)]
        if all(why_dense(m) is None for m in attentions(layers)):
            # A mask that is already 4-D is passed on as it is; the operators do not read it.
            given = {**given, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}
        passed = {k: v for k, v in kwargs.items() if k not in HEAD_ARGUMENTS}
        with bound([self.get_input_embeddings(), *backbone.children()], state):
            outputs = backbone(**given, **passed, use_cache=False, filter_state=state)
        return outputs.last_hidden_state, outputs

    def why_head_dense(self) -> str | None:
        """Why the head's backward is dense, or None when it is filtered."""
        if self.filter_engine == "oracle":
            return "engine='oracle'"
        return why_not_plain(self.get_output_embeddings(), nn.Linear, "lm_head")

    def _logits(self, hidden: Tensor, state: FilterState, logits_to_keep: Any) -> Tensor:
        if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError(
                "logits_to_keep is for generation; training needs the logits of all rows"
            )
        head = self.get_output_embeddings()
        if self.why_head_dense() is not None:
            return mark(self._dense_logits(hidden, state), state)
        return mark(
            ops.linear(hidden, head.weight, head.bias, state.rows), state, zero_dropped=False
        )

    def _token_losses(self, hidden: Tensor, targets: Tensor, state: FilterState) -> Tensor:
        head = self.get_output_embeddings()
        if self.why_head_dense() is None:
            losses = ops.linear_cross_entropy(hidden, head.weight, head.bias, targets, state.rows)
            return mark(losses, state)
        return mark(logit_losses(self._dense_logits(hidden, state), targets), state)

    def _dense_logits(self, hidden: Tensor, state: FilterState) -> Tensor:
        if state.rows is not None:
            hidden = ops.boundary(hidden, state.rows)
        return self.get_output_embeddings()(hidden)

    def _mean_loss(self, losses: Tensor, state: FilterState, n_items: Any) -> Tensor:
        if state.keep is not None:
            losses = losses.masked_fill(~state.keep, 0.0)
        divisor = state.n_kept_targets() if n_items is None else torch.as_tensor(n_items)
        assert divisor is not None
        return mark(losses.sum() / divisor.clamp(min=1), state, zero_dropped=False, divisor=divisor)


# Arguments of the causal LM that are not the backbone's.
HEAD_ARGUMENTS = ("num_items_in_batch", "logits_to_keep", "use_cache")


def logit_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, T, V) at every position: float (B, T), 0 without a target."""
    ops.check_targets(targets, logits.shape[-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(wide), targets.flatten(), ignore_index=NO_TARGET, reduction="none"
    )
    return losses.view(targets.shape)


def refuse_in_training(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments of inference that have no meaning in a filtered forward."""
    for name in ("cache", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is for generation: call model.eval() first, or leave it out")
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is not available in training: the operators never form the "
            "attention weights; call model.eval() first"
        )
    if kwargs.get("return_dict") is False:
        raise ValueError("a converted model returns an output object: leave return_dict out")


def _one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    given = inputs_embeds if input_ids is None else input_ids
    assert given is not None
    return given


def token_losses(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """Loss of the prediction made at each position, differentiable.

    Args:
        model: a causal LM, converted (then ``backward_filter`` works on any loss made of the
            result) or not; it may be wrapped by Fabric or DDP.
        input_ids, labels: int64 (B, T); labels are shifted inside. There is no target at -100, and
            none at a position that ``attention_mask`` calls padding.
        document_ids: integers (B, T) of packed documents, see ``FilteredCausalLM.forward``.
        inputs: passed to the model.

    Returns:
        float (B, T), at position t the loss of token t + 1; 0 where there is no target.
    """
    if document_ids is not None:
        given = (inputs.pop("attention_mask", None), inputs.get("position_ids"))
        positions, masked = separate_documents(document_ids, labels, *given)
        assert masked is not None
        labels = masked
        inputs |= {"position_ids": positions, "use_cache": False}
    converted = any(isinstance(m, FilteredCausalLM) and m.training for m in model.modules())
    if converted and torch.is_grad_enabled():
        return model(input_ids=input_ids, labels=labels, **inputs).token_losses
    labels = predicted_by_tokens(labels, inputs.get("attention_mask"))
    return logit_losses(model(input_ids=input_ids, **inputs).logits, shift_labels(labels))
