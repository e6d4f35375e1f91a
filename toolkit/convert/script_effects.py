"""Find statements of a training script that change its training next to the calls it makes.

Examples are a subclass of a trainer with a separate loss, frozen parameters, and settings that are
assigned to the arguments object after its creation.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.other_tools import find_setting
from toolkit.convert.script_syntax import COMPUTED, evaluate_literal, last_name
from toolkit.errors import ConfigError

# Methods and attributes of a trainer that decide its loss.
_LOSS_NAMES = re.compile(
    r"^(?!_?(log|plot|print|save|report|on)_)(?!.*history).*loss"
    r"|^(train|training_step|_inner_training_loop|_run_epoch|forward|concatenated_forward"
    r"|get_batch_logps|get_batch_loss_metrics)$"
)
_REPLACED_METHODS = {"compute_loss", "compute_loss_func", "training_step"} | {
    *("concatenated_forward", "get_batch_loss_metrics", "dpo_loss"),
}
_IS_REFERENCE = re.compile(r"(^|_)(ref|reference|teacher)(_|$)", re.IGNORECASE)
_IS_ACTIVATION = re.compile(r"^(in|out)puts?$|hidden|embed.*(in|out)put", re.IGNORECASE)
_IS_ARGUMENTS = re.compile(r"(args|arguments|(^|(?<!generation)_)config|trainer)$", re.IGNORECASE)
_IS_DICT_OF_ARGUMENTS = re.compile(r"(args|config)(\.__dict__|\))$")
# Functions whose names begin with `freeze` and that freeze no parameters.
_NO_FREEZING = {"freeze_support"}
# Settings of `model.config` that training does not use.
_MODEL_CONFIG_UNUSED = {"use_cache", "pretraining_tp", "torch_dtype", "dtype"} | {
    f"{name}_token_id" for name in ("pad", "bos", "eos")
}
_LATER_CALLS = {
    "resize_token_embeddings": "set model.resize_embeddings: true",
    "add_tokens": "save the tokenizer with its new tokens, and set model.tokenizer_name_or_path",
    "add_special_tokens": "save the tokenizer, and set model.tokenizer_name_or_path",
}


def resolve_classes(tree: ast.AST, class_names: Iterable[str]) -> dict[str, ast.ClassDef]:
    """Replace names of aliases and subclasses of known classes by the known names, in place.

    After `from trl import SFTTrainer as Plain` or `class Mine(SFTTrainer)`, `Plain(...)` and
    `Mine(...)` become calls of SFTTrainer.

    Args:
        tree: the script, which is changed.
        class_names: names of the known classes.

    Returns:
        Name of each subclass that the script uses -> its definition.
    """
    names = {name: name for name in class_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname: a.name for a in node.names if a.asname and a.name in names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    subclasses: dict[str, ast.ClassDef] = {}
    for _ in classes:  # a subclass may have a subclass
        for node in classes:
            bases = (names.get(last_name(base)) for base in node.bases)
            base = next(filter(None, bases), None)
            if base and node.name in used:
                names[node.name], subclasses[node.name] = base, node
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            node.id = names.get(node.id, node.id)
    return subclasses


def check_trainer_classes(file: Path, subclasses: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    """Return notes on subclasses of trainers and configs, whose changes are not converted.

    Args:
        file: the script, for the message.
        subclasses: name -> definition, as `resolve_classes` returns them.

    Returns:
        Key that identifies the class -> note.

    Raises:
        ConfigError: a subclass of a trainer defines its own loss or training step.
    """
    notes = {}
    for name, node in subclasses.items():
        names = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
        bases = ", ".join(map(ast.unparse, node.bases))
        where = f"class {name}({bases}) (line {node.lineno})"
        is_trainer = not bases.endswith(("Config", "Arguments"))
        if is_trainer and (loss := next(filter(_LOSS_NAMES.search, names), None)):
            raise ConfigError(
                f"{file}, line {node.lineno}: class {name}({bases}) defines {loss}, so it trains "
                "another loss than the trainer, and the converted run would not. Write the loss "
                "into a copy of a recipe (docs/recipes.md), or use the plain class in the script"
            )
        if names:
            notes[f"class {name}"] = f"{where}: not converted are {', '.join(names)}"
    return notes


def refuse_assigned_losses(file: Path, tree: ast.AST) -> None:
    """Raise ConfigError if a script replaces the loss of a trainer by an argument or assignment."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.keyword) and node.arg == "compute_loss_func":
            values = [node.value]
        elif isinstance(node, ast.Dict):
            items = zip(node.keys, node.values, strict=True)
            values = [v for k, v in items if getattr(k, "value", None) == "compute_loss_func"]
        for target, value in _assigned_attributes(node):
            if target.attr in _REPLACED_METHODS and "trainer" in ast.unparse(target.value).lower():
                values.append(value)
        if any(not (isinstance(v, ast.Constant) and v.value is None) for v in values):
            line = getattr(node, "lineno", 0)
            raise ConfigError(
                f"{file}, line {line}: {' '.join(ast.unparse(node).split())[:60]} replaces the "
                "loss of the trainer, and the converted run would not. Write the loss into a copy "
                "of a recipe (docs/recipes.md), or remove it from the script"
            )


# ---- Frozen parameters


def check_frozen_parameters(
    file: Path, tree: ast.AST, adapter_line: int | None, references: Iterable[str]
) -> dict[str, str]:
    """Raise ConfigError if a script changes which parameters are trained.

    PEFT freezes the base itself, so freezing before adapters are added is only noted. Reference
    models may be frozen.

    Args:
        file: the script, for the message.
        tree: the script.
        adapter_line: first line with a call that adds adapters; None: there are none.
        references: names of variables that hold a reference model.

    Returns:
        Key that identifies the statement -> note, for statements without effect.
    """
    loops = _find_loop_owners(tree)
    notes = {}
    for line, owner, freezes, text in _find_freezing(tree):
        root = loops.get(owner, owner)
        if root in {*references} or _IS_REFERENCE.search(root) or _IS_ACTIVATION.search(root):
            continue
        is_before = adapter_line is not None and line < adapter_line
        if is_before or (not freezes and adapter_line is None):
            if freezes:
                notes[f"frozen {line}"] = f"{text} (line {line}): adapters freeze the base anyway"
            continue
        verb = "freezes" if freezes else "unfreezes"
        raise ConfigError(
            f"{file}, line {line}: {text} {verb} parameters, so the converted run would train "
            "others than the script. Leave the statement out of the script, and name the frozen "
            "parameters in model.frozen_parameters of the converted config"
        )
    return notes


def _find_freezing(tree: ast.AST) -> Iterator[tuple[int, str, bool, str]]:
    """Yield (line, variable, freezes, text) of each statement that freezes or unfreezes tensors.

    Such a statement assigns `requires_grad`, or calls `requires_grad_` or a function named
    `freeze...`. A value that is not the literal True counts as freezing. `variable` is the first
    name in the expression of the tensors, such as `model`; `text` is the source code.
    """
    for node in ast.walk(tree):
        text = " ".join(ast.unparse(node).split())[:60] if isinstance(node, ast.expr) else ""
        for target, value in _assigned_attributes(node):
            if target.attr == "requires_grad":
                source = " ".join(ast.unparse(node).split())[:60]
                yield target.lineno, _root_name(target), _may_freeze(value), source
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        if name == "requires_grad_":
            values = [*node.args, *(k.value for k in node.keywords)]
            yield (
                node.lineno,
                _root_name(node.func),
                bool(values) and _may_freeze(values[0]),
                text,
            )
        elif re.match(r"_?freeze", name) and name not in _NO_FREEZING:
            first = node.func.value if isinstance(node.func, ast.Attribute) else None
            first = first or (node.args[0] if node.args else None)
            yield node.lineno, _root_name(first) if first else "", True, text


def _may_freeze(value: ast.expr | None) -> bool:
    """Return True unless an expression is the literal True."""
    return not (isinstance(value, ast.Constant) and value.value is True)


def _root_name(node: ast.expr) -> str:
    """Return the variable with which an expression such as `a.b[0].c()` begins; "" if none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _find_loop_owners(tree: ast.AST) -> dict[str, str]:
    """Return loop variable -> first name in the expression that its loop iterates over.

    A loop variable is omitted if several loops use it with different names.
    """
    owners: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    owners.setdefault(name.id, set()).add(_root_name(node.iter))
    return {name: next(iter(roots)) for name, roots in owners.items() if len(roots) == 1}


# ---- Settings that are assigned later


@dataclass(frozen=True)
class Assignment:
    """A statement that assigns a setting to an arguments object, such as `args.seed = 1`."""

    key: str
    line: int
    text: str
    value: Any
    """`COMPUTED` if the script must run to know it."""
    reason: str
    """Why the value is not known; empty if it is."""


def find_later_assignments(
    tree: ast.Module, configs: Iterable[str], literals: dict[str, ast.expr]
) -> Iterator[Assignment]:
    """Yield the settings that a script assigns to its arguments objects after creating them.

    They are in the order of the lines. The value is known only if it is a literal and is assigned
    in the scope that creates the object, outside of branches and loops.

    Args:
        tree: the script.
        configs: names of the classes of arguments objects.
        literals: result of `find_assignments`.
    """
    configs = set(configs)
    created = _find_created(tree, configs)
    calls = [last_name(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    families = [_family(name) for name in calls if name in configs]
    names = {name: c for objects in created.values() for name, c in objects.items()}
    for scope, node, is_branch in sorted(_walk_statements(tree), key=lambda item: item[1].lineno):
        for key, owner, value in _assigned_settings(node):
            text = " ".join(ast.unparse(node).split())[:60]
            class_name = created.get(scope, {}).get(owner)
            is_local = class_name is not None
            if not is_local and owner.endswith("trainer.args") and len(names) == 1:
                is_local, class_name = True, next(iter(names.values()))
            if not is_local and owner not in names:
                is_setting = find_setting(key) != key or key == "beta"
                if not is_setting or not _IS_ARGUMENTS.search(owner):
                    continue
            literal = COMPUTED if value is None else evaluate_literal(value, literals)
            reason = "computed by the script"
            if literal is not COMPUTED:
                reason = ""
                if is_branch:
                    reason = "assigned in a branch or a loop"
                elif not is_local:
                    reason = "assigned to an object that this scope does not create"
                elif families.count(_family(class_name or "")) > 1:
                    reason = "assigned to one of several objects of its kind"
            yield Assignment(key, node.lineno, text, COMPUTED if reason else literal, reason)


def _family(class_name: str) -> str:
    """Return a name that is equal for classes of arguments whose settings may be confused.

    It is "" for all classes of trainers; LoraConfig and BitsAndBytesConfig have their own.
    """
    return class_name if class_name in ("LoraConfig", "BitsAndBytesConfig") else ""


def note_later_changes(tree: ast.AST) -> dict[str, str]:
    """Return notes on changes of the model, tokenizer or arguments that cannot be converted.

    Returns:
        Key that identifies the statement -> note.
    """
    notes = {}
    for node in ast.walk(tree):
        for target, _ in _assigned_attributes(node):
            owner = ast.unparse(target.value)
            advice = ""
            if target.attr == "chat_template":
                advice = "set data.chat_template"
            elif owner.endswith("model.config") and target.attr not in _MODEL_CONFIG_UNUSED:
                advice = "write it into config.json of the model"
            if advice:
                text = " ".join(ast.unparse(node).split())[:60]
                notes[f"later {target.lineno} {target.attr}"] = (
                    f"{text} (line {target.lineno}): not converted; {advice}"
                )
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        is_replaced = (
            name == "replace" and node.args and _IS_ARGUMENTS.search(ast.unparse(node.args[0]))
        )
        is_set = name.startswith("set_") and _IS_ARGUMENTS.search(owner)
        is_updated = name == "update" and _IS_DICT_OF_ARGUMENTS.search(owner)
        advice = _LATER_CALLS.get(name, "")
        if is_replaced or is_set or is_updated:
            advice = "set its settings yourself"
        if advice:
            text = " ".join(ast.unparse(node).split())[:60]
            notes[f"later {node.lineno} {name}"] = (
                f"{text} (line {node.lineno}): not converted; {advice}"
            )
    return notes


def _find_created(tree: ast.Module, configs: set[str]) -> dict[ast.AST, dict[str, str]]:
    """Return scope -> {variable: class} for variables to which a new arguments object is assigned.

    A scope is the module or a function; `configs` are the names of the classes.
    """
    created: dict[ast.AST, dict[str, str]] = {}
    for scope, node, _ in _walk_statements(tree):
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Call):
            continue
        if (name := last_name(value.func)) in configs:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                created.setdefault(scope, {})[ast.unparse(target)] = name
    return created


def _walk_statements(
    node: Any, scope: ast.AST | None = None, *, is_branch: bool = False
) -> Iterator[tuple[ast.AST, ast.stmt, bool]]:
    """Yield (scope, statement, in_branch) for each simple statement, at any depth.

    The scope is the module or the innermost function. `in_branch` is True within a branch or loop,
    except `if __name__ == ...`.
    """
    scope = scope or node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk_statements(child, child)
        elif isinstance(child, ast.ClassDef | ast.With):
            yield from _walk_statements(child, scope, is_branch=is_branch)
        elif isinstance(child, ast.If | ast.For | ast.While | ast.Try | ast.Match):
            is_main = isinstance(child, ast.If) and "__name__" in ast.unparse(child.test)
            yield from _walk_statements(child, scope, is_branch=is_branch or not is_main)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _walk_statements(child, scope, is_branch=True)
        elif isinstance(child, ast.stmt):
            yield scope, child, is_branch


def _assigned_settings(node: ast.AST) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yield (attribute, owner as text, value) for each attribute that a statement assigns.

    The value is None if it is not known.
    """
    for target, value in _assigned_attributes(node):
        yield target.attr, ast.unparse(target.value), value


def _assigned_attributes(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Yield (attribute, value) for each attribute that a statement assigns or sets by `setattr`.

    The value is None if it is not known, as in `a.b += 1`.
    """
    targets: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        targets = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [(node.target, node.value)]
    elif isinstance(node, ast.AugAssign):
        targets = [(node.target, None)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets = _setattr_targets(node.value)
    for target, value in targets:
        if isinstance(target, ast.Tuple | ast.List):
            is_pair = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for i, inner in enumerate(target.elts):
                if isinstance(inner, ast.Attribute):
                    yield inner, value.elts[i] if is_pair else None  # type: ignore[union-attr]
        elif isinstance(target, ast.Attribute):
            yield target, value


def _setattr_targets(call: ast.Call) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return [(attribute, value)] for a call of `setattr`; [] for any other call.

    If the name of the attribute is not a literal, it is called `**`, and the value is None.
    """
    if last_name(call.func) != "setattr" or len(call.args) != 3:
        return []
    owner, name, value = call.args
    if isinstance(name, ast.Constant):
        attribute = ast.Attribute(owner, str(name.value), ast.Store())
        return [(ast.copy_location(attribute, call), value)]
    return [(ast.copy_location(ast.Attribute(owner, "**", ast.Store()), call), None)]
