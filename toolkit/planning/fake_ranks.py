"""Shard the model of a run on meta, as one rank of processes that do not exist.

Planning, `toolkit inspect --plan` and a rehearsal look at such a model. It is made by the calls of
the recipes, and `auto` is decided as on the given devices.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from toolkit.adapters import prepare_adapters
from toolkit.config.settings import RunConfig, ShardingConfig, TorchCompile, model_settings
from toolkit.data.prepare import PackingChoice, choose_packing
from toolkit.data.row_formats import find_row_format
from toolkit.errors import ConfigError, ModelError, ShardingError, one_line
from toolkit.formats import torch_private
from toolkit.mesh import init_mesh, mesh_shape
from toolkit.models.attention import attend_within_documents, check_varlen_kernel
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.context_probe import check_context_parallel
from toolkit.models.dropout import disable_dropout_modules
from toolkit.models.expert_parallel import gathered_shares
from toolkit.models.float8_base import set_planned_device
from toolkit.models.peft_model import base_of
from toolkit.models.stored import refuse_float16
from toolkit.objectives import objective_class
from toolkit.sharding.accumulation import should_reduce_each
from toolkit.sharding.fsdp import (
    Sharded,
    apply_fsdp,
    should_compile_layers,
    should_replicate_frozen,
    should_split_embeddings,
)
from toolkit.sharding.units import plan_units

_choices: "weakref.WeakKeyDictionary[nn.Module, PackingChoice]" = weakref.WeakKeyDictionary()
TRACED = "aot_eager_decomp_partition"
"""The backend of torch that partitions like inductor, but runs the operations one by one."""


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Initialise torch's `fake` process group within the context; its collectives do nothing.

    Raises:
        ShardingError: this process has a process group already.
    """
    if dist.is_initialized():
        raise ShardingError("a process group exists already; plan in a separate process")
    store = torch_private("testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def planned_ranks(cfg: ShardingConfig, world_size: int | None) -> int:
    """Return the number of ranks to plan for: `world_size`, or if None the product of the mesh.

    Raises:
        ConfigError: neither is known, or the number is less than 1.
    """
    if world_size is None and -1 in (cfg.dp_replicate, cfg.dp_shard):
        raise ConfigError(
            "the number of processes is not known: give --world_size N, or set both "
            "sharding.dp_replicate and sharding.dp_shard"
        )
    count = cfg.dp_replicate * cfg.dp_shard if world_size is None else world_size
    if count < 1:
        raise ConfigError(f"--world_size must be at least 1, got {count}")
    return count


@contextlib.contextmanager
def sharded(
    cfg: RunConfig,
    world_size: int,
    rank: int = 0,
    device_type: str = "cuda",
    memory: int | None = None,
    *,
    model: Any = None,
    mesh_type: str = "cpu",
    torch_compile: TorchCompile = "none",
    compile_by: str | None = None,
) -> Iterator[tuple[Sharded, ShardingConfig]]:
    """Build a run's model on meta and shard it, in a fake process group that exists in the context.

    Yields (sharded model, sharding settings with `auto` decided).

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks.
        rank: the rank whose shards the model gets.
        device_type: type of the run's devices; decides settings that are `auto`.
        memory: bytes of each device; None: unlimited.
        model: a model on meta, without adapters. None: it is built.
        mesh_type: device type of the mesh, which may differ from `device_type`.
        torch_compile: replaces `sharding.torch_compile` of `cfg`, unless `compile_by` takes effect.
        compile_by: a torch.compile backend. It compiles the layers if the run itself would compile
            them. None: do not compile them for that reason.
    """
    with fake_world(world_size, rank):
        if model is None:
            model = build_on_meta(model_settings(cfg))
            refuse_float16(model, cfg.model.name_or_path)
            if (parts := cfg.sharding.context_parallel) > 1:
                check_context_parallel(model, parts, cfg.data.sequence_length)
        model = prepare_adapters(model, cfg.adapters, cfg.sharding.param_dtype)
        set_planned_device(model, device_type)
        if not objective_class(type(cfg)).has_dropout:
            disable_dropout_modules(model)
        sharding = _decide_sharding(model, cfg.sharding, world_size, device_type, memory)
        sharding = replace(sharding, torch_compile=torch_compile)
        if compile_by is not None and _compiles_layers(model, cfg, sharding, device_type):
            # Otherwise torch would replace sizes that an earlier plan had by symbols.
            torch.compiler.reset()
            mode = None if compile_by == TRACED else sharding.torch_compile_mode
            sharding = replace(
                sharding,
                torch_compile="layer",
                torch_compile_backend=compile_by,
                torch_compile_mode=mode,
            )
        yield apply_fsdp(model, init_mesh(mesh_type, world_size, sharding), sharding), sharding


def _decide_sharding(
    model: Any, cfg: ShardingConfig, world_size: int, device_type: str, memory: int | None
) -> ShardingConfig:
    """Return the sharding settings with `auto` decided as a run on such devices would decide it.

    Compilation is turned off. `memory` is in bytes; None means unlimited.
    """
    available = float("inf") if memory is None else memory
    splits = should_split_embeddings(model, cfg, device_type)
    sharding = replace(cfg, embedding_units=splits, torch_compile="none")
    shards = mesh_shape(world_size, cfg)[1]
    is_replicated, _ = should_replicate_frozen(model, sharding, shards, device_type, available)
    sharding = replace(sharding, frozen="replicated" if is_replicated else "sharded")
    if cfg.accumulation == "auto":
        itemsize = getattr(torch, cfg.reduce_dtype).itemsize
        shares = gathered_shares(model, cfg.expert_parallel)
        values = int(sum(p.numel() * share for p, share in shares.items() if p.requires_grad))
        if should_reduce_each(values, itemsize, available, shards):
            sharding = replace(sharding, accumulation="reduce_each")
        else:
            sharding = replace(sharding, accumulation="reduce_once")
    return sharding


def planned_packing(cfg: RunConfig, base: nn.Module) -> PackingChoice:
    """Decide `data.packing` as the run would, and whether its attention needs a mask.

    To decide, packing is tried on a tiny copy of `base`, once per model. Do not call it within a
    FakeTensorMode. Unlike in a run, `bfd` is not refused, because the devices of the run may have
    another attention.
    """
    if base not in _choices:
        setting = cfg.data.packing
        data = replace(cfg.data, packing="auto") if setting == "bfd" else cfg.data
        parts = cfg.sharding.context_parallel
        choice = choose_packing(data, cast(Any, base), cfg.train.micro_batch, parts=parts)
        kernel = base.config._attn_implementation  # type: ignore[union-attr]
        if choice.mask is None and kernel != "sdpa":
            choice = replace(choice, mask=f"plans have no borders for {kernel}")
        _choices[base] = replace(choice, packing="bfd") if setting == "bfd" else choice
    return _choices[base]


def attend_as_run(
    cfg: RunConfig, sharded_model: Sharded, planned_on: str | None = None
) -> PackingChoice:
    """Let a model attend within documents if that of the run does, instead of building masks.

    Args:
        cfg: the settings of the run.
        sharded_model: the model from `sharded`; changed in place.
        planned_on: type of device that is planned for; None: the model will run with real tensors.

    Returns:
        The packing of the run. Its batches have borders if `mask` is None.
    """
    base: Any = base_of(sharded_model.model)
    choice = planned_packing(cfg, base)
    if choice.mask is None and planned_on is None:
        try:
            check_varlen_kernel(torch.device(sharded_model.mesh.device_type))
        except ModelError as error:  # the run finds it in its trial of packing, and builds masks
            choice = replace(choice, mask=one_line(error))
    if choice.mask is None:
        attend_within_documents(base, sharded_model.mesh.context, planned_on=planned_on)
    return choice


def _compiles_layers(
    model: Any, cfg: RunConfig, sharding: ShardingConfig, device_type: str
) -> bool:
    """Return True if a run on devices of `device_type` would compile its decoder layers.

    Args:
        model: a model with its adapters, on meta.
        cfg: the settings of the run.
        sharding: the sharding settings with `auto` decided, except for compilation.
        device_type: type of the run's devices.
    """
    needs_packing = cfg.sharding.torch_compile == "auto" and device_type == "cuda"
    packing = planned_packing(cfg, base_of(model)).packing if needs_packing else cfg.data.packing
    sharding = replace(sharding, torch_compile=cfg.sharding.torch_compile)
    has_kernels = cfg.model.kernels != "none"
    plan = plan_units(model, sharding)
    fixed_length = find_row_format(cfg.rows).has_fixed_width(packing)
    return should_compile_layers(plan, sharding, device_type, fixed_length, has_kernels)[0]
