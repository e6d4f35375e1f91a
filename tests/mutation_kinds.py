"""The kinds of files that are mutated: how, what reads each, and what is made to agree with it."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutate
import xxhash

STEP = "checkpoints/step-00000003"


@dataclass(frozen=True)
class Kind:
    """A kind of file, how it is mutated, and what reads it."""

    file: str
    mutations: tuple[mutate.Mutation, ...]  # beside those of any bytes
    readers: tuple[Callable[[], Any], ...]
    share: int  # of all cases, in proportion
    seal: Callable[[Path], None] | None = None
    """Makes the hashes around the file agree with it."""
    guarded: bool = False
    """Whether hashes say what it must be, and nothing can be made to agree with it."""

    @property
    def part(self) -> str:
        """What is copied of the scene for a case; the rest is linked."""
        return self.file.partition("/")[0]


def kinds() -> dict[str, Kind]:
    """Return name -> kind."""
    import mutation_readers as read

    m = mutate
    run = (read.inspect_run, read.verify_run, read.consolidate_run, read.resume)
    lora = (read.inspect_adapters, read.consolidate_adapters, read.merge, read.resume_adapters)
    model = (read.load, read.units, read.verify_model)
    words = (read.learn, read.documents)
    adapter = (read.verify_adapter, read.verify_adapters, read.publish_adapter, read.read_adapter)
    export = (read.verify_export, read.verify_both, read.publish_export)
    logged = (read.report, read.consolidate_run, read.calibrate, read.cut)
    made = {
        "a recipe's config": Kind(
            "finetune.yaml", (m.in_yaml,), (read.parse, read.plan, read.units), 300
        ),
        "config.yaml of a run": Kind(
            "run/config.yaml",
            (m.in_yaml,),
            (read.claim, read.report, read.inspect_run, read.consolidate_run),
            150,
        ),
        "Accelerate YAML": Kind("other/accelerate.yaml", (m.in_yaml,), (read.launch,), 250),
        "device YAML": Kind("other/device.yaml", (m.in_yaml,), (read.estimate,), 100),
        "calibration.yaml": Kind(
            "cache/toolkit/calibration.yaml", (m.in_yaml,), (read.estimate,), 60
        ),
        "config of axolotl": Kind(
            "other/axolotl_gpt_oss_20b_lora.yaml", (m.in_yaml,), (read.convert_yaml,), 150
        ),
        "script for Trainer": Kind(
            "other/trainer_alpaca_lora.py", (m.in_table,), (read.convert_script,), 60
        ),
        "config.json": Kind("model/config.json", (m.in_json,), (*model, read.learn), 900),
        "generation_config.json": Kind(
            "model/generation_config.json", (m.in_json,), (read.answer, read.verify_model), 200
        ),
        "safetensors index": Kind(
            "model/model.safetensors.index.json", (m.in_json,), (read.load, read.verify_model), 400
        ),
        "safetensors": Kind(
            "model/model-00002-of-00005.safetensors",
            (m.in_safetensors, m.in_safetensors),
            (read.load, read.verify_model),
            500,
        ),
        "tokenizer.json": Kind("model/tokenizer.json", (m.in_json,), words, 800),
        "tokenizer_config.json": Kind("model/tokenizer_config.json", (m.in_json,), words, 300),
        "chat template": Kind(
            "model/chat_template.jinja", (m.in_template,), (read.learn, read.answer), 250
        ),
        "manifest.json": Kind(f"run/{STEP}/manifest.json", (_manifest,), run, 500, _commit),
        "COMMIT": Kind(f"run/{STEP}/COMMIT", (), run, 60, guarded=True),
        "state.json": Kind(f"run/{STEP}/state.json", (m.in_json,), run, 500, _seal),
        "state.json of adapters": Kind(f"lora/{STEP}/state.json", (m.in_json,), lora, 200, _seal),
        "DCP .metadata": Kind(f"run/{STEP}/dcp/.metadata", (m.in_pickle,), run, 400, _seal),
        "DCP shard": Kind(f"run/{STEP}/dcp/__1_0.distcp", (m.in_zips,), run, 300, _seal),
        ".metadata of another tool": Kind(
            "plain/.metadata", (m.in_pickle,), (read.inspect_plain, read.consolidate_plain), 400
        ),
        "shard of another tool": Kind(
            "plain/__0_0.distcp", (m.in_zips,), (read.inspect_plain, read.consolidate_plain), 200
        ),
        "random state": Kind(
            f"run/{STEP}/rng/rank-00000.safetensors",
            (m.in_safetensors,),
            (read.verify_run, read.resume),
            200,
            _seal,
        ),
        "config.json of a checkpoint": Kind(
            f"run/{STEP}/hf/config.json", (m.in_json,), run, 200, _seal
        ),
        "source.json": Kind(f"run/{STEP}/hf/source.json", (m.in_json,), run, 150, _seal),
        "adapter_config.json of a run": Kind(
            f"lora/{STEP}/hf/adapter_config.json", (m.in_json,), lora, 200, _seal
        ),
        "toolkit_manifest.json": Kind(
            "export/toolkit_manifest.json", (_export_manifest,), export, 400
        ),
        "adapter_config.json": Kind(
            "adapter/adapter_config.json", (m.in_json,), adapter, 400, _seal_export
        ),
        "adapter_model.safetensors": Kind(
            "adapter/adapter_model.safetensors", (m.in_safetensors,), adapter, 200, _seal_export
        ),
        "metrics.jsonl": Kind("run/metrics.jsonl", (m.in_lines,), logged, 120),
        "starts.jsonl": Kind("run/starts.jsonl", (m.in_lines,), logged, 100),
    }
    data: dict[str, tuple[mutate.Mutation, ...]] = {
        **dict.fromkeys(("chat.jsonl", "pairs.jsonl", "ids.jsonl", "texts.jsonl"), (m.in_lines,)),
        "pairs.json": (m.in_json,),
        "pairs.csv": (m.in_table,),
        "text.txt": (m.in_table,),
        **dict.fromkeys(("chat.parquet", "pairs.parquet", "ids.parquet"), (m.in_columns,)),
        "pairs.jsonl.gz": (),
        "pairs.arrow": (),
    }
    for name, mutations in data.items():
        share = 200 if mutations else 80
        made[f"rows in {name}"] = Kind(f"data/{name}", mutations, read.of_file(name), share)
    return made


# ---- What agrees with what


def _agreed(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _manifest(content: bytes, chance: random.Random) -> bytes:
    return _agreed(mutate.in_tree(json.loads(content), chance)).encode("utf-8", "surrogatepass")


def _commit(file: Path) -> None:
    """Let COMMIT agree with the manifest."""
    text = hashlib.sha256(file.read_bytes()).hexdigest() + "\n"
    (file.parent / "COMMIT").write_text(text)


def _seal(file: Path) -> None:
    """Let the manifest agree with a file of its checkpoint, and COMMIT with that."""
    folder = next(p for p in file.parents if (p / "COMMIT").is_file())
    manifest = json.loads((folder / "manifest.json").read_text())
    raw = file.read_bytes()
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest["files"][str(file.relative_to(folder))] = entry
    (folder / "manifest.json").write_text(_agreed(manifest))
    _commit(folder / "manifest.json")


def _export_text(manifest: Any) -> bytes:
    text = _agreed(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest": {text}}}\n'.encode()


def _export_manifest(content: bytes, chance: random.Random) -> bytes:
    return _export_text(mutate.in_tree(json.loads(content)["manifest"], chance))


def _seal_export(file: Path) -> None:
    """Let an export's manifest agree with a file, as far as anybody can without reading it."""
    path = file.parent / "toolkit_manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    raw = file.read_bytes()
    manifest["files"][file.name] = {"size": len(raw), "xxh3": xxhash.xxh3_128_hexdigest(raw)}
    path.write_bytes(_export_text(manifest))
