"""A disk that refuses while a run trains: warnings, so many in a row, then the end."""

import ctypes
import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT
from distributed import run_ranks, run_recipe_ranks
from test_run_kills import flags

from toolkit import checkpoint
from toolkit.checkpoint import commit, saving, shards
from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.config import CheckpointConfig
from toolkit.errors import CheckpointError, StorageError
from toolkit.formats.metrics_file import append_lines, read_lines

STEPS = 8
# At its third step rank 0 fills the disk, and makes room again at a later one.
FILL = """
import os, runpy, toolkit.checkpoint, toolkit.training
step, calls, filler = toolkit.training.Update.step, [0], {disk!r} + "/filler"
def fill(*args, **more):
    calls[0] += 1
    if calls[0] in (3, {free_at}):
        toolkit.checkpoint.wait()
    if os.environ["RANK"] == "0" and calls[0] == 3:
        with open(filler, "wb", buffering=0) as f:
            try:
                while True:
                    f.write(bytes(4096))
            except OSError:
                pass
    if os.environ["RANK"] == "0" and calls[0] == {free_at}:
        os.remove(filler)
    return step(*args, **more)
toolkit.training.Update.step = fill
runpy.run_path({recipe!r}, run_name="__main__")
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    libc, folder = ctypes.CDLL(None, use_errno=True), tmp_path / "disk"
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=16m"):
        pytest.skip("no right to mount a file system")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


@pytest.mark.faults
@pytest.mark.parametrize(("free_at", "behind"), [(5, "false"), (5, "true"), (99, "true")])
def test_a_run_on_a_disk_that_fills_up(
    tmp_path, small_disk, tiny_llama, text_file, free_at, behind
):
    script, run = tmp_path / "pretrain.py", small_disk / "run"
    recipe = str(ROOT / "recipes" / "pretrain.py")
    script.write_text(FILL.format(disk=str(small_disk), free_at=free_at, recipe=recipe))
    settings = flags("pretrain", tiny_llama, text_file, run, "--train.max_steps", f"{STEPS}")
    settings += ["--checkpoint.save_steps", "1", "--checkpoint.async_save", behind]
    settings += ["--checkpoint.export_steps", "4"]
    ended = run_recipe_ranks(script, 2, *settings, cwd=tmp_path)
    warnings = [t for t in ended.stdout.splitlines() if t.startswith("WARNING: checkpoint of")]
    assert len(warnings) == 2, ended.stdout + ended.stderr
    for left, text in zip((1, 0), warnings, strict=True):
        assert "No space left on device" in text
        assert "are missing" in text
        assert f"Training continues; {left} more in a row may fail" in text
    lines = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    steps = commit.committed_steps(run)
    assert not any(commit.find_damaged_files(path) for path in steps.values())
    if free_at == 5:  # steps 3 and 4 could not be saved
        assert ended.returncode == 0, ended.stderr
        assert sorted(steps) == [1, 2, 5, 6, 7, 8]
        assert lines == list(range(1, STEPS + 1))
        assert "WARNING: there is no export: writing" in ended.stdout
        assert [p.name for p in (run / "exports").iterdir()] == ["step-00000008"]
        return
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    (error,) = [text for text in ended.stderr.splitlines() if "error: " in text]
    assert "3 saves in a row have failed (checkpoint.max_failed_saves 2)" in error
    assert sorted(steps) == [1, 2]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {p.name for p in steps.values()}
    # With room the same command goes on.
    (small_disk / "filler").unlink()
    again = run_recipe_ranks("pretrain", 2, *settings, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert sorted(commit.committed_steps(run)) == [*range(1, STEPS + 1)]
    assert [x["step"] for x in read_lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))


WRITE = shards.HashingStream.write


def save_with_failures(rank: int, world: int, root: str, behind: bool) -> list[tuple[str, str]]:
    """Save steps 1 to 10, of which rank 1's disk refuses some; return how each ended."""
    cfg = CheckpointConfig(async_save=behind, max_failed_saves=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    refused = {2: errno.ENOSPC, 3: errno.EROFS, 5: errno.EIO, 7: errno.EDQUOT, 8: errno.EIO}
    refused |= {9: errno.EIO, 10: errno.EACCES}
    ended = []
    state = checkpoint.TrainState(model)
    for step in range(1, 11):

        def write(self, content, step=step) -> int:
            if rank == 1 and step in refused:
                raise OSError(refused[step], "refused", "shard")
            return WRITE(self, content)

        state.step = step
        with mock.patch.object(shards.HashingStream, "write", write):
            try:
                path = checkpoint.save(state, root, cfg, may_fail=True)
                checkpoint.wait()
                lost = path in state.saves.failed
                ended.append(("failed" if lost else "saved", Path(path).name))
            except CheckpointError as error:
                ended.append((type(error).__name__, str(error)))
    return ended


@pytest.mark.parametrize("behind", [pytest.param(False, marks=pytest.mark.faults), True])
def test_saves_that_the_disk_refuses_are_warnings_so_many_times_in_a_row(tmp_path, behind):
    for one in run_ranks(save_with_failures, 2, str(tmp_path), behind):
        kinds = [kind for kind, _ in one]
        assert kinds[:8] == [
            *("saved", "failed", "failed", "saved", "failed", "saved", "failed", "failed")
        ]
        assert kinds[8] == "StorageError"  # the third in a row
        assert "3 saves in a row have failed (checkpoint.max_failed_saves 2)" in one[8][1]
        assert kinds[9] == "CheckpointError"  # no right to write is no fault of the disk
    there = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert there == {"step-00000004", "step-00000006"}  # the newest two, and nothing else
    assert set(commit.committed_steps(tmp_path)) == {4, 6}


def test_a_warning_says_what_is_missing(tmp_path, capsys):
    cfg = CheckpointConfig(max_failed_saves=1)
    state = checkpoint.TrainState(torch.nn.Linear(500, 500), step=1)
    checkpoint.save(state, tmp_path, cfg)
    with (
        mock.patch.object(saving, "write_rng", side_effect=OSError(28, "No space", "rng")),
        mock.patch.object(LocalFolder, "free_bytes", return_value=400_000),
    ):
        state.step = 2
        assert checkpoint.save(state, tmp_path, cfg, may_fail=True) == ""
        said = capsys.readouterr().out
        assert said.startswith("WARNING: checkpoint of step 2 could not be written: No space (rng)")
        assert "It takes 1.0 MB, 400.0 kB are free on" in said
        assert "602.0 kB are missing" in said
        assert (
            "Training continues; 0 more in a row may fail (checkpoint.max_failed_saves 1)" in said
        )
        with pytest.raises(StorageError, match="2 saves in a row have failed"):
            checkpoint.save(state, tmp_path, cfg, may_fail=True)
        with pytest.raises(StorageError, match=r"are missing\Z"):  # the last of a run
            checkpoint.save(state, tmp_path, cfg)
    assert checkpoint.save(state, tmp_path, cfg, may_fail=True).endswith("step-00000002")


def test_a_run_does_not_count_what_another_in_its_process_lost(tmp_path, capsys):
    cfg = CheckpointConfig(max_failed_saves=1)
    for run in ("first", "second"):
        state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=1)
        with mock.patch.object(saving, "write_rng", side_effect=OSError(28, "No space")):
            assert checkpoint.save(state, tmp_path / run, cfg, may_fail=True) == ""
        assert "0 more in a row may fail" in capsys.readouterr().out
        assert state.saves.failed == [""]
    with (
        mock.patch.object(saving, "write_rng", side_effect=OSError(28, "No space")),
        pytest.raises(StorageError, match="2 saves in a row"),
    ):
        checkpoint.save(state, tmp_path / run, cfg, may_fail=True)


def test_a_fault_of_the_state_is_none_of_the_disk(tmp_path):
    state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=1)
    with (
        mock.patch.object(saving, "write_rng", side_effect=ValueError("a bug")),
        pytest.raises(ValueError, match="a bug"),
    ):
        checkpoint.save(state, tmp_path, CheckpointConfig(), may_fail=True)


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    import resource

    file = tmp_path / "metrics.jsonl"
    append_lines(file, [{"step": 1}])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    before = file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 5, hard))  # the kernel writes 5 bytes
    try:
        with pytest.raises(OSError, match="File too large"):
            append_lines(file, [{"step": 2}, {"step": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert file.stat().st_size == before
    append_lines(file, [{"step": 2}, {"step": 3}])
    assert [line["step"] for line in read_lines(file)] == [1, 2, 3]
