"""The stages of a rehearsal in order, from the config to the dry run of a push."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit import recipes
from toolkit.errors import ConfigError
from toolkit.rehearsal.stages import SKIPPABLE, Recorder, Result

_CACHE = "HF_DATASETS_CACHE"


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
        recipe: name of a kind of run; None: as the config shows (`recipes.load_config`).
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
    if recipe is not None:
        recipes.find_kind(recipe)
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="toolkit-rehearsal-"))
    logs = folder / "logs"
    logs.mkdir()
    recorder = Recorder(logs, tuple(skip), show)
    result = recorder.result
    cached = os.environ.get(_CACHE)
    # Read when `datasets` is imported, which is below: nothing is cached for good.
    os.environ[_CACHE] = str(folder / "cache")
    try:
        from toolkit.rehearsal.preflight import Rehearsal

        given = (file, settings, world_size, recipe, most_too_long)
        Rehearsal(*given, folder, recorder).run()
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
