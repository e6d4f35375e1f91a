"""What torch and transformers do not promise to keep, asked for by name."""

import importlib
import pkgutil
from typing import Any

from toolkit.errors import ModelError, ShardingError, ToolkitError


def torch_private(module: str, name: str) -> Any:
    """Return `name` of torch's `module`; ShardingError where it is gone."""
    return _private("torch", module, name, ShardingError, "2.11 to 2.15")


def transformers_private(module: str, name: str) -> Any:
    """Return `name` of transformers' `module`; ModelError where it is gone."""
    return _private("transformers", module, name, ModelError, "5.23 to 5.24")


def _private(library: str, module: str, name: str, error: type[ToolkitError], releases: str) -> Any:
    try:
        return pkgutil.resolve_name(f"{library}.{module}:{name}")
    except (ImportError, AttributeError) as cause:
        what = f"has no {module}.{name}; install one from {releases}"
        version = importlib.import_module(library).__version__
        raise error(f"{library} {version} {what}") from cause
