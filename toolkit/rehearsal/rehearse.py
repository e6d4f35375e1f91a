"""The stages of a rehearsal in order, from the config to the dry run of a push."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config, recipes
from toolkit.errors import ConfigError
from toolkit.rehearsal.stages import SKIPPABLE, Recorder, Result

_CACHE = "HF_DATASETS_CACHE"
_MODEL = ("settings", "packages", "model")


def rehearse(
    file: str | Path,
    world_size: int = 2,
    *,
    settings: Sequence[str] = (),
    recipe: str | None = None,
    skip: Sequence[str] = (),
    most_too_long: float = 0.5,
    keep: bool = False,
    show: Callable[[str], None] = print,
) -> Result:
    """Rehearse the run of a config on this machine's CPU; return what came of each stage.

    About a minute and a half on two cores: four starts of Python with its libraries, and a dozen
    steps of a small model. Works in a temporary folder, which is kept where something failed, or
    with `keep`; the run's own output_dir is written to and cleaned again. The recipe is the current
    folder's copy, or the toolkit's own.

    Args:
        settings: `--section.field value`, which win over the file.
        recipe: pretrain or finetune; None: the one whose settings the config has.
        skip: stages that ask about this machine and are left out: packages, output, hub, disk.
        most_too_long: share of a source's rows that may be longer than data.sequence_length.
        show: gets a line for each stage as it ends.

    Raises:
        ConfigError: there is no such file, stage, recipe or number of processes.
    """
    file = Path(file)
    if not file.is_file():
        raise ConfigError(f"config file {file} does not exist (current folder: {Path.cwd()})")
    if world_size < 1:
        raise ConfigError(f"--world_size must be at least 1, got {world_size}")
    if unknown := [name for name in skip if name not in SKIPPABLE]:
        raise ConfigError(f"--skip {unknown[0]} is none of {', '.join(SKIPPABLE)}")
    if recipe not in (None, *recipes.SETTINGS):
        raise ConfigError(f"--recipe {recipe} is none of {', '.join(recipes.SETTINGS)}")
    begun, result = time.monotonic(), Result()
    folder = Path(tempfile.mkdtemp(prefix="toolkit-rehearsal-"))
    logs = folder / "logs"
    logs.mkdir()
    recorder = Recorder(logs, tuple(skip), show)
    result.stages = recorder.stages
    cached = os.environ.get(_CACHE)
    # Read when `datasets` is imported, which is below: nothing is cached for good.
    os.environ[_CACHE] = str(folder / "cache")
    try:
        given = (file, settings, world_size, recipe, most_too_long)
        _Rehearsal(*given, folder, recorder, result).run()
    finally:
        os.environ.pop(_CACHE)
        if cached is not None:
            os.environ[_CACHE] = cached
        if result.ok and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            result.folder = str(folder)
        result.seconds = time.monotonic() - begun
    return result


@dataclass
class _Rehearsal:
    """What the stages hand on to each other."""

    file: Path
    flags: Sequence[str]
    world_size: int
    recipe: str | None
    most_too_long: float
    folder: Path
    recorder: Recorder
    result: Result
    cfg: Any = None
    model_cfg: Any = None
    model: Any = None
    """The real one, on meta."""
    heads: Any = None
    """First rows to train on, and to evaluate on."""
    life: Any = None

    def run(self) -> None:
        """Run the stages, to the first that fails; those before the first start all."""
        record = self.recorder.run
        record("settings", self.settings)
        from toolkit.rehearsal import life, preflight  # which take seconds to import

        self.checks = preflight
        record(
            "packages", lambda: preflight.check_packages(self.cfg, self.result.recipe), _MODEL[:1]
        )
        record("output", lambda: preflight.check_output(self.cfg), _MODEL[:2])
        record("hub", lambda: preflight.check_hub(self.cfg), _MODEL[:1])
        record("model", self.build, _MODEL)
        record("data", self.read, _MODEL)
        record("sharding", self.shard, _MODEL)
        record("disk", self.measure_disk, (*_MODEL, "output", "sharding"))
        record("load", self.load)
        if self.life is None:
            return
        with self.life:
            for name, stage in life.stages(self.life).items():
                if name != "load":
                    record(name, stage)

    def settings(self) -> str:
        from toolkit.rehearsal.preflight import which_recipe
        from toolkit.rehearsal.settings import notes_on

        name = self.recipe
        if name is None:
            name, self.cfg = which_recipe(self.file, self.flags)
        else:
            arguments = ["--config", str(self.file), *self.flags]
            self.cfg = config.parse(recipes.SETTINGS[name], arguments)
        self.result.recipe, self.result.notes = name, notes_on(self.cfg)
        return f"of the recipe {recipes.script_of(name)}"

    def build(self) -> str:
        self.model_cfg, self.model, said = self.checks.check_model(self.cfg)
        return said

    def read(self) -> str:
        found = self.checks.check_rows(
            self.cfg, self.model_cfg, self.model, self.ranks, self.most_too_long
        )
        self.heads = found[:2]
        return found[2]

    def shard(self) -> str:
        self.model, said = self.checks.check_sharding(self.cfg, self.model, self.ranks)
        return said

    def measure_disk(self) -> str:
        return self.checks.check_disk(self.cfg, self.model, self.ranks)

    @property
    def ranks(self) -> int:
        """Processes of the real run."""
        return self.checks.real_world(self.cfg.sharding, self.world_size)

    def load(self) -> str:
        from toolkit.rehearsal.life import Life

        small, own = self.prepare()
        said = (self.result.recipe, self.cfg, own, self.world_size)
        self.life = Life(*said, self.folder, self.recorder.logs)
        return f"{self.life.load()}; {small}"

    def prepare(self) -> tuple[Any, Any]:
        """Write the small model and the first rows; return it, and the config of the rehearsal."""
        from toolkit.config import ModelConfig
        from toolkit.models import build_on_meta
        from toolkit.rehearsal import rows, settings
        from toolkit.rehearsal.shrunk import shrink

        cfg, data = self.cfg, self.cfg.data
        on_cpu = settings.on_cpu(cfg)
        small = shrink(on_cpu.model, cfg.sharding.param_dtype, self.folder / "model")
        affordable = settings.affordable_length(on_cpu, small)
        length = rows.length_for(self.heads[0], affordable, data.sequence_length)
        train, evals = (
            [
                head.write(self.folder / "data" / f"{what}-{i}", data.text_column, length)
                for i, head in enumerate(heads)
            ]
            for what, heads in zip(("train", "eval"), self.heads, strict=True)
        )
        model = build_on_meta(
            ModelConfig(
                str(small.folder), init="random", trust_remote_code=cfg.model.trust_remote_code
            )
        )
        own, self.result.not_rehearsed = settings.rehearsal_config(
            cfg, small, model, self.world_size, length, (train, evals), self.folder / "run"
        )
        self.result.changed = config.differences(cfg, own)
        return small, own
