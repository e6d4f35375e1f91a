"""Access private APIs of torch and transformers, with a clear error if they are removed."""

import importlib
import pkgutil
from typing import Any

from toolkit.errors import ModelError, ShardingError, ToolkitError


def torch_private(module: str, name: str) -> Any:
    """Get `name` of torch's `module`; raise ShardingError if it does not exist."""
    return _resolve_private("torch", module, name, ShardingError, "2.11 to 2.15")


def transformers_private(module: str, name: str) -> Any:
    """Get `name` of transformers' `module`; raise ModelError if it does not exist."""
    return _resolve_private("transformers", module, name, ModelError, "5.23 to 5.24")


def _resolve_private(
    library: str, module: str, name: str, error: type[ToolkitError], releases: str
) -> Any:
    try:
        return pkgutil.resolve_name(f"{library}.{module}:{name}")
    except (ImportError, AttributeError) as cause:
        version = importlib.import_module(library).__version__
        raise error(
            f"{library} {version} has no {module}.{name}; install one from {releases}"
        ) from cause
