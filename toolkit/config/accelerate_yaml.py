"""Translate an Accelerate FSDP YAML to settings of the toolkit.

docs/accelerate.md lists every key. The names of the environment variables are those of
`accelerate/utils/launch.py`, and their meanings those of its `FullyShardedDataParallelPlugin`
(version 1.15). The launcher also sets the variables of keys that the YAML lacks. Therefore a
variable with Accelerate's default value leaves the default of the toolkit.
"""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import LaunchError

Env = Mapping[str, str]

# Variable -> the setting and its value if the variable is true.
_SWITCHES: dict[str, tuple[str, Any]] = {
    "FSDP_OFFLOAD_PARAMS": ("sharding.cpu_offload", True),
    "FSDP_ACTIVATION_CHECKPOINTING": ("sharding.activation_checkpointing", "full"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("sharding.activation_offload", True),
    "FSDP_FORWARD_PREFETCH": ("sharding.forward_prefetch", 1),
}
# Variable -> its values, of which FSDP2 supports the first, and a note on the others.
_CHOICES: dict[str, tuple[tuple[str, ...], str]] = {
    "FSDP_BACKWARD_PREFETCH": (
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "FSDP2 always gathers the next unit before it computes the gradients of one "
        "(BACKWARD_PRE); sharding.backward_prefetch gathers more of them ahead",
    ),
    "FSDP_STATE_DICT_TYPE": (
        ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
        "checkpoints are always sharded; `toolkit consolidate` exports a Hugging Face folder",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "each decoder layer is a unit, or each module that sharding.layer_classes names",
    ),
}
_TRANSLATED = {
    *_SWITCHES,
    *_CHOICES,
    *("FSDP_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"),
    *("FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_IGNORED_MODULES"),
    # Without effect: FSDP2 always uses the original parameters, and each rank loads only its rows.
    *("FSDP_USE_ORIG_PARAMS", "FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
}
_AXES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def translate_environment(env: Env) -> tuple[dict[str, Any], list[str]]:
    """Translate the environment variables that `accelerate launch` sets for its processes.

    Returns:
        Dotted setting -> value for the toolkit's config, and a note for each key without effect.

    Raises:
        LaunchError: the launch uses FSDP, and requests FSDP1, training in float16, or tensor,
            context or sequence parallelism; or a value is one that Accelerate does not define.
            Without FSDP, fp16 and fp8 only give a note.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if is_fsdp(env):
        if (version := _read_text(env, "FSDP_VERSION") or "1") != "2":
            raise LaunchError(
                f"fsdp_version {version} of the launch configuration (1 is Accelerate's default): "
                "the toolkit shards with FSDP2. Convert the YAML with `accelerate to-fsdp2 "
                "--config_file OLD --output_file NEW`, or add `--fsdp_version 2` to the flags"
            )
        _set_precision(env, settings, notes)
        _set_mesh(env, settings)
        _set_fsdp_options(env, settings, notes)
        unknown = sorted(n for n in env if n.startswith("FSDP_") and n not in _TRANSLATED)
        notes += [f"{n.lower()} is unknown to the toolkit and has no effect" for n in unknown]
    elif (precision := _read_text(env, "ACCELERATE_MIXED_PRECISION").lower()) in ("fp16", "fp8"):
        notes.append(
            f"mixed_precision {precision}: training in it is not supported; sharding.param_dtype "
            "sets the dtype of the computation"
        )
    _set_compilation(env, settings, notes)
    # Users set this variable by hand, because no key of the YAML does.
    steps = _read_count(env, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps > 1:
        settings["train.gradient_accumulation_steps"] = steps
    return settings, notes


def is_fsdp(env: Env) -> bool:
    """Return True if the launch configuration selects FSDP (ACCELERATE_USE_FSDP is true)."""
    return _read_bool(env, "ACCELERATE_USE_FSDP")


def is_translated(name: str) -> bool:
    """Return True if `translate_environment` handles the environment variable `name`."""
    return name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DYNAMO_")) or name in (
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )


def _set_precision(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    """Set `sharding.param_dtype` in `settings` from `mixed_precision`; `no` becomes float32.

    Appends a note for fp8, and raises LaunchError for fp16. The reduction stays in float32,
    although Accelerate would reduce in bfloat16 too.
    """
    precision = (_read_text(env, "ACCELERATE_MIXED_PRECISION") or "no").lower()
    _check_choice("mixed_precision", precision, ("no", "bf16", "fp16", "fp8"))
    if precision == "fp16":
        raise LaunchError(
            "mixed_precision fp16 needs loss scaling, which this toolkit does not implement; set "
            'mixed_precision: bf16 in the Accelerate YAML, or "no" for float32'
        )
    if precision == "fp8":
        notes.append(
            "mixed_precision fp8: the computation is in bfloat16 (sharding.param_dtype); set "
            "model.float8 for linear layers in float8"
        )
    settings["sharding.param_dtype"] = "float32" if precision == "no" else "bfloat16"


def _set_mesh(env: Env, settings: dict[str, Any]) -> None:
    """Set `dp_shard` and `dp_replicate` in `settings`; leave them unset if all sizes are 1.

    Raises:
        LaunchError: tensor, context or sequence parallelism is requested.
    """
    if not _read_bool(env, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    size = {
        name: _read_count(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE")
        for name in ("dp_replicate", "dp_shard", *_AXES)
    }
    for name, axis in _AXES.items():
        # If those ranks became data parallel ones, the global batch would change.
        if size[name] > 1:
            raise LaunchError(
                f"parallelism_config_{name}_size {size[name]} of the launch configuration: {axis} "
                "parallelism is not supported; set it to 1, and parallelism_config_dp_shard_size "
                f"{size[name] * size['dp_shard']} for a global batch {size[name]} times as large"
                + (". sharding.context_parallel divides long rows" if name == "cp" else "")
            )
    # The launcher's default for all sizes is 1.
    if max(size.values()) > 1:
        settings["sharding.dp_replicate"] = size["dp_replicate"]
        settings["sharding.dp_shard"] = size["dp_shard"]


def _set_fsdp_options(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    """Set the `sharding.*` settings that correspond to the `FSDP_*` variables.

    They decide which modules FSDP2 shards as units, and when it gathers, frees and offloads
    parameters. A variable that FSDP2 does not support is appended to `notes`.

    Raises:
        LaunchError: a variable has a value that Accelerate does not define.
    """
    # Accelerate's true equals the toolkit's default `auto`: the root stays gathered.
    if not _read_bool(env, "FSDP_RESHARD_AFTER_FORWARD", unset="true"):
        settings["sharding.reshard_after_forward"] = False
    if (strategy := _read_text(env, "FSDP_SHARDING_STRATEGY")) not in ("", "1", "FULL_SHARD"):
        notes.append(
            f"fsdp_sharding_strategy {strategy} belongs to fsdp_version 1 and has no effect with "
            "2; set fsdp_reshard_after_forward, sharding.dp_shard and sharding.dp_replicate"
        )
    for name, (setting, value) in _SWITCHES.items():
        if _read_bool(env, name):
            settings[setting] = value
    for name, (values, note) in _CHOICES.items():
        chosen = (_read_text(env, name) or values[0]).upper()
        _check_choice(name.lower(), chosen, values)
        if chosen != values[0]:
            notes.append(f"{name.lower()} {chosen}: {note}")
        elif name == "FSDP_AUTO_WRAP_POLICY":
            classes = [
                c.strip() for c in _read_text(env, "FSDP_TRANSFORMER_CLS_TO_WRAP").split(",")
            ]
            if any(classes):
                settings["sharding.layer_classes"] = [c for c in classes if c]
    ignored = _read_text(env, "FSDP_IGNORED_MODULES")
    names = ignored.split("|") if ignored else []
    if not all(re.fullmatch(r"(\.\*|\\\.|[\w.-])+", name) for name in names):
        notes.append(
            f"fsdp_ignored_modules {ignored!r} is a regular expression that cannot be converted to "
            "patterns, so all parameters are sharded. List the parameters to ignore in "
            "sharding.ignored_parameters, such as '[model.layers.*.mlp.gate.*]'"
        )
    elif names:
        patterns = [name.replace(".*", "*").replace("\\.", ".") + ".*" for name in names]
        settings["sharding.ignored_parameters"] = patterns


def _set_compilation(env: Env, settings: dict[str, Any], notes: list[str]) -> None:
    """Set the `sharding.torch_compile*` settings from the `ACCELERATE_DYNAMO_*` variables.

    `sharding.torch_compile` becomes `layer` for regional compilation, otherwise `model`. Appends a
    note for options that have no effect. Does nothing if the backend is `no` or not set.
    """
    backend = (_read_text(env, "ACCELERATE_DYNAMO_BACKEND") or "NO").lower()
    if backend == "no":
        return
    by_layer = _read_bool(env, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
    settings["sharding.torch_compile"] = "layer" if by_layer else "model"
    settings["sharding.torch_compile_backend"] = backend
    if (mode := _read_text(env, "ACCELERATE_DYNAMO_MODE") or "default") != "default":
        settings["sharding.torch_compile_mode"] = mode
    if _read_bool(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        notes.append("dynamo_use_fullgraph true: the toolkit allows graph breaks")
    if _read_bool(env, "ACCELERATE_DYNAMO_USE_DYNAMIC"):
        notes.append(
            "dynamo_use_dynamic true: torch.compile decides, and makes a size dynamic once it has "
            "changed"
        )


def _read_text(env: Env, name: str) -> str:
    """Read a variable as text; return "" if it is unset or `None` (a null of the YAML)."""
    value = env.get(name, "").strip()
    return "" if value.lower() == "none" else value


def _read_bool(env: Env, name: str, unset: str = "false") -> bool:
    """Read a variable as a boolean; `unset` is the text to parse if the variable is not set.

    Raises:
        LaunchError: the value is not a boolean.
    """
    value = (_read_text(env, name) or unset).lower()
    if value in ("1", "true", "yes", "on", "y", "t"):
        return True
    if value in ("0", "false", "no", "off", "n", "f"):
        return False
    raise _build_wrong_value_error(name, "true or false", value)


def _read_count(env: Env, name: str) -> int:
    """Read a variable as a positive integer, or 1 if it is not set.

    Raises:
        LaunchError: the value is not a positive integer.
    """
    value = _read_text(env, name) or "1"
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
        raise _build_wrong_value_error(name, "an integer of at least 1", value)
    return int(value)


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise LaunchError if `value` is not one of `choices`; `key` is named in the message."""
    if value not in choices:
        raise _build_wrong_value_error(key, f"one of {', '.join(choices)}", value)


def _build_wrong_value_error(name: str, expected: str, value: str) -> LaunchError:
    """Build the error for a variable whose value is not the `expected` one."""
    key = name.lower().removeprefix("accelerate_")
    return LaunchError(
        f"{key} of the launch configuration must be {expected}, got {value}; correct the "
        "Accelerate YAML"
    )
