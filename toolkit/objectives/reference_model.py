"""A reference of preference tuning that is not the model that training starts from.

`preference.reference` names a model, or a PEFT adapter of the run's base model. It is built next to
the trained model before the first step, sharded like it, and deleted once the reference values are
computed. See [Note: life of the reference] in `toolkit.objectives.reference`.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.adapters.lora import add_adapters, prepare_adapters
from toolkit.adapters.peft_folder import (
    attach_adapters,
    describe_other_scaling,
    map_file_keys,
    sum_tensor_bits,
)
from toolkit.adapters.values import copy_from_main
from toolkit.checkpoint.adapter_source import (
    AdapterSource,
    check_same_base,
    open_adapter,
    parse_adapter_settings,
)
from toolkit.config.lora import LoraConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import ModelConfig
from toolkit.data.tokens.tokenizer import find_model_tokenizer, load_tokenizer
from toolkit.errors import ConfigError, ModelError, ToolkitError
from toolkit.formats import ADAPTER_FILE, ADAPTER_WEIGHTS, local_folder, read_tensor
from toolkit.formats.hub_access import hub_unreachable_reason
from toolkit.loading import load_or_init
from toolkit.mesh import Mesh
from toolkit.models import build_on_meta
from toolkit.models.attention import attend_within_documents
from toolkit.models.causal_lm import vocabulary_size
from toolkit.objectives.frozen_models import check_loadable
from toolkit.objectives.objective import frozen_sharding
from toolkit.sharding import Sharded, apply_fsdp


@contextmanager
def _errors_name_setting(name: str) -> Iterator[None]:
    """Raise the errors inside the context as a ConfigError that names `preference.reference`."""
    try:
        yield
    except ToolkitError as error:
        text = str(error).removeprefix(f"lora.from {name}").lstrip(": ")
        text = text.replace("lora.from", "preference.reference")
        setting_error = ConfigError(f"preference.reference {name}: {text}")
        if hasattr(error, "already_reported"):  # every rank raises it
            ranks.mark_collective(setting_error)
        raise setting_error from error


def is_adapter(name: str) -> bool:
    """Return True if a folder or a Hub repository holds an adapter in PEFT's format."""
    path = Path(name).expanduser()
    if path.is_dir():
        return (path / ADAPTER_FILE).is_file()
    if path.exists() or path.is_absolute() or name.startswith("."):
        return False  # no Hub id; reported by the reader of models
    try:
        file = cached_file(
            name,
            ADAPTER_FILE,
            local_files_only=bool(hub_unreachable_reason()),
            _raise_exceptions_for_missing_entries=False,
        )
    except (OSError, ValueError):
        return False  # no such repository; reported by the reader of models
    return file is not None


def _model_settings(cfg: PreferConfig) -> ModelConfig:
    """Return the settings of the reference model, or of its base if it is an adapter."""
    assert cfg.preference.reference is not None
    if is_adapter(cfg.preference.reference):
        # A base in float8 stays one, so that model and reference have the same base.
        return replace(cfg.model, dtype="auto", frozen_parameters=[], kernels="none")
    return replace(
        cfg.model,
        name_or_path=cfg.preference.reference,
        init="pretrained",
        experts_implementation="auto",  # it may have no experts
        dtype="auto",
        tokenizer_name_or_path=None,
        resize_embeddings=False,
        frozen_parameters=[],
        revision=None,
        kernels="none",
        float8="none",
    )


def _adapter_settings(cfg: PreferConfig) -> LoraConfig | None:
    """Return the LoRA settings of the reference adapter; None if the reference is a model.

    The base is stored in 4 bits if that of the run is. Float8 is a setting of the model.
    """
    name = cfg.preference.reference
    assert name is not None
    if not is_adapter(name):
        return None
    lora = LoraConfig(
        from_=name,
        load_in_4bit=cfg.lora.load_in_4bit,
        bnb_4bit_use_double_quant=cfg.lora.bnb_4bit_use_double_quant,
        quantize_moe_experts=cfg.lora.quantize_moe_experts,
    )
    with open_adapter(lora) as source:
        return lora.with_structure(parse_adapter_settings(source.config, name))


def reference_settings(cfg: PreferConfig) -> tuple[ModelConfig, LoraConfig | None]:
    """Find the settings of the model in `preference.reference`.

    Returns:
        Settings of the model; and those of the adapter on it, None if the reference is a model.

    Raises:
        ConfigError: there is no such model or adapter.
    """
    assert cfg.preference.reference is not None
    with _errors_name_setting(cfg.preference.reference):
        return _model_settings(cfg), _adapter_settings(cfg)


# ---- Checks before the run


def check_reference(
    cfg: Any,
    model: PreTrainedModel,
    model_cfg: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    files_only: bool = False,
) -> str:
    """Check that the model or adapter in `preference.reference` can be the reference of a run.

    Collective; call it before weights are read. Reads configs, tokenizers and headers, and 16 kB
    per tensor of the base of an adapter.

    Args:
        cfg: settings of the run, of any kind.
        model: the base model of the run on meta, without adapters; it is not changed.
        model_cfg: settings of the model, with the tokenizer of the run.
        device: the device that evaluates the reference.
        files_only: check only files of this machine, and start no device.

    Returns:
        A log line; empty if the run has no such reference.

    Raises:
        ConfigError: there is no such model or adapter, it belongs to another base model, or it has
            another vocabulary.
    """
    name = cfg.preference.reference if isinstance(cfg, PreferConfig) else None
    if name is None:
        return ""
    path = Path(name).expanduser()
    if not path.is_dir() and (path.exists() or path.is_absolute() or name.startswith(".")):
        problem = "this is a file" if path.exists() else "there is no such folder"
        raise ConfigError(
            f"preference.reference {name}: expected the folder of a model or adapter, or a Hub id; "
            f"{problem} (current folder: {Path.cwd()})"
        )
    if files_only and not path.is_dir():
        return ""
    settings, lora = ranks.on_main(lambda: reference_settings(cfg))
    if lora is None:
        with _errors_name_setting(name):
            reference = check_loadable(settings, cfg, device)
        return ranks.on_main(lambda: _check_vocabulary(reference, settings, model_cfg))
    return ranks.on_main(lambda: _check_adapter(cfg, lora, model, files_only=files_only))


def _check_adapter(
    cfg: PreferConfig, lora: LoraConfig, model: PreTrainedModel, *, files_only: bool
) -> str:
    """Check that an adapter belongs to the base model of the run; return a log line.

    Raises:
        ConfigError: it belongs to another base model or to a reward model, it is one of DoRA and
            the base has 4 bits, or this run would compute something else with it than PEFT.
    """
    name = str(lora.from_)
    with _errors_name_setting(name), open_adapter(lora) as source:
        if source.config.get("task_type") == "SEQ_CLS":
            raise ConfigError("is an adapter of a reward model; give one of a causal LM")
        if lora.use_dora and lora.load_in_4bit:
            raise ConfigError(
                "is a DoRA adapter, which needs the rows of the weights, and lora.load_in_4bit "
                "packs them; merge it into its base and give that model, or remove the setting"
            )
        base = check_same_base(cfg, source)
        if not files_only:
            adapted = add_adapters(copy.deepcopy(model), lora)
            _map_tensors(source, adapted)
            loaded = attach_adapters(copy.deepcopy(model), source.config)
            if problem := describe_other_scaling(loaded, adapted):
                raise ConfigError(problem)
        return f"reference  the adapter {name}; {base}"


def _check_vocabulary(
    reference: PreTrainedModel, settings: ModelConfig, model_cfg: ModelConfig
) -> str:
    """Check that a reference model has the vocabulary of the run; return a log line.

    Args:
        reference: the reference model, on meta.
        settings: its settings.
        model_cfg: settings of the trained model, with its tokenizer.

    Raises:
        ConfigError: its vocabulary is not that of the run.
    """
    with _errors_name_setting(settings.name_or_path):
        return _compare_vocabularies(reference, settings, load_tokenizer(model_cfg))


def _compare_vocabularies(reference: PreTrainedModel, settings: ModelConfig, tokenizer: Any) -> str:
    """Raise a ConfigError if a reference has other token ids than `tokenizer`; see above."""
    rows = vocabulary_size(reference)
    if tokenizer is not None and rows < len(tokenizer):
        raise ConfigError(
            f"expected a vocabulary of at least {len(tokenizer):,} tokens, those of the run's "
            f"tokenizer, and its embedding has {rows:,} rows; give a model of the same tokenizer"
        )
    theirs = load_tokenizer(find_model_tokenizer(settings))
    if tokenizer is None or theirs is None:
        return f"reference  {settings.name_or_path}, {rows:,} rows of the embedding"
    ids = theirs.get_vocab()
    differing = [t for t, number in tokenizer.get_vocab().items() if ids.get(t) != number]
    if differing:
        token = min(differing, key=tokenizer.get_vocab().__getitem__)
        raise ConfigError(
            f"expected the tokenizer of the run, and {len(differing):,} of {len(tokenizer):,} "
            f"tokens have another id or none there, such as {token!r}; give a model of the same "
            "tokenizer"
        )
    return f"reference  {settings.name_or_path}, with the tokenizer of the run"


def _map_tensors(source: AdapterSource, adapted: Any) -> dict[str, str]:
    """Map the keys of an adapter's file to the names of its parameters in `adapted`.

    Raises:
        ConfigError: the file lacks tensors, has others, has other shapes, or is no PEFT folder.
        ExportError: two of its tensors are one parameter in `adapted`, and have other values.
    """
    if source.checkpoint is not None:
        raise ConfigError(
            f"is a checkpoint of this toolkit; export it (toolkit consolidate {source.name} "
            "--output DIR) and give the export"
        )
    keys, entries = map_file_keys(adapted), source.tensors()
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    differing = sorted(keys.keys() ^ entries.keys())
    differing += [
        key
        for key in sorted(keys.keys() & entries.keys())
        if tuple(entries[key].shape) != tuple(parameters[keys[key]].shape)
    ]
    if differing:
        raise ConfigError(
            f"{ADAPTER_WEIGHTS} and the run's base model with this adapter differ in "
            f"{len(differing)} tensors, such as {differing[0]}; give an adapter of "
            "model.name_or_path, or merge it into its base and give that model"
        )
    counts = Counter(keys.values())
    shared = {key: name for key, name in keys.items() if counts[name] > 1}
    sum_tensor_bits(shared, entries, {name: p.dtype for name, p in parameters.items()})
    return keys


def reference_digest(cfg: PreferConfig, run_base: str) -> str:
    """Compute the digest of the weights in `preference.reference`. Called by one process.

    Args:
        cfg: settings of the run.
        run_base: digest of the run's base model.
    """
    name = cfg.preference.reference
    assert name is not None
    with _errors_name_setting(name):
        lora = _adapter_settings(cfg)
        if lora is None:
            return base_digest(local_folder(name), name)
        with open_adapter(lora) as source:
            content = hashlib.sha256(run_base.encode())
            for file in (ADAPTER_FILE, ADAPTER_WEIGHTS):
                content.update((source.folder / file).read_bytes())
            return content.hexdigest()


# ---- The model


def shard_reference(cfg: PreferConfig, mesh: Mesh) -> Sharded:
    """Build the model in `preference.reference` on meta, and shard it over the ranks. Collective.

    Its parameters have no values yet, and are gathered for one forward at a time. If `data.packing`
    is `auto`, the model is prepared for packed rows.

    Raises:
        ConfigError: there is no such model or adapter, or its attention cannot separate the
            documents of packed rows.
    """
    settings, lora = ranks.on_main(lambda: reference_settings(cfg))
    has_borders = cfg.data.packing != "none" or cfg.sharding.context_parallel > 1
    return _shard(cfg, mesh, settings, lora, has_borders=has_borders)


def _shard(
    cfg: PreferConfig,
    mesh: Mesh,
    settings: ModelConfig,
    lora: LoraConfig | None,
    *,
    has_borders: bool,
) -> Sharded:
    """Build a model on meta, with an adapter if `lora` is given, and shard it. Collective.

    `has_borders`: batches tell the documents of a row apart by their borders, without a mask.
    """
    model: Any = build_on_meta(settings)
    if has_borders:
        try:
            attend_within_documents(model, mesh.context)
        except ModelError as error:
            raise ConfigError(
                f"preference.reference {cfg.preference.reference}: rows are packed, and {error}, "
                "which cannot separate the documents of a row; set data.packing: none"
            ) from error
    model = prepare_adapters(model, lora, cfg.sharding.param_dtype)
    if lora is None:
        # New adapters get their first values as trained parameters; `load_reference` freezes them.
        model.requires_grad_(False)
    return apply_fsdp(model.eval(), mesh, frozen_sharding(cfg.sharding))


def load_reference(cfg: PreferConfig, mesh: Mesh, *, has_borders: bool) -> Sharded:
    """Build, shard and load the model or adapter in `preference.reference`. Collective.

    Costs the memory of a second model, sharded, until it is deleted.

    Args:
        cfg: settings of the run.
        mesh: the ranks of the run.
        has_borders: whether batches have the borders of documents instead of a mask.

    Raises:
        ToolkitError: the model or adapter cannot be loaded, or cannot evaluate packed rows.
    """
    settings, lora = ranks.on_main(lambda: reference_settings(cfg))
    sharded = _shard(cfg, mesh, settings, lora, has_borders=has_borders)
    load_or_init(sharded, settings, torch.device(mesh.device_type), cfg.seed)
    if lora is not None:
        _load_adapter(sharded.model, lora)
        sharded.model.requires_grad_(False)
    return sharded


def _load_adapter(model: Any, lora: LoraConfig) -> None:
    """Load the values of a PEFT folder into the adapters of a sharded model. Collective.

    Rank 0 reads the file. Every tensor of the adapter must be in it.
    """

    def read() -> dict[str, torch.Tensor]:
        if ranks.rank():
            return {}
        with _errors_name_setting(str(lora.from_)), open_adapter(lora) as source:
            keys, entries = _map_tensors(source, model), source.tensors()
            return {name: read_tensor(entries[key]) for key, name in keys.items()}

    values = ranks.on_all(read)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in ranks.broadcast(sorted(values)):
        parameter = parameters[name]
        value = values.get(name)
        copy_from_main(parameter, None if value is None else value.to(parameter.dtype))
