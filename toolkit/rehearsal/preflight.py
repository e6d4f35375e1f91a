"""What a run would be refused for before its first step, asked here of the real config.

Each function is a stage: returns what it found, raises what the run would.
"""

import ast
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit import config, hub, loading, recipes, training
from toolkit.adapters import prepare_adapters
from toolkit.checkpoint import disk
from toolkit.checkpoint.run_folder import claim, root_of
from toolkit.checkpoint.store import is_url, where
from toolkit.config.settings import FinetuneConfig, ShardingConfig, model_settings
from toolkit.data.order.position import accumulation_for
from toolkit.data.prepare import prepare_data
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder
from toolkit.data.tokens.tokenizer import load_tokenizer, own_tokenizer
from toolkit.errors import ConfigError, DataError, ToolkitError
from toolkit.models import check_quantisation, check_usable, plain_name, prepare, vocabulary_size
from toolkit.rehearsal.rows import Head, read_heads, refuse_long
from toolkit.rehearsal.settings import on_cpu
from toolkit.rehearsal.stages import NotAskedError
from toolkit.sharding import apply_fsdp, init_mesh
from toolkit.sharding.fsdp import mesh_shape, splits_ends
from toolkit.sharding.unit_table import fake_world, unit_rows
from toolkit.tables import size_text

# Attention kernels -> packages of which one must be there; transformers takes kernels of the Hub
# through the last.
_ATTENTION = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "flash_attn_3", "kernels"),
    "flash_attention_4": ("flash_attn_4", "flash_attn", "kernels"),
}


def which_recipe(file: Path, flags: Sequence[str]) -> tuple[str, Any]:
    """Return the recipe that a config is of, and its settings: that whose settings it has; where
    both have them, `finetune` where the rows are examples and no documents. ConfigError: neither.
    `flags` win over the file.
    """
    found: dict[str, Any] = {}
    errors = []
    for name, cls in recipes.SETTINGS.items():
        try:
            found[name] = config.parse(cls, ["--config", str(file), *flags])
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[-1] if "finetune" in file.stem else errors[0]
    if len(found) > 1 and _are_examples(found["finetune"]):
        return "finetune", found["finetune"]
    return next(iter(found.items()))


def _are_examples(cfg: FinetuneConfig) -> bool:
    data = replace(cfg.data, streaming=True)
    if not (data.train_files or data.dataset_name or data.sources):
        return False
    try:
        load_sources(data, documents=True)
    except ToolkitError:
        try:
            load_sources(data)
        except ToolkitError:  # of neither kind: the stage `data` says what is wrong
            return False
        return True
    return False


def real_world(cfg: ShardingConfig, world_size: int) -> int:
    """Return the number of processes of the run as far as the mesh says it."""
    sizes = [n for n in (cfg.dp_replicate, cfg.dp_shard) if n != -1]
    named = sizes[0] * (sizes[1] if len(sizes) > 1 else 1) if sizes else 1
    if len(sizes) == 2:
        return named
    return named if named % world_size == 0 else named * world_size


def check_packages(cfg: Any, recipe: str) -> str:
    """Refuse packages that the settings, the recipe or the model's own code need, and lack."""
    cfg.metrics.trackers()
    kernel = cfg.model.attn_implementation or ""
    wanted = _ATTENTION.get(kernel, ("kernels",) if "/" in kernel else ())
    if wanted and not any(importlib.util.find_spec(name) for name in wanted):
        what = f"needs {' or '.join(wanted)}, which cannot be imported here"
        raise ConfigError(f"model.attn_implementation {kernel} {what}; pip install it, or set sdpa")
    asked = {"liger_kernel": cfg.model.kernels == "liger" and "model.kernels: liger"}
    asked["bitsandbytes"] = (cfg.optim.optim == "adamw_8bit" and "optim.optim: adamw_8bit") or (
        isinstance(cfg, FinetuneConfig) and cfg.lora.load_in_4bit and "lora.load_in_4bit"
    )
    for package, setting in asked.items():
        if setting and importlib.util.find_spec(package) is None:
            what = f"{setting} needs {package}, which cannot be imported here"
            raise ConfigError(f"{what}; pip install {package.replace('_', '-')}, or leave it out")
    if is_url(cfg.checkpoint.root):
        where(cfg.checkpoint.root)  # its driver
    script = recipes.script_of(recipe)
    files = [script]
    model = Path(cfg.model.name_or_path).expanduser()
    if cfg.model.trust_remote_code and model.is_dir():
        files += model.glob("*.py")
    for file in files:
        if lacking := sorted(_missing(file)):
            what = f"{file} imports {', '.join(lacking)}, which cannot be found here"
            raise ConfigError(f"{what}; pip install {' '.join(lacking)}")
    return f"all that the settings and {script} import"


def _missing(file: Path) -> Iterable[str]:
    """Return the packages that a module imports at its top level and that are not there."""
    for node in ast.parse(file.read_text("utf-8"), str(file)).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in (n.partition(".")[0] for n in names):
            beside = file.parent / f"{name}.py", file.parent / name
            if importlib.util.find_spec(name) is None and not any(p.exists() for p in beside):
                yield name


def check_output(cfg: Any) -> str:
    """Refuse an output_dir or checkpoint.root that is not free, or that a file cannot go to."""
    claim(cfg)
    places = {"output_dir": Path(cfg.output_dir)}
    root = root_of(cfg)
    if cfg.checkpoint.root is not None and isinstance(root, Path):
        places["checkpoint.root"] = root
    for setting, folder in places.items():
        above = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
        try:
            with (
                tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=above) as scratch,
                open(Path(scratch, "file"), "wb") as file,
            ):
                file.write(b"rehearsal")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = f"cannot be written to ({error.strerror}); give another"
            raise ConfigError(f"{setting} {folder}: {above} {what}") from error
    return f"{' and '.join(map(str, places.values()))} can be written"


def check_hub(cfg: Any) -> str:
    """Refuse what publishing would be refused for; creates no repository."""
    adapted = cfg.model.name_or_path if isinstance(cfg, FinetuneConfig) and cfg.lora.r else None
    hub.check(cfg.hub, adapted=adapted, create=False)
    if not cfg.hub.push_to_hub:
        raise NotAskedError("hub.push_to_hub is off")
    return f"{cfg.hub.hub_model_id} may be pushed to"


def check_model(cfg: Any) -> tuple[Any, Any, str]:
    """Return the model's settings with its tokenizer named, the real model on meta, and a line;
    refuse a tokenizer that gives ids beyond the embedding.
    """
    own = on_cpu(cfg)
    training.check_optimizer(cfg.optim, cfg.train.max_steps)
    if isinstance(cfg, FinetuneConfig):
        check_quantisation(cfg.lora, cfg.sharding, own.model, "cpu")
    check_usable(own.model, cfg.data.sequence_length, "cpu")
    model_cfg = own_tokenizer(model_settings(own))
    model = prepare(model_cfg)
    loading.check_fits(model, own.model)
    tokenizer = load_tokenizer(model_cfg)
    Encoder(tokenizer, cfg.data, vocabulary_size(model))
    if isinstance(cfg, FinetuneConfig):
        training.check_prompts(model, tokenizer, cfg.train)
    tokens = "no tokenizer" if tokenizer is None else f"{len(tokenizer):,} tokens"
    values = sum(p.numel() for p in model.parameters())
    rows = f"{vocabulary_size(model):,} rows of the embedding"
    return model_cfg, model, f"{plain_name(model)}, {values:,} parameters; {tokens}, {rows}"


def check_rows(
    cfg: Any, model_cfg: Any, model: Any, world_size: int, most_too_long: float
) -> tuple[list[Head], list[Head], str]:
    """Return the first rows to train on and to evaluate on, and a line; refuse what the run would,
    and rows of which more than the share `most_too_long` is too long.
    """
    tokenizer = load_tokenizer(model_cfg)
    untrained = tokenizer is None and cfg.model.train_tokenizer
    encoder = None if untrained else Encoder(tokenizer, cfg.data, vocabulary_size(model))
    heads, evals = read_heads(cfg, encoder), read_heads(cfg, encoder, "eval")
    refuse_long([*heads, *evals], cfg.data.sequence_length, most_too_long)
    formats = {head.source.layout.format for head in heads}
    if tokenizer is None and not untrained and formats != {"tokenised"}:
        what = f"expected a tokenizer for the text, {cfg.model.name_or_path} comes with none"
        raise DataError(f"{what}; set model.tokenizer_name_or_path")
    batch, size = cfg.train.global_batch_size, cfg.train.per_device_train_batch_size
    if batch is not None and size != "auto":
        accumulation_for(batch, size, world_size)  # refuses what does not divide
    whole = all(head.whole for head in [*heads, *evals]) and not untrained
    if whole and not cfg.data.streaming:  # little enough to be prepared as the run will
        own: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=world_size)
        with fake_world(world_size):
            prepare_data(on_cpu(cfg), model, model_cfg, own)
    return heads, evals, _seen(heads, evals, untrained)


def _seen(heads: list[Head], evals: list[Head], untrained: bool) -> str:
    rows = sum(head.counts.rows or len(head.rows) for head in heads)
    said = f"{'all' if all(h.whole for h in heads) else 'the first'} {rows:,} rows"
    if untrained:
        return f"{said}; the tokenizer is trained on them"
    tokens = sum(head.counts.tokens for head in heads)
    learned = sum(head.counts.supervised for head in heads)
    cut = max(head.too_long for head in heads)
    said += f", {tokens:,} tokens, {learned / max(1, tokens):.0%} learned"
    if cut:
        said += f", {cut:.0%} of the rows too long"
    left = {why: n for head in heads for why, n in head.counts.dropped.items()}
    said += f"; left out: {', '.join(f'{n} {why}' for why, n in left.items())}" if left else ""
    return said + (f"; {sum(e.counts.rows for e in evals):,} to evaluate on" if evals else "")


def check_sharding(cfg: Any, model: Any, world_size: int) -> tuple[Any, str]:
    """Return the real model, sharded as on the ranks of the run, but on meta; and a line."""
    with fake_world(world_size):
        sharding = on_cpu(cfg).sharding
        if isinstance(cfg, FinetuneConfig):
            model = prepare_adapters(model, cfg.lora, sharding.param_dtype)
        splits = splits_ends(model, sharding, "cuda")
        compiled = "none" if sharding.torch_compile == "auto" else sharding.torch_compile
        sharding = replace(sharding, embedding_units=splits, torch_compile=compiled)
        apply_fsdp(model, init_mesh("cpu", world_size, sharding), sharding)
        rows = unit_rows(model, sharding)
        replicas, shards = mesh_shape(world_size, sharding)
        held = size_text(sum(row.bytes_sharded for row in rows))
        said = f"{len(rows)} units on {replicas} x {shards} ranks, {held} of parameters each"
        return model, said


def check_disk(cfg: Any, model: Any, world_size: int) -> str:
    """Refuse a disk too small for what the real run writes; `model` is sharded and on meta."""
    steps = cfg.train.max_steps if cfg.train.max_steps > 0 else None
    need = disk.need(model, cfg.output_dir, cfg.checkpoint, steps, world_size, cfg.optim)
    disk.refuse_overflow(need, cfg.checkpoint)
    return str(need)
