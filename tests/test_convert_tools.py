"""`toolkit convert-config` on published configs of ten tools: what is trained stays what it was.

`foreign_configs/` has the facts of those that are converted, each with its address. The table says
by hand what each of them trains.
"""

import re
from typing import Any

import pytest
import yaml
from conftest import ROOT

from toolkit.cli import main
from toolkit.config import FinetuneConfig, PreferConfig, load
from toolkit.config.other_tools import recognise_tool
from toolkit.convert.converter import Conversion, convert_config, convert_settings
from toolkit.errors import ConfigError

FOREIGN = ROOT / "tests/foreign_configs"
ALL = "all-linear"
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

# File -> recipe, objective, rank of adapters (0: none), alpha, targets, 4 bits, dtype of the
# trained weights or base (None: the toolkit's default, float32 or the base's own), learning rate,
# samples of a device, accumulation (or samples of a step, with a minus), tokens, schedule, warm-up.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "llama-factory_dpo_lora.yaml": (
        *("prefer", "sigmoid", 8, 16, ALL, False, None, 5e-6, 1, 8, 4096, "cosine", 0.1),
    ),
    "llama-factory_kto_lora.yaml": (
        *("prefer", "kto", 8, 16, ALL, False, None, 5e-6, 1, 8, 4096, "cosine", 0.1),
    ),
    "llama-factory_reward_lora.yaml": (
        *("prefer", "reward", 8, 16, ALL, False, None, 1e-4, 1, 8, 4096, "cosine", 0.1),
    ),
    "llama-factory_pretrain_lora.yaml": (
        *("finetune", None, 8, 16, ALL, False, None, 1e-4, 1, 8, 2048, "cosine", 0.1),
    ),
    "llama-factory_qlora_sft.yaml": (
        *("finetune", None, 8, 16, ALL, True, None, 1e-4, 1, 8, 2048, "cosine", 0.1),
    ),
    "llama-factory_full_sft.yaml": (
        *("finetune", None, 0, None, None, False, None, 1e-5, 1, 2, 2048, "cosine", 0.1),
    ),
    "openrlhf_dpo_llama.sh": (
        *("prefer", "sigmoid", 0, None, None, False, None, 5e-7, 1, -256, 16384),
        *("cosine_with_min_lr", 0.03),
    ),
    "openrlhf_rm.sh": (
        *("prefer", "reward", 0, None, None, False, None, 9e-6, 1, -256, 16384),
        *("cosine_with_min_lr", 0.03),
    ),
    "openrlhf_sft_mixtral_lora.sh": (
        *("finetune", None, 64, 64, ALL, False, None, 5e-6, 4, -128, 2048),
        *("cosine_with_min_lr", 0.03),
    ),
    "axolotl_hsdp_tp_8b.yaml": (
        *("finetune", None, 0, None, None, False, None, 2e-6, 1, 1, 2048),
        *("constant_with_warmup", 0.1),
    ),
    "axolotl_reward_gemma2.yaml": (
        *("prefer", "reward", 0, None, None, False, None, 2e-4, 2, 4, 4096, "cosine", 0.1),
    ),
    "axolotl_dpo_qlora_mistral.yaml": (
        *("prefer", "sigmoid", 8, 16, ALL, True, None, 1e-4, 16, 4, 4096, "cosine", 0.1),
    ),
    "trl_zephyr_dpo_qlora.yaml": (
        *("prefer", "sigmoid", 16, 16, LLAMA, True, "bfloat16", 5e-6, 4, 1, 2048, "cosine", 0.1),
    ),
    "torchtune_8b_lora_dpo.yaml": (
        *("prefer", "sigmoid", 8, 16, LLAMA - {"k_proj"}, False, None, 5e-4, 4, 8, 2048),
        *("cosine", 100),
    ),
    "torchtune_8b_full.yaml": (
        *("finetune", None, 0, None, None, False, "bfloat16", 2e-5, 2, 1, None, "constant", None),
    ),
    "torchtune_8b_qlora.yaml": (
        *("finetune", None, 8, 16, LLAMA - {"k_proj"}, True, None, 3e-4, 2, 8, None),
        *("cosine", 100),
    ),
    "unsloth_zephyr_dpo.py": (
        *("prefer", "sigmoid", 64, 64, LLAMA, True, None, 5e-6, 2, 4, 2048, "linear", 0.1),
    ),
    "unsloth_llama3_1_alpaca.py": (
        *("finetune", None, 16, 16, LLAMA, True, None, 2e-4, 2, 4, 2048, "linear", 5),
    ),
    "open-instruct_dpo_norm_8b.yaml": (
        *("prefer", "sigmoid_norm", 0, None, None, False, None, 5e-7, 1, 16, 4096, "linear", 0.1),
    ),
    "open-instruct_simpo.yaml": (
        *("prefer", "simpo", 0, None, None, False, None, 5e-7, 1, 16, 4096, "linear", 0.1),
    ),
    "open-instruct_qlora_7b.yaml": (
        *("finetune", None, 64, 16, LLAMA, True, None, 1e-4, 1, 16, 4096, "linear", 0.03),
    ),
    "ms-swift_dpo_lora.sh": (
        *("prefer", "sigmoid", 8, 32, ALL, False, None, 1e-4, 1, 16, 4096, "cosine", 0.05),
    ),
    "ms-swift_qlora_sft.sh": (
        *("finetune", None, 8, 32, ALL, True, None, 1e-4, 1, 16, 2048, "cosine", None),
    ),
    "ms-swift_simpo_full.sh": (
        *("prefer", "simpo", 0, None, None, False, None, 1e-5, 1, -16, 4096, "cosine", 0.05),
    ),
}


def facts(out: Conversion) -> tuple[Any, ...]:
    """Return what a conversion trains, as a row of the table."""
    get = out.settings.get
    targets = get("lora.target_modules")
    batch = get("train.global_batch_size")
    return (
        out.recipe,
        get("preference.loss_type"),
        get("lora.r", 0),
        get("lora.lora_alpha"),
        {*targets} if isinstance(targets, list) else targets,
        get("lora.load_in_4bit", False),
        get("model.dtype"),
        get("optim.learning_rate"),
        get("train.per_device_train_batch_size"),
        -batch if batch else get("train.gradient_accumulation_steps"),
        get("data.sequence_length"),
        get("optim.lr_scheduler_type"),
        get("optim.warmup_steps"),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_trains_what_it_trained(name, tmp_path) -> None:
    out = convert_config(FOREIGN / name)
    assert facts(out) == PUBLISHED[name]
    assert name.startswith(out.tool)
    written = tmp_path / "mine.yaml"
    written.write_text(out.text)
    cfg = load(PreferConfig if out.recipe == "prefer" else FinetuneConfig, written)
    assert (cfg.adapters is not None) is bool(PUBLISHED[name][2])
    if PUBLISHED[name][10] is None:
        assert any("max_seq_len: no limit there" in note for note in out.notes)


def test_further_facts_of_published_configs() -> None:
    settings = convert_config(FOREIGN / "open-instruct_simpo.yaml").settings
    # beta (margin - ratio) there, beta margin - gamma here.
    assert settings["preference.simpo_gamma"] == pytest.approx(0.3 * 10)
    assert settings["preference.rpo_alpha"] == 0.0
    settings = convert_config(FOREIGN / "openrlhf_sft_mixtral_lora.sh").settings
    assert settings["data.columns"] == {"prompt": "question", "completion": "response"}
    assert settings["data.packing"] == "none"  # a batch counts samples there
    settings = convert_config(FOREIGN / "llama-factory_pretrain_lora.yaml").settings
    assert settings["data.packing"] == "wrapped"
    settings = convert_config(FOREIGN / "torchtune_8b_full.yaml").settings
    assert settings["data.supervise"] == "all"  # torchtune's default for Alpaca
    assert settings["optim.max_grad_norm"] == 0.0
    settings = convert_config(FOREIGN / "axolotl_hsdp_tp_8b.yaml").settings
    assert (settings["sharding.dp_replicate"], settings["sharding.dp_shard"]) == (2, 4)
    notes = convert_config(FOREIGN / "unsloth_zephyr_dpo.py").notes
    assert any(note.startswith("map (line") for note in notes)
    assert any(note.startswith("select (line") for note in notes)
    assert any("quantised already" in note for note in notes)
    notes = convert_config(FOREIGN / "trl_zephyr_dpo_qlora.yaml").notes
    assert any("an adapter by its name" in note for note in notes)


TT = {
    "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "m",
    },
}
LF = {"model_name_or_path": "m", "output_dir": "o", "bf16": True}
OPENRLHF = "deepspeed --module openrlhf.cli.train_{} --pretrain m --max_len 512 {}\n"
SCRIPT = "model = AutoModelForCausalLM.from_pretrained('m')\nargs = SFTConfig('o')\n"


@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        # LLaMA-Factory, examples/extras/{llama_pro,oft}, examples/v1/train_lora, and stage ppo.
        ("yaml", LF | {"stage": "sft", "finetuning_type": "freeze"}, "finetuning_type freeze"),
        ("yaml", LF | {"stage": "sft", "finetuning_type": "oft"}, "finetuning_type oft"),
        ("yaml", LF | {"stage": "ppo"}, "LLaMA-Factory's stage ppo"),
        ("yaml", LF | {"stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss kto_pair"),
        ("yaml", LF | {"stage": "dpo", "pref_loss": "orpo"}, "covers answers only"),
        ("yaml", LF | {"stage": "dpo", "ref_model": "other"}, "LLaMA-Factory's ref_model other"),
        ("yaml", LF | {"stage": "dpo", "pref_bco_weight": 0.5}, "pref_bco_weight 0.5"),
        ("yaml", LF | {"stage": "kto", "pref_ftx": 0.1}, "pref_ftx 0.1 with stage kto"),
        ("yaml", LF | {"stage": "sft", "use_dft_loss": True}, "use_dft_loss True"),
        ("yaml", LF | {"finetuning_type": "full", "quantization_bit": 4}, "quantization_bit 4"),
        (
            "yaml",
            {"model": "m", "model_class": "llm", "peft_config": {"name": "lora", "r": 16}},
            "LLaMA-Factory v1, which cannot be converted",
        ),
        ("sh", OPENRLHF.format("ppo_ray", ""), "OpenRLHF's train_ppo_ray"),
        ("sh", OPENRLHF.format("dpo", "--ipo"), "IPO takes sums over tokens"),
        ("sh", OPENRLHF.format("dpo", "--ref_pretrain other"), "ref_pretrain other"),
        ("sh", OPENRLHF.format("sft", "--load_in_4bit"), "load_in_4bit without a rank"),
        ("sh", "swift rlhf --rlhf_type grpo --model m\n", "ms-swift's rlhf_type grpo"),
        ("sh", "swift sft --model m --tuner_type adalora\n", "ms-swift's tuner_type adalora"),
        ("sh", "llamafactory-cli train examples/a.yaml\n", "convert that file"),
        ("sh", "python train.py --lr 1\n", "no known training command"),
        # axolotl, examples/llama-3/qlora-1b-gdpo.yaml and examples/ebft.
        ("yaml", {"base_model": "m", "rl": "gdpo", "trl": {"num_generations": 2}}, "rl gdpo"),
        ("yaml", {"base_model": "m", "rl": "ebft", "adapter": "lora"}, "rl ebft"),
        # torchtune, recipes/configs/llama3_2/8B_to_1B_KD_lora_single_device.yaml and PPO.
        (
            "yaml",
            {"model": {"_component_": "x.lora_y"}, "teacher_model": {"_component_": "x.y"}},
            "torchtune's teacher_model",
        ),
        (
            "yaml",
            {"model": {"_component_": "x.y"}, "loss": {"_component_": "rlhf.loss.PPOLoss"}},
            "torchtune's loss PPOLoss",
        ),
        ("yaml", LF | {"loss_type": "wpo", "use_lora": False}, "open-instruct's loss_type wpo"),
        ("yaml", {"actor_rollout_ref": {}, "data": {}, "trainer": {}}, "is a config of verl"),
        ("yaml", {"exp_manager": {}, "model": {}}, "is a config of NeMo"),
        ("yaml", {"foo": 1, "bar": 2}, "is not a config of a known tool"),
        # Whatever an unknown key may be, adapters and objectives are not dropped.
        ("yaml", LF | {"learning_rate": 1, "peft": {"r": 64}}, "peft {'r': 64} is not known"),
        ("yaml", LF | {"learning_rate": 1, "dpo_beta": 0.1}, "dpo_beta 0.1 is not known"),
        ("yaml", {"base_model": "m", "dpo_beta": 0.1}, "dpo_beta 0.1 is not known"),
        (
            "py",
            SCRIPT + "SFTTrainer(model, peft_config=get_peft_config(m))\n",
            "is only known when the script runs",
        ),
        ("py", SCRIPT + "c = IA3Config()\nSFTTrainer(model, peft_config=c)\n", "IA3Config"),
        (
            "py",
            SCRIPT + "model = get_peft_model(model, make())\nTrainer(model)\n",
            "get_peft_model",
        ),
        ("py", SCRIPT + "model = PeftModel.from_pretrained(model, 'a')\n", "PeftModel.from_pre"),
        (
            "py",
            "a, b = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()\n"
            "SFTTrainer(model=b.model, args=a)\n",
            "TrlParser takes the settings from the command line",
        ),
    ],
)
def test_what_would_become_another_training_is_refused(
    suffix, content, expected, tmp_path, capsys
) -> None:
    file = tmp_path / f"a.{suffix}"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert main(["convert-config", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert expected in shown.err
    assert shown.err.count("\n") == 1


def test_harmless_values_are_not_refused(tmp_path) -> None:
    """The control of the test above."""
    given = LF | {"stage": "dpo", "pref_bco_weight": 0.0, "ref_model": None, "use_dft_loss": False}
    assert convert_settings(given).settings["preference.loss_type"] == "sigmoid"
    assert convert_settings(LF | {"learning_rate": 1, "peft": None}).recipe == "finetune"
    file = tmp_path / "a.py"
    file.write_text(
        SCRIPT + "c = LoraConfig(r=4) if x else None\nSFTTrainer(model, peft_config=c)\n"
    )
    assert convert_config(file).settings["lora.r"] == 4
    file.write_text(SCRIPT + "SFTTrainer(model, peft_config=None)\n")
    assert "lora.r" not in convert_config(file).settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (LF | {"stage": "sft"}, {"lora.r": 8, "lora.lora_alpha": 16}),  # lora is its default
        (LF | {"stage": "sft", "lora_rank": 4}, {"lora.lora_alpha": 8}),
        (LF | {"stage": "sft", "lora_target": "q_proj,v_proj"}, {"lora.r": 8}),
        (LF | {"stage": "sft", "mask_history": True}, {"data.supervise": "last_assistant"}),
        (LF | {"stage": "sft", "train_on_prompt": True}, {"data.supervise": "all"}),
        (LF | {"stage": "sft", "cutoff_len": 99}, {"data.sequence_length": 99}),
        (LF | {"stage": "sft", "val_size": 0.1}, {"data.eval_split": 0.1}),
        (LF | {"stage": "sft", "pure_bf16": True}, {"model.dtype": "bfloat16"}),
        (LF | {"stage": "sft", "use_muon": True}, {"optim.optim": "muon"}),
        (
            LF | {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 1.5, "pref_ftx": 0.2},
            {"preference.simpo_gamma": 1.5, "preference.rpo_alpha": 0.2},
        ),
        (
            LF | {"stage": "kto", "kto_chosen_weight": 2.0},
            {"preference.loss_type": "kto", "preference.desirable_weight": 2.0},
        ),
        (LF | {"stage": "dpo", "pref_loss": "ipo"}, {"preference.loss_type": "ipo"}),
        ({"tuner_type": "lora", "model": "m"}, {"train.global_batch_size": 16, "lora.r": 8}),
        ({"rlhf_type": "kto", "model": "m"}, {"preference.loss_type": "kto"}),
        (LF | {"use_lora": False, "beta": 5}, {"preference.loss_type": "sigmoid_norm"}),
        ({"model_name_or_path": "m", "lora_r": 4, "use_peft": True}, {"lora.r": 4}),
        # A Trainer's YAML has no switch of adapters: the rank is one.
        ({"per_device_train_batch_size": 1, "lora_r": 4}, {"lora.r": 4}),
        ({"base_model": "m"}, {"data.train_files": "DATA"}),  # not the built-in text
        # Builders of torchtune that make turns of columns with other names.
        (
            TT | {"dataset": {"_component_": "torchtune.datasets.samsum_dataset"}},
            {"data.columns": {"instruction": "dialogue", "output": "summary"}},
        ),
        (
            TT
            | {
                "dataset": {
                    "_component_": "torchtune.datasets.stack_exchange_paired_dataset",
                    "column_map": {"prompt": "q", "chosen": "a", "rejected": "b"},
                }
            },
            {"data.columns": {"instruction": "q", "chosen": "a", "rejected": "b"}},
        ),
    ],
)
def test_settings_of_tools(given, expected) -> None:
    settings = convert_settings(given).settings
    assert {name: settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "given",
    [
        LF | {"stage": "dpo", "adapter_name_or_path": "old", "lora_rank": 4},
        LF | {"stage": "sft", "adapter_name_or_path": ["old"], "lora_rank": 4},
        {"base_model": "m", "adapter": "lora", "lora_model_dir": "old", "lora_r": 4},
        {"rlhf_type": "dpo", "tuner_type": "lora", "model": "m", "adapters": ["old"]},
    ],
)
def test_a_trained_adapter_is_continued(tmp_path, given) -> None:
    out = convert_settings(given)
    assert out.settings["lora.from"] == "old"
    # Rank and alpha are the adapter's own.
    assert not {"lora.r", "lora.lora_alpha", "lora.target_modules"} & {*out.settings}
    # The result is a config of the toolkit.
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump(given))
    converted = convert_config(file)
    written = tmp_path / "mine.yaml"
    written.write_text(converted.text)
    cfg = load(PreferConfig if converted.recipe == "prefer" else FinetuneConfig, written)
    assert (cfg.lora.from_, cfg.lora.r, cfg.adapters) == ("old", 0, cfg.lora)
    # Tools that turn adapters off to ask the reference have another one.
    is_noted = any(note.startswith("lora.from old: the reference") for note in out.notes)
    assert is_noted == (converted.recipe == "prefer")
    with pytest.raises(ConfigError, match="adapter_name_or_path a,b"):
        convert_settings(LF | {"stage": "dpo", "adapter_name_or_path": "a,b"})


def test_values_of_other_types_are_refused(tmp_path) -> None:
    axolotl = {"base_model": "m", "sequence_len": 8, "micro_batch_size": 1, "adapter": "lora"}
    for given, said in (
        (axolotl | {"lora_model_dir": ["a", "b"]}, "expected one adapter to continue"),
        (axolotl | {"rl": "dpo", "trl": "x"}, "trl: expected a mapping of settings, got x"),
        (LF | {"stage": ["dpo"]}, "has a value of another type than llama-factory expects"),
        (LF | {"stage": "sft", "finetuning_type": {"a": 1}}, "expected lora or full"),
    ):
        file = tmp_path / "other.yaml"
        file.write_text(yaml.safe_dump(given))
        with pytest.raises(ConfigError, match=re.escape(said)):
            convert_config(file)


def test_a_config_of_this_toolkit_is_kept(tmp_path, capsys) -> None:
    for name, text in (
        ("finetune", "# mine\nmodel:\n  name_or_path: m\nlora: {r: 4}\n"),
        ("prefer", "model: {name_or_path: m}\npreference: {beta: 0.3}\n"),
        ("pretrain", "model: {name_or_path: m, train_tokenizer: true}\n"),
        # The kind decides, not the sections.
        ("prefer", "kind: prefer\nmodel: {name_or_path: m}\n"),
        ("pretrain", "kind: pretrain\nmodel: {name_or_path: m}\n"),
        ("finetune", "kind: finetune\nmodel: {name_or_path: m}\n"),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        out = convert_config(file)
        assert (out.recipe, out.text) == (name, text)
        assert "already a config of this toolkit" in out.notes[0]
    assert main(["convert-config", str(file)]) == 0
    assert capsys.readouterr().out == text
    for kind, said in (("mimic", "start it with recipes/mimic.py"), ("[a]", "must be text")):
        file.write_text(f"kind: {kind}\nmodel: {{name_or_path: m}}\n")
        assert main(["convert-config", str(file)]) == 2
        assert said in capsys.readouterr().err
    file.write_text("kind: finetune\nmodel: {name_or_path: m}\npreference: {beta: 1}\n")
    assert main(["convert-config", str(file)]) == 2
    assert "preference" in capsys.readouterr().err
    file.write_text("model: {name_or_path: m}\noptim: {learning_rat: 1}\n")
    assert main(["convert-config", str(file)]) == 2
    assert "did you mean optim.learning_rate?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("trl_zephyr_dpo_qlora.yaml", "TRL"),
        ("axolotl_dpo_lora_8b.yaml", "axolotl"),
        ("llama-factory_dpo_lora.yaml", "LLaMA-Factory"),
        ("torchtune_8b_full.yaml", "torchtune"),
        ("open-instruct_simpo.yaml", "open-instruct"),
    ],
)
@pytest.mark.parametrize("command", ["prefer", "finetune", "train", "plan"])
def test_a_recipe_names_the_tool_of_a_foreign_config(command, name, title, capsys) -> None:
    file = FOREIGN / name
    assert main([command, str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file} is a config of {title} (" in error
    assert f"toolkit convert-config {file} --output mine.yaml" in error
    assert error.count("\n") == 1


def test_own_configs_with_a_slip_are_not_taken_for_foreign(tmp_path, capsys) -> None:
    """The control of the test above."""
    file = tmp_path / "a.yaml"
    file.write_text("model: {name_or_path: m}\nlearning_rate: 1\nbf16: true\nmax_steps: 3\n")
    assert main(["prefer", str(file)]) == 2
    error = capsys.readouterr().err
    assert "3 unknown settings" in error
    assert "convert-config" not in error
    for own in sorted((ROOT / "recipes/configs").glob("*.yaml")):
        assert recognise_tool(yaml.safe_load(own.read_text())) == "toolkit", own


def test_a_shell_script_is_read_and_never_run(tmp_path) -> None:
    file, mark = tmp_path / "a.sh", tmp_path / "it_ran"
    file.write_text(
        f"touch {mark}\nRANK=16\nfor LR in 1 2; do\n# openrlhf.cli.train_rm --pretrain wrong\n"
        "  deepspeed --module openrlhf.cli.train_dpo --pretrain m --lora_rank $RANK \\\n"
        '    --learning_rate "$LR" --beta $(cat beta) --adam_betas 0.8 0.9 --max_len 8 | tee log\n'
    )
    out = convert_config(file)
    assert not mark.exists()
    assert out.settings["lora.r"] == 16
    assert out.settings["optim.adam_beta1"] == 0.8
    computed = [note.partition(":")[0] for note in out.notes if "computed by the shell" in note]
    assert sorted(computed) == ["beta", "learning_rate"]


def test_the_subset_of_a_dataset_is_named() -> None:
    given = {"tuner_type": "lora", "model": "m", "dataset": ["org/a:sub#500", "org/b"]}
    notes = convert_settings(given).notes
    assert any("org/a:sub" in line and "dataset_config_name" in line for line in notes), notes
