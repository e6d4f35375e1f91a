"""`toolkit convert-config` on published configs of axolotl, TRL and Trainer.

`foreign_configs/` has their keys and values. What is tested of each key: change its value, and the
result is another one, or a note names it. Nothing is dropped in silence.
"""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from toolkit.cli import main
from toolkit.config import FinetuneConfig, PreferConfig, load
from toolkit.config.other_tools import OTHER_NAMES, settings_named
from toolkit.convert.converter import Conversion, convert_config, convert_settings
from toolkit.convert.tables_of_tools import NOT_CONVERTED
from toolkit.errors import ConfigError

FOREIGN = sorted((ROOT / "tests/foreign_configs").glob("*_*.*"))
YAMLS = [file for file in FOREIGN if file.suffix == ".yaml"]


def name_of(file: Path) -> str:
    return file.stem


def config_of(out: Conversion, tmp_path: Path) -> FinetuneConfig:
    file = tmp_path / "converted.yaml"
    file.write_text(out.text)
    return load(PreferConfig if out.recipe == "prefer" else FinetuneConfig, file)


@pytest.mark.parametrize("file", FOREIGN, ids=name_of)
def test_a_published_config_becomes_one_that_the_strict_parser_takes(file, tmp_path) -> None:
    out = convert_config(file)
    assert file.stem.startswith(out.tool)
    cfg = config_of(out, tmp_path)
    assert cfg.train.num_train_epochs >= 1
    assert not [note for note in out.notes if note.endswith("not known to the toolkit")]


def leaves(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value that is set below a mapping; a data set's own keys too."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        deeper = isinstance(value, dict) and (*path, key) != ("special_tokens",)
        deeper |= isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        if deeper and key not in ("message_property_mappings", "model_quantization_config_kwargs"):
            yield from leaves(value, (*path, key))
        elif value is not None:
            yield *path, key


def other(value: Any) -> Any:
    """Return a value that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if 0 < value < 1 else value + 2
    if isinstance(value, list):
        return [*value, "another"]
    return {"another": 1} if isinstance(value, dict) else f"another_{value}"


@pytest.mark.parametrize("file", YAMLS, ids=name_of)
def test_every_key_is_carried_or_named(file) -> None:
    given = yaml.safe_load(file.read_text())
    before = convert_settings(given)
    silent = []
    for path in leaves(given):
        changed = copy.deepcopy(given)
        inner = changed
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = other(inner[path[-1]])
        try:
            after = convert_settings(changed, before.tool)
        except ConfigError:  # refused by name
            continue
        same = (after.settings, after.notes) == (before.settings, before.notes)
        if same and not any(str(path[-1]) in note for note in before.notes):
            silent.append(path)
    assert silent == []


def test_a_made_up_key_is_named_and_its_secret_is_not() -> None:
    """The control of the test above."""
    for file in YAMLS:
        given = yaml.safe_load(file.read_text()) | {"made_up": 7, "hub_token": "hf_" + "x" * 34}
        notes = convert_settings(given).notes
        assert "made_up 7: not known to the toolkit" in notes
        assert any(note.startswith("hub_token: a config contains no token") for note in notes)
        assert "xxx" not in str(notes)


def test_keys_without_a_value_are_one_note() -> None:
    notes = convert_settings({"base_model": "m", "wandb_entity": None, "deepspeed": ""}).notes
    assert notes[0] == "wandb_entity, deepspeed: empty there, so omitted"


def test_values_mean_what_they_meant() -> None:
    """Each line: keys of a tool, and what becomes of them."""
    for tool, given, expected in (
        ("axolotl", {"base_model": "m"}, {"data.packing": "none", "data.eval_split": 0.0}),
        ("axolotl", {"train_on_inputs": True}, {"data.supervise": "all"}),
        ("axolotl", {"sample_packing": True}, {"data.packing": "bfd"}),
        (
            "axolotl",
            {"cosine_min_lr_ratio": 0.1, "lr_scheduler": "cosine"},
            {
                "optim.lr_scheduler_type": "cosine_with_min_lr",
                "optim.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
        ),
        ("axolotl", {"learning_rate": "2e-5"}, {"optim.learning_rate": 2e-5}),
        ("axolotl", {"datasets": [{"path": "a.jsonl"}]}, {"data.train_files": "a.jsonl"}),
        (
            "axolotl",
            {"datasets": [{"path": "json", "data_files": "b.json"}, {"path": "o/d", "name": "c"}]},
            {
                "data.sources": [
                    {"files": "b.json"},
                    {"dataset_name": "o/d", "dataset_config_name": "c"},
                ]
            },
        ),
        ("trl", {"packing": True, "packing_strategy": "wrapped"}, {"data.packing": "wrapped"}),
        ("trl", {}, {"optim.learning_rate": 2e-5, "train.num_train_epochs": 3.0}),
        ("trl", {"use_peft": True}, {"lora.r": 16, "lora.lora_alpha": 32}),
        ("trl", {"completion_only_loss": False}, {"data.supervise": "all"}),
        ("trl", {"router_aux_loss_coef": 0.0}, {"train.router_aux_loss": "none"}),
        ("trl", {"router_aux_loss_coef": 0.1}, {"train.router_aux_loss": None}),
        ("trainer", {"bf16": False}, {"sharding.param_dtype": "float32"}),
        ("trainer", {"fp16": True}, {"sharding.param_dtype": "bfloat16"}),
        ("trainer", {"warmup_steps": 0, "warmup_ratio": 0.1}, {"optim.warmup_steps": 0.1}),
        ("trainer", {"warmup_steps": 9, "warmup_ratio": 0.1}, {"optim.warmup_steps": 9}),
        (
            "trainer",
            {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 10}
            | {"load_best_model_at_end": True, "save_total_limit": 3},
            {"train.eval_steps": 5, "checkpoint.keep_best": True},
        ),
        (
            "trainer",
            {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True},
            {"checkpoint.save_total_limit": None, "checkpoint.keep_best": None},
        ),
        ("axolotl", {"save_total_limit": None}, {"checkpoint.save_total_limit": 4}),
        ("axolotl", {}, {"data.sequence_length": 512, "data.too_long": "drop"}),
        ("axolotl", {"excess_length_strategy": "raise"}, {"data.too_long": "error"}),
        ("axolotl", {"max_steps": 1000}, {"optim.warmup_steps": 30}),
        ("axolotl", {"max_steps": 9000}, {"optim.warmup_steps": 100}),
        ("axolotl", {}, {"optim.warmup_steps": 0.03}),
        ("axolotl", {"warmup_steps": 0}, {"optim.warmup_steps": 0}),
        ("axolotl", {"use_wandb": True}, {"metrics.report_to": "wandb"}),
        (
            "axolotl",
            {"datasets": [{"path": "a.jsonl", "type": "completion", "field": "body"}]},
            {"data.supervise": None, "data.columns": {"text": "body"}},
        ),
        (
            "axolotl",
            {
                "datasets": [
                    {"path": "a.jsonl", "type": "chat_template"},
                    {"path": "b.jsonl", "type": "completion", "field": "body"},
                ]
            },
            {
                "data.supervise": None,
                "data.sources": [
                    {"files": "a.jsonl"},
                    {"files": "b.jsonl", "columns": {"text": "body"}},
                ],
            },
        ),
        (
            "trainer",
            {"lr_scheduler_type": "cosine_warmup_with_min_lr"}
            | {"lr_scheduler_kwargs": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1}},
            {
                "optim.lr_scheduler_type": "cosine_warmup_with_min_lr",
                "optim.lr_scheduler_kwargs": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
            },
        ),
        (
            "trainer",
            {"lr_scheduler_type": "constant", "warmup_steps": 100},
            {"optim.lr_scheduler_type": "constant", "optim.warmup_steps": None},
        ),
        ("trainer", {"fsdp": "full_shard offload"}, {"sharding.cpu_offload": True}),
        (
            "trainer",
            {"fsdp_config": {"version": 2, "reshard_after_forward": False}},
            {"sharding.reshard_after_forward": False},
        ),
        ("trainer", {"optim": "paged_adamw_8bit"}, {"optim.optim": "adamw_8bit"}),
        (
            "trainer",
            {"lr_scheduler_kwargs": {"num_decay_steps": 10}},
            {"optim.lr_scheduler_kwargs": {"num_decay_steps": 10}},
        ),
    ):
        settings = convert_settings({"model_name_or_path": "m", **given}, tool).settings
        assert {name: settings.get(name) for name in expected} == expected, given


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"deepspeed": "zero3.json"}, "FSDP2 shards as ZeRO-3"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "cosine is set"),
        ({"optim": "lion"}, "adamw_torch_fused is set"),
        ({"val_set_size": 2000}, "data.eval_split is a share"),
        ({"save_strategy": "epoch"}, "checkpoint.save_steps counts steps"),
        ({"logging_steps": 0.1}, "a number of steps is needed"),
        ({"fsdp": "hybrid_shard"}, "sharding.dp_replicate"),
        ({"torch_dtype": "bfloat16"}, "the optimizer updates weights of that dtype"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "constant_with_warmup has one"),
        ({"load_best_model_at_end": True}, "all checkpoints are kept, the best one among them"),
        ({"load_in_8bit": True, "use_peft": True}, "lora.load_in_4bit: true is the nearest"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef 0.1: it is config.json's"),
        ({"early_stopping_patience": 3}, "needs train.eval_steps"),
        ({"report_to": "all"}, "one of tensorboard"),
        ({"chat_template": "llama3"}, "takes the template or its file"),
    ],
)
def test_what_means_something_else_is_named(given, named) -> None:
    out = convert_settings({"model_name_or_path": "m", **given}, "trainer")
    assert any(named in note for note in out.notes), out.notes


@pytest.mark.parametrize("named", [{}, {"chat_template": "jinja"}, {"chat_template": None}])
def test_a_template_of_its_own_is_carried(named) -> None:
    given = {"base_model": "m", "chat_template_jinja": "{{ messages }}", **named}
    assert convert_settings(given).settings["data.chat_template"] == "{{ messages }}"


def test_a_script_is_read_and_never_run(tmp_path) -> None:
    script = tmp_path / "train.py"
    mark = tmp_path / "it_ran"
    script.write_text(
        f"open({str(mark)!r}, 'w')\nRATE = 1e-4\nRATE2 = 1\nRATE2 = 2\nepochs = float(input())\n"
        "args = SFTConfig(learning_rate=RATE, max_length=64, num_train_epochs=epochs,\n"
        "    weight_decay=RATE2, output_dir='o', **more())\n"
        "LoraConfig(r=4, target_modules=['q_proj'], task_type=TaskType.CAUSAL_LM)\n"
        "AutoModelForCausalLM.from_pretrained('org/m', dtype=torch.bfloat16)\n"
        "SFTTrainer(args=args, model=None)\n"
    )
    out = convert_config(script)
    assert not mark.exists()
    assert out.tool == "trl"
    assert out.settings["optim.learning_rate"] == 1e-4
    assert out.settings["lora.r"] == 4
    assert out.settings["model.name_or_path"] == "org/m"
    assert out.settings["model.dtype"] == "bfloat16"
    assert "train.num_train_epochs" not in out.settings  # nor TRL's default in its place
    told = [note.split(" (")[0] for note in out.notes if "computed by the script" in note]
    assert sorted(told) == ["**", "num_train_epochs", "weight_decay"]


def test_a_script_calls_peft_and_bitsandbytes_with_their_own_defaults(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "quant = BitsAndBytesConfig(load_in_4bit=True)\n"
        "args = SFTConfig('out', 7, max_length=64)\n"
        "SFTTrainer('org/m', args, peft_config=LoraConfig(r=16))\n"
    )
    out = convert_config(script)
    lora = {k.removeprefix("lora."): v for k, v in out.settings.items() if k.startswith("lora.")}
    assert lora.pop("load_in_4bit") is True
    assert lora == {"r": 16, "lora_alpha": 8}
    assert "bnb_4bit_quant_type fp4: nf4 is what there is" in out.notes
    peft = LoraConfig(r=16)
    assert (peft.lora_alpha, peft.lora_dropout) == (8, 0.0)
    assert BitsAndBytesConfig(load_in_4bit=True).bnb_4bit_quant_type == "fp4"
    assert out.settings["model.name_or_path"] == "org/m"
    assert out.settings["output_dir"] == "out"
    assert "argument 2 of SFTConfig 7: not known to the toolkit" in out.notes
    # TRL's command line has others.
    yaml_too = convert_settings({"model_name_or_path": "m", "use_peft": True}, "trl").settings
    assert (yaml_too["lora.lora_alpha"], yaml_too["lora.lora_dropout"]) == (32, 0.05)
    (tmp_path / "a.yaml").write_text("{model_name_or_path: m, use_peft: true}")
    assert convert_config(tmp_path / "a.yaml", "trl").settings == yaml_too


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "- 1\n", "holds no settings"),
        ("a.yaml", "{}", "holds no settings"),
        ("a.py", "print(1)", "holds no settings"),
        ("a.py", "def f(:\n", "cannot be read as Python"),
        ("a.json", "{", "a.json"),
        ("a.yaml", "{model_name_or_path: m, learning_rate: fast}", "cannot be converted"),
        ("a.yaml", "{model_name_or_path: m, attn_implementation: [sdpa]}", "cannot be converted"),
    ],
)
def test_what_cannot_be_read_or_is_no_config_is_one_error(name, text, said, tmp_path, capsys):
    file, target = tmp_path / name, tmp_path / "out.yaml"
    file.write_text(text)
    assert main(["convert-config", str(file), "--output", str(target)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("axolotl_fft_8b_liger_fsdp", "finetune"), ("axolotl_orpo_qlora", "prefer")],
)
def test_the_command_writes_a_file_once_and_notes_to_stderr(name, recipe, tmp_path) -> None:
    file = ROOT / f"tests/foreign_configs/{name}.yaml"
    target = tmp_path / "mine.yaml"
    code = (
        "import sys; from toolkit import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, "convert-config", str(file), "--output", str(target)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(target), "False"]
    assert done.stderr.startswith("note: ")
    assert done.stderr.splitlines()[-2:] == [
        f"next: toolkit inspect --data {target}   (which tokens of the data are supervised)",
        f"then: toolkit {recipe} {target} --accelerate_config one_node",
    ]
    cfg = load(PreferConfig if recipe == "prefer" else FinetuneConfig, target)
    assert cfg.model.name_or_path == yaml.safe_load(file.read_text())["base_model"]
    assert main(["convert-config", str(file), "--output", str(target)]) == 1  # not twice


def test_docs_name_what_the_tables_name() -> None:
    page = (ROOT / "docs/migrating.md").read_text("utf-8")
    for here, names in OTHER_NAMES.items():
        row = f"| `{here.partition(' (')[0]}` | {', '.join(f'`{n}`' for n in names.split())} |"
        assert row in page or f"| {here} | " in page, row
    for why, names in NOT_CONVERTED.items():
        assert f"| {', '.join(f'`{n}`' for n in names.split())} | {why} |" in page, why
    twice = [n for names in NOT_CONVERTED.values() for n in names.split()]
    assert len(twice) == len(set(twice))
    assert not [
        n for n in twice if settings_named(FinetuneConfig, n)
    ]  # what has a setting is carried
