"""Settings that a training script gives to Trainer or TRL, read from its syntax; nothing is run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.convert.tables_of_tools import NOT_HERE, TRAINERS
from toolkit.errors import ConfigError
from toolkit.parsing import read_bounded

_MOST = 2_000_000  # bytes of a script
_OF_TRL = {
    f"{name}{what}": name for name in (*TRAINERS, *NOT_HERE) for what in ("Config", "Trainer")
}
_CONFIGS = {"TrainingArguments", "Seq2SeqTrainingArguments", "LoraConfig", "BitsAndBytesConfig"} | {
    "Trainer",
    *_OF_TRL,
}
# Objects, which the settings of other calls describe.
_OBJECTS = {"model", "args", "train_dataset", "eval_dataset", "tokenizer", "processing_class"} | {
    "peft_config",
    "quantization_config",
}
# Names of the first argument of a call, where it is given without one.
_FIRST = {
    "TrainingArguments": "output_dir",
    "Seq2SeqTrainingArguments": "output_dir",
    "Trainer": "model",
    "from_pretrained": "model_name_or_path",
} | {name: "output_dir" if name.endswith("Config") else "model" for name in _OF_TRL}
_COMPUTED = object()  # a value that only the script's run knows
_BUILDERS = ("json", "csv", "text", "parquet")


def read_script(file: Path) -> tuple[dict[str, Any], dict[str, str], set[str]]:
    """Return the literal settings in the calls of a script, for each other one a note, and what
    comes before `Trainer` or `Config` in the names of TRL's classes that it calls.

    Calls are those of `_CONFIGS`, `from_pretrained` and `load_dataset`. A name that is bound once,
    to a literal, is that literal; `torch.bfloat16` is its name. ConfigError: it is no Python.
    """
    try:
        tree = ast.parse(read_bounded(file, _MOST, ConfigError))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} cannot be read as Python: {error}") from error
    bound = _bound(tree)
    found: dict[str, Any] = {}
    computed: dict[str, str] = {}
    trainers = set[str]()
    for call in sorted(_calls(tree), key=lambda c: c.lineno):
        name = _last(call.func)
        trainers |= {_OF_TRL[name]} if name in _OF_TRL else set()
        if name == "LoraConfig":
            found["use_peft"] = True
        for key, node in _arguments(call, name, bound):
            value = _value(node, bound)
            if key in _OBJECTS and not (key == "model" and isinstance(value, str)):
                continue
            if key == "ref_model" and value is None:
                continue
            key = "model_name_or_path" if key == "model" else key
            where = f"{key} ({name}, line {call.lineno})"
            if value is _COMPUTED:
                what = "computed by the script; set it yourself"
                if key == "ref_model":
                    what = "the reference is the model that training begins with, no other one"
                computed[key] = f"{where} {ast.unparse(node)[:60]}: {what}"
            elif key in found and found[key] != value:
                computed[f"{key} again"] = f"{where}: given before, and otherwise; left out"
            else:
                found[key] = value
    return found, computed, trainers


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _last(node.func)
            if name in _CONFIGS or name == "load_dataset" or _is_model(node.func):
                yield node


def _is_model(func: ast.expr) -> bool:
    """Return whether a call is of a model's `from_pretrained`; a tokenizer is the model's own."""
    if not isinstance(func, ast.Attribute) or func.attr != "from_pretrained":
        return False
    owner = _last(func.value)
    return owner.startswith("AutoModel") or "For" in owner


def _arguments(
    call: ast.Call, name: str, bound: dict[str, ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    positional: list[str | None] = [_FIRST.get(name)]
    if name in ("DPOTrainer", "KTOTrainer"):
        positional.append("ref_model")
    if name == "load_dataset":
        first = call.args[0] if call.args else None
        builder = isinstance(first, ast.Constant) and first.value in _BUILDERS
        positional = ["builder" if builder else "dataset_name", "dataset_config_name"]
    for i, node in enumerate(call.args):
        key = positional[i] if i < len(positional) else None
        if key not in ("builder", None):
            yield key, node
        elif key is None and not name.endswith("Trainer"):  # which takes objects
            yield f"argument {i + 1} of {name}", node
    names = {"split": "dataset_split", "data_files": "train_files", "name": "dataset_config_name"}
    for keyword in call.keywords:
        if keyword.arg is not None:
            arg = keyword.arg
            yield names.get(arg, arg) if name == "load_dataset" else arg, keyword.value
            continue
        known = bound.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
        inner = known if known is not None else keyword.value
        if isinstance(inner, ast.Dict) and all(isinstance(k, ast.Constant) for k in inner.keys):
            yield from zip((str(k.value) for k in inner.keys), inner.values, strict=True)  # type: ignore[union-attr]
        elif isinstance(inner, ast.Call) and _last(inner.func) == "dict" and not inner.args:
            yield from ((k.arg or "**", k.value) for k in inner.keywords)
        else:
            yield "**", keyword.value


def _bound(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the names that the script binds exactly once, by a plain assignment."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            values.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).extend([None, None])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            values[target.id] = [node.value] if len(values[target.id]) == 1 else [None, None]
    return {n: v[0] for n, v in values.items() if len(v) == 1 and v[0] is not None}


def _value(node: ast.expr, bound: dict[str, ast.expr], depth: int = 0) -> Any:
    if isinstance(node, ast.Name) and node.id in bound and depth < 5:
        return _value(bound[node.id], bound, depth + 1)
    if isinstance(node, ast.Attribute) and _last(node.value) in ("torch", "TaskType"):
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _COMPUTED


def _last(node: ast.expr) -> str:
    """Return the last name of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
