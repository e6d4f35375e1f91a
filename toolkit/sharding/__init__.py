"""FSDP2 on a model: the plan of its units, and the plan carried out."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.sharding.fsdp import Sharded, apply_fsdp
    from toolkit.sharding.unit_table import format_dtype_ledger, format_unit_table

import_when_used(__name__)
