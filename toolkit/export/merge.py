"""A base model and an adapter become one model: tensor by tensor, one source of the writer.

What no adapter touches is copied from the base's files, to the byte. The arithmetic of the rest is
PEFT's (`adapters.peft_folder.merge_layer`): the result is that of `merge_and_unload`, to the bit.

Memory: the largest adapted tensor of the base, and two of its size in fp32 (DoRA: five); of tensors
that transformers converts (fused experts) their group.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.adapters.peft_folder import (
    CONFIG_FILE,
    AdapterLayer,
    PeftLayout,
    merge_layer,
    peft_layout,
    read_config,
)
from toolkit.errors import ExportError
from toolkit.export.plan import CASTABLE, make_plan, model_of_assets
from toolkit.export.saved import SavedTensors
from toolkit.export.writer import TensorValues
from toolkit.formats import ExportGroup, blocks, in_file, read_weights, weight_files, whole
from toolkit.loading import load_group, load_groups
from toolkit.models import tied_families, tied_names


class AdapterMerge:
    """The way from the base's files and the adapter's shards to the tensors of `plan`.

    Args:
        tensors: of the adapter's checkpoint.
        folder: of the base.
        override: dtype of all floating tensors; None: each as the base has it.
        limit: bytes of a weight file.

    Raises:
        ExportError: base and adapter do not fit together (names the tensor).
        LoadingError: the base is damaged or incomplete.
    """

    def __init__(
        self, tensors: SavedTensors, folder: Path, override: torch.dtype | None, limit: int
    ) -> None:
        self.tensors, self.entries = tensors, read_weights(weight_files(folder))
        hf = tensors.source.hf
        # Models of their own: PEFT takes the second apart, and reading changes the third.
        (model, assets), (adapted, _), (self.reader, _) = (model_of_assets(hf) for _ in range(3))
        self.layout = peft_layout(adapted, read_config(hf))
        if odd := sorted(set(self.layout.keys.values()) ^ tensors.keys.keys()):
            raise ExportError(
                f"{odd[0]} is not in both {tensors.source.folder} and what {hf / CONFIG_FILE} "
                "describes: the checkpoint is of another adapter"
            )
        _check_parts(self.layout, tied_families(model))
        self.aliases, state = tied_names(model), model.state_dict()
        stored = {n: (t.dtype, tuple(t.shape)) for n, t in state.items() if n not in self.aliases}
        self.plan = make_plan(hf, model, assets, stored, override, limit, where=str(folder))
        for group in filter(self.needs_base, self.plan.groups):
            self._check_base(group, folder)

    def parts(self, group: ExportGroup) -> dict[str, AdapterLayer | None]:
        """Return each of the group's parameters and what adapts it."""
        found = {n: self.layout.parts.get(self.aliases.get(n, n)) for n in group.sources}
        return {name: parts[0] if parts else None for name, parts in found.items()}

    def needs_base(self, group: ExportGroup) -> bool:
        """Whether one of the group's parameters was not trained as a whole."""
        return any(part is None or part.kind != "saved" for part in self.parts(group).values())

    def _check_base(self, group: ExportGroup, folder: Path) -> None:
        """Refuse a base without the tensors of `group`, or with others."""
        for name, shape in group.outputs.items():
            exported, entry = self.plan.names[name], self.entries.get(self.plan.names[name])
            if entry is None:
                raise ExportError(f"the base {folder} has no tensor {exported}: is it complete?")
            wanted, where = self.plan.tensors[exported].dtype, f"in the base {folder}"
            if entry.shape != shape:
                raise ExportError(
                    f"{exported} is {list(entry.shape)} {where}, and was {list(shape)} when the "
                    "adapter was trained; a resized module can be merged only where it was trained "
                    "as a whole (lora.modules_to_save)"
                )
            if entry.dtype != wanted and (entry.dtype not in CASTABLE or wanted not in CASTABLE):
                raise ExportError(
                    f"{exported} is {entry.dtype} {where}, which cannot become {wanted}; merge "
                    "into the base that was not quantised"
                )

    def read_group(self, group: ExportGroup) -> Mapping[str, TensorValues]:
        """Return the group's outputs: the base's bytes, or the base with the adapter merged in."""
        names = {name: self.plan.names[name] for name in group.outputs}
        parts = self.parts(group)
        if not any(parts.values()):
            files = {name: in_file(self.entries[exported]) for name, exported in names.items()}
            return {name: (rows for _, rows in blocks(file)) for name, file in files.items()}
        # Rounded once, when it is written.
        wanted = {self.plan.tensors[exported].dtype for exported in names.values()}
        base = self._read_base(group, list(names.values())) if self.needs_base(group) else {}
        parameters = {}
        for name, part in parts.items():
            if part is None:
                parameters[name] = base.pop(name)
            elif part.kind == "saved":
                parameters[name] = self.tensors.whole(part.tensors["saved"])
            else:
                weight = base.pop(name)
                for dtype in wanted:
                    weight = weight.to(torch.promote_types(weight.dtype, dtype))
                factors = {r: self.tensors.whole(n).float() for r, n in part.tensors.items()}
                parameters[name] = merge_layer(self.layout, part, weight, factors)
        return self.plan.convert(group, parameters)

    def _read_base(self, group: ExportGroup, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the group's parameters as transformers makes them of the base's files."""
        if not group.converted:
            return {group.sources[0]: whole(in_file(self.entries[names[0]]))}
        found: dict[str, torch.Tensor] = {}
        for part in load_groups(self.reader, names):
            found |= load_group(self.reader, part, self.entries)
        if missing := sorted(set(group.sources) - found.keys()):
            raise ExportError(
                f"transformers makes {sorted(found)} of {', '.join(names[:3])}, not {missing[0]}"
            )
        return found


def _check_parts(layout: PeftLayout, families: dict[str, list[str]]) -> None:
    """Refuse adapters that a merged model cannot hold: one matrix, changed in two ways."""
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
