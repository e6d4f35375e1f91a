"""The processes of a run as a mesh: its axes, and views of ranks by name (data, loss, fsdp).

An axis belongs to the mesh, a dim to a tensor. `dp_replicate` and `dp_shard` are a run's; `cp` (the
parts of a sequence) and `ep` (experts) have size 1. Nobody beside this file and `ranks` asks
torch's default group: who adds up a loss asks `mesh.loss`, who deals out samples `mesh.data`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit import ranks
from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError

DP_REPLICATE, DP_SHARD, CP, EP = "dp_replicate", "dp_shard", "cp", "ep"


@dataclass(frozen=True)
class View:
    """Ranks that belong together, as one of them sees it."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over the ranks, in place; return it. Collective, one all-reduce."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` by the first rank's; return it. Collective, one broadcast."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor


@dataclass(frozen=True)
class Mesh:
    """The axes of a run and their sizes, and the views of its ranks."""

    fsdp: DeviceMesh
    """Over which parameters are sharded: (dp_shard,), or (dp_replicate, dp_shard)."""
    axes: dict[str, int]
    """Axis -> its size, outermost first."""
    data: View
    """Ranks that read different samples."""
    loss: View
    """Ranks whose parts of a loss, and of its gradient, are added up."""
    expert: View = View()
    """Ranks that share the experts of a layer."""

    @property
    def device_type(self) -> str:
        return self.fsdp.device_type

    @property
    def size(self) -> int:
        """The processes of the run."""
        return self.fsdp.size()

    @property
    def shards(self) -> int:
        """The ranks that share a copy of the parameters."""
        return self.axes[DP_SHARD]


@ranks.collective
def init_mesh(device_type: str, world_size: int, cfg: ShardingConfig) -> Mesh:
    """Return the mesh of all processes, which the settings divide; see `mesh_shape`. Collective."""
    replicas, shards = mesh_shape(world_size, cfg)
    first = 1 if replicas == 1 else 0
    shape, names = (replicas, shards)[first:], (DP_REPLICATE, DP_SHARD)[first:]
    everyone = View(ranks.rank(), world_size, ranks.world_group())
    return Mesh(
        init_device_mesh(device_type, shape, mesh_dim_names=names),
        {DP_REPLICATE: replicas, DP_SHARD: shards, CP: 1, EP: 1},
        data=everyone,
        loss=everyone,
    )


def mesh_shape(world_size: int, cfg: ShardingConfig) -> tuple[int, int]:
    """Return (replicas, ranks that share a copy) of `world_size` processes.

    Every combination that does not hold is refused here: ShardingError where the product is another
    number, or `reshard_after_forward` does not divide the ranks that share a copy.
    """
    replicas, shards = cfg.dp_replicate, cfg.dp_shard
    if shards == -1:
        shards = world_size // max(1, replicas)
    if replicas == -1:
        replicas = world_size // max(1, shards)
    if replicas < 1 or shards < 1 or replicas * shards != world_size:
        raise ShardingError(
            f"sharding.dp_replicate {cfg.dp_replicate} x dp_shard {cfg.dp_shard} does not make "
            f"{world_size} processes; -1 takes all that the other leaves"
        )
    overrides = cfg.reshard_after_forward_overrides.items()
    values = {f"reshard_after_forward_overrides[{pattern}]": own for pattern, own in overrides}
    for name, value in {"reshard_after_forward": cfg.reshard_after_forward, **values}.items():
        if not isinstance(value, bool | str) and (value < 1 or shards % value):
            raise ShardingError(
                f"sharding.{name} {value} must divide the {shards} rank(s) that share a copy, or "
                "be true, false or auto"
            )
    return replicas, shards
