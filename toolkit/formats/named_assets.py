"""List files that a folder's own classes name: their code, and vocabularies under other names.

Read from the text of the code, which is neither run nor compiled.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

from toolkit.errors import ModelError
from toolkit.formats.plain_files import is_plain_name
from toolkit.parsing import parse_json, read_bounded

_CONFIGS = (
    *("config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "generation_config.json"),
)
_BYTES = 4 * 2**20  # of a config, or of a file of code
_IMPORTS = re.compile(r"^\s*from\s+\.(\w*)[\w.]*\s+import\s+\(?([\w, \t]*)", re.MULTILINE)
_TABLES = re.compile(r"(?i)\bvocab_files_names\b[^=\n{]*=\s*\{([^{}]*)\}")
_VALUES = re.compile(r""":\s*["']([^"'\n]+)["']""")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def code_files(folder: Path) -> list[str]:
    """Return the Python files that the `auto_map` of a config here names, and what those import
    from beside them; also those that are not here (yet).
    """
    todo, found = [*_mapped_modules(folder)], list[str]()
    while todo:
        name = todo.pop()
        if name not in found and is_plain_name(name):
            found.append(name)
            todo += _imported(_text(folder / name).decode(errors="replace"))
    return sorted(found)


def vocabulary_files(folder: Path) -> list[str]:
    """Return the files that the tokenizer's class names (`vocab_files_names`), of code here or of
    transformers; also those that are not here (yet).
    """
    found: set[str] = set()
    for name in code_files(folder):
        found |= _vocabularies(_text(folder / name).decode(errors="replace"))
    kind = _read(folder / "tokenizer_config.json").get("tokenizer_class")
    known: Any = getattr(transformers, kind, None) if isinstance(kind, str) else None
    named = getattr(known, "vocab_files_names", None)
    found |= {*named.values()} if isinstance(named, dict) else set()
    plain = {name for name in found if isinstance(name, str) and is_plain_name(name)}
    return sorted(name for name in plain if not name.endswith(_WEIGHTS))


def _mapped_modules(folder: Path) -> Iterator[str]:
    for name in _CONFIGS:
        auto_map = _read(folder / name).get("auto_map")
        for value in auto_map.values() if isinstance(auto_map, dict) else ():
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str) and "--" not in reference:  # of another repository
                    yield f"{reference.partition('.')[0]}.py"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(_text(file), file, ModelError)
    except ModelError:  # whoever needs it says more
        return {}
    return content if isinstance(content, dict) else {}


def _text(file: Path) -> bytes:
    return read_bounded(file, _BYTES, ModelError) if file.is_file() else b"{}"


def _imported(code: str) -> Iterator[str]:
    for module, names in _IMPORTS.findall(code):
        found = [module] if module else [n.split()[0] for n in names.split(",") if n.strip()]
        yield from (f"{name}.py" for name in found)


def _vocabularies(code: str) -> set[str]:
    return {name for table in _TABLES.findall(code) for name in _VALUES.findall(table)}
