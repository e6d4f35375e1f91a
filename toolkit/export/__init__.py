"""Export a checkpoint or a live model as a Hugging Face folder, or its adapter as a PEFT folder.

consolidation    export a checkpoint
live             export a model that is still training
exporter         the exports of a run, at the steps that its config names
after_export     run a user's command on each of them
plan             names, dtypes and files of the exported folder, from shapes alone
readers          read the tensors to export: from a checkpoint, or from a base and an adapter
writer           write the folder, and prove that its files hold the source's values
adapter_loading  load the adapter that a run continues; prove that a saved adapter can be reloaded
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.export.adapter_loading import check_adapter, load_adapter, prove_adapter
    from toolkit.export.consolidation import consolidate
    from toolkit.export.exporter import Exporter
    from toolkit.export.live import export_live, export_step, has_export

import_when_used(__name__)

__all__ = [
    "Exporter",
    "check_adapter",
    "consolidate",
    "export_live",
    "export_step",
    "has_export",
    "load_adapter",
    "prove_adapter",
]
