"""The reference of preference tuning: which answers are evaluated, and the files that keep them."""

import resource
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import save_tiny_model

from toolkit.checkpoint import TrainState, commit, find_newest, save
from toolkit.checkpoint import reference_file as files
from toolkit.checkpoint.disk_space import estimate_disk_use
from toolkit.checkpoint.store import parse_location
from toolkit.config.settings import CheckpointConfig, ModelConfig
from toolkit.data.feed.feed import build_samples
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.order.position import train_batches
from toolkit.data.row_formats import PAIRS
from toolkit.data.samples.sample_shape import FILLER, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import CheckpointError, DataError, StorageError
from toolkit.models.causal_lm import build_on_meta
from toolkit.objectives import reference_pass
from toolkit.objectives.reference_pass import RowTable, row_tables
from toolkit.training.train_state import StateFile
from toolkit.verify import verify_checkpoint

LENGTH = 256
FEATURES = datasets.Features(
    input_ids=datasets.List(datasets.Value("int32")),
    spans=datasets.List(datasets.Value("int32")),
    second=datasets.Value("int32"),
    desirable=datasets.Value("bool"),
    margin=datasets.Value("float32"),
)


def pairs(name: str, count: int, seed: int = 0, **mixing: Any) -> EncodedSource:
    """Return a source of pairs whose answers have lengths of all kinds."""
    chance = np.random.default_rng(seed)
    lengths = np.clip(chance.lognormal(3.2, 0.9, (count, 2)).astype(int), 4, LENGTH // 2)
    ids = [chance.integers(1, 250, pair.sum()).tolist() for pair in lengths]
    spans = [[1, int(a), int(a) + 1, int(a + b)] for a, b in lengths]
    rows = {"input_ids": ids, "spans": spans, "second": lengths[:, 0]}
    rows |= {"desirable": [None] * count, "margin": [None] * count}
    return EncodedSource(name, datasets.Dataset.from_dict(rows, features=FEATURES), **mixing)


def data_of(
    sources: list[EncodedSource], packing: Any, max_steps: int, **settings: Any
) -> tuple[Any, PreparedFeed]:
    """Return what `row_tables` reads of a run's data, and its feed."""
    shape = SampleShape(packing, LENGTH, borders=packing == "bfd", row_format=PAIRS)
    feed = PreparedFeed(sources, shape, **({"seed": 3, "global_batch": 6} | settings))
    return SimpleNamespace(feed=feed, max_steps=max_steps), feed


# ---- Which rows a run reads


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("done", "max_steps"), [(0, 1), (0, 9), (4, 12), (0, 400)])
def test_the_rows_are_those_that_steps_read(
    packing: str, weighted: bool, done: int, max_steps: int
) -> None:
    weights = ({"weight": 1.0}, {"weight": 3.0}) if weighted else ({}, {})
    sources = [pairs(n, 90, s, **w) for n, s, w in zip("ab", (1, 2), weights, strict=True)]
    data, feed = data_of(sources, packing, max_steps, eval_split=0.1)
    feed.position.samples_seen = done * 6
    steps = train_batches(feed._sample_order(), done * 6, max_steps - done, 6, 1, 0, 1)
    read = {index for batch in steps for index in batch}
    ends = np.cumsum([0, *map(len, feed.train)])
    for table, samples, (begin, end) in zip(row_tables(data), feed.train, pairwise(ends)):  # noqa: B905
        mine = np.array(sorted(index - begin for index in read if begin <= index < end), int)
        expected = set(samples.first_rows(mine).tolist())
        held_out = feed.eval_sets[table.name.removeprefix("train.")]
        expected |= set(held_out.first_rows(np.arange(len(held_out))).tolist())
        assert set(np.flatnonzero(table.rows_read).tolist()) == expected
        assert max_steps > 1 or len(expected) < len(samples.pieces.rows)


def test_nothing_is_read_after_the_last_step() -> None:
    data, feed = data_of([pairs("a", 40)], "none", 3, eval_split=0.1)
    feed.position.samples_seen = 18
    assert not row_tables(data)[0].rows_read.any()


def test_an_eval_file_named_like_the_training_file_has_its_own_values() -> None:
    data, feed = data_of([pairs("a", 30)], "none", 1000, eval_sources=[pairs("a", 7, seed=9)])
    tables = {table.name: table for table in row_tables(data)}
    assert {name: len(table.rows) for name, table in tables.items()} == {"train.a": 30, "eval.a": 7}
    assert tables["train.a"].digest() != tables["eval.a"].digest()
    logps = {name: np.full((len(t.rows), 2), i, "f4") for i, (name, t) in enumerate(tables.items())}
    reference_pass.use_reference(list(tables.values()), logps)
    assert feed.train[0][3]["reference"].tolist() == [0.0, 0.0]
    assert feed.eval_sets["a"][3]["reference"].tolist() == [1.0, 1.0]


def test_a_row_without_a_value_enters_no_batch() -> None:
    samples = build_samples(pairs("a", 8), SampleShape("none", LENGTH, row_format=PAIRS))
    values = np.zeros((8, 2), np.float32)
    values[5, 1] = np.nan
    samples.pieces.rows.fill_column("reference", values)
    assert samples[4]["reference"].tolist() == [0.0, 0.0]
    with pytest.raises(DataError, match="row 5 has no reference value"):
        samples[5]


# ---- The work of a pass


def work_of(packing: str, count: int = 300) -> tuple[Any, list[RowTable], dict[str, np.ndarray]]:
    data, _ = data_of([pairs("a", count)], packing, 10**4, eval_split=0.1)
    tables = row_tables(data)
    missing = {t.name: np.ones((len(t.rows), 2), bool) for t in tables}
    return reference_pass._AnswersToEvaluate(tables, missing), tables, missing


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("world", [1, 3])
def test_every_answer_is_evaluated_once_and_ranks_do_the_same(packing: str, world: int) -> None:
    work, tables, _ = work_of(packing)
    rounds = work.plan_rounds(4, world)
    assert rounds.shape[1] == world
    items = rounds.reshape(-1)
    _, answers = work.locate_answers(items[items != FILLER])
    assert sorted(answers.tolist()) == list(range(2 * len(tables[0].rows)))
    by_rank = [work.count_positions(rounds[:, [rank]]) for rank in range(world)]
    assert max(by_rank) <= 1.1 * min(by_rank)


def test_answers_of_like_length_share_a_batch() -> None:
    work, tables, _ = work_of("none")
    ratio = work.count_positions(work.plan_rounds(4, 2)) / work.tokens
    assert work.tokens == tables[0].rows.total
    assert ratio < 1.2
    shape = work.shape  # what the batches are, not what is said of them
    rounds = work.plan_rounds(4, 2)
    batches = [shape.batch([work[i] for i in items]) for r in rounds for items in r.tolist()]
    assert sum(batch.targets.numel() for batch in batches) == work.count_positions(rounds)
    samples = tables[0].samples[0]  # in the order of the file, both sides of a pair in one batch
    in_order = [shape.batch([samples[i] for i in range(n, n + 4)]) for n in range(0, 200, 4)]
    tokens = samples.pieces.lengths[:200].sum()
    assert sum(batch.targets.numel() for batch in in_order) / tokens > 1.6


def test_only_missing_answers_are_evaluated() -> None:
    _, tables, missing = work_of("none")
    missing["train.a"][:] = False
    missing["train.a"][[3, 8], [1, 0]] = True
    work = reference_pass._AnswersToEvaluate(tables, missing)
    assert work.locate_answers(np.arange(len(work)))[1].tolist() == [7, 16]
    side = work.samples[0].pieces.rows
    assert work[0]["input_ids"].tolist() == side.ids(3)[side.second(3) :].tolist()
    assert work[1]["input_ids"].tolist() == side.ids(8)[: side.second(8)].tolist()


# ---- The file, and the parts of a pass


VALUES = {"train.a": (np.array([0, 1, 4]), np.array([-1.5, -2.0, -0.25], np.float32))}
ORIGIN = {"rows": {"train.a": "0"}, "model": "1"}


def test_a_file_holds_what_was_given() -> None:
    origin, values = files.decode(files.encode(ORIGIN, VALUES), "it")
    assert origin == ORIGIN
    for one, other in zip(values["train.a"], VALUES["train.a"], strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


def _odd_files() -> dict[str, bytes]:
    answers, logps = VALUES["train.a"]
    named = {"origin": '{"rows": {}}'}
    tensors = {"a.answers": answers, "a.logps": logps}
    made = {
        "another name": ({"a.answers": answers, "a.values": logps}, named),
        "a name more": (tensors | {"b": logps}, named),
        "NaN": (tensors | {"a.logps": logps * np.float32("nan")}, named),
        "other lengths": (tensors | {"a.answers": answers[:2]}, named),
        "another dtype": (tensors | {"a.logps": logps.astype(np.float64)}, named),
        "no origin": (tensors, {"rows": "{}"}),
        "no JSON": (tensors, {"origin": "{"}),
    }
    contents = {name: safetensors.numpy.save(*parts) for name, parts in made.items()}
    return contents | {"empty": b"", "cut": contents["NaN"][:-3], "text": b"no safetensors"}


@pytest.mark.parametrize("name", _odd_files())
def test_another_content_is_one_clear_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="run/x is no file of reference values") as caught:
        files.decode(_odd_files()[name], "run/x")
    assert "\n" not in str(caught.value)


def test_parts_survive_a_kill_and_damage_is_seen(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        files.write_part(tmp_path, number, ORIGIN | {"n": number}, VALUES)
    folder = tmp_path / files.PARTS
    (folder / "part-00004-00.safetensors.tmp").write_bytes(b"half")  # of a kill
    second = sorted(folder.iterdir())[1]
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    parts = files.read_parts(tmp_path)
    assert [origin["n"] for origin, _ in parts.intact.values()] == [1, 3]
    assert (parts.damaged, parts.highest) == ([second.name], 3)
    files.delete_parts(tmp_path)
    assert not folder.exists()
    files.delete_parts(tmp_path)
    assert not files.read_parts(tmp_path).intact


def test_a_full_disk_is_named_with_file_and_size(tmp_path: Path) -> None:
    """Both places that write: a part of the pass, and the file in a checkpoint."""
    values = {"train.a": (np.arange(5000), np.zeros(5000, np.float32))}
    content = files.encode(ORIGIN, values)
    state = tiny_state(tmp_path, content)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(StorageError, match=rf"part-00001-\w+.safetensors of {len(content):,}"):
            files.write_part(tmp_path, 1, ORIGIN, values)
        with pytest.raises(StorageError, match=rf"{files.FILE} of {len(content):,} bytes"):
            save(state, tmp_path / "run", CheckpointConfig(async_save=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not commit.committed_steps(tmp_path / "run")


# ---- A file in each checkpoint


def tiny_state(folder: Path, content: bytes, step: int = 1) -> TrainState:
    """Return a state of a small layer that has the file."""
    torch.manual_seed(step)
    return TrainState(torch.nn.Linear(4, 4), step=step, files={files.FILE: StateFile.of(content)})


CFG = CheckpointConfig(async_save=False)


def test_every_checkpoint_has_the_file_and_the_parts_go(tmp_path: Path) -> None:
    content = files.encode(ORIGIN, VALUES)
    files.write_part(tmp_path, 1, ORIGIN, VALUES)
    for step in (1, 2):
        path = Path(save(tiny_state(tmp_path, content, step), tmp_path, CFG))
        assert (path / files.FILE).read_bytes() == content
        assert files.FILE in commit.read_manifest(path)["files"]
        assert not (tmp_path / files.PARTS).exists()
    files.write_part(tmp_path, 1, ORIGIN, VALUES)
    state = tiny_state(tmp_path, content, 3)
    state.files.clear()  # of a run without a reference
    save(state, tmp_path, CFG)
    assert (tmp_path / files.PARTS).exists()


def test_a_store_keeps_the_parts_until_the_file_is_committed(tmp_path: Path) -> None:
    import bucket

    bucket.Store.quiet()
    root, content = parse_location(f"bucket://{tmp_path}/run"), files.encode(ORIGIN, VALUES)
    files.delete_parts(root)
    for number in (1, 2):
        files.write_part(root, number, ORIGIN, VALUES)
    assert len(files.read_parts(root).intact) == 2
    path = parse_location(save(tiny_state(tmp_path, content), root, CFG))
    assert (path / files.FILE).read_bytes() == content
    assert files.FILE in commit.read_manifest(path)["files"]
    assert not files.read_parts(root).intact
    (path / files.FILE).write_bytes(content[:-1])
    assert find_newest(root) is None


def test_a_bit_that_flips_in_memory_is_not_committed(tmp_path: Path) -> None:
    content = bytearray(files.encode(ORIGIN, VALUES))
    state = tiny_state(tmp_path, bytes(content))
    content[-1] ^= 4
    state.files[files.FILE] = StateFile(bytes(content), state.files[files.FILE].sha256)
    with pytest.raises(CheckpointError, match="is not what it was at the start of the run"):
        save(state, tmp_path, CFG)
    assert not commit.committed_steps(tmp_path)


def test_damage_at_rest_is_found_by_verify_and_by_a_resume(tmp_path: Path) -> None:
    """A short version of what `tests/damage.py` does to the same file."""
    values = {"train.a": (np.arange(3000), np.linspace(-9, -1, 3000, dtype=np.float32))}
    older, newer = (
        Path(save(tiny_state(tmp_path, files.encode(ORIGIN, values), step), tmp_path, CFG))
        for step in (1, 2)
    )
    content, chance, tried = (newer / files.FILE).read_bytes(), np.random.default_rng(0), 0
    for kind in ("flip", "cut", "page", "delete") * 3:
        at, changed = int(chance.integers(len(content))), bytearray(content)
        if kind == "flip":
            changed[at] ^= 1 << int(chance.integers(8))
        elif kind == "cut":
            del changed[at:]
        elif kind == "page":
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
        if kind == "delete":
            (newer / files.FILE).unlink()
        else:
            (newer / files.FILE).write_bytes(changed)
        report = verify_checkpoint(tmp_path)
        assert {file for file, _, _ in report.findings} == {
            f"checkpoints/{newer.name}/{files.FILE}"
        }
        for verify in ("bytes", "sizes"):
            assert find_newest(tmp_path, verify) == older
            (aside,) = newer.parent.glob(f"{newer.name}.bad-*")
            aside.rename(newer)
        (newer / files.FILE).write_bytes(content)
        assert verify_checkpoint(tmp_path).ok
        tried += 1
    assert tried == 12


def test_the_disk_preflight_counts_the_file(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    model = build_on_meta(ModelConfig(str(tmp_path / "model")))
    without = estimate_disk_use(model, tmp_path / "run", CFG, 100, 1)
    with_file = estimate_disk_use(model, tmp_path / "run", CFG, 100, 1, file_bytes=24_000)
    assert with_file.total - without.total == 24_000 * without.checkpoints
