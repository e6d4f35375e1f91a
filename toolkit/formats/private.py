"""Access private APIs of torch and transformers, with a clear error if they are removed."""

import importlib
import pkgutil
from typing import Any

from toolkit.errors import ModelError, ShardingError, ToolkitError


def torch_private(module: str, name: str) -> Any:
    """Import a private attribute of torch; raise ShardingError if this torch version lacks it.

    Args:
        module: module path below `torch`, such as "distributed.tensor._utils".
        name: attribute of the module, possibly dotted.
    """
    return _resolve_private("torch", module, name, ShardingError, "2.11 to 2.15")


def transformers_private(module: str, name: str) -> Any:
    """Import a private attribute of transformers; raise ModelError if this version lacks it.

    Args:
        module: module path below `transformers`, such as "modeling_utils".
        name: attribute of the module, possibly dotted.
    """
    return _resolve_private("transformers", module, name, ModelError, "5.23 to 5.24")


def _resolve_private(
    library: str, module: str, name: str, error: type[ToolkitError], releases: str
) -> Any:
    """Import `library.module:name`, or raise `error` if this version of the library lacks it.

    Args:
        library: name of the library.
        module: module path in the library.
        name: attribute of the module, possibly dotted.
        error: class of the exception.
        releases: versions that have it, for the message.
    """
    try:
        return pkgutil.resolve_name(f"{library}.{module}:{name}")
    except (ImportError, AttributeError) as cause:
        version = importlib.import_module(library).__version__
        raise error(
            f"{library} {version} has no {module}.{name}; install one from {releases}"
        ) from cause
