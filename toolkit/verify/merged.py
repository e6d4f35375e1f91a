"""Whether a Hugging Face folder is a base model with an adapter merged in, and computes like both.

Owns the checks of such a folder against a checkpoint of adapters; the values are `merge_proof`'s,
and what the folder has in common with every export is `export_check`'s.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import attach_adapters, peft_layout, read_config
from toolkit.adapters.switch import without_adapters
from toolkit.checkpoint.sources import Source, parameter_names
from toolkit.config.settings import ModelConfig
from toolkit.errors import ExportError, LoadingError
from toolkit.formats.hf_folder import read_weights, weight_files
from toolkit.formats.tensor_stream import whole
from toolkit.models.causal_lm import build_on_meta, vocabulary_size
from toolkit.verify.export import ExportCheck, digests_of, noise
from toolkit.verify.export_proof import load_export, logits_of, stored_in
from toolkit.verify.merge_proof import MergeProof


class MergedCheck(ExportCheck):
    """One Hugging Face folder that should be a base with an adapter merged in."""

    def prove_merged(self, source: Source, folder: Path) -> None:
        """Compare every value with base and adapter; `folder` holds the base."""
        if self.model is None or not self.entries:
            return  # said before
        self.findings.expect(sum(entry.nbytes for entry in self.entries.values()))
        try:
            config = read_config(source.hf)
            proof = MergeProof(
                source,
                digests_of(source),
                peft_layout(model_of(source), config),
                config,
                read_weights(weight_files(folder)),
                model_of(source),
                self.entries,
                self.add,
                self.findings.advance,
            )
            proof.run()
        except (ExportError, LoadingError) as error:
            self.add("", None, str(error))
            return
        if proof.rounded:
            self.findings.report.notes.append(
                f"{proof.rounded:,} merged values lie at the border of two roundings, and are the "
                "other one here"
            )

    def compare_merged(self, source: Source, folder: Path) -> None:
        """Compare logits with those of base and adapter kept apart.

        A merge rounds each weight to the export's dtype, so that they are near, not equal: the
        merged model must be nearer to the adapted one than half of the way from the base to it.
        """
        if self.model is None or not self.entries:
            return
        base = load_base(folder, self.model)
        model = with_adapter(base, source)
        theirs = logits_of(model)
        with without_adapters(model):
            plain = logits_of(model)
        del base, model
        try:
            loaded, _ = load_export(self.folder, self.model)
        except Exception as error:  # from_pretrained has no common class of errors
            self.add("", None, f"does not load: {type(error).__name__}: {error}")
            return
        largest = float((logits_of(loaded) - theirs).abs().max())
        effect = float((plain - theirs).abs().max())
        self.findings.report.logits_difference = largest
        allowed = max(noise(loaded, theirs), 0.5 * effect)
        said = f"{largest:.3g}, of base and adapter {effect:.3g}"
        if not largest <= allowed:
            self.add("", None, f"logits differ from the checkpoint's by {said}")
        self.findings.report.notes.append(
            f"logits of merged and adapted model: largest difference {said}"
        )


def load_base(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Return the base in `folder` as a reader loads it, with as many rows as `like` has: adapters
    that were trained with new tokens hold the whole of embedding and head.
    """
    base, _ = load_export(folder, like)
    rows = vocabulary_size(like)
    if vocabulary_size(base) != rows:
        base.resize_token_embeddings(rows, mean_resizing=False)
    return base


def with_adapter(base: PreTrainedModel, source: Source) -> Any:
    """Return `base` with the adapter of a checkpoint, put in by name without PEFT's loading."""
    _, keys = parameter_names(source, ())
    model = attach_adapters(base, read_config(source.hf))
    tensors = dict(model.state_dict())
    with torch.no_grad():
        for name, key in keys.items():
            tensors[name].copy_(whole(stored_in(source, key)))
    return model


def model_of(source: Source) -> PreTrainedModel:
    """Return the base of a checkpoint of adapters, on meta."""
    return build_on_meta(ModelConfig(name_or_path=str(source.hf), init="random"))
