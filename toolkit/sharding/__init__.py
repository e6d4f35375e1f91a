"""FSDP2 on a model: the mesh, the plan of its units, and the plan carried out."""

from toolkit.sharding.fsdp import apply_fsdp, init_mesh, mesh_shape
from toolkit.sharding.unit_table import ledger_line, unit_table
