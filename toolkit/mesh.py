"""The processes of a run as a mesh, and named groups of its ranks (data, loss, fsdp).

An axis belongs to the mesh, a dim to a tensor. A run uses the axes `dp_replicate` and `dp_shard`.
The ranks of the axis `cp` (context parallel) share the tokens of each row. They lie within the
other two axes: parameters are sharded over them, too. With `ep` (expert parallel), the ranks of
`dp_shard` also form a second mesh, for experts: the ranks of its axis `ep` divide the experts of a
layer, and those of its axis `efsdp` shard the same experts. Only this file and `ranks` use torch's
default process group: code that adds up a loss uses `mesh.loss`, code that deals out samples uses
`mesh.data`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit import ranks
from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
DATA = "data"
CP = "cp"
EP = "ep"
EFSDP = "efsdp"
TP = "tp"


@dataclass(frozen=True)
class View:
    """A group of ranks, seen from this process: its rank in the group, and the group's size.

    The default is a group of this process alone.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the group by an all-reduce in place, and return it. Collective.

        Nothing is done if the group has one rank.
        """
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with that of the group's first rank, and return it. Collective.

        Nothing is done if the group has one rank.
        """
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor


@dataclass(frozen=True)
class Mesh:
    """The device mesh of a run, the sizes of its axes, and the groups of ranks that loops use."""

    fsdp: DeviceMesh
    """The mesh that parameters are sharded over: (dp_shard,), or (dp_replicate, dp_shard)."""
    axes: dict[str, int]
    """Size of each axis, outermost first."""
    data: View
    """Ranks that read different samples."""
    loss: View
    """Ranks whose parts of a loss, and of its gradient, are added up."""
    context: View = View()
    """Ranks that share the tokens of each row."""
    expert: View = View()
    """Ranks that divide the experts of a layer."""
    expert_mesh: DeviceMesh | None = None
    """The mesh of experts: (efsdp, ep, tp), or (dp_replicate, efsdp, ep, tp). None: they are
    sharded like other parameters. `tp` has size 1; transformers requires it."""

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh over which the experts of one rank are sharded, like `fsdp` for other modules.

        Use it only if `expert_mesh` is not None.
        """
        assert self.expert_mesh is not None
        if self.axes[DP_REPLICATE] == 1:
            return self.expert_mesh[EFSDP]
        return self.expert_mesh[DP_REPLICATE, EFSDP]

    @property
    def device_type(self) -> str:
        """Type of the devices, such as "cuda"."""
        return self.fsdp.device_type

    @property
    def size(self) -> int:
        """Number of processes of the run (world size)."""
        return self.fsdp.size()

    @property
    def shards(self) -> int:
        """Number of ranks over which one copy of the parameters is sharded."""
        return self.axes[DP_SHARD]

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or of groups with `context_parallel`, that read different samples."""
        return self.data.size


@ranks.collective
def init_mesh(device_type: str, world_size: int, cfg: ShardingConfig) -> Mesh:
    """Create the device mesh of all processes, shaped as `mesh_shape` computes. Collective."""
    replicas, shards = mesh_shape(world_size, cfg)
    all_ranks = View(ranks.rank(), world_size, ranks.world_group())
    data, context = all_ranks, View()
    if cfg.context_parallel > 1:
        data, context = _init_context(device_type, world_size, cfg.context_parallel)
    expert, expert_mesh = View(), None
    if cfg.expert_parallel > 1:
        expert, expert_mesh = _init_experts(device_type, replicas, shards, cfg.expert_parallel)
    shape: tuple[int, ...] = (replicas, shards)
    names: tuple[str, ...] = (DP_REPLICATE, DP_SHARD)
    if replicas == 1:
        shape, names = shape[1:], names[1:]
    return Mesh(
        init_device_mesh(device_type, shape, mesh_dim_names=names),
        {
            DP_REPLICATE: replicas,
            DP_SHARD: shards,
            CP: cfg.context_parallel,
            EP: cfg.expert_parallel,
        },
        data=data,
        loss=all_ranks,
        context=context,
        expert=expert,
        expert_mesh=expert_mesh,
    )


def _init_context(device_type: str, world_size: int, parts: int) -> tuple[View, View]:
    """Create the groups of `context_parallel`. Collective.

    Returns:
        (ranks that read different rows, ranks that share a row).
    """
    rows = init_device_mesh(device_type, (world_size // parts, parts), mesh_dim_names=(DATA, CP))
    data, context = (
        View(rows.get_local_rank(axis), rows[axis].size(), rows.get_group(axis))
        for axis in (DATA, CP)
    )
    _warn_if_on_several_machines(
        parts, "share a row (sharding.context_parallel)", "each attention layer waits"
    )
    # A communicator that is created inside a layer or a loss would look like a hang.
    for view in (data, context):
        view.sum(torch.zeros(1, device=device_type))
    return data, context


def _init_experts(
    device_type: str, replicas: int, shards: int, parts: int
) -> tuple[View, DeviceMesh]:
    """Create the mesh of experts for `expert_parallel`. Collective.

    Returns:
        (ranks that divide the experts of a layer, the mesh).
    """
    shape: tuple[int, ...] = (replicas, shards // parts, parts, 1)
    names: tuple[str, ...] = (DP_REPLICATE, EFSDP, EP, TP)
    if replicas == 1:
        shape, names = shape[1:], names[1:]
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    expert = View(mesh.get_local_rank(EP), parts, mesh.get_group(EP))
    _warn_if_on_several_machines(
        parts, "divide experts (sharding.expert_parallel)", "each layer of experts waits"
    )
    # A communicator that is created inside a layer would look like a hang.
    expert.sum(torch.zeros(1, device=device_type))
    return expert, mesh


def _warn_if_on_several_machines(size: int, purpose: str, effect: str) -> None:
    """Log a warning if a group of `size` consecutive ranks spans several machines. Collective.

    Args:
        size: number of ranks of each group.
        purpose: what the ranks of a group do, with the setting.
        effect: the consequence, up to the words "for the network".
    """
    nodes = ranks.node_indices()
    if any(node != nodes[rank - rank % size] for rank, node in enumerate(nodes)):
        ranks.log_once(
            f"WARNING: the {size} ranks that {purpose} are on several machines, so {effect} for "
            "the network; set it to a divisor of the processes of a machine"
        )


def mesh_shape(world_size: int, cfg: ShardingConfig) -> tuple[int, int]:
    """Compute the number of parameter replicas, and the number of ranks that share each replica.

    If one of `dp_replicate` and `dp_shard` is -1, it is derived from the other one.

    Returns:
        (replicas, ranks per replica); their product is `world_size`.

    Raises:
        ShardingError: `dp_replicate` x `dp_shard` is not `world_size`, or a value of
            `reshard_after_forward` does not divide the ranks per replica, `context_parallel` does
            not divide `world_size`, or `expert_parallel` does not divide the ranks per replica.
    """
    replicas = cfg.dp_replicate
    shards = cfg.dp_shard
    if shards == -1:
        shards = world_size // max(1, replicas)
    if replicas == -1:
        replicas = world_size // max(1, shards)
    if replicas < 1 or shards < 1 or replicas * shards != world_size:
        raise ShardingError(
            f"sharding.dp_replicate {cfg.dp_replicate} x dp_shard {cfg.dp_shard} does not make "
            f"{world_size} processes; set one of them to -1 to derive it from the other"
        )
    if world_size % cfg.context_parallel:
        raise ShardingError(
            f"sharding.context_parallel {cfg.context_parallel} must divide the {world_size} "
            "processes of the run; start another number of processes, or set it to a divisor"
        )
    if shards % cfg.expert_parallel:
        raise ShardingError(
            f"sharding.expert_parallel {cfg.expert_parallel} must divide the {shards} rank(s) that "
            "share a copy of the model (sharding.dp_shard); set it to a divisor"
        )
    reshard_values: dict[str, bool | int | str] = {
        "reshard_after_forward": cfg.reshard_after_forward
    }
    for pattern, override in cfg.reshard_after_forward_overrides.items():
        reshard_values[f"reshard_after_forward_overrides[{pattern}]"] = override
    for name, value in reshard_values.items():
        if not isinstance(value, bool | str) and (value < 1 or shards % value):
            raise ShardingError(
                f"sharding.{name} {value} must divide the {shards} rank(s) that share a copy, or "
                "be true, false or auto"
            )
    return replicas, shards


def data_ranks(world_size: int, cfg: ShardingConfig) -> int:
    """Compute the number of ranks that read different samples; use it for batch sizes.

    It is every rank, or with `context_parallel` every group of ranks that share their rows. Raises
    as `mesh_shape` does.
    """
    replicas, shards = mesh_shape(world_size, cfg)
    return replicas * shards // cfg.context_parallel


def count_gathered_values(parameter: torch.Tensor) -> int:
    """Count the values that FSDP2 gathers of a sharded parameter, on one rank.

    They are all values, or of divided experts (`expert_parallel`) those of this rank's experts.
    """
    mesh: DeviceMesh | None = getattr(parameter, "device_mesh", None)
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or EP not in axes:
        return parameter.numel()
    return parameter.numel() // mesh.size(axes.index(EP))
