"""Prove that a loaded model holds the bytes of its files.

[Note: proof of a load] After a load, each rank sums the bits of its parts on their device. The
files are read once more, divided among the ranks, cast as the load cast them, and summed; both sums
must agree. So a byte that changed between file and memory is an error that names the tensor. A run
with adapters keeps the sums of its base in each checkpoint. A resume compares with those and does
not read the files again.

Tensors that are merged, split or transposed while they are loaded (fused experts) are compared by a
sum that does not depend on the order of the elements. Tensors that a load computes are not compared
(4-bit and 8-bit weights, rows that `resize_embeddings` adds).

The proof costs a read of the files by all ranks together, which the page cache of a machine may
still hold.
"""

import collections
import time
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import formats, ranks
from toolkit.errors import LoadingError
from toolkit.formats.bit_sums import byte_and_row_sums, wrap_to_int64
from toolkit.formats.whole_sums import element_sum, whole_sums
from toolkit.loading.convert import LoadGroup, plan_load_groups
from toolkit.models.layers import tied_names
from toolkit.models.packed_linear import packed_weights
from toolkit.tables import size_text

# Conversions that move elements and change no value.
# fmt: off
_MOVES = {
    "Chunk", "Concatenate", "MergeModulelist", "SplitModulelist", "Transpose",
    "PermuteForRope", "Force16BytesAlignment",
}
# fmt: on


def untied_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return name -> tensor for all parameters and persistent buffers; tied ones appear once."""
    aliases = tied_names(model)
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in aliases}


def compute_base_sums(model: PreTrainedModel) -> dict[str, int]:
    """Compute a checksum (row sum) of every tensor of a loaded base model. Collective.

    Checkpoints of the run store the result, and a resume compares it. See [Note: proof of a load].

    Returns:
        Name -> checksum; {} if the process group is simulated.

    Raises:
        LoadingError: the replicas of a tensor on different ranks are not equal.
    """
    sums = whole_sums(untied_tensors(model)) or {}
    if different := sorted(name for name, total in sums.items() if not total.copies_agree()):
        raise ranks.mark_collective(
            LoadingError(_format_fault("the ranks hold different copies", different))
        )
    return {name: total.first for name, total in sums.items()}


def prove_load(model: PreTrainedModel, entries: Mapping[str, formats.StoredTensor]) -> str:
    """Compare checksums of a loaded model with those of its files. Collective.

    Each rank reads a share of the files. See [Note: proof of a load].

    Args:
        model: loaded, without adapters.
        entries: tensor name -> location in the files.

    Returns:
        A log line about the result; "" if the process group is simulated.

    Raises:
        LoadingError: tensors differ; the message names them.
    """
    begun = time.perf_counter()
    tensors = untied_tensors(model)
    plain, moved, skipped = ranks.on_all(lambda: _find_comparable(model, entries, tensors))
    in_memory = whole_sums({name: tensors[name] for name in plain})
    reordered = whole_sums({name: tensors[name] for name in moved}, element_sum)
    if in_memory is None or reordered is None:
        return ""
    # Tensors that are not sharded by rows have no sum.
    sums = in_memory | reordered
    groups = {name: group for name, group in (plain | moved).items() if name in sums}
    skipped += len(plain) + len(moved) - len(groups)
    order = sorted(groups, key=lambda name: (-_group_bytes(groups[name], entries), name))
    mine = set(order[ranks.rank() :: ranks.world_size()])

    def read() -> list[int]:
        return [
            _checksum_in_files(groups[name], entries, tensors[name].dtype, in_rows=name in plain)
            if name in mine
            else 0
            for name in groups
        ]

    in_files = ranks.sum_over_ranks(ranks.on_all(read))
    pairs = zip(groups, in_files or (), strict=True)
    wrong = [name for name, total in pairs if not sums[name].matches(total)]
    wrong = _drop_cast_nan(wrong, groups, entries, tensors)
    if wrong:
        folder = entries[groups[wrong[0]].keys[0]].file.parent
        raise ranks.mark_collective(
            LoadingError(
                _format_fault(f"memory does not hold the weights of {folder}", sorted(wrong))
            )
        )
    size = size_text(sum(_group_bytes(groups[name], entries) for name in groups))
    omitted = f"; {skipped} tensors that a load computes or cuts by columns were not compared"
    return (
        f"proven     {len(groups)} tensors, {size}, are in memory as in their files "
        f"({time.perf_counter() - begun:.1f} s)" + omitted * bool(skipped)
    )


def _drop_cast_nan(
    wrong: list[str],
    groups: Mapping[str, LoadGroup],
    entries: Mapping[str, formats.StoredTensor],
    tensors: Mapping[str, torch.Tensor],
) -> list[str]:
    """Remove tensors that hold NaN and were cast from a list of differing tensors. Collective.

    A cast may produce different bits of NaN in file and memory, which is not damage. `check_finite`
    reports NaN.

    Args:
        wrong: names of tensors whose checksums differ.
        groups: parameter name -> the stored tensors that it is loaded from.
        entries: stored tensor name -> location.
        tensors: parameter name -> loaded tensor.

    Returns:
        The remaining names.
    """

    def is_cast_nan(name: str) -> bool:
        tensor = tensors[name]
        is_cast = any(entries[key].dtype != tensor.dtype for key in groups[name].keys)
        return is_cast and bool(formats.local_tensor(tensor).isnan().any())

    flags = ranks.any_over_ranks(ranks.on_all(lambda: [is_cast_nan(name) for name in wrong]))
    return [name for name, flag in zip(wrong, flags, strict=True) if not flag]


def check_finite(model: nn.Module, path: str) -> None:
    """Raise LoadingError if a trained parameter has NaN or infinity on any rank. Collective.

    Logs a warning for frozen parameters instead. Reads every local part once.

    Args:
        model: the loaded model.
        path: the checkpoint, for the message.
    """
    # Packed bytes are no numbers.
    packed = packed_weights(model)
    parameters = {
        n: p for n, p in model.named_parameters() if n not in packed and p.is_floating_point()
    }
    names = sorted(parameters)
    finite = [bool(formats.local_tensor(parameters[name]).isfinite().all()) for name in names]
    bad = [
        n
        for n, is_bad in zip(names, ranks.any_over_ranks([not f for f in finite]), strict=True)
        if is_bad
    ]
    trained = [name for name in bad if parameters[name].requires_grad]
    if trained:
        raise ranks.mark_collective(
            LoadingError(
                f"the checkpoint {path} already has non-finite values (NaN or infinity) in "
                f"{_format_first_names(trained)}. Training would keep and spread them: use another "
                "copy or revision of the checkpoint, or replace these values"
            )
        )
    if bad:
        ranks.log_once(
            f"WARNING: the checkpoint {path} has non-finite values (NaN or infinity) in "
            f"{_format_first_names(bad)}, which is frozen: a loss that depends on them is NaN, and "
            "exports hold them"
        )


def _format_first_names(names: list[str]) -> str:
    """Format the first three names and the number of further ones."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _format_fault(problem: str, names: list[str]) -> str:
    """Format the error message for tensors that differ after a load."""
    return (
        f"{problem}: {len(names)} tensor(s) differ after the load: {_format_first_names(names)}. A "
        "device, its driver, the disk or the memory of a machine is at fault; start again, without "
        "that machine if it happens again"
    )


def _find_comparable(
    model: PreTrainedModel,
    entries: Mapping[str, formats.StoredTensor],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, LoadGroup], dict[str, LoadGroup], int]:
    """Find the parameters whose values in memory can be compared with the files.

    Returns:
        (copied, moved, number of all other tensors). `copied` has the parameters that are copied
        from one stored tensor, `moved` those whose elements a load only rearranges. Both map a name
        to its load group.
    """
    assets = formats.assets_of(model)
    packed = packed_weights(model)
    first = tied_names(model)
    in_parts = {key for keys in assets.stored.values() for key in keys}
    plain: dict[str, LoadGroup] = {}
    moved: dict[str, LoadGroup] = {}
    groups = plan_load_groups(model, entries)
    makers = collections.Counter(first.get(g.parameter, g.parameter) for g in groups)
    for group in groups:
        name = first.get(group.parameter, group.parameter)
        tensor = tensors.get(name)
        if tensor is None or name in packed or in_parts.intersection(group.keys):
            continue
        if makers[name] > 1:
            # A tied parameter is stored twice, and it is open which one is loaded.
            continue
        if sum(_count_elements(entries[key]) for key in group.keys) != tensor.numel():
            # The tensor was resized, or several parameters are built from these tensors.
            continue
        if not group.converted:
            plain[name] = group
        elif {type(operation).__name__ for operation in group.operations or ()} <= _MOVES:
            moved[name] = group
    return plain, moved, len(tensors) - len(plain) - len(moved)


def _count_elements(entry: formats.StoredTensor) -> int:
    """Count the elements of a stored tensor."""
    return entry.nbytes // entry.dtype.itemsize


def _group_bytes(group: LoadGroup, entries: Mapping[str, formats.StoredTensor]) -> int:
    """Sum the sizes of a group's stored tensors, in bytes."""
    return sum(entries[key].nbytes for key in group.keys)


def _checksum_in_files(
    group: LoadGroup,
    entries: Mapping[str, formats.StoredTensor],
    dtype: torch.dtype,
    *,
    in_rows: bool,
) -> int:
    """Read the stored tensors of a group, cast them, and compute their common checksum.

    Args:
        group: the tensors.
        entries: tensor name -> location.
        dtype: the parameter's dtype, to which floats are cast.
        in_rows: compute the row sum, which depends on the order of the rows. If False, compute a
            sum that ignores the order of elements. See [Note: bit sums].
    """
    total = 0
    for key in group.keys:
        for first, rows in _read_cast_blocks(entries[key], dtype):
            total += int(byte_and_row_sums(rows, first)[1] if in_rows else element_sum(rows))
    return wrap_to_int64(total)


def _read_cast_blocks(
    entry: formats.StoredTensor, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index of the first row, rows) of a stored tensor, block by block.

    Floats are cast to `dtype`; integers keep their dtype.
    """
    kind = dtype if entry.dtype.is_floating_point else entry.dtype
    for first, rows in formats.read_blocks(entry, kind.itemsize):
        yield first, (rows if len(entry.shape) > 1 else rows.reshape(-1, 1)).to(kind)
