"""FSDP2 on a model: the mesh, the plan of its units, and the plan carried out."""

from toolkit.sharding.fsdp import apply_fsdp, init_mesh

__all__ = ["apply_fsdp", "init_mesh"]
