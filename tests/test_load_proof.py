"""A loaded model holds the bytes of its files, and a resumed base those of the first start."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh

from toolkit import checkpoint, ranks
from toolkit.adapters.lora import add_adapters
from toolkit.config import CheckpointConfig, LoraConfig, ModelConfig, ShardingConfig
from toolkit.errors import CheckpointError, LoadingError
from toolkit.formats import local_tensor
from toolkit.loading import load_pretrained, pretrained
from toolkit.models import build_on_meta
from toolkit.models.quantise import quantise_on_meta

FP32 = ShardingConfig(param_dtype="float32")
SAVING = CheckpointConfig()
Q = ["q_proj"]
Q_WEIGHT = "model.layers.1.self_attn.q_proj.weight"
EXPERT_WEIGHT = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bases")
    kinds = ("llama", "qwen3_moe")
    return {kind: str(tiny.save(tiny.tiny_model(kind), root / kind, kind)) for kind in kinds}


def _flip_after(load: Any, name: str, rank: int) -> Any:
    """Return the loader with one byte of a tensor changed behind it, on one rank."""

    def flipped(model: Any, *arguments: Any, **options: Any) -> Any:
        info = load(model, *arguments, **options)
        if ranks.rank() == rank:
            local = local_tensor(model.state_dict(keep_vars=True)[name]).detach()
            local.view(-1)[-1:].view(torch.uint8)[0] ^= 4
        return info

    return flipped


def ends_of_loads(rank: int, world: int, folders: dict[str, str], runs: str) -> dict[str, str]:
    """Return the errors of loads and resumes, some with a byte that changes on the last rank."""
    cases = {
        "plain": ("llama", LoraConfig(r=2, target_modules=Q), Q_WEIGHT),
        "experts": ("qwen3_moe", LoraConfig(r=2, target_modules=Q), EXPERT_WEIGHT),
        "full": ("llama", None, Q_WEIGHT),
    }
    ends = {}
    for case, (kind, lora, name) in cases.items():
        for when in ("no flip", "load", "resume"):
            model = build_on_meta(ModelConfig(folders[kind]))
            model = model if lora is None else add_adapters(model, lora)
            apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
            run, loader = Path(runs, case), pretrained.convert.run_loader
            with pytest.MonkeyPatch.context() as patched:
                if when != "no flip":
                    flipped = _flip_after(loader, name, world - 1)
                    patched.setattr(pretrained.convert, "run_loader", flipped)
                try:
                    load_pretrained(model, folders[kind], "cpu", prove=when != "resume")
                    state = checkpoint.TrainState(model, step=1)
                    if when == "no flip":
                        checkpoint.save(state, run, SAVING)
                    elif when == "resume" and lora is not None:
                        checkpoint.resume(state, run, SAVING)
                    ends[f"{case}, {when}"] = ""
                except (LoadingError, CheckpointError) as error:
                    ends[f"{case}, {when}"] = str(error)
    return ends


def test_a_byte_of_the_base_that_changes_at_a_load_or_a_resume_is_an_error(folders, tmp_path):
    for ends in run_ranks(ends_of_loads, 2, folders, str(tmp_path)):
        assert [case for case, error in ends.items() if not error] == [
            *("plain, no flip", "experts, no flip", "full, no flip", "full, resume")
        ]
        for case, error in ends.items():
            name = EXPERT_WEIGHT if "experts" in case else Q_WEIGHT
            expected = {
                "load": f"memory does not hold the weights of .*: 1 tensor.*: {name}",
                "resume": f"is not the base that the run started from: 1 tensor.*: {name}",
            }
            if error:
                assert re.search(expected[case.split(", ")[1]], error), (case, error)


def test_4_bits_are_compared_with_the_first_start(tmp_path):
    """Their values are in no file."""
    lora = LoraConfig(r=2, target_modules=Q, load_in_4bit=True)
    model = tiny.tiny_model("llama", hidden_size=64, intermediate_size=64)
    folder = tiny.save(model, tmp_path / "model", "llama")

    def start() -> checkpoint.TrainState:
        model = build_on_meta(ModelConfig(str(folder)))
        quantise_on_meta(model, lora, "float32")
        model = add_adapters(model, lora)
        load_pretrained(model, folder, "cpu")
        return checkpoint.TrainState(model, step=1)

    checkpoint.save(start(), tmp_path / "run", SAVING)
    assert checkpoint.resume(start(), tmp_path / "run", SAVING) == 1
    with pytest.MonkeyPatch.context() as patched:
        flipped = _flip_after(pretrained.convert.convert_then_slice, Q_WEIGHT, 0)
        patched.setattr(pretrained.convert, "convert_then_slice", flipped)
        state = start()
    with pytest.raises(CheckpointError, match=f"1 tensor.s. differ: {Q_WEIGHT}"):
        checkpoint.resume(state, tmp_path / "run", SAVING)
