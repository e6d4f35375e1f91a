"""The check of names finds vague names and unclear docstrings, and nothing in clear code."""

from pathlib import Path

import check_names


def test_vague_names_and_openings_are_found(tmp_path: Path) -> None:
    """Each kind of binding is checked, with or without leading underscores."""
    file = tmp_path / "unclear.py"
    file.write_text(
        '"""What of it."""\n\n'
        'def _left(told, /, *, path):\n    """Return what is left."""\n'
        "    found = told\n    for own in found:\n        expected = own\n    return expected\n"
    )
    findings = [line.split(": ", 1)[1] for line in check_names.list_findings(file)]
    assert findings == [
        "unclear docstring: What of it.",
        "vague name `_left`",
        "vague name `told`",
        "unclear docstring: Return what is left.",
        "vague name `found`",
        "vague name `own`",
    ]
    assert check_names.main([str(tmp_path)]) == 1


def test_clear_code_passes(tmp_path: Path) -> None:
    """Names that only contain a listed word are fine."""
    (tmp_path / "clear.py").write_text(
        '"""Read manifests."""\n\n'
        'def read_manifest(path):\n    """Read the manifest at `path`."""\n'
        "    known_keys = {}\n    return known_keys\n"
    )
    assert check_names.main([str(tmp_path)]) == 0
