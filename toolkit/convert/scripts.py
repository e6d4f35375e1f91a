"""Read the settings that a training script passes to Trainer or TRL; the script is never run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.convert.script_effects import (
    check_frozen_parameters,
    check_trainer_classes,
    find_later_assignments,
    note_later_changes,
    refuse_assigned_losses,
    resolve_classes,
)
from toolkit.convert.script_syntax import (
    COMPUTED,
    evaluate_literal,
    find_assignments,
    last_name,
)
from toolkit.convert.tables_of_tools import TRAINERS, UNSUPPORTED_TRAINERS
from toolkit.errors import ConfigError
from toolkit.parsing import read_bounded

_MAX_BYTES = 2_000_000  # of a script
_OF_TRL = {
    f"{name}{reason}": name
    for name in (*TRAINERS, *UNSUPPORTED_TRAINERS)
    for reason in ("Config", "Trainer")
}
_CALLS_WITH_SETTINGS = {
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "LoraConfig",
    "BitsAndBytesConfig",
} | {
    *("Trainer", "Seq2SeqTrainer", "UnslothTrainingArguments", "UnslothTrainer"),
    *_OF_TRL,
}
_TRAINER_NAMES = {"Trainer", "Seq2SeqTrainer", "UnslothTrainer"} | {
    n for n in _OF_TRL if n.endswith("Trainer")
}
_ARGUMENTS = _CALLS_WITH_SETTINGS - _TRAINER_NAMES
# Arguments that are objects; their settings are read where the objects are created.
_OBJECTS = {"model", "args", "train_dataset", "eval_dataset", "tokenizer", "processing_class"} | {
    "peft_config",
    "quantization_config",
}
# Call -> name of its first argument, if it is passed by position.
_FIRST_ARGUMENTS = {
    "TrainingArguments": "output_dir",
    "Seq2SeqTrainingArguments": "output_dir",
    "Trainer": "model",
    "Seq2SeqTrainer": "model",
    "from_pretrained": "model_name_or_path",
} | {name: "output_dir" if name.endswith("Config") else "model" for name in _OF_TRL}
# Configs of PEFT for other methods than LoRA.
_OTHER_ADAPTERS = {
    *("AdaLoraConfig", "AdaptionPromptConfig", "BOFTConfig", "BoneConfig", "FourierFTConfig"),
    *("HRAConfig", "IA3Config", "LNTuningConfig", "LoHaConfig", "LoKrConfig", "MissConfig"),
    *("OFTConfig", "PolyConfig", "PrefixTuningConfig", "PromptEncoderConfig", "RandLoraConfig"),
    *("PromptTuningConfig", "TrainableTokensConfig", "VBLoRAConfig", "VeraConfig", "XLoraConfig"),
}
# Parsers that read the settings from the command line.
_PARSERS = {"TrlParser", "HfArgumentParser", "H4ArgumentParser"}
# Methods of `datasets` with which a script changes its rows.
_ROW_METHODS = {"map", "filter", "select", "take", "skip", "rename_column", "rename_columns"} | {
    *("train_test_split", "remove_columns", "cast_column", "add_column", "unique", "flatten"),
    *("concatenate_datasets", "interleave_datasets", "from_list", "from_dict", "from_generator"),
    *("from_pandas", "load_from_disk"),
}
_UNSLOTH = {"FastLanguageModel", "FastModel", "FastVisionModel", "FastTextModel"}
# Defaults of Unsloth, from `unsloth/models/loader.py`.
_UNSLOTH_MODEL: dict[str, Any] = {"load_in_4bit": True}
_UNSLOTH_LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ],
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "use_gradient_checkpointing": True,
}
_WITHOUT_EFFECT = {
    "loftq_config",
    "token",
    "random_state",
    "use_exact_model_name",
    "fast_inference",
}
_BUILDERS = ("json", "csv", "text", "parquet")


def read_script(file: Path) -> tuple[dict[str, Any], dict[str, str], set[str], bool]:
    """Read the settings that a script passes to Trainer, TRL, PEFT or Unsloth, without running it.

    A variable that is assigned once, to a literal, has that value. `torch.bfloat16` is read as the
    text bfloat16.

    Returns:
        (settings, notes, trainers, uses_unsloth). `settings` maps names to literal values. `notes`
        maps each setting that the script computes, and each statement that is not converted, to a
        text. `trainers` holds the names of the TRL classes that it calls, without the ending
        `Trainer` or `Config`.

    Raises:
        ConfigError: the file is not Python, or it trains other adapters than LoRA, only a part of
            the parameters, or its own loss. It is also raised if settings of adapters come from the
            command line.
    """
    try:
        tree = ast.parse(read_bounded(file, _MAX_BYTES, ConfigError))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} cannot be read as Python: {error}") from error
    subclasses = resolve_classes(tree, _CALLS_WITH_SETTINGS)
    assignments = find_assignments(tree)
    settings: dict[str, Any] = {}
    notes: dict[str, str] = {}
    trainers = set[str]()
    calls = sorted(_find_calls(tree), key=lambda call: (call.lineno, call.col_offset))
    for call in calls:
        name = last_name(call.func)
        trainers |= {_OF_TRL[name]} if name in _OF_TRL else set()
        if name == "LoraConfig" or (name == "get_peft_model" and _is_unsloth_method(call.func)):
            settings["use_peft"] = True
        for key, node in _find_arguments(call, name, assignments):
            _read_argument(call, key, node, assignments, settings, notes)
    _refuse_unreadable(file, tree, calls, assignments)
    _read_later_assignments(tree, assignments, settings, notes)
    notes |= check_trainer_classes(file, subclasses)
    refuse_assigned_losses(file, tree)
    adapter_line, references = _find_adapters_and_references(tree, calls, assignments)
    notes |= check_frozen_parameters(file, tree, adapter_line, references)
    unsloth = _add_unsloth_defaults(calls, settings, notes)
    notes |= _note_row_changes(tree) | note_later_changes(tree) | _note_unread_calls(tree)
    return settings, notes, trainers, unsloth


def _read_argument(
    call: ast.Call,
    key: str,
    node: ast.expr,
    assignments: dict[str, ast.expr],
    settings: dict[str, Any],
    notes: dict[str, str],
) -> None:
    """Add an argument of a call to `settings`, or a reason to `notes` if it cannot be read.

    `model` and `model_name` are stored as `model_name_or_path`; a `model` that is no text and other
    objects are ignored. If a setting has a value already, a different one only adds a note.

    Args:
        call: the call.
        key: name of the argument.
        node: expression of its value.
        assignments: name -> expression of variables that the script assigns once.
        settings: receives the setting -> its value.
        notes: receives the setting -> the reason.
    """
    name, value = last_name(call.func), evaluate_literal(node, assignments)
    if key in _OBJECTS and not (key == "model" and isinstance(value, str)):
        return
    if key == "ref_model" and value is None:
        return
    if _is_unsloth_method(call.func) and (
        key in _WITHOUT_EFFECT or (key == "dtype" and value is None)
    ):
        return
    key = {"model": "model_name_or_path", "model_name": "model_name_or_path"}.get(key, key)
    where = f"{key} ({name}, line {call.lineno})"
    if value is COMPUTED:
        reason = "computed by the script; set it yourself"
        if key == "ref_model":
            reason = "the reference is the model that training begins with, or preference.reference"
        notes[key] = f"{where} {ast.unparse(node)[:60]}: {reason}"
    elif key in settings and settings[key] != value:
        notes[f"{key} again"] = f"{where}: given before, with another value; the first one is kept"
    else:
        settings[key] = value


def _read_later_assignments(
    tree: ast.Module,
    assignments: dict[str, ast.expr],
    settings: dict[str, Any],
    notes: dict[str, str],
) -> None:
    """Apply assignments to attributes of arguments objects, such as `args.max_steps = 10`.

    Args:
        tree: the script.
        assignments: name -> expression of variables that the script assigns once.
        settings: setting -> value, which is replaced, or removed if the new value is not known.
        notes: receives the setting -> why its value is not known.
    """
    for later in find_later_assignments(tree, _ARGUMENTS, assignments):
        if later.value is COMPUTED:
            settings.pop(later.key, None)
            reason = f"{later.reason}; set it yourself"
            notes[later.key] = f"{later.key} (line {later.line}) {later.text}: {reason}"
        else:
            notes.pop(later.key, None)
            settings[later.key] = later.value


def _find_adapters_and_references(
    tree: ast.AST, calls: list[ast.Call], assignments: dict[str, ast.expr]
) -> tuple[int | None, set[str]]:
    """Find the first line that adds adapters, and the variables that hold reference models.

    Returns:
        (line, variables). The line is None if the script adds no adapters.
    """
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = [n.lineno for n in nodes if last_name(n.func) in ("get_peft_model", "add_adapter")]
    references = set[str]()
    for call in calls:
        for key, value in _find_arguments(call, last_name(call.func), assignments):
            if key == "peft_config" and evaluate_literal(value, assignments) is not None:
                lines.append(call.lineno)
            if key == "ref_model" and isinstance(value, ast.Name):
                references.add(value.id)
    return min(lines, default=None), references


def _note_unread_calls(tree: ast.AST) -> dict[str, str]:
    """Return notes on unknown trainer classes and on parsers of the command line.

    Returns:
        Key that identifies the class or parser -> note.
    """
    notes = {}
    for node in ast.walk(tree):
        name = last_name(node.func) if isinstance(node, ast.Call) else ""
        if name.endswith("Trainer") and name not in _TRAINER_NAMES and isinstance(node, ast.Call):
            notes[f"class {name}"] = (
                f"{name} (line {node.lineno}): a trainer that is not known, so its loss and its "
                "arguments are not converted; check that it trains the plain loss"
            )
        elif name in _PARSERS and isinstance(node, ast.Call):
            notes["command line"] = (
                f"{name} (line {node.lineno}): settings from the command line are not converted; "
                "set them yourself"
            )
    return notes


def _refuse_unreadable(
    file: Path, tree: ast.AST, calls: list[ast.Call], assignments: dict[str, ast.expr]
) -> None:
    """Raise ConfigError if the script does not contain all settings of the training.

    Examples are adapters other than LoRA, adapters without a LoraConfig in the script, and settings
    that come only from the command line.
    """
    names = {last_name(call.func) for call in calls}
    all_calls = {
        last_name(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    for name in sorted(_OTHER_ADAPTERS & {*all_calls}):
        raise ConfigError(
            f"{file} calls {name} (line {all_calls[name].lineno}), which is not LoRA: of PEFT's "
            "adapters, LoRA and DoRA can be converted"
        )
    parser = next((all_calls[name] for name in _PARSERS if name in all_calls), None)
    has_lora_config = "LoraConfig" in names or any(
        _is_unsloth_method(call.func) and last_name(call.func) == "get_peft_model" for call in calls
    )
    for call in calls:
        for keyword in call.keywords:
            value = evaluate_literal(keyword.value, assignments)
            if keyword.arg == "peft_config" and value is not None and not has_lora_config:
                raise ConfigError(
                    f"{file}, line {call.lineno}: peft_config={ast.unparse(keyword.value)[:60]} "
                    "decides if adapters are trained, and is only known when the script runs. "
                    "Convert the YAML with which the script is started, or its command line in a "
                    ".sh file"
                )
    if "get_peft_model" in all_calls and not has_lora_config:
        line = all_calls["get_peft_model"].lineno
        raise ConfigError(
            f"{file}, line {line}: get_peft_model trains adapters that the script does not "
            "describe with a LoraConfig; write r, lora_alpha and target_modules into it"
        )
    if "PeftModel" in {last_name(c.func.value) for c in _find_model_loads(tree)}:
        raise ConfigError(
            f"{file} loads an adapter with PeftModel.from_pretrained; set lora.from to continue "
            "it, or merge it, and leave the call out of the script"
        )
    if parser is not None and not names - {"from_pretrained", "load_dataset", *_TRAINER_NAMES}:
        raise ConfigError(
            f"{file}, line {parser.lineno}: {last_name(parser.func)} takes the settings from the "
            "command line. Convert the YAML that the script is started with, or its command line "
            "in a .sh file"
        )


def _find_model_loads(tree: ast.AST) -> Iterator[Any]:
    """Yield all calls of a method `from_pretrained` in a script."""
    for node in ast.walk(tree):
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr == "from_pretrained":
            yield node


def _add_unsloth_defaults(
    calls: list[ast.Call], settings: dict[str, Any], notes: dict[str, str]
) -> bool:
    """Add Unsloth's defaults to `settings`, and rename its settings, if the script uses Unsloth.

    Args:
        calls: the calls with settings.
        settings: setting -> value, which is changed.
        notes: receives a note if the model is quantised already.

    Returns:
        True if the script uses Unsloth.
    """
    names = {last_name(call.func) for call in calls if _is_unsloth_method(call.func)}
    if "from_pretrained" in names and not settings.pop("full_finetuning", False):
        for key, value in _UNSLOTH_MODEL.items():
            if key not in notes:
                settings.setdefault(key, value)
    if "get_peft_model" in names:
        for key, value in _UNSLOTH_LORA.items():
            if key not in notes:
                settings.setdefault(key, value)
    if settings.get("use_gradient_checkpointing") == "unsloth":
        settings["use_gradient_checkpointing"] = True
    if "use_gradient_checkpointing" in settings:
        is_on = bool(settings.pop("use_gradient_checkpointing"))
        settings.setdefault("gradient_checkpointing", is_on)
    if str(settings.get("model_name_or_path", "")).endswith("-bnb-4bit"):
        notes["model_name_or_path 4bit"] = (
            f"model_name_or_path {settings['model_name_or_path']}: quantised already; give the "
            "bfloat16 checkpoint that it was quantised from, lora.load_in_4bit quantises"
        )
    return bool(names)


def _note_row_changes(tree: ast.AST) -> dict[str, str]:
    """Return a note for each call that changes the script's rows or masks parts of them.

    Returns:
        Key that identifies the call -> note.
    """
    notes = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in _ROW_METHODS and (owner is not None or name.endswith("_datasets")):
            if isinstance(owner, ast.Name) and "pool" in owner.id.lower():
                continue
            source = " ".join(ast.unparse(node).split())[-90:]
            notes[f"rows {node.lineno} {node.col_offset} {name}"] = (
                f"{name} (line {node.lineno}) ...{source}: the script changes its rows, and the "
                "converted run does not; write the changed rows to a file"
            )
        elif name == "train_on_responses_only":
            notes["supervise"] = (
                f"{name} (line {node.lineno}): set data.supervise: assistant for rows of turns"
            )
    return notes


def _find_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a script that pass settings.

    They are calls of known trainer and config classes, of a model's `from_pretrained`, of
    `load_dataset`, and of Unsloth's `get_peft_model`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            has_settings = (
                name in _CALLS_WITH_SETTINGS or name == "load_dataset" or _is_model_load(node.func)
            )
            if has_settings or (name == "get_peft_model" and _is_unsloth_method(node.func)):
                yield node


def _is_model_load(func: ast.expr) -> bool:
    """Return True if `func` is the `from_pretrained` of a model class, not of a tokenizer."""
    if not isinstance(func, ast.Attribute) or func.attr != "from_pretrained":
        return False
    owner = last_name(func.value)
    return owner.startswith("AutoModel") or "For" in owner or owner in _UNSLOTH


def _is_unsloth_method(func: ast.expr) -> bool:
    """Return True if `func` is a method of one of Unsloth's model classes."""
    return isinstance(func, ast.Attribute) and last_name(func.value) in _UNSLOTH


def _find_arguments(
    call: ast.Call, name: str, assignments: dict[str, ast.expr]
) -> Iterator[tuple[str, ast.expr]]:
    """Yield (setting, expression) for each argument of a call to the function `name`.

    Positional arguments and `**` of a known dict get their names. An argument without a known name
    is called `**` or "argument 2 of NAME".
    """
    positional: list[str | None] = [_FIRST_ARGUMENTS.get(name)]
    if name in ("DPOTrainer", "KTOTrainer"):
        positional.append("ref_model")
    if name == "load_dataset":
        first = call.args[0] if call.args else None
        builder = isinstance(first, ast.Constant) and first.value in _BUILDERS
        positional = ["builder" if builder else "dataset_name", "dataset_config_name"]
    if name == "get_peft_model":
        positional = ["model"]
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
        # `**kwargs` of a variable that is assigned once.
        assigned = (
            assignments.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
        )
        inner = assigned if assigned is not None else keyword.value
        if isinstance(inner, ast.Dict) and all(isinstance(k, ast.Constant) for k in inner.keys):
            yield from zip((str(k.value) for k in inner.keys), inner.values, strict=True)  # type: ignore[union-attr]
        elif isinstance(inner, ast.Call) and last_name(inner.func) == "dict" and not inner.args:
            yield from ((k.arg or "**", k.value) for k in inner.keywords)
        else:
            yield "**", keyword.value
