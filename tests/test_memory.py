"""Memory within a run: refused before loading, warned of, and an error that says what would fit."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, save_byte_tokenizer
from distributed import run_ranks, run_recipe_ranks
from test_planning import FULL, LENGTH, _config, _save, _wide
from test_recipe import flags
from tiny_models import tiny_config

from toolkit import ranks
from toolkit.config import PretrainConfig, model_settings, parse
from toolkit.errors import ConfigError, DataError
from toolkit.models import build_on_meta
from toolkit.planning import preflight
from toolkit.planning.automatic import (
    candidates_from,
    choose,
    list_candidates,
    set_accumulation,
)
from toolkit.planning.devices import this_host
from toolkit.planning.estimates import reserved_bytes
from toolkit.planning.fake_ranks import sharded
from toolkit.planning.measuring import is_out_of_memory, try_step
from toolkit.planning.preflight import (
    choose_candidate,
    in_subprocess,
    minimum_bytes,
    predict,
)
from toolkit.planning.search import make_plan, with_settings
from toolkit.planning.simulation import simulate, state_of

PLANTED = """
def causal_lm_loss(model, batch, **how):
    import torch

    if torch.distributed.get_rank() == 1:
        torch.empty(10**15)
    return training.causal_lm_loss(model, batch, **how)

"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return _save(_wide("llama", layers=1), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("more", [[], ["--optim.optim", "adafactor"], ["--lora.r", "8"]])
def test_what_is_refused_is_less_than_what_is_held(model: Path, more: list[str]) -> None:
    cfg = _config(model, *more)
    least = minimum_bytes(cfg, build_on_meta(model_settings(cfg)), 3, "cpu")
    held = state_of(cfg, 3, 0)
    assert 0 < least["parameters"] <= held.parameters
    assert least["gradients"] <= held.gradients
    assert least["optimizer state"] <= held.optimizer
    if not more:  # but for rows that do not divide, all of it
        total = sum(least.values()) - least["gathered parameters"]
        assert total == pytest.approx(held.total, rel=0.01)


def test_a_rank_gathers_no_experts_of_other_ranks(tmp_path: Path) -> None:
    """A run that fits would be refused."""
    sizes = {"num_local_experts": 16, "hidden_size": 64, "intermediate_size": 512}
    folder = _save(tiny_config("mixtral", **sizes), tmp_path)
    gathered = {}
    for parts in (1, 2, 4):
        cfg = _config(folder, "--sharding.expert_parallel", str(parts))
        base = build_on_meta(model_settings(cfg))
        gathered[parts] = minimum_bytes(cfg, base, 4, "cpu")["gathered parameters"]
    expert = 64 * 2 * 512
    assert gathered[1] == 16 * expert * 4
    assert gathered[2] == gathered[1] // 2
    # Every rank holds its experts completely, and gathers other parameters only.
    assert 0 < gathered[4] < expert * 4


def test_gradients_of_divided_experts_are_reduced_once(tmp_path: Path) -> None:
    """`accumulation: auto` of a device that has room for a rank's gradients, not for all."""
    sizes = {"num_local_experts": 16, "hidden_size": 64, "intermediate_size": 512}
    folder = _save(tiny_config("mixtral", **sizes), tmp_path)
    decided = {}
    for parts in (1, 4):
        cfg = _config(folder, "--sharding.expert_parallel", str(parts))
        memory = 4 * 4 * sum(p.numel() for p in build_on_meta(cfg.model).parameters()) // 2
        with sharded(cfg, 8, memory=memory) as (_, sharding):
            decided[parts] = sharding.accumulation
    assert decided == {1: "reduce_each", 4: "reduce_once"}


@pytest.mark.plans
def test_a_plan_that_does_not_fit_names_three_changes_with_their_costs(model: Path) -> None:
    cfg, device = _config(model, length=LENGTH, rows=32), this_host()
    needs = simulate(cfg, 2, device_type="cpu").peak.nbytes + reserved_bytes(device, (1, 2))
    fits = predict(cfg, 2, device, needs, failed=False)
    assert (fits.memory, fits.remedies) == (needs, "")
    tight = predict(cfg, 2, device, needs - 20_000_000, failed=False)
    assert tight.memory == needs
    assert tight.remedies.count("; ") == 2
    assert "per_device_train_batch_size 16, accumulation 2 (needs 1." in tight.remedies
    # It fits by its plan and has failed all the same: something smaller is wanted.
    assert "per_device_train_batch_size" not in fits.remedies
    recomputed = _config(model, FULL, length=LENGTH, rows=1)
    assert "another training" in predict(recomputed, 2, device, needs, failed=True).remedies


def test_an_error_of_memory_is_told_from_others() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(10**15)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("the size of tensor a must match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_plan_that_fails_ends_no_run(model: Path, monkeypatch: Any) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(preflight, "in_subprocess", fails)
    said = preflight._format_prediction(_config(model), 8, this_host(), 10**9)
    assert said == "note: the memory of a step could not be planned: RuntimeError: no such operator"


@pytest.mark.plans
def test_a_run_that_cannot_fit_is_refused_before_loading(tmp_path: Path, text_file: Path) -> None:
    config = _wide("llama", layers=8)
    config.hidden_size, config.intermediate_size, config.vocab_size = 2048, 4096, 300
    # Little is left to change but the number of devices: a plan each.
    more = ("--train.per_device_train_batch_size", "1", FULL, "--model.init", "random")
    more += ("--sharding.device_memory", "1.7GB")
    _save(config, tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    given = flags(tmp_path / "model", text_file, tmp_path / "run")
    done = run_recipe_ranks("pretrain", 2, *given, *more, cwd=tmp_path, kill_after=300)
    assert done.returncode == 1
    assert done.stderr.count("the run cannot fit: each of 2 rank(s) holds at least") == 1
    assert "1.7 GB are free" in done.stderr
    assert "are missing. Cheapest changes: " in done.stderr
    assert re.search(r"devices \d+.* \(needs \d\.\d GB, time x \d", done.stderr)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "random weights" not in done.stdout


@pytest.mark.plans
def test_running_out_of_memory_ends_all_ranks_with_what_would_fit(
    tmp_path: Path, tiny_llama: Path, text_file: Path
) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "pretrain.py"
    text = recipe.read_text("utf-8").replace(
        "loss = objective(model", "loss = causal_lm_loss(model"
    )
    recipe.write_text(text.replace("\ndef pretrain(", PLANTED + "\ndef pretrain("), "utf-8")
    given = flags(tiny_llama, text_file, tmp_path / "run")
    done = run_recipe_ranks(recipe, 2, *given, cwd=tmp_path, kill_after=300)
    assert done.returncode
    (line,) = [one for one in done.stderr.splitlines() if "Cheapest changes" in one]
    assert line.startswith("[rank 1] error: out of memory on rank 1: RuntimeError: ")
    assert "can't allocate memory" in line
    assert "(batch 8 x 32 tokens; " in line
    assert "activation_checkpointing selective (needs 1.0 GB, time x " in line
    assert done.stderr.splitlines()[-1] == line


# ---- `auto` --------------------------------------------------------------------------------------


def _auto(model: Path, *more: str) -> Any:
    cls = PretrainConfig
    given = {"data.sequence_length": LENGTH, "sharding.param_dtype": "float32"}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return parse(cls, [f"--model.name_or_path={model}", "--model.init=random", *flags, *more])


AUTO_RECOMPUTED = "--sharding.activation_checkpointing=auto"
AUTO_BATCH = ("--train.per_device_train_batch_size=auto", "--train.global_batch_size=16")


@pytest.mark.plans
def test_recomputation_is_chosen_by_what_fits(model: Path) -> None:
    cfg, device = (
        _auto(model, AUTO_RECOMPUTED, "--train.per_device_train_batch_size=32"),
        this_host(),
    )
    plain, full = (
        make_plan(with_settings(cfg, "sharding", activation_checkpointing=mode), 2, device, None)
        for mode in ("none", "full")
    )
    for memory, chosen in (
        (plain.estimate.memory, "none"),
        (full.estimate.memory, "full"),
        (full.estimate.memory - 1, "full"),  # nothing fits: the last, which is then tried
    ):
        place, plan = choose(cfg, 2, device, memory)
        assert plan.cfg.sharding.activation_checkpointing == chosen
        assert next(candidates_from(cfg, 2, place)) == plan.cfg


@pytest.mark.plans
def test_the_batch_is_chosen_by_what_fits_and_the_global_batch_stays(model: Path) -> None:
    cfg, device = _auto(model, *AUTO_BATCH), this_host()
    (group,) = list_candidates(cfg, 2)
    assert [c.train.micro_batch for c in group] == [8, 4, 2, 1]
    assert {c.train.micro_batch * c.train.gradient_accumulation_steps for c in group} == {8}
    needs = [make_plan(c, 2, device, None).estimate.memory for c in group]
    assert needs == sorted(needs, reverse=True)
    for place, memory in ((0, needs[0]), (1, needs[0] - 1)):
        assert choose(cfg, 2, device, memory)[0] == place
    with pytest.raises(DataError, match="does not divide"):
        list_candidates(cfg, 3)
    # With recomputation too: the first of those is tried before any batch is recomputed.
    both = _auto(model, *AUTO_BATCH, AUTO_RECOMPUTED)
    assert choose(both, 2, device, needs[3])[1].cfg.sharding.activation_checkpointing == "none"


def test_a_batch_that_is_chosen_needs_a_global_batch(model: Path) -> None:
    with pytest.raises(ConfigError, match="auto needs train"):
        _auto(model, AUTO_BATCH[0])
    with pytest.raises(ConfigError, match="is not a size"):
        _auto(model, "--sharding.device_memory=much")
    with pytest.raises(ConfigError, match="has no effect without activation_checkpointing"):
        _auto(model, AUTO_RECOMPUTED, "--sharding.activation_offload=true")


@pytest.mark.plans
def test_a_tried_step_that_does_not_fit_says_so(model: Path) -> None:
    cfg = _auto(model, "--train.per_device_train_batch_size=8")
    cpu = torch.device("cpu")
    peak = in_subprocess(try_step, cfg, 2, 0, cpu, 2**30, 0)
    assert peak == pytest.approx(
        simulate(cfg, 2, device_type="cpu", gloo=False).peak.nbytes, rel=0.1
    )
    assert in_subprocess(try_step, cfg, 2, 0, cpu, 2**30, 2**30) is None  # beside the reserve
    assert in_subprocess(try_step, cfg, 2, 0, cpu, 10_000_000, 0) is None  # torch is refused memory


def _chosen(rank: int, world: int, cfg: Any, memories: list[int]) -> tuple[int, int]:
    """Return batch and accumulation of what ranks with different memories choose."""
    own = with_settings(cfg, "sharding", device_memory=str(memories[rank]))
    run: Any = SimpleNamespace(
        world_size=world, rank=rank, device=torch.device("cpu"), log=ranks.log_once
    )
    found = choose_candidate(own, run, this_host(), max(memories))
    return found.train.micro_batch, found.train.gradient_accumulation_steps


@pytest.mark.plans
def test_ranks_of_unlike_memory_choose_alike(model: Path) -> None:
    cfg, device = _auto(model, *AUTO_BATCH), this_host()
    needs = [make_plan(c, 2, device, None).estimate.memory for c in list_candidates(cfg, 2)[0]]
    # Rank 0 plans for what it has; rank 1 has less, and its device says so.
    most = needs[0] + 1000  # a real step has some bytes that no plan has
    assert run_ranks(_chosen, 2, cfg, [most, most]) == [(8, 1)] * 2
    assert run_ranks(_chosen, 2, cfg, [most, needs[1] + 1000]) == [(4, 2)] * 2


@pytest.mark.plans
def test_a_run_keeps_what_it_chose(model: Path, text_file: Path, tmp_path: Path) -> None:
    save_byte_tokenizer(model)
    four = _auto(model, "--train.per_device_train_batch_size=4", "--train.global_batch_size=64")
    full = set_accumulation(with_settings(four, "data", sequence_length=32), 2)
    memory = make_plan(full, 2, this_host(), None).estimate.memory + 1_000_000
    asked = ("--train.per_device_train_batch_size", "auto", "--train.global_batch_size", "64")
    more = ("--model.init", "random", "--sharding.device_memory", str(memory))
    given = (*flags(model, text_file, tmp_path / "run"), *asked, *more, "--train.max_steps")
    first = run_recipe_ranks("pretrain", 2, *given, "2", cwd=tmp_path, kill_after=300)
    assert first.returncode == 0, first.stderr
    (line,) = re.findall(r"auto       (per_device.*)", first.stdout)
    batch, repeats = map(int, re.findall(r"\d+", line))
    assert 1 < batch < 32
    assert batch * repeats * 2 == 64
    assert f"64 samples = {batch} a device x {repeats} accumulated x 2" in first.stdout
    assert "as tried on the device" in first.stdout
    kept = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["train"]
    assert (kept["per_device_train_batch_size"], kept["gradient_accumulation_steps"]) == (
        batch,
        repeats,
    )
    again = run_recipe_ranks(
        "pretrain", 2, *given[:-2], "80GB", "--train.max_steps", "3", cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    assert "as tried on the device" not in again.stdout
    assert f"auto       {line}" in again.stdout
    assert "changed    train" not in again.stdout.replace("changed    train.max_steps", "")
