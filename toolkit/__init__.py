"""Pretrain and fine-tune Hugging Face causal language models that do not fit on one GPU."""

import gc
import importlib.util
import logging
from typing import Any

__version__ = "0.1.0"

# torch and transformers make half a million objects that stay: Python would search all of them for
# reference cycles six times while they are imported, 0.4 of 4 s. A run puts this back at its end.
GC_BEFORE = gc.get_threshold()
GC_RAISED = (*GC_BEFORE[:2], 100)
gc.set_threshold(*GC_RAISED)

# transformers imports peft, and peft bitsandbytes where it is installed; on a CPU without one more
# package that says, in every program, that a faster 4-bit product is not there.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import the Python API when one of its names is first used: SavedRun, run or a kind of run."""
    # `from toolkit import MODULE` asks here first; it must not import the API.
    if name.startswith("_") or importlib.util.find_spec(f"toolkit.{name}") is not None:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    api = importlib.import_module("toolkit.api")
    return getattr(api, name) if name in ("SavedRun", "run") else api.starter(name)


def __dir__() -> list[str]:
    from toolkit.config import KINDS

    return sorted({*globals(), "SavedRun", "run", *(kind.name for kind in KINDS)})
