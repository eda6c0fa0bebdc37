"""What the Trainer's and Fabric's ColliderStrategy share: one device, or several with FSDP2.

One device needs no process group, and saves and loads as any single-device strategy does.
"""

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_collider.strategies.filtering import Filtering, check_precision
from lightning_collider.strategies.sharding import (
    check_sharding,
    check_tensor_parallel,
    data_parallel_mesh,
)

Base: Any = object  # to mypy: the Trainer's or Fabric's strategy, which share no useful base


class OneOrSharded(Base):
    """Goes before a ModelParallelStrategy, of the Trainer or of Fabric, among a class's bases.

    Attributes:
        one_device: the Strategy whose saving and loading one device uses.
        several: the ModelParallelStrategy that it is mixed with.

    Raises:
        ValueError: an unknown sharding, tensor parallelism, or float16 precision.
    """

    one_device: type
    several: type
    filtering: Filtering
    precision_plugin: Any
    _data_parallel_size: Any

    def __init__(
        self,
        filtering: Filtering,
        sharding: str,
        mp_policy: MixedPrecisionPolicy | None,
        cpu_offload: bool,
        tensor_parallel_size: int,
        **kwargs: Any,
    ) -> None:
        check_tensor_parallel(tensor_parallel_size)
        check_sharding(sharding)
        super().__init__(tensor_parallel_size=1, **kwargs)
        self.filtering = filtering
        self.sharding = sharding
        self.mp_policy = mp_policy
        self.cpu_offload = cpu_offload

    @property
    def _n_devices(self) -> int:
        return self.num_processes * self.num_nodes

    @property
    def _sharded(self) -> bool:
        return self._n_devices > 1

    def _base(self) -> Any:
        return self.several if self._sharded else self.one_device

    def _configure_launcher(self) -> None:
        if self._sharded:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        check_precision(str(self.precision_plugin.precision))
        self._data_parallel_size = self._n_devices  # the base's "auto" would count nodes only
        if not self._sharded and (self.cpu_offload or self.mp_policy is not None):
            rank_zero_warn(
                "one device is not sharded: cpu_offload and mp_policy, which are FSDP2's, have no "
                "effect"
            )
        super().setup_environment()

    def shard(self, module: nn.Module) -> None:
        """Shard the models inside a module with FSDP2, and the reference."""
        mesh = data_parallel_mesh(
            self.device_mesh, self.sharding, self.num_nodes, self.num_processes
        )
        self.filtering.shard(module, mesh, self.mp_policy, self.cpu_offload)

    def data_parallel_group(self) -> Any:
        """Process group of all ranks, or None for one device."""
        return self.device_mesh["data_parallel"].get_group() if self._sharded else None
