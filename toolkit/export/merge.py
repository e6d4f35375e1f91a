"""A base model and an adapter become one model: tensor by tensor, from file to file.

    base's safetensors  --copied-->   what no adapter touches, to the byte
            |
            +--- PEFT's own merge of one parameter ---> what is adapted
            |
    checkpoint's shards (A, B, magnitudes, modules trained as a whole)

Owns which tensors are copied, which are merged, and that the base is the one that was trained on.
The arithmetic is PEFT's (`adapter_format.merged`), names and conversions are transformers', so that
the result is what `merge_and_unload` gives, to the bit. Knows nothing of ranks.

Memory: the largest adapted tensor of the base, and two of its size in fp32 (DoRA: five); of tensors
that transformers converts (fused experts) their group.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import (
    CONFIG_FILE,
    AdapterLayer,
    PeftLayout,
    merge_layer,
    peft_layout,
    read_config,
)
from toolkit.checkpoint.commit import read_manifest
from toolkit.checkpoint.sources import Source, check_whole, parameter_names
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.plan import CASTABLE, Plan, make_plan, model_of_assets
from toolkit.export.streaming import Copy, Mover, Target, Task
from toolkit.formats.hf_folder import (
    ExportGroup,
    TensorEntry,
    convert_back,
    read_weights,
    weight_files,
)
from toolkit.formats.tensor_stream import StoredTensor, digest, in_file, whole
from toolkit.loading.pretrained import load_group, load_groups
from toolkit.models.causal_lm import tied_names


def plan_merge(source: Source, folder: Path, override: torch.dtype | None, limit: int) -> "Merging":
    """Decide names, dtypes and files of the merged model: those of the base.

    Args:
        source: the adapter's checkpoint.
        folder: of the base.
        override: dtype of all floating tensors; None: each as the base has it.
        limit: bytes of a weight file.

    Raises:
        ExportError: base and adapter do not fit together, or the adapter changes in two ways what
            is one matrix of the base. Names the tensor.
        LoadingError: the base is damaged or incomplete.
    """
    entries = read_weights(weight_files(folder))
    # A model each: reading through one changes it, and PEFT takes another apart.
    model, assets = model_of_assets(source.hf)
    twin = peft_layout(model_of_assets(source.hf)[0], read_config(source.hf))
    reader, _ = model_of_assets(source.hf)
    _, keys = parameter_names(source, ())
    check_whole(source, keys.values())
    lacking = sorted(set(twin.keys.values()) ^ keys.keys())
    if lacking:
        raise ExportError(
            f"{lacking[0]} is not in both {source.folder} and what {source.hf / CONFIG_FILE} "
            "describes: the checkpoint is of another adapter"
        )
    aliases = tied_names(model)
    _check_parts(twin, aliases)
    state = model.state_dict()
    stored = {n: (t.dtype, tuple(t.shape)) for n, t in state.items() if n not in aliases}
    plan = make_plan(source.hf, model, assets, stored, override, limit, where=str(folder))
    for group in plan.groups:
        if not all(_saved(twin, aliases.get(n, n)) for n in group.sources):
            _check_base(plan, group, entries, folder)
    return Merging(plan, twin, reader, entries, source, keys)


def _check_base(
    plan: Plan, group: ExportGroup, entries: dict[str, TensorEntry], folder: Path
) -> None:
    """Refuse a base without the tensors of `group`, or with others."""
    for name, shape in group.outputs.items():
        exported, entry = plan.names[name], entries.get(plan.names[name])
        if entry is None:
            raise ExportError(f"the base {folder} has no tensor {exported}: is it complete?")
        if entry.shape != shape:
            raise ExportError(
                f"{exported} is {list(entry.shape)} in the base {folder}, and was {list(shape)} "
                "when the adapter was trained; a resized module can be merged only where it was "
                "trained as a whole (lora.modules_to_save)"
            )
        wanted = plan.output(name).dtype
        if entry.dtype != wanted and (entry.dtype not in CASTABLE or wanted not in CASTABLE):
            raise ExportError(
                f"{exported} is {entry.dtype} in the base {folder}, which cannot become {wanted}; "
                "merge into the base that was not quantised"
            )


def _saved(twin: PeftLayout, parameter: str) -> bool:
    parts = twin.parts.get(parameter)
    return bool(parts) and all(part.kind == "saved" for part in parts or ())


def _check_parts(twin: PeftLayout, aliases: dict[str, str]) -> None:
    """Refuse adapters that a merged model cannot hold: one matrix, changed in two ways."""
    families: dict[str, set[str]] = {}
    for alias, owner in aliases.items():
        families.setdefault(owner, {owner}).add(alias)
    for parameter, parts in twin.parts.items():
        ways = {tuple(sorted(part.tensors.items())) for part in parts}
        names = families.get(parameter, {parameter})
        modules = {name.rpartition(".")[0] for name in names}
        if len(ways) > 1 or (len(names) > 1 and len(parts) < len(modules)):
            raise ExportError(
                f"{' and '.join(sorted(names))} are one matrix of the base, and the adapter "
                f"changes {len(ways)} of {len(modules)} uses of it: a merged model would have to "
                "hold both. Keep base and adapter apart (without --merge)"
            )


@dataclass(eq=False)
class Merging:
    """The way from the base's files and the adapter's shards to the tensors of `plan`."""

    plan: Plan
    twin: PeftLayout
    reader: PreTrainedModel
    """The base on meta, through which transformers converts what the base's files hold."""
    entries: dict[str, TensorEntry]
    """The base's tensors."""
    source: Source
    """The adapter's checkpoint."""
    keys: dict[str, str]
    """Parameter of the adapted model -> key of the checkpoint."""

    def __post_init__(self) -> None:
        names = self.plan.names
        self.owner = {names[n]: group for group in self.plan.groups for n in group.outputs}
        self.aliases = tied_names(self.plan.model)

    def tasks(self, name: str) -> list[Copy | Task]:
        """Return what writes the weight file `name`, in the order of its bytes."""
        outputs = self.plan.outputs
        held = sorted(
            (n for n, o in outputs.items() if o.file == name), key=lambda n: outputs[n].begin
        )
        tasks: list[Copy | Task] = []
        together: dict[int, tuple[ExportGroup, list[str]]] = {}
        for exported in held:
            group, output = self.owner[exported], outputs[exported]
            if any(self._part(n) is not None for n in group.sources):
                if id(group) not in together:
                    together[id(group)] = (group, [])
                    tasks.append(functools.partial(self._merge, *together[id(group)]))
                together[id(group)][1].append(exported)
                continue
            entry = self.entries[exported]
            count = entry.nbytes // entry.dtype.itemsize
            whole = Copy(
                entry.file, entry.begin, count, entry.dtype, output.begin, output.dtype, exported
            )
            tasks += whole.split()
        return tasks

    def check(self) -> None:
        """Compare every tensor of the adapter with its digest.

        Raises:
            CheckpointError: one has other bytes than were saved.
        """
        digests = read_manifest(self.source.checkpoint)["tensors"] if self.source.checkpoint else {}
        for key in self.keys.values():
            stored = self._stored(key)
            if digest(stored, key) != digests.get(key, {}).get("digest"):
                files = sorted({str(chunk.file) for chunk in stored.chunks})
                raise CheckpointError(
                    f"{key} has other bytes in {' or '.join(files[:2])} than were saved; use "
                    "another checkpoint of the run"
                )

    def _part(self, parameter: str) -> AdapterLayer | None:
        parts = self.twin.parts.get(self.aliases.get(parameter, parameter))
        return parts[0] if parts else None

    def _stored(self, key: str) -> StoredTensor:
        entry = self.source.tensors[key]
        return StoredTensor(entry.dtype, entry.shape, tuple(self.source.locate(key)))

    def _trained(self, name: str) -> torch.Tensor:
        return whole(self._stored(self.keys[name]))

    def _merge(self, group: ExportGroup, members: list[str], mover: Mover, target: Target) -> None:
        """Write those outputs of an adapted group that are in this file. One group at a time."""
        made = self._parameters(group)
        if group.converted:
            made = convert_back(self.plan.model, made)
        else:
            made = {
                name: made.pop(source)
                for name, source in zip(group.outputs, group.sources, strict=True)
            }
        if {n: tuple(t.shape) for n, t in made.items()} != group.outputs:
            raise ExportError(
                f"{group.sources} were merged to {sorted(made)}, expected {group.outputs}"
            )
        for name in list(made):
            tensor, exported = made.pop(name), self.plan.names[name]
            if exported in members:
                output = self.plan.outputs[exported]
                mover.write(tensor, target, output.begin, output.dtype, exported)

    def _parameters(self, group: ExportGroup) -> dict[str, torch.Tensor]:
        """Return the group's parameters with the adapter merged in."""
        names = [self.plan.names[n] for n in group.outputs]
        wanted = {self.plan.outputs[n].dtype for n in names}
        parts = {source: self._part(source) for source in group.sources}
        base: dict[str, torch.Tensor] = {}
        if not all(part is not None and part.kind == "saved" for part in parts.values()):
            base = self._of_base(group, names)
        made = {}
        for source, part in parts.items():
            weight = base.pop(source, None)
            if part is None:
                assert weight is not None
                made[source] = weight
            elif part.kind == "saved":
                made[source] = self._trained(part.tensors["saved"])
            else:
                assert weight is not None
                for dtype in wanted:  # rounded once, when it is written
                    weight = weight.to(torch.promote_types(weight.dtype, dtype))
                factors = {r: self._trained(n).float() for r, n in part.tensors.items()}
                made[source] = merge_layer(self.twin, part, weight, factors)
        return made

    def _of_base(self, group: ExportGroup, names: list[str]) -> dict[str, torch.Tensor]:
        if not group.converted:
            return {group.sources[0]: whole(in_file(self.entries[names[0]]))}
        found: dict[str, torch.Tensor] = {}
        for part in load_groups(self.reader, names):
            if part.converted:
                found |= load_group(self.reader, part, self.entries)
            else:
                found[part.parameter] = whole(in_file(self.entries[part.keys[0]]))
        lacking = sorted(set(group.sources) - found.keys())
        if lacking:
            raise ExportError(
                f"transformers makes {sorted(found)} of {', '.join(names[:3])}, not {lacking[0]}"
            )
        return found
