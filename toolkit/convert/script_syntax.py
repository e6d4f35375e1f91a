"""Read names, literals and assignments in the syntax tree of a script."""

import ast
from typing import Any

COMPUTED = object()
"""Placeholder for a value that is only known when the script runs."""
_CHANGING_METHODS = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def find_assignments(tree: ast.AST) -> dict[str, ast.expr]:
    """Return name -> expression, for names that a script assigns exactly once.

    Names of parameters, and of lists or mappings that the script changes later, are omitted.
    """
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            values.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).extend([None, None])
        elif changed := _changed_name(node):
            values.setdefault(changed, []).extend([None, None])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            values[target.id] = [node.value] if len(values[target.id]) == 1 else [None, None]
    return {n: v[0] for n, v in values.items() if len(v) == 1 and v[0] is not None}


def _changed_name(node: ast.AST) -> str:
    """Return the name of the list or mapping that a subscript or call changes; "" if none.

    Examples are `a[0] = 1` and `a.append(1)`.
    """
    inner: ast.AST | None = None
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        inner = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        inner = node.func.value if node.func.attr in _CHANGING_METHODS else None
    return inner.id if isinstance(inner, ast.Name) else ""


def evaluate_literal(node: ast.expr, assignments: dict[str, ast.expr], depth: int = 0) -> Any:
    """Evaluate an expression that is a literal, or a name that is assigned one.

    Attributes of `torch` and `TaskType` give their name, such as "bfloat16".

    Args:
        node: the expression.
        assignments: result of `find_assignments`.
        depth: number of names that were followed so far; more than five are not.

    Returns:
        The value, or `COMPUTED` if it is only known when the script runs.
    """
    if isinstance(node, ast.Name) and node.id in assignments and depth < 5:
        return evaluate_literal(assignments[node.id], assignments, depth + 1)
    if isinstance(node, ast.Attribute) and last_name(node.value) in ("torch", "TaskType"):
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return COMPUTED


def last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c` and `a` for `a`; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
