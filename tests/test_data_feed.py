"""What recipes read from: mixtures, refusals of other data, evaluation sets, streams of files."""

import json

import datasets
import numpy as np
import pytest
from accelerate import Accelerator
from feeds import APART, Rank, encode_row, lockstep, rows, samples, source, stream, tokens_of
from sharded import columns

from toolkit.data.feed.feed import Feed
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.order.mixture import Mixture, SampleOrder
from toolkit.data.order.position import train_batches
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encoded import EncodedExample, EncodedSource
from toolkit.errors import DataError
from toolkit.training.launch import Run

LENGTHS = [5, 9, 3, 16, 7, 2, 11, 4, 8, 6, 13, 1, 10, 12, 5, 9]


def feed(*sources, shape: SampleShape | None = None, **settings) -> PreparedFeed:
    shape = shape or SampleShape("bfd", 16)
    return PreparedFeed(list(sources), shape, **({"seed": 1, "global_batch": 4} | settings))


def read(of: Feed, steps: int, world: int = 1) -> list[list[list[int]]]:
    size = of.position.global_batch // world
    return [batch for batch, _ in lockstep(lambda: of, None, world, size, steps)]


# Mixtures


def test_shares_are_held_at_every_position():
    for seed in range(25):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 9))
        sizes = rng.integers(1, 200, n).tolist()
        weights = rng.choice([1, 2, 5, 0.1, 0.33, 7.5], n).tolist()
        mixture = Mixture(sizes, weights, seed)
        draws = mixture.draws(0, 2000)
        given = np.stack([np.cumsum(draws.sources == s) for s in range(n)], 1)
        wanted = np.arange(1, 2001)[:, None] * np.array(weights) / sum(weights)
        assert np.abs(given - wanted).max() < 3
        assert mixture.total is None
        for at in (0, 1, 77, 2000):
            assert mixture.counts(at) == (given[at - 1].tolist() if at else [0] * n)
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        for s in range(n):
            own = draws.samples[draws.sources == s]
            assert ((own >= firsts[s]) & (own < firsts[s + 1])).all()
            for start in range(0, len(own) - sizes[s], sizes[s]):  # each exactly once a pass
                assert len(set(own[start : start + sizes[s]].tolist())) == sizes[s]
        for start, count in ((0, 1), (3, 500), (1234, 7)):
            part = mixture.draws(start, count)
            for a, b in zip(part, draws, strict=True):
                assert np.array_equal(a, b[start : start + count])


def test_whole_weights_are_exact_in_each_block():
    sources = Mixture([50, 50, 50], [1, 2, 5], 0).draws(0, 800).sources.reshape(100, 8)
    assert {tuple(np.bincount(block)) for block in sources} == {(1, 2, 5)}
    # And far out, at once.
    far = Mixture([50, 50], [1, 3], 0)
    assert np.bincount(far.draws(10**10, 400).sources).tolist() == [100, 300]
    assert far.counts(4 * 10**9) == [10**9, 3 * 10**9]


def test_a_source_that_is_used_up_leaves_its_share_to_the_others():
    mixture = Mixture([10, 100, 100], [6, 1, 3], 2, [2, None, 1])
    # 20 samples of the first are read by position 33; then the others share 1 to 3.
    assert mixture.counts(32)[0] < 20 == mixture.counts(34)[0] == mixture.counts(5000)[0]
    later = np.bincount(mixture.draws(40, 80).sources, minlength=3)
    assert later.tolist() == [0, 20, 60]
    # The third ends after a pass; from then on only the second gives.
    assert mixture.counts(5000) == [20, 4880, 100]
    assert mixture.total is None
    assert set(mixture.draws(300, 200).sources.tolist()) == {1}
    ends = Mixture([10, 30], [1, 1], 0, [1.5, 2])
    assert ends.total == 75
    assert ends.counts(75) == [15, 60]
    assert len(ends.draws(0, 75).samples) == 75
    with pytest.raises(AssertionError):
        ends.draws(70, 6)
    assert Mixture([4], [1], 0, [0.01]).total == 1


# The feed


def test_one_text_is_read_as_ever():
    tokens = rows([40] * 30).remove_columns("spans")
    of = feed(EncodedSource("text", tokens), shape=SampleShape("wrapped", 16), eval_split=0.1)
    every = samples(tokens, "wrapped", 16)
    train = samples(tokens, "wrapped", 16, range(67))  # of 75 the last tenth is held out
    batches = train_batches(SampleOrder(67, 1), 0, 20, 4, 1, 0, 1)
    expected = [[train[i]["input_ids"].tolist() for i in batch] for batch in batches]
    assert read(of, 20) == expected
    (held,) = of.evals(Rank(), per_device_batch_size=7).values()
    assert [s for b in held for s in tokens_of(b) if s] == [
        every[i]["input_ids"].tolist() for i in range(67, 75)
    ]


def test_other_data_are_refused():
    def two(*, lengths=LENGTHS, weights=(1, 2), names=(0, 1), limit=None, shape=None):
        return feed(
            source(lengths, names[0], weight=weights[0], max_repeats=limit),
            source(LENGTHS[:9], names[1], weight=weights[1]),
            shape=shape,
        )

    state = json.loads(json.dumps(two().position.state_dict()))
    two().position.load_state_dict(state)
    for other, said in (
        (two(weights=(1, 3)), "counts on the weight of source 1 2, this run has 3"),
        (two(limit=9), "counts on max_repeats of source 0 nothing, this run has 9"),
        (two(names=(2, 1)), r"counts on the sources \['source 0', 'source 1'\]"),
        (two(shape=SampleShape("none", 16)), "counts on data.packing bfd, this run has none"),
        (
            two(shape=SampleShape("bfd", 17)),
            "sequence_length 16, this run has 17",
        ),
        # As many samples, of other rows.
        (two(lengths=[*LENGTHS[:-1], 8]), "the lengths of the rows of source 0 .digest."),
    ):
        with pytest.raises(DataError, match=said):
            other.position.load_state_dict(state)
        assert other.position.samples_seen == 0
    # What a single source is called does not matter.
    one = feed(source(LENGTHS, 0)).position.state_dict()
    renamed = feed(EncodedSource("moved", rows(LENGTHS)))
    renamed.position.load_state_dict(one)


def test_steps_and_passes():
    of = feed(source(LENGTHS), shape=SampleShape("none", 16))
    assert len(of) == 16
    assert [of.steps_for(e) for e in (0.1, 1, 1.2, 3)] == [1, 4, 5, 12]
    of.check_steps(10**6)
    limited = feed(source(LENGTHS, max_repeats=1.5), shape=SampleShape("none", 16), global_batch=5)
    assert limited.order.total == 24
    # 24 samples are 4 whole batches of 5; a pass and a half is what they allow.
    assert [limited.steps_for(e) for e in (1, 1.5)] == [4, 4]
    limited.check_steps(4)
    for refuse in (lambda: limited.steps_for(2), lambda: limited.check_steps(5)):
        with pytest.raises(DataError, match=r"at most 4 steps of 5 samples.*max_repeats"):
            refuse()
    with pytest.raises(DataError, match="at most 4 steps"):
        next(limited.steps(Rank(), 5, per_device_batch_size=5))
    assert len(read(limited, 4)) == 4
    for done in (0, -3):  # a run that has more steps than it now asks for
        assert list(limited.steps(Rank(), done, per_device_batch_size=5)) == []
    of.check_enough(16)
    with pytest.raises(DataError, match="for each of the 17 ranks, got 16 of 16 tokens"):
        of.check_enough(17)
    with pytest.raises(DataError, match="does not divide into micro-batches"):
        next(of.steps(Rank(0, 3), 1, per_device_batch_size=1))
    weighted = feed(source([8] * 10, 0, weight=3), source([2] * 10, 1, weight=1))
    assert weighted.tokens_of_step() == pytest.approx(4 * (0.75 * 16 + 0.25 * 10))


def test_streams_need_weights_and_whole_passes():
    with pytest.raises(DataError, match=r"expected a weight .* of each stream"):
        StreamFeed(
            [stream(LENGTHS, 0), stream(LENGTHS, 1)], SampleShape("bfd", 16), seed=0, global_batch=2
        )
    with pytest.raises(DataError, match=r"whole number of passes as max_repeats of source 0.*1\.5"):
        StreamFeed(
            [stream(LENGTHS, max_repeats=1.5)], SampleShape("bfd", 16), seed=0, global_batch=2
        )


@pytest.mark.parametrize("packing", ["bfd", "none", "wrapped"])
def test_evaluation_is_even_and_reads_each_token_once(packing):
    shape = SampleShape(packing, 16)
    both = [source(LENGTHS * 4, 0), source(LENGTHS * 2, 1)]
    of = feed(*both, shape=shape, eval_split=0.25)
    trained = {t for b in read(of, of.steps_for(1)) for s in b for t in s}
    for world in (1, 2, 3):
        found: dict[str, list[int]] = {}
        for rank in range(world):
            for name, batches in of.evals(Rank(rank, world), per_device_batch_size=2).items():
                got = list(batches)
                assert all(len(b["input_ids"]) == 2 for b in got)
                found.setdefault(name, []).append(len(got))
                labelled = [b["labels"][b["labels"] >= 0].tolist() for b in got]
                found.setdefault(f"{name} tokens", []).extend(t for b in labelled for t in b)
        for number, n in enumerate((64, 32)):
            name = f"source {number}"
            assert len(set(found[name])) == 1
            tokens = found[f"{name} tokens"]
            assert len(set(tokens)) == len(tokens) > n / 2
            assert not trained & set(tokens)
            assert {t // APART for t in tokens} == {number + 1}
    # The rows that are held out are the same for every seed, and max_eval_samples picks of them.
    fewer = feed(*both, shape=shape, eval_split=0.25, seed=9, max_eval_samples=1)
    assert len(fewer) == len(of)
    assert [len(s) for s in fewer.eval_sets.values()] == [1, 1]
    given = feed(both[0], shape=shape, eval_split=0.5, eval_sources=[both[1]], max_eval_samples=3)
    assert list(given.eval_sets) == ["source 1"]
    assert len(given) == len(feed(both[0], shape=shape))
    assert feed(both[0]).evals(Rank(), per_device_batch_size=1) == {}


# Through Accelerate, with workers


def real_run() -> Run:
    accelerator = Accelerator(cpu=True)
    return Run(accelerator, accelerator.device, 0, 1)


@pytest.mark.parametrize("packing", ["bfd", "none"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_real_run_with_workers_reads_the_same(packing, streamed):
    shape = SampleShape(packing, 16)

    def make():
        if streamed:
            mixed = [stream(LENGTHS * 3, 0, shards=3, weight=2), stream(LENGTHS, 1, weight=1)]
            return StreamFeed(mixed, shape, seed=1, global_batch=4, window=7)
        return feed(source(LENGTHS * 3, 0, weight=2), source(LENGTHS, 1, weight=1), shape=shape)

    expected = read(make(), 12)
    run = real_run()
    for workers in (0, 2):
        of, got = make(), []
        for micro_batches in of.steps(run, 8, per_device_batch_size=2, workers=workers):
            assert len(micro_batches) == 2
            for b in micro_batches:
                assert b.n_targets == int((b.targets != -100).sum())
            got.append([s for b in micro_batches for s in tokens_of(columns(b))])
            of.position.advance()
        assert got == expected[:8]
        # A worker had read ahead; the position had not.
        other = make()
        other.position.load_state_dict(json.loads(json.dumps(of.position.state_dict())))
        assert read(other, 4) == expected[8:]


# Streams


def test_a_stream_reads_files_in_another_order_each_pass(tmp_path):
    for file in range(4):
        part = rows([3] * 40).select(range(10 * file, 10 * file + 10))
        part.to_parquet(str(tmp_path / f"{file}.parquet"))

    def make():
        read_in = datasets.load_dataset(
            "parquet", data_files=str(tmp_path / "*.parquet"), split="train", streaming=True
        )
        assert read_in.num_shards == 4
        whole = StreamSource(
            "files", read_in, lambda raw, n: encode_row(raw | {"spans": [0, 3]}, n)
        )
        return StreamFeed([whole], SampleShape("none", 8), seed=3, global_batch=2, window=10)

    of = make()
    batches = read(of, 60)
    tokens = [s[0] for b in batches for s in b]
    usable = [APART + 3 * i for i in range(40) if (APART + 3 * i) % 7]
    files = [[(t - APART) // 30 for t in tokens[i : i + len(usable)]] for i in (0, len(usable))]
    assert sorted(tokens[: len(usable)]) == usable
    orders = [list(dict.fromkeys(order)) for order in files]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3]
    assert orders[0] != orders[1]
    assert tokens[: len(usable)] != usable  # rows are shuffled too
    place = of.position.stream["0"]["sources"]["files"]["place"]
    assert place["at"][0] == 120 // len(usable)
    assert place["left_out"] > 0
    states = [s for _, s in lockstep(make, None, 1, 2, 25)]
    for at in (3, 13, 24):
        again = make()
        again.position.load_state_dict(json.loads(states[at]))
        assert read(again, 5) == batches[at + 1 : at + 6]


def test_wrapped_streams_lose_no_token():
    of = StreamFeed([stream(LENGTHS)], SampleShape("wrapped", 16), seed=0, global_batch=1, window=5)
    tokens = [t for b in read(of, 11) for s in b for t in s]
    left_out = [
        n for n, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True) if (APART + end - n) % 7 == 0
    ]
    whole = sum(LENGTHS) - sum(left_out)
    assert len(set(tokens[:whole])) == whole
    batch = next(of.steps(Rank(), 1, per_device_batch_size=1))[0]
    assert set(batch) == {"input_ids", "labels"}


def test_a_stream_that_ends_says_so():
    def make(**settings):
        source = stream(LENGTHS, **settings)
        return StreamFeed([source], SampleShape("none", 16), seed=0, global_batch=4)

    for workers in (0, 1):
        steps = make(max_repeats=2).steps(Rank(), 9, per_device_batch_size=4, workers=workers)
        for _ in range(8):  # two passes over 16 rows
            next(steps)
        with pytest.raises(DataError) as caught:
            next(steps)
        assert str(caught.value) == (
            "the data ended after 8 steps of 4 samples: max_repeats allows no more passes over "
            "source 0; set train.max_steps to 8, raise max_repeats, or add data"
        )
    with pytest.raises(DataError, match=r"set train.max_steps"):
        make().steps_for(1)
    with pytest.raises(DataError, match="expected a step that was read"):
        make().position.advance()
    empty = StreamFeed(
        [StreamSource("nothing", stream(LENGTHS).rows, lambda raw, number: BadRow("x"))],
        SampleShape("bfd", 16), seed=0, global_batch=1,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"got none from 16 rows \(16 were skipped"):
        next(empty.steps(Rank(), 1, per_device_batch_size=1))


def test_the_first_rows_of_a_stream_say_what_a_step_holds():
    def make(spans):
        read_in = stream([8] * 30).rows
        plain = StreamSource(
            "plain", read_in, lambda raw, n: EncodedExample(np.array(raw["input_ids"]), spans)
        )
        short = stream([2] * 30, 1, weight=3)
        plain.weight = 1
        return StreamFeed([plain, short], SampleShape("none", 16), seed=0, global_batch=4, window=3)

    of = make([(0, 8)])
    of.check_enough(2)
    seen = {s.source.name: s.row_counts() | {"samples": len(s.items)} for s in of.first_windows}
    assert [(n, s["rows_read"], s["samples"] + s["left_out"]) for n, s in seen.items()] == [
        ("plain", 6, 6), ("source 1", 27, 27)
    ]  # fmt: skip
    assert of.tokens_of_step() == 4 * (0.25 * 8 + 0.75 * 2)
    assert of.position.state_dict()["stream"] is None  # looking does not read
    for spans in ([], [(0, 1)]):
        with pytest.raises(
            DataError, match="supervised tokens in the stream plain, but its first 6 rows"
        ):
            make(spans).check_enough(1)


def test_a_stream_says_what_it_left_out_and_cut_off():
    def encode(raw, number):
        if number == 3:
            return EncodedExample(np.zeros(0, np.int32), [])
        if number % 5 == 4:
            return BadRow(f"row {number}: no fifths", "a fifth")
        row = encode_row(raw, number)
        return EncodedExample(row.input_ids, row.spans, number % 2)

    def make():
        one = StreamSource("one", stream(LENGTHS).rows, encode, weight=1)
        shape = SampleShape("none", 16)
        other = stream(LENGTHS, 1, weight=1)
        return StreamFeed([one, other], shape, seed=0, global_batch=4, window=2)

    of = make()
    of.check_enough(1)  # looks at a window of each, which is not counted
    assert of.reading_lines() == []
    states = [json.loads(state) for _, state in lockstep(make, None, 1, 4, 12)]
    results = [encode(raw, i) for _ in range(9) for i, raw in enumerate(stream(LENGTHS).rows)]
    seen = set()
    for at, state in enumerate(states):
        of = make()
        of.position.load_state_dict(state)
        one = of.position.stream["0"]["sources"]["one"]
        place, read = one["place"], one["read"]
        part = results[: read["rows_read"]]
        bad = [r for r in part if isinstance(r, BadRow)]
        empty = [r for r in part if isinstance(r, EncodedExample) and not len(r.input_ids)]
        reasons = {"a fifth": len(bad), "no token": len(empty)}
        assert read.get("reasons", {}) == {reason: n for reason, n in reasons.items() if n}
        assert read.get("left_out", 0) == len(bad) + len(empty)
        cut = [r.cut_off for r in part if isinstance(r, EncodedExample) and len(r.input_ids)]
        assert (read.get("truncated", 0), read.get("cut_off", 0)) == (sum(map(bool, cut)), sum(cut))
        assert read["rows_read"] >= place.get("rows_read", 0)
        seen.add(read["rows_read"])
        if at in (1, 4, 7):  # continued there, the counts go on as if nothing had happened
            again = [json.loads(s) for _, s in lockstep(make, state, 1, 4, 3)]
            assert again == states[at + 1 : at + 4]
    assert len(seen) > 3
    passes = place["at"][0]
    assert passes >= 1
    said = of.reading_lines()
    assert said[0] == (
        f"one: {read['rows_read']} rows read ({passes} "
        f"{'pass' if passes == 1 else 'passes'} done), {read['left_out']} skipped, "
        f"{read['truncated']} truncated ({read['cut_off']} tokens cut off)"
    )
    assert f"  skipped {len(bad)}: a fifth (the first: row 4: no fifths)" in said
    assert feed(source(LENGTHS)).reading_lines() == []


def test_a_bad_row_of_a_stream_ends_the_run_with_its_own_message():
    def encode(raw, number):
        if number == 7:
            raise DataError("file.jsonl line 8: expected messages, got nothing")
        return EncodedExample(np.array(raw["input_ids"], np.int32), [(0, len(raw["input_ids"]))])

    bad = StreamSource("bad", stream(LENGTHS).rows, encode)
    for rank, workers in ((0, 0), (1, 1)):
        of = StreamFeed([bad], SampleShape("none", 16), seed=0, global_batch=2, window=4)
        with pytest.raises(DataError, match=r"^file.jsonl line 8: expected messages"):
            list(of.steps(Rank(rank, 2), 9, per_device_batch_size=1, workers=workers))


def test_a_stream_refuses_other_data():
    def make(*, window=7, lengths=LENGTHS, weights=(1, 1), shards=1, limit=None, seed=0):
        mixed = [
            stream(lengths, 0, shards, weight=weights[0], max_repeats=limit),
            stream(LENGTHS, 1, weight=weights[1]),
        ]
        return StreamFeed(mixed, SampleShape("bfd", 16), seed=seed, global_batch=2, window=window)

    of = make()
    read(of, 3)
    state = json.loads(json.dumps(of.position.state_dict()))
    for other, said in (
        (make(window=8), "the samples of a window 7, this run has 8"),
        (make(weights=(1, 2)), "the weight of source 1 1, this run has 2"),
        (make(shards=2), "the shards of source 0 1, this run has 2"),
        (make(limit=3), "max_repeats of source 0 nothing, this run has 3"),
        (make(seed=4), "seed 0, this run has 4"),
    ):
        with pytest.raises(DataError, match=said):
            other.position.load_state_dict(state)
    shorter = make(lengths=[1])
    shorter.position.load_state_dict(state)
    with pytest.raises(DataError, match="the rows of the stream have changed"):
        read(shorter, 1)
    prepared = feed(source(LENGTHS, 0))
    with pytest.raises(DataError, match="prepared before the run, this run reads streams"):
        make().position.load_state_dict(prepared.position.state_dict())
    with pytest.raises(
        DataError, match=r"one in streams \(data.streaming\), this run reads data that were"
    ):
        prepared.position.load_state_dict(state)
