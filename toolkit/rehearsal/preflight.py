"""Check the real config for a rehearsal, then cut the run down to one that this machine can live.

The checks are those of `toolkit.start_checks`; `life` runs the small run that is made here.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit import config, objectives, recipes
from toolkit.checkpoint.adapter_source import apply_adapter_settings
from toolkit.config.settings import FinetuneConfig, ShardingConfig
from toolkit.data.prepare import build_encoder, prepare_data
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.errors import DataError
from toolkit.mesh import View, init_mesh
from toolkit.models import build_on_meta
from toolkit.planning.fake_ranks import fake_world
from toolkit.rehearsal.life import SmallRun
from toolkit.rehearsal.rows import SourceHead, choose_length, read_heads, refuse_long_rows
from toolkit.rehearsal.settings import (
    affordable_length,
    build_notes,
    list_not_rehearsed,
    rehearsal_config,
    settings_for_cpu,
)
from toolkit.rehearsal.shrunk import Shrunk, shrink, write_small_adapter, write_small_reference
from toolkit.rehearsal.stages import STAGES, Recorder, SkippedError
from toolkit.start_checks import RunStart, run_checks


def count_processes(cfg: ShardingConfig, world_size: int) -> int:
    """Return the number of processes of the real run, as far as its mesh fixes it.

    If both dimensions of the mesh are set, it is their product. If both are -1, it is `world_size`.
    If one is set to n, it is n if `world_size` divides n, otherwise n times `world_size`.

    Args:
        cfg: the sharding settings of the run.
        world_size: the number of processes of the rehearsal.
    """
    fixed_sizes = [size for size in (cfg.dp_replicate, cfg.dp_shard) if size != -1]
    product = math.prod(fixed_sizes)
    is_complete = len(fixed_sizes) == 2 or product % world_size == 0
    return product if is_complete else product * world_size


@dataclass
class Rehearsal:
    """Runs the stages of a rehearsal in order, and keeps their results for later stages.

    A stage is a method that returns a text for the report, or raises the error that the real run
    would raise.
    """

    file: Path
    flags: Sequence[str]
    world_size: int
    recipe: str | None
    max_too_long: float
    folder: Path
    recorder: Recorder
    cfg: Any = None
    start: Any = None
    """The `Start` of the real run; its model is on meta."""
    heads: tuple[list[SourceHead], list[SourceHead]] = field(default_factory=lambda: ([], []))
    """First rows of each source for training, and for evaluation."""
    life: SmallRun | None = None

    def run(self) -> None:
        """Run all stages, and record their outcome. A failed stage raises no error.

        Stages before `load` check the config without starting the run; they run even if an
        unrelated stage has failed. From `load` on, the first failure ends the rehearsal.
        """
        record = self.recorder.run
        record("settings", self.read_settings)
        record("packages", lambda: self.check("packages"), ("settings",))
        record("output", lambda: self.check("output"), ("settings", "packages"))
        record("hub", self.check_hub, ("settings",))
        record("model", lambda: self.check("model"), ("settings", "packages", "model"))
        needs_model = ("settings", "packages", "model")
        record("data", self.check_rows, needs_model)
        record("sharding", lambda: self.check("sharding"), needs_model)
        record("disk", lambda: self.check("disk"), (*needs_model, "output", "sharding"))
        record("load", self.load)
        if self.life is None:
            return
        with self.life:
            names = list(STAGES)
            for name in names[names.index("load") + 1 :]:
                record(name, getattr(self.life, name.replace(" ", "_")))

    def check(self, name: str) -> str:
        """Run the start checks of a stage, and return their report; see `start_checks.CHECKS`.

        Returns an empty text if the checks report nothing.
        """
        return run_checks(self.start, "rehearse", name).get(name, "")

    def read_settings(self) -> str:
        """Read the config and find its recipe; set `cfg`, `start`, and the result's notes."""
        kind, self.cfg, note = recipes.load_config(self.file, self.flags, self.recipe, remote=True)
        self.cfg = apply_adapter_settings(self.cfg)
        script = recipes.find_script(kind.name)
        self.start = RunStart(
            self.cfg,
            count_processes(self.cfg.sharding, self.world_size),
            build_cfg=settings_for_cpu(self.cfg),
            script=script,
        )
        self.recorder.result.recipe = kind.name
        self.recorder.result.notes = build_notes(self.cfg)
        return f"of the recipe {script}" + (f" ({note})" if note else "")

    def check_hub(self) -> str:
        """Check the requirements of publishing, such as the token. Creates no repository.

        Skipped if `hub.push_to_hub` is off.
        """
        text = self.check("hub")
        if not self.cfg.hub.push_to_hub:
            raise SkippedError("hub.push_to_hub is off")
        return text

    def check_rows(self) -> str:
        """Read the first rows of each source into `heads`, and check them as the real run will.

        If these are all rows, they are also prepared as in the real run.

        Raises:
            DataError: the run would refuse the data, or too many rows of a source are too long.
        """
        self.check("data")
        cfg, model = self.cfg, self.start.model
        tokenizer = load_tokenizer(self.start.model_cfg)
        trains_tokenizer = tokenizer is None and cfg.model.train_tokenizer
        encoder = None if trains_tokenizer else build_encoder(cfg, self.start.model_cfg, model)
        train_heads = read_heads(cfg, encoder)
        eval_heads = read_heads(cfg, encoder, "eval")
        self.heads = (train_heads, eval_heads)
        refuse_long_rows([*train_heads, *eval_heads], cfg.data.sequence_length, self.max_too_long)
        formats = {head.source.layout.format for head in train_heads}
        if tokenizer is None and not trains_tokenizer and formats != {"tokenised"}:
            raise DataError(
                f"expected a tokenizer for the text, and {cfg.model.name_or_path} comes with none; "
                "set model.tokenizer_name_or_path"
            )
        is_complete = all(head.is_complete for head in [*train_heads, *eval_heads])
        if is_complete and not trains_tokenizer and not cfg.data.streaming:
            # There are few enough rows to prepare them as the run will.
            process: Any = SimpleNamespace(device=torch.device("cpu"), loader=None)
            world_size = self.start.world_size
            with fake_world(world_size):
                # The stage sharding checks the mesh. Only ranks that share rows need it here.
                mesh: Any = SimpleNamespace(data=View(0, world_size), context=View())
                if self.cfg.sharding.context_parallel > 1:
                    mesh = init_mesh("cpu", world_size, self.cfg.sharding)
                metrics = objectives.build(cfg).metrics
                model_cfg = self.start.model_cfg
                prepare_data(self.start.build_cfg, model, model_cfg, process, mesh, metrics)
        return _describe_rows(train_heads, eval_heads, trains_tokenizer)

    def load(self) -> str:
        """Write the files of the small run, start it, set `life`, and wait for the first step."""
        shrunk, cfg = self.write_small_run()
        recipe = self.recorder.result.recipe
        logs = self.recorder.logs
        self.life = SmallRun(recipe, self.cfg, cfg, self.world_size, self.folder, logs)
        return f"{self.life.load()}; {shrunk}"

    def write_small_run(self) -> tuple[Shrunk, Any]:
        """Write scaled-down models, the first rows and, if `lora.from` is set, a small adapter.

        Also records in the result which settings differ from the real run, and what is not
        rehearsed.

        Returns:
            The small model, and the config of the small run.
        """
        cfg, cpu_cfg = self.cfg, self.start.build_cfg
        shrunk = shrink(cpu_cfg.model, cfg.sharding.param_dtype, self.folder / "model")
        affordable = affordable_length(cpu_cfg, shrunk)
        length = choose_length(self.heads[0], affordable, cfg.data.sequence_length)
        train_files, eval_files = (
            [
                head.write(self.folder / "data" / f"{purpose}-{number}", length)
                for number, head in enumerate(heads)
            ]
            for purpose, heads in zip(("train", "eval"), self.heads, strict=True)
        )
        trusted = cfg.model.trust_remote_code
        small_cfg = type(cfg.model)(str(shrunk.folder), init="random", trust_remote_code=trusted)
        output = self.folder / "run"
        files = (train_files, eval_files)
        model = build_on_meta(small_cfg)
        small_run = rehearsal_config(cfg, shrunk, model, self.world_size, length, files, output)
        if isinstance(small_run, FinetuneConfig) and small_run.lora.from_ is not None:
            model = build_on_meta(small_cfg)
            lora = write_small_adapter(small_run.lora, model, self.folder / "adapter")
            small_run = replace(small_run, lora=lora)
        for role, frozen in small_run.frozen_models.items():
            folder = self.folder / f"{role}-model"
            frozen_copy = shrink(frozen, cfg.sharding.param_dtype, folder)
            frozen = replace(frozen, name_or_path=str(frozen_copy.folder), revision=None)
            changes: dict[str, Any] = {role: frozen}
            small_run = replace(small_run, **changes)
        small_run = write_small_reference(cpu_cfg, small_run, small_cfg, self.folder)
        result = self.recorder.result
        result.changed = config.find_differences(cfg, small_run)
        processes = self.start.world_size
        result.not_rehearsed = list_not_rehearsed(cfg.sharding, processes, self.world_size)
        return shrunk, small_run


def _describe_rows(train: list[SourceHead], evals: list[SourceHead], trains_tokenizer: bool) -> str:
    """Format counts of the rows that were read: tokens, supervised share, too long, skipped.

    Args:
        train: the first rows of each training source.
        evals: the first rows of each evaluation source.
        trains_tokenizer: True if the tokenizer will be trained on the rows, so tokens are not
            counted.
    """
    rows = sum(head.counts.rows or len(head.rows) for head in train)
    is_complete = all(head.is_complete for head in train)
    parts = [f"{'all' if is_complete else 'the first'} {rows:,} rows"]
    if trains_tokenizer:
        return f"{parts[0]}; the tokenizer is trained on them"
    tokens = sum(head.counts.tokens for head in train)
    supervised = sum(head.counts.supervised for head in train)
    parts[0] += f", {tokens:,} tokens, {supervised / max(1, tokens):.0%} supervised"
    if too_long := max(head.too_long for head in train):
        parts[0] += f", {too_long:.0%} of the rows too long"
    dropped: Counter[str] = Counter()
    for head in train:
        dropped.update(head.counts.dropped)
    if dropped:
        parts.append(f"skipped: {', '.join(f'{n} {reason}' for reason, n in dropped.items())}")
    if evals:
        parts.append(f"{sum(head.counts.rows for head in evals):,} to evaluate on")
    return "; ".join(parts)
