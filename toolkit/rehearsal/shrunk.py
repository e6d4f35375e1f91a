"""The model of a rehearsal: every kind of layer of the real one, few and narrow, real tokens.

Its folder looks like the real one: config.json, tokenizer, code, and, where pretrained weights are
asked for, random ones under the names and in the dtype of a checkpoint.
"""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.config.settings import ModelConfig
from toolkit.errors import ModelError, one_line
from toolkit.formats import DTYPES, assets_of, local_folder
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.classes import build, plain_class, plain_name
from toolkit.models.modes import forked_rng
from toolkit.models.tiny_copy import cuts, layer_kinds

_MOST = 2**28  # parameters of a copy


@dataclass(frozen=True)
class Shrunk:
    """The folder of a small model, and what came of the cut."""

    folder: Path
    parameters: int
    layers: tuple[int, int]
    """Of it and of the real model."""
    kinds: int
    dtype: str
    """In which its steps can be computed here: `param_dtype`, or float32."""

    def __str__(self) -> str:
        kinds = f"{self.kinds} kind{'s' * (self.kinds > 1)}"
        layers = f"{self.layers[0]} of {self.layers[1]} layers ({kinds})"
        return f"{layers}, {self.parameters:,} parameters"


def shrink(cfg: ModelConfig, param_dtype: str, folder: Path) -> Shrunk:
    """Write a small model of the kind of `cfg` into `folder`. ModelError: none of the cuts runs.

    `cfg` as a run has it, but without kernels for GPUs.
    """
    own = replace(cfg, resize_embeddings=False, frozen_parameters=[])
    real = build_on_meta(own)
    kinds = layer_kinds(real)
    why = "it has no decoder layers to look at"
    tries = cuts(real.config, kinds, None, real_text=True) if kinds else ()
    for config in chain(tries, [real.config]):  # one that is small already may be taken as it is
        try:
            small = _built(real, config)
            dtype = next(d for d in (param_dtype, "float32") if _steps(small, getattr(torch, d)))
            _write(small, real, own, folder)
        except StopIteration:
            why = "no step can be computed on this machine's CPU"
        except Exception as error:  # the next, milder cut is to be tried
            why = one_line(error)
        else:
            count = sum(p.numel() for p in small.parameters())
            depth = len(layer_kinds(small))
            return Shrunk(folder, count, (depth, len(kinds)), len({*kinds}), dtype)
    raise ModelError(f"{plain_name(real)} cannot be cut down to a size to rehearse with: {why}")


def _built(real: PreTrainedModel, config: Any) -> PreTrainedModel:
    with torch.device("meta"), forked_rng():
        size = sum(p.numel() for p in build(plain_class(real), config, torch.float32).parameters())
    if size > _MOST:
        raise ModelError(f"cut down it still has {size:,} parameters")
    with forked_rng():
        torch.manual_seed(0)
        return build(plain_class(real), config, torch.float32)


def _steps(model: Any, dtype: torch.dtype) -> bool:
    """Return whether a forward and a backward can be computed in `dtype` here."""
    ids = torch.arange(1, 9)[None]
    try:
        with forked_rng():
            model.to(dtype).train()(input_ids=ids, use_cache=False).logits.sum().backward()
    except (RuntimeError, NotImplementedError):
        if dtype == torch.float32:
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        model.float()
    return True


def _write(small: Any, real: PreTrainedModel, cfg: ModelConfig, folder: Path) -> None:
    assets, source = assets_of(real), local_folder(cfg.name_or_path, cfg.revision)
    common = Counter((assets.source or {}).values()).most_common(1)
    stored = assets.config.get("dtype", assets.config.get("torch_dtype"))
    small.config.use_cache = True
    if common:
        small.to(DTYPES[common[0][0]])
        small.save_pretrained(folder)
        stored = str(small.dtype).removeprefix("torch.")
    else:
        small.config.architectures = [plain_name(real)]
        small.config.save_pretrained(folder)
    for file in source.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    for name, content in assets.files.items():
        (folder / name).write_bytes(content)
    file = folder / "config.json"
    content = json.loads(file.read_text("utf-8"))
    for key in ("auto_map", "architectures"):
        if key in assets.config:
            content[key] = assets.config[key]
    if assets.whole is not None:  # what is rehearsed is the text part alone
        content["architectures"] = [plain_name(real)]
    content.pop("dtype", None)
    content |= {} if stored is None else {"dtype": stored}
    file.write_text(json.dumps(content, indent=2), "utf-8")
