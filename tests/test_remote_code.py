"""A model whose Python code comes with it: trained, exported and verified where that is allowed."""

import json

import pytest
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import apply_fsdp, init_mesh, loss_sum
from tiny_models import rows

from toolkit import checkpoint, cli
from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
from toolkit.export import consolidate
from toolkit.loading import load_pretrained
from toolkit.models import causal_lm
from toolkit.verify import full_model, verify_export

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path):
    made = save_tiny_model(tmp_path / "model", num_hidden_layers=2)
    save_byte_tokenizer(made)
    (made / "modeling_own.py").write_text(CODE)
    config = json.loads((made / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_code_of_a_model_may_use_what_drawing_returns(folder, monkeypatch) -> None:
    monkeypatch.setitem(causal_lm._process, "trusts_code", False)
    draws = """
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.nn.init.ones_(torch.empty(7)))
"""
    (folder / "modeling_own.py").write_text(f"import torch\n{CODE}{draws}")
    cfg = ModelConfig(name_or_path=str(folder), init="random", trust_remote_code=True)
    assert causal_lm.build_on_meta(cfg).scale.shape == (7,)


HEADLESS = """
    def get_output_embeddings(self):
        return None
"""


def losses_by_way(rank: int, world: int, folder: str) -> list[float]:
    """Return the loss of all parameters trained and of adapters, each after a backward."""
    found, cfg = [], ShardingConfig(param_dtype="float32")
    for lora in (None, LoraConfig(r=2, target_modules=["q_proj"])):
        model = causal_lm.build_on_meta(ModelConfig(folder, trust_remote_code=True))
        model = model if lora is None else add_adapters(model, lora)
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        load_pretrained(model, folder, "cpu")
        loss = loss_sum(model.train(), rows(2))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert gradients
        assert all(g is not None and g.full_tensor().isfinite().all() for g in gradients)
        found.append(loss.item())
    return found


def test_a_class_without_a_known_head_takes_its_loss_from_all_logits(folder) -> None:
    expected = run_ranks(losses_by_way, 2, str(folder))
    (folder / "modeling_own.py").write_text(CODE + HEADLESS)
    for found, right in zip(run_ranks(losses_by_way, 2, str(folder)), expected, strict=True):
        assert found == pytest.approx(right, rel=1e-5)


@pytest.mark.slow
def test_from_training_to_a_verified_export(folder, tmp_path, monkeypatch, capsys) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    settings = {
        "model.name_or_path": folder,
        "model.trust_remote_code": True,
        "data.train_files": ROOT / "LICENSE",
        "data.sequence_length": 32,
        "data.eval_split": 0.0,
        "sharding.param_dtype": "float32",
        "train.per_device_train_batch_size": 2,
        "train.max_steps": 2,
        "checkpoint.save_steps": 2,
        "checkpoint.export_at_end": True,
        "output_dir": run,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    ended = run_recipe_ranks(ROOT / "recipes" / "pretrain.py", 1, *flags, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.setitem(causal_lm._process, "trusts_code", False)
    (own,) = (run / "exports").iterdir()
    for command in (["consolidate", run, "--output", out], ["verify", run, own]):
        arguments = list(map(str, command))
        assert cli.main(arguments) == 1
        said = capsys.readouterr()
        assert "needs its own Python code; read that, then set" in said.err + said.out
        assert not causal_lm.allows_remote_code()
        assert cli.main([*arguments, "--trust_remote_code"]) == 0
        causal_lm._process["trusts_code"] = False
    assert cli.main(["verify", str(run), str(out), "--logits", "--trust_remote_code"]) == 0
    assert (out / "modeling_own.py").read_text() == CODE


def test_buffers_that_transformers_leaves_as_they_come_do_not_count(tmp_path, monkeypatch) -> None:
    """As of code that computes them where it is built, which for transformers is on meta."""
    made = save_tiny_model(tmp_path / "model", num_hidden_layers=2)
    cfg = ModelConfig(str(made), dtype="float32")
    model = causal_lm.build_on_meta(cfg)
    load_pretrained(model, made, "cpu")
    checkpoint.save(checkpoint.TrainState(model, step=1), tmp_path / "run", CheckpointConfig())
    consolidate(tmp_path / "run", tmp_path / "hf")
    own = full_model.load_export

    def garbled(*args):
        loaded, info = own(*args)
        for _, buffer in loaded.named_buffers():
            buffer.fill_(float("nan"))
        return loaded, info

    monkeypatch.setattr(full_model, "load_export", garbled)
    report = verify_export(tmp_path / "run", tmp_path / "hf", logits=True)
    assert report.ok, report.lines()
    assert any("which is in no file, other values" in note for note in report.notes)
    monkeypatch.setattr(full_model, "copy_unsaved_buffers", lambda *_: [])  # the control
    assert not verify_export(tmp_path / "run", tmp_path / "hf", logits=True).ok
