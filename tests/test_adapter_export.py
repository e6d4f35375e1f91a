"""Adapters trained on two ranks become files: a PEFT folder, or one model with their base.

The reference is PEFT itself in one process: its keys, its loading, its `merge_and_unload`. Every
rank holds values of its own, so that a shard that is lost or doubled shows.
"""

import filecmp
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
import yaml
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from sharded import apply_fsdp, init_mesh
from torch.distributed.tensor import DTensor

from toolkit import checkpoint, cli
from toolkit.adapters.base import base_digest
from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.published import describe_base_model
from toolkit.config.settings import (
    CheckpointConfig,
    HubConfig,
    ModelConfig,
    ShardingConfig,
)
from toolkit.errors import CheckpointError, ExportError, HubError
from toolkit.export import adapter_loading, consolidate, export_live, export_step
from toolkit.formats import export_manifest
from toolkit.hub import card as model_card
from toolkit.hub import publishing
from toolkit.hub import upload as hub
from toolkit.loading.pretrained import init_weights, load_pretrained
from toolkit.models.causal_lm import build_on_meta, vocabulary_size
from toolkit.models.peft_model import trained_tensors
from toolkit.models.quantise import quantise_on_meta
from toolkit.verify import verify_checkpoint, verify_export

pytestmark = pytest.mark.slow

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BF16 = {"dtype": torch.bfloat16}
# Name -> model, its settings, adapters.
CASES: dict[str, tuple[str, dict[str, Any], LoraConfig]] = {
    "llama": ("llama", BF16, LoraConfig(r=3)),
    "rslora": ("llama", {}, LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True)),
    "dora": ("llama", BF16, LoraConfig(r=4, target_modules="all-linear", use_dora=True)),
    "gpt2": ("gpt2", {}, LoraConfig(r=4, target_modules=["c_attn", "c_proj"])),
    "tied": (
        "llama",
        {"tie_word_embeddings": True},
        LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    ),
    "embedding": (
        "llama",
        {},
        LoraConfig(r=4, target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
    ),
    "moe": (
        "qwen3_moe",
        BF16,
        LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
    "qlora": (  # merged into the base that was not quantised
        "llama",
        {**BF16, "hidden_size": 64, "intermediate_size": 128},
        LoraConfig(r=4, load_in_4bit=True),
    ),
    "mixtral": ("mixtral", {}, LoraConfig(r=2, target_parameters=EXPERTS)),
}
LAYERS = {"num_hidden_layers": 2}
TRAINED = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def adapted(source: Path, cfg: LoraConfig, world: int) -> Any:
    """Return the model of `source` with its adapters, sharded and loaded."""
    model: Any = build_on_meta(ModelConfig(name_or_path=str(source), dtype="auto"))
    sharding = ShardingConfig()
    if cfg.load_in_4bit:
        quantise_on_meta(model, cfg, sharding.param_dtype)
    model = add_adapters(model, cfg)
    apply_fsdp(model, init_mesh("cpu", world, sharding), sharding)
    load_pretrained(model, source, torch.device("cpu"))
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_values(model: torch.nn.Module, rank: int) -> None:
    """Add to this rank's part of the adapter what no other rank has."""
    for i, tensor in enumerate(trained_tensors(model).values()):
        chooser = torch.Generator().manual_seed(1000 * rank + i)
        part = local(tensor)
        part.add_(torch.randn(part.shape, generator=chooser) * 0.05)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = trained_tensors(model)
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()
    }


def refused(fn: Callable[[], object]) -> str:
    try:
        fn()
    except (CheckpointError, ExportError) as error:
        return str(error)
    return ""


def _train(rank: int, world: int, root: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, (_, _, cfg) in CASES.items():
        folder = Path(root, name)
        model = adapted(folder / "source", cfg, world)
        run, save = folder / "run", CheckpointConfig()
        begun = checkpoint.save(checkpoint.TrainState(model, step=1), run, save)
        if name in ("llama", "tied"):
            adapter_loading.compare_with_reloaded(model, begun)
        own_values(model, rank)
        path = checkpoint.save(
            checkpoint.TrainState(model, step=2), run, CheckpointConfig(async_save=name == "gpt2")
        )
        held = whole(model)
        random = torch.get_rng_state()
        grads = {n: p.requires_grad for n, p in model.named_parameters()}
        model.train()
        proof = adapter_loading.compare_with_reloaded(model, path)
        assert all(m.training for m in model.modules())
        assert all(torch.equal(t, held[n]) for n, t in whole(model).items())
        assert grads == {n: p.requires_grad for n, p in model.named_parameters()}
        export_live(model, folder / "live", origin={"step": 2})
        assert torch.equal(random, torch.get_rng_state())
        ids = torch.arange(8).view(1, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        said[name] = {"proof": proof, "values": held}
        if name == "llama":
            said |= _controls(model, rank, path, folder)
    return said


def _controls(model: Any, rank: int, path: str, folder: Path) -> dict[str, Any]:
    """What the proof after a save must notice."""
    live = {n: local(t).clone() for n, t in trained_tensors(model).items()}
    export_step(model, folder / "run", 2)
    # As if rank 0's shard had been saved for all: rank 1's values are not in the file.
    for i, tensor in enumerate(trained_tensors(model).values()):
        if rank == 1:
            chooser = torch.Generator().manual_seed(i)
            local(tensor).copy_(torch.randn(local(tensor).shape, generator=chooser))
    lost = refused(lambda: adapter_loading.compare_with_reloaded(model, path))
    for name, tensor in trained_tensors(model).items():
        local(tensor).copy_(live[name])
    # Weights that a reader would take in another order: equal shapes, equal names.
    real = adapter_loading._reload_by_peft

    def swapped(*args: Any) -> dict[str, torch.Tensor]:
        loaded = real(*args)
        one, two = [n for n in loaded if "k_proj.lora_A" in n][:2]
        return {**loaded, one: loaded[two], two: loaded[one]}

    with mock.patch.object(adapter_loading, "_reload_by_peft", swapped):
        mixed = refused(lambda: adapter_loading.compare_with_reloaded(model, path))
    return {
        "lost": lost,
        "mixed": mixed,
        "plain": adapter_loading.prove_adapter(checkpoint.TrainState(torch.nn.Linear(1, 1)), path),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder NAME/{source, run, live, adapter, merged} and what each rank said."""
    root = tmp_path_factory.mktemp("adapters")
    for name, (kind, changes, _) in CASES.items():
        source = root / name / "source"
        save_byte_tokenizer(source)
        if kind == "mixtral":
            _save_mixtral(source)
        elif kind == "gpt2":
            save_tiny_model(source, kind, **changes, n_layer=2)
        else:
            save_tiny_model(source, kind, **dict(changes), **LAYERS)
    said = run_ranks(_train, 2, str(root))
    for name in CASES:
        consolidate(root / name / "run", root / name / "adapter")
        consolidate(root / name / "run", root / name / "merged", merge=True)
    return root, said


def _save_mixtral(folder: Path) -> None:
    import tiny_models
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_models.tiny_config("mixtral", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture
def copy(trained: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a part of the folder, to be changed."""
    return lambda name: Path(shutil.copytree(trained[0] / name, tmp_path / name.replace("/", "-")))


def rewrite(export: Path) -> None:
    """Let the export's own manifest agree with what is in the folder now."""
    origin = json.loads((export / export_manifest.FILE).read_text())["manifest"]["origin"]
    export_manifest.write(export, export_manifest.describe_folder(export), origin)


def change(export: Path, how: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """Change the tensors of an export, let its manifest agree; return the file's name."""
    (file,) = export.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    how(tensors)
    save_file(tensors, file, {"format": "pt"})
    rewrite(export)
    return file.name


def one_bit(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        kind = {2: torch.int16, 4: torch.int32}[tensors[name].dtype.itemsize]
        flat = tensors[name].view(kind).view(-1)
        flat[len(flat) // 2] ^= 1

    return flip


def base_of(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": "auto"} | options))


def read_with_peft(base: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder, torch_device="cpu")


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_of_every_rank_survive_save_export_and_reload(trained, name: str) -> None:
    from peft import get_peft_model_state_dict

    root, said = trained
    values = said[0][name]["values"]
    for tensor in (t for t in values.values() if t.ndim > 1 and t.shape[0] % 2 == 0):
        assert not torch.equal(*tensor.chunk(2))  # the ranks' rows differ
    # The base in float32: PEFT copies modules_to_save into the base's dtype.
    model = read_with_peft(
        base_of(root / name / "source", dtype=torch.float32), root / name / "adapter"
    )
    state = model.state_dict()
    assert all(torch.equal(state[n], t) for n, t in values.items())
    ours = load_file(root / name / "adapter/adapter_model.safetensors")
    theirs = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert not any("base_layer.weight" in k and "lora" not in k for k in ours)


@pytest.mark.parametrize("name", CASES)
def test_merged_weights_are_those_of_merge_and_unload(trained, name: str) -> None:
    folder = trained[0] / name
    theirs = read_with_peft(base_of(folder / "source"), folder / "adapter").merge_and_unload()
    merged, source = load_file(folder / "merged/model.safetensors"), {}
    for file in (folder / "source").glob("*.safetensors"):
        source |= load_file(file)
    assert {k: (t.dtype, t.shape) for k, t in merged.items()} == {
        k: (t.dtype, t.shape) for k, t in source.items()
    }
    ours = base_of(folder / "merged").state_dict()
    for key, tensor in theirs.state_dict().items():
        assert (ours[key].dtype, torch.equal(ours[key], tensor)) == (tensor.dtype, True), key
    changed = [k for k in source if not torch.equal(source[k], merged[k])]
    assert 0 < len(changed) < len(source)


@pytest.mark.parametrize("name", CASES)
def test_the_proof_after_a_save(trained, name: str) -> None:
    _, said = trained
    for rank in said:
        count = len(rank[name]["values"])
        assert rank[name]["proof"].startswith(f"adapter proven: {count} tensors reloaded")


def test_what_the_proof_after_a_save_must_notice(trained) -> None:
    said = trained[1]
    for rank in said:
        assert re.search(r"on rank 1 28 of 28 tensors differ", rank["lost"])
        assert re.search(r"on rank 0 2 of 28 tensors differ, such as .*k_proj", rank["mixed"])
        assert rank["plain"] == ""


@pytest.mark.parametrize("name", CASES)
def test_the_folder_of_a_live_model_is_that_of_its_checkpoint(trained, name: str) -> None:
    live, offline = (trained[0] / name / kind for kind in ("live", "adapter"))
    names = sorted(p.name for p in live.iterdir())
    assert names == sorted(p.name for p in offline.iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(names)
    assert not {"config.json", "generation_config.json"} & set(names)
    names.remove(export_manifest.FILE)
    assert filecmp.cmpfiles(live, offline, names, shallow=False) == (names, [], [])
    said = [export_manifest.read(folder)["origin"]["adapter"] for folder in (live, offline)]
    assert said[0] == said[1]
    config = json.loads((offline / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained[0] / name / "source")
    assert config["inference_mode"] is True


@pytest.mark.parametrize("name", CASES)
def test_what_is_whole_is_verified(trained, name: str) -> None:
    folder = trained[0] / name
    assert verify_checkpoint(folder / "run").ok
    for report in (
        verify_export(None, folder / "adapter"),
        verify_export(folder / "run", folder / "adapter", logits=name in ("tied", "moe", "dora")),
        verify_export(None, folder / "merged"),
        verify_export(folder / "run", folder / "merged", logits=name in ("llama", "gpt2")),
    ):
        assert report.ok, report.findings
        assert not any("border" in note for note in report.notes)
        assert report.tensors > 1
        assert report.logits_difference is None or report.logits_difference < 0.1


def test_other_dtypes_and_files(trained, tmp_path: Path) -> None:
    folder = trained[0] / "llama"
    consolidate(folder / "run", tmp_path / "half", dtype="bfloat16")
    report = verify_export(folder / "run", tmp_path / "half", logits=True)
    assert report.ok, report.findings  # of factors that were rounded, as in the export
    change(tmp_path / "half", lambda t: t.update({TRAINED: t[TRAINED].float()}))
    report = verify_export(None, tmp_path / "half")
    assert [f[1:] for f in report.findings] == [
        (TRAINED, "is float32, the export was requested in bfloat16")
    ]
    consolidate(
        folder / "run", tmp_path / "full", dtype="float32", max_shard_size="30KB", merge=True
    )
    report = verify_export(folder / "run", tmp_path / "full")
    assert report.ok, report.findings
    assert len(list((tmp_path / "full").glob("*.safetensors"))) > 2
    theirs = read_with_peft(base_of(folder / "source", dtype=torch.float32), folder / "adapter")
    wanted, ours = theirs.merge_and_unload().state_dict(), base_of(tmp_path / "full").state_dict()
    assert all(torch.equal(ours[k], t) for k, t in wanted.items())
    assert ours["lm_head.weight"].dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# What must be noticed
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("export", "tensor"),
    [
        ("llama/adapter", TRAINED),
        ("dora/adapter", TRAINED.replace("lora_B.weight", "lora_magnitude_vector")),
        ("tied/adapter", TRAINED.replace("q_proj", "v_proj")),
        ("llama/merged", "model.layers.1.mlp.up_proj.weight"),
        ("llama/merged", "model.norm.weight"),  # not adapted
        ("dora/merged", "model.layers.0.self_attn.q_proj.weight"),
        ("tied/merged", "model.embed_tokens.weight"),
        ("gpt2/merged", "transformer.h.1.mlp.c_fc.weight"),
        ("moe/merged", "model.layers.1.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_one_bit_is_found(trained, copy: Callable[[str], Path], export: str, tensor: str) -> None:
    folder = copy(export)
    file = change(folder, one_bit(tensor))
    assert verify_export(None, folder).ok  # by itself it is sound
    report = verify_export(trained[0] / export.split("/")[0] / "run", folder)
    assert [f[:2] for f in report.findings] == [(file, tensor)], report.findings
    raw = bytearray((folder / file).read_bytes())  # and without a manifest that agrees
    raw[-1] ^= 1
    (folder / file).write_bytes(raw)
    assert [f[0] for f in verify_export(None, folder).findings] == [file]


def test_a_merge_that_is_not_the_adapters(trained, copy: Callable[[str], Path]) -> None:
    name, root = "model.layers.0.self_attn.q_proj.weight", trained[0] / "rslora"
    base = load_file(root / "source/model.safetensors")[name]
    folder = copy("rslora/merged")

    def twice(tensors: dict[str, torch.Tensor]) -> None:  # as with alpha / r instead of rsLoRA
        tensors[name] = base + 2 * (tensors[name] - base)

    change(folder, twice)
    report = verify_export(root / "run", folder, logits=True)
    assert ("model.safetensors", name) in [f[:2] for f in report.findings]
    change(folder, lambda t: t.update({name: base}))
    report = verify_export(root / "run", folder)
    assert [f[1] for f in report.findings] == [name]


def test_keys_that_peft_does_not_read(trained, copy: Callable[[str], Path]) -> None:
    """PEFT loads them without an error, and the base answers."""
    folder = copy("llama/adapter")
    prefix = "base_model.model.model."

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    file = change(folder, cut)
    for report in (verify_export(None, folder), verify_export(trained[0] / "llama/run", folder)):
        assert len({f[1] for f in report.findings}) == 2 * report.tensors
        (what,) = {f[2] for f in report.findings if f[1] == TRAINED.removeprefix(prefix)}
        assert what.endswith(f"skipped silently; expected was {TRAINED}")
        assert {f[0] for f in report.findings} == {file}
    with pytest.raises(ExportError, match="does not verify"):
        hub.preview(folder, "org/name")
    source = trained[0] / "llama/source"
    ids = torch.arange(8).view(1, 8)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        model = read_with_peft(base_of(source), folder)
    with torch.no_grad():
        own, expected = model(input_ids=ids).logits, base_of(source)(input_ids=ids).logits
    torch.testing.assert_close(own, expected)


def test_copies_of_one_matrix_that_differ(trained, copy: Callable[[str], Path]) -> None:
    """PEFT loads one after the other into the same parameter."""
    folder = copy("tied/adapter")
    change(folder, one_bit("base_model.model.lm_head.weight"))
    assert len(verify_export(None, folder).findings) == 1


def test_an_adapter_without_a_part_or_with_another_config(
    trained, copy: Callable[[str], Path]
) -> None:
    folder = copy("llama/adapter")
    change(folder, lambda t: t.pop(TRAINED))
    assert TRAINED in {f[1] for f in verify_export(None, folder).findings}
    folder = copy("rslora/adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 7}))
    rewrite(folder)
    assert verify_export(None, folder).ok  # another scale is an adapter, too
    report = verify_export(trained[0] / "rslora/run", folder)
    assert [f[0] for f in report.findings] == ["adapter_config.json"]
    assert "lora_alpha is 7, in the checkpoint 32" in report.findings[0][2]
    report = verify_export(trained[0] / "rslora/run", folder, logits=True)
    assert any("logits differ from the checkpoint's" in f[2] for f in report.findings)


def test_an_adapter_without_effect(trained, copy: Callable[[str], Path]) -> None:
    folder = copy("rslora/adapter")
    assert not verify_export(None, folder, logits=True).findings
    from peft.tuners.lora.layer import Linear

    plain = Linear.forward
    with mock.patch.object(Linear, "forward", lambda self, x: self.base_layer(x)):
        report = verify_export(None, folder, logits=True)
    assert [f[2] for f in report.findings] == ["has no effect: the logits are those of the base"]
    assert Linear.forward is plain


def test_another_base_is_refused(trained, copy, tmp_path: Path, monkeypatch) -> None:
    run = trained[0] / "llama/run"
    other = copy("llama/source")
    consolidate(run, tmp_path / "elsewhere", merge=True, hf_assets=other)  # the same one, moved
    assert verify_export(run, tmp_path / "elsewhere", hf_assets=other).ok
    monkeypatch.chdir(other.parent)
    consolidate(run, tmp_path / "named", hf_assets=other.name)
    assert verify_export(run, tmp_path / "named").ok
    config = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for options in ({"merge": True}, {}):
        with pytest.raises(ExportError, match="is not the base that the adapter of"):
            consolidate(run, tmp_path / "wrong", hf_assets=other, **options)
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(ExportError, match="is not the base"):
        verify_export(run, trained[0] / "llama/merged", hf_assets=other)
    report = verify_export(None, tmp_path / "named", logits=True)
    assert "is not the base" in report.findings[0][2]
    with pytest.raises(ExportError, match="there is no folder"):
        consolidate(run, tmp_path / "wrong", hf_assets=tmp_path / "nowhere", merge=True)


def test_a_name_on_the_hub_needs_no_weights(trained, copy, tmp_path: Path) -> None:
    cached = copy("llama/source")
    (cached / "model.safetensors").unlink()
    run = trained[0] / "llama/run"
    with mock.patch("toolkit.formats.local_folder", return_value=cached):
        consolidate(run, tmp_path / "named", hf_assets="org/base")
        config = json.loads((cached / "config.json").read_text())
        (cached / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1}))
        with pytest.raises(ExportError, match=r"is not the base.*has num_attention_heads 1"):
            consolidate(run, tmp_path / "wrong", hf_assets="org/base")
    assert verify_export(run, tmp_path / "named").ok
    config = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", None)


def test_the_weights_of_a_base_on_the_hub_are_fetched(trained, copy) -> None:
    folder, asked = copy("llama/source"), []
    (folder / "model.safetensors").rename(folder / "elsewhere")

    def fetch(name: str, file: str, *, revision: str, **_: Any) -> str | None:
        asked.append((name, revision))
        if file != "model.safetensors":
            return None
        return str((folder / "elsewhere").rename(folder / file))

    with mock.patch("transformers.utils.cached_file", fetch):
        digest = base_digest(folder, "org/base", "abc")
    assert digest == base_digest(trained[0] / "llama/source")
    assert set(asked) == {("org/base", "abc")}


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "an import": ({"megatron_config": {"a": 1}, "megatron_core": "json.tool"}, "megatron_config"),
    "layers": ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
    "a bias": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "a start": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "one of tomorrow": ({"use_new": True}, "use_new"),
    "a name": ({"base_model_name_or_path": 7}, "base_model_name_or_path is 7, a text or null"),
    "a revision": ({"revision": ["x"]}, "revision is \\['x'\\], a text or null"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_settings_of_somebody_elses_adapter(copy: Callable[[str], Path], what: str) -> None:
    changes, said = STRANGE[what]
    folder = copy("rslora/adapter")
    name_base(folder, "org/base", **changes)
    report = verify_export(None, folder, logits=True)
    assert [f[0] for f in report.findings] == ["adapter_config.json"]
    assert re.search(said, report.findings[0][2])


@pytest.mark.parametrize(
    "told", [[1], "x", {}, {"base": 3}, {"base": {"digest": 3}}, {"base": {}, "base_config": [1]}]
)
def test_a_manifest_of_somebody_else(copy: Callable[[str], Path], told: Any) -> None:
    folder = copy("rslora/adapter")
    described = export_manifest.describe_folder(folder)
    export_manifest.write(folder, described, {"adapter": told})
    report = verify_export(None, folder)
    assert [f[0] for f in report.findings] == [export_manifest.FILE]
    assert "does not describe adapter and base" in report.findings[0][2]
    export_manifest.write(folder, described, [told])  # type: ignore[arg-type]
    (finding,) = verify_export(None, folder).findings
    assert "its origin is no object" in finding[2]


def test_a_strangers_base_is_not_asked_of_the_hub(copy: Callable[[str], Path]) -> None:
    folder, asked = copy("rslora/adapter"), []

    def cached(name: str, file: str, **options: Any) -> None:
        asked.append((name, options["local_files_only"]))
        raise OSError("not here")

    name_base(folder, "org/base")
    with mock.patch("transformers.utils.cached_file", cached):
        report = verify_export(None, folder, logits=True)
        assert "give the base's folder or Hub id with --hf_assets" in report.findings[0][2]
        verify_export(None, folder, logits=True, hf_assets="org/mine")
    assert asked == [("org/base", True), ("org/mine", False)]
    name_base(folder, "")  # not the current folder
    report = verify_export(None, folder, logits=True)
    assert any("names no base; give it with --hf_assets" in f[2] for f in report.findings)


def alone(folder: Path, source: Path, model_cfg: ModelConfig, lora: LoraConfig) -> Any:
    """Save one step of an adapted model in one process, with values of its own."""
    model: Any = add_adapters(build_on_meta(model_cfg), lora)
    if model_cfg.init == "random":
        init_weights(model, "cpu", 3)
    else:
        load_pretrained(model, source, "cpu")
    own_values(model, 0)
    checkpoint.save(checkpoint.TrainState(model, step=1), folder / "run", CheckpointConfig())
    consolidate(folder / "run", folder / "adapter")
    return model


def test_an_adapter_with_new_tokens(trained, tmp_path: Path, capsys) -> None:
    source = trained[0] / "llama/source"
    both = ["embed_tokens", "lm_head"]
    model = alone(
        tmp_path,
        source,
        ModelConfig(name_or_path=str(source), resize_embeddings=96),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=both),
    )
    rows = vocabulary_size(model.get_base_model())
    assert rows % 96 == 0 != json.loads((source / "config.json").read_text())["vocab_size"] % 96
    assert verify_checkpoint(tmp_path / "run").ok
    consolidate(tmp_path / "run", tmp_path / "merged", merge=True)
    for kind in ("adapter", "merged"):
        report = verify_export(tmp_path / "run", tmp_path / kind, logits=True)
        assert report.ok, report.findings
        assert report.logits_difference is not None
    manifest = export_manifest.read(tmp_path / "adapter")
    card = model_card.render_card(manifest, "org/name", "ab" * 32)
    assert f"base.resize_token_embeddings({rows})" in card
    assert card.index("resize_token") < card.index("PeftModel.from_pretrained(")
    told = ["consolidate", str(tmp_path / "run"), "--output", str(tmp_path / "told")]
    assert cli.main(told) == 0
    known: dict[str, Any] = {"peft": peft, "transformers": transformers}
    exec(dedent(capsys.readouterr().out.split("load it with:\n")[1]), known)
    assert vocabulary_size(known["base"]) == rows


def test_a_base_that_was_drawn_is_no_finding(trained, tmp_path: Path) -> None:
    source = trained[0] / "llama/source"
    cfg = ModelConfig(name_or_path=str(source), init="random")
    alone(tmp_path, source, cfg, LoraConfig(r=2))
    for run in (None, tmp_path / "run"):
        report = verify_export(run, tmp_path / "adapter", logits=True)
        assert report.ok, report.findings
        assert any("the base was drawn (random, seed 3)" in note for note in report.notes)


def test_a_base_that_is_not_whole(trained, copy: Callable[[str], Path], tmp_path: Path) -> None:
    """The digest looks at every tensor, so the plan itself is asked."""
    from toolkit.checkpoint.sources import find_source
    from toolkit.export.readers import AdapterMerge, SavedTensors

    source = SavedTensors(find_source(trained[0] / "llama/run"))
    folder = copy("llama/source")
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj"):
        AdapterMerge(source, folder, None, 10**9)
    tensors["model.layers.1.mlp.up_proj.weight"] = gone[:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"is \[47, 32\] in the base .* and was \[48, 32\]"):
        AdapterMerge(source, folder, None, 10**9)


def test_a_layer_that_is_saved_whole_and_adapted(trained) -> None:
    from toolkit.adapters.peft_folder import build_peft_layout

    base = build_on_meta(ModelConfig(name_or_path=str(trained[0] / "llama/source")))
    both = {"peft_type": "LORA", "target_modules": ["q_proj"], "modules_to_save": "None"}
    with pytest.raises(ExportError, match=r"is saved in full and also adapted inside: known"):
        build_peft_layout(base, both)


def test_a_damaged_checkpoint_is_not_exported(trained, copy, tmp_path: Path) -> None:
    run = copy("gpt2/run")
    (shard,) = (run / "checkpoints/step-00000002/dcp").glob("__1_*.distcp")
    raw = bytearray(shard.read_bytes())
    name, values = next(iter(trained[1][1]["gpt2"]["values"].items()))
    at = raw.find(values.chunk(2)[1].numpy().tobytes())
    assert at > 0
    raw[at + 5] ^= 1
    shard.write_bytes(raw)
    report = verify_checkpoint(run)
    assert {f[0] for f in report.findings} == {f"checkpoints/step-00000002/dcp/{shard.name}"}
    assert {f[1] for f in report.findings} == {f"model.{name}"}
    for merge in (False, True):
        with pytest.raises(CheckpointError, match=re.escape(f"{name} has other bytes in ")):
            consolidate(run, tmp_path / "out", merge=merge)
    assert not (tmp_path / "out").exists()


def test_what_goes_with_what(trained, tmp_path: Path, capsys) -> None:
    root = trained[0]
    full = tmp_path / "full"
    model = build_on_meta(ModelConfig(name_or_path=str(root / "rslora/source")))
    load_pretrained(model, root / "rslora/source", "cpu")
    checkpoint.save(checkpoint.TrainState(model, step=1), full, CheckpointConfig())
    with pytest.raises(ExportError, match="is not an adapter checkpoint: there is nothing"):
        consolidate(full, tmp_path / "out", merge=True)
    for inside in (root / "rslora/adapter/sub", root / "rslora/run/checkpoints/sub"):
        with pytest.raises(ExportError, match="which is no place for another export"):
            consolidate(full, inside)
    with pytest.raises(
        ExportError, match=r"holds an adapter, .* holds the weights of a full model"
    ):
        verify_export(full, root / "rslora/adapter")
    report = verify_export(root / "tied/run", root / "rslora/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {f[0] for f in report.findings}
    assert cli.main(["verify", str(root / "rslora/adapter")]) == 0
    alone = ["verify", str(root / "rslora/adapter"), "--logits", "--hf_assets"]
    assert cli.main([*alone, str(root / "rslora/source")]) == 0
    assert cli.main([*alone, str(root / "tied/source")]) == 1  # another base
    assert cli.main(["verify", str(root / "rslora/run"), "--hf_assets", str(root)]) == 2
    assert cli.main(["verify", str(root / "rslora/run"), str(root / "rslora/merged")]) == 0
    capsys.readouterr()
    step = root / "llama/run/exports/step-00000002"
    assert verify_export(root / "llama/run", step).ok


# --------------------------------------------------------------------------------------------------
# Publishing
# --------------------------------------------------------------------------------------------------


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def name_base(export: Path, name: object, **settings: Any) -> None:
    """Let adapter_config.json name another base, and have other settings."""
    file = export / "adapter_config.json"
    said = {**json.loads(file.read_text()), "base_model_name_or_path": name, **settings}
    file.write_text(json.dumps(said))
    rewrite(export)


@pytest.mark.parametrize("name", ["./base", "../base", "/a/base", "runs/base", "a/b/c", ""])
def test_a_base_that_is_no_hub_id_is_refused_before_a_run(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/base").mkdir(parents=True)
    cfg = HubConfig(push_to_hub=True, hub_model_id="me/adapter")
    with pytest.raises(HubError, match="is a path of this machine"):
        publishing.check(cfg, adapted=name)
    monkeypatch.setattr(publishing, "check_access", lambda *_, **__: None)
    publishing.check(cfg, adapted="org/base")
    publishing.check(cfg, adapted="gpt2")


def test_the_card_of_an_adapter(trained, copy: Callable[[str], Path]) -> None:
    folder = trained[0] / "moe"
    with pytest.raises(ExportError, match=r"names its base by a path.*--hf_assets ORG/NAME"):
        hub.preview(folder / "adapter", "org/name")  # a path of this machine
    adapter = copy("moe/adapter")
    name_base(adapter, "org/base")
    seen = hub.preview(adapter, "org/name")
    assert set(seen.send) == {p.name for p in adapter.iterdir()} | {"README.md"}
    front = front_matter(seen.card)
    assert front["library_name"] == "peft"
    assert "base_model" not in front  # of a machine in the manifest: the Hub would refuse the card
    assert "resize_token_embeddings" not in seen.card
    assert str(trained[0]) not in seen.card
    for text in (
        "| r | 4 |",
        f"| target_parameters | {', '.join(sorted(EXPERTS))} |",
        "PeftModel.from_p",
    ):
        assert text in seen.card
    front = front_matter(hub.preview(folder / "merged", "org/name").card)
    assert front["library_name"] == "transformers"


def test_the_card_names_a_base_on_the_hub(trained) -> None:
    manifest = export_manifest.read(trained[0] / "llama/adapter")
    said = {"name_or_path": "org/base", "revision": "abc"}
    manifest["origin"]["adapter"]["base"] = describe_base_model(said, Path())
    for merged, relation, library in (
        (None, "adapter", "peft"),
        (True, "finetune", "transformers"),
    ):
        manifest["origin"]["merged"] = merged
        card = model_card.render_card(manifest, "org/name", hashlib.sha256(b"").hexdigest())
        front = front_matter(card)
        assert front["base_model"] == "org/base"
        assert (front["base_model_relation"], front["library_name"]) == (relation, library)
        assert ("lora" in front["tags"]) is (merged is None)  # a merged model has no adapter
        loads_base = 'from_pretrained("org/base", revision="abc", dtype="auto")' in card
        assert loads_base is (merged is None)
    assert "[org/base](https://huggingface.co/org/base) (revision abc)" in card
