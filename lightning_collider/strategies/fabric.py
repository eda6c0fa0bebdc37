"""ColliderStrategy for Fabric: a filtered backward, FSDP2 on several devices."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies import Strategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_collider.filtering.scores import ScoreStore
from lightning_collider.strategies.filtering import Filtering
from lightning_collider.strategies.one_or_sharded import OneOrSharded

STEP_KEY = "collider_step"


class ColliderStrategy(OneOrSharded, ModelParallelStrategy):
    """Trains a Hugging Face causal LM with a filtered backward.

    ``fabric.setup`` converts the model (and shards it on several devices), the model's forward
    with labels selects, ``fabric.backward(loss)`` runs the filtered backward, and before
    ``optimizer.step()`` or ``fabric.clip_gradients`` the gradient becomes the mean over the kept
    rows of all ranks and micro-batches. Pass each micro-batch's loss undivided, also when
    gradients are accumulated. Losses stored beforehand go to the model's forward as
    ``reference_losses``.

    Arguments and errors are those of :class:`lightning_collider.ColliderStrategy`, but that a
    ScoreStore is no ``reference``: Fabric shows a strategy no batch.
    """

    one_device, several = Strategy, ModelParallelStrategy

    def __init__(
        self,
        keep: float = 1.0,
        selector: str | Callable[..., Tensor] | None = None,
        reference: nn.Module | str | Path | None = None,
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
        if isinstance(reference, ScoreStore):
            raise ValueError(
                "Fabric shows a strategy no batch: leave reference out, and pass the model's "
                'forward reference_losses=store.losses(batch["row"])'
            )
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
        super().__init__(filtering, *layout, parallelize_fn=self._shard, **kwargs)
        self._steps = 0
        self._module: nn.Module | None = None

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's name for ``precision``."""
        return self.precision

    def _shard(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.shard(module)
        return module

    def setup_module(self, module: nn.Module) -> nn.Module:
        self.filtering.attach(module, self.global_rank, self.root_device)
        if self._sharded:
            module.to(self.root_device)
            module = super().setup_module(module)
        self._module = module
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        names = {id(p): name for name, p in module.named_parameters()}
        module = self.setup_module(module)
        # Sharding made new parameters: without this the optimizers would go on training the old
        # ones.
        parameters = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [
                    parameters[names[id(p)]] if id(p) in names else p for p in group["params"]
                ]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def module_to_device(self, module: nn.Module) -> None:
        if not self._sharded:
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return super().module_init_context(empty_init if self._sharded else False)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        super().backward(self.filtering.weigh(tensor), module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.pop("closure", None)
        if closure is not None:
            inner = closure

            def closure() -> Any:
                result = inner()
                self._normalise()
                return result

            kwargs["closure"] = closure
        else:
            self._normalise()
        result = super().optimizer_step(optimizer, **kwargs)
        self._steps += 1
        if self.filtering.token_filter is not None:
            self.filtering.token_filter.advance(self._steps)
        return result

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        self._normalise()
        return super().clip_gradients_norm(*args, **kwargs)

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        self._normalise()
        super().clip_gradients_value(*args, **kwargs)

    def _normalise(self) -> None:
        assert self._module is not None
        self.filtering.normalise(self._module.parameters(), self.data_parallel_group())

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return self._base().checkpoint_io.fget(self)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._base().checkpoint_io.fset(self, io)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        state = {**state, STEP_KEY: self._steps}
        self._base().save_checkpoint(self, path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        rest = self._base().load_checkpoint(self, path, state, strict, weights_only)
        self._steps = rest.pop(STEP_KEY, self._steps)
        if self.filtering.token_filter is not None:
            self.filtering.token_filter.advance(self._steps)
        return rest
