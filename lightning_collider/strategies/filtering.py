"""What the Trainer's and Fabric's strategy share: convert, bind the selector, shard, normalise.

Normalisation. The gradient of an optimizer step is the mean over the kept rows of all ranks and
micro-batches. How many those are is not known at the first micro-backward, so each micro-batch's
loss, a mean over its own rows, is multiplied by the number of those rows (``weigh``), and once
before the optimizer step the gradients are divided by the kept rows of all of them
(``normalise``).
"""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.filtering.state import marks_of
from lightning_collider.filtering.token_filter import TokenFilter
from lightning_collider.nn.causal_lm import FilteredCausalLM
from lightning_collider.nn.convert import ENGINES, convert
from lightning_collider.nn.coverage import coverage
from lightning_collider.strategies import sharding

SETTINGS = (
    "keep",
    "selector",
    "reference",
    "engine",
    "over",
    "keep_warmup_steps",
    "threshold",
    "seed",
)
EXPECTED_SHARE = 0.9  # of the backward FLOPs; below it the user should know
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class Filtering:
    """The settings of a ColliderStrategy and the counts of its current optimizer step.

    Args:
        selector: see :class:`TokenFilter`; None leaves the backward dense until
        ``backward_filter``.
        keep, reference, over, keep_warmup_steps, threshold, seed: see :class:`TokenFilter`.
        engine: "cpp" or "oracle".

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        keep: float = 1.0,
        selector: str | Callable[..., Tensor] | None = None,
        reference: nn.Module | str | Path | ScoreStore | None = None,
        engine: str = "cpp",
        **choices: Any,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        self.engine = engine
        self.token_filter: TokenFilter | None = None
        # Checked without a selector too: a wrong fraction is a mistake in any case.
        token_filter = TokenFilter(selector or "top_loss", keep, reference, **choices)
        if selector is not None:
            self.token_filter = token_filter
        self._warn_without_effect(keep, selector, reference, choices)
        self._kept: list[Tensor] = []  # kept rows of each micro-batch since the last step
        self._plain = False  # whether one came from no converted model
        self._warned = False

    def _warn_without_effect(
        self, keep: float, selector: Any, reference: Any, choices: dict[str, Any]
    ) -> None:
        of_a_share = (keep, choices.get("keep_warmup_steps", 0), choices.get("over", "batch"))
        if selector is None and (keep < 1.0 or reference is not None):
            warnings.warn(
                "keep and reference have no effect without a selector: the backward is dense until "
                "backward_filter is called",
                stacklevel=4,
            )
        elif selector in ("top_loss", "random") and reference is not None:
            warnings.warn(f"selector={selector!r} does not use the reference model", stacklevel=4)
        elif selector in ("excess_loss", "top_loss", "random") and keep == 1.0:
            warnings.warn("keep=1.0 keeps every token: nothing is filtered", stacklevel=4)
        elif (callable(selector) or selector == "threshold") and of_a_share != (1.0, 0, "batch"):
            warnings.warn(
                "keep, keep_warmup_steps and over have no effect: this selector decides by itself "
                "how many tokens it keeps",
                stacklevel=4,
            )

    def attach(self, module: nn.Module, rank: int, device: torch.device) -> None:
        """Convert the causal LM inside a module, bind the selector to it, and say so.

        A model that is in eval mode as a whole, as ``from_pretrained`` leaves it and the Trainer
        keeps it, is put in train mode: in eval mode nothing would be filtered.

        Args:
            rank: of this process.
            device: where it computes; the reference model is moved there.

        Raises:
            ValueError: no causal LM, several with a selector, a reference that does not fit, or a
                device without float64.
        """
        if device.type == "mps":
            raise ValueError(
                "lightning-collider does not run on Apple's GPU, which has no float64: use "
                "accelerator='cpu'"
            )
        self._convert(module, rank)
        self._report(module)
        if self.reference is not None:
            self.reference.to(device)

    def _convert(self, module: nn.Module, rank: int) -> None:
        models = trainable_causal_lms(module)
        if not models:
            raise ValueError(
                f"{type(module).__name__} holds no trainable Hugging Face causal LM: keep it as an "
                f"attribute, for example self.model = AutoModelForCausalLM.from_pretrained(...)"
            )
        for model in models:
            if not any(m.training for m in model.modules()):
                model.train()
                rank_zero_info(f"lightning-collider: {type(model).__name__} put in train mode")
        if self.token_filter is None:
            for model in models:
                convert(model, self.engine)
                assert isinstance(model, FilteredCausalLM)
                model.token_filter = None  # an earlier strategy's would go on choosing
            return
        if len(models) > 1:
            raise ValueError(
                f"{type(module).__name__} holds {len(models)} trainable causal LMs: a selector "
                "works on one; use selector=None and backward_filter"
            )
        (model,) = models
        reference = self.token_filter.reference
        if reference is not None:
            reference.check_vocabulary(model)
        convert(model, self.engine)
        self.token_filter.rank = rank
        assert isinstance(model, FilteredCausalLM)
        model.token_filter = self.token_filter

    def _report(self, module: nn.Module) -> None:
        """Say in one line what is filtered, and warn where much of the backward stays dense."""
        found = coverage(module)
        rank_zero_info(f"lightning-collider: {found.summary()}")
        if self.engine == "cpp" and found.share < EXPECTED_SHARE:
            rank_zero_warn(
                f"only {found.share:.0%} of the linear layers' backward FLOPs are filtered; "
                f"print(lightning_collider.coverage(model)) says why"
            )

    @property
    def reference(self) -> nn.Module | None:
        """The live reference model, where there is one."""
        live = self.token_filter.reference if self.token_filter is not None else None
        return None if live is None else live.model

    @reference.setter
    def reference(self, model: nn.Module) -> None:
        assert self.token_filter is not None and self.token_filter.reference is not None
        self.token_filter.reference.model = model

    def shard(
        self, module: nn.Module, mesh: Any, mp_policy: MixedPrecisionPolicy | None, offload: bool
    ) -> None:
        """Shard the student and the reference with FSDP2."""
        models = trainable_causal_lms(module)
        sharding.shard(module, models, self.reference, mesh, mp_policy, offload)

    def weigh(self, loss: Tensor, undo: float = 1.0) -> Tensor:
        """The loss to run backward on: the micro-batch's mean times the rows that it is a mean of.

        Args:
            loss: what the user returned, divided by ``undo`` by the framework.

        Returns:
            The weighted loss, or the loss itself where no converted model was trained.

        Raises:
            ValueError: some micro-batches of this optimizer step came from a converted model and
                others did not.
        """
        marks = marks_of(loss)
        counts = [m.state.n_kept_targets() for m in marks]
        known = [n for n in counts if n is not None]
        if len(known) < len(marks) or not marks:
            self._plain = True
        if self._plain:
            if self._kept or known:
                raise ValueError(
                    "the losses of one optimizer step must all come from the converted model, or "
                    "none: their mean over kept tokens is not defined otherwise"
                )
            self._warn_unfiltered()
            return loss
        self._kept.append(torch.stack(known).sum())
        # The model's own mean knows its rows; a mean that the user took is over the kept ones.
        divisors = [
            n if m.divisor is None else m.divisor.to(n) for m, n in zip(marks, known, strict=True)
        ]
        divisor = torch.stack(divisors).sum()
        return loss * (divisor * undo).to(loss.device, loss.dtype)

    def _warn_unfiltered(self) -> None:
        if self.token_filter is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                "a loss was not filtered, though there is a selector: it does not come from the "
                "causal LM in train mode. Call model.train(), and give the model its labels"
            )

    def normalise(self, parameters: Iterable[nn.Parameter], group: Any = None) -> None:
        """Divide the gradients by the kept rows of all ranks and micro-batches of this step.

        Args:
            parameters: whose gradients hold the mean over ranks of the sums of ``weigh``'s losses.
            group: process group of the data-parallel ranks, or None for one device.
        """
        if not self._kept:
            self._plain = False
            return
        kept = torch.stack(self._kept).sum()
        ranks = 1
        if group is not None:
            ranks = torch.distributed.get_world_size(group)
            torch.distributed.all_reduce(kept, group=group)
        # Nothing kept anywhere: the gradients are zero, and stay so.
        factor = ranks / kept.clamp(min=1).to(torch.float64)
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                    grad.mul_(factor.to(grad.device, grad.dtype))
        self._kept = []


def trainable_causal_lms(module: nn.Module) -> list[nn.Module]:
    """Hugging Face models with a language-model head and something to train, in a module."""
    return [
        m
        for m in module.modules()
        if isinstance(m, PreTrainedModel)
        and m.get_output_embeddings() is not None
        and any(p.requires_grad for p in m.parameters())
    ]


def check_precision(precision: str) -> None:
    """Raise ValueError for a precision whose filtered backward is not defined."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} is not supported by lightning-collider (float16 needs loss "
            "scaling, which the normalisation over kept tokens does not know): use one of "
            f"{', '.join(PRECISIONS)}"
        )
