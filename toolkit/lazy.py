"""Packages that import their modules when a name is first used (PEP 562).

A command pays only for the libraries that it needs: `toolkit verify` reads a checkpoint without
transformers, although `toolkit.checkpoint` also exports functions that need it.
"""

import ast
import importlib
import sys
from typing import Any


def import_when_used(package: str) -> None:
    """Let `package` import each name that it exports when that name is first read.

    The package lists its names once, as ordinary imports under `if TYPE_CHECKING:`, which type
    checkers and editors read. This function reads the same block, so there is no second list:

        if TYPE_CHECKING:
            from toolkit.export.consolidation import consolidate

        import_when_used(__name__)

    `from toolkit.export import consolidate` and `toolkit.export.consolidate` then work as usual. No
    name may equal that of a module of the package, because an imported module sets that name.

    Args:
        package: `__name__` of the package, from its `__init__.py`.
    """
    module: Any = sys.modules[package]
    homes = _exported_names(module.__spec__.loader.get_source(package))

    def get_attribute(name: str) -> Any:
        """Import the module that has `name` and return its attribute; see PEP 562."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    module.__getattr__ = get_attribute
    module.__dir__ = lambda: sorted({*vars(module), *homes})


def _exported_names(source: str) -> dict[str, str]:
    """Map each name that is imported under `if TYPE_CHECKING:` in `source` to its module.

    `source` is the code of a package's `__init__.py`.
    """
    homes: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for line in statement.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    homes |= {name.name: line.module for name in line.names}
    return homes
