"""FSDP1Strategy for the Trainer: a filtered backward under FullyShardedDataParallel.

For those whose set-up is built on FSDP1; ``ColliderStrategy`` (FSDP2) is the one to start with.
"""

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import Module

from lightning_collider.nn.layer import FilteredLayer
from lightning_collider.strategies.filtering import SETTINGS, Filtering, check_precision
from lightning_collider.strategies.sharding import decoder_layers
from lightning_collider.strategies.trainer import FilteredSteps


class FSDP1Strategy(FilteredSteps, FSDPStrategy):
    """Registered as "collider_fsdp1".

    Args:
        settings: those of :class:`lightning_collider.ColliderStrategy` that choose tokens (``keep``
            to ``seed``, without ``sharding``) and those of Lightning's ``FSDPStrategy``. Decoder
            layers are the units unless ``auto_wrap_policy`` says otherwise, and checkpoints are
            sharded unless ``state_dict_type`` does.

    Raises:
        ValueError: a setting out of range, float16, no causal LM to convert, or full checkpoints on
            several CPU ranks.
    """

    # Its own list: in the base's, its name would be refused on a CPU.
    _registered_strategies: list[str] = []  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        choices = {name: settings.pop(name) for name in SETTINGS if name in settings}
        settings.setdefault("auto_wrap_policy", {FilteredLayer})
        settings.setdefault("state_dict_type", "sharded")
        super().__init__(**settings)
        self.filtering = Filtering(**choices)

    def setup_environment(self) -> None:
        check_precision(str(self.precision_plugin.precision))
        n_ranks = self.num_nodes * self.num_processes
        if self._state_dict_type == "full" and self.root_device.type == "cpu" and n_ranks > 1:
            raise ValueError(
                "FSDP1 crashes when it gathers a full checkpoint on several CPU ranks: use "
                "state_dict_type='sharded', or strategy='collider' (FSDP2), which can"
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        self.attach()
        super().setup(trainer)

    def _setup_model(self, model: Module) -> Module:
        settings = dict(self.kwargs)
        reference = self.filtering.reference
        if reference is not None:
            layers = {type(layer) for layer in decoder_layers(reference)}
            units = {**settings, "auto_wrap_policy": ModuleWrapPolicy(layers)}
            self.filtering.reference = self._wrapped(reference, **units)
        # Not left to the base: it would not name the device, and so ask for a GPU.
        self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(self._wrapped(model, **settings))

    def _wrapped(self, model: Module, **settings: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **settings,
        )
