"""Sources of the writer: the tensors of a checkpoint, and a base with an adapter merged in.

Tensors without an adapter are copied from the base's files byte by byte. The others are merged by
PEFT's arithmetic (`adapters.peft_folder.merge_layer`), so the result is bitwise identical to that
of `merge_and_unload`.

A merge needs memory for the largest adapted tensor of the base, and for two copies of it in fp32
(five with DoRA). For tensors that transformers converts (fused experts), it needs their group.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from toolkit.adapters.peft_folder import (
    AdapterLayer,
    PeftLayout,
    build_peft_layout,
    merge_layer,
    read_adapter_config,
)
from toolkit.checkpoint.carried import Carried
from toolkit.checkpoint.commit import find_damaged_files
from toolkit.checkpoint.sources import (
    Source,
    check_complete,
    damaged_file_error,
    map_parameter_names,
)
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.plan import (
    CASTABLE,
    ExportPlan,
    TensorShapes,
    build_model_from_assets,
    make_model_plan,
)
from toolkit.export.writer import TensorValues
from toolkit.formats import (
    ADAPTER_FILE,
    ExportGroup,
    StoredTensor,
    assets_of,
    compute_block_sum,
    first_difference,
    read_blocks,
    read_tensor,
    read_weights,
    weight_files,
)
from toolkit.formats.bit_sums import wrap_to_int64
from toolkit.loading import build_base_reader, load_group, plan_load_groups
from toolkit.models import loaded_dtype, tied_families, tied_names


class SavedTensors:
    """The weights of one checkpoint, accessed by parameter names of the model.

    Args:
        source: the checkpoint.
        names: names of the model's parameters; needed only for a checkpoint of another tool.
    """

    def __init__(self, source: Source, names: Iterable[str] = ()):
        self.source = source
        self.prefix, self.keys = map_parameter_names(source, names)
        self._sums = source.row_sums

    def source_sum(self, name: str, dtype: torch.dtype) -> int | None:
        """Return the checksum that was saved with a tensor.

        None if no checksum is known, or if `dtype` is not the stored dtype.
        """
        key = self.keys[name]
        return self._sums.get(key) if self.source.tensors[key][0] == dtype else None

    def shapes(self) -> TensorShapes:
        """Map parameter names to their stored dtypes and shapes."""
        return {name: self.source.tensors[key] for name, key in self.keys.items()}

    def check_before_reading(self) -> None:
        """Raise an error if a tensor is incomplete, or if a file without a later check is damaged.

        Tensors with a checksum are compared with it while they are read. The files of other tensors
        are hashed now. A checkpoint of another tool has no hashes, so its files are not checked.

        Raises:
            ExportError: a tensor is incomplete.
            CheckpointError: a file is damaged.
        """
        check_complete(self.source, self.keys.values())
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            return  # saved by another tool, so there are no checksums to compare with
        without = [key for key in self.keys.values() if key not in self._sums]
        files = {chunk.file for key in without for chunk in self.source.stored(key).chunks}
        names = sorted(str(file.relative_to(checkpoint)) for file in files)
        for name, fault in find_damaged_files(
            checkpoint, only=names, files=self.source.manifest["files"]
        ):
            raise damaged_file_error(checkpoint / name, fault)

    def check_tied_values(self, names: list[str]) -> None:
        """Raise an ExportError if the stored tensors of one tied parameter are not equal.

        Reads the tensors `names`. With one name, nothing is read.

        Raises:
            ExportError: two of them differ in dtype, shape or values.
        """
        for other in names[1:]:
            keys = self.keys[names[0]], self.keys[other]
            first_tensor, other_tensor = map(self.source.stored, keys)
            layout = (first_tensor.dtype, first_tensor.shape)
            has_same_layout = layout == (other_tensor.dtype, other_tensor.shape)
            if not has_same_layout or first_difference(first_tensor, other_tensor)[0] is not None:
                raise ExportError(
                    f"{keys[0]} and {keys[1]} are one parameter of the model, and differ in "
                    f"{self.source.folder}: the model was trained without its tie; set "
                    "tie_word_embeddings to false in the config given with --hf_assets"
                )

    def read_group(self, plan: ExportPlan, group: ExportGroup) -> Mapping[str, TensorValues]:
        """Read the outputs of a group for an export: output name -> values.

        Each value is a tensor if the group is converted, otherwise an iterator over blocks of rows.

        Raises:
            CheckpointError: a tensor differs from its saved checksum. For an iterator, this is
                raised at its end.
        """
        if group.converted:
            parameters = {name: self.read_tensor(plan.stored[name]) for name in group.sources}
            return plan.convert(group, parameters)
        (name,) = group.sources
        stored = self.source.stored(self.keys[plan.stored[name]])
        return {output: self.read_blocks(plan.stored[name], stored) for output in group.outputs}

    def read_blocks(self, name: str, stored: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield a tensor in blocks of rows, in order, and compare its checksum at the end.

        Args:
            name: name of the parameter.
            stored: its stored tensor.

        Raises:
            CheckpointError: after the last block, if the rows differ from the saved ones.
        """
        total = 0
        for first, rows in read_blocks(stored):
            total += compute_block_sum(stored, first, rows)
            yield rows
        self._check_row_sum(self.keys[name], total)

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read a complete tensor into memory.

        Raises:
            CheckpointError: it differs from its saved checksum.
        """
        key = self.keys[name]
        stored = self.source.stored(key)
        tensor = read_tensor(stored)
        self._check_row_sum(key, compute_block_sum(stored, 0, tensor))
        return tensor

    def _check_row_sum(self, key: str, total: int) -> None:
        """Raise a CheckpointError if `total` differs from the checksum saved with `key`.

        If none was saved, do nothing.
        """
        if self._sums.get(key) not in (None, wrap_to_int64(total)):
            files = sorted({str(chunk.file) for chunk in self.source.stored(key).chunks})
            raise CheckpointError(
                f"{key} has other bytes in {' or '.join(files[:2])} than were saved; use another "
                "checkpoint of the run"
            )


class AdapterMerge:
    """Plan and read a merged model: a base model whose weights have an adapter merged in.

    The attribute `plan` is the plan of its export, and `read_group` reads the values for it. The
    constructor reads headers only.

    Args:
        tensors: the tensors of the adapter.
        folder: the folder of the base model.
        override: dtype of all floating tensors; None keeps the dtypes of the source.
        limit: largest size of a weight file in bytes.
        without_carried: as for `consolidate`.

    Raises:
        ExportError: base and adapter do not fit together (the error names the tensor).
        LoadingError: the base is damaged or incomplete.
    """

    def __init__(
        self,
        tensors: SavedTensors,
        folder: Path,
        override: torch.dtype | None,
        limit: int,
        *,
        without_carried: bool = False,
    ) -> None:
        self.tensors, self.entries = tensors, read_weights(weight_files(folder))
        hf = tensors.source.hf
        # Separate models: PEFT takes `adapted` apart, and reading changes the one of the reader.
        model, adapted = (build_model_from_assets(hf) for _ in range(2))
        self.reader = build_base_reader(folder, model)
        self.parts_of = assets_of(self.reader).stored
        self.layout = build_peft_layout(adapted, read_adapter_config(hf))
        if odd := sorted(set(self.layout.keys.values()) ^ tensors.keys.keys()):
            raise ExportError(
                f"{odd[0]} is not in both {tensors.source.folder} and what {hf / ADAPTER_FILE} "
                "describes: the checkpoint is of another adapter"
            )
        _check_tied_layers(self.layout, tied_families(model))
        self.model, self.aliases, state = model, tied_names(model), model.state_dict()
        stored = {n: (t.dtype, tuple(t.shape)) for n, t in state.items() if n not in self.aliases}
        self.carried = Carried.find(model, assets_of(model), folder, omit=without_carried)
        self.plan = make_model_plan(
            model, stored, override, limit, where=str(folder), carried=self.carried
        )
        for group in filter(self.needs_base, self.plan.groups):
            self._check_base(group, folder)

    def layers_of_group(self, group: ExportGroup) -> dict[str, AdapterLayer | None]:
        """Map each parameter of a group to its adapter layer, or to None if it has none."""
        layers = {n: self.layout.parts.get(self.aliases.get(n, n)) for n in group.sources}
        return {name: parts[0] if parts else None for name, parts in layers.items()}

    def needs_base(self, group: ExportGroup) -> bool:
        """Return True if some parameter of the group needs values of the base.

        False if the adapter replaces all of them (`modules_to_save`).
        """
        return any(
            part is None or part.kind != "saved" for part in self.layers_of_group(group).values()
        )

    def _check_base(self, group: ExportGroup, folder: Path) -> None:
        """Raise an ExportError if the base lacks a tensor of `group`, or has it in a wrong form.

        The shape must be as planned, and the dtype that of the export or castable to it. Tensors
        that the base stores in parts are not checked. `folder` is only named in the error.
        """
        for name, shape in group.outputs.items():
            exported, entry = self.plan.names[name], self.entries.get(self.plan.names[name])
            if exported in self.parts_of:
                continue
            if entry is None:
                raise ExportError(f"the base {folder} has no tensor {exported}: is it complete?")
            export_dtype, where = self.plan.tensors[exported].dtype, f"in the base {folder}"
            if entry.shape != shape:
                raise ExportError(
                    f"{exported} is {list(entry.shape)} {where}, and was {list(shape)} when the "
                    "adapter was trained; a resized module can be merged only where it was trained "
                    "as a whole (lora.modules_to_save)"
                )
            if entry.dtype != export_dtype and (
                entry.dtype not in CASTABLE or export_dtype not in CASTABLE
            ):
                raise ExportError(
                    f"{exported} is {entry.dtype} {where}, which cannot become {export_dtype}; "
                    "merge into the base that was not quantised"
                )

    def read_group(self, group: ExportGroup) -> Mapping[str, TensorValues]:
        """Read the outputs of a group, with the adapter merged in: output name -> values.

        Each value is an iterator over blocks of rows if the group is copied from the base's files,
        otherwise a tensor.

        Raises:
            ExportError: the base cannot be converted as planned.
            CheckpointError: an adapter tensor differs from its saved checksum.
        """
        names = {name: self.plan.names[name] for name in group.outputs}
        parts = self.layers_of_group(group)
        if not any(parts.values()) and not self.parts_of.keys() & set(names.values()):
            files = {name: self.entries[exported] for name, exported in names.items()}
            return {name: (rows for _, rows in read_blocks(file)) for name, file in files.items()}
        # Weights are cast to the dtype in which a reader loads the base, to round where PEFT does.
        export_dtypes = {self.plan.tensors[exported].dtype for exported in names.values()}
        base = self._read_base(group, list(names.values())) if self.needs_base(group) else {}
        parameters = {}
        for name, part in parts.items():
            if part is None:
                parameters[name] = base.pop(name)
            elif part.kind == "saved":
                parameters[name] = self.tensors.read_tensor(part.tensors["saved"])
            else:
                weight = base.pop(name)
                parameter = self.aliases.get(name, name)
                for dtype in export_dtypes:
                    weight = weight.to(loaded_dtype(self.model, parameter, weight.dtype, dtype))
                factors = {r: self.tensors.read_tensor(n).float() for r, n in part.tensors.items()}
                parameters[name] = merge_layer(self.layout, part, weight, factors)
        return self.plan.convert(group, parameters)

    def _read_base(self, group: ExportGroup, names: list[str]) -> dict[str, torch.Tensor]:
        """Load the parameters of a group from the base's files, with transformers' conversions.

        Args:
            group: the group.
            names: keys of the group in the base.

        Returns:
            Parameter name -> tensor.

        Raises:
            ExportError: the conversion does not give all parameters of the group.
        """
        if not group.converted and names[0] not in self.parts_of:
            return {group.sources[0]: read_tensor(self.entries[names[0]])}
        names = [key for name in names for key in self.parts_of.get(name, (name,))]
        parameters: dict[str, torch.Tensor] = {}
        for part in plan_load_groups(self.reader, names):
            parameters |= load_group(self.reader, part, self.entries)
        if missing := sorted(set(group.sources) - parameters.keys()):
            raise ExportError(
                f"transformers makes {sorted(parameters)} of {', '.join(names[:3])}, not "
                f"{missing[0]}"
            )
        return parameters


def _check_tied_layers(layout: PeftLayout, families: dict[str, list[str]]) -> None:
    """Raise an ExportError if an adapter changes the uses of a tied matrix in different ways.

    A merged model cannot hold two versions of one matrix, so the adapter must change all uses alike
    or none. `families` maps the exported name of a tied parameter to all its names.
    """
    for parameter, parts in layout.parts.items():
        ways = {tuple(sorted(part.tensors.items())) for part in parts}
        names = families.get(parameter, [parameter])
        modules = {name.rpartition(".")[0] for name in names}
        if len(ways) > 1 or (len(names) > 1 and len(parts) < len(modules)):
            raise ExportError(
                f"{' and '.join(sorted(names))} are one matrix of the base, and the adapter "
                f"changes {len(ways)} of {len(modules)} uses of it: a merged model would have to "
                "hold both. Keep base and adapter apart (without --merge)"
            )
