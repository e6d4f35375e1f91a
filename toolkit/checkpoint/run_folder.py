"""Manage the output_dir of a run: check that it is free, lock it, and record the settings.

If the checkpoints are elsewhere (`checkpoint.root`), a copy of `config.yaml` lies next to them,
because the next start may be on another machine.
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
from toolkit.config.kinds import is_fixed_on_resume
from toolkit.config.lora import ALL_LINEAR, STRUCTURE, normalise_value
from toolkit.config.published import get_mapping
from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError, LaunchError
from toolkit.formats.metrics_file import METRICS, SAMPLES, STARTS, drop_lines_after
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
    """The output_dir of a run, locked until the run ends. Every rank creates and uses it."""

    def __init__(self, cfg: RunConfig, run: "Run") -> None:
        """Check that the folders are free or hold this run, and lock them.

        Raises:
            ConfigError: another run uses a folder; see `validate_run_folders`.
            LaunchError: hosts do not share the folder; see `check_shared_folder`.
        """
        self._cfg = cfg
        self.before = ranks.on_all(lambda: validate_run_folders(cfg))
        self.path = Path(cfg.output_dir)
        self.root = checkpoint_root(cfg)
        # Lock before anything is written or tokenized, which a second start would do as well.
        for folder, setting in ((self.path, "output_dir"), (self.root, "checkpoint.root")):
            ranks.log_once(ranks.on_main(partial(lock.acquire, folder, run.job, setting)))
            run.at_end.callback(lock.release, folder)
        # Hosts that save to a store need not share a disk.
        if storage_of(self.root).is_disk:
            for shared in dict.fromkeys((self.path, self.root)):
                check_shared_folder(shared)
        self.tokenizer = self.path / TOKENIZER  # if the run trains a tokenizer
        self.samples = self.path / SAMPLES  # answers to `train.eval_prompts`
        self.holds_work = self.before is not None  # metrics or checkpoints of an earlier start

    def set_config(self, cfg: RunConfig) -> None:
        """Replace the config that `save_config` will write, after `auto` settings were resolved."""
        self._cfg = cfg

    def save_config(
        self, state: "TrainState", data: "TrainingData", *, has_ended: bool = False
    ) -> None:
        """Write config.yaml, log changed settings, and discard outdated results. Collective.

        This start trains the steps after `state.step` again, so samples of these steps are deleted
        and exports of these steps are renamed to `step-N.old-*`. If the run has no step left,
        nothing is written.

        Args:
            state: the state that training starts from.
            data: holds the global batch and the accumulation in use, which are written to the
                config.
            has_ended: True if an earlier start ended the run early, so that no step is left.
        """
        if state.step:
            ranks.log_once(f"resuming   {self.path} after step {state.step}")
        if has_ended or state.step >= data.max_steps:
            return
        train = self._cfg.train
        global_batch = data.position.global_batch
        accumulation = data.accumulation
        if train.global_batch_size not in (None, global_batch):
            ranks.log_once(
                f"note: train.global_batch_size {train.global_batch_size} has no effect, it "
                f"is {global_batch}"
            )
        in_use: dict[str, Any] = {
            "global_batch_size": train.global_batch_size and global_batch,
            "gradient_accumulation_steps": accumulation,
        }
        cfg: Any = dataclasses.replace(self._cfg, train=dataclasses.replace(train, **in_use))
        changes = config.find_differences(self.before, cfg) if state.step and self.before else {}
        for name, (old, new) in changes.items():
            if not name.startswith((*_SILENT, _ACCUMULATION)):
                ranks.log_once(
                    f"changed    {name}: {old!r} -> {new!r}, from step {state.step + 1} on"
                )
        setting = train.gradient_accumulation_steps
        if setting != accumulation and train.global_batch_size is None:
            ranks.log_once(
                f"note: {_ACCUMULATION} {setting} has no effect, it is {accumulation}: the global "
                f"batch of a run stays, here {global_batch} samples"
            )
        ranks.on_main(lambda: save_config(cfg))
        ranks.on_main(lambda: drop_lines_after(self.samples, state.step))
        ranks.log_once(*ranks.on_main(lambda: self._rename_later_exports(state.step)))

    def _rename_later_exports(self, after: int) -> list[str]:
        """Rename the exports of steps after `after` to `step-N.old-*`; return their log lines."""
        folders = sorted((self.path / EXPORTS).glob("step-" + "[0-9]" * 8))
        with raise_disk_errors(f"exports of {self.path} cannot be renamed"):
            return [rename_old_export(f) for f in folders if f.name > commit.step_name(after)]

    def next_lines(self, step: int, *, adapted: bool = False) -> list[str]:
        """Format the last log lines of a run: its folders and the command that exports it.

        Args:
            step: step of the newest checkpoint.
            adapted: True if the model has adapters; the command then mentions `--merge`.
        """
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
    """Rename an outdated export from `step-N` to `step-N.old-*`; return the log line."""
    old = new_attempt_name(export, "old")
    os.rename(export, old)
    return f"NOTE: {export} was there already; it is now {old}"


def checkpoint_root(cfg: Any) -> Any:
    """Return the folder or URL that holds the checkpoints: `checkpoint.root` or output_dir."""
    return parse_location(cfg.output_dir if cfg.checkpoint.root is None else cfg.checkpoint.root)


def default_export_path(folder: Path) -> Path:
    """Return the default path for an export of a run: the path of the run with `-hf` appended."""
    return Path(f"{folder if folder.name not in ('', '..') else folder.resolve()}-hf")


def read_raw_config(run: Path) -> dict[str, Any]:
    """Read a run's config.yaml as a dict, without validation; return {} if it cannot be read.

    This works for configs of every recipe and version.
    """
    try:
        config = read_yaml(run / CONFIG, ConfigError)
    except ConfigError:
        return {}
    return config if isinstance(config, dict) else {}


def find_checkpoint_root(run: Path) -> Folder:
    """Find the folder or URL that holds a run's checkpoints, as its config.yaml recorded it.

    Returns `run` itself if it holds the checkpoints, has no readable config, or is a
    `checkpoint.root` (checkpoints without metrics).
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
    """Resolve the path `other` in a recorded config to a path that exists today.

    Recorded paths are relative to the folder in which the run was started. That folder is not
    recorded, but follows from another path of the config whose location is known. For example, if
    the config has `out/run`, which is `/data/out/run` today, `other` is looked for in `/data`.

    Args:
        place: the current location of the path `written`.
        written: that path as the config has it.
        other: the path to resolve.

    Returns:
        The resolved path; `other` itself, relative to the current folder, if nothing exists there.
    """
    parts = Path(written).parts if isinstance(written, str) else ()
    whole = place.absolute().parts
    if parts and whole[-len(parts) :] == parts:
        path = Path(*whole[: -len(parts)], other)
        if path.exists():
            return path
    return Path(other)


@contextlib.contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """Yield a local folder with a run or checkpoint; use it as a context manager.

    A folder on a disk is yielded as it is. From a store, the checkpoint (for a run: the newest
    committed one) is copied to a temporary folder below TMPDIR, with the config and metrics of the
    run. That is printed to stderr. The copy is deleted when the context ends.

    Args:
        path: a folder or URL of a run or checkpoint. The checkpoints of a run may be elsewhere
            (`checkpoint.root`).

    Raises:
        CheckpointError: no checkpoint is committed, the store cannot be read, or the disk has no
            room for the copy. A missing folder on a disk is no error here.
    """
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
            # A run that was not made by a recipe has no config.
            with contextlib.suppress(FileNotFoundError):
                (run / CONFIG).write_bytes((place / CONFIG).read_bytes())
        yield folder


def validate_run_folders(cfg: Any) -> Any:
    """Check that output_dir and `checkpoint.root` can hold this run, and return its earlier config.

    Each folder must be empty or new, or belong to this run. Writes no file, except that a
    `checkpoint.root` on a store is tested with a small object, which is deleted again.

    Returns:
        The config that an earlier start recorded in output_dir; None if no start left metrics or
        checkpoints there.

    Raises:
        ConfigError: a folder cannot be written to, holds another run, or holds files that do not
            belong to a run; or the checkpoints of this run are in another `checkpoint.root`.
        CheckpointError: `checkpoint.root` is on a store that cannot be read or written.
    """
    folder, root = Path(cfg.output_dir), checkpoint_root(cfg)
    LocalFolder(folder).check_usable("output_dir")
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    # A start that was killed may have left these.
    run_files = (TOKENIZER, f"{TOKENIZER}.tmp", CHECKPOINTS, f"{CONFIG}.tmp", lock.LOCK, PARTS)
    pieces = (f"{TOKENIZER}.tmp-", _TOKEN)
    foreign = {name for name in present if not (name in run_files or name.startswith(pieces))}
    if foreign and CONFIG not in present:
        raise ConfigError(
            f"output_dir {folder} holds files that are not a run's "
            f"({', '.join(sorted(foreign)[:3])}); give an empty or new folder"
        )
    before = None
    if CONFIG in present and _has_progress(folder):
        before = _load_config(folder / CONFIG, type(cfg))
        _check_same_run(before, apply_recorded_adapter(cfg, before), "output_dir", folder)
        is_moved = before.checkpoint.root != cfg.checkpoint.root
        old = checkpoint_root(before)
        if is_moved and committed_steps(old) and not committed_steps(root):
            raise ConfigError(
                f"checkpoint.root was {before.checkpoint.root}, is {cfg.checkpoint.root}, and the "
                f"checkpoints of this run are in {old}: it would start from scratch. Copy "
                f"{CHECKPOINTS} and {CONFIG} from there to {root}, or leave checkpoint.root as it "
                "was"
            )
    elif CONFIG in present and not _is_saved_config(folder / CONFIG, type(cfg)):
        raise ConfigError(
            f"output_dir {folder} holds a {CONFIG} that no run has written, and this run would "
            "overwrite it; give an empty or new folder"
        )
    if cfg.checkpoint.root is not None:
        storage_of(root).check_usable("checkpoint.root")
        if committed_steps(root):
            other = _load_config(root / CONFIG, type(cfg))
            _check_same_run(other, apply_recorded_adapter(cfg, other), "checkpoint.root", root)
    return before


def read_recorded_config(cfg: Any) -> Any:
    """Read the config that an earlier start of this run recorded.

    It is in output_dir if that has metrics or checkpoints, or else next to the checkpoints in
    `checkpoint.root`.

    Returns:
        A config of the class of `cfg`; None if no start left metrics or checkpoints.

    Raises:
        ConfigError: the file is damaged, or holds a run of another kind (recipe).
    """
    folder, root = Path(cfg.output_dir), checkpoint_root(cfg)
    if (folder / CONFIG).is_file() and _has_progress(folder):
        return _load_config(folder / CONFIG, type(cfg))
    if cfg.checkpoint.root is not None and committed_steps(root):
        return _load_config(root / CONFIG, type(cfg))
    return None


def _has_progress(folder: Path) -> bool:
    """Return True if the folder holds metrics or a committed checkpoint of an earlier start."""
    return (folder / METRICS).is_file() or bool(committed_steps(folder))


def apply_recorded_adapter(cfg: Any, recorded: Any) -> Any:
    """Return `cfg` with the adapter settings (rank, targets, ...) that an earlier start recorded.

    That start took them from the adapter in `lora.from`, so a resume does not need the adapter. If
    the user has set one of them to another value, that value is kept, so that a later check reports
    the difference. `cfg` is returned unchanged without `lora.from`, or if it differs from the
    recorded one.
    """
    lora = getattr(cfg, "lora", None)
    if lora is None or lora.from_ is None or recorded.lora.from_ != lora.from_:
        return cfg
    structure = {name: getattr(recorded.lora, name) for name in STRUCTURE}
    contradictions = {
        name: value
        for name, value in lora.requested_structure().items()
        if normalise_value(value) not in (normalise_value(structure[name]), ALL_LINEAR)
    }
    return dataclasses.replace(cfg, lora=lora.with_structure(structure | contradictions))


def check_shared_folder(folder: Path) -> None:
    """Raise a LaunchError unless every rank sees a file that rank 0 writes to `folder`. Collective.

    Rank 0 writes a small file to the folder or its nearest existing parent, and deletes it. This
    takes up to 5 s, a broadcast and a gather. With one rank, nothing is done.

    Raises:
        LaunchError: some hosts do not see the file (the error names them).
        CheckpointError: rank 0 cannot write to the folder.
    """
    if ranks.world_size() == 1:
        return

    def write() -> Path:
        """Create an empty file with a random name; return its path."""
        token = nearest_existing_folder(folder) / f"{_TOKEN}{os.urandom(8).hex()}"
        with raise_disk_errors(f"{folder} cannot be written to"):
            token.touch()
        return token

    token = ranks.on_main(write)
    visibility = ranks.gather((platform.node(), _wait_for_file(token)))
    ranks.on_main(lambda: token.unlink(missing_ok=True))
    ranks_without: dict[str, list[str]] = {}
    for rank, (host, is_visible) in enumerate(visibility):
        if not is_visible:
            ranks_without.setdefault(host, []).append(str(rank))
    if ranks_without:
        hosts = ", ".join(
            f"{host} (rank {', '.join(numbers)})" for host, numbers in ranks_without.items()
        )
        main_host = visibility[0][0]
        raise LaunchError(
            f"{folder} is not on a file system that all hosts share: what rank 0 on {main_host} "
            f"writes there is not seen on {hosts}. Mount one on all of them and give an output_dir "
            "there, or put the checkpoints on an object store (checkpoint.root)"
        )


def _wait_for_file(file: Path) -> bool:
    """Wait up to 5 s until a file exists; return False if it does not.

    Network disks may show a new file late.
    """
    end = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def save_config(cfg: Any) -> None:
    """Write the resolved config to output_dir, and also to `checkpoint.root` if that differs."""
    folder = Path(cfg.output_dir)
    root = checkpoint_root(cfg)
    text = config.dump(cfg)
    with raise_disk_errors(f"{CONFIG} of the run could not be written"):
        storage_of(folder / CONFIG).replace(text)
        if root.resolve() != folder.resolve():
            storage_of(root / CONFIG).replace(text)


def _load_config(file: Folder, cls: type[RunConfig]) -> Any:
    """Load a config that `save_config` wrote, as an instance of `cls`.

    Raises:
        ConfigError: the file is missing or damaged, or is the config of another kind of run.
    """
    try:
        with storage_of(file).local_file() as local:
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
    """Raise a ConfigError if a recorded config and this start's config define different runs.

    This is the case if a setting differs that a resume may not change.

    Args:
        before: the config recorded in `folder`.
        cfg: the config of this start.
        setting: the setting that names the folder, for the error.
        folder: the folder, for the error.
    """
    differences = config.find_differences(before, cfg)
    # Rank, targets and similar settings follow from the adapter.
    if "lora.from" in differences:
        differences = {n: v for n, v in differences.items() if n.partition(".")[2] not in STRUCTURE}
    changed = [
        f"{name} was {old!r}, is {new!r}"
        for name, (old, new) in differences.items()
        if is_fixed_on_resume(name)
    ]
    if changed:
        raise ConfigError(
            f"{setting} {folder} holds another run: {'; '.join(changed[:4])}. Give another "
            f"{setting}, or the settings of that run ({folder / CONFIG})"
        )


def _is_saved_config(file: Path, cls: type) -> bool:
    """Return True if `save_config` wrote the file.

    Such a file does not change if it is loaded and dumped again.
    """
    try:
        return file.read_text("utf-8") == config.dump(config.load(cls, file))
    except (ConfigError, OSError, UnicodeDecodeError):
        return False
