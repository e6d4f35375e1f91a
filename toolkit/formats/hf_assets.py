"""Everything of a model's source folder except the weights, as a model carries it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import ModelError
from toolkit.formats.hf_folder import AGAIN, asset_files, is_text_map, read_config
from toolkit.formats.safetensors_files import source_dtypes
from toolkit.parsing import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOURCE_FILE = "source.json"  # in a checkpoint's hf/ folder only, never exported


@dataclass
class HFAssets:
    """Everything that an export needs in addition to the trained weights.

    It holds the small files of the source folder, and facts about the source's tensors.
    """

    config: dict[str, Any]  # config.json as the source has it
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, chat template, generation config: file name -> content."""
    source: dict[str, str] | None = None
    """Key -> safetensors dtype of the source checkpoint's tensors; None for a random start."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> name of the parameter that it is tied to and stored under."""
    origin: dict[str, Any] | None = None
    """Source of the tensors that no parameter takes, and that exports copy from there:
    `name_or_path`, `revision` and `digest` of its weights. None: there are none."""
    resized: dict[str, int] = field(default_factory=dict)
    """Parameter that `resize_embeddings` gave more or fewer rows -> its rows in the source."""
    # From here on in memory only.
    conversions: list[Any] = field(default_factory=list)
    """Transformers' mapping from source keys to parameters, computed before sharding."""
    model_class: "type[PreTrainedModel] | None" = None  # before sharding changes it
    whole: "tuple[type[PreTrainedModel], Any] | None" = None
    """Class and config of the complete checkpoint, if the model is only its text part."""
    stored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of `source` -> keys of its parts in the files, for tensors that are stored quantised."""
    reader: Any = None  # transformers' quantiser, which joins the parts
    name_or_path: str | None = None  # the source: a Hub id, or a folder's absolute path
    revision: str | None = None
    folder: Path | None = None  # of the source's files
    head_left_out: list[str] = field(default_factory=list)
    """Keys of a causal LM's head, which a reward model replaces; not in `source`."""
    drawn: list[str] = field(default_factory=list)
    """Parameters that the source does not have; they are initialised at random."""
    kernels: str = "none"  # implementation of the layers' kernels (`model.kernels`)
    float8: str = "none"  # recipe of the layers' float8 products (`model.float8`)
    float8_setting: str = "none"
    """Value of `model.float8`. Adapters are added to a base that is stored in it."""
    unpacked: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> names of matrices of a packed base that keep their dtype for it."""
    drawn_from: int | None = None  # seed of a random start, after the weights are drawn
    digest: str | None = None  # of the source's weights, after it was first computed
    continued: dict[str, Any] | None = None
    """Stage that the adapters of a run continue, as manifests describe it; None: new adapters."""
    base_sums: dict[str, int] | None = None
    """Checksum of each tensor of a loaded base under adapters, as memory holds it."""

    def save(self, folder: Path) -> None:
        """Write config, files and `source.json` into an existing folder; `load` reads them."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        source = {"keys": self.source, "tied": self.tied, "origin": self.origin}
        (folder / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "HFAssets":
        """Read the assets in a checkpoint's `hf/` folder, or in any Hugging Face folder.

        Fields that are never stored keep their defaults. A folder without `source.json` is itself
        the source of the key names.

        Raises:
            ModelError: config.json is missing or malformed, or `source.json` is malformed.
        """
        file, config, files = folder / SOURCE_FILE, read_config(folder), asset_files(folder)
        if not file.is_file():
            return cls(config, files, source_dtypes(folder))
        content = read_json(file, ModelError, strict=True)
        content = content if isinstance(content, dict) else {}
        keys: Any = content.get("keys")
        tied: Any = content.get("tied")
        origin: Any = content.get("origin")
        are_maps = (keys is None or is_text_map(keys)) and is_text_map(tied)
        if not (are_maps and isinstance(origin, dict | None)):
            raise ModelError(f"{file} does not map a source's key names to texts; {AGAIN}")
        return cls(config, files, keys, tied, origin)


def assets_of(model: torch.nn.Module) -> HFAssets:
    """Return the assets that `build_on_meta` attached to `model`; raise ModelError without them."""
    assets = getattr(model, "hf_assets", None)
    if not isinstance(assets, HFAssets):
        raise ModelError(
            f"{type(model).__name__} carries no Hugging Face assets; build it with build_on_meta"
        )
    return assets
