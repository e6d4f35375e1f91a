"""Read a Hugging Face folder that anybody may have written: its config and other small files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.formats.plain_files import is_plain_name, resolve_plain_file
from toolkit.parsing import parse_json, read_bounded, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"  # of a PEFT folder
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Settings with the number of layers for multi-token prediction, which transformers skips."""
AGAIN = "copy or download the file again"

# Bounds of files that transformers parses without any: far above those of any model.
_CONFIG_BYTES = 4 * 2**20
_VOCABULARY_BYTES = 256 * 2**20
MAX_TEMPLATE_BYTES = 2**18  # of a chat template
_TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
_DEPTHS = r"(^|_)(layers?|blocks?|depths?|stages?|pattern)(_types?)?$|^layers_block_"
_COUNTS = ((re.compile(_DEPTHS), 500), (re.compile(r"(^|_)experts$|^num_labels$"), 100_000))

# Files that an export has in addition to the weights, if the source has them.
ASSET_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("tiktoken.model", "spm.model", "sentencepiece.model", "emoji.json", "dict.txt"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *(_TEMPLATE, "chat_template.json"),
)
# Large and flat; the tokenizers library parses them.
_PARSED_BY_RUST = ("tokenizer.json", "vocab.json", "tekken.json", "emoji.json")
_MAX_BYTES = 4 * 2**20  # of a tokenizer's config, or of a file of code
_TABLES = re.compile(r"(?i)\bvocab_files_names\b[^=\n{]*=\s*\{([^{}]*)\}")
_VALUES = re.compile(r""":\s*["']([^"'\n]+)["']""")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def is_adapter_folder(folder: Path) -> bool:
    """Return True if a folder has adapter_config.json or adapter_model.safetensors."""
    return (folder / ADAPTER_FILE).is_file() or (folder / ADAPTER_WEIGHTS).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json, and validate its structure and its counts.

    Raises:
        ModelError: the file is missing or is no JSON object, a standard setting has a wrong type,
            or it has more layers, experts or labels than any known model. For an adapter folder,
            the error says so.
    """
    file = folder / "config.json"
    if not file.is_file():
        refuse_adapter(folder / ADAPTER_FILE, str(folder))
        raise ModelError(
            f"{folder} has no config.json; a Hugging Face checkpoint folder is expected, as "
            "save_pretrained and `toolkit consolidate` write it"
        )
    config = parse_json(read_bounded(file, _CONFIG_BYTES, ModelError), file, ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(config).__name__}; {AGAIN}")
    names = config.get("architectures")
    if not isinstance(names, list | None) or not all(isinstance(n, str) for n in names or ()):
        raise ModelError(f"{file} has architectures that are no list of names; {AGAIN}")
    for key, kind in (("model_type", str), ("auto_map", dict)):
        if not isinstance(config.get(key), kind | None):
            actual = type(config[key]).__name__
            raise ModelError(f"{file} has a {key} of type {actual}, {kind.__name__} is expected")
    for key, value in nested_items(config):
        count = len(value) if isinstance(value, list | str) else value
        for pattern, most in _COUNTS:
            if isinstance(count, int | float) and count > most and pattern.search(key):
                raise ModelError(f"{file} has {key} of {count:,}; at most {most:,} is expected")
    return config


def refuse_adapter(file: Path, name: str) -> None:
    """Raise ModelError if the file adapter_config.json exists.

    The error says which settings train on an adapter.

    Args:
        file: path of adapter_config.json.
        name: folder or Hub id that was given as a model, for the message.
    """
    if not file.is_file():
        return
    content = read_json(file, ModelError)
    name_of_base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    base = name_of_base if isinstance(name_of_base, str) and name_of_base else "BASE"
    raise ModelError(
        f"{name} is an adapter of {base}, not a model; set model.name_or_path: {base} and "
        f"lora.from: {name}"
    )


def nested_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the (key, value) pairs of a JSON object or list, and of all objects nested in it."""
    if isinstance(value, dict):
        yield from value.items()
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from nested_items(inner)


def check_parsed_files(folder: Path) -> None:
    """Raise ModelError if a JSON file or chat template of a folder is malformed or far too large.

    Call it before transformers parses the folder, because transformers has no limits. Missing files
    are no error, not even config.json.
    """
    if (folder / "config.json").is_file():
        read_config(folder)
    if (template := folder / _TEMPLATE).is_file():
        read_bounded(template, MAX_TEMPLATE_BYTES, ModelError)
    for file in [folder / name for name in ASSET_FILES if name.endswith(".json")]:
        if file.is_file() and file.name not in _PARSED_BY_RUST:
            read_json(file, ModelError)
        elif file.is_file() and (size := file.stat().st_size) > _VOCABULARY_BYTES:
            raise ModelError(
                f"{file} has {size:,} bytes, more than the {_VOCABULARY_BYTES:,} expected; {AGAIN}"
            )


def asset_files(folder: Path) -> dict[str, bytes]:
    """Read the files that an export copies: generation config, tokenizer, template, custom code.

    Chat templates in a subfolder are moved into tokenizer_config.json.

    Returns:
        File name -> content. Weights and config.json are not included.

    Raises:
        ModelError: a file is a link out of the folder, or a template is malformed.
    """
    names = [n for n in (*ASSET_FILES, *vocabulary_files(folder)) if (folder / n).is_file()]
    names += sorted(p.name for p in folder.glob("*.py") if p.is_file())
    names = [*dict.fromkeys(names)]
    files = {n: resolve_plain_file(folder, n, ModelError).read_bytes() for n in names}
    return _with_named_templates(folder, files)


def _with_named_templates(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return `files` with the chat templates of a subfolder in tokenizer_config.json.

    transformers saves templates other than the default in a subfolder, which checkpoints and
    exports cannot have. It also reads a list of templates from tokenizer_config.json, but only if
    there is no chat_template.jinja.

    Args:
        folder: the source folder, which may have the subfolder.
        files: file name -> content.

    Returns:
        A copy of `files` with the changed tokenizer_config.json and without chat_template.jinja;
        `files` itself if the subfolder or tokenizer_config.json is missing.
    """
    more = sorted((folder / TEMPLATES).glob("*.jinja"))
    if not more or "tokenizer_config.json" not in files:
        return files
    texts = {}
    for file in more:
        content = resolve_plain_file(file.parent, file.name, ModelError).read_bytes()
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
        templates = [{"name": n, "template": t.decode()} for n, t in sorted(texts.items())]
    except UnicodeDecodeError as error:
        raise ModelError(f"a chat template of {folder} is no UTF-8: {error}") from error
    config["chat_template"] = templates
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    remaining = {name: content for name, content in files.items() if name != _TEMPLATE}
    return {**remaining, "tokenizer_config.json": text.encode()}


def vocabulary_files(folder: Path) -> list[str]:
    """List the vocabulary files that a folder's tokenizer class declares in `vocab_files_names`.

    The class is in transformers, or in Python files of the folder. Those files are searched as text
    and never executed. A listed file may not exist.
    """
    names: set[Any] = set()
    for file in folder.glob("*.py"):
        code = read_bounded(file, _MAX_BYTES, ModelError).decode(errors="replace")
        names |= {name for table in _TABLES.findall(code) for name in _VALUES.findall(table)}
    import transformers

    kind = _tokenizer_class(folder / "tokenizer_config.json")
    declared = getattr(getattr(transformers, kind, None), "vocab_files_names", None)
    names |= {*declared.values()} if isinstance(declared, dict) else set()
    plain = {name for name in names if isinstance(name, str) and is_plain_name(name)}
    return sorted(name for name in plain if not name.endswith(_WEIGHTS))


def _tokenizer_class(file: Path) -> str:
    """Read the class name from a tokenizer_config.json; "" if the file or the name is missing."""
    try:
        content = parse_json(read_bounded(file, _MAX_BYTES, ModelError), file, ModelError)
    except ModelError:  # its reader reports the error
        return ""
    kind = content.get("tokenizer_class") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) else ""


def is_text_map(table: Any) -> bool:
    """Return True if `table` is a dictionary whose values are all strings."""
    return isinstance(table, dict) and all(isinstance(v, str) for v in table.values())
