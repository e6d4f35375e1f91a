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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"context_parallel_size": 4, "dp_shard_size": 2}, {"context_parallel": 4, "dp_shard": 8}),
        ({"sequence_parallel_degree": 2}, {"context_parallel": 2}),
        ({"expert_parallel_size": 4, "dp_shard_size": 8}, {"expert_parallel": 4, "dp_shard": 8}),
        ({"context_parallel_size": 1, "dp_shard_size": -1}, {"dp_shard": -1}),
    ],
)
def test_ranks_that_share_rows_or_experts_are_converted(given, expected) -> None:
    made = convert_settings({"base_model": "m", "micro_batch_size": 1, **given})
    sharding = {n: v for n, v in made.settings.items() if n.startswith("sharding.")}
    for name, value in expected.items():
        assert sharding[f"sharding.{name}"] == value
    assert ("sharding.context_parallel" in sharding) == ("context_parallel" in expected)
    assert not [note for note in made.notes if "parallel" in note]


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
        (
            "axolotl",
            {"adapter": "qlora", "quantize_moe_experts": True},
            {"lora.load_in_4bit": True, "lora.quantize_moe_experts": True},
        ),
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
        (
            {"quantize_moe_experts": True, "use_peft": True},
            "quantize_moe_experts True: the base is not in 4 bits",
        ),
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


HEAD = "model = AutoModelForCausalLM.from_pretrained('m')\n"
ARGS = "a = SFTConfig('o', learning_rate=1e-5, max_steps=7)\n"
END = "SFTTrainer(model, args=a)\n"


def converted(folder: Path, text: str) -> Conversion:
    file = folder / "train.py"
    file.write_text(text)
    return convert_config(file)


@pytest.mark.parametrize(
    "text",
    [
        ARGS + "a.learning_rate = 1e-4\na.learning_rate = 1e-3\na.max_steps = 10\n" + END,
        ARGS + "setattr(a, 'learning_rate', 1e-3)\na.max_steps: int = 10\n" + END,
        ARGS + "a.learning_rate, a.max_steps = 1e-3, 10\n" + END,
        "RATE = 1e-3\n" + ARGS + "a.learning_rate = RATE\na.max_steps = 10\n" + END,
        ARGS + "t = trainer = " + END + "trainer.args.learning_rate = 1e-3\na.max_steps = 10\n",
        "def main():\n  a = SFTConfig('o')\n  a.learning_rate = 1e-3\n  a.max_steps = 10\n  "
        + END
        + "if __name__ == '__main__':\n    main()\n",
        "if __name__ == '__main__':\n    a = SFTConfig('o')\n    a.learning_rate = 1e-3\n"
        "    a.max_steps = 10\n    " + END,
        "class C:\n def f(self):\n  self.a = TrainingArguments('o')\n"
        "  self.a.learning_rate = 1e-3\n  self.a.max_steps = 10\n",
    ],
)
def test_settings_assigned_later_are_read(text, tmp_path) -> None:
    out = converted(tmp_path, HEAD + text)
    assert out.settings["optim.learning_rate"] == 1e-3
    assert out.settings["train.max_steps"] == 10
    assert not [note for note in out.notes if note.startswith(("learning_rate", "max_steps"))]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ARGS + "a.learning_rate = pick()\n", "computed by the script"),
        (ARGS + "a.learning_rate = rate\n", "computed by the script"),
        (ARGS + "a.learning_rate *= 2\n", "computed by the script"),
        (ARGS + "if big:\n    a.learning_rate = 1.0\n", "assigned in a branch or a loop"),
        (ARGS + "for _ in x:\n    a.learning_rate = 1.0\n", "assigned in a branch or a loop"),
        (ARGS + "def f():\n    a.learning_rate = 1.0\n", "this scope does not create"),
        (ARGS + "def f(args):\n    args.learning_rate = 1.0\n", "this scope does not create"),
        (
            ARGS + "b = SFTConfig('o')\nb.learning_rate = 1.0\n",
            "one of several objects of its kind",
        ),
    ],
)
def test_an_assigned_setting_that_cannot_be_read_is_noted(text, reason, tmp_path) -> None:
    out = converted(tmp_path, HEAD + text + END)
    assert "optim.learning_rate" not in out.settings  # nor the default in its place
    (note,) = [note for note in out.notes if note.startswith("learning_rate (line ")]
    assert note.endswith(f"{reason}; set it yourself")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("for k, v in x.items():\n    setattr(a, k, v)\n", "** (line 4) setattr(a, k, v): comp"),
        ("args = dataclasses.replace(args, beta=2)\n", "replace(args, beta=2) (line 3): not"),
        ("training_args.set_lr_scheduler('cosine')\n", "set_lr_scheduler('cosine') (line 3): not"),
        ("vars(args).update(x)\n", "vars(args).update(x) (line 3): not converted; set its"),
        ("tokenizer.chat_template = T\n", "(line 3): not converted; set data.chat_template"),
        ("model.config.attention_dropout = 0.1\n", "not converted; write it into config.json"),
        ("model.resize_token_embeddings(9)\n", "not converted; set model.resize_embeddings: true"),
        ("parser = TrlParser(SFTConfig)\n", "TrlParser (line 3): settings from the command line"),
        ("DistillTrainer(model, lmbda=1)\n", "DistillTrainer (line 3): a trainer that is not"),
        ("c = {'seed': 1}\nc['seed'] = 2\nLoraConfig(**c)\n", "** (LoraConfig, line 5) c: comp"),
        (
            "class My(SFTTrainer):\n  def log(self, logs): pass\nMy(model, args=a)\n",
            "class My(SFTTrainer) (line 3): not converted are log",
        ),
    ],
)
def test_a_change_that_a_script_makes_by_a_statement_is_noted(text, named, tmp_path) -> None:
    out = converted(tmp_path, HEAD + ARGS + text + END)
    assert [note for note in out.notes if named in note], out.notes
    assert out.settings["optim.learning_rate"] == 1e-5
    # Statements without an effect on the training get no note.
    plain = "model.config.use_cache = False\ntokenizer.pad_token = tokenizer.eos_token\n"
    plain += "generation_config.max_length = 9\nwandb.config.seed = 3\n"
    assert converted(tmp_path, HEAD + ARGS + plain + END).notes == (
        converted(tmp_path, HEAD + ARGS + END).notes
    )


FREEZING = [
    "for p in model.parameters(): p.requires_grad = False\n",
    "model.lm_head.requires_grad_(False)\n",
    "for n, p in model.named_parameters():\n    p.requires_grad = 'lm_head' in n\n",
    "setattr(model.lm_head.weight, 'requires_grad', False)\n",
    "[p.requires_grad_(requires_grad=False) for p in model.model.parameters()]\n",
    "freeze_layers(model, 3)\n",
]


@pytest.mark.parametrize("text", FREEZING)
def test_a_partly_frozen_script_is_refused(text, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"line [23]: .* freezes parameters.*model.frozen_param"):
        converted(tmp_path, HEAD + text + ARGS + END)
    # PEFT freezes the base, so freezing it before changes nothing.
    lora = ARGS + "SFTTrainer(model, args=a, peft_config=LoraConfig(r=4))\n"
    out = converted(tmp_path, HEAD + text + lora)
    assert out.settings["lora.r"] == 4
    assert [note for note in out.notes if note.endswith("adapters freeze the base anyway")]
    for line in (text, "model.lm_head.requires_grad_(True)\n"):  # after it, parts change
        with pytest.raises(ConfigError, match="freezes parameters"):
            converted(tmp_path, HEAD + "model = get_peft_model(model, LoraConfig(r=4))\n" + line)


def test_frozen_references_and_hooks_are_not_refused(tmp_path) -> None:
    text = (
        "old = AutoModelForCausalLM.from_pretrained('m')\nold.requires_grad_(False)\n"
        "for p in ref_model.parameters(): p.requires_grad = False\n"
        "model.requires_grad_(True)\nmultiprocessing.freeze_support()\n"
        "def hook(module, inputs, output):\n    output.requires_grad_(True)\n"
        "DPOTrainer(model, old, args=DPOConfig('o'))\n"
    )
    assert converted(tmp_path, HEAD + text).recipe == "prefer"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("class My(SFTTrainer):\n  def compute_loss(self): pass\nMy(model)\n", "compute_loss"),
        ("class My(trl.DPOTrainer):\n  def dpo_loss(self): pass\nMy(model)\n", "dpo_loss"),
        ("class My(Trainer):\n  training_step = f\nMy(model)\n", "defines training_step"),
        (
            "class A(Trainer):\n  def compute_loss(self): pass\nclass B(A): pass\nB(model)\n",
            r"class A\(Trainer\) defines",
        ),
        (
            "from trl import SFTTrainer as T\nclass My(T):\n  def compute_loss(self): pass\n"
            "My(model)\n",
            "defines compute_loss",
        ),
        ("Trainer(model, compute_loss_func=f)\n", "compute_loss_func=f replaces the loss"),
        ("k = {'compute_loss_func': f}\nTrainer(model, **k)\n", "replaces the loss"),
        ("trainer.compute_loss = f\n", "compute_loss = f replaces the loss"),
        ("SFTTrainer.training_step = f\n", "training_step = f replaces the loss"),
    ],
)
def test_a_separate_loss_is_refused(text, named, tmp_path) -> None:
    with pytest.raises(ConfigError, match=named):
        converted(tmp_path, HEAD + ARGS + text)


def test_calls_of_subclasses_and_aliases_are_read(tmp_path) -> None:
    text = (
        "from trl import DPOConfig as C\nclass My(DPOTrainer):\n  def log_loss(self): pass\n"
        "class Unused(Trainer):\n  def compute_loss(self): pass\n"
        "My(model, args=C('o', beta=0.5), compute_loss_func=None)\n"
    )
    out = converted(tmp_path, HEAD + text)
    assert (out.recipe, out.settings["preference.beta"]) == ("prefer", 0.5)
    out = converted(tmp_path, HEAD + "args = DPOConfig('o')\nargs.beta = 0.5\n")
    assert out.settings["preference.beta"] == 0.5


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
