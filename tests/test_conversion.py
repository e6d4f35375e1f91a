"""Conversions that only cut and turn need no second copy; every result is as without that."""

import pytest
import torch

from toolkit.errors import ExportError
from toolkit.export.plan import CopiesAreViews


def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut and turn a stack of matrices in the ways of transformers' converters, and compute."""
    whole, other = tensors["stack"], tensors["other"]
    left, right = torch.chunk(whole, 2, dim=1)
    found = {f"left.{i}": x.squeeze(0) for i, x in enumerate(left.contiguous().chunk(3, dim=0))}
    found |= {
        "right": right.contiguous(),
        "turned": whole.transpose(1, 2).contiguous(),
        "shaped": other.view(2, 3, 2).transpose(0, 1),
        "single": other[3],
        "none": whole[:0],
        "joined": torch.cat([left, right]),
        "scaled": whole * 2,
        "cast": whole.to(torch.float64),
        "index": torch.index_select(whole, 0, torch.tensor([2, 0])),
        "woven": whole.reshape(3, 2, 2, 5).transpose(1, 2).reshape(3, 4, 5).contiguous(),
        "viewed": whole.transpose(0, 1).contiguous().view(4, 15),
        "cloned": right.clone(),
    }
    return found


def test_what_the_conversion_gives_is_unchanged() -> None:
    tensors = {"stack": torch.rand(3, 4, 5), "other": torch.rand(12)}
    expected = convert(dict(tensors))
    with CopiesAreViews():
        found = convert(dict(tensors))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    views = {n for n, t in found.items() if t.numel() and t.untyped_storage().data_ptr() in held}
    cut = {"left.0", "left.1", "left.2", "right", "turned", "shaped", "single", "cloned"}
    assert views == cut


def test_one_that_writes_is_refused() -> None:
    tensor = torch.rand(2, 2)
    before = tensor.clone()
    with pytest.raises(ExportError, match="writes in place"), CopiesAreViews():
        tensor.clone()[0] = 0  # what is seen as a view would not have the source's bytes
    assert torch.equal(tensor, before)
