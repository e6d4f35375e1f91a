"""What is a view of a source is found to be one, and nothing else is taken for one."""

import torch

from toolkit.export.strided import trace_views


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
        "index": torch.index_select(whole, 0, torch.tensor([2, 0], device=whole.device)),
    }
    return found


def test_views_are_what_the_conversion_gives() -> None:
    tensors = {"stack": torch.rand(3, 4, 5), "other": torch.rand(12)}
    views = trace_views(convert, {name: tuple(t.shape) for name, t in tensors.items()})
    real = convert(tensors)
    assert views.keys() == real.keys()
    assert {n for n, v in views.items() if v is None} == {"joined", "scaled", "cast", "index"}
    for name, view in views.items():
        if view is None:
            continue
        source = tensors[view.source]
        assert torch.equal(source.as_strided(view.size, view.stride, view.offset), real[name])
        flat = source.reshape(-1)
        runs = [flat[first : first + count] for first, count in view.runs()]
        assert torch.equal(torch.cat([*runs, flat[:0]]), real[name].reshape(-1)), name
    left = views["left.1"]
    assert left is not None
    assert left.run_length() == 10


def test_one_that_writes_or_fails_gives_none() -> None:
    def writes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (tensor,) = tensors.values()
        tensor[0] = 0  # what is seen as a view would not have the source's bytes
        return {"out": tensor}

    def fails(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (tensor,) = tensors.values()
        return {"out": tensor * tensor.sum().item()}

    assert trace_views(writes, {"a": (2, 2)}) == {}
    assert trace_views(fails, {"a": (2, 2)}) == {}
