"""Checkpoints on an object store: the same promises as on a disk, without a rename."""

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import bucket
import fsspec
import pytest
import torch
from bucket import Store
from conftest import plain, run_recipe, save_tiny_model
from distributed import run_ranks
from test_checkpoint_resume import Trainer
from test_checkpoint_saving import small_state

from toolkit import checkpoint, cli, config
from toolkit.checkpoint import (
    commit,
    disk_space,
    local_copy,
    object_store,
    run_folder,
    saving,
    store,
)
from toolkit.checkpoint.object_store import RemotePath
from toolkit.config.settings import CheckpointConfig, ModelConfig, PretrainConfig
from toolkit.errors import CheckpointError, ConfigError

SYNC, ASYNC = CheckpointConfig(), CheckpointConfig(async_save=True)


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    # What a killed process leaves of its small files goes with the test.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Store.quiet()
    yield
    Store.quiet()


@pytest.fixture
def url(tmp_path) -> str:
    return f"bucket://{tmp_path}/run"


def saved(url: str, step: int, seed: int, cfg: CheckpointConfig = SYNC) -> checkpoint.TrainState:
    state = small_state(seed, step)
    checkpoint.save(state, url, cfg)
    return state


def weights(state: checkpoint.TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.model.parameters()]


def same(a: checkpoint.TrainState, b: checkpoint.TrainState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def names(url: str) -> set[str]:
    """Return the attempts that have any object."""
    return {
        n.split("/")[1] for n in store.parse_location(url).files() if n.startswith("checkpoints/")
    }


# ---- One process ---------------------------------------------------------------------------------


def test_a_checkpoint_in_memory_comes_back(tmp_path):
    url = f"memory://bucket/{tmp_path.name}"
    state = saved(url, 3, seed=1)
    assert names(url) == {checkpoint.find_newest(url).name}
    fresh = small_state(seed=2)
    assert not same(state, fresh)
    assert checkpoint.resume(fresh, url, SYNC) == 3
    assert same(state, fresh)
    assert (fresh.tokens, fresh.data.seen) == (state.tokens, state.data.seen)
    moments = [
        o.optimizer.state[p]["exp_avg"] for o in (state, fresh) for p in o.model.parameters()
    ]
    assert all(torch.equal(a, b) for a, b in zip(moments[:3], moments[3:], strict=True))
    assert checkpoint.resume(fresh, f"{url}/elsewhere", SYNC) is None


def test_torch_reads_it_from_the_store(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    url = f"memory://bucket/{tmp_path.name}"
    state = saved(url, 3, seed=1)
    found = {f"model.{n}": torch.zeros_like(p) for n, p in state.model.named_parameters()}
    dcp.load(found, storage_reader=FsspecReader(f"{checkpoint.find_newest(url)}/dcp"))
    assert all(torch.equal(found[f"model.{n}"], p) for n, p in state.model.named_parameters())


def test_behind_the_loop(url):
    state = small_state(1, 3)
    before = weights(state)
    path = checkpoint.save(state, url, ASYNC)
    with torch.no_grad():
        state.model[0].weight.add_(1)
    checkpoint.wait()
    fresh = small_state(seed=2)
    assert checkpoint.resume(fresh, url, SYNC) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, weights(fresh), strict=True))
    assert str(checkpoint.find_newest(url)) == path
    Store.fail = ".distcp"
    checkpoint.save(small_state(1, 4), url, ASYNC)
    with pytest.raises(CheckpointError, match=r"step 4 could not be written.*store went away"):
        checkpoint.wait()


def test_retention_and_overwriting(url):
    for step in (1, 2, 3):
        saved(url, step, step)
    assert sorted(commit.committed_steps(store.parse_location(url))) == [2, 3]
    again = saved(url, 3, seed=7)
    assert [n.split("-")[1] for n in sorted(names(url))] == ["00000002.try", "00000003.try"]
    fresh = small_state()
    assert checkpoint.resume(fresh, url, SYNC) == 3
    assert same(again, fresh)
    # A damaged one does not count as kept: two that verify stay.
    _flip(checkpoint.find_newest(url), "state.json")
    saved(url, 4, 4)
    assert sorted(commit.committed_steps(store.parse_location(url))) == [2, 3, 4]


class Bulk(bucket.Bucket):
    """A store that deletes a list in one request, and refuses some of them silently."""

    protocol = "bulk"
    requests: list[list[str]]
    refused = ""

    def rm(self, path, recursive=False, maxdepth=None):
        self.requests.append([Path(p).name for p in path])
        for one in path:
            if not (self.refused and self.refused in one):
                os.unlink(one)


@pytest.mark.parametrize("refused", ["", "part-7"])
def test_a_checkpoint_is_deleted_in_one_request_where_the_store_can(tmp_path, refused):
    store_driver = Bulk(skip_instance_cache=True)
    store_driver.requests, store_driver.refused = [], refused
    place = RemotePath(f"bulk://{tmp_path}", str(tmp_path), store_driver)
    for name in ("COMMIT", *(f"part-{i}" for i in range(30))):
        (place / name).write_bytes(b"abc")
    Store.quiet()
    place.delete()
    assert place.files() == {}
    assert [len(request) for request in store_driver.requests] == [30]  # the seal goes first
    assert Store.done == 1 + bool(refused)
    # Of a name that reads as a pattern a list would delete others: one by one.
    other = RemotePath(f"bulk://{tmp_path}/a[1]", f"{tmp_path}/a[1]", store_driver)
    for name in ("x", "y"):
        (other / name).write_bytes(b"abc")
    other.delete()
    assert other.files() == {}
    assert len(store_driver.requests) == 1


def test_drivers_that_delete_lists_are_told_from_others():
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    class Each(AsyncFileSystem):
        async def _rm_file(self, path, **_): ...

    class Lists(Each):
        async def _rm(self, path, **_): ...

    drivers = (AbstractFileSystem(), bucket.Bucket(), Each(), Lists(), Bulk())
    found = [object_store._can_delete_lists(driver, ["a"]) for driver in drivers]
    assert found == [False, False, False, True, True]


def _flip(place: RemotePath, name: str) -> None:
    file = Path((place / name).path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["dcp/__0_0.distcp", "manifest.json", "COMMIT", "state.json"])
def test_a_damaged_one_is_marked_and_the_one_before_is_used(url, capsys, name):
    saved(url, 1, 1)
    saved(url, 2, 2)
    bad = checkpoint.find_newest(url)
    _flip(bad, name)
    before = store.parse_location(url).files()
    fresh = small_state()
    assert checkpoint.resume(fresh, url, SYNC) == 1
    assert f"WARNING: checkpoint {bad.name} is damaged" in capsys.readouterr().out
    assert store.parse_location(url).files().keys() - before.keys() == {
        f"checkpoints/{bad.name}/BAD"
    }
    saved(url, 2, 3)  # the run reaches the step again, and the damaged one is still there
    assert commit.committed_steps(store.parse_location(url))[2].name != bad.name
    saved(url, 3, 3)
    saved(url, 4, 4)
    assert bad.name in names(url)


def test_a_superseded_attempt_counts_again_where_the_new_one_is_damaged(url):
    first = saved(url, 1, 1)
    with mock.patch.object(saving, "prune_checkpoints", return_value=[]):  # killed before it
        saved(url, 1, 2)
    _flip(checkpoint.find_newest(url), "dcp/__0_0.distcp")
    fresh = small_state()
    assert checkpoint.resume(fresh, url, SYNC) == 1
    assert same(first, fresh)


def test_a_folder_copied_from_a_disk_counts(url, tmp_path):
    state = small_state(1, 3)
    checkpoint.save(state, tmp_path / "disk", SYNC)
    shutil.copytree(tmp_path / "disk", tmp_path / "run")
    fresh = small_state()
    assert checkpoint.resume(fresh, url, SYNC) == 3
    assert same(state, fresh)
    (tmp_path / "run/checkpoints/step-00000003/COMMIT").unlink()  # still being copied
    saved(url, 4, 4)
    assert "step-00000003" in names(url)
    assert sorted(commit.committed_steps(store.parse_location(url))) == [4]


def test_a_damaged_blob_on_the_store_is_one_error(url):
    saved(url, 1, 1)
    place = checkpoint.find_newest(url)
    Path((place / "dcp/__0_0.distcp").path).write_bytes(b"PK" * 5000)
    with pytest.raises(CheckpointError, match=r"dcp cannot be read"):
        checkpoint.restore(small_state(), place)


def test_both_kinds_of_storage_answer_alike(url, tmp_path):
    """A new one must pass, too: what counts, what is left over, what is set aside and deleted."""
    seen = []
    for place in (
        tmp_path / "disk",
        store.parse_location(url),
        store.parse_location(f"memory://{tmp_path.name}"),
    ):
        storage = store.storage_of(place)
        storage.check_usable("checkpoint.root")
        storage_file = store.storage_of(place / "config.yaml")
        storage_file.replace("a: 1")
        assert storage_file.read_small_file() == b"a: 1"
        with storage_file.local_file() as file:
            assert (file.name, file.read_text()) == ("config.yaml", "a: 1")
        kinds = []
        for step, ends in ((1, True), (2, True), (3, False)):
            attempt = commit.begin_attempt(place, step)
            scratch = store.storage_of(attempt).scratch_folder()
            (scratch / "dcp").mkdir()
            (scratch / "dcp/data").write_bytes(b"abc")
            files = commit.store_files(scratch, ["dcp/data"], attempt)
            if ends:
                done = commit.commit(attempt, step, {"step": step, "files": files, "tensors": {}})
                assert done == store.storage_of(attempt).committed_path(step)
        kinds.append([(a.step, a.kind) for a in commit.list_attempts(place)])
        store.storage_of(commit.committed_steps(place)[2]).quarantine()
        kinds.append([(a.step, a.kind) for a in commit.list_attempts(place)])
        commit.delete_attempts(a.folder for a in commit.list_attempts(place) if a.kind != "bad")
        kinds.append([(a.step, a.kind) for a in commit.list_attempts(place)])
        assert storage.files(["config.yaml", "none"]) == {"config.yaml": 4}
        seen.append(kinds)
    saved, kept = [(1, "saved"), (2, "saved"), (3, "tmp")], [(1, "saved"), (2, "bad"), (3, "tmp")]
    assert seen == [[saved, kept, [(2, "bad")]]] * 3


def test_one_place_asks_which_storage_it_is():
    room = Path(store.__file__).parent
    asking = re.compile(r"isinstance\([^)]*RemotePath")
    assert [f.name for f in room.glob("*.py") if asking.search(f.read_text())] == ["store.py"]


# ---- Kills ---------------------------------------------------------------------------------------


def _life(url: str) -> None:
    """Save a step, which lets the oldest go, and overwrite it."""
    saved(url, 3, 3)
    saved(url, 3, 4)


def _faults(url: str) -> list[str]:
    """Return what a kill has lost or mixed up; saves once more, as the next start would."""
    run, found = store.parse_location(url), []
    versions = {1: [1], 2: [2], 3: [3, 4]}
    steps = commit.committed_steps(run)
    if len(steps) < 2 or 2 not in steps:
        found.append(f"committed: {sorted(steps)}")
    for step, place in steps.items():
        try:
            damage = commit.find_damaged_files(place, commit.read_manifest(place)["files"])
            state = small_state()
            if damage or checkpoint.restore(state, place) != step:
                found.append(f"step {step}: {damage}")
            elif not any(same(state, small_state(seed)) for seed in versions[step]):
                found.append(f"step {step} holds what nobody saved")
        except CheckpointError as error:
            found.append(f"step {step}: {error}")
    if commit.find_broken_checkpoints(run):
        found.append("something looks damaged")
    saved(url, 9, 9)
    whole = {p.name for p in commit.committed_steps(run).values()}
    if names(url) != whole:
        found.append(f"left over: {names(url) - whole}")
    return found


def _killed_at_each(tmp_path: Path, whole: bool = True) -> tuple[int, list[str]]:
    """Kill `_life` before each of its puts and deletes; return how many there were, and faults.

    Unless `whole`, the first fault is enough.
    """
    begin = tmp_path / "begin"
    for step in (1, 2):
        saved(f"bucket://{begin}", step, step)
    number, found = 0, []
    while True:
        copy = tmp_path / f"kill-{number}"
        shutil.copytree(begin, copy)
        child = os.fork()
        if child == 0:
            try:
                Store.quiet()
                Store.die_at = number
                _life(f"bucket://{copy}")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return number, found
        if os.WIFEXITED(status):
            return number, [*found, "a save that was not killed failed"]
        found += [f"killed before operation {number}: {f}" for f in _faults(f"bucket://{copy}")]
        if found and not whole:
            return number, found
        number += 1


@pytest.mark.slow
def test_a_kill_at_each_put_and_delete_loses_nothing(tmp_path, capsys):
    number, found = _killed_at_each(tmp_path)
    assert number > 20
    assert not found, "\n".join(found)


def _commit_first(attempt, step, manifest):
    text = json.dumps(manifest)
    (attempt / "COMMIT").write_bytes(commit.compute_commit_content(text.encode()).encode())
    (attempt / "manifest.json").write_bytes(text.encode())
    return attempt


def _commit_deleted_last(attempts):
    for attempt in attempts:
        for name in sorted(attempt.files(), key=lambda n: n == "COMMIT"):
            (attempt / name).unlink()


def _same_name_again(run, step):
    return run / "checkpoints" / f"{commit.step_name(step)}.try-0001-00000000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("commit", _commit_first),
        ("delete_attempts", _commit_deleted_last),
        ("begin_attempt", _same_name_again),
    ],
)
def test_a_wrong_order_is_noticed(tmp_path, name, wrong):
    with mock.patch.object(commit, name, wrong):
        assert _killed_at_each(tmp_path, whole=False)[1]


def test_a_put_that_fails_leaves_what_was_committed(url):
    for step in (1, 2):
        saved(url, step, step)
    for name in ("rng", ".distcp", ".metadata", "state.json", "manifest.json", "COMMIT"):
        Store.fail = name
        with pytest.raises(CheckpointError, match="store went away"):
            saved(url, 3, 3)
        Store.quiet()
        steps = commit.committed_steps(store.parse_location(url))
        assert len(steps) >= 2
        for place in steps.values():
            files = commit.read_manifest(place)["files"]
            assert not commit.find_damaged_files(place, files)
    saved(url, 4, 4)
    assert len(names(url)) == 2


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", ".distcp"])
def test_a_put_that_was_done_and_looks_failed_does_no_harm(url, name):
    saved(url, 1, 1)
    first = saved(url, 2, 2)
    Store.unsaid = name
    with pytest.raises(CheckpointError, match="no answer"):
        saved(url, 2, 5)
    Store.quiet()
    fresh = small_state()
    assert checkpoint.resume(fresh, url, SYNC) == 2
    assert same(fresh, small_state(5) if name == "COMMIT" else first)
    last = saved(url, 2, 6)
    assert checkpoint.resume(fresh, url, SYNC) == 2
    assert same(fresh, last)
    assert len(names(url)) == 2


# ---- Several ranks -------------------------------------------------------------------------------


def two_ranks(rank: int, world: int, model: str, url: str) -> dict:
    found = {}
    for behind in (False, True):
        place, cfg = f"{url}-{behind}", CheckpointConfig(async_save=behind)
        run = Trainer(model, world, "adamw")
        run.steps(1)
        checkpoint.save(run.state, place, cfg)
        run.steps(1)
        checkpoint.save(run.state, place, cfg)
        undisturbed = run.steps(2), run.weights()
        checkpoint.wait()
        fresh = Trainer(model, world, "adamw")
        assert checkpoint.resume(fresh.state, place, cfg) == 2
        resumed = fresh.steps(2), fresh.weights()
        assert undisturbed[0] == resumed[0]
        assert all(torch.equal(t, resumed[1][n]) for n, t in undisturbed[1].items())
        if not behind:  # control: without the checkpoint
            assert Trainer(model, world, "adamw").steps(2) != resumed[0]

        # A put of one rank that fails is everybody's failure, and the step before is there.
        Store.fail = ".distcp" if rank == 1 else ""
        run.state.step = 3
        try:
            checkpoint.save(run.state, place, cfg)
            checkpoint.wait()
        except CheckpointError as error:
            found[behind] = str(error)
        Store.quiet()
        assert checkpoint.resume(fresh.state, place, cfg) == 2

    # A damaged file that one rank finds is marked once, and both ranks fall back.
    newest = checkpoint.find_newest(f"{url}-False")
    torch.distributed.barrier()
    if rank == 0:
        _flip(newest, "dcp/__1_0.distcp")
    torch.distributed.barrier()
    assert checkpoint.resume(fresh.state, f"{url}-False", SYNC) == 1
    found["weights"] = fresh.weights()
    return found


@pytest.mark.slow
def test_two_ranks(tmp_path, url):
    model = save_tiny_model(tmp_path / "model")
    first, second = run_ranks(two_ranks, 2, str(model), url)
    for said in (first, second):
        assert all("step 3 could not be written" in said[behind] for behind in (False, True))
    # On one process, unsharded, from what two ranks wrote.
    from transformers import AutoModelForCausalLM

    plain_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert checkpoint.resume(checkpoint.TrainState(plain_model), f"{url}-False", SYNC) == 1
    for name, tensor in plain_model.named_parameters():
        assert torch.equal(tensor, first["weights"][name])


# ---- What is refused before any work -------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/run",
        "s3://token@bucket/run",
        "s3://bucket/run?secret=hunter2",
        "simplecache::s3://bucket/run",
        "nosuchstore://bucket/run",
        "lost://bucket/run",
    ],
)
def test_a_url_that_cannot_be_used(url):
    fsspec.register_implementation(
        "lost", "no_such_driver.Store", clobber=True, errtxt="Install no_such_driver"
    )
    with pytest.raises(CheckpointError) as error:
        store.parse_location(url)
    assert "hunter2" not in str(error.value)
    assert "token" not in str(error.value)
    if url.startswith("lost"):
        assert "Install no_such_driver" in str(error.value)


def test_a_path_is_no_url(tmp_path):
    assert (
        store.parse_location(str(tmp_path))
        == tmp_path
        == store.parse_location(f"file://{tmp_path}")
    )
    assert not store.is_url(tmp_path)
    place = store.parse_location("memory://bucket/run/")
    assert (str(place / "a"), (place / "a").name, (place / "a").parent) == (
        "memory://bucket/run/a",
        "a",
        place,
    )


@pytest.mark.parametrize("failing", ["probe", "bucket"])
def test_a_store_that_refuses_is_found_out_at_once(url, tmp_path, failing):
    cfg = _config(tmp_path, url)
    run_folder.validate_run_folders(cfg)
    assert not store.parse_location(url).files()
    Store.fail = failing
    if failing == "bucket":  # refuses everything
        Store.fail = str(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot go to bucket://.*went away"):
        run_folder.validate_run_folders(cfg)


def _config(tmp_path: Path, root: str | None, seed: int = 42) -> PretrainConfig:
    return PretrainConfig(
        ModelConfig("somewhere"),
        checkpoint=CheckpointConfig(root=root),
        output_dir=str(tmp_path / "out"),
        seed=seed,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--checkpoint.root", "s3://key:hunter2@bucket/run"], "token or a password"),
        (["--checkpoint.root", ""], r"checkpoint\.root is an empty text"),
    ],
)
def test_secrets_and_contradictions_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said) as error:
        config.parse(PretrainConfig, ["--model.name_or_path", "somewhere", *flags])
    assert "hunter2" not in str(error.value)


@pytest.mark.slow
def test_a_root_belongs_to_one_run(tmp_path, url):
    cfg = _config(tmp_path, url)
    run_folder.validate_run_folders(cfg)
    folder = Path(cfg.output_dir)
    run_folder.save_config(cfg)
    saved(url, 3, 3)
    run_folder.validate_run_folders(cfg)
    # On another machine, whose disk is empty: the same run goes on, another one does not.
    shutil.rmtree(folder)
    run_folder.validate_run_folders(cfg)
    with pytest.raises(ConfigError, match=r"checkpoint.root bucket://.*seed was 42, is 7"):
        run_folder.validate_run_folders(_config(tmp_path, url, seed=7))
    # Nor does a run that has left its checkpoints elsewhere begin anew.
    run_folder.save_config(cfg)
    (folder / "metrics.jsonl").write_text("{}\n")
    for root in (None, str(tmp_path / "local"), f"{url}-2"):
        with pytest.raises(ConfigError, match=r"it would start from scratch\. Copy checkpoints"):
            run_folder.validate_run_folders(_config(tmp_path, root))
    shutil.copytree(tmp_path / "run", tmp_path / "run-2")
    run_folder.validate_run_folders(_config(tmp_path, f"{url}-2"))


def test_a_root_on_a_disk(tmp_path):
    cfg = _config(tmp_path, str(tmp_path / "other"))
    run_folder.validate_run_folders(cfg)
    folder = Path(cfg.output_dir)
    run_folder.save_config(cfg)
    root = run_folder.checkpoint_root(cfg)
    saved(root, 3, 3)
    assert sorted(commit.committed_steps(root)) == [3]
    assert not (folder / "checkpoints").exists()
    with local_copy(folder) as found:
        assert commit.find_checkpoint(found).name == "step-00000003"


def test_the_disk_is_asked_for_the_exports_only(tiny_llama, tmp_path, url):
    from toolkit.models.causal_lm import build_on_meta

    model = build_on_meta(ModelConfig(str(tiny_llama)))
    on_disk = disk_space.estimate_disk_use(model, tmp_path, CheckpointConfig(), 1000, 1)
    away = disk_space.estimate_disk_use(model, tmp_path, CheckpointConfig(root=url), 1000, 1)
    assert away.total == away.export == on_disk.export < on_disk.total
    assert url in str(away)


# ---- The recipe and the command line -------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_and_the_command_line(tiny_llama, text_file, tmp_path, url, monkeypatch, capsys):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import bucket\n")
    paths = [str(tmp_path / "path"), str(Path(bucket.__file__).parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    flags = [
        "--model.name_or_path", str(tiny_llama),
        "--data.train_files", str(text_file),
        "--data.sequence_length", "32",
        "--train.max_steps", "2",
        "--checkpoint.root", url,
        "--output_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    done = run_recipe(plain(), *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"checkpoint {url}/checkpoints" in done.stdout
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert sorted(commit.committed_steps(store.parse_location(url))) == [2]

    for path in (str(tmp_path / "out"), url, str(checkpoint.find_newest(url))):
        capsys.readouterr()
        assert cli.main(["inspect", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 2
    assert cli.main(["verify", url]) == 0
    export = str(tmp_path / "export")
    assert cli.main(["consolidate", str(tmp_path / "out"), "--output", export]) == 0
    assert cli.main(["verify", url, export]) == 0
    described = json.loads(Path(export, "toolkit_manifest.json").read_text())["manifest"]["origin"]
    assert described["run"]["steps"] == 2
    _flip(checkpoint.find_newest(url), "dcp/__0_0.distcp")
    assert cli.main(["verify", url]) == 1
    assert cli.main(["consolidate", f"{url}/nothing", "--output", export + "2"]) == 1
    assert "holds no committed checkpoint" in capsys.readouterr().err
