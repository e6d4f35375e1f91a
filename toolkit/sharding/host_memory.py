"""Activations in host memory between forward and backward, copied on streams of their own.

What a layer keeps is one group. Its copies to the host run beside the next layers' forward. When
the backward first asks for a tensor of a group, that of the layer before is fetched too, so that
it is there when its turn comes. Without streams (a CPU) the same copies run in order.
"""

import functools
import weakref
from typing import Any

import torch

TO_HOST = "activations to host"
"""What profiles call a copy to the host."""


class HostMemory:
    """Where the layers of one model keep what their backward needs; `pin`: page-locked."""

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self._latest: weakref.ref[_Group] | None = None

    def group(self) -> "_Group":
        """Return the group of a layer whose forward begins now."""
        group = _Group(self.pin, self._latest)
        self._latest = weakref.ref(group)
        return group


class _Group:
    # Held by its tensors, and it holds none: garbage is collected at few steps only.
    def __init__(self, pin: bool, before: "weakref.ref[_Group] | None") -> None:
        self._pin, self._before = pin, before
        self._tensors: list[weakref.ref[OnHost]] = []

    def keep(self, tensor: torch.Tensor) -> "OnHost":
        """Start copying a tensor to host memory; it must not be written to from here on."""
        with torch.profiler.record_function(TO_HOST):
            kept = OnHost(tensor.detach(), self, self._pin)
        self._tensors.append(weakref.ref(kept))
        return kept

    def fetch(self) -> None:
        """Start bringing back what nobody has asked for yet, then the same of the layer before."""
        before = None if self._before is None else self._before()
        for ref in [*self._tensors, *(before._tensors if before is not None else ())]:
            if (kept := ref()) is not None:
                kept.start()


class OnHost:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, group: _Group, pin: bool) -> None:
        self._device, self._group, self._given = tensor.device, group, False
        self._back: torch.Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        if (streams := _streams(tensor.device)) is None:
            self._host.copy_(tensor)
            return
        api, out = torch.get_device_module(tensor.device), streams[0]
        out.wait_stream(api.current_stream(tensor.device))
        with api.stream(out):
            self._host.copy_(tensor, non_blocking=pin)
        tensor.record_stream(out)  # its memory is not given away before the copy is done
        self._copied = out.record_event()

    def start(self) -> None:
        """Start copying it back, once."""
        if self._back is not None or self._given:
            return
        if (streams := _streams(self._device)) is None:
            self._back = self._host.to(self._device)
            return
        back = streams[1]
        back.wait_event(self._copied)
        with torch.get_device_module(self._device).stream(back):
            self._back = self._host.to(self._device, non_blocking=True)
        self._copied = back.record_event()

    def get(self) -> torch.Tensor:
        """Return it on its device; the current stream waits for the copy, the host does not."""
        if self._given:
            return self._host.to(self._device)
        self.start()
        self._group.fetch()
        tensor: Any = self._back
        self._back, self._given = None, True
        if _streams(self._device) is not None:
            current = torch.get_device_module(self._device).current_stream(self._device)
            current.wait_event(self._copied)
            tensor.record_stream(current)
        return tensor


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any] | None:
    """Return a stream to the host and one back; None of a CPU."""
    if device.type == "cpu":
        return None
    api = torch.get_device_module(device)
    return api.Stream(device), api.Stream(device)
