"""Convert preference tuning of other tools: the objective of a config and its settings.

An objective has the name of TRL's trainer: dpo, orpo, kto, cpo (which includes simpo) or reward.
Settings that would train another objective here are refused; `tables_of_tools` has the names and
reasons.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolkit.config.other_tools import find_setting
from toolkit.config.preference import CROSS_ENTROPY, SMOOTHED_LOSSES
from toolkit.convert.keys import Keys
from toolkit.convert.tables_of_tools import (
    AXOLOTL_OBJECTIVES,
    LOSSES,
    OBJECTIVE_MARKS,
    ONLINE,
    REFUSED,
    SMOOTHED_ONLY_HERE,
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
    losses = _convert_loss(keys, objective)
    loss = ", ".join(losses)
    has_cross_entropy = CROSS_ENTROPY in losses or "preference.rpo_alpha" in keys.settings
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
    _convert_smoothing(keys, losses)
    key, tau = keys.take("discopop_tau")
    if key and "discopop" in losses:
        keys.settings["preference.discopop_tau"] = tau
    elif key:
        keys.note(key, f"has no effect with loss {loss} in either tool", tau)
    for setting, names, objectives in (
        ("rpo_alpha", ("rpo_alpha", "cpo_alpha"), ("dpo", "cpo")),
        ("simpo_gamma", ("simpo_gamma",), ("cpo",)),
        ("desirable_weight", ("desirable_weight", "kto_desirable_weight"), ("kto",)),
        ("undesirable_weight", ("undesirable_weight", "kto_undesirable_weight"), ("kto",)),
        ("center_rewards_coefficient", ("center_rewards_coefficient",), ("reward",)),
    ):
        key, value = keys.take(*names)
        if setting == "rpo_alpha" and has_cross_entropy:
            if value:
                raise ConfigError(
                    f"{key} {value} with {CROSS_ENTROPY} in loss_type: both add the cross entropy "
                    "of chosen answers; keep one of them"
                )
        elif key and objective in objectives:
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


def _convert_loss(keys: Keys, objective: str) -> list[str]:
    """Convert the loss settings to `preference.loss_type` and `preference.loss_weights`.

    A loss of DPO with weight 1 that is followed by a cross entropy of chosen answers becomes that
    loss with `preference.rpo_alpha`.

    Returns:
        The names of the losses.

    Raises:
        ConfigError: the losses are not supported for this objective, or weights are missing.
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
    supported = LOSSES[objective]
    can_combine = objective == "dpo" and len(losses) > 1
    fits = len(losses) == 1 or (can_combine and len({*losses}) == len(losses))
    fits &= {*losses} <= {*supported, *([CROSS_ENTROPY] if can_combine else [])}
    fits &= weights is None or (isinstance(weights, list) and len(weights) == len(losses))
    # The weight of a single loss would only scale the gradients.
    fits &= len(losses) > 1 or weights in (None, [1])
    if not fits:
        weight_text = f" with loss_weights {weights}" if weights else ""
        hint = ", or a list of them and sft with one weight each" if objective == "dpo" else ""
        raise ConfigError(
            f"loss_type {', '.join(map(str, losses))}{weight_text} of {objective.upper()}: "
            f"expected {' or '.join(supported)}{hint}"
        )
    weights = weights or [1.0] * len(losses)
    if len(losses) == 2 and losses[1] == CROSS_ENTROPY and weights[0] == 1:
        keys.settings["preference.rpo_alpha"] = weights[1]
        keys.note("loss_type", "preference.rpo_alpha replaces sft", losses)
        losses = losses[:1]
    keys.settings["preference.loss_type"] = losses if len(losses) > 1 else losses[0]
    if len(losses) > 1 and {*weights} != {1}:
        keys.settings["preference.loss_weights"] = weights
    return losses


def _convert_smoothing(keys: Keys, losses: Sequence[str]) -> None:
    """Convert label smoothing if a loss supports it; add notes on losses that differ."""
    key, value = keys.take("label_smoothing", "dpo_label_smoothing")
    if value and not {*losses} & {*SMOOTHED_LOSSES}:
        keys.note(key, f"has no effect with loss {', '.join(losses)} in either tool", value)
    elif value:
        keys.settings["preference.label_smoothing"] = value
        for loss in [loss for loss in losses if loss in SMOOTHED_ONLY_HERE]:
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
