"""What a run would be refused for before its first step, asked here of the real config.

The same pass makes the small run that then lives (`life`).
"""

import ast
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit import config, hub, objectives, recipes, training
from toolkit.assembly import build_checked, check_continued
from toolkit.checkpoint import disk
from toolkit.checkpoint.adapter_source import adopt_adapter
from toolkit.checkpoint.run_folder import claim, recorded_config, root_of
from toolkit.checkpoint.store import is_url, where
from toolkit.config.settings import FinetuneConfig, ShardingConfig
from toolkit.data.order.position import accumulation_for
from toolkit.data.prepare import encoder_for, prepare_data
from toolkit.data.tokens.encode import Encoder
from toolkit.data.tokens.tokenizer import load_tokenizer, own_tokenizer
from toolkit.errors import ConfigError, DataError
from toolkit.mesh import DP_REPLICATE, DP_SHARD, View
from toolkit.models import build_on_meta, check_quantisation, plain_name, vocabulary_size
from toolkit.planning.fake_ranks import fake_world, sharded
from toolkit.rehearsal.life import Life
from toolkit.rehearsal.rows import Head, length_for, read_heads, refuse_long
from toolkit.rehearsal.settings import (
    affordable_length,
    not_rehearsed,
    notes_on,
    on_cpu,
    rehearsal_config,
)
from toolkit.rehearsal.shrunk import shrink
from toolkit.rehearsal.small_adapter import write_small_adapter
from toolkit.rehearsal.stages import STAGES, NotAskedError, Recorder
from toolkit.sharding.unit_table import unit_rows
from toolkit.tables import size_text

# Attention kernels -> packages of which one must be there; transformers takes kernels of the Hub
# through the last.
_ATTENTION = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "flash_attn_3", "kernels"),
    "flash_attention_4": ("flash_attn_4", "flash_attn", "kernels"),
}


def real_world(cfg: ShardingConfig, world_size: int) -> int:
    """Return the number of processes of the run as far as the mesh says it."""
    sizes = [n for n in (cfg.dp_replicate, cfg.dp_shard) if n != -1]
    named = math.prod(sizes)
    return named if len(sizes) == 2 or named % world_size == 0 else named * world_size


@dataclass
class Rehearsal:
    """The stages, and what they hand on to each other; those that ask what a run would be refused
    for before its first step return what they found, and raise what the run would.
    """

    file: Path
    flags: Sequence[str]
    world_size: int
    recipe: str | None
    most_too_long: float
    folder: Path
    recorder: Recorder
    cfg: Any = None
    model_cfg: Any = None
    model: Any = None
    """The real one, on meta; sharded after `check_sharding`."""
    heads: tuple[list[Head], list[Head]] = field(default_factory=lambda: ([], []))
    """First rows to train on, and to evaluate on."""
    life: Life | None = None

    def run(self) -> None:
        """Run the stages, to the first that fails; those before the first start all."""
        record, model = self.recorder.run, ("settings", "packages", "model")
        record("settings", self.read_settings)
        record("packages", self.check_packages, model[:1])
        record("output", self.check_output, model[:2])
        record("hub", self.check_hub, model[:1])
        record("model", self.check_model, model)
        record("data", self.check_rows, model)
        record("sharding", self.check_sharding, model)
        record("disk", self.check_disk, (*model, "output", "sharding"))
        record("load", self.load)
        if self.life is None:
            return
        with self.life:
            names = list(STAGES)
            for name in names[names.index("load") + 1 :]:
                record(name, getattr(self.life, name.replace(" ", "_")))

    @property
    def ranks(self) -> int:
        """Processes of the real run."""
        return real_world(self.cfg.sharding, self.world_size)

    def read_settings(self) -> str:
        kind, self.cfg, note = recipes.load_config(self.file, self.flags, self.recipe, remote=True)
        self.cfg = adopt_adapter(self.cfg)
        self.recorder.result.recipe, self.recorder.result.notes = kind.name, notes_on(self.cfg)
        return f"of the recipe {recipes.script_of(kind.name)}" + (f" ({note})" if note else "")

    def check_packages(self) -> str:
        """Refuse packages that the settings, the recipe or the model's own code need, and lack."""
        cfg = self.cfg
        cfg.metrics.trackers()
        kernel = cfg.model.attn_implementation or ""
        wanted = _ATTENTION.get(kernel, ("kernels",) if "/" in kernel else ())
        if wanted and not any(importlib.util.find_spec(name) for name in wanted):
            raise ConfigError(
                f"model.attn_implementation {kernel} needs {' or '.join(wanted)}, which cannot be "
                "imported here; pip install it, or set sdpa"
            )
        asked = {"liger_kernel": cfg.model.kernels == "liger" and "model.kernels: liger"}
        asked["bitsandbytes"] = (cfg.optim.optim == "adamw_8bit" and "optim.optim: adamw_8bit") or (
            cfg.adapters and cfg.adapters.load_in_4bit and "lora.load_in_4bit"
        )
        for package, setting in asked.items():
            if setting and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{setting} needs {package}, which cannot be imported here; pip install "
                    f"{package.replace('_', '-')}, or leave it out"
                )
        if is_url(cfg.checkpoint.root):
            where(cfg.checkpoint.root)  # its driver
        script = recipes.script_of(self.recorder.result.recipe)
        files = [script]
        model = Path(cfg.model.name_or_path).expanduser()
        if cfg.model.trust_remote_code and model.is_dir():
            files += model.glob("*.py")
        for file in files:
            if lacking := sorted(_missing(file)):
                raise ConfigError(
                    f"{file} imports {', '.join(lacking)}, which cannot be found here; pip install "
                    f"{' '.join(lacking)}"
                )
        return f"all that the settings and {script} import"

    def check_output(self) -> str:
        """Refuse an output_dir or checkpoint.root that is not free, or that a file cannot go to."""
        cfg = self.cfg
        claim(cfg)
        places = {"output_dir": Path(cfg.output_dir)}
        root = root_of(cfg)
        if cfg.checkpoint.root is not None and isinstance(root, Path):
            places["checkpoint.root"] = root
        for setting, folder in places.items():
            above = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
            try:
                with (
                    tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=above) as scratch,
                    open(Path(scratch, "file"), "wb") as file,
                ):
                    file.write(b"rehearsal")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ConfigError(
                    f"{setting} {folder}: {above} cannot be written to ({error.strerror}); give "
                    "another"
                ) from error
        return f"{' and '.join(map(str, places.values()))} can be written"

    def check_hub(self) -> str:
        """Refuse what publishing would be refused for; creates no repository."""
        cfg = self.cfg
        adapted = cfg.model.name_or_path if cfg.adapters else None
        hub.check(cfg.hub, adapted=adapted, create=False)
        if not cfg.hub.push_to_hub:
            raise NotAskedError("hub.push_to_hub is off")
        return f"{cfg.hub.hub_model_id} may be pushed to"

    def check_model(self) -> str:
        """Build the real model on meta; refuse a tokenizer that gives ids beyond the embedding."""
        cfg, own = self.cfg, on_cpu(self.cfg)
        check_quantisation(cfg.adapters, cfg.sharding, own.model, "cpu")
        model, self.model_cfg = build_checked(own, "cpu", own_tokenizer)
        self.model = model
        check_continued(cfg, model, resumes=recorded_config(cfg) is not None)
        tokenizer = load_tokenizer(self.model_cfg)
        Encoder(tokenizer, cfg.data, vocabulary_size(model))
        if isinstance(cfg, FinetuneConfig):
            training.check_prompts(model, tokenizer, cfg.train)
        tokens = "no tokenizer" if tokenizer is None else f"{len(tokenizer):,} tokens"
        values = sum(p.numel() for p in model.parameters())
        rows = f"{vocabulary_size(model):,} rows of the embedding"
        return f"{plain_name(model)}, {values:,} parameters; {tokens}, {rows}"

    def check_rows(self) -> str:
        """Read the first rows; refuse what the run would, and sources with too many long rows."""
        cfg, model = self.cfg, self.model
        tokenizer = load_tokenizer(self.model_cfg)
        untrained = tokenizer is None and cfg.model.train_tokenizer
        encoder = None if untrained else encoder_for(cfg, self.model_cfg, model)
        self.heads = heads, evals = read_heads(cfg, encoder), read_heads(cfg, encoder, "eval")
        refuse_long([*heads, *evals], cfg.data.sequence_length, self.most_too_long)
        formats = {head.source.layout.format for head in heads}
        if tokenizer is None and not untrained and formats != {"tokenised"}:
            raise DataError(
                f"expected a tokenizer for the text, {cfg.model.name_or_path} comes with none; set "
                "model.tokenizer_name_or_path"
            )
        batch, size = cfg.train.global_batch_size, cfg.train.per_device_train_batch_size
        if batch is not None and size != "auto":
            accumulation_for(batch, size, self.ranks)  # refuses what does not divide
        whole = all(head.whole for head in [*heads, *evals]) and not untrained
        if whole and not cfg.data.streaming:  # little enough to be prepared as the run will
            own: Any = SimpleNamespace(device=torch.device("cpu"), loader=None)
            with fake_world(self.ranks):
                view = View(0, self.ranks)
                metrics = objectives.build(cfg).metrics
                prepare_data(on_cpu(cfg), model, self.model_cfg, own, view, metrics)
        return _seen(heads, evals, untrained)

    def check_sharding(self) -> str:
        """Shard the real model as on the ranks of the run, but on meta."""
        cfg, model = self.cfg, self.model
        own = on_cpu(cfg)
        how: Any = {"model": model, "torch_compile": own.sharding.torch_compile}
        with sharded(own, self.ranks, **how) as (made, sharding):
            rows = unit_rows(made, sharding)
            replicas, shards = made.mesh.axes[DP_REPLICATE], made.mesh.axes[DP_SHARD]
            held = size_text(sum(row.bytes_sharded for row in rows))
            self.model = made.model
            return f"{len(rows)} units on {replicas} x {shards} ranks, {held} of parameters each"

    def check_disk(self) -> str:
        """Refuse a disk too small for what the real run writes."""
        cfg, model = self.cfg, self.model
        steps = cfg.train.max_steps if cfg.train.max_steps > 0 else None
        need = disk.need(model, cfg.output_dir, cfg.checkpoint, steps, self.ranks, cfg.optim)
        disk.refuse_overflow(need, cfg.checkpoint)
        return str(need)

    def load(self) -> str:
        small, own = self.prepare()
        said = (self.recorder.result.recipe, self.cfg, own, self.world_size)
        self.life = Life(*said, self.folder, self.recorder.logs)
        return f"{self.life.load()}; {small}"

    def prepare(self) -> tuple[Any, Any]:
        """Write the small model and the first rows; return it, and the config of the rehearsal."""
        cfg, data, cpu = self.cfg, self.cfg.data, on_cpu(self.cfg)
        small = shrink(cpu.model, cfg.sharding.param_dtype, self.folder / "model")
        length = length_for(self.heads[0], affordable_length(cpu, small), data.sequence_length)
        train, evals = (
            [
                head.write(self.folder / "data" / f"{what}-{i}", length)
                for i, head in enumerate(heads)
            ]
            for what, heads in zip(("train", "eval"), self.heads, strict=True)
        )
        trusted = cfg.model.trust_remote_code
        built = type(cfg.model)(str(small.folder), init="random", trust_remote_code=trusted)
        model, files, output = build_on_meta(built), (train, evals), self.folder / "run"
        own = rehearsal_config(cfg, small, model, self.world_size, length, files, output)
        if isinstance(own, FinetuneConfig) and own.lora.from_ is not None:
            place = self.folder / "adapter"
            own = replace(own, lora=write_small_adapter(own.lora, build_on_meta(built), place))
        result = self.recorder.result
        result.changed = config.differences(cfg, own)
        result.not_rehearsed = not_rehearsed(cfg.sharding, self.ranks, self.world_size)
        return small, own


def _missing(file: Path) -> Iterable[str]:
    """Return the packages that a module imports at its top level and that are not there."""
    for node in ast.parse(file.read_text("utf-8"), str(file)).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in (n.partition(".")[0] for n in names):
            beside = file.parent / f"{name}.py", file.parent / name
            if importlib.util.find_spec(name) is None and not any(p.exists() for p in beside):
                yield name


def _seen(heads: list[Head], evals: list[Head], untrained: bool) -> str:
    rows = sum(head.counts.rows or len(head.rows) for head in heads)
    said = f"{'all' if all(h.whole for h in heads) else 'the first'} {rows:,} rows"
    if untrained:
        return f"{said}; the tokenizer is trained on them"
    tokens = sum(head.counts.tokens for head in heads)
    learned = sum(head.counts.supervised for head in heads)
    cut = max(head.too_long for head in heads)
    said += f", {tokens:,} tokens, {learned / max(1, tokens):.0%} learned"
    if cut:
        said += f", {cut:.0%} of the rows too long"
    left = {why: n for head in heads for why, n in head.counts.dropped.items()}
    said += f"; left out: {', '.join(f'{n} {why}' for why, n in left.items())}" if left else ""
    return said + (f"; {sum(e.counts.rows for e in evals):,} to evaluate on" if evals else "")
