"""What is told where ranks of a test fail: why, and not that the others lost them."""

import time

import pytest
from distributed import run_ranks
from torch.multiprocessing.spawn import ProcessRaisedException


def _fail_apart(rank: int, world: int, cause: int) -> None:
    if rank == cause:
        time.sleep(0.3)  # as one that is still writing its traceback
        raise ValueError("the cause")
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")


@pytest.mark.parametrize("cause", [0, 1])
def test_the_cause_is_told_and_not_the_lost_connection(cause: int) -> None:
    with pytest.raises(ProcessRaisedException, match="the cause") as error:
        run_ranks(_fail_apart, 2, cause, group=False)
    assert error.value.error_index == cause


def _lose(rank: int, world: int) -> None:
    raise RuntimeError("Connection closed by peer")


def test_a_lost_connection_without_another_cause_is_told() -> None:
    with pytest.raises(ProcessRaisedException, match="Connection closed by peer"):
        run_ranks(_lose, 2, group=False)
