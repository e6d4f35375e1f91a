"""Find the adapter that a run continues (`lora.from`), and adopt its settings.

The adapter is in a PEFT folder, a repository of the Hub, an export of this toolkit, a run, or a
checkpoint. This module reads its kind and base model from small files and headers.
`toolkit.export.adapter_loading` reads its values, after those of the base model.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import read_adapter_config
from toolkit.checkpoint import commit
from toolkit.checkpoint.run_folder import apply_recorded_adapter, local_copy, read_recorded_config
from toolkit.checkpoint.sources import Source, find_source, read_base_entry
from toolkit.checkpoint.store import is_url
from toolkit.config.lora import ALL_LINEAR, LoraConfig, normalise_value
from toolkit.config.published import is_path
from toolkit.config.settings import FinetuneConfig
from toolkit.errors import ConfigError, ExportError, ToolkitError, one_line
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    StoredTensor,
    export_manifest,
    local_folder,
    read_header,
    source_dtypes,
)
from toolkit.formats.hub_access import hub_unreachable_reason
from toolkit.formats.plain_files import hash_file_part

_PICKLE = "adapter_model.bin"
_MOST_STAGES = 50  # of a chain that an untrusted file describes


@dataclass(frozen=True)
class AdapterSource:
    """Location, settings and base model of the adapter that a run continues, without its values."""

    name: str  # as the user gave it
    folder: Path  # a PEFT folder, or a checkpoint of this toolkit
    config: dict[str, Any]  # adapter_config.json
    base: dict[str, Any]  # `name_or_path`, `revision` and `digest` of its base, as far as known
    stage: dict[str, Any]
    """Entry of manifests: `name`, `hub_id`, `revision`, `sha256` (of the weights file, or of the
    checkpoint's manifest), `step`, and `continued`, the entry of the stage before."""
    checkpoint: Source | None = None  # None: a PEFT folder

    def tensors(self) -> dict[str, StoredTensor]:
        """Read the weights file's header of a PEFT folder: key -> dtype, shape and byte range.

        Not for a checkpoint of this toolkit, which has no such file.
        """
        return read_header(self.folder / ADAPTER_WEIGHTS)


def apply_adapter_settings(cfg: Any) -> Any:
    """Copy rank, targets and other settings of the adapter in `lora.from` to `cfg`. Collective.

    Rank 0 reads small files, or downloads the adapter from the Hub. If an earlier start of the run
    has recorded the settings, they are used, and the adapter is not read.

    Returns:
        A new config; `cfg` itself if it sets no `lora.from`.

    Raises:
        ConfigError: the adapter does not exist or cannot be continued, or a setting contradicts it.
    """
    if not isinstance(cfg, FinetuneConfig) or cfg.lora.from_ is None:
        return cfg
    return ranks.on_main(lambda: _apply_settings(cfg))


def _apply_settings(cfg: FinetuneConfig) -> FinetuneConfig:
    """Return a copy of `cfg` with the LoRA settings of the adapter in `lora.from`.

    If an earlier start of this run recorded them, they are taken from its config, and the adapter
    is not read.

    Raises:
        ConfigError: the adapter cannot be continued, or `cfg` sets one of its settings differently.
    """
    recorded = read_recorded_config(cfg)
    if recorded is not None and recorded.lora.from_ == cfg.lora.from_:
        return apply_recorded_adapter(cfg, recorded)
    with open_adapter(cfg.lora) as source:
        _check_task(source, cfg)
        return replace(cfg, lora=_merge_adapter_settings(cfg.lora, source))


def _merge_adapter_settings(lora: LoraConfig, source: AdapterSource) -> LoraConfig:
    """Return `lora` with rank, targets and similar settings taken from the adapter.

    Raises:
        ConfigError: the user has set one of them to another value. `target_modules: all-linear` is
            accepted here, because only the model decides which modules those are.
    """
    theirs = parse_adapter_settings(source.config, source.name)
    for name, value in lora.requested_structure().items():
        if name == "target_modules" and normalise_value(value) == ALL_LINEAR:
            continue  # the model decides which modules those are
        if normalise_value(value) != normalise_value(theirs[name]):
            raise ConfigError(
                f"lora.{name} is {value!r}, and the adapter that lora.from names "
                f"({source.name}) has {theirs[name]!r}; leave lora.{name} out"
            )
    return lora.with_structure(theirs)


def parse_adapter_settings(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Parse the settings of an adapter_config.json that define its tensors (rank, targets, ...).

    If the file limits the adapter to some layers, `target_modules` becomes a regular expression.

    Args:
        config: the content of the file.
        name: name of the adapter, for errors.

    Returns:
        Setting -> value, for each name in `config.lora.STRUCTURE`. An absent list or dict is empty,
        an absent switch is False.

    Raises:
        ConfigError: a value has a type that PEFT does not write.
    """
    lists = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
    patterns, switches = ("rank_pattern", "alpha_pattern"), ("use_rslora", "use_dora")
    structure: dict[str, Any] = {"r": config["r"], "lora_alpha": config.get("lora_alpha")}
    structure |= {n: [] if config.get(n) is None else config[n] for n in lists}
    structure |= {n: {} if config.get(n) is None else config[n] for n in patterns}
    structure |= {n: False if config.get(n) is None else config[n] for n in switches}
    fits = {
        "lora_alpha": _is_number(structure["lora_alpha"]),
        **{n: _is_string_list(structure[n]) for n in ("target_parameters", "modules_to_save")},
        **{
            n: isinstance(structure[n], str) or _is_string_list(structure[n])
            for n in ("target_modules", "exclude_modules")
        },
        **{
            n: isinstance(structure[n], dict) and all(map(_is_number, structure[n].values()))
            for n in patterns
        },
        **{n: isinstance(structure[n], bool) for n in switches},
    }
    if odd := [n for n, fit in fits.items() if not fit]:
        raise ConfigError(
            f"lora.from {name}: its {ADAPTER_FILE} has {odd[0]} {str(structure[odd[0]])[:80]!r}, "
            "which PEFT does not write; get the adapter again"
        )
    structure["lora_alpha"] = float(structure["lora_alpha"])
    structure["rank_pattern"] = {n: int(v) for n, v in structure["rank_pattern"].items()}
    structure["alpha_pattern"] = {n: float(v) for n, v in structure["alpha_pattern"].items()}
    for n in lists:
        structure[n] = sorted(structure[n]) if isinstance(structure[n], list) else structure[n]
    if config.get("layers_to_transform") not in (None, []):
        structure["target_modules"] = _build_layer_pattern(config, structure["target_modules"])
    return structure


def _is_number(value: Any) -> bool:
    """Return True for a finite positive int or float, but not for a bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _is_string_list(value: Any) -> bool:
    """Return True for a list that contains only strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _build_layer_pattern(config: dict[str, Any], targets: Any) -> Any:
    """Build a regular expression that matches `target_modules` in `layers_to_transform` only.

    PEFT takes a module's layer number from its name. It is the last number that follows one of
    `layers_pattern` or, without `layers_pattern`, any name. A string `targets` is returned
    unchanged, because PEFT then ignores `layers_to_transform`.
    """
    if isinstance(targets, str):  # PEFT ignores the layers of a pattern
        return targets
    numbers, lists = config["layers_to_transform"], config.get("layers_pattern") or r"[^.]*"
    numbers = numbers if isinstance(numbers, list) else [numbers]
    name = "|".join(lists) if isinstance(lists, list) else lists
    layer = rf"(?:{name})\.(?:{'|'.join(str(n) for n in numbers)})\."
    later = rf"(?!(?:.*\.)?(?:{name})\.\d+\.)"
    return rf"(?:.*\.)?{layer}{later}(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})"


def _check_task(source: AdapterSource, cfg: FinetuneConfig) -> None:
    """Raise a ConfigError if either the adapter or the run, but not both, is for a reward model."""
    is_reward = source.config.get("task_type") == "SEQ_CLS"
    preference = getattr(cfg, "preference", None)
    wants_reward = preference is not None and preference.loss_type == "reward"
    if is_reward != wants_reward:
        kinds = ("a causal language model", "a reward model (task_type SEQ_CLS)")
        raise ConfigError(
            f"lora.from {source.name} is an adapter of {kinds[is_reward]}, this run trains "
            f"{kinds[wants_reward]}; merge the adapter into its base (toolkit consolidate --merge) "
            "and give that as model.name_or_path"
        )


# ---- Finding it


@contextlib.contextmanager
def open_adapter(lora: LoraConfig) -> Iterator[AdapterSource]:
    """Yield the adapter that `lora.from` names; use it as a context manager.

    `lora.from` may be a PEFT folder, a checkpoint or run of this toolkit, its URL, or a Hub id.
    From a URL, the checkpoint is copied to a temporary folder, which is deleted when the context
    ends. From the Hub, the adapter is downloaded to the cache.

    Raises:
        ConfigError: there is no such adapter, it is damaged, or it has a form that cannot be
            continued. Any `ToolkitError` inside the context is converted too.
    """
    name = str(lora.from_)
    with contextlib.ExitStack() as stack:
        try:
            path = Path(name).expanduser()
            if not is_url(name) and not path.is_dir():
                path = _find_on_hub(name, lora.revision)
                yield _read_peft_folder(name, path, hub=True)
                return
            if not is_url(name) and (path / ADAPTER_FILE).is_file():
                yield _read_peft_folder(name, path)
                return
            if not is_url(name):
                _check_folder_kind(name, path)
            local = stack.enter_context(local_copy(name if is_url(name) else path))
            yield _read_toolkit_checkpoint(name, local)
        except ConfigError:
            raise
        except ToolkitError as error:
            raise ConfigError(f"lora.from {name}: {error}") from error


def _find_on_hub(name: str, revision: str | None) -> Path:
    """Return the folder of a Hub adapter in the HF cache, and download the adapter if necessary.

    Raises:
        ConfigError: the name is a path, or the Hub has no such adapter or cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        raise ConfigError(f"lora.from {name} is a file; give the folder that holds it")
    if is_path(name) or (len(path.parts) == 2 and path.parent.is_dir()):
        hint = commit.suggest_paths(path, lambda p: (p / ADAPTER_FILE).is_file())
        raise ConfigError(
            f"lora.from {name}: there is no such folder (current folder: {Path.cwd()}){hint}"
        )
    options: dict[str, Any] = {
        "revision": revision,
        "local_files_only": bool(hub_unreachable_reason()),
    }
    try:
        config = cached_file(name, ADAPTER_FILE, **options)
        options["_raise_exceptions_for_missing_entries"] = False
        for file in (ADAPTER_WEIGHTS, export_manifest.FILE):
            cached_file(name, file, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"lora.from {name} is neither a folder here (current folder: {Path.cwd()}) nor an "
            f"adapter that the Hub gives: {hub_unreachable_reason() or one_line(error)}"
        ) from error
    return Path(str(config)).parent


def _read_peft_folder(name: str, folder: Path, *, hub: bool = False) -> AdapterSource:
    """Describe the adapter in a PEFT folder, which is in the cache of the Hub if `hub` is True.

    If this toolkit exported the folder, its files are compared with the export's manifest.

    Raises:
        ConfigError: the weights are missing or a pickle, or the adapter cannot be continued.
        ExportError: a file differs from the manifest.
        LoadingError: the header of the weights file is damaged.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise ConfigError(
                f"lora.from {name} has its weights in {_PICKLE}, a pickle, which can run code and "
                f"is not read; load it once with PEFT and save_pretrained it as {ADAPTER_WEIGHTS}"
            )
        is_assets = commit.is_committed(folder.parent) and folder.name == "hf"
        hint = f"; give the checkpoint: {folder.parent}" if is_assets else ""
        raise ConfigError(f"lora.from {name} has a {ADAPTER_FILE} and no {ADAPTER_WEIGHTS}{hint}")
    try:
        config = read_adapter_config(folder)
    except ExportError as error:
        raise ConfigError(f"lora.from {name} cannot be continued: {error}") from error
    read_header(folder / ADAPTER_WEIGHTS)  # raises a LoadingError if the file is damaged
    keys = ("base_model_name_or_path", "revision")
    base = dict(zip(("name_or_path", "revision"), map(config.get, keys), strict=True))
    origin: dict[str, Any] = {}
    if (folder / export_manifest.FILE).is_file():
        origin = _read_checked_origin(folder)
    adapter = _get_dict(origin, "adapter")
    base["digest"] = _get_dict(adapter, "base").get("digest")
    stage = {
        "name": name if hub else folder.resolve().name,
        "hub_id": name if hub else None,
        "revision": folder.name if hub else None,  # the commit
        "sha256": commit.hash_file(folder / ADAPTER_WEIGHTS),
        "step": origin.get("step"),
        "continued": _copy_stage_entry(adapter.get("continued")),
    }
    return AdapterSource(name, folder, config, base, _drop_none(stage))


def _read_checked_origin(folder: Path) -> dict[str, Any]:
    """Hash the weights and config of an exported adapter; return the manifest's entry `origin`.

    That entry describes the checkpoint and run from which the adapter was exported.

    Raises:
        ExportError: weights or config are not in the manifest, or differ from it in size or hash.
    """
    manifest = export_manifest.read(folder)
    for name in (ADAPTER_WEIGHTS, ADAPTER_FILE):
        entry, size = manifest["files"].get(name), (folder / name).stat().st_size
        if entry is None or size != entry["size"]:
            raise ExportError(f"{folder / name} is not the file of {export_manifest.FILE}")
        if hash_file_part(folder / name, 0, size) != entry["xxh3"]:
            raise ExportError(
                f"{folder / name} is damaged: it has not the hash of {export_manifest.FILE}; "
                "copy it again, or export again"
            )
    return manifest["origin"]


def _read_toolkit_checkpoint(name: str, path: Path) -> AdapterSource:
    """Describe the adapter in a checkpoint of this toolkit, or in the newest checkpoint of a run.

    Raises:
        ConfigError: the checkpoint was written by another tool, or its model has no adapters.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    source = find_source(path)
    if source.checkpoint is None:
        raise ConfigError(f"lora.from {name} is a checkpoint of another tool; give a PEFT folder")
    if not source.is_adapter:
        raise ConfigError(
            f"lora.from {name} is a run of the whole model, without adapters; export it (toolkit "
            f"consolidate {name} --output DIR), set model.name_or_path: DIR and lora.r"
        )
    try:
        config = read_adapter_config(source.hf)
    except ExportError as error:
        raise ConfigError(f"lora.from {name} cannot be continued: {error}") from error
    entry = read_base_entry(source)
    checkpoint = source.checkpoint
    is_run_of = checkpoint.parent.name == commit.CHECKPOINTS
    stage = {
        "name": (checkpoint.parent.parent if is_run_of else checkpoint).resolve().name,
        "sha256": commit.hash_file(checkpoint / commit.MANIFEST),
        "step": source.manifest.get("step"),
        "continued": _copy_stage_entry(entry.get("continued")),
    }
    return AdapterSource(name, checkpoint, config, entry, _drop_none(stage), source)


def _check_folder_kind(name: str, path: Path) -> None:
    """Raise a ConfigError if a folder without an adapter config cannot be `lora.from`.

    Call it only if the folder has no adapter_config.json. An error is raised for adapter weights;
    for a full model, unless it is a checkpoint of the toolkit; and for a folder of PEFT folders,
    which the error suggests, unless it is a checkpoint or a run.
    """
    if (path / _PICKLE).is_file() or (path / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"lora.from {name} has no {ADAPTER_FILE}; complete the PEFT folder")
    is_model = (path / "config.json").is_file() and source_dtypes(path) is not None
    if is_model and not commit.is_committed(path):
        raise ConfigError(
            f"lora.from {name} is a model, not an adapter (a merged one is a model, too); set "
            f"model.name_or_path: {name} and lora.r for new adapters on it"
        )
    is_own = commit.is_committed(path) or (path / commit.CHECKPOINTS).is_dir()
    below = sorted(p.parent for p in path.glob(f"*/{ADAPTER_FILE}"))
    if below and not is_own:
        near = " or ".join(map(str, below[-3:]))
        raise ConfigError(f"lora.from {name} has no {ADAPTER_FILE}; did you mean {near}?")


def _get_dict(content: Any, name: str) -> dict[str, Any]:
    """Return `content[name]` if it is a dict, otherwise an empty dict."""
    value = content.get(name) if isinstance(content, dict) else None
    return value if isinstance(value, dict) else {}


def _copy_stage_entry(entry: Any, depth: int = 0) -> dict[str, Any] | None:
    """Copy the valid fields of a manifest entry that describes an earlier adapter.

    The entry may come from anybody. Its field `continued` describes the adapter that this one
    continued, and is copied recursively.

    Returns:
        Field -> value; None if `entry` is not a dict, or at depth `_MOST_STAGES`.
    """
    if not isinstance(entry, dict) or depth == _MOST_STAGES:
        return None
    kinds = {"name": str, "hub_id": str, "revision": str, "sha256": str, "step": int}
    entries = {n: entry[n] for n, kind in kinds.items() if isinstance(entry.get(n), kind)}
    return _drop_none(entries | {"continued": _copy_stage_entry(entry.get("continued"), depth + 1)})


def _drop_none(entry: dict[str, Any]) -> dict[str, Any]:
    """Copy `entry` without the keys whose value is None."""
    return {name: value for name, value in entry.items() if value is not None}


# ---- Its base


def check_same_base(cfg: FinetuneConfig, source: AdapterSource) -> str:
    """Raise a ConfigError if the adapter belongs to another base model than `cfg` names.

    Digests of the weights are compared if both are known, otherwise the Hub ids. If one model is a
    local path without a digest, nothing is known and nothing is raised. Reads 16 kB per tensor of
    each base model that is on this machine.

    Returns:
        The end of a log line: the base is the same (by digest or name), or it is not known.

    Raises:
        ConfigError: the digests or, if one is unknown, the Hub ids differ.
    """
    expected, base_name = source.base.get("digest"), str(source.base.get("name_or_path") or "")
    advice = f"set model.name_or_path: {base_name or 'its base'}, or give another lora.from"
    digest = _compute_run_base_digest(cfg)
    by = "digest"
    if expected is None and digest is not None:
        expected, by = _compute_adapter_base_digest(source), "weights on this machine"
    if expected is not None and digest is not None:
        if expected != digest:
            raise ConfigError(
                f"lora.from {source.name} is an adapter of another base: {base_name or 'its base'} "
                f"(digest {str(expected)[:20]}), and model.name_or_path {cfg.model.name_or_path} "
                f"has the digest {digest[:20]}; {advice}"
            )
        return f"its base is this one (by the {by})"
    ours = cfg.model.name_or_path
    both_of_hub = base_name and not is_path(base_name) and not is_path(ours)
    if both_of_hub and base_name != ours:
        raise ConfigError(
            f"lora.from {source.name} is an adapter of {base_name}, and model.name_or_path is "
            f"{ours}; {advice}. If both have the same weights, change base_model_name_or_path "
            f"in its {ADAPTER_FILE}"
        )
    if both_of_hub:
        return "its base is this one (by the name)"
    return (
        f"whether its base, {base_name or 'which it does not name'}, is {ours} is not known: "
        "names and shapes fit"
    )


def _compute_run_base_digest(cfg: FinetuneConfig) -> str | None:
    """Compute the weight digest of the run's base; None if its weights are not on this machine.

    For random initial weights, the text "random, seed N" takes the place of a digest.
    """
    if cfg.model.init == "random":
        return f"random, seed {cfg.seed}"
    return _compute_local_digest(cfg.model.name_or_path, cfg.model.revision)


def _compute_adapter_base_digest(source: AdapterSource) -> str | None:
    """Compute the weight digest of the adapter's base; None if it is not on this machine."""
    base_name, revision = source.base.get("name_or_path"), source.base.get("revision")
    return None if not base_name else _compute_local_digest(str(base_name), revision)


def _compute_local_digest(name: str, revision: str | None) -> str | None:
    """Compute the weight digest of a folder or cached Hub model.

    None if the model is not on this machine, or if its weights are incomplete or damaged.
    """
    try:
        return base_digest(local_folder(name, revision, ask=False))
    except ToolkitError:  # missing or incomplete, so the digest is unknown
        return None


def format_chain(stage: dict[str, Any]) -> str:
    """Format an adapter and those that it continued: "b (step 9), which continued a (step 5)".

    `stage` is the entry of the newest adapter; `continued` in it is the entry of the one before.
    """
    parts = []
    entry: Any = stage
    while isinstance(entry, dict):
        step = f" (step {entry['step']:,})" if isinstance(entry.get("step"), int) else ""
        parts.append(f"{entry.get('name', 'an adapter')}{step}")
        entry = entry.get("continued")
    return ", which continued ".join(parts)


def format_settings(lora: LoraConfig) -> str:
    """Format rank, alpha and targets of an adapter for a log line; long lists are cut."""
    targets = lora.target_modules
    target_text = targets if isinstance(targets, str) else ", ".join(targets)
    more = f" and {', '.join(lora.target_parameters)}" if lora.target_parameters else ""
    return f"rank {lora.r}, alpha {lora.lora_alpha:g}, targets {target_text:.120}{more:.80}"
