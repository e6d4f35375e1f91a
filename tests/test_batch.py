"""A `Batch` where PyTorch and Accelerate move it: page-locked, to a device, inside other values."""

import torch
from accelerate.utils import send_to_device
from torch.utils.data._utils.pin_memory import pin_memory

from toolkit.data.samples.batch import IGNORED, Batch


def made() -> Batch:
    labels = torch.tensor([[IGNORED, 5, 6, IGNORED], [7, 8, 9, 10]])
    return Batch.of(labels, count=True, input_ids=labels.clamp(min=0), max_length_q=4)


def test_targets_stand_where_they_are_predicted() -> None:
    batch = made()
    assert batch.targets.tolist() == [[5, 6, IGNORED, IGNORED], [8, 9, 10, IGNORED]]
    assert batch.n_targets == int(batch.count) == 5
    assert Batch.of(batch.targets).n_targets is None


def test_accelerate_moves_it_to_a_device() -> None:
    for sent in (send_to_device(made(), "meta", non_blocking=True), made().to("meta")):
        assert sent.targets.is_meta
        assert sent.inputs["input_ids"].is_meta
        assert (sent.inputs["max_length_q"], sent.n_targets) == (4, 5)
    read = send_to_device({"batch": made(), "places": "{}"}, "meta", non_blocking=True)
    assert read["batch"].targets.is_meta  # as a stream gives it
    assert read["places"] == "{}"


def test_a_loader_pins_it(monkeypatch) -> None:
    pinned: list[torch.Size] = []
    note = lambda self, *_: pinned.append(self.shape) or self  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "pin_memory", note)
    assert isinstance(pin_memory(made()), Batch)
    assert len(pinned) == 2  # input_ids and targets
    assert isinstance(pin_memory({"batch": made(), "places": "{}"})["batch"], Batch)
    assert len(pinned) == 4
