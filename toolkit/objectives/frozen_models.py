"""Checks of models that are loaded next to the trained one and are not trained."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.config.settings import ModelConfig
from toolkit.errors import ToolkitError
from toolkit.loading.pretrained import check_weights_fit
from toolkit.models import build_on_meta, check_usable

_SETTINGS = "|".join(field.name for field in dataclasses.fields(ModelConfig))
_MODEL_SETTING = re.compile(rf"\bmodel\.({_SETTINGS})\b")


def check_loadable(
    settings: ModelConfig,
    sequence_length: int,
    device: torch.device | str,
    *,
    files_only: bool = False,
) -> PreTrainedModel:
    """Check that a frozen model can be loaded and run, as the trained model is checked. Collective.

    Reads configs and the headers of weight files.

    Args:
        settings: settings of the frozen model.
        sequence_length: length of the run's samples.
        device: device of the run.
        files_only: if the model is a Hub id, request its small files only, not its weights.

    Returns:
        The model, on meta.

    Raises:
        ModelError: it cannot be used, or has fewer positions than `sequence_length`.
        LoadingError: its weights are missing, damaged or do not fit.
        ConfigError: a setting does not work on `device`.
    """
    if files_only and not Path(settings.name_or_path).expanduser().is_dir():
        settings = replace(settings, init="random")  # for which no weights are read
    check_usable(settings, sequence_length, device)
    model = build_on_meta(settings)
    check_weights_fit(model, settings)
    return model


@contextmanager
def errors_name_role(role: str) -> Iterator[None]:
    """Prefix errors inside the context by the role of a frozen model, such as "teacher".

    Settings that a message gives as those of `model` are named as those of the role.
    """
    try:
        yield
    except ToolkitError as error:
        text = _MODEL_SETTING.sub(rf"{role}.\1", str(error))
        if "lora.from" in text:  # would put the adapter on the trained model
            text = (
                f"{text.partition(';')[0]}; merge it into its base (PEFT's merge_and_unload), and "
                f"set {role}.name_or_path to the result"
            )
        role_error = type(error)(f"{role}: {text}")
        if hasattr(error, "already_reported"):  # every rank raises it
            role_error.already_reported = error.already_reported  # type: ignore[attr-defined]
        raise role_error from error
