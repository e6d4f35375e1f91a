"""A merged weight has the bits of `merge_and_unload`, also where transformers computes in fp32.

transformers keeps routers of some types in fp32 in a bfloat16 model. PEFT's layer for parameters
rounds what it adds to the dtype of the weight, so that the dtype decides the last bit.
"""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from toolkit import checkpoint
from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig
from toolkit.export import consolidate
from toolkit.loading.pretrained import load_pretrained
from toolkit.models import find_fp32_tensors
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.peft_model import trained_tensors
from toolkit.verify import verify_export

ROUTER = "mlp.gate.weight"


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:target_parameters=")
def test_a_router_in_fp32_is_rounded_once(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model(kind).to(torch.bfloat16).save_pretrained(source)
    lora = LoraConfig(r=4, target_modules=["o_proj"], target_parameters=[ROUTER])
    model = add_adapters(build_on_meta(ModelConfig(str(source), dtype="auto")), lora)
    load_pretrained(model, source, "cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in trained_tensors(model).values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    run = tmp_path / "run"
    checkpoint.save(checkpoint.TrainState(model, step=1), run, CheckpointConfig())
    consolidate(run, tmp_path / "adapter")
    consolidate(run, tmp_path / "merged", merge=True)
    base = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    expected, actual = merged.state_dict(), load_file(tmp_path / "merged/model.safetensors")
    routers = [name for name in actual if name.endswith(ROUTER)]
    assert routers
    assert {actual[name].dtype for name in routers} == {torch.bfloat16}
    assert {expected[name].dtype for name in routers} == {torch.float32}  # the control
    assert set(routers) <= find_fp32_tensors(merged).keys()
    for name in [n for n in expected if n in actual]:
        assert torch.equal(expected[name].to(actual[name].dtype), actual[name]), name
    report = verify_export(run, tmp_path / "merged")
    assert report.ok, report.lines()
    assert not any("rounding" in line for line in report.lines())
