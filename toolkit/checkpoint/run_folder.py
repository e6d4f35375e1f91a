"""The output_dir of a run: claimed for it, held by one process, its settings recorded.

Where the checkpoints are elsewhere, a copy of `config.yaml` lies beside them: the next start may be
on another machine.
"""

import contextlib
import dataclasses
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import config, ranks
from toolkit.checkpoint import commit, lock
from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.local_folder import (
    LocalFolder,
    nearest_existing_folder,
    new_attempt_name,
    raise_disk_errors,
)
from toolkit.checkpoint.names import CHECKPOINTS, EXPORTS
from toolkit.checkpoint.reference_file import PARTS
from toolkit.checkpoint.store import Folder, is_url, parse_location, storage_of
from toolkit.config.kinds import defines_run
from toolkit.config.lora import ALL_LINEAR, STRUCTURE, comparable
from toolkit.config.published import get_mapping
from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError, LaunchError
from toolkit.formats.metrics_file import METRICS, SAMPLES, STARTS, keep_until
from toolkit.parsing import read_yaml

if TYPE_CHECKING:
    from toolkit.checkpoint.state import TrainState
    from toolkit.data.prepare import TrainingData
    from toolkit.training.launch import Run

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
_ACCUMULATION = "train.gradient_accumulation_steps"
_SILENT = (
    "output_dir",
    "metrics.",
    "hub.",
    "train.logging_steps",
    "train.hang_seconds",
    "train.connect_seconds",
)
_TOKEN = ".toolkit-token-"
_PATIENCE = 5.0


class RunFolder:
    """The folder that a run writes to; `root` holds its checkpoints, here or on a store.

    Every method is collective. Raises as `claim` and `check_shared` do.
    """

    def __init__(self, cfg: RunConfig, run: "Run") -> None:
        """Claim the folder, and keep every other run out to the end of this one: ConfigError names
        the one that is there.
        """
        self._cfg, self.before = cfg, ranks.on_all(lambda: claim_folders(cfg))
        self.path, self.root = Path(cfg.output_dir), checkpoint_root(cfg)
        # Before anything is written or tokenised that a second start would do as well.
        for folder, setting in ((self.path, "output_dir"), (self.root, "checkpoint.root")):
            ranks.log_once(ranks.on_main(partial(lock.acquire, folder, run.job, setting)))
            run.at_end.callback(lock.release, folder)
        if storage_of(self.root).is_disk:  # else the hosts may have nothing in common but the store
            for shared in dict.fromkeys((self.path, self.root)):
                check_shared_folder(shared)
        self.tokenizer = self.path / TOKENIZER  # one that the run trains
        self.samples = self.path / SAMPLES  # answers to `train.eval_prompts`
        self.holds_work = self.before is not None  # metrics or checkpoints of an earlier start

    def use(self, cfg: RunConfig) -> None:
        """Record these settings, in which `auto` is decided, instead of those asked for."""
        self._cfg = cfg

    def save_config(self, state: "TrainState", data: "TrainingData", *, done: bool = False) -> None:
        """Write the settings that hold from here on, and say which of them an earlier start did not
        have. Where the run is `done`, or has no step left, the settings of what was done stay.
        """
        if state.step:
            ranks.log_once(f"resuming   {self.path} after step {state.step}")
        if done or state.step >= data.max_steps:
            return
        train, batch, used = self._cfg.train, data.position.global_batch, data.accumulation
        asked_batch, asked = train.global_batch_size, train.gradient_accumulation_steps
        if asked_batch not in (None, batch):
            ranks.log_once(
                f"note: train.global_batch_size {asked_batch} has no effect, it is {batch}"
            )
        holds: dict[str, Any] = {
            "global_batch_size": asked_batch and batch,
            "gradient_accumulation_steps": used,
        }
        cfg: Any = dataclasses.replace(self._cfg, train=dataclasses.replace(train, **holds))
        changes = config.find_differences(self.before, cfg) if state.step and self.before else {}
        for name, (old, new) in changes.items():
            if not name.startswith((*_SILENT, _ACCUMULATION)):
                ranks.log_once(
                    f"changed    {name}: {old!r} -> {new!r}, from step {state.step + 1} on"
                )
        if asked != used and asked_batch is None:
            ranks.log_once(
                f"note: {_ACCUMULATION} {asked} has no effect, it is {used}: the global batch of a "
                f"run stays, here {batch} samples"
            )
        ranks.on_main(lambda: save_config(cfg))
        ranks.on_main(lambda: keep_until(self.samples, state.step))
        ranks.log_once(*ranks.on_main(lambda: self._set_exports_aside(state.step)))

    def _set_exports_aside(self, after: int) -> list[str]:
        """Rename the exports of later steps: this start trains those anew."""
        folders = sorted((self.path / EXPORTS).glob("step-" + "[0-9]" * 8))
        with raise_disk_errors(f"exports of {self.path} cannot be renamed"):
            return [rename_old_export(f) for f in folders if f.name > commit.step_name(after)]

    def next_lines(self, step: int, *, adapted: bool = False) -> list[str]:
        """Return what a run prints at its end: where things are, and the command that exports."""
        export = f"toolkit consolidate {self.path} --output {default_export_path(self.path)}"
        lora = getattr(self._cfg, "lora", None)
        base = self._cfg.model.name_or_path
        adapter = [f"adapter    continues {lora.from_}, base {base}"] if lora and lora.from_ else []
        return [
            f"run        {self.path}",
            *adapter,
            f"checkpoint {self.root / CHECKPOINTS}  (newest: step {step})",
            f"next       {export}" + ("   (--merge: with the base)" if adapted else ""),
        ]


def rename_old_export(export: Path) -> str:
    """Rename an export of other weights to `step-N.old-*`; return the line that says so."""
    old = new_attempt_name(export, "old")
    os.rename(export, old)
    return f"NOTE: {export} was there already; it is now {old}"


def checkpoint_root(cfg: Any) -> Any:
    """Return what holds the run's checkpoints, as `checkpoint.save` and `newest` take it."""
    return parse_location(cfg.output_dir if cfg.checkpoint.root is None else cfg.checkpoint.root)


def default_export_path(folder: Path) -> Path:
    """Return where the export of a run goes unless told otherwise: beside it, `RUN-hf`."""
    return Path(f"{folder if folder.name not in ('', '..') else folder.resolve()}-hf")


def read_raw_config(run: Path) -> dict[str, Any]:
    """Return the settings of a run of any recipe and version; {} where none can be read."""
    try:
        found = read_yaml(run / CONFIG, ConfigError)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}


def find_checkpoint_root(run: Path) -> Folder:
    """Return what holds the checkpoints of a run, by its `checkpoint.root`; any other folder as it
    is.
    """
    recorded = read_raw_config(run)
    root = get_mapping(recorded, "checkpoint").get("root")
    is_root = (run / CHECKPOINTS).is_dir() and not (run / METRICS).is_file()
    if not isinstance(root, str) or not root or is_root:
        return run
    place = parse_location(root)
    return (
        place
        if is_url(root)
        else resolve_recorded_path(run, recorded.get("output_dir"), str(place))
    )


def resolve_recorded_path(place: Path, written: Any, other: str) -> Path:
    """Return a path of a config, of which `written` is at `place`. Paths of a config are relative
    to the folder that its run was started in, not to this one.
    """
    parts = Path(written).parts if isinstance(written, str) else ()
    whole = place.absolute().parts
    if parts and whole[-len(parts) :] == parts:
        found = Path(*whole[: -len(parts)], other)
        if found.exists():
            return found
    return Path(other)


@contextlib.contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """Give the folder of a run or a checkpoint that may be elsewhere: a URL, or a run whose
    `checkpoint.root` is elsewhere.

    What is on a disk is given as it is. From a store the checkpoint, or the newest committed one of
    a run, is copied into a temporary folder (TMPDIR), with the run's config and metrics, and
    deleted afterwards; a line on stderr says so. CheckpointError: nothing committed is there, the
    store cannot be read, or the copy does not fit.
    """
    # Of a config that is no run's, whoever reads the folder says what is wrong with it.
    place: Any = parse_location(path)
    if not is_url(path):
        place = find_checkpoint_root(place)
    if storage_of(place).is_disk:
        yield place
        return
    checkpoint = commit.find_checkpoint(place)
    with tempfile.TemporaryDirectory(prefix="toolkit-") as scratch:
        run = Path(scratch, "run")
        folder = run / CHECKPOINTS / checkpoint.name.partition(".")[0]
        checkpoint.download(folder)
        if not is_url(path):
            for name in (CONFIG, METRICS, STARTS):
                if Path(path, name).is_file():
                    shutil.copyfile(Path(path, name), run / name)
        elif checkpoint != place:
            with contextlib.suppress(FileNotFoundError):  # no run of a recipe: it has none
                (run / CONFIG).write_bytes((place / CONFIG).read_bytes())
        yield folder


def claim_folders(cfg: Any) -> Any:
    """Refuse a run directory or a `checkpoint.root` that is not free and does not hold this very
    run; return the settings that an earlier start recorded, None where it left no work.

    ConfigError: the directory holds another run, or files that are not a run's. CheckpointError:
    `checkpoint.root` is on a store that cannot be read or written.
    """
    folder, root = Path(cfg.output_dir), checkpoint_root(cfg)
    LocalFolder(folder).check_usable("output_dir")
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    # A start that was killed may have left these: whole pieces of a run, and unfinished ones.
    ours = (TOKENIZER, f"{TOKENIZER}.tmp", CHECKPOINTS, f"{CONFIG}.tmp", lock.LOCK, PARTS)
    pieces = (f"{TOKENIZER}.tmp-", _TOKEN)
    strangers = {name for name in present if not (name in ours or name.startswith(pieces))}
    if strangers and CONFIG not in present:
        raise ConfigError(
            f"output_dir {folder} holds files that are not a run's "
            f"({', '.join(sorted(strangers)[:3])}); give an empty or new folder"
        )
    before = None
    if CONFIG in present and _has_progress(folder):
        before = _read(folder / CONFIG, type(cfg))
        _check_same_run(before, apply_recorded_adapter(cfg, before), "output_dir", folder)
        moved, old = before.checkpoint.root != cfg.checkpoint.root, checkpoint_root(before)
        if moved and committed_steps(old) and not committed_steps(root):
            raise ConfigError(
                f"checkpoint.root was {before.checkpoint.root}, is {cfg.checkpoint.root}, and the "
                f"checkpoints of this run are in {old}: it would begin anew. Copy {CHECKPOINTS} "
                f"and {CONFIG} from there to {root}, or leave checkpoint.root as it was"
            )
    elif CONFIG in present and not _is_ours(folder / CONFIG, type(cfg)):
        raise ConfigError(
            f"output_dir {folder} holds a {CONFIG} that no run has written, and this run would "
            "overwrite it; give an empty or new folder"
        )
    if cfg.checkpoint.root is not None:
        storage_of(root).check_usable("checkpoint.root")
        if committed_steps(root):
            other = _read(root / CONFIG, type(cfg))
            _check_same_run(other, apply_recorded_adapter(cfg, other), "checkpoint.root", root)
    return before


def read_recorded_config(cfg: Any) -> Any:
    """Return the settings that an earlier start of this run recorded, in output_dir or next to its
    checkpoints; None if no start left any work. Raises as `claim` does for a damaged file.
    """
    folder, root = Path(cfg.output_dir), checkpoint_root(cfg)
    if (folder / CONFIG).is_file() and _has_progress(folder):
        return _read(folder / CONFIG, type(cfg))
    if cfg.checkpoint.root is not None and committed_steps(root):
        return _read(root / CONFIG, type(cfg))
    return None


def _has_progress(folder: Path) -> bool:
    """Return whether a start left metrics or a checkpoint in its output_dir."""
    return (folder / METRICS).is_file() or bool(committed_steps(folder))


def apply_recorded_adapter(cfg: Any, recorded: Any) -> Any:
    """Return `cfg` with the settings of the adapter that an earlier start of the run continued.

    The start recorded them, so that a resume does not need the adapter (`lora.from`) any more.
    """
    lora = getattr(cfg, "lora", None)
    if lora is None or lora.from_ is None or recorded.lora.from_ != lora.from_:
        return cfg
    structure = {name: getattr(recorded.lora, name) for name in STRUCTURE}
    contradictions = {
        name: value
        for name, value in lora.requested().items()
        if comparable(value) not in (comparable(structure[name]), ALL_LINEAR)
    }
    return dataclasses.replace(cfg, lora=lora.with_structure(structure | contradictions))


def check_shared_folder(folder: Path) -> None:
    """Refuse hosts that do not see what rank 0 writes where `folder` is, or will be made:
    LaunchError names them. Collective; one small file, a broadcast and a gather.
    """
    if ranks.world_size() == 1:
        return

    def write() -> Path:
        token = nearest_existing_folder(folder) / f"{_TOKEN}{os.urandom(8).hex()}"
        with raise_disk_errors(f"{folder} cannot be written to"):
            token.touch()
        return token

    token = ranks.on_main(write)
    seen = ranks.gather((platform.node(), _appears(token)))
    ranks.on_main(lambda: token.unlink(missing_ok=True))
    blind: dict[str, list[str]] = {}
    for rank, (host, sees) in enumerate(seen):
        if not sees:
            blind.setdefault(host, []).append(str(rank))
    if blind:
        named = ", ".join(f"{host} (rank {', '.join(found)})" for host, found in blind.items())
        raise LaunchError(
            f"{folder} is not on a file system that all hosts share: what rank 0 on {seen[0][0]} "
            f"writes there is not seen on {named}. Mount one on all of them and give an output_dir "
            "there, or put the checkpoints on an object store (checkpoint.root)"
        )


def _appears(file: Path) -> bool:
    """Return whether the file is there, or comes within some seconds: a network may be behind."""
    end = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def save_config(cfg: Any) -> None:
    """Write the resolved config to the run directory, and beside checkpoints that are elsewhere."""
    folder, text, root = Path(cfg.output_dir), config.dump(cfg), checkpoint_root(cfg)
    with raise_disk_errors(f"{CONFIG} of the run could not be written"):
        storage_of(folder / CONFIG).replace(text)
        if root.resolve() != folder.resolve():
            storage_of(root / CONFIG).replace(text)


def _read(file: Folder, cls: type[RunConfig]) -> Any:
    """Return the config that `save_config` wrote for the same recipe."""
    try:
        with storage_of(file).local() as local:
            content = read_raw_config(local.parent)
            name = config.saved_kind_name(content)
            if not content or name == cls.kind_name():
                return config.load(cls, local)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"the config of the run in {file.parent} is damaged: {error}") from error
    kind = config.find_shipped_kind(name)
    raise ConfigError(
        f"{file.parent} holds a run of {kind.title if kind else name}; this is "
        f"{config.kind_of(cls).title}. Give another output_dir"
    )


def _check_same_run(before: Any, cfg: Any, setting: str, folder: Folder) -> None:
    differences = config.find_differences(before, cfg)
    if "lora.from" in differences:  # rank, targets and the like follow from it
        differences = {n: v for n, v in differences.items() if n.partition(".")[2] not in STRUCTURE}
    changed = [
        f"{name} was {old!r}, is {new!r}"
        for name, (old, new) in differences.items()
        if defines_run(name)
    ]
    if changed:
        raise ConfigError(
            f"{setting} {folder} holds another run: {'; '.join(changed[:4])}. Give another "
            f"{setting}, or the settings of that run ({folder / CONFIG})"
        )


def _is_ours(file: Path, cls: type) -> bool:
    """Return whether `save_config` wrote the file: it equals the dump of what it holds."""
    try:
        return file.read_text("utf-8") == config.dump(config.load(cls, file))
    except (ConfigError, OSError, UnicodeDecodeError):
        return False
