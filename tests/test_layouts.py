"""Checkpoints as they are published: for images and text, with layers that no class loads, in fp8.

The longer table is `published_layouts.py`; here a few of it, and what must be found or refused.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from conftest import save_byte_tokenizer, slow
from distributed import run_ranks
from layouts import LAYOUTS, in_fp8, save_layout, tiny_layout
from published_layouts import passed, run
from safetensors.torch import load_file, save_file
from sharded import apply_fsdp, init_mesh, train_step
from transformers import Llama4ForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

from toolkit import checkpoint
from toolkit.adapters.base import base_digest
from toolkit.adapters.coverage import coverage_rows, covered_share
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint.carried import Carried, find_carried_tensors
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
from toolkit.errors import ExportError, LoadingError, ModelError
from toolkit.export import consolidate
from toolkit.export.plan import build_model_from_assets, make_model_plan
from toolkit.formats import StoredTensor, assets_of, export_manifest
from toolkit.loading import load_pretrained
from toolkit.loading.pretrained import check_weights_fit
from toolkit.models import tiny_copy
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.layers import (
    decoder_layers,
    format_frozen_towers,
    modules_outside_text,
    tied_names,
)
from toolkit.models.peft_model import adapted_modules
from toolkit.sharding.units import plan_units
from toolkit.verify import verify_export

FILE = "model.safetensors"


def layout(name: str, folder: Path) -> Path:
    save_layout(name, folder)
    return folder


def saved_run(source: Path, run_dir: Path) -> Path:
    """Train nothing, and save: what is exported is what was loaded."""
    cfg = ModelConfig(str(source), dtype="float32")
    model = build_on_meta(cfg)
    check_weights_fit(model, cfg)
    load_pretrained(model, source, "cpu")
    checkpoint.save(checkpoint.TrainState(model, step=1), run_dir, CheckpointConfig())
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5", "qwen3_5_moe", "llama4", "gemma4", "mllama", "mistral3", "phi4_multimodal"),
        *("deepseek_v3", "nemotron_h", "kimi_k25", "deepseek_v3 fp8", "gpt_oss mxfp4"),
    ],
)
def test_a_published_layout_comes_through_whole(name: str) -> None:
    found = run(name)
    assert passed(found["full"]), found["full"]
    assert passed(found["LoRA"]), found["LoRA"]


def test_the_class_of_the_config_is_built_and_its_towers_are_apart(tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(str(layout("qwen3_5", tmp_path))))
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert modules_outside_text(model) == ["model.visual"]
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith("model.visual.")}
    layers = decoder_layers(model)
    assert [*layers] == [f"model.language_model.layers.{i}" for i in range(4)]
    units = plan_units(model, ShardingConfig(param_dtype="bfloat16")).units
    (tower,) = [unit for unit in units if unit.name == "model.visual"]
    assert set(tower.parameters) == frozen
    assert not frozen.intersection(units[-1].parameters)  # the root gathers none of it


def test_adapters_go_into_the_text_part_only(tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(str(layout("mistral3", tmp_path))))
    adapted = add_adapters(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    names = [*adapted_modules(adapted)]
    assert names
    assert all(name.startswith("model.language_model.layers.") for name in names)
    tower = {n.rpartition(".")[2] for n, _ in model.named_modules() if "vision_tower" in n}
    assert "q_proj" in tower  # the control: the names alone would take it
    with pytest.raises(ModelError, match="only modules outside the text path"):
        add_adapters(
            build_on_meta(ModelConfig(str(tmp_path))), LoraConfig(r=2, target_modules=["linear_1"])
        )


def test_coverage_counts_what_text_runs_through_and_the_rest_is_said(tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(str(layout("qwen3_5", tmp_path))))
    adapted = add_adapters(model, LoraConfig(r=2))
    rows = coverage_rows(adapted)
    idle = {row.name for row in rows if row.part == "layer" and not row.trained}
    assert idle == {f"model.language_model.layers.{i}.linear_attn.conv1d.weight" for i in range(3)}
    assert {row.name.split(".")[1] for row in rows if row.part == "outside_text"} == {"visual"}
    assert covered_share(rows) > 0.97  # 0.18 where the tower counts
    tower = sum(p.numel() for p in model.get_submodule("model.visual").parameters())
    said = f"frozen     model.visual: {tower / 1e6:,.1f} M parameters that text does not reach"
    assert format_frozen_towers(adapted) == said
    text = layout("qwen3", tmp_path / "text")
    assert format_frozen_towers(build_on_meta(ModelConfig(str(text)))) == ""


def _accumulated(rank: int, world: int, source: str, accumulation: str) -> list[float]:
    cfg, sharding = ModelConfig(source), ShardingConfig(accumulation=accumulation)
    model = add_adapters(build_on_meta(cfg), LoraConfig(r=2))
    apply_fsdp(model, init_mesh("cpu", world, sharding), sharding)
    load_pretrained(model, Path(source), "cpu")
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.arange(64).view(4, 1, 16) + rank
    batches = [{"input_ids": row, "labels": row} for row in ids]
    return [train_step(model, optimizer, batches, max_grad_norm=1.0).loss.item() for _ in range(2)]


def test_gradients_are_accumulated_beside_a_tower_that_nothing_gathers(tmp_path: Path) -> None:
    source = str(layout("qwen3_5", tmp_path))
    once, each = (
        run_ranks(_accumulated, 2, source, way)[0] for way in ("reduce_once", "reduce_each")
    )
    assert once == pytest.approx(each, rel=1e-2)


def test_the_text_part_is_trained_where_the_class_has_no_forward_for_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, **inputs: Any) -> Any:  # as that of transformers 5.24, not of 5.23
        raise AttributeError("its output has no attribute 'image_outputs'")

    monkeypatch.setattr(tiny_copy, "_faults", {})
    monkeypatch.setattr(Llama4ForConditionalGeneration, "forward", forward)
    model = build_on_meta(ModelConfig(str(layout("llama4", tmp_path))))
    assert type(model).__name__ == "Llama4ForCausalLM"
    check_weights_fit(model, ModelConfig(str(tmp_path)))
    said = "text part  Llama4ForCausalLM is trained: Llama4ForConditionalGeneration has no forward"
    assert said in capsys.readouterr().out
    whole = assets_of(model).whole
    assert whole is not None
    assert whole[0].__name__ == "Llama4ForConditionalGeneration"


def test_what_sees_later_tokens_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lets a token of a text see later ones"):
        build_on_meta(ModelConfig(str(layout("paligemma", tmp_path))))


def test_a_part_that_has_a_forward_for_text_is_named(tmp_path: Path) -> None:
    """As the thinker of qwen3_omni_moe, which no class loads from the whole checkpoint."""
    shrunk = tiny_models._shrunk(Qwen3OmniMoeForConditionalGeneration.config_class().to_dict())
    talker = {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 16}}
    settings = tiny_models._merged(shrunk, {"talker_config": talker})
    config = Qwen3OmniMoeForConditionalGeneration.config_class(**settings)
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    part = r"`thinker` \(Qwen3OmniMoeThinkerForConditionalGeneration\) has one: save it with `model"
    with pytest.raises(ModelError, match=part):
        build_on_meta(ModelConfig(str(tmp_path)))
    # The part itself is trained.
    config.thinker_config.save_pretrained(tmp_path / "thinker")
    model = build_on_meta(ModelConfig(str(tmp_path / "thinker"), init="random"))
    assert type(model).__name__ == "Qwen3OmniMoeThinkerForConditionalGeneration"
    # The control: a class without such a part.
    with pytest.raises(ModelError, match=r"Give another model\.name_or_path"):
        build_on_meta(ModelConfig(str(layout("paligemma", tmp_path / "paligemma"))))


def test_all_linear_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_on_meta(ModelConfig(str(layout("nemotron_h", tmp_path))))
    names = {*adapted_modules(add_adapters(model, LoraConfig(r=2)))}
    assert names
    assert not any(name.endswith("out_proj") for name in names)
    assert "adapters   all-linear skips out_proj: " in capsys.readouterr().out


# ---- Nothing of the source is lost


def exported_names(source: Path, hf: Path) -> set[str]:
    """Return the names of a planned export of what is in `source`."""
    model = build_on_meta(ModelConfig(str(source)))
    assets = assets_of(model)
    assets.origin = {"name_or_path": str(source), "revision": None, "digest": base_digest(source)}
    hf.mkdir()
    assets.save(hf)
    model = build_model_from_assets(hf)
    aliases = tied_names(model)
    state = {n: t for n, t in model.state_dict().items() if n not in aliases}
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}
    carried = Carried.find(model, assets_of(model))
    return set(make_model_plan(model, shapes, None, 10**12, where="", carried=carried).tensors)


@pytest.mark.parametrize("spelling", ["published", "parameters"])
@pytest.mark.parametrize(
    "name", ["kimi_k25", "qwen3_5_moe", "mixtral", "llama4", "deepseek_v3", "qwen3_vl_moe"]
)
def test_an_export_has_the_names_of_its_source(name: str, spelling: str, tmp_path: Path) -> None:
    """Also if the source was saved under the names of the parameters, fused experts included."""
    source = layout(name, tmp_path / "source")
    if spelling == "parameters":
        model = tiny_layout(name)
        aliases = tied_names(model)
        state = {n: t.contiguous() for n, t in model.state_dict().items() if n not in aliases}
        save_file(state, source / FILE, {"format": "pt"})
    assert exported_names(source, tmp_path / "hf") == load_file(source / FILE).keys()


def test_experts_are_exported_under_the_keys_that_made_them(tmp_path: Path) -> None:
    """Twelve experts: their natural order is not that of their names as texts."""
    settings = {"n_routed_experts": 12, "num_experts_per_tok": 2}
    changed = dataclasses.replace(LAYOUTS["kimi_k25"], settings={"text_config": settings})
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(LAYOUTS, "kimi_k25", changed)
        source = layout("kimi_k25", tmp_path / "source")
    run_dir = saved_run(source, tmp_path / "run")
    before, after = (
        load_file(source / FILE),
        load_file(Path(consolidate(run_dir, tmp_path / "hf")) / FILE),
    )
    assert sum(".experts.11." in key for key in before) > 0
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder {source, run, export} of a tied Qwen3.5 with its layer for more tokens."""
    root = tmp_path_factory.mktemp("qwen")
    saved_run(layout("qwen3_5 tied", root / "source"), root / "run")
    consolidate(root / "run", root / "export")
    return root


def test_every_tensor_of_the_source_is_in_the_export(qwen: Path) -> None:
    source, exported = (load_file(qwen / name / FILE) for name in ("source", "export"))
    assert source.keys() == exported.keys()
    assert any(name.startswith("mtp.") for name in source)
    for name, value in source.items():
        assert exported[name].dtype == value.dtype, name
        assert torch.equal(exported[name], value), name
    assert verify_export(qwen / "run", qwen / "export").ok
    origin = export_manifest.read(qwen / "export")["origin"]
    assert origin["carried"]["tensors"] == 15


def test_a_source_that_is_gone_or_another_one(qwen: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(qwen / "source", source)
    run_dir = saved_run(source, tmp_path / "run")
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(ExportError, match=r"mtp\.\* \(15\).*--hf_assets.*--without_carried"):
        consolidate(run_dir, tmp_path / "gone")
    consolidate(run_dir, tmp_path / "found", hf_assets=moved)
    assert load_file(tmp_path / "found" / FILE).keys() == load_file(moved / FILE).keys()
    tensors = load_file(moved / FILE)
    tensors["mtp.fc.weight"] += 1
    save_file(tensors, moved / FILE, {"format": "pt"})
    with pytest.raises(ExportError, match="other weights than the run started from"):
        consolidate(run_dir, tmp_path / "other", hf_assets=moved)


def test_what_is_left_out_is_not_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = layout("glm4_moe", tmp_path / "source")
    run_dir = saved_run(source, tmp_path / "run")
    said = capsys.readouterr().out
    assert "carried    Glm4MoeForCausalLM does not load 29 tensors: model.layers.3.* (29)" in said
    consolidate(run_dir, tmp_path / "hf", without_carried=True)
    assert "omitted    29 tensors: model.layers.3.* (29), of the source" in capsys.readouterr().out
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 0
    names = load_file(tmp_path / "hf" / FILE).keys()
    assert not any("layers.3." in name for name in names)
    report = verify_export(run_dir, tmp_path / "hf")
    assert any("omitted on request: 29 tensors" in note for note in report.notes)


def test_a_tensor_that_nothing_explains_is_refused(tmp_path: Path) -> None:
    source = layout("qwen3", tmp_path)
    tensors = load_file(source / FILE)
    save_file(tensors | {"model.layers.7.extra.weight": torch.ones(3)}, source / FILE)
    cfg = ModelConfig(str(source))
    with pytest.raises(LoadingError, match=r"not known to the model: model\.layers\.7"):
        check_weights_fit(build_on_meta(cfg), cfg)


def test_a_tied_weight_that_the_source_has_twice_is_exported_twice(tmp_path: Path) -> None:
    source = layout("llama tied", tmp_path / "source")
    tensors = load_file(source / FILE)
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(both, source / FILE, {"format": "pt"})
    consolidate(saved_run(source, tmp_path / "run"), tmp_path / "hf")
    assert load_file(tmp_path / "hf" / FILE).keys() == both.keys()
    assert verify_export(tmp_path / "run", tmp_path / "hf").ok


Tensors = dict[str, torch.Tensor]


def _renamed(tensors: Tensors, name: str) -> list[str]:
    tensors["x." + name] = tensors.pop(name)
    return [name, "x." + name]


def _altered(tensors: Tensors, name: str) -> list[str]:
    tensors[name].view(-1)[-1] += 1
    return [name]


def _added(tensors: Tensors, name: str) -> list[str]:
    tensors[name + "_2"] = tensors[name].clone()
    return [name + "_2"]


def _cast(tensors: Tensors, name: str) -> list[str]:
    tensors[name] = tensors[name].float()
    return [name]


def _dropped(tensors: Tensors, name: str) -> list[str]:
    tensors.pop(name)
    return [name]


DAMAGES: list[Callable[[Tensors, str], list[str]]] = [_dropped, _renamed, _altered, _added, _cast]


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 5))])
def test_verify_names_a_tensor_that_is_lost_renamed_altered_added_or_cast(
    qwen: Path, tmp_path: Path, seed: int
) -> None:
    """Ten damages a seed, each with a manifest that agrees with it: only the source can tell."""
    draw = random.Random(seed)
    export = tmp_path / "export"
    shutil.copytree(qwen / "export", export)
    origin, clean = export_manifest.read(export)["origin"], load_file(export / FILE)
    carried = sorted(name for name in clean if name.startswith("mtp."))
    for number in range(10):
        tensors = {name: value.clone() for name, value in clean.items()}
        kind = DAMAGES[(seed + number) % len(DAMAGES)]
        name = draw.choice(carried if number % 2 else sorted(clean))
        expected = kind(tensors, name)
        save_file(tensors, export / FILE, {"format": "pt"})
        export_manifest.write(export, export_manifest.describe_folder(export), origin)
        report = verify_export(qwen / "run", export)
        said = "\n".join(report.lines())
        assert not report.ok, (kind.__name__, name)
        assert any(part in said for part in expected), (kind.__name__, name, said)
    save_file(clean, export / FILE, {"format": "pt"})  # the control
    export_manifest.write(export, export_manifest.describe_folder(export), origin)
    assert verify_export(qwen / "run", export).ok


# ---- Stored in fewer bits


def test_blocks_that_do_not_divide_a_matrix(tmp_path: Path) -> None:
    """As 576 rows in blocks of 128, which transformers refuses."""
    source = layout("deepseek_v3 fp8", tmp_path)
    stored, plain = load_file(source / FILE), load_file(source / "plain" / FILE)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scales = stored[name + "_scale_inv"]
    assert stored[name].shape[0] % scales.shape[0]
    model = build_on_meta(ModelConfig(str(source), dtype="float32"))
    load_pretrained(model, source, "cpu")
    assert torch.equal(model.get_parameter(name), plain[name])
    _, other, _ = in_fp8({name: plain[name]})  # the control: other scales, other values
    assert not torch.equal(other[name], plain[name])


def test_shapes_of_what_is_carried_are_found_without_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra layer of DeepSeek-V3 has 14 B parameters: an export reads them once, to write."""
    source = layout("deepseek_v3 fp8", tmp_path)
    model = build_on_meta(ModelConfig(str(source), dtype="float32"))
    read, read_rows = list[StoredTensor](), StoredTensor.read_rows

    def counted(tensor: StoredTensor, *rows: int) -> torch.Tensor:
        read.append(tensor)
        return read_rows(tensor, *rows)

    monkeypatch.setattr(StoredTensor, "read_rows", counted)
    found = find_carried_tensors(model, assets_of(model), source)
    made = {name: one for name, one in found.items() if one.stored is None}
    assert any(name.endswith("kv_a_proj_with_mqa.weight") for name in made)  # blocks do not divide
    assert read == []
    plain = load_file(source / "plain" / FILE)
    for name, one in made.items():
        assert one.shape == plain[name].shape, name
        assert torch.equal(one.read(), plain[name].to(one.dtype)), name
    assert len(read) == 2 * len(made)  # values and scales


def test_what_transformers_cannot_read_in_full_precision_is_refused(tmp_path: Path) -> None:
    source = layout("qwen3", tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised already \(gptq\)"):
        build_on_meta(ModelConfig(str(source)))


def test_the_table_covers_thirty_layouts() -> None:
    assert len({value.class_name for value in LAYOUTS.values()}) >= 30


@pytest.mark.parametrize("kind", ["gemma4_text", "gpt_neox", "bailing_hybrid"])
def test_embeddings_of_any_kind_grow(tmp_path: Path, kind: str) -> None:
    """Also of each layer, and under names that transformers renames."""
    source = tiny_models.save(tiny_models.tiny_model(kind), tmp_path / "source", kind)
    save_byte_tokenizer(source)
    cfg = ModelConfig(str(source), dtype="float32", resize_embeddings=True)
    model = build_on_meta(cfg)
    check_weights_fit(model, cfg)
    load_pretrained(model, source, "cpu")
    resized = assets_of(model).resized
    assert resized
    assert {*resized.values()} == {tiny_models.VOCABULARY}
    assert all(model.get_parameter(name).shape[0] == 257 for name in resized)
    checkpoint.save(checkpoint.TrainState(model, step=1), tmp_path / "run", CheckpointConfig())
    consolidate(tmp_path / "run", tmp_path / "hf")
    assert verify_export(tmp_path / "run", tmp_path / "hf", logits=True).ok
