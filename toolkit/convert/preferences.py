"""Preference tuning in other tools: the objective of a config, and what its settings are here.

An objective has the name of TRL's trainer: dpo, orpo, kto, cpo (of which simpo) or reward. What
would be another objective here is refused; names and reasons stand in `tables_of_tools`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.config.other_tools import find_setting
from toolkit.convert.keys import Keys
from toolkit.convert.tables_of_tools import (
    AXOLOTLS,
    LOSSES,
    MARKS,
    ONLINE,
    REFUSED,
    SMOOTHED,
    TRAINERS,
)
from toolkit.errors import ConfigError


def objective_of(given: Mapping[str, Any], tool: str) -> str:
    """Return what a config trains: an objective, or an empty text for supervised training.

    Raises:
        ConfigError: it trains what is not here, such as online reinforcement learning.
    """
    said = {key for key, value in given.items() if value not in (None, "", False, [], {})}
    if tool == "axolotl":
        if "process_reward_model" in said:
            raise ConfigError("process_reward_model: rewards of steps are not here")
        kind = str(given["rl"] if "rl" in said else "reward" if "reward_model" in said else "")
        if kind and kind not in AXOLOTLS:
            raise ConfigError(f"rl {kind}: not here; expected one of {', '.join(AXOLOTLS)}")
        return AXOLOTLS.get(kind, "")
    if online := sorted(said & ONLINE):
        raise ConfigError(f"{online[0]}: online reinforcement learning is not here")
    if tool != "trl":
        return ""
    losses = given.get("loss_type")
    said |= {*map(str, losses if isinstance(losses, list) else [losses])}
    said.add(str(given.get("lora_task_type")))
    return next((name for name, marks in MARKS.items() if said & marks), "")


def objective_of_script(trainers: Collection[str]) -> str:
    """Return the objective of the classes of TRL that a script calls.

    Raises:
        ConfigError: one that is not here, or several.
    """
    if others := sorted({*trainers} - {*TRAINERS}):
        raise ConfigError(f"{others[0]}Trainer of TRL: expected one of {', '.join(TRAINERS)}")
    if len(trainers) > 1:
        raise ConfigError(
            f"trained by {' and '.join(sorted(trainers))}: a config is of one run; leave one of "
            "them in the script"
        )
    return TRAINERS[next(iter(trainers))] if trainers else ""


def take_preference(keys: Keys, objective: str, *, told: bool) -> None:
    """Carry the settings of an objective.

    Args:
        told: the objective was named, and not found by the keys.
    """
    of_dpo = MARKS["dpo"] - {"beta", "max_prompt_length"} | {"loss_type"}
    guessed = objective == "dpo" and not told and not of_dpo & {*keys.left}
    _refuse(keys, objective)
    loss = _loss(keys, objective)
    keys.settings["preference.loss_type"] = loss
    key, beta = keys.take("beta", "rl_beta", "dpo_beta", "orpo_alpha")
    section, inner = keys.take("trl")
    if section and not isinstance(inner, Mapping):
        raise ConfigError(f"{section}: expected a mapping of settings, got {str(inner)[:80]}")
    for name, value in (inner or {}).items():  # axolotl's own section
        if name == "beta":
            key, beta = "trl.beta", value
        else:
            keys.note(f"trl.{name}", "no equivalent", value)
    if beta is not None:
        keys.settings["preference.beta"] = beta
    if guessed:
        what = "keys of DPO, ORPO and KTO alike, taken as DPO; else `--from trl-orpo` or `trl-kto`"
        keys.note(key or "max_prompt_length", what)
    _smoothing(keys, loss)
    for setting, names, of in (
        ("rpo_alpha", ("rpo_alpha", "cpo_alpha"), ("dpo", "cpo")),
        ("simpo_gamma", ("simpo_gamma",), ("cpo",)),
        ("desirable_weight", ("desirable_weight", "kto_desirable_weight"), ("kto",)),
        ("undesirable_weight", ("undesirable_weight", "kto_undesirable_weight"), ("kto",)),
        ("center_rewards_coefficient", ("center_rewards_coefficient",), ("reward",)),
    ):
        key, value = keys.take(*names)
        if key and objective in of:
            keys.settings[f"preference.{setting}"] = value
        elif key:
            keys.note(key, f"does nothing with preference.loss_type {loss}", value)
    if loss == "simpo":
        keys.settings.setdefault("preference.rpo_alpha", 1.0)
    _length(keys, objective)
    _same_function(keys)
    for key, usual in (("lora_task_type", "SEQ_CLS"), ("task_type", "SEQ_CLS"), ("num_labels", 1)):
        if objective == "reward" and keys.left.get(key) == usual:
            keys.take(key)


def _refuse(keys: Keys, objective: str) -> None:
    """Raise ConfigError for what makes another objective of it."""
    for name, (harmless, why) in REFUSED.items():
        key, value = keys.take(name)
        if key and value not in harmless:
            raise ConfigError(f"{key} {value}: {why}")
    if objective == "cpo" and (alpha := keys.take("alpha")[1]):
        raise ConfigError(f"alpha {alpha}: AlphaPO is not here")


def _loss(keys: Keys, objective: str) -> str:
    """Return `preference.loss_type`; of DPO and the cross entropy of chosen answers together also
    set `preference.rpo_alpha`.
    """
    kind = keys.take("rl")[1]
    keys.take("reward_model")
    value = keys.take("loss_type", "dpo_loss_type")[1]
    weights = keys.take("loss_weights", "dpo_loss_weights")[1]
    if kind in ("ipo", "simpo"):
        value = kind
    elif value is None:
        value = "sigmoid" if objective == "cpo" else LOSSES[objective][0]  # CPO's own default
    losses = value if isinstance(value, list) else [value]
    parts = list(zip(losses, weights or [1.0] * len(losses), strict=False))
    if objective == "dpo" and len(parts) == 2 and parts[1][0] == "sft":
        keys.settings["preference.rpo_alpha"] = parts[1][1]
        keys.note("loss_type", "sft is preference.rpo_alpha here", losses)
        parts = parts[:1]
    known = LOSSES[objective]
    if len(parts) != 1 or parts[0][0] not in known or parts[0][1] != 1:
        told = f" with loss_weights {weights}" if weights else ""
        also = ", alone or followed by sft, with the weight 1" if objective == "dpo" else ""
        raise ConfigError(
            f"loss_type {', '.join(map(str, losses))}{told} of {objective.upper()}: expected "
            f"{' or '.join(known)}{also}"
        )
    return str(parts[0][0])


def _smoothing(keys: Keys, loss: str) -> None:
    key, value = keys.take("label_smoothing", "dpo_label_smoothing")
    if value and loss not in SMOOTHED:
        keys.note(key, f"does nothing with loss {loss}, as there", value)
    elif value:
        keys.settings["preference.label_smoothing"] = value
        if loss in ("sigmoid", "sigmoid_norm"):
            what = f"smooths {loss} here; TRL 1.16 leaves {loss} as it is"
            keys.note(key, what, value)


def _length(keys: Keys, objective: str) -> None:
    """Carry the limit of one side, which here is that of a whole sample."""
    for key in [key for key in keys.left if find_setting(key) == "data.sequence_length"]:
        value = keys.left.pop(key)
        keys.settings["data.sequence_length"] = 2 * value if isinstance(value, int) else value
        other = "the answer of the row beside it" if objective == "kto" else "the other side"
        keys.note(
            key, f"of one side; data.sequence_length counts {other} too, so twice that", value
        )
    if objective == "reward":
        keys.settings.setdefault("data.too_long", "drop")


def _same_function(keys: Keys) -> None:
    """Leave out what would make model and reference unlike functions."""
    why = "off here: model and reference must be the same function"
    for setting, reason in {
        "lora.lora_dropout": why,
        "train.neftune_noise_alpha": why,
        "train.label_smoothing_factor": "of tokens; preference.label_smoothing is of sides",
    }.items():
        for key in [key for key in keys.left if find_setting(key) == setting]:
            if value := keys.left.pop(key):
                keys.note(key, reason, value)
    learned = ("train_on_inputs", "train_on_input", "assistant_only_loss", "completion_only_loss")
    for key, value in keys.popped((*learned, "roles_to_train")).items():
        if value:
            keys.note(key, "the last answer of each side is learned", value)
