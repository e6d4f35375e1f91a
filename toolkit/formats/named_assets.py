"""List vocabularies under other names, which the class of a folder's tokenizer names.

Read from the text of the code, which is neither run nor compiled.
"""

import re
from pathlib import Path
from typing import Any

import transformers

from toolkit.errors import ModelError
from toolkit.formats.plain_files import is_plain_name
from toolkit.parsing import parse_json, read_bounded

_BYTES = 4 * 2**20  # of a config, or of a file of code
_TABLES = re.compile(r"(?i)\bvocab_files_names\b[^=\n{]*=\s*\{([^{}]*)\}")
_VALUES = re.compile(r""":\s*["']([^"'\n]+)["']""")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def vocabulary_files(folder: Path) -> list[str]:
    """Return the files that the tokenizer's class names (`vocab_files_names`), of code here or of
    transformers; also those that are not here (yet).
    """
    found: set[Any] = set()
    for file in folder.glob("*.py"):
        code = read_bounded(file, _BYTES, ModelError).decode(errors="replace")
        found |= {name for table in _TABLES.findall(code) for name in _VALUES.findall(table)}
    kind = _tokenizer_class(folder / "tokenizer_config.json")
    named = getattr(getattr(transformers, kind, None), "vocab_files_names", None)
    found |= {*named.values()} if isinstance(named, dict) else set()
    plain = {name for name in found if isinstance(name, str) and is_plain_name(name)}
    return sorted(name for name in plain if not name.endswith(_WEIGHTS))


def _tokenizer_class(file: Path) -> str:
    try:
        content = parse_json(read_bounded(file, _BYTES, ModelError), file, ModelError)
    except ModelError:  # whoever needs it says more
        return ""
    kind = content.get("tokenizer_class") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) else ""
