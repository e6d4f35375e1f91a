"""Dtypes of what is stored and of what is computed with; kernels and dtypes that are refused."""

from pathlib import Path

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from sharded import apply_fsdp, init_mesh
from tiny_models import save, tiny_model
from torch import nn

from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.errors import ModelError
from toolkit.loading import load_pretrained
from toolkit.models.causal_lm import build_on_meta, check_usable, prepare


def test_auto_does_not_round_float16_weights(tmp_path: Path) -> None:
    """Whose config names no dtype, as those of earlier versions do not."""
    folder = save_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": null'))
    with pytest.raises(ModelError, match=r"stored in float16, .* set model.dtype: float32"):
        prepare(ModelConfig(str(folder), dtype="auto"))
    assert prepare(ModelConfig(str(folder), dtype="float32")).dtype == torch.float32
    # A frozen model, such as a reference, may keep float16.
    assert build_on_meta(ModelConfig(str(folder), dtype="auto")).dtype == torch.float16


def test_an_attention_without_a_backward_is_refused(tmp_path: Path) -> None:
    cfg = ModelConfig(str(save_tiny_model(tmp_path)), attn_implementation="flex_attention")
    with pytest.raises(ModelError, match="flex_attention has no backward on CPUs"):
        check_usable(cfg, 16, "cpu")


def _sharded(rank: int, world: int, folder: str) -> tuple[set[str], set[str]]:
    """Return the dtypes of buffers and parameters of a model that has gone forward and back."""
    model = build_on_meta(ModelConfig(folder, dtype="float32"))
    sharding = ShardingConfig(param_dtype="bfloat16")
    apply_fsdp(model, init_mesh("cpu", world, sharding), sharding)
    load_pretrained(model, Path(folder), "cpu")
    model(input_ids=torch.arange(1, 9)[None]).logits.sum().backward()
    buffers = {str(b.dtype) for b in model.buffers() if b.is_floating_point()}
    return buffers, {str(p.dtype) for p in model.parameters()}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("openai-gpt", "torch.bfloat16"),  # a product of its mask in float32 would be refused
        ("llama", "torch.float32"),  # its rotary frequencies are that in every model
    ],
)
def test_computed_buffers_have_the_dtype_of_the_computation(tmp_path: Path, kind, dtype) -> None:
    save(tiny_model(kind), tmp_path, kind)
    ((buffers, parameters),) = run_ranks(_sharded, 1, str(tmp_path))
    assert buffers == {dtype}
    assert parameters == {"torch.float32"}


def test_tables_of_integers_come_from_the_constructor(tmp_path: Path) -> None:
    from toolkit.loading.materialisation import build_with_buffers, draw_values

    model = build_on_meta(ModelConfig(str(save_tiny_model(tmp_path)), init="random"))
    kind = type(model.model)
    begin = kind.__init__

    def with_table(self: nn.Module, *args: object) -> None:
        begin(self, *args)
        self.table = nn.Parameter(torch.arange(300, 308), requires_grad=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", with_table)
        model = build_on_meta(ModelConfig(str(tmp_path), init="random"))
        ((name, value),) = draw_values(model, build_with_buffers(model), ["model.table"], 0)
    assert (name, value.tolist()) == ("model.table", [*range(300, 308)])
