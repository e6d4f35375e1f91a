"""What is refused of data and settings together, before training."""

import datasets
import pytest
from distributed import run_ranks

from toolkit import ranks
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
)
from toolkit.data.checks import check_feed
from toolkit.data.feed.map_style import Feed
from toolkit.data.feed.sets import Shape, Source
from toolkit.errors import ConfigError, DataError


def feed(rows: int, eval_split: float = 0.0, max_repeats: float | None = None) -> Feed:
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * rows})
    return Feed(
        [Source("one", tokens, None, max_repeats)],
        Shape("bfd", 6),
        seed=1,
        global_batch=4,
        eval_split=eval_split,
    )


def config(**train: object) -> FinetuneConfig:
    return FinetuneConfig(FinetuneModelConfig("x"), train=FinetuneTrainConfig(**train))


def test_what_needs_evaluations_needs_data_for_them():
    stopping = config(early_stopping_patience=1, eval_steps=1)
    for cfg in (
        stopping,
        config(eval_prompts=["hello"]),
        FinetuneConfig(FinetuneModelConfig("x"), checkpoint=CheckpointConfig(keep_best=True)),
    ):
        with pytest.raises(ConfigError, match="nothing to evaluate on"):
            check_feed(cfg, feed(20))
        check_feed(cfg, feed(20, eval_split=0.5))
    check_feed(config(), feed(20))
    saving = CheckpointConfig(metric_for_best_model="accuracy", keep_best=1)
    other = FinetuneConfig(FinetuneModelConfig("x"), checkpoint=saving)
    with pytest.raises(ConfigError, match=r"eval_accuracy is none of .* eval_loss, eval_perp"):
        check_feed(other, feed(20, eval_split=0.5))


def test_less_than_a_step_is_refused():
    with pytest.raises(DataError, match="at least one step of 4 samples, max_repeats allows 3"):
        feed(6, max_repeats=1).steps_for(1)
    assert feed(8, max_repeats=1).steps_for(1) == 1


def _other_data(rank: int, world: int) -> None:
    check_feed(config(), feed(20))
    try:
        check_feed(config(), feed(20 + 2 * rank))
    except DataError as error:
        said = str(error)
    else:
        raise AssertionError("rank 1 reads other data, and nobody noticed")
    assert "rank 1 reads another than rank 0 (" in said
    assert len(set(ranks.gather(said))) == 1


def test_ranks_that_read_other_data_are_refused():
    run_ranks(_other_data, 2)
