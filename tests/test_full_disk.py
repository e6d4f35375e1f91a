"""A disk that refuses while a run trains: warnings, so many in a row, then the end."""

import errno
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed import run_ranks

from toolkit import checkpoint
from toolkit.checkpoint import commit, saving, shards
from toolkit.config import CheckpointConfig
from toolkit.errors import CheckpointError, StorageError
from toolkit.formats.metrics_file import append, read_lines

WRITE = shards.HashingStream.write


def save_with_failures(rank: int, world: int, root: str, behind: bool) -> list[tuple[str, str]]:
    """Save steps 1 to 10, of which rank 1's disk refuses some; return how each ended."""
    cfg = CheckpointConfig(async_save=behind, max_failed_saves=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    refused = {2: errno.ENOSPC, 3: errno.EROFS, 5: errno.EIO, 7: errno.EDQUOT, 8: errno.EIO}
    refused |= {9: errno.EIO, 10: errno.EACCES}
    ended = []
    for step in range(1, 11):

        def write(self, content, step=step) -> int:
            if rank == 1 and step in refused:
                raise OSError(refused[step], "refused", "shard")
            return WRITE(self, content)

        state = checkpoint.TrainState(model, step=step)
        with mock.patch.object(shards.HashingStream, "write", write):
            try:
                path = checkpoint.save(state, root, cfg, may_fail=True)
                checkpoint.wait()
                lost = saving.failed(path)
                ended.append(("failed" if lost else "saved", Path(path).name))
            except CheckpointError as error:
                ended.append((type(error).__name__, str(error)))
    return ended


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "behind"])
def ended(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("full")
    return run_ranks(save_with_failures, 2, str(root), request.param), root, request.param


def test_saves_that_the_disk_refuses_are_warnings_so_many_times_in_a_row(ended):
    ranks, root, _ = ended
    for one in ranks:
        kinds = [kind for kind, _ in one]
        assert kinds[:8] == [
            *("saved", "failed", "failed", "saved", "failed", "saved", "failed", "failed")
        ]
        assert kinds[8] == "StorageError"  # the third in a row
        assert "save 3 in a row that failed (checkpoint.max_failed_saves 2)" in one[8][1]
        assert kinds[9] == "CheckpointError"  # no right to write is no fault of the disk
    assert set(commit.committed_steps(root)) == {4, 6}  # the newest two; nothing else is there
    assert {p.name for p in (root / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}


def test_a_warning_says_what_is_missing(tmp_path, capsys):
    cfg = CheckpointConfig(max_failed_saves=1)
    state = checkpoint.TrainState(torch.nn.Linear(500, 500), step=1)
    checkpoint.save(state, tmp_path, cfg)
    with (
        mock.patch.object(saving.rng_state, "write", side_effect=OSError(28, "No space", "rng")),
        mock.patch.object(saving.disk, "free_bytes", return_value=400_000),
    ):
        state.step = 2
        assert checkpoint.save(state, tmp_path, cfg, may_fail=True) == ""
        said = capsys.readouterr().out
        assert said.startswith("WARNING: checkpoint of step 2 could not be written: No space (rng)")
        assert "It takes 1.0 MB, 400.0 kB are free on" in said
        assert "602.0 kB are missing" in said
        assert "Training goes on; 0 more in a row may fail (checkpoint.max_failed_saves 1)" in said
        with pytest.raises(StorageError, match="is save 2 in a row that failed"):
            checkpoint.save(state, tmp_path, cfg, may_fail=True)
        with pytest.raises(StorageError, match=r"are missing\Z"):  # the last of a run
            checkpoint.save(state, tmp_path, cfg)
    assert checkpoint.save(state, tmp_path, cfg, may_fail=True).endswith("step-00000002")


def test_a_fault_of_the_state_is_none_of_the_disk(tmp_path):
    state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=1)
    with (
        mock.patch.object(saving.rng_state, "write", side_effect=ValueError("a bug")),
        pytest.raises(ValueError, match="a bug"),
    ):
        checkpoint.save(state, tmp_path, CheckpointConfig(), may_fail=True)


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    import resource

    file = tmp_path / "metrics.jsonl"
    append(file, [{"step": 1}])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    before = file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 5, hard))  # the kernel writes 5 bytes
    try:
        with pytest.raises(OSError, match="File too large"):
            append(file, [{"step": 2}, {"step": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert file.stat().st_size == before
    append(file, [{"step": 2}, {"step": 3}])
    assert [line["step"] for line in read_lines(file)] == [1, 2, 3]
