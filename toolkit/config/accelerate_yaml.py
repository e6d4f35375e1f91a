"""Translate an Accelerate FSDP YAML to settings of the toolkit; docs/accelerate.md, key by key.

The names of the variables are those of `accelerate/utils/launch.py`, the meanings those of its
`FullyShardedDataParallelPlugin` (version 1.15). The launcher fills in every variable, also those of
keys that the YAML lacks: a value that is its default says nothing and leaves the toolkit's own.
"""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import LaunchError

Env = Mapping[str, str]

# Variable -> the setting that `true` sets.
_SWITCHES: dict[str, tuple[str, Any]] = {
    "FSDP_OFFLOAD_PARAMS": ("sharding.cpu_offload", True),
    "FSDP_ACTIVATION_CHECKPOINTING": ("sharding.activation_checkpointing", "full"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("sharding.activation_offload", True),
    "FSDP_FORWARD_PREFETCH": ("sharding.forward_prefetch", 1),
}
# Variable -> its values, the one first that FSDP2 carries out; what is noted of the others.
_CHOICES: dict[str, tuple[tuple[str, ...], str]] = {
    "FSDP_BACKWARD_PREFETCH": (
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "FSDP2 always gathers the next unit before it computes the gradients of one "
        "(BACKWARD_PRE); sharding.backward_prefetch gathers more of them ahead",
    ),
    "FSDP_STATE_DICT_TYPE": (
        ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
        "checkpoints are always sharded; `toolkit consolidate` makes a Hugging Face folder of one",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "each decoder layer is a unit here, or what sharding.layer_classes names",
    ),
}
_KNOWN = {
    *_SWITCHES,
    *_CHOICES,
    *("FSDP_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"),
    *("FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_IGNORED_MODULES"),
    # Change nothing: FSDP2 has no other parameters, each rank reads its own rows only.
    *("FSDP_USE_ORIG_PARAMS", "FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
}
_AXES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def translate(env: Env) -> tuple[dict[str, Any], list[str]]:
    """Return the dotted settings that a launched process's environment asks for, and notes on what
    it cannot get. LaunchError: FSDP1, training in float16, tensor, context or sequence parallelism,
    or a value that Accelerate has not.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if is_fsdp(env):
        if (version := _text(env, "FSDP_VERSION") or "1") != "2":
            raise LaunchError(
                f"fsdp_version {version} of the launch configuration (1 is Accelerate's default): "
                "the toolkit shards with FSDP2. Convert the YAML with `accelerate to-fsdp2 "
                "--config_file OLD --output_file NEW`, or add `--fsdp_version 2` to the flags"
            )
        _precision(env, settings, notes)
        _mesh(env, settings, notes)
        _units(env, settings, notes)
        unknown = sorted(n for n in env if n.startswith("FSDP_") and n not in _KNOWN)
        notes += [f"{n.lower()} is not known to the toolkit and has no effect" for n in unknown]
    elif (asked := _text(env, "ACCELERATE_MIXED_PRECISION").lower()) in ("fp16", "fp8"):
        what = "there is no training in it here; sharding.param_dtype sets the computation's dtype"
        notes.append(f"mixed_precision {asked}: {what}")
    _compilation(env, settings, notes)
    # A variable that users set by hand: no YAML key makes it.
    steps = _number(env, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps > 1:
        settings["train.gradient_accumulation_steps"] = steps
    return settings, notes


def is_fsdp(env: Env) -> bool:
    """Return whether Accelerate was asked to shard: `distributed_type: FSDP`, or `--use_fsdp`."""
    return _truth(env, "ACCELERATE_USE_FSDP")


def is_translated(name: str) -> bool:
    """Return whether `translate` answers for a variable; nobody must obey it a second time."""
    return name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DYNAMO_")) or name in (
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )


def _precision(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    """Set the compute dtype; `no` is float32. Accelerate would reduce in bfloat16 too: not here."""
    asked = (_text(env, "ACCELERATE_MIXED_PRECISION") or "no").lower()
    _one_of("mixed_precision", asked, ("no", "bf16", "fp16", "fp8"))
    if asked == "fp16":
        raise LaunchError(
            "mixed_precision fp16 needs loss scaling, which this toolkit does not implement; set "
            'mixed_precision: bf16 in the Accelerate YAML, or "no" for float32'
        )
    if asked == "fp8":
        what = "there is no float8 training here; computed in bfloat16 (sharding.param_dtype)"
        notes.append(f"mixed_precision fp8: {what}")
    settings["sharding.param_dtype"] = "float32" if asked == "no" else "bfloat16"


def _mesh(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    if not _truth(env, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    size = {
        name: _number(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE")
        for name in ("dp_replicate", "dp_shard", *_AXES)
    }
    for name, what in _AXES.items():
        if size[name] > 1:  # with those ranks as data parallel ones the batch would be another
            raise LaunchError(
                f"parallelism_config_{name}_size {size[name]} of the launch configuration: there "
                f"is no {what} parallelism here; set it to 1, and parallelism_config_dp_shard_size "
                f"{size[name] * size['dp_shard']} for a global batch {size[name]} times as large"
            )
    if max(size.values()) > 1:  # more than the launcher's own defaults
        settings["sharding.dp_replicate"] = size["dp_replicate"]
        settings["sharding.dp_shard"] = size["dp_shard"]


def _units(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    """Set what FSDP2 does with each unit, and which modules are units."""
    # Accelerate's true is the toolkit's `auto`, the default: the root stays gathered.
    if not _truth(env, "FSDP_RESHARD_AFTER_FORWARD", unset="true"):
        settings["sharding.reshard_after_forward"] = False
    if (strategy := _text(env, "FSDP_SHARDING_STRATEGY")) not in ("", "1", "FULL_SHARD"):
        notes.append(
            f"fsdp_sharding_strategy {strategy} belongs to fsdp_version 1, with 2 it does nothing; "
            "set fsdp_reshard_after_forward, sharding.dp_shard and sharding.dp_replicate"
        )
    for name, (setting, value) in _SWITCHES.items():
        if _truth(env, name):
            settings[setting] = value
    for name, (values, note) in _CHOICES.items():
        chosen = (_text(env, name) or values[0]).upper()
        _one_of(name.lower(), chosen, values)
        if chosen != values[0]:
            notes.append(f"{name.lower()} {chosen}: {note}")
        elif name == "FSDP_AUTO_WRAP_POLICY":
            classes = [c.strip() for c in _text(env, "FSDP_TRANSFORMER_CLS_TO_WRAP").split(",")]
            if any(classes):
                settings["sharding.layer_classes"] = [c for c in classes if c]
    ignored = _text(env, "FSDP_IGNORED_MODULES")
    names = ignored.split("|") if ignored else []
    if not all(re.fullmatch(r"(\.\*|\\\.|[\w.-])+", name) for name in names):
        notes.append(
            f"fsdp_ignored_modules {ignored!r} is a regular expression that no pattern equals; all "
            "parameters are sharded. List the others in sharding.ignored_parameters, such as "
            "'[model.layers.*.mlp.gate.*]'"
        )
    elif names:
        patterns = [name.replace(".*", "*").replace("\\.", ".") + ".*" for name in names]
        settings["sharding.ignored_parameters"] = patterns


def _compilation(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    backend = (_text(env, "ACCELERATE_DYNAMO_BACKEND") or "NO").lower()
    if backend == "no":
        return
    by_layer = _truth(env, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
    settings["sharding.torch_compile"] = "layer" if by_layer else "model"
    settings["sharding.torch_compile_backend"] = backend
    if (mode := _text(env, "ACCELERATE_DYNAMO_MODE") or "default") != "default":
        settings["sharding.torch_compile_mode"] = mode
    if _truth(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        notes.append("dynamo_use_fullgraph true: graph breaks are allowed here")
    if _truth(env, "ACCELERATE_DYNAMO_USE_DYNAMIC"):
        what = "torch.compile decides here, a size is made dynamic once it has changed"
        notes.append(f"dynamo_use_dynamic true: {what}")


def _text(env: Env, name: str) -> str:
    """Return a variable; an empty one and Python's `None`, which a YAML null becomes, are unset."""
    value = env.get(name, "").strip()
    return "" if value.lower() == "none" else value


def _truth(env: Env, name: str, unset: str = "false") -> bool:
    value = (_text(env, name) or unset).lower()
    if value in ("1", "true", "yes", "on", "y", "t"):
        return True
    if value in ("0", "false", "no", "off", "n", "f"):
        return False
    raise _wrong(name, "true or false", value)


def _number(env: Env, name: str) -> int:
    value = _text(env, name) or "1"
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
        raise _wrong(name, "an integer from 1 up", value)
    return int(value)


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _wrong(key, f"one of {', '.join(known)}", value)


def _wrong(name: str, expected: str, value: str) -> LaunchError:
    key = name.lower().removeprefix("accelerate_")
    return LaunchError(
        f"{key} of the launch configuration must be {expected}, got {value}; correct the "
        "Accelerate YAML"
    )
