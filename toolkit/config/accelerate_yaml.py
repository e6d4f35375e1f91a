"""What an Accelerate FSDP YAML means in settings of the toolkit.

Owns the translation: from the variables that `accelerate launch` makes of a YAML and its flags to
dotted settings, and a note for what has no counterpart. Reads no environment (it is given one) and
no YAML, and knows neither torch nor Accelerate: the names are those of `accelerate/utils/launch.py`
and the meanings those of Accelerate's `FullyShardedDataParallelPlugin` (version 1.15).
docs/accelerate.md is the same key by key.

The launcher fills in every variable, also those of keys that the YAML lacks. So a value that is the
launcher's own default says nothing and is left to the default of the toolkit.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import LaunchError

Translated = tuple[dict[str, Any], list[str]]
"""Dotted settings, and a note for each key that cannot be honoured."""

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

# Read below, or without a counterpart because nothing changes: see docs/accelerate.md.
_READ = {
    "FSDP_VERSION",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_FORWARD_PREFETCH",
    "FSDP_STATE_DICT_TYPE",
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "FSDP_IGNORED_MODULES",
}
_CHANGES_NOTHING = {
    "FSDP_USE_ORIG_PARAMS",  # FSDP2 has no other parameters
    "FSDP_SYNC_MODULE_STATES",  # every rank reads its own rows of the checkpoint
    "FSDP_CPU_RAM_EFFICIENT_LOADING",  # no rank ever holds the whole model
}
_AXES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def translate(env: Mapping[str, str]) -> Translated:
    """Return the settings that a launch environment asks for, and notes on what it cannot get.

    Empty where Accelerate was not asked to shard or to compile. A setting here is a default: the
    run's own config and flags go before it.

    Args:
        env: the environment of a process that `accelerate launch` started.

    Raises:
        LaunchError: a value that Accelerate does not know either, or training in float16.
    """
    parts = [_compilation, _accumulation]
    if is_fsdp(env):
        parts = [
            _version,
            _precision,
            _mesh,
            _resharding,
            _units,
            _ignored,
            _memory,
            _prefetching,
            _state_dict,
            _unknown,
            *parts,
        ]
    else:
        parts = [_unsharded_precision, *parts]
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for part in parts:
        found, said = part(env)
        settings |= found
        notes += said
    return settings, notes


def is_fsdp(env: Mapping[str, str]) -> bool:
    """Whether Accelerate was asked to shard: `distributed_type: FSDP`, or `--use_fsdp`."""
    return _truth(env, "ACCELERATE_USE_FSDP", "use_fsdp")


def is_translated(name: str) -> bool:
    """Whether a variable is one that `translate` answers for, so that nobody else should obey it.

    Accelerate would shard, compile or build meshes a second time, and transformers would leave
    parameters on meta on all ranks but the first (`FSDP_CPU_RAM_EFFICIENT_LOADING`).
    """
    return name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DYNAMO_")) or name in (
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )


# --------------------------------------------------------------------------------------------------
# Sharding
# --------------------------------------------------------------------------------------------------


def _version(env: Mapping[str, str]) -> Translated:
    version = _text(env, "FSDP_VERSION") or "1"
    if version == "1":
        return {}, [
            "fsdp_version 1 (Accelerate's default): FSDP2 runs, with what the other keys mean "
            "there; write fsdp_version: 2"
        ]
    _one_of("fsdp_version", version, ("1", "2"))
    return {}, []


def _precision(env: Mapping[str, str]) -> Translated:
    """Return the compute dtype. `no` is Accelerate's float32: it keeps the master weights' dtype.

    The reduction stays in `sharding.reduce_dtype`: Accelerate would reduce in bfloat16 too.
    """
    asked = (_text(env, "ACCELERATE_MIXED_PRECISION") or "no").lower()
    _one_of("mixed_precision", asked, ("no", "bf16", "fp16", "fp8"))
    if asked == "fp16":
        raise LaunchError(
            "mixed_precision fp16 needs loss scaling, which this training has not; set "
            'mixed_precision: bf16 in the Accelerate YAML, or "no" for float32'
        )
    if asked == "fp8":
        return {"sharding.param_dtype": "bfloat16"}, [
            "mixed_precision fp8: there is no float8 training here; computed in bfloat16 "
            "(sharding.param_dtype)"
        ]
    return {"sharding.param_dtype": {"no": "float32", "bf16": "bfloat16"}[asked]}, []


def _mesh(env: Mapping[str, str]) -> Translated:
    if not _truth(env, "ACCELERATE_USE_PARALLELISM_CONFIG", "use_parallelism_config"):
        return {}, []
    size = {
        name: _number(
            env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", f"parallelism_config_{name}_size"
        )
        for name in ("dp_replicate", "dp_shard", *_AXES)
    }
    notes = [
        f"parallelism_config_{name}_size {size[name]}: there is no {what} parallelism here; its "
        "ranks join sharding.dp_shard and take samples of their own, which makes the global batch "
        f"{size[name]} times as large"
        for name, what in _AXES.items()
        if size[name] > 1
    ]
    if math.prod(size.values()) == 1:  # nothing but the launcher's own defaults
        return {}, notes
    shards = size["dp_shard"] * math.prod(size[name] for name in _AXES)
    return {"sharding.dp_replicate": size["dp_replicate"], "sharding.dp_shard": shards}, notes


def _resharding(env: Mapping[str, str]) -> Translated:
    said = _text(env, "FSDP_RESHARD_AFTER_FORWARD") or "true"
    strategy = _strategy("fsdp_sharding_strategy", _text(env, "FSDP_SHARDING_STRATEGY") or "1")
    if (_text(env, "FSDP_VERSION") or "1") == "2":
        # Accelerate's true is the toolkit's `auto`, the default: the root stays gathered.
        keep = not _truth(env, "FSDP_RESHARD_AFTER_FORWARD", "fsdp_reshard_after_forward", "true")
        notes = []
        if strategy != "FULL_SHARD":
            notes = [
                f"fsdp_sharding_strategy {strategy} belongs to fsdp_version 1 and has no effect "
                "with 2, also in Accelerate; set fsdp_reshard_after_forward, sharding.dp_shard and "
                "sharding.dp_replicate"
            ]
        return {"sharding.reshard_after_forward": False} if keep else {}, notes
    if strategy == "FULL_SHARD" and said.lower() not in ("true", "false"):
        # `accelerate config` writes the strategy of version 1 under this key.
        strategy = _strategy("fsdp_reshard_after_forward", said)
    settings: dict[str, Any] = {}
    if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        settings["sharding.reshard_after_forward"] = False
    if strategy == "NO_SHARD":
        settings["sharding.dp_shard"] = 1
    if strategy.startswith("HYBRID_SHARD"):  # shards within a machine, replicas across
        settings["sharding.dp_shard"] = _number(env, "LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return settings, []


def _units(env: Mapping[str, str]) -> Translated:
    classes = [c.strip() for c in _text(env, "FSDP_TRANSFORMER_CLS_TO_WRAP").split(",")]
    classes = [c for c in classes if c]
    policy = (_text(env, "FSDP_AUTO_WRAP_POLICY") or "TRANSFORMER_BASED_WRAP").upper()
    _one_of(
        "fsdp_auto_wrap_policy", policy, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    )
    if policy == "NO_WRAP":
        return {}, [
            "fsdp_auto_wrap_policy NO_WRAP would gather the whole model at once; each decoder "
            "layer is a unit here (sharding.layer_classes, sharding.layers_per_unit)"
        ]
    if policy == "SIZE_BASED_WRAP":
        return {}, [
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP with fsdp_min_num_params: each decoder layer is "
            "a unit here; sharding.layers_per_unit makes units larger, sharding.sublayer_units "
            "smaller"
        ]
    return {"sharding.layer_classes": classes} if classes else {}, []


def _ignored(env: Mapping[str, str]) -> Translated:
    """Return patterns for the regular expression of `fsdp_ignored_modules`, where there are any."""
    regex = _text(env, "FSDP_IGNORED_MODULES")
    if not regex:
        return {}, []
    names = regex.split("|")
    if not all(re.fullmatch(r"(\.\*|\\\.|[\w.-])+", name) for name in names):
        return {}, [
            f"fsdp_ignored_modules {regex!r} is a regular expression that no pattern equals; all "
            "parameters are sharded. List the others in sharding.ignored_parameters, such as "
            "'[model.layers.*.mlp.gate.*]'"
        ]
    patterns = [name.replace(".*", "*").replace("\\.", ".") + ".*" for name in names]
    return {"sharding.ignored_parameters": patterns}, []


def _memory(env: Mapping[str, str]) -> Translated:
    settings: dict[str, Any] = {}
    if _truth(env, "FSDP_OFFLOAD_PARAMS", "fsdp_offload_params"):
        settings["sharding.cpu_offload"] = True
    if _truth(env, "FSDP_ACTIVATION_CHECKPOINTING", "fsdp_activation_checkpointing"):
        settings["sharding.activation_checkpointing"] = "full"
    if _truth(
        env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "fsdp_activation_checkpointing_offload"
    ):
        settings["sharding.activation_offload"] = True
    return settings, []


def _prefetching(env: Mapping[str, str]) -> Translated:
    """Return the prefetch depths. BACKWARD_PRE is what FSDP2 does unasked."""
    settings = {}
    if _truth(env, "FSDP_FORWARD_PREFETCH", "fsdp_forward_prefetch"):
        settings["sharding.forward_prefetch"] = 1
    backward = (_text(env, "FSDP_BACKWARD_PREFETCH") or "BACKWARD_PRE").upper()
    names = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
    backward = _numbered(backward, names)
    _one_of("fsdp_backward_prefetch", backward, names)
    if backward == "BACKWARD_PRE":
        return settings, []
    return settings, [
        f"fsdp_backward_prefetch {backward}: FSDP2 always gathers the next unit before it computes "
        "the gradients of one (BACKWARD_PRE); sharding.backward_prefetch gathers more of them ahead"
    ]


def _state_dict(env: Mapping[str, str]) -> Translated:
    names = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
    kind = _numbered((_text(env, "FSDP_STATE_DICT_TYPE") or "SHARDED_STATE_DICT").upper(), names)
    _one_of("fsdp_state_dict_type", kind, names)
    if kind == "SHARDED_STATE_DICT":
        return {}, []
    return {}, [
        f"fsdp_state_dict_type {kind}: checkpoints are always sharded; `toolkit consolidate` makes "
        "a Hugging Face folder of one"
    ]


def _unknown(env: Mapping[str, str]) -> Translated:
    """Return a note for each key that a newer Accelerate may have."""
    known = _READ | _CHANGES_NOTHING
    names = sorted(n for n in env if n.startswith("FSDP_") and n not in known)
    return {}, [f"{n.lower()} is not known to the toolkit and has no effect" for n in names]


# --------------------------------------------------------------------------------------------------
# What Accelerate is asked for with and without sharding
# --------------------------------------------------------------------------------------------------


def _unsharded_precision(env: Mapping[str, str]) -> Translated:
    """Return a note for a dtype that is not to be had; `no` and `bf16` leave it to the config."""
    asked = _text(env, "ACCELERATE_MIXED_PRECISION").lower()
    if asked not in ("fp16", "fp8"):
        return {}, []
    return {}, [
        f"mixed_precision {asked}: there is no training in it here; sharding.param_dtype says what "
        "is computed in"
    ]


def _compilation(env: Mapping[str, str]) -> Translated:
    backend = (_text(env, "ACCELERATE_DYNAMO_BACKEND") or "NO").lower()
    if backend == "no":
        return {}, []
    by_layer = _truth(
        env, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "dynamo_use_regional_compilation"
    )
    settings: dict[str, Any] = {
        "sharding.torch_compile": "layer" if by_layer else "model",
        "sharding.torch_compile_backend": backend,
    }
    mode = _text(env, "ACCELERATE_DYNAMO_MODE") or "default"
    if mode != "default":
        settings["sharding.torch_compile_mode"] = mode
    notes = []
    if _truth(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH", "dynamo_use_fullgraph"):
        notes.append("dynamo_use_fullgraph true: graph breaks are allowed here")
    if _truth(env, "ACCELERATE_DYNAMO_USE_DYNAMIC", "dynamo_use_dynamic"):
        notes.append(
            "dynamo_use_dynamic true: torch.compile decides here, a size is made dynamic once it "
            "has changed"
        )
    return settings, notes


def _accumulation(env: Mapping[str, str]) -> Translated:
    """Return the accumulation steps, a variable that users set by hand: no YAML key makes it."""
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    steps = _number(env, name, name)
    return {"train.gradient_accumulation_steps": steps} if steps > 1 else {}, []


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------


def _text(env: Mapping[str, str], name: str) -> str:
    """Return a variable; an empty one and Python's `None`, which a YAML null becomes, are unset."""
    value = env.get(name, "").strip()
    return "" if value.lower() == "none" else value


def _truth(env: Mapping[str, str], name: str, key: str, unset: str = "false") -> bool:
    value = (_text(env, name) or unset).lower()
    if value in ("1", "true", "yes", "on", "y", "t"):
        return True
    if value in ("0", "false", "no", "off", "n", "f"):
        return False
    raise LaunchError(
        f"{key} of the launch configuration must be true or false, got {value}; correct the "
        "Accelerate YAML"
    )


def _number(env: Mapping[str, str], name: str, key: str) -> int:
    value = _text(env, name) or "1"
    if not value.isdecimal() or int(value) < 1:
        raise LaunchError(
            f"{key} of the launch configuration must be an integer from 1 up, got {value}; correct "
            "the Accelerate YAML"
        )
    return int(value)


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LaunchError(
            f"{key} of the launch configuration must be one of {', '.join(known)}, got {value}; "
            "correct the Accelerate YAML"
        )


def _strategy(key: str, value: str) -> str:
    name = _numbered(value.upper().removeprefix("_"), _STRATEGIES)
    _one_of(key, name, _STRATEGIES)
    return name


def _numbered(value: str, names: tuple[str, ...]) -> str:
    """Return the name for the number that Accelerate takes too: 1 is the first."""
    if value.isdecimal() and 1 <= int(value) <= len(names):
        return names[int(value) - 1]
    return value
