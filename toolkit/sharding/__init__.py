"""FSDP2 on a model: the plan of its units, and the plan carried out."""

from toolkit.sharding.fsdp import Sharded, apply_fsdp
from toolkit.sharding.unit_table import ledger_line, unit_table
