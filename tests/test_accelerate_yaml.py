"""An Accelerate FSDP YAML: what becomes of each key, and one real launch with it.

The environments of the tests are not written down: Accelerate's own launcher makes them of a YAML.
"""

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from accelerate.commands import launch as commands
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import launch as launcher
from conftest import (
    BIN,
    ROOT,
    free_port,
    run_recipe,
    save_byte_tokenizer,
    save_tiny_model,
)
from distributed import run_recipe_ranks
from transformers.distributed.fsdp import is_fsdp_enabled

from toolkit import config
from toolkit.config import accelerate_yaml
from toolkit.config.parse import flatten_settings
from toolkit.config.settings import PretrainConfig
from toolkit.errors import ConfigError, LaunchError
from toolkit.formats.metrics_file import read_metrics
from toolkit.training import launch

DOCS = ROOT / "docs" / "accelerate.md"
MODEL = ["--model.name_or_path", "here"]


def written(file: Path, fsdp: dict | None, **top) -> Path:
    """Write an Accelerate YAML for two CPU processes; it shards where `fsdp` is given."""
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if fsdp is None else "FSDP",
        "use_cpu": True,
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    } | ({} if fsdp is None else {"fsdp_config": fsdp})
    file.write_text(yaml.safe_dump(content | top), "utf-8")
    return file


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Return a function (fsdp_config, flags, top level keys) -> what `accelerate launch` sets."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)

    def make(fsdp: dict | None, *flags: str, **top) -> dict[str, str]:
        file = written(tmp_path / "accelerate.yaml", fsdp, **top)
        words = ["--config_file", str(file), *flags, "script.py"]
        monkeypatch.setattr(sys, "argv", ["accelerate", *words])
        args = commands.launch_command_parser().parse_args(words)
        args.main_process_port = free_port()
        args, _, _ = commands._validate_launch_command(args)
        return launcher.prepare_multi_gpu_env(args) | {"LOCAL_WORLD_SIZE": "2"}

    return make


@pytest.fixture
def translated(environment):
    """Return a function (fsdp_config, flags, top level keys) -> (settings, notes)."""

    def make(fsdp: dict | None, *flags: str, **top) -> tuple[dict, list[str]]:
        return accelerate_yaml.translate_environment(environment(fsdp, *flags, **top))

    return make


@pytest.fixture
def launched(environment, monkeypatch):
    """Return a function like `environment` that puts this process into the environment."""

    def make(fsdp: dict | None, *flags: str, **top) -> None:
        for name, value in environment(fsdp, *flags, **top).items():
            monkeypatch.setenv(name, value)
        # The launcher says so to one process only; more look at its command line.
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    return make


# --------------------------------------------------------------------------------------------------
# Key by key
# --------------------------------------------------------------------------------------------------

# As a user of version 2 writes it: keys of fsdp_config -> settings below `sharding`.
HONOURED = [
    ({}, {}),
    ({"fsdp_reshard_after_forward": True}, {}),  # as `auto`: the root stays gathered
    ({"fsdp_reshard_after_forward": False}, {"reshard_after_forward": False}),
    ({"reshard_after_forward": False}, {"reshard_after_forward": False}),  # without the prefix
    ({"fsdp_offload_params": True}, {"cpu_offload": True}),
    ({"fsdp_offload_params": False}, {}),
    (
        {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, LlamaMLP",
        },
        {"layer_classes": ["LlamaDecoderLayer", "LlamaMLP"]},
    ),
    ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
    ({"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}, {"layer_classes": ["GPT2Block"]}),
    ({"fsdp_transformer_layer_cls_to_wrap": None}, {}),
    ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing": "full"}),
    (
        {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
        {"activation_checkpointing": "full", "activation_offload": True},
    ),
    ({"fsdp_forward_prefetch": True}, {"forward_prefetch": 1}),
    ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {}),
    ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, {}),
    ({"fsdp_ignored_modules": r"head|.*\.gate"}, {"ignored_parameters": ["head.*", "*.gate.*"]}),
    ({"fsdp_ignored_modules": r"model\.embed"}, {"ignored_parameters": ["model.embed.*"]}),
    # What changes nothing here is silent, whatever its value.
    ({"fsdp_use_orig_params": False}, {}),
    ({"fsdp_cpu_ram_efficient_loading": True}, {}),
    ({"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}, {}),
    ({"fsdp_min_num_params": 1000}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("fsdp", "sharding"), HONOURED, ids=lambda v: ",".join(v) or "nothing")
def test_a_key_becomes_a_setting(translated, tmp_path, fsdp, sharding) -> None:
    settings, notes = translated({"fsdp_version": 2} | fsdp)
    expected = {f"sharding.{name}": value for name, value in sharding.items()}
    assert settings == expected | {"sharding.param_dtype": "bfloat16"}
    assert notes == []
    # And it is one that exists, of its type: defaults are not parsed, what is dumped and read is.
    cfg = config.parse(PretrainConfig, MODEL, defaults=settings)
    assert settings.items() <= flatten_settings(cfg).items()
    (tmp_path / "config.yaml").write_text(config.dump(cfg), "utf-8")
    assert config.load(PretrainConfig, tmp_path / "config.yaml") == cfg


@pytest.mark.parametrize(
    ("fsdp", "said"),
    [
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, ["NO_WRAP", "sharding.layer_classes"]),
        (
            {
                "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                "fsdp_min_num_params": 1000,
                "fsdp_transformer_layer_cls_to_wrap": "LlamaMLP",  # which Accelerate ignores then
            },
            ["SIZE_BASED_WRAP: each decoder layer", "sharding.layer_classes"],
        ),
        ({"fsdp_backward_prefetch": "NO_PREFETCH"}, ["NO_PREFETCH", "sharding.backward_prefetch"]),
        ({"fsdp_backward_prefetch": "BACKWARD_POST"}, ["BACKWARD_POST: FSDP2 always gathers"]),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, ["FULL_STATE_DICT", "toolkit consolidate"]),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, ["LOCAL_STATE_DICT: checkpoints are"]),
        ({"fsdp_ignored_modules": r"layers\.\d+\.mlp"}, [r"\\d+", "sharding.ignored_parameters"]),
        (
            {"fsdp_sharding_strategy": "HYBRID_SHARD"},
            ["HYBRID_SHARD belongs to fsdp_version 1", "sharding.dp_shard"],
        ),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_a_key_that_cannot_be_honoured_is_named(translated, fsdp, said) -> None:
    settings, notes = translated({"fsdp_version": 2} | fsdp)
    assert settings == {"sharding.param_dtype": "bfloat16"}
    assert len(notes) == 1
    assert "\n" not in notes[0]
    for part in [next(iter(fsdp)), *said]:
        assert part in notes[0]


@pytest.mark.parametrize(
    "fsdp", [{}, {"fsdp_version": 1}, {"fsdp_sharding_strategy": "FULL_SHARD"}, {"fsdp_version": 3}]
)
def test_version_1_is_refused_with_the_command_that_converts(translated, fsdp) -> None:
    """1 is Accelerate's default, where a YAML names no version."""
    with pytest.raises(LaunchError, match=r"shards with FSDP2.*accelerate to-fsdp2 --config_file"):
        translated(fsdp)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", "bfloat16"), ("no", "float32"), (None, "float32")]
)
def test_mixed_precision_of_a_sharding_yaml(translated, precision, dtype) -> None:
    found = translated({"fsdp_version": 2}, mixed_precision=precision)
    assert found == ({"sharding.param_dtype": dtype}, [])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_nothing_is_asked_of_a_yaml_that_does_not_shard(translated, precision) -> None:
    assert translated(None, mixed_precision=precision) == ({}, [])
    assert accelerate_yaml.translate_environment({}) == ({}, [])


def test_precisions_that_are_not_to_be_had(environment, translated) -> None:
    with pytest.raises(LaunchError, match=r"fp16 needs loss scaling.* set mixed_precision: bf16"):
        translated({"fsdp_version": 2}, mixed_precision="fp16")
    settings, notes = translated(None, mixed_precision="fp16")
    assert settings == {}
    assert "mixed_precision fp16" in notes[0]
    # Accelerate itself stops fp8 where no library for it is installed.
    env = environment({"fsdp_version": 2}) | {"ACCELERATE_MIXED_PRECISION": "fp8"}
    settings, notes = accelerate_yaml.translate_environment(env)
    assert settings == {"sharding.param_dtype": "bfloat16"}
    assert "set model.float8" in notes[0]


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, (2, 4)),
        ({"dp_shard_size": 8}, (1, 8)),
        ({"dp_replicate_size": 8}, (8, 1)),
        ({"dp_replicate_size": 1}, None),
        ({"dp_shard_size": 2, "tp_size": 1, "cp_size": 1, "sp_size": 1}, (1, 2)),
    ],
)
def test_parallelism_config(translated, sizes, mesh) -> None:
    keys = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    settings, notes = translated({"fsdp_version": 2}, parallelism_config=keys)
    del settings["sharding.param_dtype"]
    assert tuple(settings.values()) == (mesh or ())
    assert list(settings) == (["sharding.dp_replicate", "sharding.dp_shard"] if mesh else [])
    assert notes == []


@pytest.mark.parametrize(
    ("axis", "kind"), [("tp", "tensor"), ("cp", "context"), ("sp", "sequence")]
)
def test_an_axis_of_the_mesh_that_is_not_here_is_refused(translated, axis, kind) -> None:
    keys = {"parallelism_config_dp_shard_size": 2, f"parallelism_config_{axis}_size": 4}
    with pytest.raises(LaunchError) as refused:
        translated({"fsdp_version": 2}, parallelism_config=keys)
    said = str(refused.value)
    assert f"parallelism_config_{axis}_size 4 of the launch configuration" in said
    assert f"{kind} parallelism is not supported; set it to 1" in said
    assert "dp_shard_size 8 for a global batch 4 times as large" in said
    assert "\n" not in said


@pytest.mark.parametrize("fsdp", [None, {"fsdp_version": 2}])
def test_dynamo(translated, fsdp) -> None:
    compiled = {"sharding.torch_compile": "model", "sharding.torch_compile_backend": "inductor"}
    settings, notes = translated(fsdp, dynamo_config={"dynamo_backend": "INDUCTOR"})
    settings.pop("sharding.param_dtype", None)
    assert (settings, notes) == (compiled, [])
    asked = {
        "dynamo_backend": "AOT_EAGER",
        "dynamo_mode": "reduce-overhead",
        "dynamo_use_regional_compilation": True,
        "dynamo_use_fullgraph": True,
        "dynamo_use_dynamic": True,
    }
    settings, notes = translated(fsdp, dynamo_config=asked)
    settings.pop("sharding.param_dtype", None)
    assert settings == {
        "sharding.torch_compile": "layer",
        "sharding.torch_compile_backend": "aot_eager",
        "sharding.torch_compile_mode": "reduce-overhead",
    }
    assert [note.split()[0] for note in notes] == ["dynamo_use_fullgraph", "dynamo_use_dynamic"]
    config.parse(PretrainConfig, MODEL, defaults=settings)
    settings, notes = translated(fsdp, dynamo_config=asked | {"dynamo_backend": "NO"})
    settings.pop("sharding.param_dtype", None)
    assert (settings, notes) == ({}, [])


def test_flags_of_the_launcher_count_as_keys(translated) -> None:
    flags = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true"]
    settings, notes = translated(None, *flags)
    assert (settings["sharding.cpu_offload"], notes) == (True, [])
    fsdp = {"fsdp_version": 2, "fsdp_offload_params": True}
    settings, _ = translated(fsdp, "--fsdp_offload_params", "false")
    assert "sharding.cpu_offload" not in settings


def test_gradient_accumulation_set_by_hand(environment) -> None:
    steps = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    settings, notes = accelerate_yaml.translate_environment(environment(None) | steps)
    assert (settings, notes) == ({"train.gradient_accumulation_steps": 4}, [])
    config.parse(PretrainConfig, MODEL, defaults=settings)


@pytest.mark.parametrize(
    ("fsdp", "said"),
    [
        ({"fsdp_offload_params": "maybe"}, "fsdp_offload_params .* true or false, got maybe"),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "must be true or false, got full_shard"),
        ({"fsdp_auto_wrap_policy": "SOME"}, "one of TRANSFORMER_BASED_WRAP, .*got SOME"),
        ({"fsdp_state_dict_type": "WHOLE"}, "fsdp_state_dict_type .* got WHOLE"),
        ({"fsdp_backward_prefetch": "4"}, "fsdp_backward_prefetch .* got 4"),
    ],
)  # fmt: skip
def test_a_value_that_accelerate_does_not_know_either(translated, fsdp, said) -> None:
    with pytest.raises(LaunchError, match=said):
        translated({"fsdp_version": 2} | fsdp)


def test_a_key_of_a_newer_accelerate_is_named(environment) -> None:
    env = environment({"fsdp_version": 2}) | {"FSDP_TELEPORT": "true"}
    assert accelerate_yaml.translate_environment(env)[1] == [
        "fsdp_teleport is unknown to the toolkit and has no effect"
    ]


# --------------------------------------------------------------------------------------------------
# Nothing is missing
# --------------------------------------------------------------------------------------------------


def test_every_variable_of_the_launcher_is_answered_for() -> None:
    source = inspect.getsource(launcher.prepare_multi_gpu_env)
    variables = set(re.findall(r'"(FSDP_\w+)"', source))
    assert variables == accelerate_yaml._TRANSLATED


def test_the_documentation_has_every_key() -> None:
    prefixes = ("fsdp_", "dynamo_", "parallelism_config_")
    keys = {
        action.dest
        for action in commands.launch_command_parser()._actions
        if action.dest.startswith(prefixes)
    }
    keys |= set(re.findall(r"args\.(fsdp_\w+)", inspect.getsource(launcher.prepare_multi_gpu_env)))
    keys |= set(
        re.findall(r'"(fsdp_\w+)", None', inspect.getsource(launcher.prepare_multi_gpu_env))
    )
    rows = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {k for k in documented if k.startswith(prefixes)} == keys
    assert {"mixed_precision", "distributed_type"} <= documented
    settings = set(re.findall(r"`((?:sharding|train|model)\.\w+)", DOCS.read_text("utf-8")))
    known = flatten_settings(config.parse(PretrainConfig, MODEL))
    assert settings <= known.keys()


def test_the_example_translates_without_a_note(environment, monkeypatch) -> None:
    example = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text("utf-8"))
    fsdp = example.pop("fsdp_config")
    settings, notes = accelerate_yaml.translate_environment(environment(fsdp, **example))
    assert notes == []
    assert settings["sharding.param_dtype"] == "bfloat16"
    assert example["num_processes"] == 8


# --------------------------------------------------------------------------------------------------
# Defaults below the config
# --------------------------------------------------------------------------------------------------


def test_a_file_and_a_flag_win_over_the_yaml(tmp_path) -> None:
    yaml_says = {
        "sharding.cpu_offload": True,
        "sharding.layer_classes": ["A"],
        "sharding.param_dtype": "float32",
        "sharding.dp_shard": 4,
    }
    (tmp_path / "config.yaml").write_text(
        "model: {name_or_path: here}\nsharding: {layer_classes: [B, C], cpu_offload: false}"
    )
    args = ["--config", str(tmp_path / "config.yaml"), "--sharding.param_dtype", "bfloat16"]
    cfg = config.parse(PretrainConfig, args, defaults=yaml_says)
    assert cfg.sharding.layer_classes == ["B", "C"]
    assert cfg.sharding.cpu_offload is False
    assert cfg.sharding.param_dtype == "bfloat16"
    assert cfg.sharding.dp_shard == 4
    assert cfg.sharding.reduce_dtype == "float32"  # nobody's: the dataclass's


def test_a_contradiction_names_the_launch_configuration() -> None:
    asked = {
        "sharding.activation_checkpointing": "full",
        "sharding.activation_offload": True,
        "sharding.cpu_offload": True,
    }
    flags = [*MODEL, "--sharding.activation_checkpointing", "none"]
    with pytest.raises(ConfigError) as caught:
        config.parse(PretrainConfig, flags, defaults=asked)
    assert str(caught.value).endswith(
        " (sharding.activation_offload came from the launch configuration)"
    )
    asked |= {"sharding.param_dtype": "bfloat16"}
    for flags in (  # of which the launch configuration is innocent
        ["--train.max_steps", "0"],
        ["--sharding.param_dtype_overrides", "{lm_head: float16}"],
    ):
        with pytest.raises(ConfigError) as caught:
            config.parse(PretrainConfig, [*MODEL, *flags], defaults=asked)
        assert flags[0].removeprefix("--") in str(caught.value)
        assert "launch configuration" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"unknown setting 'sharding\.nothing'"):
        config.parse(PretrainConfig, MODEL, defaults={"sharding.nothing": 1})


# --------------------------------------------------------------------------------------------------
# The environment
# --------------------------------------------------------------------------------------------------


def test_the_environment_is_read_once_and_by_nobody_else(launched, capsys) -> None:
    keys = {
        "fsdp_version": 2,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    launched(
        keys,
        parallelism_config={"parallelism_config_dp_shard_size": 2},
        dynamo_config={"dynamo_backend": "INDUCTOR"},
    )
    assert launch.read_accelerate_settings()["sharding.cpu_offload"] is True
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("note: fsdp_state_dict_type FULL_STATE_DICT")
    assert not [n for n in os.environ if accelerate_yaml.is_translated(n)]
    assert launch.read_accelerate_settings() == {}
    assert capsys.readouterr().err == ""


def test_other_ranks_do_not_repeat_the_notes(launched, monkeypatch, capsys) -> None:
    launched({"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_sharding_strategy": 2})
    monkeypatch.setenv("RANK", "1")
    assert launch.read_accelerate_settings()["sharding.cpu_offload"] is True
    assert capsys.readouterr().err == ""


def test_settings_refuse_the_yaml_of_another_engine(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LaunchError, match="DeepSpeed"):
        launch.read_accelerate_settings()


def test_transformers_does_not_see_efficient_loading(launched, monkeypatch) -> None:
    """Else it would leave parameters on meta on every rank but the first."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    launched({"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True})
    assert is_fsdp_enabled()
    launch.read_accelerate_settings()
    assert not is_fsdp_enabled()


def test_a_program_that_does_not_ask_is_told_so(launched, capsys) -> None:
    launched({"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True})
    try:
        with launch.start():
            assert dist.is_initialized()
            assert not is_fsdp_enabled()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
    assert (
        "this program does not read the fsdp_config of the Accelerate YAML"
        in capsys.readouterr().err
    )


# --------------------------------------------------------------------------------------------------
# A real launch
# --------------------------------------------------------------------------------------------------

LAUNCHED = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_activation_checkpointing": True,
    "fsdp_offload_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}


def resized_flags(model: Path, text: Path, output: Path, *more: str) -> list[str]:
    return [
        "--model.name_or_path", str(model),
        "--model.resize_embeddings", "true",
        "--data.train_files", str(text),
        "--data.sequence_length", "32",
        "--data.eval_split", "0",
        "--train.max_steps", "2",
        "--train.logging_steps", "1",
        "--train.per_device_train_batch_size", "2",
        "--output_dir", str(output),
        *more,
    ]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


@pytest.mark.slow
def test_a_run_under_an_fsdp_yaml(tmp_path, text_file, launched) -> None:
    model = tmp_path / "model"
    save_byte_tokenizer(model, extra=50)  # 307 tokens, where the model has 300
    save_tiny_model(model)
    file = written(tmp_path / "fsdp.yaml", LAUNCHED)
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(file)]
    command += ["--main_process_port", str(free_port())]
    flags = resized_flags(model, text_file, tmp_path / "run", "--sharding.cpu_offload", "false")
    done = run_recipe(command, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("note: ") == 1
    assert done.stderr.count("note: fsdp_state_dict_type FULL_STATE_DICT") == 1
    assert "x 2 process(es) on cpu" in done.stdout

    cfg = config.load(PretrainConfig, tmp_path / "run" / "config.yaml")
    assert cfg.sharding.reshard_after_forward is False
    assert cfg.sharding.layer_classes == ["LlamaDecoderLayer"]
    assert cfg.sharding.activation_checkpointing == "full"
    assert cfg.sharding.param_dtype == "bfloat16"
    assert cfg.sharding.cpu_offload is False  # the flag

    # The same run, told so without Accelerate; the resized rows are drawn alike on both ranks.
    same = ["--sharding.reshard_after_forward", "false", "--sharding.param_dtype", "bfloat16"]
    same += ["--sharding.activation_checkpointing", "full"]
    flags = resized_flags(model, text_file, tmp_path / "same", *same)
    done = run_recipe_ranks("pretrain", 2, *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == losses(tmp_path / "same")
    assert len(losses(tmp_path / "run")) == 2

    # The same command resumes, with the YAML's own offload and one step more.
    flags = resized_flags(model, text_file, tmp_path / "run", "--train.max_steps", "3")
    launched(LAUNCHED)
    done = run_recipe_ranks("pretrain", 2, *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after step 2" in done.stdout
    assert (
        config.load(PretrainConfig, tmp_path / "run" / "config.yaml").sharding.cpu_offload is True
    )


@pytest.mark.slow
def test_a_class_that_the_model_has_not(tmp_path, tiny_llama, text_file, launched) -> None:
    """It is an error of this setting, before anything is loaded."""
    launched({"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "GPT2Block"})
    flags = resized_flags(tiny_llama, text_file, tmp_path / "run")
    done = run_recipe_ranks("pretrain", 2, *flags, cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "sharding.layer_classes" in done.stderr
    assert "'GPT2Block' matches no module" in done.stderr
