"""The Hugging Face folder, read with suspicion: config, weight files, index, and their assets."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.hub import is_offline_mode

from toolkit import ranks
from toolkit.config.settings import check_folder
from toolkit.errors import LoadingError, ModelError, one_line
from toolkit.formats.hub_access import say_unreachable, why_unreachable
from toolkit.formats.named_assets import vocabulary_files
from toolkit.formats.plain_files import is_plain_name, plain_file
from toolkit.formats.safetensors_files import DTYPE_NAMES, read_header
from toolkit.formats.stored_tensors import StoredTensor
from toolkit.parsing import parse_json, read_bounded, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"  # of a PEFT folder
SOURCE_FILE = "source.json"  # in a checkpoint's hf/ folder only, never exported
NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Settings that say how many layers predict more tokens than the next, which transformers does not
load."""
_AGAIN = "copy or download the file again"

# Bounds of what transformers parses without any: far above what any model has.
_CONFIG_BYTES = 4 * 2**20
_LONGEST_NAME = 255  # bytes, of file systems
_VOCABULARY_BYTES = 256 * 2**20
MAX_TEMPLATE_BYTES = 2**18  # of a chat template
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_DEPTHS = r"(^|_)(layers?|blocks?|depths?|stages?|pattern)(_types?)?$|^layers_block_"
_COUNTS = ((re.compile(_DEPTHS), 500), (re.compile(r"(^|_)experts$|^num_labels$"), 100_000))

# Files that an export carries beside the weights, where the source has them.
ASSET_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("tiktoken.model", "spm.model", "sentencepiece.model", "emoji.json", "dict.txt"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *(_TEMPLATE, "chat_template.json"),
)
_BY_RUST = ("tokenizer.json", "vocab.json", "tekken.json", "emoji.json")  # large, and flat


@dataclass
class HFAssets:
    """Contents of a Hugging Face folder beside the trained weights."""

    config: dict[str, Any]  # config.json as the source has it
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, chat template, generation config: file name -> content."""
    source: dict[str, str] | None = None
    """Key -> safetensors dtype of the source checkpoint's tensors; None for a random start."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> name of the parameter that it is tied to and stored under."""
    origin: dict[str, Any] | None = None
    """Source of the tensors that no parameter takes, and that exports copy from there:
    `name_or_path`, `revision` and `digest` of its weights. None: there are none."""
    resized: dict[str, int] = field(default_factory=dict)
    """Parameter that `resize_embeddings` gave more or fewer rows -> its rows in the source."""
    # From here on in memory only.
    conversions: list[Any] = field(default_factory=list)
    """Transformers' mapping from source keys to parameters, computed on the unsharded model."""
    model_class: type[PreTrainedModel] | None = None  # before sharding changes it
    whole: tuple[type[PreTrainedModel], Any] | None = None
    """Class and config of the whole checkpoint, where the model is its text part alone."""
    stored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of `source` -> keys of its parts in the files, of what is stored in fewer bits."""
    reader: Any = None  # transformers' quantiser, which puts them together
    name_or_path: str | None = None  # the source: a Hub id, or a folder's whole path
    revision: str | None = None
    folder: Path | None = None  # where the source's files are
    head_left_out: list[str] = field(default_factory=list)
    """Keys of a causal LM's head, in whose place a reward model has its own; not in `source`."""
    drawn: list[str] = field(default_factory=list)
    """Parameters that the source does not have: they begin at random."""
    kernels: str = "none"  # whose the layers compute with (`model.kernels`)
    not_in_4_bits: dict[str, list[str]] = field(default_factory=dict)
    """Why -> names of matrices that quantising left alone."""
    drawn_from: int | None = None  # seed of a random start, once it is drawn
    digest: str | None = None  # what identifies the source's weights, once it was asked for
    continued: dict[str, Any] | None = None
    """Stage that the adapters of a run continue, as manifests describe it; None: new adapters."""
    base_sums: dict[str, int] | None = None
    """Checksum of each tensor of a loaded base under adapters, as memory holds it."""

    def save(self, folder: Path) -> None:
        """Write the assets into an existing `folder`, for `HFAssets.load`."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        source = {"keys": self.source, "tied": self.tied, "origin": self.origin}
        (folder / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "HFAssets":
        """Read the assets of a checkpoint's `hf/` folder, or of any Hugging Face folder."""
        file, config, files = folder / SOURCE_FILE, read_config(folder), asset_files(folder)
        if not file.is_file():
            return cls(config, files, source_dtypes(folder))
        content = read_json(file, ModelError, strict=True)
        content = content if isinstance(content, dict) else {}
        keys: Any = content.get("keys")
        tied: Any = content.get("tied")
        origin: Any = content.get("origin")
        are_maps = (keys is None or _are_texts(keys)) and _are_texts(tied)
        if not (are_maps and isinstance(origin, dict | None)):
            raise ModelError(f"{file} does not map a source's key names to texts; {_AGAIN}")
        return cls(config, files, keys, tied, origin)


def _are_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(v, str) for v in table.values())


def assets_of(model: torch.nn.Module) -> HFAssets:
    """Return the assets that `build_on_meta` attached to `model`; ModelError without."""
    assets = getattr(model, "hf_assets", None)
    if not isinstance(assets, HFAssets):
        raise ModelError(
            f"{type(model).__name__} carries no Hugging Face assets; build it with build_on_meta"
        )
    return assets


def local_folder(name_or_path: str, revision: str | None = None, *, ask: bool = True) -> Path:
    """Return the folder of a checkpoint: itself, or the cached snapshot of a Hub id.

    With `ask`, config.json is downloaded where the cache has none; but not where the first part of
    the name is a folder here: a misspelt path must not become a stranger's model. ModelError where
    neither is.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    check_folder(str(name_or_path))
    beside = _is_beside(path)
    local = beside or not ask or bool(why_unreachable())
    try:
        file = cached_file(name_or_path, "config.json", revision=revision, local_files_only=local)
    except OSError as error:
        if not local:  # the repository may be there, and hold an adapter
            _refuse_adapter(_adapter_of_hub(name_or_path, revision), name_or_path)
        if beside and ask:
            raise ModelError(
                f"there is a folder {path.parent} here ({Path.cwd()}), and no {path.name} in it. "
                f"If a model of the Hub is meant: hf download {name_or_path}"
            ) from error
        why = why_unreachable() or str(error).strip().splitlines()[0]
        if type(error.__cause__).__name__ == "GatedRepoError":
            raise ModelError(
                f"{name_or_path} is gated on the Hub; ask for access on "
                f"https://huggingface.co/{name_or_path}, then `hf auth login`"
            ) from error
        raise ModelError(
            f"{name_or_path} is neither a folder here (current folder: {Path.cwd()}) nor a model "
            f"that the Hub gives: {why}"
        ) from error
    say_unreachable()
    return Path(str(file)).parent


def _adapter_of_hub(name: str, revision: str | None) -> Path:
    """Return the cached adapter_config.json of a repository; a path without a file: it has none."""
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        return Path(str(cached_file(name, ADAPTER_FILE, **options)))
    except OSError:  # no such repository, or the Hub fails: the caller says which
        return Path(ADAPTER_FILE, name)


def _is_beside(path: Path) -> bool:
    """Return whether a name that could be a Hub id's begins with a folder that is here."""
    return len(path.parts) == 2 and path.parent.is_dir()


def _refuse_adapter(file: Path, name: str) -> None:
    """Refuse a PEFT folder that is given as a model, and say what to set (ModelError)."""
    if not file.is_file():
        return
    content = read_json(file, ModelError)
    named = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    base = named if isinstance(named, str) and named else "BASE"
    raise ModelError(
        f"{name} is an adapter of {base}, not a model; set model.name_or_path: {base} and "
        f"lora.from: {name}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; ModelError where there is none, it is no JSON object, or
    it asks for more layers, experts or labels than any model has.
    """
    file = folder / "config.json"
    if not file.is_file():
        _refuse_adapter(folder / ADAPTER_FILE, str(folder))
        raise ModelError(
            f"{folder} has no config.json; a Hugging Face checkpoint folder is expected, as "
            "save_pretrained and `toolkit consolidate` write it"
        )
    config = parse_json(read_bounded(file, _CONFIG_BYTES, ModelError), file, ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(config).__name__}; {_AGAIN}")
    names = config.get("architectures")
    if not isinstance(names, list | None) or not all(isinstance(n, str) for n in names or ()):
        raise ModelError(f"{file} has architectures that are no list of names; {_AGAIN}")
    for key, kind in (("model_type", str), ("auto_map", dict)):
        if not isinstance(config.get(key), kind | None):
            found = type(config[key]).__name__
            raise ModelError(f"{file} has a {key} of type {found}, {kind.__name__} is expected")
    for key, value in nested_items(config):
        count = len(value) if isinstance(value, list | str) else value
        for pattern, most in _COUNTS:
            if isinstance(count, int | float) and count > most and pattern.search(key):
                raise ModelError(f"{file} has {key} of {count:,}; at most {most:,} is expected")
    return config


def nested_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of nested objects."""
    if isinstance(value, dict):
        yield from value.items()
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from nested_items(inner)


def check_config(folder: Path) -> None:
    """Refuse a folder whose files transformers could not parse in bounds, before it reads any.
    A tokenizer's folder may have no config.json.
    """
    if (folder / "config.json").is_file():
        read_config(folder)
    if (template := folder / _TEMPLATE).is_file():
        read_bounded(template, MAX_TEMPLATE_BYTES, ModelError)
    for file in [folder / name for name in ASSET_FILES if name.endswith(".json")]:
        if file.is_file() and file.name not in _BY_RUST:
            read_json(file, ModelError)
        elif file.is_file() and (size := file.stat().st_size) > _VOCABULARY_BYTES:
            raise ModelError(
                f"{file} has {size:,} bytes, more than the {_VOCABULARY_BYTES:,} expected; {_AGAIN}"
            )


def obtain_assets(name_or_path: str, revision: str | None = None) -> None:
    """Download from a Hub id what an export carries beside the weights; else only what this process
    happens to read would be in the cache. Offline, or where the Hub fails, which is said, exports
    carry what the cache has.
    """
    path = Path(name_or_path).expanduser()
    if path.exists() or _is_beside(path):
        return
    why_unreachable()  # from here on the cache answers, at once
    wanted = ["config.json", *ASSET_FILES, f"{_TEMPLATES}/*.jinja", "*.py"]
    try:
        folder = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=wanted))
        more = [name for name in vocabulary_files(folder) if not (folder / name).is_file()]
        if more:  # of the same commit
            snapshot_download(name_or_path, revision=folder.name, allow_patterns=more)
    except (OSError, ValueError) as error:  # whether there is such a model, who reads it says
        if not is_offline_mode():
            ranks.log_once(
                f"WARNING: files of {name_or_path} were not downloaded ({one_line(error)}): "
                "exports carry what the cache has"
            )


def asset_files(folder: Path) -> dict[str, bytes]:
    """Return the files beside the weights: generation config, tokenizer, template, custom code."""
    names = [n for n in (*ASSET_FILES, *vocabulary_files(folder)) if (folder / n).is_file()]
    names += sorted(p.name for p in folder.glob("*.py") if p.is_file())
    names = [*dict.fromkeys(names)]
    files = {n: plain_file(folder, n, ModelError).read_bytes() for n in names}
    return _with_named_templates(folder, files)


def _with_named_templates(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files with the chat templates of a folder of them in tokenizer_config.json.

    transformers writes those that are not the default into a folder. It reads a list in that file
    as well, where no file has the default, and checkpoints and exports have no folders.
    """
    more = sorted((folder / _TEMPLATES).glob("*.jinja"))
    if not more or "tokenizer_config.json" not in files:
        return files
    texts = {}
    for file in more:
        content = plain_file(file.parent, file.name, ModelError).read_bytes()
        if len(content) > MAX_TEMPLATE_BYTES:
            raise ModelError(
                f"the chat template {file} has {len(content):,} bytes, more than the "
                f"{MAX_TEMPLATE_BYTES:,} expected"
            )
        texts[file.stem] = content
    if _TEMPLATE in files:
        texts["default"] = files[_TEMPLATE]
    config = parse_json(files["tokenizer_config.json"], folder, ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'tokenizer_config.json'} holds no JSON object")
    try:
        listed = [{"name": n, "template": t.decode()} for n, t in sorted(texts.items())]
    except UnicodeDecodeError as error:
        raise ModelError(f"a chat template of {folder} is no UTF-8: {error}") from error
    config["chat_template"] = listed
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    others = {name: content for name, content in files.items() if name != _TEMPLATE}
    return {**others, "tokenizer_config.json": text.encode()}


def weight_files(
    folder: Path, name_or_path: str | None = None, revision: str | None = None
) -> list[Path]:
    """Return the safetensors files of a checkpoint, as its index or its single file name them.

    From the Hub id `name_or_path` missing files may be downloaded. LoadingError for no weights,
    another format, or an index that names a file which is missing or outside the folder.
    """
    remote = name_or_path if name_or_path is not None and not Path(name_or_path).is_dir() else None
    if _obtain(folder, SINGLE_FILE, remote, revision):  # first, as transformers takes it
        names = [SINGLE_FILE]
    elif _obtain(folder, INDEX_FILE, remote, revision):
        names = sorted(set(read_index(folder / INDEX_FILE).values()))
        missing = [n for n in names if not _obtain(folder, n, remote, revision)]
        if missing:
            raise LoadingError(
                f"{folder / INDEX_FILE} names {len(missing)} file(s) that are not there: "
                f"{', '.join(missing[:5])}; complete the copy of {folder}"
            )
    else:
        kinds = (".bin", ".pt", ".pth", ".gguf")
        others = ", ".join(sorted(p.name for p in folder.glob("*") if p.suffix in kinds)[:3])
        _refuse_adapter(folder / ADAPTER_FILE, name_or_path or str(folder))
        if others:
            raise LoadingError(
                f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; it has {others}: load it "
                "once with transformers and save_pretrained it"
            )
        raise LoadingError(
            f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; complete the folder, or set "
            "model.init: random to start from random weights"
        )
    return [plain_file(folder, name, LoadingError) for name in names]


def read_weights(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of the given files; reads headers only. LoadingError for a damaged file,
    a tensor that two files hold, or one that is not where the index says.
    """
    entries: dict[str, StoredTensor] = {}
    files = list(files)
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise LoadingError(f"tensor {name} is in both {entries[name].file} and {file}")
            entries[name] = entry
    index = files[0].parent / INDEX_FILE if files else None
    if index is not None and index.is_file() and files[0].name != SINGLE_FILE:
        for name, where in read_index(index).items():
            if name not in entries or entries[name].file.name != where:
                raise LoadingError(
                    f"{index} places tensor {name} in {where}, which does not hold it; they are "
                    "not of one checkpoint. Copy all of them again"
                )
    return entries


def source_dtypes(folder: Path) -> dict[str, str] | None:
    """Return key -> safetensors dtype of the weights in `folder`; None where there are none."""
    try:
        entries = read_weights(weight_files(folder))
    except LoadingError:  # damage is said when the weights are asked for
        return None
    return {name: DTYPE_NAMES[entry.dtype] for name, entry in entries.items()}


def _obtain(folder: Path, name: str, remote: str | None, revision: str | None) -> bool:
    if len(name.encode()) > _LONGEST_NAME:
        return False
    if remote is None or (folder / name).is_file():
        return (folder / name).is_file()
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    return bool(cached_file(remote, name, **options))


def read_index(file: Path) -> dict[str, str]:
    """Return tensor -> file name of a safetensors index; LoadingError if it is none."""
    content = read_json(file, LoadingError, strict=True)
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not index or not _are_texts(index):
        raise LoadingError(
            f"{file} is not a safetensors index: its weight_map must map tensor names to file "
            f"names; {_AGAIN}"
        )
    for name in sorted(set(index.values())):
        if not is_plain_name(name):
            raise LoadingError(
                f"{file} names {name!r:.200}, which is not a file of its folder; get the "
                "checkpoint from a source that you trust"
            )
    return index
