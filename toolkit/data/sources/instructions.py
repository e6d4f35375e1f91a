"""Build instructions and answers from the functions of Python's standard library.

Every machine has them. A short function with a docstring gives two conversations: one from its
signature and docstring to its body, and one from its code to the first sentence of its docstring.
"""

import ast
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa

from toolkit.data.sources.files import find_stdlib_files
from toolkit.data.sources.tables import compute_digest, digest_contents, load_or_build, to_tables

BODY_LINES, BODY_CHARACTERS = 30, 1200  # a function with a longer body is skipped
DOCSTRING_CHARACTERS = 400  # a longer one is cut after a paragraph
_WHERE = "the standard library"
_VERSION = 2  # part of the cache key: raise it when the same files give other pairs
_TURN = pa.struct({"role": pa.string(), "content": pa.string()})
_ROWS = pa.schema({"messages": pa.list_(_TURN)})
_PREFERENCES = pa.schema({name: pa.list_(_TURN) for name in ("prompt", "chosen", "rejected")})
_WRITE = (
    "Write the body of this Python function.",
    "Complete this Python function.",
    "Here are the signature and the docstring of a Python function. What is its body?",
)
_EXPLAIN = (
    "What does this Python function do? Answer in one sentence.",
    "Write the first line of the docstring of this Python function.",
    "Describe this Python function in one sentence.",
)
_PAIRS = 2_000  # few, because a demo evaluates its reference model on all of them first
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def build_conversations() -> datasets.Dataset:
    """Build several thousand conversations (question, answer) about Python's standard library.

    Takes a few seconds; the rows are cached on disk.
    """
    files = find_stdlib_files()
    key = compute_digest(_VERSION, digest_contents(files, _WHERE))
    tables = to_tables(_iterate_conversations(files), _ROWS)
    return load_or_build(f"rows-{key}", tables, _ROWS, "Reading the standard library")


def build_preferences() -> datasets.Dataset:
    """Build two thousand pairs of answers about Python's standard library, cached on disk.

    The rejected answer is the chosen one, followed by further text.
    """
    files = find_stdlib_files()
    key = compute_digest(_VERSION, f"longer {_PAIRS}", digest_contents(files, _WHERE))
    tables = to_tables(islice(_iterate_preferences(files), _PAIRS), _PREFERENCES)
    return load_or_build(f"rows-{key}", tables, _PREFERENCES, "Reading the standard library")


def _iterate_conversations(files: Sequence[Path]) -> Iterator[tuple[list[dict[str, str]]]]:
    """Yield the row ([question turn, answer turn],) for each distinct question and answer."""
    for question, answer in dict.fromkeys(
        pair for file in files for pair in _iterate_questions(file)
    ):
        turns = (("user", question), ("assistant", answer))
        yield ([{"role": role, "content": text} for role, text in turns],)


def _iterate_preferences(files: Sequence[Path]) -> Iterator[tuple[list[dict[str, str]], ...]]:
    """Yield (prompt, chosen, rejected), each a list of one turn.

    The rejected answer is the chosen one, followed by the previous answer of the same kind (code or
    text). The first answer of each kind gives no pair.
    """
    last = dict[bool, list[dict[str, str]]]()  # whether it is code -> the answer before
    for (turns,) in _iterate_conversations(files):
        answer, kind = turns[1:], turns[1]["content"].startswith(" ")
        if kind in last:
            longer = f"{answer[0]['content']}\n\n{last[kind][0]['content']}"
            yield turns[:1], answer, [answer[0] | {"content": longer}]
        last[kind] = answer


def _iterate_questions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) about the functions of a file, as texts.

    One question asks for the body of a function, another for a summary of it. A file that is not
    valid Python gives none.
    """
    source = file.read_bytes().decode("utf-8", "replace")
    with warnings.catch_warnings(action="ignore"):  # of escapes in old strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template of code, not code
            return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (parts := _split_function(node, lines)):
            signature, docstring, body = parts
            style = len(node.name) + len(body)  # depends on no other function
            inside = textwrap.indent(f'"""{docstring}"""', "    ")
            documented = f"{signature}\n{inside}"
            yield f"{_WRITE[style % len(_WRITE)]}\n\n{documented}", body
            question = f"{_EXPLAIN[style % len(_EXPLAIN)]}\n\n{signature}\n{body}"
            if summary := _first_sentence(docstring):
                yield question, summary


def _split_function(node: _Function, lines: list[str]) -> tuple[str, str, str] | None:
    """Split a function into (signature, docstring, body).

    Returns None if the function has no short docstring, or a body that is too long or trivial.
    """
    docstring = _shorten_docstring(ast.get_docstring(node) or "")
    if not docstring or len(node.body) < 2:
        return None
    first, second = node.body[:2]
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : first.lineno - 1])).rstrip()
    body = textwrap.dedent("\n".join(lines[first.end_lineno : node.end_lineno])).strip("\n")
    if (
        node.lineno == first.lineno  # several on one line
        or second.lineno == first.end_lineno
        or body[:1].isspace()  # a string at the left margin keeps `dedent` from its work
        or "\0" in body
        or not signature.endswith(":")
        or len(body) > BODY_CHARACTERS
        or body.count("\n") >= BODY_LINES
        or (len(node.body) == 2 and isinstance(second, ast.Pass | ast.Raise))  # says nothing
    ):
        return None
    return signature, docstring, textwrap.indent(body, "    ")


def _shorten_docstring(docstring: str) -> str:
    """Return the first paragraphs of a docstring that together fit `DOCSTRING_CHARACTERS`.

    Stops before a paragraph with ">>>". Returns "" if the first paragraph is too long, or if the
    docstring has characters that need an escape.
    """
    if '"""' in docstring or "\\" in docstring or "\0" in docstring:
        return ""
    text = ""
    for paragraph in docstring.split("\n\n"):
        longer = f"{text}\n\n{paragraph}" if text else paragraph
        if len(longer) > DOCSTRING_CHARACTERS or ">>>" in paragraph:
            break
        text = longer
    return text.strip()


def _first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring; "" if it is a signature or a single word."""
    text = " ".join(docstring.partition("\n\n")[0].split())
    sentence = text.partition(". ")[0]
    if "->" in sentence or " " not in sentence:
        return ""
    return sentence if sentence.endswith((".", ":", "!", "?")) else f"{sentence}."
