"""Keep activations in host memory between forward and backward, copied on separate streams.

The tensors that a layer keeps form one group. Its copies to the host run during the next layers'
forward. When the backward first needs a tensor of a group, the group of the previous layer is
fetched too, so that it is on the device when its turn comes. Without streams (on a CPU) the same
copies run in order.
"""

import functools
import weakref
from typing import Any

import torch

TO_HOST = "activations to host"
"""Label of a copy to the host in profiles."""


class HostMemory:
    """Keeps activations of one model's layers in host memory between forward and backward.

    Args:
        pin: use page-locked memory, so that copies do not block the CPU.
    """

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self._latest: weakref.ref[_LayerActivations] | None = None

    def group(self) -> "_LayerActivations":
        """Create the group of a layer whose forward begins now, linked to the previous layer's."""
        group = _LayerActivations(self.pin, self._latest)
        self._latest = weakref.ref(group)
        return group


class _LayerActivations:
    """The group of one layer's activations that are in host memory."""

    # It refers to its tensors weakly. With a cycle they would stay until garbage is collected,
    # which happens at few steps only.
    def __init__(self, pin: bool, before: "weakref.ref[_LayerActivations] | None") -> None:
        self._pin = pin
        self._before = before
        self._tensors: list[weakref.ref[OnHost]] = []

    def keep(self, tensor: torch.Tensor) -> "OnHost":
        """Start copying a tensor to host memory, and return the object that can bring it back.

        Nothing may write to the tensor afterwards.
        """
        with torch.profiler.record_function(TO_HOST):
            stored = OnHost(tensor.detach(), self, self._pin)
        self._tensors.append(weakref.ref(stored))
        return stored

    def fetch(self) -> None:
        """Start to copy the tensors of this layer and of the previous layer back to the device."""
        before = None if self._before is None else self._before()
        for ref in [*self._tensors, *(before._tensors if before is not None else ())]:
            if (stored := ref()) is not None:
                stored.start()


class OnHost:
    """One activation in host memory. Creating the object starts the copy to the host."""

    def __init__(self, tensor: torch.Tensor, group: _LayerActivations, pin: bool) -> None:
        self._device = tensor.device
        self._group = group
        self._is_returned = False
        self._back: torch.Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        if (streams := _copy_streams(tensor.device)) is None:
            self._host.copy_(tensor)
            return
        api = torch.get_device_module(tensor.device)
        out = streams[0]
        out.wait_stream(api.current_stream(tensor.device))
        with api.stream(out):
            self._host.copy_(tensor, non_blocking=pin)
        # The allocator must not reuse the memory before the copy is done.
        tensor.record_stream(out)
        self._copied = out.record_event()

    def start(self) -> None:
        """Start to copy the tensor back to its device. Later calls do nothing."""
        if self._back is not None or self._is_returned:
            return
        if (streams := _copy_streams(self._device)) is None:
            self._back = self._host.to(self._device)
            return
        back = streams[1]
        back.wait_event(self._copied)
        with torch.get_device_module(self._device).stream(back):
            self._back = self._host.to(self._device, non_blocking=True)
        self._copied = back.record_event()

    def get(self) -> torch.Tensor:
        """Copy the tensor back to its device, and return the copy.

        Also starts the copies of the other tensors of its layer and of the previous layer. The
        current stream waits for the copy; the CPU does not.
        """
        if self._is_returned:
            return self._host.to(self._device)
        self.start()
        self._group.fetch()
        tensor: Any = self._back
        self._back = None
        self._is_returned = True
        if _copy_streams(self._device) is not None:
            current = torch.get_device_module(self._device).current_stream(self._device)
            current.wait_event(self._copied)
            tensor.record_stream(current)
        return tensor


@functools.cache
def _copy_streams(device: torch.device) -> tuple[Any, Any] | None:
    """Create a stream for copies to the host, and one for copies back; None for a CPU. Cached."""
    if device.type == "cpu":
        return None
    api = torch.get_device_module(device)
    return api.Stream(device), api.Stream(device)
