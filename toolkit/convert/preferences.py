"""Convert preference tuning of other tools: the objective of a config and its settings.

An objective has the name of TRL's trainer: dpo, orpo, kto, cpo (which includes simpo) or reward.
Settings that would train another objective here are refused; `tables_of_tools` has the names and
reasons.
"""

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.config.other_tools import find_setting
from toolkit.convert.keys import Keys
from toolkit.convert.tables_of_tools import (
    AXOLOTL_OBJECTIVES,
    LOSSES,
    OBJECTIVE_MARKS,
    ONLINE,
    REFUSED,
    SMOOTHED_LOSSES,
    TRAINERS,
)
from toolkit.errors import ConfigError


def find_objective(settings: Mapping[str, Any], tool: str) -> str:
    """Find the training objective of a config by its keys.

    Args:
        settings: the keys of the config.
        tool: axolotl, trl or trainer.

    Returns:
        dpo, orpo, kto, cpo or reward; "" for supervised training.

    Raises:
        ConfigError: the objective is not supported, such as online reinforcement learning.
    """
    present = {key for key, value in settings.items() if value not in (None, "", False, [], {})}
    if tool == "axolotl":
        if "process_reward_model" in present:
            raise ConfigError("process_reward_model: rewards of steps are not supported")
        kind = ""
        if "rl" in present:
            kind = str(settings["rl"])
        elif "reward_model" in present:
            kind = "reward"
        if kind and kind not in AXOLOTL_OBJECTIVES:
            expected = ", ".join(AXOLOTL_OBJECTIVES)
            raise ConfigError(f"rl {kind}: not supported; expected one of {expected}")
        return AXOLOTL_OBJECTIVES.get(kind, "")
    if online := sorted(present & ONLINE):
        raise ConfigError(f"{online[0]}: online reinforcement learning is not supported")
    if tool != "trl":
        return ""
    losses = settings.get("loss_type")
    present |= {*map(str, losses if isinstance(losses, list) else [losses])}
    present.add(str(settings.get("lora_task_type")))
    return next((name for name, marks in OBJECTIVE_MARKS.items() if present & marks), "")


def find_script_objective(trainers: Collection[str]) -> str:
    """Find the training objective of a script by the TRL classes that it calls.

    Args:
        trainers: names of the classes without `Trainer` and `Config`.

    Returns:
        dpo, orpo, kto, cpo or reward; "" for supervised training.

    Raises:
        ConfigError: a class is not supported, or there are several classes.
    """
    if unsupported := sorted({*trainers} - {*TRAINERS}):
        raise ConfigError(f"{unsupported[0]}Trainer of TRL: expected one of {', '.join(TRAINERS)}")
    if len(trainers) > 1:
        raise ConfigError(
            f"the script calls trainers of {' and '.join(sorted(trainers))}, but a config "
            "describes one run; keep one of them in the script"
        )
    return TRAINERS[next(iter(trainers))] if trainers else ""


def take_preference(keys: Keys, objective: str, *, is_named: bool) -> None:
    """Convert the settings of a preference objective to `preference.*` in `keys.settings`.

    Converted keys are removed from `keys.unconverted`.

    Args:
        keys: the keys of the config.
        objective: dpo, orpo, kto, cpo or reward.
        is_named: True if the user named the objective, False if it was derived from the keys.

    Raises:
        ConfigError: the settings describe an objective that is not supported.
    """
    dpo_marks = OBJECTIVE_MARKS["dpo"] - {"beta", "max_prompt_length"} | {"loss_type"}
    is_guess = objective == "dpo" and not is_named and not dpo_marks & {*keys.unconverted}
    _refuse_other_objectives(keys, objective)
    loss = _convert_loss(keys, objective)
    keys.settings["preference.loss_type"] = loss
    key, beta = keys.take("beta", "rl_beta", "dpo_beta", "orpo_alpha")
    section, inner = keys.take("trl")
    if section and not isinstance(inner, Mapping):
        raise ConfigError(f"{section}: expected a mapping of settings, got {str(inner)[:80]}")
    for name, value in (inner or {}).items():  # a section of axolotl
        if name == "beta":
            key, beta = "trl.beta", value
        else:
            keys.note(f"trl.{name}", "no equivalent", value)
    if beta is not None:
        keys.settings["preference.beta"] = beta
    if is_guess:
        reason = "a key of DPO, ORPO and KTO; DPO is assumed, else `--from trl-orpo` or `trl-kto`"
        keys.note(key or "max_prompt_length", reason)
    _convert_smoothing(keys, loss)
    for setting, names, objectives in (
        ("rpo_alpha", ("rpo_alpha", "cpo_alpha"), ("dpo", "cpo")),
        ("simpo_gamma", ("simpo_gamma",), ("cpo",)),
        ("desirable_weight", ("desirable_weight", "kto_desirable_weight"), ("kto",)),
        ("undesirable_weight", ("undesirable_weight", "kto_undesirable_weight"), ("kto",)),
        ("center_rewards_coefficient", ("center_rewards_coefficient",), ("reward",)),
    ):
        key, value = keys.take(*names)
        if key and objective in objectives:
            keys.settings[f"preference.{setting}"] = value
        elif key:
            keys.note(key, f"has no effect with preference.loss_type {loss}", value)
    if loss == "simpo":
        keys.settings.setdefault("preference.rpo_alpha", 1.0)
    _convert_length(keys, objective)
    _drop_regularisation(keys)
    for key, usual in (("lora_task_type", "SEQ_CLS"), ("task_type", "SEQ_CLS"), ("num_labels", 1)):
        if objective == "reward" and keys.unconverted.get(key) == usual:
            keys.take(key)


def _refuse_other_objectives(keys: Keys, objective: str) -> None:
    """Remove settings that change the objective; raise ConfigError if one of them is on."""
    for name, (harmless, reason) in REFUSED.items():
        key, value = keys.take(name)
        if key and value not in harmless:
            raise ConfigError(f"{key} {value}: {reason}")
    if objective == "cpo" and (alpha := keys.take("alpha")[1]):
        raise ConfigError(f"alpha {alpha}: AlphaPO is not supported")


def _convert_loss(keys: Keys, objective: str) -> str:
    """Remove the loss settings from `keys`, and return the value of `preference.loss_type`.

    Also sets `preference.rpo_alpha` if DPO is combined with a cross entropy of chosen answers.

    Raises:
        ConfigError: the loss is not supported for this objective.
    """
    kind = keys.take("rl")[1]
    keys.take("reward_model")
    value = keys.take("loss_type", "dpo_loss_type")[1]
    weights = keys.take("loss_weights", "dpo_loss_weights")[1]
    if kind in ("ipo", "simpo"):
        value = kind
    elif value is None:
        # CPO's default, sigmoid, is not a supported loss, so it is refused below.
        value = "sigmoid" if objective == "cpo" else LOSSES[objective][0]
    losses = value if isinstance(value, list) else [value]
    parts = list(zip(losses, weights or [1.0] * len(losses), strict=False))
    if objective == "dpo" and len(parts) == 2 and parts[1][0] == "sft":
        keys.settings["preference.rpo_alpha"] = parts[1][1]
        keys.note("loss_type", "preference.rpo_alpha replaces sft", losses)
        parts = parts[:1]
    supported = LOSSES[objective]
    if len(parts) != 1 or parts[0][0] not in supported or parts[0][1] != 1:
        weight_text = f" with loss_weights {weights}" if weights else ""
        hint = ", alone or followed by sft, with the weight 1" if objective == "dpo" else ""
        raise ConfigError(
            f"loss_type {', '.join(map(str, losses))}{weight_text} of {objective.upper()}: "
            f"expected {' or '.join(supported)}{hint}"
        )
    return str(parts[0][0])


def _convert_smoothing(keys: Keys, loss: str) -> None:
    """Convert label smoothing to `preference.label_smoothing`, or note that `loss` ignores it."""
    key, value = keys.take("label_smoothing", "dpo_label_smoothing")
    if value and loss not in SMOOTHED_LOSSES:
        keys.note(key, f"has no effect with loss {loss} in either tool", value)
    elif value:
        keys.settings["preference.label_smoothing"] = value
        if loss in ("sigmoid", "sigmoid_norm"):
            keys.note(key, f"smooths {loss} here; in TRL 1.16 it has no effect on {loss}", value)


def _convert_length(keys: Keys, objective: str) -> None:
    """Convert the length limit, in tokens, to `data.sequence_length`, doubled.

    The other tools limit one side of a pair; the toolkit's limit includes both sides. For reward
    models, also sets `data.too_long` to drop.
    """
    for key in [key for key in keys.unconverted if find_setting(key) == "data.sequence_length"]:
        value = keys.unconverted.pop(key)
        keys.settings["data.sequence_length"] = 2 * value if isinstance(value, int) else value
        other = "the answer of the neighbouring row" if objective == "kto" else "the other side"
        reason = f"the limit of one side; data.sequence_length includes {other}, so it is doubled"
        keys.note(key, reason, value)
    if objective == "reward":
        keys.settings.setdefault("data.too_long", "drop")


def _drop_regularisation(keys: Keys) -> None:
    """Remove settings that preference tuning does not support, and note those that are on.

    They are dropout and noise (which would make model and reference different functions), label
    smoothing of tokens, and the choice of supervised tokens.
    """
    same_function = "off here: model and reference must be the same function"
    for setting, reason in {
        "lora.lora_dropout": same_function,
        "train.neftune_noise_alpha": same_function,
        "train.label_smoothing_factor": "for tokens; preference.label_smoothing is for sides",
    }.items():
        for key in [key for key in keys.unconverted if find_setting(key) == setting]:
            if value := keys.unconverted.pop(key):
                keys.note(key, reason, value)
    supervision = ("train_on_inputs", "train_on_input", "assistant_only_loss")
    names = (*supervision, "completion_only_loss", "roles_to_train")
    for key, value in keys.take_all(names).items():
        if value:
            keys.note(key, "the loss covers the last answer of each side", value)
