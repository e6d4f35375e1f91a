"""Refuse at its start a run that would fail later: one list of checks for all commands.

`CHECKS` holds every check in the order in which it runs. `toolkit train` runs those that need only
the settings and the files of this machine, `toolkit rehearse` runs all that one process can, and a
recipe runs those that need its ranks or its device. So a mistake gets the same message everywhere.
"""

import ast
import contextlib
import copy
import importlib.util
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from toolkit import export, hub, loading, models, objectives, ranks, training
from toolkit.adapters import add_adapters, check_target_names, refuse_adapted_experts
from toolkit.checkpoint import disk_space
from toolkit.checkpoint.adapter_source import apply_adapter_settings, check_same_base, open_adapter
from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.run_folder import checkpoint_root, validate_run_folders
from toolkit.checkpoint.store import is_url, parse_location
from toolkit.config.best_metric import check_best_metric, recipe_metrics
from toolkit.config.lora import ALL_LINEAR, LoraConfig
from toolkit.config.settings import FinetuneConfig, ModelConfig, RunConfig, model_settings
from toolkit.data.first_rows import LOOK_ROWS, LOOK_SHARDS, SHARD_ROWS, RowCheck, check_some_rows
from toolkit.data.order.position import accumulation_for
from toolkit.data.prepare import build_encoder
from toolkit.data.row_formats import find_row_format
from toolkit.data.sources.files import Purpose, list_sources
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder
from toolkit.data.tokens.tokenizer import load_tokenizer, prepare_tokenizer, use_model_tokenizer
from toolkit.errors import ConfigError, ShardingError
from toolkit.mesh import DP_REPLICATE, DP_SHARD, data_ranks, mesh_shape
from toolkit.models.peft_model import adapted_modules, has_adapters
from toolkit.objectives.frozen_models import check_loadable, errors_name_role
from toolkit.objectives.reference_model import check_reference
from toolkit.planning.fake_ranks import sharded
from toolkit.sharding.unit_table import unit_rows
from toolkit.tables import size_text
from toolkit.training.router import plan_router

Moment = Literal["train", "rehearse", "build", "load"]
"""When a check runs.

`train`: before any process starts. `rehearse`: in the one process of a rehearsal. `build`: on all
ranks, before the data is prepared. `load`: on all ranks, before the weights are read.
"""

# Attention kernels -> packages, of which one must be installed. Transformers takes kernels of the
# Hub through the package `kernels`.
_ATTENTION_PACKAGES = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "flash_attn_3", "kernels"),
    "flash_attention_4": ("flash_attn_4", "flash_attn", "kernels"),
}
_ROW_SECONDS = 10.0  # for reading rows before processes start


@dataclass
class RunStart:
    """The state that all checks of one start share: the settings, and results of earlier checks."""

    cfg: RunConfig
    world_size: int | None
    """Number of processes; None if it is not known yet."""
    device: torch.device | str = "cpu"
    build_cfg: Any = None
    """The settings by which this machine can build the model, by default `cfg`."""
    add_tokenizer: Callable[[ModelConfig], ModelConfig] = use_model_tokenizer
    """Completes the model's settings with the tokenizer of the run."""
    log: Callable[[str], object] = print
    script: Path | None = None
    """The recipe's file, if it is known."""
    model: Any = None
    """On meta: without adapters after `build_model`, sharded after `shard_on_meta`."""
    model_cfg: Any = None
    tokenizer: Any = None
    max_steps: int | None = None
    """Steps of the run; None if they are not known yet."""
    file_bytes: int = 0
    """Bytes of the additional files in each checkpoint."""

    def __post_init__(self) -> None:
        self.build_cfg = self.build_cfg or self.cfg
        if self.max_steps is None and self.cfg.train.max_steps > 0:
            self.max_steps = self.cfg.train.max_steps


@dataclass(frozen=True)
class Check:
    """A named function that checks a `RunStart`, with the moments at which it runs.

    The name is also that of its stage in a rehearsal.
    """

    name: str
    moments: tuple[Moment, ...]
    run: Callable[[RunStart], str]
    """Raises a ToolkitError if the run would fail; describes what it found, which may be empty."""


def run_checks(start: RunStart, moment: Moment, name: str | None = None) -> dict[str, str]:
    """Run the checks that belong to `moment`, in the order of `CHECKS`.

    Collective if `moment` is `build` or `load`.

    Args:
        start: the state of the start. Some checks fill in its fields.
        moment: when the checks run; see `Moment`.
        name: run only the checks with this name; None: all.

    Returns:
        Name of a check -> its summary for the log. Checks without a summary are omitted; the
        summaries of checks with the same name are joined.

    Raises:
        ToolkitError: the run would fail. The subclass is that of the failing check.
    """
    texts: dict[str, str] = {}
    for check in CHECKS:
        if moment in check.moments and name in (None, check.name) and (text := check.run(start)):
            texts[check.name] = "; ".join(filter(None, (texts.get(check.name), text)))
    return texts


def check_start(
    cfg: RunConfig, world_size: int | None, device: str, script: Path | None = None
) -> str:
    """Check a run before its processes start, with the files of this machine only.

    Takes seconds, most of them for imports. Reads no weights and starts no device. The weights of a
    Hub id are not requested. Nothing is printed.

    Args:
        cfg: the settings of the run.
        world_size: the number of processes; None if it is not known yet.
        device: a device type of torch.
        script: the recipe's file, if it is known.

    Returns:
        A log line that says which rows of the data were checked; "" if none were.

    Raises:
        ToolkitError: the run would fail.
    """
    with _silence_output():
        cfg = apply_adapter_settings(cfg)
        is_local = Path(cfg.model.name_or_path).expanduser().is_dir()
        build_cfg = cfg if is_local else replace(cfg, model=replace(cfg.model, init="random"))
        add_tokenizer = partial(_add_local_tokenizer, cfg)
        start = RunStart(cfg, world_size, device, build_cfg, add_tokenizer, script=script)
        return run_checks(start, "train").get("data", "")


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    """Suppress stdout, stderr and log messages inside the context, up to the level ERROR."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled_level)


def _add_local_tokenizer(cfg: RunConfig, model: ModelConfig) -> ModelConfig:
    """Return `model` with the tokenizer of the run filled in, and without device kernels.

    If the tokenizer has to be trained or depends on rows from the Hub, it is not filled in.
    """
    model = replace(use_model_tokenizer(model), kernels="none", float8="none")
    if not find_row_format(cfg.rows).is_documents or model.train_tokenizer or _has_remote_rows(cfg):
        return model
    return prepare_tokenizer(model, replace(cfg.data, streaming=True), Path(cfg.output_dir))


def _has_remote_rows(cfg: RunConfig) -> bool:
    """Return True if a training source is a data set that is not a local folder."""
    names = [source.dataset_name for _, source in list_sources(cfg.data)]
    return any(name and not Path(name).expanduser().is_dir() for name in names)


# ---- Packages, output folder, repository ---------------------------------------------------------


def check_packages(start: RunStart) -> str:
    """Raise ConfigError if a package is missing that settings, recipe or model code import.

    Model code is checked only if `trust_remote_code` is set and the model is a local folder. The
    driver of an object store in `checkpoint.root` is checked, too. Returns a summary.
    """
    cfg = start.cfg
    cfg.metrics.trackers()
    kernel = cfg.model.attn_implementation or ""
    packages = _ATTENTION_PACKAGES.get(kernel, ("kernels",) if "/" in kernel else ())
    if packages and not any(importlib.util.find_spec(name) for name in packages):
        raise ConfigError(
            f"model.attn_implementation {kernel} needs {' or '.join(packages)}, which cannot be "
            "imported here; pip install it, or set sdpa"
        )
    needed = [
        ("liger_kernel", "model.kernels: liger", cfg.model.kernels == "liger"),
        ("torchao", "model.float8", cfg.torchao_recipe != "none"),
        ("bitsandbytes", "lora.load_in_4bit", cfg.adapters and cfg.adapters.load_in_4bit),
        ("bitsandbytes", "optim.optim: adamw_8bit", cfg.optim.optim == "adamw_8bit"),
    ]
    for package, setting, is_used in needed:
        if is_used and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{setting} needs {package}, which cannot be imported here; pip install "
                f"{package.replace('_', '-')}, or leave it out"
            )
    if cfg.checkpoint.root is not None and is_url(cfg.checkpoint.root):
        parse_location(cfg.checkpoint.root)  # raises if the store's driver is missing
    files = [] if start.script is None else [start.script]
    model = Path(cfg.model.name_or_path).expanduser()
    if cfg.model.trust_remote_code and model.is_dir():
        files += model.glob("*.py")
    for file in files:
        if missing := sorted(_find_missing_imports(file)):
            raise ConfigError(
                f"{file} imports {', '.join(missing)}, which cannot be found here; pip install "
                f"{' '.join(missing)}"
            )
    return f"all that the settings and {start.script} import"


def _find_missing_imports(file: Path) -> Iterable[str]:
    """Yield the packages that a Python file imports at its top level and that are not installed.

    Modules next to the file count as installed.
    """
    for node in ast.parse(file.read_text("utf-8"), str(file)).body:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [node.module]
        for package in (module.partition(".")[0] for module in modules):
            siblings = (file.parent / f"{package}.py", file.parent / package)
            is_sibling = any(path.exists() for path in siblings)
            if importlib.util.find_spec(package) is None and not is_sibling:
                yield package


def check_output(start: RunStart) -> str:
    """Raise if output_dir or checkpoint.root belongs to another run. Returns ""."""
    validate_run_folders(start.cfg)
    return ""


def check_writable(start: RunStart) -> str:
    """Raise ConfigError if output_dir or checkpoint.root is not writable; return a summary.

    Writes a temporary file into the nearest existing folder and deletes it. A store is not tested.
    """
    cfg = start.cfg
    folders = {"output_dir": Path(cfg.output_dir)}
    root = checkpoint_root(cfg)
    if cfg.checkpoint.root is not None and isinstance(root, Path):
        folders["checkpoint.root"] = root
    for setting, folder in folders.items():
        parents = (folder.absolute(), *folder.absolute().parents)
        existing = next(path for path in parents if path.is_dir())
        try:
            with (
                tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=existing) as scratch,
                open(Path(scratch, "file"), "wb") as file,
            ):
                file.write(b"rehearsal")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{setting} {folder}: {existing} cannot be written to ({error.strerror}); give "
                "another folder"
            ) from error
    return f"{' and '.join(map(str, folders.values()))} can be written"


def check_hub(start: RunStart, *, create: bool) -> str:
    """Raise HubError if the run could not be published at its end. Collective.

    If `create` is True, a missing repository is created. Returns a summary; "" without publishing.
    """
    cfg = start.cfg
    base = cfg.model.name_or_path if cfg.adapters else None
    hub.check(cfg.hub, start.log, adapted=base, create=create)
    return f"{cfg.hub.hub_model_id} can be pushed to" if cfg.hub.push_to_hub else ""


# ---- Model and adapter ---------------------------------------------------------------------------


def check_quantisation(start: RunStart) -> str:
    """Raise if a 4-bit or float8 base fails a trial on the device. Collective. Returns ""."""
    cfg = start.build_cfg
    models.check_quantisation(cfg.adapters, cfg.sharding, cfg.model, start.device)
    return ""


def build_model(start: RunStart) -> str:
    """Build the model on meta without adapters, and store it in `start.model`. Collective.

    Also sets `start.model_cfg`: the model's settings, completed by the tokenizer. Checks optimizer,
    settings and headers of the weights. Takes seconds. Returns a summary. Raises a ToolkitError.
    """
    cfg = start.build_cfg
    training.check_optimizer(cfg.optim, cfg.train.max_steps)
    parts, length = cfg.sharding.context_parallel, cfg.data.sequence_length
    models.check_float8(cfg.torchao_recipe, start.device)
    models.check_usable(cfg.model, length, start.device)
    start.model_cfg = start.add_tokenizer(model_settings(cfg))
    start.model = models.prepare(start.model_cfg, start.device, adapted=bool(cfg.adapters))
    loading.check_weights_fit(start.model, cfg.model)
    models.check_context_parallel(start.model, parts, length)
    models.check_expert_parallel(start.model, cfg.sharding, start.world_size)
    count = sum(p.numel() for p in start.model.parameters())
    return f"{models.model_class_name(start.model)}, {count:,} parameters"


def check_adapter_files(start: RunStart) -> str:
    """Raise if adapter targets, `lora.from` or `preference.reference` do not fit. Returns "".

    Reads small files only, and does not use PEFT, which would start a device.
    """
    cfg = start.cfg
    if cfg.adapters:
        check_target_names(start.model, cfg.adapters)
    check_reference(cfg, start.model, start.model_cfg, start.device, files_only=True)
    if not isinstance(cfg, FinetuneConfig) or cfg.lora.from_ is None:
        return ""
    # A resumed run does not read that adapter.
    if not committed_steps(checkpoint_root(cfg)):
        with open_adapter(cfg.lora) as source:
            check_same_base(cfg, source)
    return ""


def check_adapter(start: RunStart) -> str:
    """Raise on all ranks if `lora.from` or `preference.reference` do not fit. Collective.

    Also raises for adapters on divided experts. Logs which adapter and reference. Returns "".
    """

    def check() -> str:
        refuse_adapted_experts(start.model, start.cfg.adapters, start.cfg.sharding.expert_parallel)
        resumes = bool(committed_steps(checkpoint_root(start.cfg)))
        return check_continued_adapter(start.cfg, start.model, resumes=resumes)

    start.log(ranks.on_main(check))
    start.log(check_reference(start.build_cfg, start.model, start.model_cfg, start.device))
    return ""


def check_continued_adapter(cfg: RunConfig, base: PreTrainedModel, *, resumes: bool) -> str:
    """Raise ConfigError if a new run cannot continue the adapter in `lora.from`. Not collective.

    For a resumed run, the adapter is not read.

    Args:
        cfg: the settings of the run.
        base: the base model on meta, without adapters; it is not changed.
        resumes: True if the run has a checkpoint.

    Returns:
        A log line that describes the adapter; "" if the run continues none.
    """
    if not isinstance(cfg, FinetuneConfig) or cfg.lora.from_ is None:
        return ""
    if ALL_LINEAR in cfg.lora.explicit:
        _refuse_other_targets(cfg.lora, base)
    if resumes:
        return f"adapter    that of the run's checkpoint, which continued {cfg.lora.from_}"
    return export.check_adapter(add_adapters(copy.deepcopy(base), cfg.lora), cfg)


def _refuse_other_targets(lora: LoraConfig, base: PreTrainedModel) -> None:
    """Raise ConfigError if the adapter of `lora.from` is on other modules than all linear layers.

    Called if the user set `lora.target_modules` to `all-linear`.
    """
    all_linear = replace(lora, from_=None, target_modules=ALL_LINEAR, exclude_modules=[])
    expected, present = (
        adapted_modules(add_adapters(copy.deepcopy(base), settings)).keys()
        for settings in (all_linear, lora)
    )
    if differing := sorted(expected ^ present):
        raise ConfigError(
            f"lora.target_modules is all-linear, and the adapter that lora.from names "
            f"({lora.from_}) adapts other modules: {differing[0]} is in one of them only; "
            "leave lora.target_modules out"
        )


def check_tokenizer(start: RunStart) -> str:
    """Load the tokenizer into `start.tokenizer`; raise if its ids exceed the embedding.

    Returns a summary with the numbers of tokens and rows of the embedding.
    """
    start.tokenizer = load_tokenizer(start.model_cfg)
    vocabulary = models.vocabulary_size(start.model)
    Encoder(start.tokenizer, start.cfg.data, vocabulary)
    tokens = "no tokenizer" if start.tokenizer is None else f"{len(start.tokenizer):,} tokens"
    return f"{tokens}, {vocabulary:,} rows of the embedding"


def check_frozen_models(start: RunStart, *, files_only: bool = False) -> str:
    """Raise if a frozen model cannot be loaded or does not fit the trained one. Collective.

    `files_only`: request no weights of a Hub id. Logs accepted differences. Returns "".
    """
    cfg = start.build_cfg
    objective = objectives.build(cfg)
    for role, settings in objective.models.items():
        with errors_name_role(role):
            check_loadable(settings, cfg, start.device, files_only=files_only)
    start.log(objective.check_models(start.model, start.model_cfg))
    return ""


def check_prompts(start: RunStart) -> str:
    """Raise if a fine-tuned model cannot answer `train.eval_prompts`. Collective. Returns ""."""
    if isinstance(start.cfg, FinetuneConfig):
        training.check_prompts(start.model, start.tokenizer, start.cfg.train)
    return ""


def check_router(start: RunStart) -> str:
    """Raise if the settings `train.router_*` cannot balance the model's experts. Returns "".

    The error is a ModelError, or a ConfigError if updates of a bias are combined with adapters.
    """
    plan_router(start.model, start.cfg)
    return ""


def check_metric(start: RunStart) -> str:
    """Raise if no evaluation of the recipe has `checkpoint.metric_for_best_model`. Returns ""."""
    metrics = None if start.script is None else recipe_metrics(start.cfg, start.script)
    name, _ = start.cfg.checkpoint.best_metric()
    # Which sources there are to evaluate on is checked when the data is prepared.
    if metrics and not any(name.endswith(f"_{metric.name}") for metric in metrics):
        sources = [source.name or "" for _, source in list_sources(start.cfg.data, "eval")]
        check_best_metric(start.cfg.checkpoint, sources, metrics, is_used=True)
    return ""


# ---- Data, sharding, disk ------------------------------------------------------------------------


def check_mesh(start: RunStart) -> str:
    """Raise ShardingError if a known number of processes cannot form the mesh. Returns ""."""
    if start.world_size is not None:
        mesh_shape(start.world_size, start.cfg.sharding)
    return ""


def check_batch(start: RunStart) -> str:
    """Raise DataError if ranks times micro-batch does not divide the global batch. Returns "".

    Only ranks that read different samples count. The micro-batch `auto` counts as 1. Nothing is
    checked if the number of processes or the global batch is unknown, or if the mesh is invalid.
    """
    global_batch = start.cfg.train.global_batch_size
    micro_batch = start.cfg.train.per_device_train_batch_size
    if start.world_size is not None and global_batch is not None:
        try:
            ranks_with_samples = data_ranks(start.world_size, start.cfg.sharding)
        except ShardingError:
            return ""  # the check of the mesh reports it
        micro_batch = micro_batch if isinstance(micro_batch, int) else 1
        accumulation_for(global_batch, micro_batch, ranks_with_samples)
    return ""


def check_rows(start: RunStart) -> str:
    """Read some rows of each source, for about 10 s; raise if the run would refuse one of them.

    Also raises if a source has no usable row.

    Returns:
        A log line with the number of checked rows; "" if rows are on the Hub, or if the tokenizer
        has to be trained first.
    """
    cfg, model_cfg = start.cfg, start.model_cfg
    has_no_tokenizer = model_cfg.tokenizer_name_or_path is None and model_cfg.train_tokenizer
    if has_no_tokenizer or _has_remote_rows(cfg):
        return ""
    encoder = build_encoder(cfg, model_cfg, start.model)
    purposes: tuple[Purpose, ...] = ("train", "eval")
    has_template = encoder.has_chat_template
    row_format = encoder.row_format
    load = partial(load_sources, cfg.data, row_format=row_format, has_template=has_template)
    sources = [source for purpose in purposes for source in load(purpose=purpose, streaming=True)]
    looks: list[RowCheck] = []
    deadline = time.monotonic() + _ROW_SECONDS
    for number, source in enumerate(sources):
        seconds = (deadline - time.monotonic()) / (len(sources) - number)
        looks.append(check_some_rows(source, encoder, max(1.0, seconds)))
        if not row_format.is_documents:
            looks[-1].check(source, cfg.data.sequence_length)
    row_count = sum(look.counts.rows for look in looks)
    return f"checked    {row_count:,} rows{_describe_unchecked_rows(looks)}"


def _describe_unchecked_rows(looks: list[RowCheck]) -> str:
    """Format the end of the log line of `check_rows`, which says if all rows were checked."""
    if all(look.is_complete for look in looks):
        return ", which are all rows"
    return (
        f": up to {LOOK_ROWS:,} at the beginning of each source and {LOOK_SHARDS * SHARD_ROWS:,} "
        f"spread over it, within about {_ROW_SECONDS:.0f} s. The run checks all; so does `toolkit "
        "inspect --data`"
    )


def shard_on_meta(start: RunStart) -> str:
    """Shard the model on meta as a rank would, and replace `start.model` by the result.

    Returns a summary: number of FSDP units, shape of the mesh, and parameter bytes of a rank.
    """
    cfg, world_size = start.build_cfg, start.world_size
    assert world_size is not None
    compiled = cfg.sharding.torch_compile
    with sharded(cfg, world_size, model=start.model, torch_compile=compiled) as (result, sharding):
        rows = unit_rows(result, sharding)
        replicas, shards = (result.mesh.axes[axis] for axis in (DP_REPLICATE, DP_SHARD))
        rank_bytes = size_text(sum(row.bytes_sharded for row in rows))
        start.model = result.model
        return f"{len(rows)} units on {replicas} x {shards} ranks, {rank_bytes} of parameters each"


def check_disk(start: RunStart) -> str:
    """Raise if the disk is too small for the run's files; log and return the estimate. Collective.

    Returns "" and checks nothing if the number of ranks is unknown, or if adapters are set and the
    model does not have them yet.
    """
    cfg, model, world_size = start.cfg, start.model, start.world_size
    if world_size is None or (cfg.adapters and not has_adapters(model)):
        return ""

    def check() -> str:
        estimate = disk_space.estimate_disk_use(
            model,
            cfg.output_dir,
            cfg.checkpoint,
            start.max_steps,
            world_size,
            cfg.optim,
            file_bytes=start.file_bytes,
        )
        disk_space.check_disk_space(estimate, cfg.checkpoint)
        return str(estimate)

    text = ranks.on_main(check)
    start.log(f"disk       {text}")
    return text


CHECKS = (
    Check("packages", ("rehearse",), check_packages),
    Check("sharding", ("train",), check_mesh),
    Check("data", ("train", "rehearse"), check_batch),
    Check("data", ("train",), check_metric),
    # A recipe does this when it opens its folder.
    Check("output", ("train", "rehearse"), check_output),
    Check("output", ("rehearse",), check_writable),
    Check("model", ("rehearse", "build"), check_quantisation),
    Check("hub", ("rehearse",), partial(check_hub, create=False)),
    # Only creating the repository proves that it can be created.
    Check("hub", ("build",), partial(check_hub, create=True)),
    Check("model", ("train", "rehearse", "build"), build_model),
    Check("model", ("train",), partial(check_frozen_models, files_only=True)),
    Check("model", ("rehearse", "build"), check_frozen_models),
    Check("model", ("train",), check_adapter_files),
    Check("model", ("rehearse", "build"), check_adapter),
    Check("model", ("rehearse",), check_tokenizer),
    Check("model", ("load",), check_router),
    Check("model", ("rehearse", "load"), check_prompts),
    # A recipe reads and encodes all rows; a rehearsal keeps those that it reads.
    Check("data", ("train",), check_rows),
    Check("sharding", ("rehearse",), shard_on_meta),
    Check("disk", ("train", "rehearse", "load"), check_disk),
)
"""Every check, in order. The name is that of a stage in `toolkit.rehearsal.stages`."""
