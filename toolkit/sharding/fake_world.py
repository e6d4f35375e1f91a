"""A process group of any size in one process, for shapes and placements.

Owns the one door to torch's fake backend: collectives return at once and move nothing, so that the
layout of a run on many GPUs can be looked at on a laptop. Values computed in it mean nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from toolkit.errors import ShardingError


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `world_size` processes that do not exist, while entered.

    Raises:
        ShardingError: there is a process group already, or torch has no fake one.
    """
    if dist.is_initialized():
        raise ShardingError("a process group exists already; plan in a process of its own")
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise ShardingError(
            f"torch {torch.__version__} has no fake process group ({error}); use 2.11 to 2.13"
        ) from error
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
