"""Plan which modules are gathered together, in which dtype, and what every rank keeps complete.

Every parameter belongs to exactly one unit, or to the replicated parameters.

[Note: shared parameters] A parameter with several names must belong to one unit, since FSDP2
gathers it for one owner. If one of its names lies in no unit but the root (or the base model), the
root owns it: an embedding tied to the head. If all its names lie in units, the modules that hold
nothing else become one joint unit (zamba's shared transformer). If there are no such modules, the
units themselves are joined. A head with its own compute dtype forms a joint unit with the embedding
that it is tied to.

[Note: units of experts] With `expert_parallel`, the experts of a layer are a unit. It is gathered
over fewer ranks (the axis `efsdp`), because the ranks of the axis `ep` hold other experts.

[Note: replicated parameters] The parameters that transformers keeps in fp32 for half precision
(routers, decay rates, sinks) are small, and often used without a forward of their module, so that
no hook would gather them. They stay complete on every rank, as scalars do. Their gradients are
summed over the ranks once a step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import model_class_name
from toolkit.models.expert_parallel import find_divisible_experts
from toolkit.models.layers import (
    decoder_layers,
    enclosing_module_names,
    modules_outside_text,
    parameters_outside_text,
    tied_families,
)
from toolkit.models.packed_linear import packed_weights
from toolkit.models.patterns import matching_modules, matching_parameters
from toolkit.models.peft_model import base_of, has_adapters, trained_copies, unwrapped_base

ROOT = ""
Member = tuple[str, ...]  # the names of a unit's modules

# Layers whose backward does not pass through the hooks of modules.
_ROOT_ONLY = {"reformer": "its reversible layers run their backward without the hooks of modules"}


@dataclass(frozen=True)
class Unit:
    """One FSDP2 communication group: its parameters are gathered, freed and reduced together.

    It consists of one or more modules, and has one compute dtype.
    """

    modules: tuple[str, ...]  # names; the root's is empty
    parameters: tuple[str, ...]  # names of the parameters it owns; of tied ones the first name
    param_dtype: torch.dtype  # of the gathered parameters and of the computation
    output_dtype: torch.dtype | None
    reshard_after_forward: bool | int | None  # as `fully_shard` takes it
    has_experts: bool = False  # divided among the axis `ep`; see [Note: units of experts]

    @property
    def name(self) -> str:
        """Name of the unit's first module, or "(root)" for the root."""
        return self.modules[0] or "(root)"


@dataclass(frozen=True)
class UnitPlan:
    """The FSDP2 units of a model, inner ones first, and the parameters that are not sharded."""

    units: tuple[Unit, ...]  # inner units before outer ones; the root last
    layers: tuple[str, ...]  # for recomputation and compilation
    replicated: tuple[
        str, ...
    ]  # parameters that every rank keeps complete; first names of tied ones
    root_only: str | None  # why the layers cannot be units; None: they are


def plan_units(model: nn.Module, cfg: ShardingConfig) -> UnitPlan:
    """Plan which modules of `model` become FSDP2 units, and which parameters stay replicated.

    Args:
        model: with or without adapters, not yet sharded.
        cfg: the sharding settings. Decide `auto` in `embedding_units` and `frozen` before, because
            here it counts as off.

    Raises:
        ShardingError: all parameters would be in the root, a unit would have two compute dtypes, or
            two units would own one parameter.
        ModelError: a pattern in the settings matches nothing.
    """
    modules = dict(model.named_modules())
    replicated = _replicated_ids(model, cfg)
    layers, root_only = _find_layers(model, cfg)
    base = base_of(model)
    embedding = head = None
    if isinstance(base, PreTrainedModel):
        embedding = _find_name(base.get_input_embeddings(), modules)
        head = _find_name(base.get_output_embeddings(), modules)
    members: list[Member] = []
    experts = find_divisible_experts(model) if cfg.expert_parallel > 1 else {}
    members += [(name,) for name in experts]
    if root_only is None:
        members += [(name,) for name in layers]
    # The caller decides `auto`, because it knows the device.
    if cfg.embedding_units is True:
        members += [(n,) for n in (embedding, head) if n is not None]
    # No forward of text uses a tower for images or sound. As a separate unit it is never gathered.
    towers = modules_outside_text(model)
    members += [
        (n,) for tower in towers for n in _modules_with_forward(tower, model.get_submodule(tower))
    ]
    dtypes = _find_dtype_overrides(model, cfg, members, head)
    members = list(dict.fromkeys([*members, *dtypes, (ROOT,)]))
    members = _join_tied_units(model, members, replicated, dtypes.keys())
    owned = _assign_parameters(model, members, replicated)
    if not any(owned[m] for m in members if m != (ROOT,)) and root_only is None:
        raise ShardingError(
            f"{model_class_name(model)}: no unit but the root would hold a parameter; set "
            "sharding.layer_classes, or name fewer in sharding.ignored_parameters"
        )
    order = {name: i for i, name in enumerate(modules)}
    filled = [m for m in members if owned[m] or m == (ROOT,)]
    depth = {name: len(name.split(".")) if name else 0 for name in modules}
    filled.sort(key=lambda m: (-max(depth[name] for name in m), order[m[0]]))
    units = [_build_unit(cfg, m, owned[m], members, dtypes, head) for m in filled]
    units = _apply_reshard_overrides(model, cfg, units)
    units = _mark_experts(model, units, experts, replicated)
    names = [n for n, p in model.named_parameters() if id(p) in replicated]
    return UnitPlan(tuple(units), tuple(layers), tuple(names), root_only)


def _find_layers(model: nn.Module, cfg: ShardingConfig) -> tuple[list[str], str | None]:
    """Find the names of the decoder layers, or of the modules of `layer_classes` if it is set.

    Returns:
        The names; and the reason why they cannot be FSDP2 units, or None if they can.

    Raises:
        ShardingError: the model has no decoder layers.
    """
    if cfg.layer_classes:
        names = matching_modules(model, cfg.layer_classes, "sharding.layer_classes", called=True)
        return list(names), None
    layers = list(decoder_layers(model))
    if not layers:
        raise ShardingError(
            f"{model_class_name(model)} has no decoder layers to shard; set sharding.layer_classes "
            "to the class of its layers"
        )
    return layers, _ROOT_ONLY.get(getattr(getattr(model, "config", None), "model_type", ""))


def _find_name(module: nn.Module | None, modules: dict[str, nn.Module]) -> str | None:
    """Look up the name of a module in `modules`.

    Returns None for None, for a module that is not in `modules`, and for a ModuleList or
    ModuleDict. These containers have no forward, so FSDP2 cannot hook them.
    """
    if module is None or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    return next((name for name, candidate in modules.items() if candidate is module), None)


def _replicated_ids(model: nn.Module, cfg: ShardingConfig) -> set[int]:
    """Collect the `id()` of each parameter that every rank keeps complete.

    These are ignored, 0-d and fp32 parameters and, if the settings say so, frozen ones. See [Note:
    replicated parameters].
    """
    names = matching_parameters(model, cfg.ignored_parameters, "sharding.ignored_parameters")
    replicated = {id(model.get_parameter(name)) for name in names}
    if cfg.frozen == "replicated":
        replicated |= set(map(id, frozen_parameters(model)))
    if cfg.param_dtype != "float32":
        with unwrapped_base(model) as base:
            replicated |= set(map(id, find_fp32_tensors(base).values()))
    # Packed bytes have no dtype of their own.
    packed = {id(layer.weight) for layer in packed_weights(model).values()}
    stored = [p for p in model.parameters() if id(p) not in packed]
    # The dtype of adapters is a choice, and does not tell the dtype of the computation.
    if has_adapters(model):
        stored = [p for p in stored if not p.requires_grad]
    elements: Counter[torch.dtype] = Counter()
    for parameter in stored:
        elements[parameter.dtype] += parameter.numel()
    commonest = max(elements, key=elements.__getitem__, default=torch.float32)
    replicated |= {id(p) for p in model.parameters() if p.ndim == 0}
    # The model's own code creates some parameters in fp32 among others in half precision.
    replicated |= {id(p) for p in stored if p.dtype == torch.float32 != commonest}
    # A module that is trained in full is laid out as its original, because the two are compared
    # and copied by row.
    return replicated | {
        id(copy) for original, copy in trained_copies(model) if id(original) in replicated
    }


def is_inside(name: str, outer: Iterable[str]) -> bool:
    """Return True if the module `name` lies inside one of the modules `outer`.

    A module does not lie inside itself.
    """
    return any(name.startswith(module + ".") for module in outer)


def frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the frozen parameters that a forward of text uses.

    Parameters of towers for images or sound are skipped. Originals of modules that are trained in
    full (`modules_to_save`) are skipped too, because their copies are used instead.
    """
    apart = {id(original) for original, _ in trained_copies(model)}
    apart |= {id(model.get_parameter(name)) for name in parameters_outside_text(model)}
    return [p for p in model.parameters() if not p.requires_grad and id(p) not in apart]


def _find_dtype_overrides(
    model: nn.Module, cfg: ShardingConfig, members: list[Member], head: str | None
) -> dict[Member, torch.dtype]:
    """Find the units whose compute dtype `param_dtype_overrides` changes.

    An overridden module that is no unit yet becomes one. Several such modules inside one unit with
    the same dtype become one unit together, except for the head.

    Args:
        model: the model.
        cfg: the sharding settings.
        members: the units so far, each as the names of its modules.
        head: name of the output head, or None.

    Returns:
        Unit, as the names of its modules -> its dtype.

    Raises:
        ShardingError: the modules of one unit would have different dtypes.
    """
    named_dtypes: dict[str, torch.dtype] = {}
    for pattern, dtype_name in cfg.param_dtype_overrides.items():
        matches = matching_modules(model, [pattern], "sharding.param_dtype_overrides").items()
        paths = [path for name, module in matches for path in _modules_with_forward(name, module)]
        named_dtypes |= dict.fromkeys(paths, getattr(torch, dtype_name))
    units = {name: member for member in members for name in member}
    default = getattr(torch, cfg.param_dtype)
    dtypes: dict[Member, torch.dtype] = {}
    groups: dict[tuple[Member, torch.dtype], list[str]] = {}
    for member in members:
        unit_dtypes = {
            _innermost_dtype([*enclosing_module_names(name), name], named_dtypes, default)
            for name in member
        }
        if len(unit_dtypes) > 1:
            names = " and ".join(sorted(map(str, unit_dtypes)))
            raise ShardingError(
                f"sharding.param_dtype_overrides sets {names} in one unit "
                f"({', '.join(member)}), which computes in one dtype"
            )
        if unit_dtypes != {default}:
            dtypes[member] = unit_dtypes.pop()
    for name, dtype in named_dtypes.items():
        holds = any(True for _ in model.get_submodule(name).parameters())
        if (
            name in units
            or not holds
            or dtype == _innermost_dtype(enclosing_module_names(name), named_dtypes, default)
        ):
            continue
        if name == head:
            dtypes[(name,)] = dtype
        else:
            groups.setdefault((_innermost_unit(name, members), dtype), []).append(name)
    return dtypes | {tuple(names): dtype for (_, dtype), names in groups.items()}


def _modules_with_forward(name: str, module: nn.Module) -> list[str]:
    """Return [`name`], or for a ModuleList or ModuleDict the names of the modules inside it."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [name]
    children = module.named_children()
    return [
        path for part, child in children for path in _modules_with_forward(f"{name}.{part}", child)
    ]


def _innermost_dtype(
    path: list[str], named_dtypes: dict[str, torch.dtype], default: Any
) -> torch.dtype:
    """Return the override of the innermost module that has one; `default` if none has.

    Args:
        path: names of nested modules, the outermost first.
        named_dtypes: name of a module -> its override.
        default: the dtype without an override.
    """
    return next((named_dtypes[name] for name in reversed(path) if name in named_dtypes), default)


def _join_tied_units(
    model: nn.Module, members: list[Member], replicated: set[int], own_dtype: Set[Member]
) -> list[Member]:
    """Join units that share parameters into one; see [Note: shared parameters].

    Args:
        model: not yet sharded.
        members: units, each as the names of its modules.
        replicated: `id()` of the parameters that no unit owns.
        own_dtype: the units with a dtype override.

    Returns:
        All units after joining.
    """
    families = {id(model.get_parameter(n[0])): n for n in tied_families(model).values()}
    shared = {k: n for k, n in families.items() if len(n) > 1 and k not in replicated}
    apart: dict[frozenset[Member], list[list[str]]] = {}
    for aliases in shared.values():
        homes = frozenset(_innermost_unit(name, members) for name in aliases)
        if len(homes) > 1 and (_enclosing_unit(homes) is None or homes & own_dtype):
            apart.setdefault(homes, []).append(aliases)
    for homes, tied in apart.items():
        tops = [
            _outermost_shared_module(model, name, shared) for aliases in tied for name in aliases
        ]
        if None in tops:
            # The outer unit owns the parameter.
            if _enclosing_unit(homes) is not None:
                continue
            joint = tuple(dict.fromkeys(name for home in members if home in homes for name in home))
        else:
            joint = tuple(dict.fromkeys(top for top in tops if top is not None))
        members = [m for m in members if not set(m) <= set(joint)]
        members.append(joint)
    return members


def _outermost_shared_module(
    model: nn.Module, name: str, shared: dict[int, list[str]]
) -> str | None:
    """Find the outermost module around a shared parameter that holds only shared parameters.

    Args:
        model: the model.
        name: name of the shared parameter.
        shared: `id()` of each shared parameter -> its names.

    Returns:
        The module's name; None if there is no such module with a forward.
    """
    top = None
    for outer in reversed(enclosing_module_names(name)):
        if any(id(p) not in shared for p in model.get_submodule(outer).parameters()):
            break
        if not isinstance(model.get_submodule(outer), nn.ModuleList | nn.ModuleDict):
            top = outer
    return top


def _assign_parameters(
    model: nn.Module, members: list[Member], replicated: set[int]
) -> dict[Member, tuple[str, ...]]:
    """Assign each parameter to the unit that owns it. Replicated parameters are skipped.

    Args:
        model: the model.
        members: all units, each as the names of its modules.
        replicated: `id()` of the parameters that no unit owns.

    Returns:
        Unit -> names of its parameters. A tied parameter has its first name only.

    Raises:
        ShardingError: two units would own a tied parameter.
    """
    owned: dict[Member, list[str]] = {member: [] for member in members}
    for first, aliases in tied_families(model).items():
        if id(model.get_parameter(first)) in replicated:
            continue
        homes = frozenset(_innermost_unit(name, members) for name in aliases)
        owner = next(iter(homes)) if len(homes) == 1 else _enclosing_unit(homes)
        if owner is None:
            units = " and ".join(home[0] or "(root)" for home in sorted(homes))
            raise ShardingError(
                f"{' and '.join(aliases)} are one parameter, which the units {units} would both "
                "hold; set sharding.layer_classes to modules that hold all of its names"
            )
        owned[owner].append(aliases[0])
    return {member: tuple(names) for member, names in owned.items()}


def _innermost_unit(name: str, members: list[Member]) -> Member:
    """Return the innermost unit that contains a parameter or module, or the root if none does.

    Args:
        name: name of the parameter or module.
        members: all units, each as the names of its modules.
    """
    by_module = {module: member for member in members for module in member}
    inside = [outer for outer in enclosing_module_names(name) if outer in by_module]
    return by_module[inside[-1]] if inside else (ROOT,)


def _enclosing_unit(homes: Iterable[Member]) -> Member | None:
    """Return the unit among `homes` that contains all other units in it; None if none does."""
    for home in homes:
        other_modules = [module for other in homes if other != home for module in other]
        around = tuple(module + "." if module else ROOT for module in home)
        if all(module.startswith(around) for module in other_modules):
            return home
    return None


def _build_unit(
    cfg: ShardingConfig,
    member: Member,
    parameters: tuple[str, ...],
    members: list[Member],
    dtypes: dict[Member, torch.dtype],
    head: str | None,
) -> Unit:
    """Build one `Unit`: choose its compute dtype, output dtype and resharding.

    The output dtype is set only for a unit with a dtype override that is neither the root nor has
    the head: to the dtype of the unit around it. With `reshard_after_forward: auto`, all units
    except the head are resharded. The root gets None, which is FSDP2's default, unless the setting
    is a bool.

    Args:
        cfg: the sharding settings.
        member: names of the unit's modules.
        parameters: names of the parameters that it owns.
        members: all units, to find the one around this unit.
        dtypes: unit -> its dtype override.
        head: name of the output head; None if it is no separate module.
    """
    own_dtypes = [dtypes[part] for part in dtypes if set(part) <= set(member)]
    default = getattr(torch, cfg.param_dtype)
    output_dtype = None
    # Return the dtype that the surrounding unit computes in.
    if own_dtypes and member != (ROOT,) and head not in member:
        output_dtype = dtypes.get(_innermost_unit(member[0], members), default)
    setting: Any = cfg.reshard_after_forward
    reshard = member != (head,) if setting == "auto" else setting
    if member == (ROOT,) and not isinstance(setting, bool):
        # The root stays gathered, because the backward begins with it.
        reshard = None
    return Unit(
        member, parameters, own_dtypes[-1] if own_dtypes else default, output_dtype, reshard
    )


def _mark_experts(
    model: nn.Module, units: list[Unit], experts: Collection[str], replicated: set[int]
) -> list[Unit]:
    """Return the units with `has_experts` set for those of divided experts.

    Args:
        model: the model.
        units: all units.
        experts: names of the modules whose experts are divided.
        replicated: `id()` of the parameters that no unit owns.

    Raises:
        ShardingError: a unit has experts and other modules, or parameters of experts are
            replicated.
    """
    for name in experts:
        for leaf, parameter in model.get_submodule(name).named_parameters():
            if id(parameter) in replicated:
                raise ShardingError(
                    f"sharding.expert_parallel: every rank would hold all of {name}.{leaf}; it is "
                    "in sharding.ignored_parameters, or is kept in another dtype than the other "
                    "experts. Remove one of the settings"
                )
    marked = [replace(u, has_experts=not {*u.modules}.isdisjoint(experts)) for u in units]
    for unit in marked:
        if unit.has_experts and not {*unit.modules} <= {*experts}:
            raise ShardingError(
                f"sharding.expert_parallel: the unit {', '.join(unit.modules)} has experts and "
                "other modules, which share parameters or a dtype override; remove the setting"
            )
    return marked


def _apply_reshard_overrides(
    model: nn.Module, cfg: ShardingConfig, units: list[Unit]
) -> list[Unit]:
    """Return the units with the settings of `reshard_after_forward_overrides`.

    Raises:
        ShardingError: a pattern matches modules, but none of them is in a unit.
        ModelError: a pattern matches no module.
    """
    for pattern, value in cfg.reshard_after_forward_overrides.items():
        setting = "sharding.reshard_after_forward_overrides"
        names = set(matching_modules(model, [pattern], setting))
        matched_units = [unit for unit in units if names.intersection(unit.modules)]
        if not matched_units:
            unit_names = ", ".join(unit.name for unit in units[:8]) + " ..." * (len(units) > 8)
            raise ShardingError(f"{setting}: {pattern!r} names no unit; the units are {unit_names}")
        units = [
            replace(u, reshard_after_forward=value) if u in matched_units else u for u in units
        ]
    return units
