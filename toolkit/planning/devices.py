"""Figures of devices: what their vendors print, and what of that a step is assumed to reach."""

import dataclasses
import re
from dataclasses import dataclass

import psutil
import torch

from toolkit.config import load
from toolkit.errors import ConfigError
from toolkit.formats.container_memory import container_memory
from toolkit.training.flops import find_peak_flops


@dataclass(frozen=True)
class Device:
    """One accelerator, and how it reaches others."""

    name: str
    memory: float
    """Bytes."""
    bf16: float
    """FLOP/s of dense matrix products."""
    fp32: float
    """FLOP/s without TF32, PyTorch's default."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to others of its node, in one direction."""
    source: str = ""
    """Where the figures are from."""
    kind: str = "cuda"
    """As torch calls its type."""
    per_node: int = 8
    network: float = 50e9
    """Bytes/s between nodes for each device, in one direction: 400 Gb/s."""
    host_link: float = 25e9
    """Bytes/s to host memory, in one direction: PCIe 4, as measured copies go."""
    host_bandwidth: float = 20e9
    """Bytes/s of host memory that each process has, for an offloaded optimizer."""


# What matrix products and memory reach of their peaks, as on an H100: 0.75 to 0.80 and 0.90
# (docs/evidence/benchmarks/gpu.md); assumed: the same of links, and the least time of an operation.
PRODUCTS, MEMORY, LINKS, KERNEL = 0.78, 0.90, 0.75, 5e-6
_MOST = 1e24  # of any figure in a file


def _device(
    name: str, memory: float, fp32: float, bandwidth: float, link: float, sheet: str
) -> Device:
    """Return a device of GB, TFLOP/s and GB/s."""
    bf16 = find_peak_flops(name)
    if bf16 is None:
        raise KeyError(f"training.flops has no peak of {name}")
    return Device(name, memory * 1e9, bf16, fp32 * 1e12, bandwidth * 1e9, link * 1e9, sheet)


_SHEET = "data sheet of NVIDIA"
KNOWN = {
    "a100-40gb": _device("A100 SXM 40 GB", 40, 19.5, 1555, 300, f"{_SHEET} A100"),
    "a100-80gb": _device("A100 SXM 80 GB", 80, 19.5, 2039, 300, f"{_SHEET} A100"),
    "h100": _device("H100 SXM", 80, 67, 3350, 450, f"{_SHEET} H100"),
    "h100-pcie": _device("H100 PCIe", 80, 51, 2000, 64, f"{_SHEET} H100 PCIe; PCIe 5 links"),
    "h200": _device("H200 SXM", 141, 67, 4800, 450, f"{_SHEET} H200"),
    "b200": _device("B200 SXM", 180, 75, 8000, 900, f"{_SHEET} HGX B200"),
    "l40s": _device("L40S", 48, 91.6, 864, 32, f"{_SHEET} L40S; PCIe 4 links"),
    "rtx4090": _device("RTX 4090", 24, 82.6, 1008, 32, "NVIDIA's Ada white paper; PCIe 4 links"),
    "mi300x": _device("MI300X", 192, 163.4, 5300, 448, "data sheet of AMD Instinct MI300X"),
}


def this_host() -> Device:
    """Return this machine's CPU, whose figures are assumed: a measured step tells the time."""
    memory = float(min(psutil.virtual_memory().total, container_memory().limit))
    flops = torch.get_num_threads() * 1e11
    return Device("CPU", memory, flops, flops, 2e10, 5e9, "assumed", kind="cpu", per_node=1)


def named_as(name: str) -> str | None:
    """Return the name in `KNOWN` of the device that torch gives as `name`, such as `NVIDIA H100
    80GB HBM3`; None of one that is not known.
    """
    plain = name.lower().replace("rtx ", "rtx")
    words = {known: known.split("-") for known in KNOWN}
    fitting = [k for k, w in words.items() if all(re.search(rf"\b{part}\b", plain) for part in w)]
    return max(fitting, key=lambda known: len(words[known]), default=None)


def with_index(device: torch.device) -> torch.device:
    """Return `device` by its index, which a run of one process may leave out and some functions of
    torch ask for: where there is none, that of the device in use.
    """
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def figures_of(device: torch.device) -> Device:
    """Return the figures of a run's device; of one that is not known an H100's."""
    if device.type == "cpu":
        return this_host()
    said = torch.get_device_module(device).get_device_name(device)
    known = named_as(said)
    other = dataclasses.replace(KNOWN["h100"], name=said, source=f"an H100's, {said} is not known")
    return other if known is None else KNOWN[known]


def device_here(name: str | None = None) -> tuple[Device, torch.device]:
    """Return this process's device and its figures: those of `name` where that is given.
    ConfigError: `name` is of another kind, or needed and not given.
    """
    if not torch.accelerator.is_available():
        if name not in (None, "cpu"):
            raise ConfigError(f"--device {name}: torch sees no such device here; give --device cpu")
        return this_host(), torch.device("cpu")
    here = with_index(torch.device(torch.accelerator.current_accelerator() or "cuda"))
    said = torch.get_device_module(here).get_device_name(here)
    known = name or named_as(said)
    if known is None:
        raise ConfigError(f"the figures of {said} are not known; give --device FILE")
    return device_of(known), here


def device_of(name: str) -> Device:
    """Return a known device, or the one that a YAML file describes; ConfigError: neither.

    `cpu` is this machine's. The file has the fields of `Device`.
    """
    if name.lower() == "cpu":
        return this_host()
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"--device {name} is none of cpu, {', '.join(KNOWN)}; or give a YAML file that "
            "describes one"
        )
    try:
        device = load(Device, name)
    except ConfigError as error:
        what = str(error).partition("; set it in")[0]  # which is of a run's settings
        raise ConfigError(f"--device {name}: {what}") from None
    numbers = {n: v for n, v in vars(device).items() if isinstance(v, int | float)}
    if bad := [n for n, v in numbers.items() if not 1 <= v <= _MOST]:
        raise ConfigError(f"{name}: {bad[0]} must be from 1 to {_MOST:g}")
    return device if device.source else dataclasses.replace(device, source=name)
