"""Checks of models that are loaded next to the trained one and are not trained."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.settings import ModelConfig, RunConfig
from toolkit.data.prepare import TrainingData
from toolkit.errors import DataError, ToolkitError
from toolkit.formats import assets_of
from toolkit.loading.pretrained import check_weights_fit
from toolkit.models import (
    build_on_meta,
    check_context_parallel,
    check_usable,
    model_class_name,
)
from toolkit.models.packing_probe import probe_packing

_SETTINGS = "|".join(field.name for field in dataclasses.fields(ModelConfig))
_MODEL_SETTING = re.compile(rf"\bmodel\.({_SETTINGS})\b")


def check_loadable(
    settings: ModelConfig,
    cfg: RunConfig,
    device: torch.device | str,
    *,
    files_only: bool = False,
) -> PreTrainedModel:
    """Check that a frozen model can be loaded and run, as the trained model is checked. Collective.

    Reads configs and the headers of weight files.

    Args:
        settings: settings of the frozen model.
        cfg: settings of the run, such as the length of its samples.
        device: device of the run.
        files_only: if the model is a Hub id, request its small files only, not its weights.

    Returns:
        The model, on meta.

    Raises:
        ModelError: it cannot be used, has fewer positions than the samples, or ranks cannot share
            its rows (`sharding.context_parallel`).
        LoadingError: its weights are missing, damaged or do not fit.
        ConfigError: a setting does not work on `device`.
    """
    if files_only and not Path(settings.name_or_path).expanduser().is_dir():
        settings = replace(settings, init="random")  # for which no weights are read
    length = cfg.data.sequence_length
    check_usable(settings, length, device)
    model = build_on_meta(settings)
    check_weights_fit(model, settings)
    check_context_parallel(model, cfg.sharding.context_parallel, length)
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


def check_packed_rows(name: str, settings: ModelConfig, data: TrainingData) -> None:
    """Raise if a frozen model lets documents that share a row see each other. Collective.

    Unless rows are padded and have a mask, samples run through a tiny copy of the model on rank 0,
    as for the trained model in `prepare_data`. That takes 0.1 to 2 seconds for most model types.

    Args:
        name: role or setting of the model, for messages.
        settings: settings of the model.
        data: the data of the run, whose packing is decided.

    Raises:
        DataError: the model does not keep documents apart, or not in the way in which the rows of
            the run separate them.
    """
    choice, cfg = data.choice, data.cfg
    if choice.packing == "none" and choice.mask is not None:
        return

    def check() -> None:
        model = build_on_meta(settings)
        verdict = probe_packing(
            model.config,
            assets_of(model).model_class,
            sequence_length=cfg.data.sequence_length,
            rows=cfg.train.micro_batch,
            device=data.run.device.type,
            packed=choice.packing == "bfd",
        )
        fault = ""
        if not verdict.ok:
            fault = f"does not keep packed samples apart ({verdict.why})"
        elif verdict.mask is not None and choice.mask is None:
            fault = (
                f"needs a mask ({verdict.mask}), but the rows of this run have the borders of "
                "documents instead, which suffice for the trained model"
            )
        elif verdict.mask is None and choice.mask is not None and choice.packing != "wrapped":
            fault = (
                "separates packed samples by their borders, but the rows of this run have a mask "
                f"instead, which the trained model needs ({choice.mask})"
            )
        if fault:
            # Ranks that share rows separate documents by their borders in every packing.
            shares_rows = cfg.sharding.context_parallel > 1
            remedy = "sharding.context_parallel: 1" if shares_rows else "data.packing: none"
            raise DataError(
                f"{name}: {model_class_name(model)} of {settings.name_or_path} {fault}; set "
                f"{remedy}"
            )

    ranks.on_main(check)
