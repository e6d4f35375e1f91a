"""Run the stages of a rehearsal in order, from the config to the dry run of a push."""

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
    """Rehearse the run of a config on this machine's CPU, with a scaled-down model.

    Takes about a minute and a half on two cores: four starts of Python with its libraries, and a
    dozen steps. Works in a temporary folder, which is kept if a stage failed. Writes one file to
    the run's own output_dir and removes it. Uses the recipe in the current folder if there is one,
    otherwise the toolkit's.

    Args:
        file: the config of the run.
        world_size: the number of processes of the rehearsal.
        settings: command-line flags `--section.field value`, which override the file.
        recipe: name of a recipe; None: find it from the config (`recipes.load_config`).
        skip: stages to skip because they check this machine: packages, output, hub, disk.
        most_too_long: the largest share (0 to 1) of a source's rows that may exceed
            data.sequence_length.
        keep: keep the temporary folder even if all stages passed.
        show: called with a line for each stage when it ends.

    Returns:
        The outcome of each stage. A failed stage raises no error.

    Raises:
        ConfigError: there is no such file, stage or recipe, or `world_size` is less than 1.
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
    start_time = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="toolkit-rehearsal-"))
    logs = folder / "logs"
    logs.mkdir()
    recorder = Recorder(logs, tuple(skip), show)
    result = recorder.result
    previous_cache = os.environ.get(_CACHE)
    # `datasets` reads the variable when it is imported, which is below. So nothing stays cached.
    os.environ[_CACHE] = str(folder / "cache")
    try:
        from toolkit.rehearsal.preflight import Rehearsal

        Rehearsal(file, settings, world_size, recipe, most_too_long, folder, recorder).run()
    finally:
        os.environ.pop(_CACHE)
        if previous_cache is not None:
            os.environ[_CACHE] = previous_cache
        if result.ok and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            result.folder = str(folder)
        result.seconds = time.monotonic() - start_time
    return result
