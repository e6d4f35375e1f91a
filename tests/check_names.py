"""Check Python files for vague names and unclear first lines of docstrings.

    python tests/check_names.py toolkit recipes

A name should say what it holds, and the first line of a docstring what its function does. The lists
below are words that say neither. The check prints one line per finding and exits with 1 if there is
any. CONTRIBUTING.md explains what to write instead.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

VAGUE_NAMES = {
    "asked",
    "counted",
    "done",
    "each",
    "found",
    "given",
    "gone",
    "held",
    "how",
    "kept",
    "known",
    "left",
    "made",
    "meant",
    "named",
    "one",
    "others",
    "own",
    "rest",
    "said",
    "seen",
    "shown",
    "taken",
    "told",
    "tried",
    "wanted",
    "what",
}
"""Participles, pronouns and fillers that are no names."""

FIELDS_OF_FORMATS = {("encoded.py", "kept"), ("stages.py", "said")}
"""File and field: names that files on the disk or `--json` already have."""

UNCLEAR_OPENING = re.compile(
    r"(return )?(how it|of|that which|what|where|whether or|which|who|whose)\b", re.I
)
"""First words of docstrings after which a reader still does not know what the function does."""

DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each vague variable, argument, function and class."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, DEFINITIONS[1:]):
            name = node.name
        if name is not None and name.strip("_").lower() in VAGUE_NAMES:
            yield getattr(node, "lineno", 0), name


def find_unclear_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring with an unclear opening."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            text = ast.get_docstring(node)
            if text and UNCLEAR_OPENING.match(text):
                yield node.body[0].lineno, text.splitlines()[0]


def list_findings(file: Path) -> list[str]:
    """Return one line for each finding in `file`."""
    tree = ast.parse(file.read_text("utf-8"))
    names = [
        (line, f"vague name `{name}`")
        for line, name in find_vague_names(tree)
        if (file.name, name) not in FIELDS_OF_FORMATS
    ]
    openings = [
        (line, f"unclear docstring: {text}") for line, text in find_unclear_docstrings(tree)
    ]
    return [f"{file}:{line}: {message}" for line, message in sorted(names + openings)]


def main(paths: list[str]) -> int:
    """Print the findings in the files and folders `paths`; return 1 if there are any, else 0."""
    findings = []
    for path in map(Path, paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            findings += list_findings(file)
    print("\n".join(findings) if findings else "names: no findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
