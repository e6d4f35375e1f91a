"""Which files a folder's own classes name: their code, and vocabularies under names of their own.

Read from the text of the code, which does not run.
"""

import ast
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
_CODE_BYTES = 4 * 2**20
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
            if (tree := _tree(folder / name)) is not None:
                todo += _imported(tree)
    return sorted(found)


def vocabulary_files(folder: Path) -> list[str]:
    """Return the files that the tokenizer's class names (`vocab_files_names`), of code here or of
    transformers; also those that are not here (yet).
    """
    found: set[str] = set()
    for name in code_files(folder):
        if (tree := _tree(folder / name)) is not None:
            found |= _vocabularies(tree)
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
    if not file.is_file():
        return {}
    content = parse_json(read_bounded(file, _CODE_BYTES, ModelError), file, ModelError)
    return content if isinstance(content, dict) else {}


def _tree(file: Path) -> ast.Module | None:
    if not file.is_file():
        return None
    try:
        return ast.parse(read_bounded(file, _CODE_BYTES, ModelError))
    except (SyntaxError, ValueError):  # whoever runs it says more
        return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (f"{name.partition('.')[0]}.py" for name in names)


def _vocabularies(tree: ast.Module) -> set[str]:
    """Return the values of every dict that is assigned to a name such as VOCAB_FILES_NAMES."""
    found: set[str] = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        named = {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Assign) and any(
            re.fullmatch("vocab_files_names", name, re.IGNORECASE) for name in named
        ):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:  # a name, of a dict that is assigned elsewhere
                continue
            found |= {*value.values()} if isinstance(value, dict) else set()
    return found
