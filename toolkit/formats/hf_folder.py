"""The Hugging Face folder: weight files and their index, what travels beside the weights, key
names.

Owns the safetensors headers and the index (read with suspicion: they come from outside), the assets
that an export needs (config, generation config, tokenizer, the key names of the source), and the
way from transformers' parameter names back to the names of the source checkpoint. Knows nothing of
DCP or of ranks.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.errors import ExportError, LoadingError, ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SOURCE_FILE = "source.json"  # in a checkpoint's hf/ folder only, never exported
_HEADER_LIMIT = 100 * 2**20  # safetensors' own limit
_FETCH_AGAIN = "copy or download the file again"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What an export carries beside the weights, where the source has it.
_ASSET_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "spm.model",
    "sentencepiece.model",
    "emoji.json",
    "dict.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: where its bytes are and what they mean."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte in the file."""
    nbytes: int


@dataclass
class HFAssets:
    """What a Hugging Face folder needs beside the trained weights.

    `conversions` (transformers' own mapping from source keys to parameters, computed on the
    unsharded model) and `model_class` (before sharding changes it) live in memory only: they follow
    from the config.
    """

    config: dict[str, Any]
    """config.json as the source has it."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, chat template, generation config: file name -> content."""
    source: dict[str, str] | None = None
    """Key -> safetensors dtype of the source checkpoint's tensors; None for a random start."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> name of the parameter that it is tied to and stored under."""
    resized: bool = False
    """Whether embedding and head have another number of rows than the source."""
    conversions: list[Any] = field(default_factory=list)
    model_class: type[PreTrainedModel] | None = None
    name_or_path: str | None = None
    """The source as the run names it: a Hub id, or a folder's whole path; in memory only."""
    revision: str | None = None
    folder: Path | None = None
    """Where the source's files are; in memory only."""
    drawn_from: int | None = None
    """Seed of a random start, once it is drawn; in memory only."""
    digest: str | None = None
    """What identifies the source's weights, once it was asked for; in memory only."""

    def save(self, folder: Path) -> None:
        """Write the assets into an existing `folder`; the next reader is `HFAssets.load`."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        source = {"keys": self.source, "tied": self.tied}
        (folder / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "HFAssets":
        """Read the assets of a checkpoint's `hf/` folder, or of any Hugging Face folder.

        Raises:
            ModelError: there is no readable config.json.
        """
        assets = cls(config=read_config(folder), files=asset_files(folder))
        if (folder / SOURCE_FILE).is_file():
            assets.source, assets.tied = _read_source(folder / SOURCE_FILE)
        else:
            assets.source = source_dtypes(folder)
        return assets


def _read_source(file: Path) -> tuple[dict[str, str] | None, dict[str, str]]:
    try:
        content = _strict_json(file.read_text("utf-8"))
        keys, tied = content["keys"], content["tied"]
        for table in ({} if keys is None else keys, tied):
            if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
                raise TypeError("names must map to texts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{file} does not hold the key names of a source checkpoint: {_said(error)}; "
            f"{_FETCH_AGAIN}"
        ) from error
    return keys, tied


def assets_of(model: torch.nn.Module) -> HFAssets:
    """Return the assets that `build_on_meta` attached to `model`.

    Raises:
        ModelError: there are none: the model was built in another way.
    """
    assets = getattr(model, "hf_assets", None)
    if not isinstance(assets, HFAssets):
        raise ModelError(
            f"{type(model).__name__} carries no Hugging Face assets; build it with build_on_meta"
        )
    return assets


# --------------------------------------------------------------------------------------------------
# Reading a folder
# --------------------------------------------------------------------------------------------------


def local_folder(name_or_path: str, revision: str | None = None, *, ask: bool = True) -> Path:
    """Return the folder of a checkpoint: itself, or the cached snapshot of a Hub id (downloaded).

    Args:
        ask: the Hub, where the cache has no such model.

    Raises:
        ModelError: neither a folder nor a repository that can be reached.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(
            f"model.name_or_path {name_or_path} is a file; give the folder that holds it"
        )
    from transformers.utils import cached_file

    try:
        found = cached_file(
            name_or_path, "config.json", revision=revision, local_files_only=not ask
        )
    except OSError as error:
        raise ModelError(
            f"{name_or_path} is neither a folder here (current folder: {Path.cwd()}) nor a model "
            "that "
            f"the Hub gives: {_first_line(error)}"
        ) from error
    return Path(str(found)).parent


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ModelError: there is none, or it is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no config.json; a Hugging Face checkpoint folder is expected, as "
            "save_pretrained or `toolkit consolidate` write it"
        )
    try:
        config = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}; {_FETCH_AGAIN}") from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{file} must hold a JSON object, got {type(config).__name__}; {_FETCH_AGAIN}"
        )
    return config


def asset_files(folder: Path) -> dict[str, bytes]:
    """Return what belongs beside the weights: generation config, tokenizer, template, custom
    code.
    """
    files = {n: (folder / n).read_bytes() for n in _ASSET_FILES if (folder / n).is_file()}
    files |= {p.name: p.read_bytes() for p in sorted(folder.glob("*.py")) if p.is_file()}
    return files


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of an entry of a folder itself, on any system: no path, no way out."""
    return (
        os.path.basename(name) == name
        and name not in ("", ".", "..")
        and not any(c in name for c in "\0\\/")
    )


def weight_files(
    folder: Path, name_or_path: str | None = None, revision: str | None = None
) -> list[Path]:
    """Return the safetensors files of a checkpoint, as its index or its single file name them.

    Args:
        folder: what `local_folder` returned.
        name_or_path: the Hub id, where missing files may be downloaded.

    Raises:
        LoadingError: no weights, a format other than safetensors, or an index that names a file
            which is missing or outside the folder.
    """
    remote = name_or_path if name_or_path is not None and not Path(name_or_path).is_dir() else None
    if _obtain(folder, SINGLE_FILE, remote, revision):  # first, as transformers takes it
        return [folder / SINGLE_FILE]
    if _obtain(folder, INDEX_FILE, remote, revision):
        index = _read_index(folder / INDEX_FILE)
        names = sorted(set(index.values()))
        for name in names:
            if not is_plain_name(name):
                raise LoadingError(
                    f"{folder / INDEX_FILE} names {name!r}, which is not a file of its folder; "
                    "only plain file names are read. Get the checkpoint again from a source that "
                    "you trust"
                )
        missing = [n for n in names if not _obtain(folder, n, remote, revision)]
        if missing:
            raise LoadingError(
                f"{folder / INDEX_FILE} names {len(missing)} file(s) that are not there: "
                f"{', '.join(missing[:5])}; complete the download or the copy of {folder}"
            )
        return [folder / n for n in names]
    others = sorted(
        p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    hint = (
        f"it has {', '.join(others[:3])}: load it once with transformers and save_pretrained it"
        if others
        else "complete the folder, or set model.init: random to start from random weights"
    )
    raise LoadingError(f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; {hint}")


def read_weights(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """Return every tensor of the given files. Reads headers only.

    Raises:
        LoadingError: a damaged or truncated file, or a tensor that two files hold. The index is
            compared too: a tensor that it names must be in the file it names.
    """
    entries: dict[str, TensorEntry] = {}
    files = list(files)
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise LoadingError(f"tensor {name} is in both {entries[name].file} and {file}")
            entries[name] = entry
    index = files[0].parent / INDEX_FILE if files else None
    if index is not None and index.is_file() and files[0].name != SINGLE_FILE:
        for name, where in _read_index(index).items():
            if name not in entries or entries[name].file.name != where:
                raise LoadingError(
                    f"{index} places tensor {name} in {where}, which does not hold it; index and "
                    "files are not of one checkpoint. Copy or download all of them again"
                )
    return entries


def read_header(file: Path, *, whole: bool = True) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file; their bytes follow each other without a gap.

    Without `whole` the file may be shorter or longer than its header says, to see what is lost.

    Raises:
        LoadingError: the header is damaged (a name that is there twice, ranges that overlap or
            leave holes, shapes that are no shapes, more than 100 MB), or the file shorter or longer
            than it says.
    """
    size = file.stat().st_size
    with open(file, "rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= length <= min(_HEADER_LIMIT, size - 8):
            header = f", header of {length}" if length >= 0 else ""
            raise LoadingError(
                f"{file} is not a safetensors file ({size} bytes long{header}); {_FETCH_AGAIN}"
            )
        raw = f.read(length)
    try:
        header = _strict_json(raw)
        if not isinstance(header, dict) or not raw.startswith(b"{"):
            raise TypeError("it is no JSON object")
        about = header.pop("__metadata__", {})
        if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
            raise TypeError("__metadata__ must map names to texts")
        entries = {name: _entry(file, 8 + length, name, info) for name, info in header.items()}
        _check_ranges(entries, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadingError(
            f"{file} has a damaged safetensors header: {_said(error)}; {_FETCH_AGAIN}"
        ) from error
    end = max((e.begin + e.nbytes for e in entries.values()), default=8 + length)
    if whole and end != size:
        raise LoadingError(
            f"{file} should be {end} bytes long by its header, and is {size}; {_FETCH_AGAIN}"
        )
    return entries


def header_metadata(file: Path) -> dict[str, str]:
    """Return what the header of a safetensors file says beside its tensors.

    Raises:
        LoadingError: it is not a map of strings; `read_header` checks the rest.
    """
    with open(file, "rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        if length > _HEADER_LIMIT:
            raise LoadingError(f"{file} has a header of {length} bytes; {_FETCH_AGAIN}")
        said = json.loads(f.read(length)).get("__metadata__", {})
    if not isinstance(said, dict) or not all(isinstance(v, str) for v in said.values()):
        raise LoadingError(f"{file} has a header whose metadata is no map of strings")
    return said


def _entry(file: Path, base: int, name: str, info: Any) -> TensorEntry:
    """Return the entry that one line of a header describes; refuses what is not of its type."""
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise TypeError(f"{name} must have dtype, shape and data_offsets")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name} has dtype {str(kind)[:40]!r}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise TypeError(f"{name} has shape {str(shape)[:80]}, a list of sizes is expected")
    whole = isinstance(offsets, list) and len(offsets) == 2
    if not whole or not all(type(n) is int for n in offsets):
        raise TypeError(f"{name} has data_offsets {str(offsets)[:80]}, two numbers are expected")
    begin, end = offsets
    dtype = DTYPES[kind]
    if not 0 <= begin <= end or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: bytes {begin} to {end} do not hold {dtype} {tuple(shape)}")
    return TensorEntry(file, dtype, tuple(shape), base + begin, end - begin)


def _check_ranges(entries: dict[str, TensorEntry], begin: int) -> None:
    """Refuse bytes that belong to two tensors or to none, as safetensors does."""
    position, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda e: (e[1].begin, e[1].nbytes)):
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a hole after"
            raise ValueError(f"{name} {what} {before}")
        position, before = entry.begin + entry.nbytes, name


def _strict_json(text: bytes | str) -> Any:
    """Return what JSON text holds. A name that is there twice means one thing to one reader and
    another to the next: refused, like numbers that JSON does not have.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            raise ValueError(f"{twice[:80]!r} is there twice")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + " ..."


def source_dtypes(folder: Path) -> dict[str, str] | None:
    """Return key -> safetensors dtype of the weights in `folder`; None where there are none.

    A folder whose weights are damaged or incomplete gives None too: `weight_files` and
    `read_weights` say what is wrong when the weights are asked for.
    """
    try:
        entries = read_weights(weight_files(folder))
    except LoadingError:
        return None
    return {name: DTYPE_NAMES[entry.dtype] for name, entry in entries.items()}


def _obtain(folder: Path, name: str, remote: str | None, revision: str | None) -> bool:
    if (folder / name).is_file():
        return True
    if remote is None:
        return False
    from transformers.utils import cached_file

    return (
        cached_file(remote, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        is not None
    )


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = _strict_json(file.read_text("utf-8"))["weight_map"]
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            raise TypeError("weight_map must map tensor names to file names")
        if not index:
            raise ValueError("weight_map names no tensor")
    except KeyError as error:
        raise LoadingError(
            f"{file} is not a safetensors index: it has no {error}; {_FETCH_AGAIN}"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise LoadingError(
            f"{file} is not a safetensors index: {_said(error)}; {_FETCH_AGAIN}"
        ) from error
    return index


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


# --------------------------------------------------------------------------------------------------
# Names: back to those of the source
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportGroup:
    """Parameters that leave together: one that keeps its bytes, or several that are converted."""

    sources: tuple[str, ...]
    """Parameter names."""
    outputs: dict[str, tuple[int, ...]]
    """Exported name -> shape."""
    converted: bool
    """Whether `convert_back` must be called; else the bytes of the one source are those of the
    output.
    """


def conversion_mapping(model: PreTrainedModel) -> list[Any]:
    """Return transformers' mapping from source keys to the parameters of `model`.

    Call it before `fully_shard`: the sharded class counts as custom code there and loses its
    mapping.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:
        raise ModelError(
            _gone("transformers.conversion_mapping.get_model_conversion_mapping")
        ) from error
    return get_model_conversion_mapping(model)


def split_mapping(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (renamings, converters) of a mapping, each in its order."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return renamings, [c for c in conversions if isinstance(c, WeightConverter)]


def use_source_names(model: PreTrainedModel, assets: HFAssets) -> None:
    """Make `model` export under the key names of its source.

    A mapping covers every spelling a checkpoint of this architecture may have; only the parts that
    this source used may be turned back. They are found by replaying the source's keys. Without a
    source (random start) transformers' default names apply.
    """
    if assets.source is None:
        return
    try:
        from transformers.core_model_loading import rename_source_key
    except ImportError as error:
        raise ExportError(_gone("transformers.core_model_loading.rename_source_key")) from error
    mapping = conversion_mapping(model)
    renamings, converters = split_mapping(mapping)
    parameters = model.state_dict()
    for key in assets.source:
        rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
    vars(model)["_weight_conversions"] = [c for c in mapping if c.was_used()]


def export_groups(model: PreTrainedModel, names: Iterable[str]) -> list[ExportGroup]:
    """Return how the parameters `names` of `model` become exported tensors. Shapes only, on meta.

    Args:
        model: on meta, after `use_source_names`.
        names: parameter and buffer names, tied aliases left out.

    Raises:
        ExportError: two parameters would leave under one name.
    """
    state = model.state_dict()
    reverse = [c.reverse_transform() for c in reversed(_export_conversions(model))]
    converters = split_mapping(reverse)[1]
    plain: list[str] = []
    together: dict[str, list[str]] = {}
    for name in names:
        target, pattern = name, None
        for converter in converters:
            target, pattern = converter.rename_source_key(target)
            if pattern is not None:  # at most one converter takes a parameter
                break
        if pattern is None:
            plain.append(name)
        else:
            together.setdefault(target, []).append(name)
    groups = []
    for members, converted in [((n,), False) for n in plain] + [
        (tuple(g), True) for g in together.values()
    ]:
        meta = {n: torch.empty_like(state[n], device="meta") for n in members}
        outputs = {k: tuple(v.shape) for k, v in convert_back(model, meta).items()}
        groups.append(ExportGroup(members, outputs, converted))
    seen: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for output in group.outputs:
            if output in seen:
                raise ExportError(
                    f"{seen[output]} and {group.sources} would both be exported as {output}"
                )
            seen[output] = group.sources
    return groups


def convert_back(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of one `ExportGroup` under the names and in the shapes of the source."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ExportError(
            _gone("transformers.core_model_loading.revert_weight_conversion")
        ) from error
    return revert_weight_conversion(model, tensors)


def _export_conversions(model: PreTrainedModel) -> list[Any]:
    """Return what `revert_weight_conversion` would turn back for `model`."""
    if isinstance(own := getattr(model, "_weight_conversions", None), list):
        return own
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in mapping if not isinstance(c, PrefixChange)]


def _gone(name: str) -> str:
    import transformers

    return (
        f"{name} is not in transformers {transformers.__version__}; install one from 5.17 to 5.23"
    )
