"""A sharded checkpoint becomes a Hugging Face folder: one process, no GPU, no process group.

    metadata + config  ->  plan: every output tensor's place in every output file
                       ->  bytes: from the blob in a shard to that place, cast on the way
                       ->  what was read compared with its digests, what was written read back
                       ->  the final name

Owns this order, and how the bytes of one weight file are gathered from the shards. Where the shards
are belongs to `sources`, what the folder consists of to `export_plan`, the folder on the disk to
`export_folder`. Knows nothing of training.

Memory: 6 MB a thread, for what is read, cast and written. Parameters that transformers converts at
load (fused experts) are mostly cut and turned: those parts are moved like any other. What it
computes anew is put together in a scratch file mapped into memory, one group at a time; the
computation may hold the group.

[Note: what is checked when] Before anything is written: sizes of all shards, hashes of their
metadata and of the model's config, and that the chunks cover each tensor once. After a weight file
is on the disk: the digest of every tensor that went into it, against the digest taken from live
memory when it was saved. Where there is none such (a checkpoint
without digests, tensors split along another dimension than the first) the sha256 of the shard
files, at the end. A checkpoint of another tool has no hashes: only its structure is checked.
"""

import functools
import math
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.adapter import base_entry, find_adapter, find_base, named_base
from toolkit.checkpoint.commit import CHECKPOINTS, damaged_files, read_manifest
from toolkit.checkpoint.facts import run_facts
from toolkit.checkpoint.sources import Source, check_whole, damaged, find_source, parameter_names
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.adapter import adapter_origin, make_adapter_plan
from toolkit.export.folder import Timing, check_output, check_space, finish, staged, write_weights
from toolkit.export.merge import plan_merge
from toolkit.export.plan import (
    Plan,
    make_plan,
    model_of_assets,
    parse_dtype,
    parse_size,
    tied_families,
)
from toolkit.export.streaming import (
    Copy,
    Mover,
    Piece,
    Target,
    Task,
    copies,
    created,
    flat_pieces,
    run_tasks,
)
from toolkit.formats.dcp import Chunk, contiguous_runs, read_chunk
from toolkit.formats.digests import hexadecimal, rows_digest
from toolkit.formats.direct_io import ALIGNMENT, BLOCK, Reader, block
from toolkit.formats.hf_folder import ExportGroup, convert_back

_HASHED = BLOCK - 2 * ALIGNMENT  # bytes of rows read at a time to be hashed
_HASHING = 4  # tensors compared with their digests at a time
_COMPARED = 2**22


def consolidate(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    hf_assets: str | Path | None = None,
    merge: bool = False,
) -> str:
    """Write the weights of a sharded checkpoint as a Hugging Face folder; return its path.

    The key names are those of the source checkpoint, tied weights are written once, config,
    generation config and tokenizer come along, and a manifest of all of it (`export_manifest`). The
    folder appears under its name only when it is complete and was read back. Interrupted, it goes
    on with the first weight file that was not finished. Costs one read and one write of the
    weights, one more read of both for the hashes, and 6 MB of memory a thread. All of it goes past
    the page cache: what is read back is what the disk holds.

    Args:
        checkpoint: a run (its newest committed checkpoint is taken), a checkpoint, or one of
            another tool: see `sources`.
        output: a folder that does not exist or is empty.
        dtype: of floating tensors. `auto`: each key's dtype in the source checkpoint; for a random
            start the config's dtype, bfloat16 if it has none. Integer and bool tensors keep theirs.
        max_shard_size: of one safetensors file, such as "5GB", "500MB" or a number of bytes; a
            larger tensor gets a file of its own.
        hf_assets: folder or Hub id with the config and tokenizer, where the checkpoint has none; of
            adapters that of the base, where it is not where the run had it.
        merge: of a checkpoint of adapters: write the base with the adapter merged in (needs the
            base; memory: see `adapter_merge`). Without it such a checkpoint gives a PEFT folder,
            for which `dtype` auto is the trained one and `max_shard_size` has no meaning.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        ExportError: the output is in the way, checkpoint and model do not fit together (names the
            tensor), or there is no space. No folder of that name is left behind.
    """
    return _consolidate(
        checkpoint, output, dtype, max_shard_size, hf_assets, merge, Timing(), default_threads()
    )


def default_threads() -> int:
    """Return how many threads move bytes: see docs/benchmarks/consolidate.md."""
    return min(8, 2 * (os.cpu_count() or 1))  # twice the cores: they wait for the disk in turns


def _consolidate(
    checkpoint: str | Path,
    output: str | Path,
    dtype: str,
    max_shard_size: str | int,
    hf_assets: str | Path | None,
    merge: bool,
    timing: Timing,
    threads: int,
) -> str:
    override, limit = parse_dtype(dtype), parse_size(max_shard_size)
    with timing.of("plan"):
        source = find_adapter(checkpoint)
        if source is not None and merge:
            return _merge(source, output, dtype, override, limit, hf_assets, timing)
        adapter, source = source is not None, source or find_source(checkpoint, hf_assets)
        target = check_output(output, source.checkpoint or source.folder)
        if merge:
            raise ExportError(
                f"{source.checkpoint or source.folder} is not an adapter checkpoint: there is "
                "nothing to merge"
            )
        entry = named_base(source, hf_assets) if adapter else None
        if entry is not None:
            plan, keys, families = _plan_adapter(source, override, entry)
        else:
            plan, keys, families = _plan_model(source, override, limit)
        check_whole(source, keys.values())
        weights = _Weights(source, plan, keys)
        check_space(target, plan.total_bytes + weights.scratch_bytes())
    with timing.of("source"):
        for family in families:
            _check_tied(source, [keys[name] for name in family if name in keys])
    with staged(target, plan.digest(), source.fingerprint()) as staging:
        write_weights(
            plan,
            staging,
            lambda name, file, advance: run_tasks(
                weights.tasks(name, staging.folder), file, threads, advance
            ),
            timing,
            weights.check,
        )
        with timing.of("source"):
            weights.check_rest()
        with timing.of("finish"):
            finish(plan, staging, _origin(source, dtype, entry))
    return str(Path(output).expanduser())


_Planned = tuple[Plan, dict[str, str], list[list[str]]]
"""The plan, parameter -> key of the checkpoint, families of tied parameters."""


def _plan_model(source: Source, override: torch.dtype | None, limit: int) -> _Planned:
    model, assets = model_of_assets(source.hf)
    prefix, keys = parameter_names(source, model.state_dict())
    where = str(source.folder)
    plan = make_plan(
        source.hf, model, assets, _shapes(source, keys), override, limit, where=where, prefix=prefix
    )
    return plan, keys, list(tied_families(model).values())


def _plan_adapter(source: Source, override: torch.dtype | None, base: dict[str, Any]) -> _Planned:
    _, keys = parameter_names(source, ())
    shapes = _shapes(source, keys)
    plan = make_adapter_plan(source.hf, shapes, override, where=str(source.folder), base=base)
    return plan, keys, []


def _shapes(source: Source, keys: dict[str, str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {n: (source.tensors[k].dtype, source.tensors[k].shape) for n, k in keys.items()}


def _merge(
    source: Source,
    output: str | Path,
    dtype: str,
    override: torch.dtype | None,
    limit: int,
    base: str | Path | None,
    timing: Timing,
) -> str:
    """Write the base with the adapter of `source` merged in; return the folder's path."""
    with timing.of("plan"):
        target = check_output(output, source.checkpoint)
        folder = find_base(source, base)
        merging = plan_merge(source, folder, override, limit)
        check_space(target, merging.plan.total_bytes)
    with timing.of("source"):
        merging.check()
    plan = merging.plan
    with staged(target, plan.digest(), source.fingerprint()) as staging:
        write_weights(
            plan,
            staging,
            # One thread of ours: the memory of one tensor at a time, its arithmetic on all cores.
            lambda name, file, advance: run_tasks(merging.tasks(name), file, 1, advance),
            timing,
        )
        with timing.of("finish"):
            finish(plan, staging, _origin(source, dtype, base_entry(source)) | {"merged": True})
    return str(Path(output).expanduser())


def _origin(source: Source, dtype: str, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the export's manifest says of where the weights came from; `base`: of adapters,
    the base they are for.
    """
    origin: dict[str, Any] = {"checkpoint": None, "step": None, "dtype": dtype, "run": None}
    if base is not None:
        origin["adapter"] = adapter_origin(source.hf, base)
    if source.checkpoint is not None:
        step = read_manifest(source.checkpoint).get("step")
        origin |= {"checkpoint": source.fingerprint(), "step": step}
        if source.checkpoint.parent.name == CHECKPOINTS:
            origin["run"] = run_facts(source.checkpoint.parent.parent, step) or None
    return origin


# --------------------------------------------------------------------------------------------------
# From the shards to a weight file
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Weights:
    """The way from the shards of `source` to the tensors of `plan`."""

    source: Source
    plan: Plan
    keys: dict[str, str]
    """Stored name -> key of the checkpoint."""
    unchecked: set[str] = field(default_factory=set)
    """Keys that have no digest to compare with: their files must be hashed."""

    def __post_init__(self) -> None:
        names = self.plan.names
        self.owner = {names[n]: group for group in self.plan.groups for n in group.outputs}
        self.digests: dict[str, Any] = {}
        if self.source.checkpoint is not None:
            self.digests = read_manifest(self.source.checkpoint).get("tensors", {})

    def key(self, parameter: str) -> str:
        """Return the checkpoint's key of a parameter."""
        return self.keys[self.plan.stored[parameter]]

    @functools.cache  # noqa: B019 - lives as long as the export
    def chunks(self, key: str) -> list[Chunk]:
        """Return the chunks of one tensor."""
        return self.source.locate(key)

    def exported(self, name: str) -> list[str]:
        """Return the tensors of the weight file `name`, in the order of their bytes."""
        outputs = self.plan.outputs
        held = [n for n, output in outputs.items() if output.file == name]
        return sorted(held, key=lambda n: outputs[n].begin)

    def scratch_bytes(self) -> int:
        """Return the bytes of the largest group that is put together before it is written."""
        whole = [
            group
            for group in self.plan.groups
            if any(self.plan.views[self.plan.names[n]] is None for n in group.outputs)
        ]
        return max((self._group_bytes(g) for g in whole), default=0)

    def _group_bytes(self, group: ExportGroup) -> int:
        """Return the bytes of the group's sources, each begun at a multiple of 8."""
        held = (self.plan.shapes[name] for name in group.sources)
        return sum(math.prod(shape) * dtype.itemsize + 7 for dtype, shape in held)

    def tasks(self, name: str, folder: Path) -> list[Copy | Task]:
        """Return what writes the weight file `name`, in the order of its bytes."""
        tasks: list[Copy | Task] = []
        together: dict[int, tuple[ExportGroup, list[str]]] = {}
        for exported in self.exported(name):
            group, view = self.owner[exported], self.plan.views[exported]
            output = self.plan.outputs[exported]
            if view is not None:
                dtype = self.plan.shapes[view.source][0]
                chunks = self.chunks(self.key(view.source))
                pieces = flat_pieces(chunks)
                found = None
                if pieces is not None:
                    found = copies(view, pieces, dtype, output.begin, output.dtype, exported)
                if found is not None:
                    tasks += [part for copy in found for part in copy.split()]
                    continue
                if not group.converted:
                    tasks += [_move(chunk, output, exported) for chunk in chunks]
                    continue
            together.setdefault(id(group), (group, []))[1].append(exported)
        lock = threading.Lock()
        for group, members in together.values():
            tasks.append(functools.partial(self._convert, group, members, folder, lock))
        return tasks

    def _convert(
        self,
        group: ExportGroup,
        members: list[str],
        folder: Path,
        lock: threading.Lock,
        mover: Mover,
        target: Target,
    ) -> None:
        """Write those outputs of one group that cannot be moved from the shards directly.

        The group's sources are put together in a scratch file, mapped into memory: it does not
        count against the process. One group at a time: the conversion may hold another copy.
        """
        with lock:
            tensors = self._assemble(group, folder)
            views = {n: self.plan.views[n] for n in members}
            for name, view in views.items():
                if view is not None:
                    part = torch.as_strided(
                        tensors[view.source], view.size, view.stride, view.offset
                    )
                    self._write(part, name, mover, target)
            if None not in views.values():
                return
            converted = convert_back(self.plan.model, tensors)
            if {n: tuple(t.shape) for n, t in converted.items()} != group.outputs:
                raise ExportError(
                    f"{group.sources} were converted to {sorted(converted)}, expected "
                    f"{group.outputs}"
                )
            for output in list(converted):
                tensor, name = converted.pop(output), self.plan.names[output]
                if name in views and views[name] is None:
                    self._write(tensor, name, mover, target)

    def _write(self, tensor: torch.Tensor, name: str, mover: Mover, target: Target) -> None:
        output = self.plan.outputs[name]
        mover.write(tensor, target, output.begin, output.dtype, name)

    def _assemble(self, group: ExportGroup, folder: Path) -> dict[str, torch.Tensor]:
        scratch = folder / ".scratch"
        tensors: dict[str, torch.Tensor] = {}
        begin = 0
        with created(scratch, self._group_bytes(group)) as file, Mover(lambda count: None) as mover:
            # It is read at once, from the page cache.
            target = Target(file.cached, file.cached)
            try:
                for name in group.sources:
                    dtype, shape = self.plan.shapes[name]
                    for chunk in self.chunks(self.key(name)):
                        mover.move(chunk, target, begin, dtype, name)
                    mover.flush()
                    nbytes = math.prod(shape) * dtype.itemsize
                    whole = torch.from_file(
                        str(scratch), shared=True, size=begin + nbytes, dtype=torch.uint8
                    )
                    tensors[name] = whole[begin:].view(dtype).view(shape)
                    begin += nbytes + -nbytes % 8
            finally:
                scratch.unlink()
        return tensors

    # ---- Whether what was read is what was saved -------------------------------------------------

    def check(self, name: str) -> None:
        """Compare the tensors that went into the weight file `name` with their digests.

        Raises:
            CheckpointError: one has other bytes than were saved.
        """
        keys = {self.key(p) for n in self.exported(name) for p in self.owner[n].sources}
        with ThreadPoolExecutor(min(_HASHING, len(keys)) or 1) as pool:
            list(pool.map(self._check_digest, sorted(keys)))

    @functools.cache  # noqa: B019 - each tensor once
    def _check_digest(self, key: str) -> None:
        if self.source.checkpoint is None:
            return  # of another tool: there is nothing to compare with
        said = self.digests.get(key, {}).get("digest")
        entry = self.source.tensors[key]
        pieces = flat_pieces(self.chunks(key))
        if said is None or pieces is None:
            self.unchecked.add(key)
            return
        if hexadecimal(_digest(key, entry.shape, entry.dtype, pieces)) != said:
            files = sorted({piece.file for piece in pieces})
            where = str(files[0]) + (f" or {files[-1]}" if len(files) > 1 else "")
            raise CheckpointError(
                f"{key} has other bytes in {where} than were saved; use another checkpoint of the "
                "run"
            )

    def check_rest(self) -> None:
        """Hash the shard files of the tensors that `check` could not tell of.

        Raises:
            CheckpointError: one has other bytes than were saved.
        """
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            return
        for key in set(self.keys.values()):
            self._check_digest(key)
        files = {chunk.file for key in self.unchecked for chunk in self.chunks(key)}
        names = sorted(str(file.relative_to(checkpoint)) for file in files)
        if faults := damaged_files(checkpoint, only=names):
            raise damaged(checkpoint / faults[0][0], faults[0][1])


def _move(chunk: Chunk, output: Any, name: str) -> Task:
    return lambda mover, target: mover.move(chunk, target, output.begin, output.dtype, name)


def _digest(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]
) -> torch.Tensor:
    """Return the digest of a stored tensor; rows too long for a block are mapped into memory."""
    row = math.prod(shape[1:]) * dtype.itemsize
    lanes = torch.zeros_like(rows_digest(key, torch.zeros(1, 1), 0))
    if math.prod(shape) == 0:
        return lanes
    if len(shape) < 2:
        whole = torch.cat([_mapped(p.file, p.position, p.count * dtype.itemsize) for p in pieces])
        return rows_digest(key, whole[None], 0)
    room = block()
    for piece in pieces:
        first, rows = piece.first * dtype.itemsize // row, piece.count * dtype.itemsize // row
        step = max(1, _HASHED // row)
        with Reader(piece.file) as reader:
            for done in range(0, rows, step):
                begin, count = piece.position + done * row, min(step, rows - done)
                if row > _HASHED:
                    part = _mapped(piece.file, begin, row)
                else:
                    content = reader.read(room, begin, count * row)
                    if len(content) < count * row:
                        raise _shorter(piece.file)
                    part = torch.frombuffer(content, dtype=torch.uint8)
                lanes += rows_digest(key, part.view(count, row), first + done)
    return lanes


def _shorter(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} became shorter while it was read")


def _mapped(file: Path, position: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a file as a tensor, mapped into memory: read when they are looked at."""
    skip = position % mmap.ALLOCATIONGRANULARITY
    with open(file, "rb") as f:
        if position + nbytes > os.fstat(f.fileno()).st_size:
            raise _shorter(file)
        # A private copy, which stays the file's own pages as nobody writes into it.
        content = mmap.mmap(
            f.fileno(), skip + nbytes, access=mmap.ACCESS_COPY, offset=position - skip
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=skip, count=nbytes)


def _check_tied(source: Source, keys: list[str]) -> None:
    """Check that tensors of which one is exported are the same to the byte.

    Raises:
        ExportError: they are not.
    """
    for other in keys[1:]:
        if source.tensors[keys[0]].shape != source.tensors[other].shape or not _same(
            source, keys[0], other
        ):
            raise ExportError(
                f"{keys[0]} and {other} are one parameter of the model, and differ in "
                f"{source.folder}: the model was trained without its tie; set "
                "tie_word_embeddings to false in the config given with --hf_assets"
            )


def _same(source: Source, left: str, right: str) -> bool:
    """Whether two tensors of one shape have the same bytes, however each is cut into chunks."""
    if source.tensors[left].dtype != source.tensors[right].dtype:
        return False
    one, other = _byte_runs(source.locate(left)), _byte_runs(source.locate(right))
    index, done = 0, 0  # in `other`: run, and bytes of it that are compared
    for _, content in one:
        at = 0
        while at < len(content):
            against = other[index][1]
            count = min(len(content) - at, len(against) - done, _COMPARED)
            if not torch.equal(content[at : at + count], against[done : done + count]):
                return False
            at, done = at + count, done + count
            if done == len(against):
                index, done = index + 1, 0
    return True


def _byte_runs(chunks: list[Chunk]) -> list[tuple[int, torch.Tensor]]:
    """Return (index of the first element, bytes) of a tensor's contiguous runs, in order."""
    found = []
    for chunk in chunks:
        if chunk.raw is None:
            payload = read_chunk(chunk).reshape(-1).view(torch.uint8)
        else:
            payload = _mapped(chunk.file, chunk.raw, chunk.nbytes)
        at = 0
        for first, count in contiguous_runs(chunk.offsets, chunk.sizes, chunk.shape):
            nbytes = count * chunk.dtype.itemsize
            found.append((first, payload[at : at + nbytes]))
            at += nbytes
    return sorted(found, key=lambda run: run[0])
