"""What is refused of data and settings together, before training."""

from dataclasses import replace

import datasets
import pytest
from distributed import run_ranks
from feeds import Rank

from toolkit import ranks
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
)
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.prepare import PackingChoice, TrainingData, check_data
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import ConfigError, DataError


def feed(rows: int, eval_split: float = 0.0, max_repeats: float | None = None) -> PreparedFeed:
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * rows})
    return PreparedFeed(
        [EncodedSource("one", tokens, max_repeats=max_repeats)],
        SampleShape("bfd", 6),
        seed=1,
        global_batch=4,
        eval_split=eval_split,
    )


def config(**train: object) -> FinetuneConfig:
    settings = FinetuneTrainConfig(**({"per_device_train_batch_size": 4} | train))
    return FinetuneConfig(FinetuneModelConfig("x"), train=settings)


def check_feed(cfg: FinetuneConfig, feed: PreparedFeed, world_size: int = 1) -> TrainingData:
    run = Rank(ranks.rank(), world_size)
    data = TrainingData(cfg, feed, PackingChoice("bfd", "asked"), None, run)
    check_data(data)
    return data


def test_what_needs_evaluations_needs_data_for_them(capsys):
    stopping = config(early_stopping_patience=1, eval_steps=1)
    for cfg in (
        stopping,
        config(eval_prompts=["hello"]),
        replace(config(eval_steps=500), checkpoint=CheckpointConfig(keep_best=True)),
    ):
        with pytest.raises(ConfigError, match="nothing to evaluate on"):
            check_feed(cfg, feed(20))
        check_feed(cfg, feed(20, eval_split=0.5))
    check_feed(config(), feed(20))  # none of all these
    assert "WARNING" not in capsys.readouterr().out
    check_feed(config(eval_steps=500), feed(20))
    assert (
        "WARNING: train.eval_steps 500 has no effect, because there is nothing to"
        in capsys.readouterr().out
    )
    saving = CheckpointConfig(metric_for_best_model="bleu", keep_best=1)
    other = replace(config(eval_steps=500), checkpoint=saving)
    with pytest.raises(ConfigError, match=r"eval_bleu: expected .* eval_loss, eval_perp"):
        check_feed(other, feed(20, eval_split=0.5))


def test_less_than_a_step_is_refused():
    with pytest.raises(
        DataError, match="at least one step of 4 samples, but max_repeats allows only 3"
    ):
        feed(6, max_repeats=1).steps_for(1)
    assert feed(8, max_repeats=1).steps_for(1) == 1


def test_sources_that_are_evaluated_on_are_not_called_empty():
    """A source has `0 to evaluate` only if nothing at all is evaluated on."""
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8})
    one, other = EncodedSource("one", tokens), EncodedSource("other", tokens)
    settings = {"seed": 1, "global_batch": 4}
    shape = SampleShape("bfd", 6)
    assert "0 to evaluate" in PreparedFeed([one], shape, **settings).lines()[0]
    lines = PreparedFeed([one], shape, eval_sources=[other], **settings).lines()
    assert not any(" 0 to evaluate" in line for line in lines)
    assert lines[-1] == "other: 4 to evaluate"


def test_a_batch_larger_than_the_data_is_said_once():
    data = check_feed(config(), feed(20))
    assert not any("WARNING" in line for line in data.lines())
    (warning,) = [line for line in check_feed(config(), feed(4)).lines() if "WARNING" in line]
    assert "global batch of 4 samples is larger than the training data (2 samples)" in warning
    assert "each step reads it 2.0 times" in warning


def test_a_loaded_position_is_checked_against_batches_and_limits():
    data = check_feed(config(max_steps=3), feed(24, max_repeats=1))
    state = data.position.state_dict()
    with pytest.raises(DataError, match="global batch of 6 samples does not divide"):
        data.load_state_dict(state | {"global_batch": 6})
    with pytest.raises(DataError, match="at most 1 steps of 8 samples"):
        data.load_state_dict(state | {"global_batch": 8})
    data.load_state_dict(state | {"samples_seen": 8})
    assert [step for step, _ in data.steps(after=2)] == [3]


def _other_data(rank: int, world: int) -> None:
    check_feed(config(per_device_train_batch_size=2), feed(20), world)
    try:
        check_feed(config(per_device_train_batch_size=2), feed(20 + 2 * rank), world)
    except DataError as error:
        said = str(error)
    else:
        raise AssertionError("rank 1 reads other data, and nobody noticed")
    assert "rank 1 reads other data than rank 0 (" in said
    assert len(set(ranks.gather(said))) == 1


def test_ranks_that_read_other_data_are_refused():
    run_ranks(_other_data, 2)
