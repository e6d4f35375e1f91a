"""The command line: exit codes, one clear line, and no torch before it is needed."""

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit import __version__
from toolkit.checkpoint.run_folder import find_checkpoint_root
from toolkit.checkpoint.summary import collect_run_facts, format_summary, summarize
from toolkit.cli import main, split_settings
from toolkit.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one committed checkpoint (step 12) and one that was not finished (step 13)."""
    run = tmp_path_factory.mktemp("run")
    folder = run / "checkpoints/step-00000012"
    (folder / "hf").mkdir(parents=True)
    fields = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = LlamaConfig(**fields, num_attention_heads=2, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_config(config)
    state = {f"model.{k}": v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state |= {f"optimizer.{k}.exp_avg": torch.zeros_like(v) for k, v in model.named_parameters()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    saved = {"step": 12, "world_size": 2, "tokens": 4096, "data": {"global_batch": 16}}
    (folder / "state.json").write_text(json.dumps(saved))
    files = {
        str(p.relative_to(folder)): {
            "size": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in folder.rglob("*")
        if p.is_file()
    }
    manifest = json.dumps({"version": 1, "step": 12, "files": files, "tensors": {}}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMIT").write_text(hashlib.sha256(manifest).hexdigest() + "\n")
    (run / "checkpoints/step-00000013.tmp-ab12cd34").mkdir()
    return run


def test_help_and_version_do_not_import_torch() -> None:
    for arguments in (["--help"], ["--version"], ["report", "--help"], ["inspect"]):
        script = (
            "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); "
            "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); print(code, heavy)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith(f"{2 if arguments == ['inspect'] else 0} set()\n")


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "toolkit"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"toolkit {__version__}\n"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
    for command in ("train", "finetune", "plan", "rehearse", "report", "push"):
        assert f"\n    {command} " in done.stderr


def test_wrong_usage_is_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", str(run)]) == 2
    assert main(["consolidate", str(run), "--output", "x", "--dtype", "int4"]) == 2
    assert main(["consolidat", str(run)]) == 2
    assert main(["inspect", str(run), "--jso"]) == 2
    assert "unrecognized arguments: --jso" in capsys.readouterr().err


def test_consolidate_says_how_to_load(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["consolidate", str(run), "--output", str(out), "--max_shard_size", "8KB"]) == 0
    said, errors = capsys.readouterr()
    count, size = len(list(out.iterdir())), sum(f.stat().st_size for f in out.iterdir())
    assert f"{out}: {count} files" in said
    assert f"{size:,} bytes" in said
    assert errors == ""
    line = said.splitlines()[-1].strip()
    import transformers

    assert eval(line, {"transformers": transformers}).dtype == torch.bfloat16


def test_failures_are_1_and_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    cases = [
        (["consolidate", str(tmp_path / "no"), "--output", out], "does not exist"),
        (["consolidate", str(run / "checkpoints"), "--output", out], f"did you mean {run}?"),
        (["consolidate", str(run), "--output", str(run)], "exists and is not empty"),
        (["consolidate", str(run), "--output", out, "--max_shard_size", "5"], None),
        (["consolidate", str(run), "--output", out + "2", "--max_shard_size", "big"], "500MB"),
        (["consolidate", str(run), "--output", out + "2", "--merge"], "adapter"),
        (["inspect", str(tmp_path)], "holds no committed checkpoint"),
        (["inspect", out], "is a Hugging Face folder, no checkpoint; `toolkit verify`"),
        (["inspect", str(run / "checkpoints/step-00000013.tmp-ab12cd34")], "not committed"),
    ]
    for arguments, message in cases:
        code = main(arguments)
        errors = capsys.readouterr().err
        if message is None:  # a limit below every tensor is no error: a file for each
            assert code == 0
            continue
        assert code == 1
        assert errors.startswith("toolkit: error: ")
        assert errors.count("\n") == 1
        assert message in errors


def test_inspect_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    folders = [(c["folder"], c["step"], c["committed"]) for c in summary["checkpoints"]]
    assert folders == [
        ("step-00000012", 12, True),
        ("step-00000013.tmp-ab12cd34", 13, False),
    ]
    assert summary["checkpoints"][0]["bytes"] == summary["bytes"]["files"] > 0
    assert (summary["step"], summary["world_size"], summary["global_batch_size"]) == (12, 2, 16)
    assert summary["saved_with"] == {"tokens": 4096}
    assert summary["model"] == "LlamaForCausalLM"
    model = AutoModelForCausalLM.from_config(
        LlamaConfig.from_pretrained(run / "checkpoints/step-00000012/hf")
    )
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["bytes"]["model"] == summary["bytes"]["optimizer"] == 4 * summary["parameters"]
    assert summary["dtypes"]["model"] == {"float32": summary["parameters"]}
    norm = next(t for t in summary["tensors"] if t["name"] == "model.model.norm.weight")
    assert norm == {
        "name": "model.model.norm.weight",
        "section": "model",
        "shape": [16],
        "dtype": "float32",
        "bytes": 64,
        "chunks": 1,
    }
    checkpoint = run / "checkpoints/step-00000012"
    assert summarize(checkpoint)["checkpoints"] is None
    assert summarize(checkpoint / "dcp")["parameters"] == summary["parameters"]


def test_inspect_groups_identical_layers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    line = next(x for x in said.splitlines() if x.startswith("model.") and "up_proj" in x)
    name, count, *rest = line.split()
    assert name == "model.model.layers.{0..2}.mlp.up_proj.weight"
    assert count == "3"
    assert " ".join(rest) == "[24, 16] float32 4.6 kB 1"
    assert "NOT COMMITTED" in said


def test_tensors_in_as_many_chunks_share_a_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toolkit.checkpoint.summary as module

    real = module.read_metadata

    def sharded(folder: Path) -> object:
        metadata = real(folder)
        for name, entry in metadata.state_dict_metadata.items():
            rows = entry.size[0]
            if "layers.1" in name or rows < 3:  # one layer unlike the others
                continue
            cuts = [0, rows // 2, rows, rows]
            entry.chunks = [
                ChunkStorageMetadata(
                    torch.Size([a, *[0] * (len(entry.size) - 1)]),
                    torch.Size([b - a, *entry.size[1:]]),
                )
                for a, b in itertools.pairwise(cuts)
            ]
        return metadata

    monkeypatch.setattr(module, "read_metadata", sharded)
    said = format_summary(summarize(run))
    lines = {x.split()[0]: x for x in said.splitlines() if x.startswith("model.")}
    assert lines["model.model.layers.{0,2}.mlp.up_proj.weight"].split()[-1] == "2"
    assert lines["model.model.layers.1.mlp.up_proj.weight"].split()[-1] == "1"


def test_a_damaged_state_is_named(run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run / "checkpoints/step-00000012", tmp_path / "step-00000012")
    (tmp_path / "step-00000012/state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is not readable JSON"):
        summarize(tmp_path / "step-00000012")


def test_a_relative_root_is_found_from_elsewhere(tmp_path, monkeypatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "runs/a", project / "ck/checkpoints", elsewhere / "ck/checkpoints"):
        folder.mkdir(parents=True)
    config = "output_dir: runs/a\ncheckpoint: {root: ck}\n"
    for folder in (project / "runs/a", project / "ck"):
        (folder / "config.yaml").write_text(config)
    (project / "runs/a/metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    for cwd, run in ((project, "runs/a"), (elsewhere, "../project/runs/a"), (elsewhere, project)):
        monkeypatch.chdir(cwd)
        given = project / "runs/a" if run is project else Path(run)
        assert find_checkpoint_root(given).resolve() == project / "ck"  # not the other project's
    assert find_checkpoint_root(project / "ck") == project / "ck"
    assert collect_run_facts(project / "ck")["steps"] == 3, "the metrics of its run"
    (project / "runs/b").mkdir()
    (project / "runs/b/config.yaml").write_text("output_dir: other\ncheckpoint: {root: ck}\n")
    assert find_checkpoint_root(project / "runs/b") == Path(
        "ck"
    )  # the run was moved: here, as ever


def test_settings_stand_anywhere_among_the_arguments_of_a_command() -> None:
    own = ["plan", "a.yaml", "--world_size", "2", "--json"]
    for given in (
        [*own, "--model.name_or_path", "m", "--seed=3"],
        ["plan", "--model.name_or_path", "m", "a.yaml", "--seed=3", *own[2:]],
    ):
        assert split_settings(given) == (own, ["--model.name_or_path", "m", "--seed=3"])
    flags = ["--sharding.cpu_offload", "--json"]  # a value that is missing is no other's
    assert split_settings(flags) == (["--json"], ["--sharding.cpu_offload"])


def test_inspect_takes_settings_as_flags(tmp_path, tiny_llama, text_file, capsys) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {name_or_path: nowhere}\n")
    model = ["--model.name_or_path", str(tiny_llama)]
    assert main(["inspect", "--plan", str(file), *model, "--world_size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 2
    data = [*model, "--data.train_files", str(text_file), "--data.sequence_length", "32"]
    assert main(["inspect", "--data", str(file), *data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]
    assert main(["inspect", "--plan", str(file), *model, "--seeed", "2"]) == 2
    assert "unrecognized arguments: --seeed" in capsys.readouterr().err
    assert main(["inspect", "--plan", str(file), "--model.name", "x"]) == 2
    assert "unknown setting 'model.name'" in capsys.readouterr().err
    assert main(["inspect", "run", "--seed", "2"]) == 2
    assert "--seed needs --plan CONFIG or --data CONFIG" in capsys.readouterr().err


def test_the_folder_with_the_nearest_name_is_suggested_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        folder = tmp_path / "runs" / name / "checkpoints/step-00000001"
        folder.mkdir(parents=True)
        (folder / "COMMIT").touch()
    assert main(["inspect", "runs/min"]) == 1
    said = capsys.readouterr().err
    assert f"did you mean {tmp_path}/runs/mine or {tmp_path}/runs/demo?" in said
