"""The folder protocol of checkpoints and their retention, on folders of two small files.

Kills, full disks and power losses at every operation: test_commit_crash.py and `make soak`.
"""

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit import config
from toolkit.checkpoint import commit, find_newest, local_folder
from toolkit.checkpoint.saving import prune_checkpoints, steps_to_delete
from toolkit.config.settings import CheckpointConfig, PretrainConfig
from toolkit.errors import CheckpointError, ConfigError


def save(run: Path, step: int, text: str = "x", metrics: dict | None = None) -> Path:
    folder = commit.begin_attempt(run, step)
    (folder / "dcp").mkdir()
    (folder / "dcp" / "data").write_text(text)
    (folder / "state.json").write_text(json.dumps({"step": step, "metrics": metrics or {}}))
    files = commit.store_files(folder, ["dcp/data", "state.json"])
    return commit.commit(folder, step, {"version": 1, "step": step, "files": files, "tensors": {}})


def text_of(run: Path) -> str:
    return (commit.find_checkpoint(run) / "dcp" / "data").read_text()


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def kinds(run: Path) -> list[str]:
    return sorted(n.partition(".")[2].partition("-")[0] for n in names(run) if "." in n)


# --------------------------------------------------------------------------------------------------
# COMMIT decides
# --------------------------------------------------------------------------------------------------


def test_commit_is_compared_to_the_byte(tmp_path):
    checkpoint = save(tmp_path, 3)
    good = (checkpoint / "COMMIT").read_bytes()
    changes = [good[:-1], good + b"\n", b" " + good, good[:-1] + b"\r\n", good.upper(), b""]
    for changed in changes:
        (checkpoint / "COMMIT").write_bytes(changed)
        assert not commit.is_committed(checkpoint), changed
        assert list(commit.find_broken_checkpoints(tmp_path)) == [3]
    (checkpoint / "COMMIT").write_bytes(good)
    assert commit.is_committed(checkpoint)
    assert not commit.find_broken_checkpoints(tmp_path)
    for name in ("COMMIT", "manifest.json"):  # a link may point to anywhere
        os.rename(checkpoint / name, tmp_path / name)
        os.symlink(tmp_path / name, checkpoint / name)
        assert not commit.is_committed(checkpoint)
        os.rename(tmp_path / name, checkpoint / name)


def test_a_changed_manifest_and_a_lost_commit_are_named(tmp_path):
    save(tmp_path, 3)
    flipped, lost = save(tmp_path, 4), save(tmp_path, 5)
    content = bytearray((flipped / "manifest.json").read_bytes())
    content[20] ^= 1
    (flipped / "manifest.json").write_bytes(content)
    (lost / "COMMIT").unlink()
    assert list(commit.committed_steps(tmp_path)) == [3]
    broken = commit.find_broken_checkpoints(tmp_path)
    assert broken[4][1] == "COMMIT is not that of manifest.json: one of them was changed"
    assert broken[5][1] == "COMMIT missing"
    prune_checkpoints(tmp_path, CheckpointConfig())
    commit.begin_attempt(tmp_path, 6)
    assert flipped.is_dir()
    assert lost.is_dir()  # damage is never taken for a leftover


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "dcp/../../x", "", ".", "dcp//data", "a\0b", "..\\x", "C:x"]
)
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path, name):
    checkpoint = save(tmp_path, 3)
    manifest = commit.read_manifest(checkpoint)
    manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
    text = json.dumps(manifest)
    (checkpoint / "manifest.json").write_text(text)
    (checkpoint / "COMMIT").write_text(commit.compute_commit_content(text.encode()))
    assert commit.is_committed(checkpoint)
    with pytest.raises(CheckpointError, match="no file of the checkpoint"):
        commit.find_damaged_files(checkpoint)


def test_other_names_are_no_checkpoints(tmp_path):
    good = save(tmp_path, 100_000_000)  # nine digits
    root = good.parent
    for name in (
        "step-000000007",
        "step-7",
        "step-٠٠٠٠٠٠٠٧",
        "step-00000007x",
        "step-00000007.old-x",
    ):
        shutil.copytree(good, root / name)
    (root / "step-00000008").write_text("a file where a folder is expected")
    (root / "step-00000009.tmp-00000000").write_text("likewise")
    assert list(commit.committed_steps(tmp_path)) == [100_000_000]
    before = set(names(tmp_path))
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert before - set(names(tmp_path)) == {"step-00000009.tmp-00000000"}
    save(tmp_path, 8)
    assert list(commit.committed_steps(tmp_path)) == [8, 100_000_000]
    assert kinds(tmp_path).count("bad") == 1


def unreadable(monkeypatch, name: str, number: int) -> None:
    """Let no file of that name be opened."""
    real = Path.open

    def fails(file, *args, **kwargs):
        if file.name == name:
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["data", "COMMIT", "manifest.json"])
def test_what_cannot_be_read_just_now_is_not_damaged(tmp_path, monkeypatch, name, number):
    for step in (1, 2):
        save(tmp_path, step)
    with monkeypatch.context() as patch:
        unreadable(patch, name, number)
        with pytest.raises(
            CheckpointError, match=rf"/{name} cannot be read: {os.strerror(number)}"
        ):
            find_newest(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert find_newest(tmp_path).name == "step-00000002"


def test_what_is_no_file_is_damaged(tmp_path):
    """The control of the test above."""
    for step in (1, 2):
        save(tmp_path, step)
    data = tmp_path / "checkpoints/step-00000002/dcp/data"
    data.unlink()
    data.mkdir()
    assert find_newest(tmp_path).name == "step-00000001"
    assert kinds(tmp_path) == ["bad"]


def test_damage_is_named(tmp_path):
    checkpoint = save(tmp_path, 3)
    assert commit.find_damaged_files(checkpoint) == []
    assert commit.find_damaged_files(checkpoint, only=["more"]) == [
        ("more", "is not in the manifest")
    ]


def test_a_stray_file_costs_no_checkpoint(tmp_path):
    checkpoint = save(tmp_path, 3)
    (checkpoint / ".DS_Store").write_text("x")
    assert find_newest(tmp_path) == checkpoint
    assert commit.find_damaged_files(checkpoint) == [(".DS_Store", "is not in the manifest")]


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move])
def test_a_step_under_another_name_is_refused_and_not_moved(tmp_path, move):
    for step in (1, 2):
        save(tmp_path, step)
    root = tmp_path / "checkpoints"
    move(root / "step-00000002", root / "step-00000900")
    before = names(tmp_path)
    said = "step-00000900 is the checkpoint of step 2, .* give it back the name step-00000002"
    for look in (find_newest, commit.find_checkpoint, commit.committed_steps):
        with pytest.raises(CheckpointError, match=said):
            look(tmp_path)
    assert names(tmp_path) == before
    # By its own path it is what it is.
    assert commit.find_checkpoint(root / "step-00000900") == root / "step-00000900"


def test_a_manifest_that_nobody_would_read_is_not_committed(tmp_path, monkeypatch):
    entry = {"size": 1, "sha256": commit.hash_file(save(tmp_path, 1) / "dcp/data")}
    folder = commit.begin_attempt(tmp_path, 2)
    (folder / "data").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(commit, "MAX_JSON_BYTES", 100)
        with pytest.raises(CheckpointError, match="more than the 100 that are read: not committed"):
            commit.commit(folder, 2, {"step": 2, "files": {"data": entry}})
    assert list(commit.committed_steps(tmp_path)) == [1]


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["a prepared COMMIT", "the rename", "COMMIT"])
def test_a_save_that_fails_gives_back_what_was_there(tmp_path, monkeypatch, step):
    save(tmp_path, 3, "first")
    real_rename, real_write = os.rename, local_folder.write_synced

    def full(file, text):
        if file.name == "COMMIT.prepared":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        real_write(file, text)

    def rename(source, target):
        name = Path(target).name
        if name == ("COMMIT" if step == "COMMIT" else "step-00000003") and ".old-" not in str(
            source
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        real_rename(source, target)

    with monkeypatch.context() as patch:
        if step == "a prepared COMMIT":
            patch.setattr(local_folder, "write_synced", full)
        else:
            patch.setattr(os, "rename", rename)
        cause = "No space left" if step == "a prepared COMMIT" else "Input/output error"
        with pytest.raises(CheckpointError, match=cause):
            save(tmp_path, 3, "second")
    assert text_of(tmp_path) == "first"
    assert kinds(tmp_path) == ["tmp"]
    save(tmp_path, 3, "third")
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert text_of(tmp_path) == "third"
    assert names(tmp_path) == ["step-00000003"]


def test_a_folder_that_is_not_its_manifest_is_not_committed(tmp_path):
    def attempt(change) -> None:
        folder = commit.begin_attempt(tmp_path, 3)
        (folder / "data").write_text("x")
        files = commit.store_files(folder, ["data"])
        change(folder, files)
        commit.commit(folder, 3, {"step": 3, "files": files, "tensors": {}})

    attempts = {
        "more is not in the manifest": lambda d, f: (d / "more").write_text(""),
        "data is missing": lambda d, f: (d / "data").unlink(),
        "data is 2 bytes long, expected 1": lambda d, f: (d / "data").write_text("xy"),
    }
    for said, change in attempts.items():
        with pytest.raises(CheckpointError, match=f"{said}: not committed"):
            attempt(change)
        assert not commit.committed_steps(tmp_path)
    attempt(lambda d, f: None)
    assert list(commit.committed_steps(tmp_path)) == [3]


def test_of_two_saves_under_one_step_the_later_counts(tmp_path):
    """Killed twice in a row while overwriting: there is one `old` at most, and it is the newer."""
    for text in ("first", "second"):
        save(tmp_path, 3, text)
        target = tmp_path / "checkpoints" / "step-00000003"
        local_folder.move_existing_checkpoint(target, commit.is_intact)  # and no more: the kill
        assert text_of(tmp_path) == text
        shutil.copytree(commit.find_checkpoint(tmp_path), target)
        (target / "COMMIT").rename(target / "COMMIT.prepared")  # the next kill, later
        assert text_of(tmp_path) == text
        assert not commit.find_broken_checkpoints(tmp_path)
        prune_checkpoints(tmp_path, CheckpointConfig())
        assert text_of(tmp_path) == text
        assert kinds(tmp_path) == ["old"]
    save(tmp_path, 3, "third")
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert text_of(tmp_path) == "third"
    assert names(tmp_path) == ["step-00000003"]


def test_a_damaged_old_one_does_not_come_back(tmp_path):
    save(tmp_path, 3, "first")
    target = tmp_path / "checkpoints" / "step-00000003"
    local_folder.move_existing_checkpoint(target, commit.is_intact)
    old = commit.find_checkpoint(tmp_path)
    bad = local_folder.LocalFolder(old).quarantine()
    assert bad.name.startswith("step-00000003.bad-")
    assert not commit.committed_steps(tmp_path)  # it did, as step-N.old-x.bad-y


def test_an_old_one_stays_while_its_successor_does_not_verify(tmp_path):
    save(tmp_path, 3, "first")
    target = tmp_path / "checkpoints" / "step-00000003"
    local_folder.move_existing_checkpoint(target, commit.is_intact)
    folder = commit.begin_attempt(tmp_path, 3)
    (folder / "data").write_text("second")
    files = commit.store_files(folder, ["data"])
    commit.commit(folder, 3, {"step": 3, "files": files, "tensors": {}})
    (target / "data").write_text("secone")
    prune_checkpoints(tmp_path, CheckpointConfig())
    local_folder.LocalFolder(target).quarantine()
    assert text_of(tmp_path) == "first"


def test_the_checkpoints_folder_may_be_a_link_and_no_file(tmp_path):
    for what in ("a file", "a broken link"):
        run = tmp_path / what
        run.mkdir()
        if what == "a file":
            (run / "checkpoints").write_text("")
        else:
            (run / "checkpoints").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="a folder is expected"):
            commit.begin_attempt(run, 1)
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "big disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "big disk")
    for step in (1, 2, 3):
        save(run, step)
        prune_checkpoints(run, CheckpointConfig())
    assert list(commit.committed_steps(run)) == [2, 3]


def test_a_link_to_a_checkpoint_is_read_and_not_deleted(tmp_path):
    save(tmp_path, 1)
    elsewhere = shutil.move(tmp_path / "checkpoints" / "step-00000001", tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "step-00000001").symlink_to(elsewhere)
    for step in (2, 3, 4):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert list(commit.committed_steps(tmp_path)) == [1, 3, 4]


def test_leftovers_go_before_the_next_save_needs_their_room(tmp_path):
    save(tmp_path, 3)
    root = tmp_path / "checkpoints"
    for name in ("step-00000004.tmp-0123abcd", "step-00000002.trash-0123abcd"):
        shutil.copytree(root / "step-00000003", root / name)
    os.rename(
        shutil.copytree(root / "step-00000003", root / "step-00000004") / "COMMIT",
        root / "step-00000004" / "COMMIT.prepared",
    )
    folder = commit.begin_attempt(tmp_path, 5)
    assert names(tmp_path) == sorted(["step-00000003", folder.name])


# --------------------------------------------------------------------------------------------------
# Retention
# --------------------------------------------------------------------------------------------------


def keeping(last: int | None = 2, best: int = 0, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(1, last, best, **more)


def test_what_retention_keeps():
    def left(policy: CheckpointConfig, losses: dict[int, float | None]) -> list[int]:
        verified = {s: {} if v is None else {"eval_loss": v} for s, v in losses.items()}
        return sorted(set(losses) - steps_to_delete(verified, policy))

    none = dict.fromkeys(range(1, 9))
    assert left(keeping(last=None), none) == [*range(1, 9)]
    assert left(keeping(last=3), none) == [6, 7, 8]
    assert left(keeping(last=1), none) == [7, 8]  # never fewer than two
    assert left(keeping(last=0), none) == [7, 8]
    losses = {1: 5.0, 2: 1.0, 3: None, 4: 1.0, 5: float("nan"), 6: 3.0, 7: 4.0, 8: 9.0}
    assert left(keeping(best=1), losses) == [4, 7, 8]  # of equals the newer
    assert left(keeping(best=2), losses) == [2, 4, 7, 8]
    assert left(keeping(best=3, metric_for_best_model="accuracy"), losses) == [7, 8]
    assert left(keeping(last=4), {1: None}) == [1]
    assert left(CheckpointConfig(), {}) == []


def test_retention_keeps_what_each_rule_names_and_two_at_least():
    chance = random.Random(0)
    for _ in range(500):
        steps = chance.sample(range(100), chance.randint(0, 12))
        verified = {s: {"eval_loss": chance.random()} for s in steps if chance.random() < 0.7}
        last, best = chance.choice((1, 2, 3, 5)), chance.randint(0, 3)
        left = set(verified) - steps_to_delete(verified, keeping(last, best))
        assert len(left) >= min(2, len(verified))
        assert left >= set(sorted(verified)[-last:])
        assert left >= set(sorted(verified, key=lambda s: verified[s]["eval_loss"])[:best])
        assert len(left) <= max(2, last) + best


def test_prune_reads_the_metrics_and_deletes(tmp_path):
    policy = keeping(last=2, best=1)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.6, 2.7, 2.8], start=1):
        save(tmp_path, step, metrics={"eval_loss": loss})
        prune_checkpoints(tmp_path, policy)
    assert list(commit.committed_steps(tmp_path)) == [2, 6, 7]
    prune_checkpoints(tmp_path, CheckpointConfig())
    prune_checkpoints(tmp_path, keeping(last=None))
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize("damage", ["a bit", "the size", "a file", "the manifest"])
def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path, damage):
    for step in (1, 2, 3):
        save(tmp_path, step)
    broken = tmp_path / "checkpoints" / "step-00000003"
    if damage == "a bit":
        (broken / "dcp" / "data").write_text("y")
    elif damage == "the size":
        (broken / "dcp" / "data").write_text("")
    elif damage == "a file":
        (broken / "dcp" / "data").unlink()
    else:
        (broken / "manifest.json").write_text("{}")
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    save(tmp_path, 4)
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_what_cannot_be_deleted_is_a_warning_and_keeps_nothing_else(tmp_path, monkeypatch, capsys):
    """As a file that somebody has open does on NFS, where the folder then is not empty."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    real = shutil.rmtree

    def busy(path):
        if path.name.startswith("step-00000001"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        prune_checkpoints(tmp_path, CheckpointConfig())
        said = capsys.readouterr().out
        assert said.startswith("WARNING: ")
        assert "could not be deleted: Directory not empty" in said
        assert list(commit.committed_steps(tmp_path)) == [3, 4]
        assert kinds(tmp_path) == ["trash"]
        save(tmp_path, 5)  # nor is it in the way of a save
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_an_old_checkpoint_that_cannot_be_read_hinders_no_deletion(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    real = commit.hash_file

    def fails(file, kind):
        if "step-00000002" in str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return real(file, kind)

    monkeypatch.setattr(commit, "hash_file", fails)
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert list(commit.committed_steps(tmp_path)) == [2, 3, 4]


def test_an_old_state_that_is_no_json_ends_nothing(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    state = tmp_path / "checkpoints/step-00000001/state.json"
    state.write_text("x" * state.stat().st_size)
    prune_checkpoints(tmp_path, CheckpointConfig())
    assert list(commit.committed_steps(tmp_path)) == [1, 3, 4]  # not sound: not deleted


def test_the_config_says_which_metric_is_best():
    for name, metric, greater in (
        ("loss", "eval_loss", False),
        ("eval_perplexity", "eval_perplexity", False),
        ("accuracy", "eval_accuracy", True),
    ):
        assert CheckpointConfig(metric_for_best_model=name).best_metric() == (metric, greater)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--checkpoint.save_total_limit", "1"], "must be an integer of at least 2"),
        (["--checkpoint.keep_best", "true"], "needs an evaluation at each save"),
        (["--checkpoint.keep_best", "2", "--train.eval_steps", "300"], "multiple of train.eval_"),
        (["--checkpoint.keep_best", "-1"], "keep_best must be true or false or an integer"),
        (
            ["--checkpoint.save_total_limit", "null", "--checkpoint.keep_best", "1"],
            "all checkpoints are kept",
        ),
    ],
)
def test_settings_that_cannot_mean_what_they_say(settings, said):
    with pytest.raises(ConfigError, match=said):
        config.parse(PretrainConfig, ["--model.name_or_path", "x", *settings])


def test_settings_that_fit():
    flags = ["--checkpoint.keep_best", "2", "--train.eval_steps", "250"]
    cfg = config.parse(PretrainConfig, ["--model.name_or_path", "x", *flags])
    assert cfg.checkpoint.keep_best == 2
