"""One batch, and ways to run a step on it: Hugging Face's, ours, and what users would take else.

All ways train the same weights. What a way needs beside its forward (a mask, checkpointing on or
off) is set when it is asked for, outside the time that is measured.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig

import lightning_collider as lc
from lightning_collider.eval.flops import StepFlops, step_flops
from lightning_collider.filtering import state
from lightning_collider.filtering.token_filter import TokenFilter

Forward = Callable[[], Tensor]  # gives a loss


class Steps:
    """One batch, and ways to run a step on it with the same weights.

    Each way is a method that returns its forward.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        batch: int,
        seq: int,
        keep: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config._attn_implementation = "sdpa"
        self.device = device
        with device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            self.ids = torch.randint(0, config.vocab_size, (batch, seq))
            self.reference_losses = 20 * torch.rand(batch, seq)  # so that the mask is random
        self.labels = self.ids.clone()
        ours = share_parameters(copy.deepcopy(self.model), self.model)
        self.ours: Any = lc.convert(ours)
        self._keep(keep)

    def at(self, keep: float) -> "Steps":
        """The same model and batch at another kept fraction."""
        other = copy.copy(self)
        other._keep(keep)
        return other

    def _keep(self, keep: float) -> None:
        self.token_filter = TokenFilter("excess_loss", keep)
        self.mask = self._mask()
        self.kept_labels = labels_of_kept(self.labels, self.mask)
        linears = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        self.flops: StepFlops = step_flops(
            sum(m.weight.numel() for m in linears),
            attention_width(self.model.config),
            self.model.config.num_hidden_layers,
            self.mask,
        )

    def _mask(self) -> Tensor:
        self.ours.token_filter = self.token_filter
        out = self.ours(
            input_ids=self.ids, labels=self.labels, reference_losses=self.reference_losses
        )
        return out.keep

    def hugging_face(self) -> Forward:
        """Hugging Face's forward, with dropped labels at -100: the loss alone is filtered."""
        self.model.gradient_checkpointing_disable()
        return lambda: self.model(self.ids, labels=self.kept_labels, use_cache=False).loss

    def dense(self) -> Forward:
        """Ours without a mask."""
        self.ours.token_filter = None
        self.ours.gradient_checkpointing_disable()
        return lambda: self.ours(self.ids, labels=self.labels).loss

    def filtered(self) -> Forward:
        """Ours, selecting by excess loss over stored reference losses."""
        self.ours.token_filter = self.token_filter
        self.ours.gradient_checkpointing_disable()
        return lambda: (
            self.ours(self.ids, labels=self.labels, reference_losses=self.reference_losses).loss
        )

    def hf_checkpointed(self) -> Forward:
        """Hugging Face's, each layer's forward computed again in backward."""
        forward = self.hugging_face()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        return forward

    def filtered_checkpointed(self) -> Forward:
        """Ours filtered, each layer's forward computed again in backward, for all rows."""
        forward = self.filtered()
        self.ours.gradient_checkpointing_enable({"use_reentrant": False})
        return forward

    def head_only(self) -> Forward:
        """Hugging Face's with head and loss over the kept rows only; the mask comes for free."""
        self.model.gradient_checkpointing_disable()
        head, mask = self.model.get_output_embeddings(), self.mask[:, :-1]

        def forward() -> Tensor:
            hidden = self.model.base_model(self.ids, use_cache=False).last_hidden_state[:, :-1]
            return F.cross_entropy(head(hidden[mask]).float(), self.labels[:, 1:][mask])

        return forward

    def timed(self, step: Callable[[], Forward]) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        forward = step()
        self.model.zero_grad(set_to_none=True)
        start = self.now()
        loss = forward()
        middle = self.now()
        loss.backward()
        return middle - start, self.now() - middle

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def share_parameters(model: nn.Module, source: nn.Module) -> nn.Module:
    """Give a copy the parameter objects of its source: one set of weights and of gradients."""
    for name, module in model.named_modules():
        module._parameters = source.get_submodule(name)._parameters
    return model


def labels_of_kept(labels: Tensor, keep: Tensor) -> Tensor:
    """Hugging Face labels whose loss is that of the kept rows: label t + 1 belongs to row t."""
    kept = labels.clone()
    kept[:, 1:][~keep[:, :-1]] = -100
    return kept


def attention_width(config: PretrainedConfig) -> int:
    """Query heads times head size."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head_dim


def selection_share(steps: Steps, rounds: int = 3) -> float:
    """Median share of a filtered step that is selection: ranking, row indices, graph walk.

    Timers are around the three only while this runs. On CUDA they show what the host waits.
    """
    spent: list[float] = []

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = steps.now()
            result = function(*args, **kwargs)
            spent.append(steps.now() - start)
            return result

        return call

    shares = []
    ranking = patch.object(TokenFilter, "__call__", clocked(TokenFilter.__call__))
    indices = patch.object(state.FilterState, "set_keep", clocked(state.FilterState.set_keep))
    walk = patch.object(state._Mark, "backward", staticmethod(clocked(state._Mark.backward)))
    with ranking, indices, walk:
        for _ in range(rounds):
            spent.clear()
            total = sum(steps.timed(steps.filtered))
            shares.append(sum(spent) / total)
    return statistics.median(shares)
