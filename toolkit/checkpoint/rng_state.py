"""The random state of one rank: python's, numpy's, torch's and the device's; no pickle."""

import random
from pathlib import Path
from typing import cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from toolkit.checkpoint.store import Folder, storage_of
from toolkit.errors import CheckpointError

# Names in every rank's file; a device that draws random numbers adds its own.
_PIECES = ("python", "python_gauss", "numpy", "numpy_position", "numpy_gauss", "torch")


def device_type() -> str:
    """Return the kind of device that draws random numbers here beside the CPU, else `cpu`."""
    # A device that the process has not used has no state, and looking would start it.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device.type if used() else "cpu"


def snapshot() -> dict[str, torch.Tensor]:
    """Return a copy of the random state of this process and of its current device."""
    _version, words, gauss = random.getstate()
    # The legacy form is a tuple; numpy's stubs allow the other one too.
    _, keys, position, has_gauss, cached = cast(tuple, numpy.random.get_state(legacy=True))
    gauss = float("nan") if gauss is None else gauss
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device_type() != "cpu":
        tensors[device_type()] = torch.get_device_module(device_type()).get_rng_state()
    return tensors


def write(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> str:
    """Write what `snapshot` returned; return the file's name."""
    folder.mkdir(exist_ok=True)
    # Not save_file: it hides the cause of a failed write, and makes a file that only we may read.
    (folder / _file_name(rank)).write_bytes(save(tensors))
    return _file_name(rank)


def restore(folder: Folder, rank: int) -> None:
    """Put the random state of `rank` in place; CheckpointError names the file or piece lacking."""
    file = folder / _file_name(rank)
    try:
        saved = load(storage_of(file).read_plain())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the random state of rank {rank}") from error
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): the random state of rank {rank}"
        ) from error
    wanted = (*_PIECES, *([] if device_type() == "cpu" else [device_type()]))
    if lacking := [name for name in wanted if name not in saved]:
        raise CheckpointError(f"{file} lacks the random state of {', '.join(lacking)}")
    try:
        gauss = saved["python_gauss"].item()
        random.setstate((3, tuple(saved["python"].tolist()), None if gauss != gauss else gauss))
        position, has_gauss = saved["numpy_position"].tolist()
        keys = saved["numpy"].numpy().astype(numpy.uint32)
        numpy.random.set_state(("MT19937", keys, position, has_gauss, saved["numpy_gauss"].item()))
        torch.set_rng_state(saved["torch"])
        if device_type() != "cpu":
            torch.get_device_module(device_type()).set_rng_state(saved[device_type()])
    except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{file} holds no random state: {error}") from error


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
