"""ColliderStrategy for the Trainer: a filtered backward, FSDP2 on several devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.ops import release_gradient_memory
from lightning_collider.strategies.filtering import Filtering
from lightning_collider.strategies.one_or_sharded import OneOrSharded


class FilteredSteps(ParallelStrategy):
    """What a Trainer strategy adds to another one to filter: select, weigh, normalise."""

    filtering: Filtering

    def attach(self) -> None:
        """Convert the LightningModule's causal LM and move its reference, before any sharding."""
        assert self.lightning_module is not None
        self.filtering.attach(self.lightning_module, self.global_rank, self.root_device)

    def data_parallel_group(self) -> Any:
        """Process group of all ranks, or None for one device."""
        return torch.distributed.group.WORLD

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        token_filter = self.filtering.token_filter
        if token_filter is None:
            return super().training_step(*args, **kwargs)
        token_filter.advance(self._trainer.global_step)
        token_filter.bring(args[0] if args else None)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            token_filter.stored = None

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        # Lightning has divided the loss by the window's length, also in a short last window.
        automatic = self.lightning_module.automatic_optimization
        undo = self._trainer.accumulate_grad_batches if automatic else 1
        super().backward(self.filtering.weigh(closure_loss, undo), optimizer, *args, **kwargs)
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def closure_then_normalise() -> Any:
            # After the window's last backward, before Lightning clips and calls its hooks.
            result = closure()
            self._normalise()
            return result

        return super().optimizer_step(optimizer, closure_then_normalise, model, **kwargs)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin

        def normalise_then_clip(*args: Any, **kwargs: Any) -> None:
            # In manual optimisation the user clips before the optimizer's step.
            self._normalise()
            type(plugin).clip_gradients(plugin, *args, **kwargs)

        plugin.clip_gradients = normalise_then_clip  # type: ignore[method-assign]

    def teardown(self) -> None:
        super().teardown()
        release_gradient_memory()

    def _normalise(self) -> None:
        assert self.model is not None
        self.filtering.normalise(self.model.parameters(), self.data_parallel_group())

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class ColliderStrategy(OneOrSharded, FilteredSteps, ModelParallelStrategy):
    """Trains the Hugging Face causal LM of a LightningModule with a filtered backward.

    The LightningModule stays as it is: it calls its model with labels and returns the loss. The
    strategy converts the model, shards it on several devices (FSDP2, each decoder layer), lets the
    selector choose the rows that stay in the backward, and takes the mean over the kept rows of all
    ranks and micro-batches of an optimizer step; so in manual optimisation each micro-batch's loss
    is passed undivided. Losses stored beforehand are read from ``batch["reference_losses"]``.

    Args:
        keep: fraction of the tokens with a target that stays in the backward, in (0, 1].
        selector: "excess_loss" (RHO-1), "top_loss", "random", "threshold", a callable
            ``(losses, reference_losses, labels) -> bool (B, T)``, or None: dense until
            ``backward_filter`` is called in ``training_step``.
        reference: frozen causal LM (module or folder) for "excess_loss", or a ScoreStore, which
            finds the losses of a batch by its ``batch["row"]``.
        sharding: "auto" or "full" (over all devices), "hybrid" (a copy a node, sharded inside it),
            or "none" (a copy a device, as DDP).
        engine: "cpp", or "oracle": plain autograd, slow and exact, without a compiler.
        over: rank tokens over the "batch" of one rank and micro-step, or over each "sequence".
        keep_warmup_steps: optimizer steps over which the kept fraction falls from 1 to ``keep``.
        threshold: for "threshold", the loss in nats above which a token is kept.
        seed: for "random".
        mp_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy`` of the sharded model, such as
            gathering float32 weights in bfloat16; None for the weights' own precision.
        cpu_offload: keep sharded weights, gradients and optimizer state in the CPU's memory.
        tensor_parallel_size: must be 1.
        kwargs: for Lightning's ModelParallelStrategy (``save_distributed_checkpoint``,
            ``timeout``, ...).

    Raises:
        ValueError: a setting out of range, float16 precision, or no causal LM to convert.
    """

    # Its own list: the base's would make this name count as FSDP, which the CPU refuses.
    _registered_strategies: list[str] = []  # noqa: RUF012
    one_device, several = Strategy, ModelParallelStrategy

    def __init__(
        self,
        keep: float = 1.0,
        selector: str | Callable[..., Tensor] | None = None,
        reference: nn.Module | str | Path | ScoreStore | None = None,
        sharding: str = "auto",
        engine: str = "cpp",
        over: str = "batch",
        keep_warmup_steps: int = 0,
        threshold: float | None = None,
        seed: int = 0,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        filtering = Filtering(
            keep,
            selector,
            reference,
            engine,
            over=over,
            keep_warmup_steps=keep_warmup_steps,
            threshold=threshold,
            seed=seed,
        )
        layout = (sharding, mp_policy, cpu_offload, tensor_parallel_size)
        super().__init__(filtering, *layout, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(for lightning.pytorch, not pytorch_lightning)"

    def setup(self, trainer: Any) -> None:
        """The base's order, without asking for a ``configure_model``; convert, cast, then shard."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.attach()
        _materialize_distributed_module(self.model, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        already_sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        if self._sharded and not already_sharded:
            self.shard(self.model)
        if not self._sharded:
            # One device needs no distributed sampler; Lightning's would shuffle an ordered loader.
            trainer._accelerator_connector.use_distributed_sampler = False
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._sharded

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._base().lightning_module_state_dict(self)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        self._base().load_model_state_dict(self, checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self._base().optimizer_state(self, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        self._base().load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self._base().save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        return self._base().load_checkpoint(self, checkpoint_path, weights_only)
