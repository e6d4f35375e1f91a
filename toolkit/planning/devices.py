"""Figures of devices from their data sheets, and the shares of them that a step reaches."""

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
    """Figures of a device: memory, speed, bandwidth, and links to other devices and the host."""

    name: str
    memory: float
    """Bytes."""
    bf16: float
    """FLOP/s of dense matrix products."""
    fp32: float
    """FLOP/s without TF32, which PyTorch does not use by default."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to other devices of its node, in one direction."""
    source: str = ""
    """The origin of the figures."""
    kind: str = "cuda"
    """The device type of torch."""
    per_node: int = 8
    network: float = 50e9
    """Bytes/s between nodes for each device, in one direction: 400 Gb/s."""
    host_link: float = 25e9
    """Bytes/s to host memory, in one direction: PCIe 4, as measured with copies."""
    host_bandwidth: float = 20e9
    """Bytes/s of host memory for each process, which an offloaded optimizer uses."""


# Shares of their peaks that matrix products and memory reach. Measured on an H100: 0.75 to 0.80 and
# 0.90 (docs/evidence/benchmarks/gpu.md). The share of links, and the least seconds of an operation,
# are assumed.
PRODUCTS, MEMORY, LINKS, KERNEL = 0.78, 0.90, 0.75, 5e-6
_MAX_FIGURE = 1e24  # in a file


def _build_device(
    name: str, memory: float, fp32: float, bandwidth: float, link: float, sheet: str
) -> Device:
    """Build a `Device` from figures in GB, TFLOP/s and GB/s; the bf16 peak is looked up by name.

    Raises:
        KeyError: `find_peak_flops` does not know the name.
    """
    bf16 = find_peak_flops(name)
    if bf16 is None:
        raise KeyError(f"training.flops has no peak FLOP/s of {name}")
    return Device(name, memory * 1e9, bf16, fp32 * 1e12, bandwidth * 1e9, link * 1e9, sheet)


_SHEET = "data sheet of NVIDIA"
DEVICES = {
    "a100-40gb": _build_device("A100 SXM 40 GB", 40, 19.5, 1555, 300, f"{_SHEET} A100"),
    "a100-80gb": _build_device("A100 SXM 80 GB", 80, 19.5, 2039, 300, f"{_SHEET} A100"),
    "h100": _build_device("H100 SXM", 80, 67, 3350, 450, f"{_SHEET} H100"),
    "h100-pcie": _build_device("H100 PCIe", 80, 51, 2000, 64, f"{_SHEET} H100 PCIe; PCIe 5 links"),
    "h200": _build_device("H200 SXM", 141, 67, 4800, 450, f"{_SHEET} H200"),
    "b200": _build_device("B200 SXM", 180, 75, 8000, 900, f"{_SHEET} HGX B200"),
    "l40s": _build_device("L40S", 48, 91.6, 864, 32, f"{_SHEET} L40S; PCIe 4 links"),
    "rtx4090": _build_device(
        "RTX 4090", 24, 82.6, 1008, 32, "NVIDIA's Ada white paper; PCIe 4 links"
    ),
    "mi300x": _build_device("MI300X", 192, 163.4, 5300, 448, "data sheet of AMD Instinct MI300X"),
}


def this_host() -> Device:
    """Describe this machine's CPU as a `Device`: its real memory, and assumed figures for speed."""
    memory = float(min(psutil.virtual_memory().total, container_memory().limit))
    flops = torch.get_num_threads() * 1e11
    return Device("CPU", memory, flops, flops, 2e10, 5e9, "assumed", kind="cpu", per_node=1)


def find_device_name(torch_name: str) -> str | None:
    """Find the key in `DEVICES` for a name that torch reports, such as `NVIDIA H100 80GB HBM3`.

    If several keys match, the most specific one is returned. If none matches, None is returned.
    """
    text = torch_name.lower().replace("rtx ", "rtx")
    words = {name: name.split("-") for name in DEVICES}
    matching = [
        name
        for name, parts in words.items()
        if all(re.search(rf"\b{part}\b", text) for part in parts)
    ]
    # `h100-pcie` is more specific than `h100`.
    return max(matching, key=lambda name: len(words[name]), default=None)


def with_index(device: torch.device) -> torch.device:
    """Return the device with an index: `cuda` becomes the current device, such as `cuda:0`.

    The CPU is returned unchanged. Some functions of torch need the index.
    """
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def figures_of(device: torch.device) -> Device:
    """Look up the `Device` of a torch device. An unknown accelerator gets an H100's figures."""
    if device.type == "cpu":
        return this_host()
    torch_name = torch.get_device_module(device).get_device_name(device)
    known_name = find_device_name(torch_name)
    if known_name is not None:
        return DEVICES[known_name]
    source = f"an H100's, because {torch_name} is not known"
    return dataclasses.replace(DEVICES["h100"], name=torch_name, source=source)


def device_here(name: str | None = None) -> tuple[Device, torch.device]:
    """Find the device of this process on which to measure, and its figures.

    This is the accelerator, or the CPU if torch sees no accelerator or `name` requests the CPU.

    Args:
        name: as for `device_of`. None: look the figures up by the name that torch reports.

    Returns:
        (figures, torch device). An accelerator has an index.

    Raises:
        ConfigError: torch sees no accelerator, but `name` is given and is not "cpu". Or the figures
            are not known, or their file is invalid.
    """
    if not torch.accelerator.is_available():
        if name is not None and name.lower() != "cpu":
            raise ConfigError(f"--device {name}: torch sees no such device here; give --device cpu")
        return this_host(), torch.device("cpu")
    device = with_index(torch.device(torch.accelerator.current_accelerator() or "cuda"))
    torch_name = torch.get_device_module(device).get_device_name(device)
    figures_name = name or find_device_name(torch_name)
    if figures_name is None:
        raise ConfigError(f"the figures of {torch_name} are not known; give --device FILE")
    figures = device_of(figures_name)
    return figures, torch.device("cpu") if figures.kind == "cpu" else device


def device_of(name: str) -> Device:
    """Look up a device by its key in `DEVICES`, or read its figures from a YAML file.

    Args:
        name: `cpu` for this machine's CPU, a key, or a YAML file whose keys are the fields of
            `Device`.

    Raises:
        ConfigError: the name is neither a known device nor a YAML file, or the file is invalid.
    """
    if name.lower() == "cpu":
        return this_host()
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"--device {name} is none of cpu, {', '.join(DEVICES)}; or give a YAML file that "
            "describes one"
        )
    try:
        device = load(Device, name)
    except ConfigError as error:
        # The rest of the message is about the settings of a run.
        reason = str(error).partition("; set it in")[0]
        raise ConfigError(f"--device {name}: {reason}") from None
    figures = {n: v for n, v in vars(device).items() if isinstance(v, int | float)}
    if invalid := [n for n, v in figures.items() if not 1 <= v <= _MAX_FIGURE]:
        raise ConfigError(f"{name}: {invalid[0]} must be from 1 to {_MAX_FIGURE:g}")
    return device if device.source else dataclasses.replace(device, source=name)
