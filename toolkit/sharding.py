"""FSDP2 applied to a Hugging Face causal LM: the mesh, the units, precision, recomputation,
offload.

Owns how parameters are laid out over devices; the only file that imports `torch.distributed.fsdp`.
Does not know where the bytes come from: it shards a model on meta.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from toolkit.config import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.models import decoder_layers

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def init_mesh(device_type: str, world_size: int, cfg: ShardingConfig) -> DeviceMesh:
    """Return the mesh of the run: (dp_shard,), or (dp_replicate, dp_shard) for replicas (HSDP).

    Args:
        device_type: "cpu", "cuda", ... as `torch.device.type`.
        world_size: number of processes; the default process group must have that many.

    Raises:
        ShardingError: dp_replicate x dp_shard is not the number of processes, or
            `reshard_after_forward` does not divide the ranks that share a copy.
    """
    replicas, shards = cfg.dp_replicate, cfg.dp_shard
    if shards == -1:
        shards = world_size // replicas
    if replicas < 1 or shards < 1 or replicas * shards != world_size:
        raise ShardingError(
            f"sharding.dp_replicate {cfg.dp_replicate} x dp_shard {cfg.dp_shard} does not make "
            f"{world_size} processes; -1 for dp_shard takes all that dp_replicate leaves"
        )
    _check_reshard(cfg.reshard_after_forward, shards)
    if replicas == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=(REPLICATE, SHARD))


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, cfg: ShardingConfig) -> None:
    """Shard `model` in place, bottom up: each decoder layer, then the root with all that is left.

    Every parameter becomes a DTensor sharded over dim 0; on a meta model nothing is allocated. The
    gathered parameters have `param_dtype`, gradients are reduced in `reduce_dtype`, and the sharded
    parameters keep their storage dtype. Tied parameters stay in the root, in one unit. Build the
    optimizer afterwards. See PyTorch's `torch.distributed.fsdp.fully_shard`.

    Raises:
        ShardingError: no decoder layers are found, the model is sharded already, `param_dtype` is
            float16, or `reshard_after_forward` does not divide the shard ranks.
    """
    if isinstance(model, FSDPModule):
        raise ShardingError(
            f"{type(model).__name__} is sharded already; build it anew to shard it otherwise"
        )
    param_dtype, reduce_dtype = _dtype(cfg.param_dtype), _dtype(cfg.reduce_dtype)
    if torch.float16 in (param_dtype, reduce_dtype):
        raise ShardingError(
            "float16 needs loss scaling, which FSDP2 training has not; use bfloat16"
        )
    layers = decoder_layers(model)
    if not layers:
        raise ShardingError(
            f"{type(model).__name__} has no decoder layers to shard (_no_split_modules is empty "
            "and it "
            "holds no ModuleList)"
        )
    stored: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        stored.setdefault(parameter.dtype, name)
    if len(stored) > 1:  # FSDP2 would raise at the first forward, after the whole load
        listed = ", ".join(f"{dtype} ({name})" for dtype, name in stored.items())
        raise ShardingError(
            f"parameters of several storage dtypes cannot share a unit: {listed}; set model.dtype: "
            "float32"
        )
    if cfg.activation_checkpointing in (True, "full"):
        for layer in layers.values():
            _recompute_in_backward(layer)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if cfg.cpu_offload
        else OffloadPolicy()
    )
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    reshard = _reshard(cfg.reshard_after_forward, mesh)
    for layer in layers.values():
        shard(layer, reshard_after_forward=reshard)
    # Root last: it takes whatever no layer has claimed. PyTorch's default (None) keeps the root
    # gathered between forward and backward, where it would be gathered again at once.
    shard(model, reshard_after_forward=False if reshard is False else None)
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise ShardingError(f"{len(plain)} parameter(s) were not sharded: {', '.join(plain[:5])}")
    # Where the bytes belong, for whoever brings them: host memory under offload.
    vars(model)["parameter_device"] = torch.device("cpu") if cfg.cpu_offload else None


@dataclass(frozen=True)
class Unit:
    """One FSDP2 communication group."""

    name: str
    parameters: int
    """Elements of the unsharded parameters."""
    bytes_stored: int
    """Bytes of this rank's shards, in the storage dtype."""
    bytes_gathered: int
    """Bytes of the unsharded parameters, in the compute dtype."""


def units(model: nn.Module, cfg: ShardingConfig) -> list[Unit]:
    """Return the units of a sharded model in the order of definition, the root first."""
    owners = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    size = _dtype(cfg.param_dtype).itemsize
    members: dict[str, list[DTensor]] = {name: [] for name in owners}
    for name, parameter in model.named_parameters():
        owner = max((o for o in owners if o == "" or name.startswith(o + ".")), key=len)
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        members[owner].append(parameter)
    return [
        Unit(
            name or "(root)",
            sum(p.numel() for p in ps),
            sum(p.to_local().numel() * p.element_size() for p in ps),
            sum(p.numel() * size for p in ps),
        )
        for name, ps in members.items()
    ]


def ledger(model: nn.Module, cfg: ShardingConfig) -> str:
    """Return one line on a sharded model: units, bytes of a rank, and the dtype of each purpose."""
    found = units(model, cfg)
    largest = max(found, key=lambda u: u.bytes_gathered)
    stored = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return (
        f"{len(found)} units, {sum(u.bytes_stored for u in found) / 1e6:,.1f} MB of parameters a "
        "rank, largest "
        f"unit gathered {largest.bytes_gathered / 1e6:,.1f} MB; dtypes: stored and optimised "
        f"{'/'.join(stored)}, computed {cfg.param_dtype}, reduced {cfg.reduce_dtype}"
    )


def _dtype(name: str | torch.dtype) -> torch.dtype:
    return getattr(torch, str(name).removeprefix("torch."))


def _reshard(value: bool | int | str, mesh: DeviceMesh) -> bool | int:
    if value == "auto":
        return True
    ranks = (
        mesh[SHARD].size() if mesh.mesh_dim_names and SHARD in mesh.mesh_dim_names else mesh.size()
    )
    _check_reshard(value, ranks)
    return value  # type: ignore[return-value]


def _check_reshard(value: bool | int | str, ranks: int) -> None:
    if not isinstance(value, bool | str) and (value < 1 or ranks % value):
        raise ShardingError(
            f"sharding.reshard_after_forward {value} must divide the {ranks} rank(s) that share a "
            "copy; give a divisor, or true, false or auto"
        )


def _recompute_in_backward(layer: nn.Module) -> None:
    """Recompute `layer`'s forward in the backward pass, inside its FSDP unit.

    The layer's forward is replaced, not the module wrapped: names stay those of the plain model,
    and the recomputation runs on parameters that are gathered and inputs that are cast already
    (from outside, torch 2.11 and 2.12 lose that cast).
    """
    forward: Callable = layer.forward

    @functools.wraps(forward)
    def recomputed(*args, **kwargs):
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    layer.forward = recomputed
