"""Refuse before a process is started what this machine's files show to be wrong: `toolkit train`.

Calls what the recipes call at their start, so that it says what the run would say. Reads no weight
and starts no device: PEFT, which does, is left to the run.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from toolkit.adapters import check_named
from toolkit.assembly import build_checked
from toolkit.checkpoint import disk
from toolkit.checkpoint.adapter_source import adopt_adapter, check_base, open_adapter
from toolkit.checkpoint.run_folder import claim, recorded_config
from toolkit.config.settings import FinetuneConfig, ModelConfig, RunConfig
from toolkit.data.order.position import accumulation_for
from toolkit.data.prepare import encoder_for
from toolkit.data.sources.files import configured
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.tokenizer import own_tokenizer, prepare_tokenizer
from toolkit.mesh import mesh_shape


def check_start(cfg: RunConfig, world_size: int | None, device: str) -> None:
    """Raise what a run of `cfg` would be refused for at its start, as far as files here show it.

    `world_size` is None where the number of processes is not known yet; `device` is a type of
    torch. Seconds, most of them imports. Weights of a Hub id are not asked for. Raises ToolkitError
    of any kind.
    """
    with _silence():
        _check_ranks(cfg, world_size)
        claim(cfg)
        cfg = adopt_adapter(cfg)
        here = Path(cfg.model.name_or_path).expanduser().is_dir()
        asked = cfg if here else replace(cfg, model=replace(cfg.model, init="random"))
        model, model_cfg = build_checked(asked, device, partial(_tokenizer, cfg))
        _check_rows(cfg, model, model_cfg)
        if cfg.adapters:
            check_named(model, cfg.adapters)
            _check_continued(cfg)
        elif world_size is not None:
            steps = cfg.train.max_steps if cfg.train.max_steps > 0 else None
            need = disk.need(model, cfg.output_dir, cfg.checkpoint, steps, world_size, cfg.optim)
            disk.refuse_overflow(need, cfg.checkpoint)


def _check_continued(cfg: RunConfig) -> None:
    """Refuse an adapter of another base, as far as files here show it; not of a resumed run."""
    if not isinstance(cfg, FinetuneConfig) or cfg.lora.from_ is None:
        return
    if recorded_config(cfg) is None:
        with open_adapter(cfg.lora) as source:
            check_base(cfg, source)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Print nothing: what there is to say beside a refusal the run says."""
    before, out, err = logging.root.manager.disable, io.StringIO(), io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        logging.disable(before)


def _check_ranks(cfg: RunConfig, world_size: int | None) -> None:
    if world_size is None:
        return
    mesh_shape(world_size, cfg.sharding)
    batch, size = cfg.train.global_batch_size, cfg.train.per_device_train_batch_size
    if batch is not None:
        accumulation_for(batch, size if isinstance(size, int) else 1, world_size)


def _tokenizer(cfg: RunConfig, model: ModelConfig) -> ModelConfig:
    """Return the model's settings with the tokenizer of the run, where there is one already, and
    without kernels, which are the device's affair.
    """
    model = replace(own_tokenizer(model), kernels="none")
    if cfg.learned != "documents" or model.train_tokenizer or _is_remote(cfg):
        return model
    return prepare_tokenizer(model, replace(cfg.data, streaming=True), Path(cfg.output_dir))


def _is_remote(cfg: RunConfig) -> bool:
    """Return whether a source is a data set that is not a folder here."""
    named = [source.dataset_name for _, source in configured(cfg.data)]
    return any(name and not Path(name).expanduser().is_dir() for name in named)


def _check_rows(cfg: RunConfig, model: PreTrainedModel, model_cfg: Any) -> None:
    """Refuse a first row that the run would refuse, as for the want of a chat template."""
    untrained = model_cfg.tokenizer_name_or_path is None and model_cfg.train_tokenizer
    if untrained or _is_remote(cfg):
        return
    encoder = encoder_for(cfg, model_cfg, model)
    data = replace(cfg.data, streaming=True)
    has_template = encoder.has_chat_template
    for source in load_sources(data, learned=cfg.learned, has_template=has_template):
        for stored in source.rows:
            encoder.row(source, stored, 0)
            break
