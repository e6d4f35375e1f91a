"""Divide the experts of a mixture among ranks, and send tokens to them.

[Note: dispatch] With `sharding.expert_parallel`, a rank holds complete experts, and other ranks of
its group hold the others. In each layer an all-to-all sends every token to the ranks of its
experts, and a second one sends the results back, where they are weighted and summed. The code is
that of transformers (`distributed/expert_parallel.py`). A rank computes the tokens of all ranks of
its group, so the gradients of its experts are already sums over the group.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from toolkit.config.settings import ShardingConfig
from toolkit.errors import ModelError
from toolkit.formats import transformers_private
from toolkit.mesh import EFSDP, EP, TP, mesh_shape
from toolkit.models.experts import expert_modules
from toolkit.models.packed_experts import PackedExperts
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of

_MODULE = "distributed.expert_parallel"
# Transformers' names for a module whose tokens are exchanged, and for its divided parameters.
_DISPATCHED, _DIVIDED = "ep_dispatch_experts", "grouped_gemm"
_METHOD = "all_to_all"


def find_divisible_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for each module of experts that transformers can divide among ranks.

    Args:
        model: with or without adapters, sharded or not.
    """
    names = {id(module): name for name, module in model.named_modules()}
    base = base_of(model)
    modules = (base.get_submodule(n) for n, s in _read_plan(base).items() if s == _DISPATCHED)
    return {names[id(module)]: module for module in modules}


def _read_plan(base: PreTrainedModel) -> dict[str, str]:
    """Read from transformers how the experts of a model are divided.

    Returns:
        Name of a module or parameter -> its style; parameters precede their module. {} if the model
        has no experts, or transformers does not divide them.
    """
    plan = getattr(base, "ep_plan", None)
    if not plan:
        return {}
    expand = transformers_private("modeling_utils", "PreTrainedModel._expand_parallel_plan")
    return dict(expand(base, plan))


def gathered_shares(model: nn.Module, parts: int) -> dict[nn.Parameter, float]:
    """Return the share of each parameter's values that a rank gathers; below 1 for divided experts.

    Args:
        model: not sharded, with or without adapters.
        parts: `sharding.expert_parallel`.
    """
    shares = dict.fromkeys(model.parameters(), 1.0)
    modules = find_divisible_experts(model).values() if parts > 1 else ()
    return shares | {p: 1 / parts for module in modules for p in module.parameters()}


def check_expert_parallel(
    model: PreTrainedModel, cfg: ShardingConfig, world_size: int | None = None
) -> None:
    """Raise ModelError if the experts of `model` cannot be divided as `expert_parallel` says.

    Args:
        model: on meta, without adapters.
        cfg: the sharding settings of the run; nothing is checked if `expert_parallel` is 1.
        world_size: number of processes; None: unknown.

    Raises:
        ModelError: transformers divides no experts of this model, or the ranks do not divide them.
        ShardingError: the processes cannot form the mesh.
    """
    parts = cfg.expert_parallel
    if parts == 1:
        return
    shards = parts if world_size is None else mesh_shape(world_size, cfg)[1]
    if fault := find_division_obstacle(model, parts, shards):
        raise ModelError(
            f"sharding.expert_parallel {parts} is not possible for {module_class_name(model)}: "
            f"{fault}"
        )


def find_division_obstacle(model: PreTrainedModel, parts: int, shards: int) -> str:
    """Return why experts cannot be divided and what to do, as part of a sentence; "" if they can.

    Args:
        model: not sharded, without adapters.
        parts: number of ranks that divide the experts of a layer.
        shards: number of ranks that share a copy of the model.
    """
    plan = _read_plan(model)
    modules = find_divisible_experts(model)
    if not modules:
        return (
            f"transformers {transformers.__version__} divides no experts of it (its config class "
            "has no base_model_ep_plan as of transformers 5.24). Remove the setting"
        )
    dispatch = [name for name, style in plan.items() if style == _DISPATCHED]
    parameters = [name for name, style in plan.items() if style == _DIVIDED]
    if other_styles := sorted({*plan.values()} - {_DISPATCHED, _DIVIDED}):
        return f"its plan has the styles {', '.join(other_styles)}, which were not tried"
    for name in dispatch:
        module: Any = model.get_submodule(name)
        leaves = [f"{name}.{leaf}" for leaf, _ in module.named_parameters()]
        if undivided := [leaf for leaf in leaves if leaf not in parameters]:
            return f"transformers would not divide {undivided[0]}, a part of the experts"
        if not hasattr(module, "num_experts"):
            return f"{name} does not tell its number of experts"
        if module.num_experts % parts:
            return (
                f"{name} has {module.num_experts} experts; set sharding.expert_parallel to a "
                "divisor of them"
            )
        # Checksums and checkpoints need to know the rows of a rank. Only equal parts were tried.
        if module.num_experts % shards and shards > parts:
            fewer = [n for n in range(parts, shards, parts) if shards % n == 0]
            possible = max(n for n in fewer if module.num_experts % n == 0)
            return (
                f"{name} has {module.num_experts} experts, which the {shards} ranks that share a "
                f"copy of the model do not divide equally; set sharding.dp_shard to {possible} and "
                "sharding.dp_replicate to -1 to have more copies of fewer ranks"
            )
    return ""


def check_experts_unchanged(model: nn.Module, parts: int) -> None:
    """Raise ModelError if adapters or 4-bit weights are in experts that are to be divided.

    Args:
        model: with its adapters, not yet sharded.
        parts: `sharding.expert_parallel`.
    """
    modules = find_divisible_experts(model).values()
    for name, module in expert_modules(base_of(model)).items():
        # PEFT's wrappers are no experts, so the wrapped module is not in transformers' plan.
        if isinstance(module, PackedExperts) or module not in modules:
            raise ModelError(
                f"sharding.expert_parallel {parts}: {name} ({type(module).__name__}) has adapters, "
                "is trained in full together with adapters, or is in 4 bits, and cannot be "
                "divided. Name other modules, such as lora.target_modules: [q_proj, k_proj, "
                "v_proj, o_proj], since all-linear may include experts; or remove "
                "sharding.expert_parallel"
            )


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of `model` among the axis `ep` of `mesh`, in place.

    Their parameters become DTensors, of which this rank holds its experts, and their forwards
    exchange tokens. Apply FSDP2 afterwards. See [Note: dispatch].

    Args:
        model: on meta, with or without adapters, not yet sharded.
        mesh: `Mesh.expert_mesh`.

    Raises:
        ModelError: transformers cannot divide the experts, or this version does not divide any.
    """
    base = base_of(model)
    parts = mesh.size((mesh.mesh_dim_names or ()).index(EP))
    check_experts_unchanged(model, parts)
    if fault := find_division_obstacle(base, parts, parts * mesh[EFSDP].size()):
        raise ModelError(f"sharding.expert_parallel {parts}: {fault}")
    apply = transformers_private(_MODULE, "apply_expert_parallelism")
    apply(base, mesh[EP], mesh[TP], _read_plan(base), _METHOD)


@contextlib.contextmanager
def even_dispatch() -> Iterator[None]:
    """Within the context, send the same number of tokens to every expert, whatever routers choose.

    For simulated ranks, which do not tell each other how many tokens they send. Memory and traffic
    are those of a rank whose experts get the mean number of tokens.
    """
    kind = transformers_private(_MODULE, "AllToAllEP")
    transformers_private(_MODULE, "AllToAllEP._dispatch_tokens")
    with mock.patch.object(kind, "_dispatch_tokens", _dispatch_evenly):
        yield


def _dispatch_evenly(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: Any) -> Any:
    """Replace `AllToAllEP._dispatch_tokens`; see `even_dispatch`. Same arguments and results."""
    exchange = transformers_private(_MODULE, "all_to_all_single_autograd")
    wait = transformers_private(_MODULE, "_WaitTensor")
    state = transformers_private(_MODULE, "_AllToAllState")
    group, size = self.ep_mesh.get_group(), self.ep_mesh.size()
    order = torch.argsort(index.reshape(-1))
    sent = hidden[order // index.size(-1)]
    # Counts are exchanged before the tokens; here they have no values.
    counts = torch.zeros(size, self.num_local_experts, dtype=torch.long, device=hidden.device)
    torch.distributed.all_to_all_single(torch.empty_like(counts), counts, group=group)
    rows = len(order)
    sizes = [rows // size + (i < rows % size) for i in range(size)]
    received_sizes = [sizes[self.ep_mesh.get_local_rank()]] * size
    received = wait.apply(exchange(sent, received_sizes, sizes, group))
    experts = torch.arange(len(received), device=hidden.device) % self.num_local_experts
    experts = experts.sort().values[:, None]
    ones = torch.ones_like(experts, dtype=received.dtype)
    return received, experts, ones, state(weights, order, sizes, received_sizes, len(hidden))
