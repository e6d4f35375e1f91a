"""Refuse before a process is started what this machine's files show to be wrong: `toolkit train`.

Calls what the recipes call at their start, so that it says what the run would say. Reads no weight
and starts no device: PEFT, which does, is left to the run.
"""

import contextlib
import io
import logging
import time
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
from toolkit.data.first_rows import LOOK_ROWS, LOOK_SHARDS, SHARD_ROWS, RowLook, look_at_rows
from toolkit.data.order.position import accumulation_for
from toolkit.data.prepare import encoder_for
from toolkit.data.sources.files import What, configured
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.tokenizer import own_tokenizer, prepare_tokenizer
from toolkit.mesh import mesh_shape

_SECONDS = 10.0  # for looking at rows


def check_start(cfg: RunConfig, world_size: int | None, device: str) -> str:
    """Raise what a run of `cfg` would be refused for at its start, as far as files here show it.

    Takes seconds, most of them imports. Weights of a Hub id are not asked for.

    Args:
        world_size: the number of processes; None if it is not known yet.
        device: a type of torch.

    Returns:
        A line that says which rows of the data were looked at; empty if none were.

    Raises:
        ToolkitError: of any kind.
    """
    with _silence():
        _check_ranks(cfg, world_size)
        claim(cfg)
        cfg = adopt_adapter(cfg)
        here = Path(cfg.model.name_or_path).expanduser().is_dir()
        asked = cfg if here else replace(cfg, model=replace(cfg.model, init="random"))
        model, model_cfg = build_checked(asked, device, partial(_tokenizer, cfg))
        checked = _check_rows(cfg, model, model_cfg)
        if cfg.adapters:
            check_named(model, cfg.adapters)
            _check_continued(cfg)
        elif world_size is not None:
            steps = cfg.train.max_steps if cfg.train.max_steps > 0 else None
            need = disk.need(model, cfg.output_dir, cfg.checkpoint, steps, world_size, cfg.optim)
            disk.refuse_overflow(need, cfg.checkpoint)
    return checked


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


def _check_rows(cfg: RunConfig, model: PreTrainedModel, model_cfg: Any) -> str:
    """Refuse rows that the run would refuse, and sources of which it could use nothing.

    Returns:
        A line that says how many rows were looked at; empty if none could be.
    """
    untrained = model_cfg.tokenizer_name_or_path is None and model_cfg.train_tokenizer
    if untrained or _is_remote(cfg):
        return ""
    encoder = encoder_for(cfg, model_cfg, model)
    uses: tuple[What, ...] = ("train", "eval")
    has_template = encoder.has_chat_template
    load = partial(load_sources, cfg.data, learned=cfg.learned, has_template=has_template)
    sources = [source for use in uses for source in load(what=use, streaming=True)]
    looks = []
    deadline = time.monotonic() + _SECONDS
    for number, source in enumerate(sources):
        share = (deadline - time.monotonic()) / (len(sources) - number)
        looks.append(look_at_rows(source, encoder, max(1.0, share)))
        if cfg.learned != "documents":
            looks[-1].check(source, cfg.data.sequence_length)
    return f"checked    {sum(look.counts.rows for look in looks):,} rows{_limits(looks)}"


def _limits(looks: list[RowLook]) -> str:
    """Return the part of the line that says which rows were not looked at."""
    if all(look.is_complete for look in looks):
        return ", all that there are"
    return (
        f": up to {LOOK_ROWS:,} at the beginning of each source and {LOOK_SHARDS * SHARD_ROWS:,} "
        f"spread over it, within about {_SECONDS:.0f} s. The run checks all; so does `toolkit "
        "inspect --data`"
    )
