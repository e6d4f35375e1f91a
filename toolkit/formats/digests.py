"""The digest of a tensor: from live memory or from a file, whole or in parts, always the same.

[Note: digests] A tensor's digest is the lane-wise wrapping sum of the hashes of its rows (dim 0):
XXH3-128 of the row's bytes, seeded with the tensor's name and the row's index. So it is the same
for any number of shards, needs one all-reduce of 16 bytes a tensor, and sees a row that is missing,
doubled, changed or elsewhere. A tensor of one dimension or none is one row. It guards against
accidents, not against an adversary: the files' sha256 does that.
"""

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from toolkit import ranks
from toolkit.formats.hashing import LANES, RowHashes
from toolkit.formats.layout import Tensors, cut_by_rows, local_slices


def rows_digest(name: str, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return the wrapping sum of the hashes of some rows of the tensor `name`: int64 [LANES].

    `rows` are [n, ...] from index `first` of the tensor; a vector is one row. The wrapping sum over
    all parts is the digest. Costs as `RowHashes` does.
    """
    flat = rows.detach().cpu().contiguous().reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    hashes = RowHashes(name, flat.shape[1], first)
    hashes.update(memoryview(flat.reshape(-1)))  # type: ignore[arg-type]
    return torch.from_numpy(hashes.lanes.view(numpy.int64))


def hexadecimal(lanes: torch.Tensor) -> str:
    """Return the digest as a manifest keeps it."""
    return lanes.numpy().astype("<i8").tobytes().hex()


def whole_rows(tensors: Tensors) -> Tensors:
    """Return those of `tensors` of which no rank holds whole rows, gathered. Collective."""
    # Vectors, and what is sharded over another dimension than the first.
    sharded = {n: t for n, t in tensors.items() if isinstance(t, DTensor)}
    gathered = _whole_vectors({n: t for n, t in sharded.items() if t.ndim < 2})
    for name, tensor in sharded.items():
        if tensor.ndim > 1 and not cut_by_rows(tensor):
            kept = [p if getattr(p, "dim", 0) == 0 else Replicate() for p in tensor.placements]
            gathered[name] = tensor.redistribute(placements=kept)
    return gathered


def _whole_vectors(vectors: dict[str, DTensor]) -> Tensors:
    """Return vectors whole. Collective: one exchange a device, for a model has hundreds of them."""
    found: Tensors = {}
    for device in dict.fromkeys(t.to_local().device for t in vectors.values()):
        here = {n: t for n, t in vectors.items() if t.to_local().device == device}
        parts = []
        for tensor in here.values():
            whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            if _counts(tensor):
                whole[local_slices(tensor)] = tensor.to_local().detach()
            parts.append(whole.reshape(-1).view(torch.uint8))
        total = torch.cat(parts)  # each rank's bytes among zeros: the sum is the whole
        dist.all_reduce(total, group=ranks.everyone())
        split = total.split([len(part) for part in parts])
        for (name, tensor), part in zip(here.items(), split, strict=True):
            # A copy of its own begins where a view of its dtype may.
            found[name] = part.clone().view(tensor.dtype).reshape(tensor.shape)
    return found


def _counts(tensor: DTensor) -> bool:
    """Return whether this rank's part is the first of its replicas."""
    where = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(c == 0 or not p.is_replicate() for c, p in where)


def part_digests(tensors: Tensors, gathered: Tensors) -> torch.Tensor:
    """Return this rank's share of every digest, int64 [len(tensors), LANES]; no collective.

    The sum over the ranks is the digest. Of replicas only the first counts.
    """
    lanes = torch.zeros(len(tensors), LANES, dtype=torch.int64)
    for i, (name, given) in enumerate(tensors.items()):
        tensor = gathered.get(name, given)
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            if local.numel() and _counts(tensor):
                lanes[i] = rows_digest(name, local, local_slices(tensor)[0].start)
        elif ranks.rank() == 0 and tensor.numel():
            rows = tensor if tensor.ndim > 1 else tensor.reshape(1, -1)
            lanes[i] = rows_digest(name, rows, 0)
    return lanes


def described(tensors: Tensors, lanes: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return name -> {"shape", "dtype", "digest"}, as a manifest keeps it."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "digest": hexadecimal(lanes[i]),
        }
        for i, (name, tensor) in enumerate(tensors.items())
    }
