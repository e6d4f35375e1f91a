"""Proof that a Hugging Face folder holds the weights of a checkpoint: every value, once.

Owns the comparison. Names and conversions are taken the way transformers loads them, from the
export towards the parameters: nothing here knows how an export is written, so that it cannot share
a mistake with it. Where a tensor kept dtype and shape, the digest that the manifest holds of live
memory is enough, and the checkpoint's shards are not read.

Memory: blocks of 4 MB (or one row) on each of four threads; of tensors that transformers converts
one group at a time.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint.sources import Source, check_whole, parameter_names
from toolkit.errors import CheckpointError, LoadingError
from toolkit.formats.hf_folder import TensorEntry
from toolkit.formats.tensor_stream import (
    StoredTensor,
    blocks,
    digest,
    first_difference,
    in_file,
    same_values,
)
from toolkit.loading.pretrained import LoadGroup, load_group, load_groups, materialise
from toolkit.models.causal_lm import tied_names, vocabulary_size

Add = Callable[[str, str | None, str], None]
"""Takes a finding: file of the export, tensor, what is wrong."""


class Proof:
    """The comparison of one export with one checkpoint."""

    def __init__(
        self,
        source: Source,
        digests: dict[str, str],
        model: PreTrainedModel,
        entries: dict[str, TensorEntry],
        add: Add,
        advance: Callable[[int], Any],
    ) -> None:
        """Match the checkpoint's keys with the parameters of `model`, on meta, of the export.

        Args:
            digests: of the checkpoint's tensors, from its manifest; empty where it has none.
            entries: the export's tensors.

        Raises:
            ExportError: the checkpoint is not whole, or not of one model.
        """
        self.source, self.digests, self.model = source, digests, model
        self.entries, self.add, self.advance = entries, add, advance
        self.owner = tied_names(model)
        _, keys = parameter_names(source, model.state_dict())
        check_whole(source, keys.values())
        self.keys: dict[str, list[str]] = {}
        """Parameter, of tied ones the first -> its keys in the checkpoint."""
        for name, key in keys.items():
            self.keys.setdefault(self.owner.get(name, name), []).append(key)
        self.covered: dict[str, list[str]] = {}
        """Parameter -> the export's tensors that hold it."""

    def run(self) -> None:
        """Compare everything; each difference is said."""
        groups = load_groups(self.model, self.entries)
        plain = [group for group in groups if not group.converted]
        for group in plain:
            self._cover(group.parameter, group.keys)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(self._compare, plain))
        for group in groups:
            if group.converted:
                self._compare_converted(group)
        self._check_covered()

    def stored(self, key: str) -> StoredTensor:
        """Return the checkpoint's tensor `key`."""
        return stored_in(self.source, key)

    def _cover(self, parameter: str, keys: Iterable[str]) -> None:
        self.covered.setdefault(self.owner.get(parameter, parameter), []).extend(keys)

    def _compare(self, group: LoadGroup) -> None:
        """Compare a tensor whose bytes are those of one parameter."""
        (name,) = group.keys
        entry = self.entries[name]
        for key in self.keys.get(self.owner.get(group.parameter, group.parameter), ()):
            what = difference(self.source, self.digests, key, entry)
            if what is not None:
                self.add(entry.file.name, name, what)
        self.advance(entry.nbytes)

    def _compare_converted(self, group: LoadGroup) -> None:
        """Compare the parameters that transformers makes of several tensors."""
        file, name = self.entries[group.keys[0]].file.name, group.keys[0]
        try:
            made = load_group(self.model, group, self.entries)
        except LoadingError as error:
            self.add(file, name, f"is not loaded by transformers: {error}")
            return
        dtypes = {self.entries[key].dtype for key in group.keys}
        for parameter, tensor in made.items():
            self._cover(parameter, [f"{name} ..." if len(group.keys) > 1 else name])
            for key in self.keys.get(self.owner.get(parameter, parameter), ()):
                what = self._converted_difference(key, tensor, dtypes)
                if what is not None:
                    self.add(file, name, f"with its group becomes {parameter}, which {what}")
        self.advance(sum(self.entries[key].nbytes for key in group.keys))

    def _converted_difference(
        self, key: str, tensor: torch.Tensor, dtypes: set[torch.dtype]
    ) -> str | None:
        kept = self.stored(key)
        if kept.shape != tuple(tensor.shape):
            return f"has shape {list(tensor.shape)}, in the checkpoint {list(kept.shape)}"
        if any(kept.dtype != d and not castable(kept.dtype, d) for d in dtypes):
            return f"is {', '.join(map(_name, dtypes))}, in the checkpoint {_name(kept.dtype)}"
        whole = tensor if tensor.ndim > 1 else tensor.reshape(1, -1)
        wrong = 0

        def compare(first: int, rows: torch.Tensor) -> None:
            nonlocal wrong
            part = whole[first : first + rows.shape[0]]
            same = torch.zeros(part.shape, dtype=torch.bool)
            for dtype in dtypes:  # of several, each value is a cast to one of them
                same |= same_values(rows.to(dtype).to(part.dtype), part)
            wrong += int((~same).sum())

        held = digest(kept, key, compare)
        if self.digests.get(key, held) != held:
            return "cannot be compared: the checkpoint's does not have its own digest"
        return f"differs from {key} in {wrong} of {tensor.numel()} values" if wrong else None

    def _check_covered(self) -> None:
        files = sorted({entry.file.name for entry in self.entries.values()})
        for parameter, keys in self.keys.items():
            held = self.covered.get(parameter, [])
            if not held:
                self.add(files[0] if len(files) == 1 else "", keys[0], "is not in the export")
            elif len(held) > 1:
                names = " and ".join(held)
                self.add(
                    self.entries[held[-1]].file.name if held[-1] in self.entries else "",
                    held[-1],
                    f"is stored twice: {names} are one parameter, {parameter}",
                )


def stored_in(source: Source, key: str) -> StoredTensor:
    """Return the tensor `key` of a checkpoint."""
    entry = source.tensors[key]
    return StoredTensor(entry.dtype, entry.shape, tuple(source.locate(key)))


def difference(source: Source, digests: dict[str, str], key: str, entry: TensorEntry) -> str | None:
    """Return in what a tensor of an export is not the checkpoint's `key`; None where in nothing."""
    kept, known = source.tensors[key], digests.get(key)
    if kept.shape != entry.shape:
        return f"has shape {list(entry.shape)}, {key} of the checkpoint {list(kept.shape)}"
    if kept.dtype != entry.dtype and not castable(kept.dtype, entry.dtype):
        return f"is {_name(entry.dtype)}, {key} of the checkpoint {_name(kept.dtype)}"
    came = in_file(entry)
    if known is not None and kept.dtype == entry.dtype and digest(came, key) == known:
        return None
    what, held = first_difference(stored_in(source, key), came, None if known is None else key)
    if held != known:
        return f"cannot be compared: {key} of the checkpoint does not have its own digest"
    return None if what is None else f"is not {key} of the checkpoint: {what}"


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of a few fixed tokens [2, length, vocabulary], in float32."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    length = min(16, limit) if isinstance(limit, int) and limit > 0 else 16
    chooser = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary_size(model), (2, length), generator=chooser)
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def fill(proof: Proof, model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Put the checkpoint's weights into `model`, on meta, cast to the dtypes of `like`.

    One plain process, unsharded: needs the memory of the model.

    Raises:
        CheckpointError: a parameter is not in the checkpoint.
    """
    dtypes = {n: t.dtype for n, t in like.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty_like(parameter, dtype=dtypes[name])
    materialise(model, "cpu")
    persistent = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n in persistent}
    for name, tensor in tensors.items():
        keys = proof.keys.get(proof.owner.get(name, name))
        if keys is None:
            raise CheckpointError(f"{proof.source.folder} lacks {name}")
        whole = tensor.detach() if tensor.ndim > 1 else tensor.detach().reshape(1, -1)
        for first, rows in blocks(proof.stored(keys[0])):
            whole[first : first + rows.shape[0]].copy_(rows)


def load_export(folder: Path, like: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load an export as its readers do; return it and transformers' account of the keys."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(like.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    loader: Any = AutoModelForCausalLM if known else type(like)
    return loader.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )


def castable(kept: torch.dtype, came: torch.dtype) -> bool:
    """Whether an export may have `came` where the checkpoint has another dtype, `kept`."""
    return kept.is_floating_point and came.is_floating_point


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
