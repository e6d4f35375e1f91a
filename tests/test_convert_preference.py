"""`toolkit convert-config` of preference tuning: TRL's trainers and axolotl's `rl`."""

import pytest
import yaml
from conftest import ROOT

from toolkit.cli import main
from toolkit.config import PreferConfig, load
from toolkit.config.other_tools import settings_named
from toolkit.convert.converter import convert_config, convert_settings
from toolkit.convert.ms_swift import translate_ms_swift
from toolkit.convert.openrlhf import translate_openrlhf
from toolkit.convert.tables_of_tools import reason_not_converted
from toolkit.convert.torchtune import translate_torchtune
from toolkit.errors import ConfigError

FOREIGN = ROOT / "tests/foreign_configs"
MODEL = {"model_name_or_path": "m"}
AXOLOTL = {"base_model": "m"}
HAS_REWARD = pytest.mark.skipif(
    not settings_named(PreferConfig, "center_rewards_coefficient"),
    reason="reward models are not here",
)


def preference(given: dict, tool: str | None = None) -> dict:
    settings = convert_settings(given, tool).settings
    named = {k.partition(".")[2]: v for k, v in settings.items() if k.startswith("preference.")}
    return {name: value for name, value in named.items() if name != "loss_type"} | {
        "loss": named.get("loss_type")
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl_zephyr_dpo_qlora", {"loss": "sigmoid", "beta": 0.01}),
        ("trl_smollm3_apo", {"loss": "apo_zero", "beta": 0.05}),
        ("axolotl_dpo_lora_8b", {"loss": "sigmoid"}),
        ("axolotl_orpo_qlora", {"loss": "orpo", "beta": 0.1}),
        ("axolotl_kto_qlora_1b", {"loss": "kto", "beta": 0.5, "desirable_weight": 0.2}),
    ],
)
def test_published_configs_keep_their_objective(name, expected, tmp_path) -> None:
    given = yaml.safe_load((FOREIGN / f"{name}.yaml").read_text())
    assert preference(given) == expected
    out = convert_config(FOREIGN / f"{name}.yaml")
    assert out.recipe == "prefer"
    assert out.text.startswith(f"# From {name}.yaml ({out.tool}), for recipes/prefer.py.\n")
    (tmp_path / "a.yaml").write_text(out.text)
    cfg = load(PreferConfig, tmp_path / "a.yaml")
    one_side = given.get("max_length", given.get("sequence_len"))
    assert cfg.data.sequence_length == 2 * one_side
    assert cfg.lora.lora_dropout == 0
    rate = cfg.optim.learning_rate
    assert rate == float(given["learning_rate"])


@pytest.mark.parametrize(
    ("tool", "given", "expected"),
    [
        (None, MODEL | {"loss_type": ["sigmoid"]}, {"loss": "sigmoid"}),
        (None, MODEL | {"beta": 0.2, "loss_type": "ipo"}, {"loss": "ipo", "beta": 0.2}),
        (None, MODEL | {"loss_type": "sigmoid_norm"}, {"loss": "sigmoid_norm"}),
        (
            None,
            MODEL | {"loss_type": "robust", "label_smoothing": 0.1},
            {"loss": "robust", "label_smoothing": 0.1},
        ),
        (None, MODEL | {"loss_type": "hinge", "label_smoothing": 0.1}, {"loss": "hinge"}),
        (None, MODEL | {"rpo_alpha": 0.5}, {"loss": "sigmoid", "rpo_alpha": 0.5}),
        (
            None,
            MODEL | {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.3]},
            {"loss": "ipo", "rpo_alpha": 0.3},
        ),
        (
            None,
            MODEL | {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            {"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        ),
        (None, MODEL | {"loss_type": ["aot", "nca_pair"]}, {"loss": ["aot", "nca_pair"]}),
        (
            None,
            MODEL | {"loss_type": ["ipo", "sft"], "loss_weights": [0.8, 1.0]},
            {"loss": ["ipo", "sft"], "loss_weights": [0.8, 1.0]},
        ),
        (
            None,
            MODEL | {"loss_type": "exo_pair", "label_smoothing": 0.001},
            {"loss": "exo_pair", "label_smoothing": 0.001},
        ),
        (
            None,
            MODEL | {"loss_type": "discopop", "discopop_tau": 0.1},
            {"loss": "discopop", "discopop_tau": 0.1},
        ),
        (None, MODEL | {"loss_type": "ipo", "discopop_tau": 0.05}, {"loss": "ipo"}),
        (
            None,
            MODEL | {"loss_type": ["ipo", "sft"], "loss_weights": [1, 0.3], "rpo_alpha": None},
            {"loss": "ipo", "rpo_alpha": 0.3},
        ),
        (None, MODEL | {"loss_type": "apo_down"}, {"loss": "apo_down"}),
        (
            None,
            MODEL | {"loss_type": "simpo", "simpo_gamma": 1.5, "cpo_alpha": 0.0},
            {"loss": "simpo", "simpo_gamma": 1.5, "rpo_alpha": 0.0},
        ),
        (None, MODEL | {"loss_type": "simpo"}, {"loss": "simpo", "rpo_alpha": 1.0}),
        (
            None,
            MODEL | {"desirable_weight": 2.0, "undesirable_weight": 0.5},
            {"loss": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5},
        ),
        ("trl-orpo", MODEL | {"beta": 0.2}, {"loss": "orpo", "beta": 0.2}),
        ("trl-kto", MODEL | {"beta": 0.2}, {"loss": "kto", "beta": 0.2}),
        ("trl-dpo", MODEL, {"loss": "sigmoid"}),
        (None, AXOLOTL | {"rl": "ipo", "rl_beta": 0.3}, {"loss": "ipo", "beta": 0.3}),
        (
            None,
            AXOLOTL | {"rl": "dpo", "dpo_label_smoothing": 0.1, "rpo_alpha": 1.0},
            {"loss": "sigmoid", "label_smoothing": 0.1, "rpo_alpha": 1.0},
        ),
        (
            None,
            AXOLOTL | {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.1},
            {"loss": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "rpo_alpha": 0.1},
        ),
        (None, AXOLOTL | {"rl": "orpo", "trl": {"beta": 0.3}}, {"loss": "orpo", "beta": 0.3}),
        (
            None,
            AXOLOTL | {"rl": "kto", "kto_undesirable_weight": 0.5},
            {"loss": "kto", "undesirable_weight": 0.5},
        ),
        # Controls: what is no preference tuning stays supervised.
        (None, MODEL | {"loss_type": "nll"}, {"loss": None}),
        (None, AXOLOTL | {"rl": None}, {"loss": None}),
    ],
)
def test_objectives_and_their_settings(tool, given, expected) -> None:
    assert preference(given, tool) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"loss_type": ["sigmoid", "kto_pair"]}, "loss_type sigmoid, kto_pair of DPO: expected"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": [0.8]}, "with loss_weights [0.8]"),
        ({"loss_type": ["ipo", "ipo"]}, "loss_type ipo, ipo of DPO"),
        ({"loss_type": "ipo", "loss_weights": [0.8]}, "loss_type ipo with loss_weights [0.8]"),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.3], "rpo_alpha": 0.5},
            "rpo_alpha 0.5 with sft in loss_type: both add the cross entropy",
        ),
        (
            {"loss_type": ["ipo", "bco_pair", "sft"], "rpo_alpha": 0.5},
            "rpo_alpha 0.5 with sft in loss_type: both add the cross entropy",
        ),
        ({"loss_type": "aot_pair"}, "loss_type aot_pair of DPO: expected sigmoid or"),
        ({"loss_type": "apo_zero_unpaired"}, "of KTO: expected kto"),
        ({"cpo_alpha": 1.0}, "loss_type sigmoid of CPO: expected simpo"),
        ({"loss_type": "simpo", "alpha": 0.25}, "AlphaPO is not supported"),
        ({"beta": 0.1, "sync_ref_model": True}, "sync_ref_model True: the reference does not"),
        ({"beta": 0.1, "ref_model": "other"}, "ref_model other: the reference is the model that"),
        ({"beta": 0.1, "reference_free": True}, "simpo and orpo need no reference"),
        ({"f_divergence_type": "js_divergence"}, "only reverse_kl is supported"),
        ({"beta": 0.1, "ld_alpha": 0.5}, "all tokens of an answer weigh alike"),
        ({"beta": 0.1, "use_weighting": True}, "pairs weigh alike"),
        ({"beta": 0.1, "num_generations": 8}, "num_generations: online reinforcement learning"),
        ({"rl": "grpo", "base_model": "m"}, "rl grpo: not supported; expected one of dpo, ipo"),
        ({"process_reward_model": True, "base_model": "m"}, "rewards of steps are not supported"),
    ],
)
def test_another_objective_is_refused_by_name(given, named, tmp_path, capsys) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(given if "base_model" in given else MODEL | given))
    assert main(["convert-config", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1


def test_values_that_change_nothing_are_not_refused() -> None:
    given = {"beta": 0.1, "sync_ref_model": False, "f_divergence_type": "reverse_kl"}
    out = convert_settings(MODEL | given | {"ld_alpha": 1.0, "reference_free": False})
    assert out.settings["preference.beta"] == 0.1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"beta": 0.1}, "beta: a key of DPO, ORPO and KTO; DPO is assumed"),
        ({"loss_type": "ipo", "precompute_ref_log_probs": True}, "computed once, before the first"),
        ({"loss_type": "ipo", "max_prompt_length": 5}, "keeps its prompt, and both answers lose"),
        ({"loss_type": "ipo", "truncation_mode": "keep_end"}, "keeps its prompt, and both answers"),
        (
            {"loss_type": "ipo", "max_length": 8},
            "max_length 8: the limit of one side; data.sequence_length",
        ),
        ({"desirable_weight": 1.0, "max_length": 8}, "includes the answer of the neighbouring row"),
        ({"loss_type": "ipo", "disable_dropout": False}, "dropout is always off"),
        ({"loss_type": "ipo", "neftune_noise_alpha": 5}, "must be the same function"),
        (
            {"loss_type": "ipo", "label_smoothing": 0.1},
            "has no effect with loss ipo in either tool",
        ),
        (
            {"loss_type": "sigmoid", "label_smoothing": 0.1},
            "in TRL 1.16 it has no effect on sigmoid",
        ),
        ({"loss_type": "ipo", "label_smoothing_factor": 0.1}, "preference.label_smoothing is for"),
        ({"loss_type": "ipo", "assistant_only_loss": True}, "the last answer of each side"),
        ({"loss_type": ["ipo", "sft"]}, "preference.rpo_alpha replaces sft"),
        ({"loss_type": "ipo", "ref_model_init_kwargs": {"a": 1}}, "the model that training begins"),
        ({"loss_type": "kto", "rpo_alpha": 0.1}, "rpo_alpha 0.1: has no effect with preference."),
        ({"rl": "dpo", "trl": {"use_liger_loss": True}}, "trl.use_liger_loss True: no equivalent"),
    ],
)
def test_what_means_something_else_is_named(given, named) -> None:
    tool = "axolotl" if "rl" in given else "trl"
    notes = convert_settings(MODEL | given, tool).notes
    assert any(named in note for note in notes), notes
    without = convert_settings(MODEL | {"loss_type": "ipo", "max_length": 9}, "trl-dpo").notes
    assert not any(named in note for note in without if "max_length" not in note)  # the control


@pytest.mark.parametrize(
    ("given", "is_noted"),
    [
        ({"rlhf_type": "dpo", "loss_weights": [1, 0.2]}, True),
        ({"rlhf_type": "simpo", "loss_type": "simpo", "loss_weights": [1, 0.2]}, True),
        ({"rlhf_type": "rm", "loss_weights": [1, 0.2]}, True),
        ({"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2]}, False),
        ({"rlhf_type": "dpo"}, False),
    ],
)
def test_weights_that_ms_swift_gives_without_losses_are_named(given, is_noted) -> None:
    out = translate_ms_swift({"model": "m"} | given, "rlhf")
    assert any(note.startswith("loss_weights [1, 0.2]: not") for note in out.notes) == is_noted
    is_kept = "loss_weights" in out.settings
    assert is_kept == ("loss_weights" in given and not is_noted)


def test_reasons_do_not_deny_what_is_supported() -> None:
    assert "discopop" in reason_not_converted("discopop_tau")
    assert "not supported" in reason_not_converted("f_alpha_divergence_coef")
    for option in ("ref_pretrain", "ref.model_name_or_path"):
        with pytest.raises(ConfigError, match=r"set preference\.reference to it"):
            translate_openrlhf({"pretrain": "m", option: "other"}, "dpo")
    with pytest.raises(ConfigError, match=r"set preference\.reference to its model"):
        translate_torchtune({"ref_checkpointer": {"checkpoint_dir": "other"}})


def test_a_limit_that_is_none_is_not_replaced() -> None:
    out = convert_settings(MODEL | {"loss_type": "ipo", "max_length": None})
    assert "data.sequence_length" not in out.settings
    assert any(note.startswith("max_length: no limit there") for note in out.notes)
    assert convert_settings(MODEL | {"loss_type": "ipo"}).settings["data.sequence_length"] == 2048


def test_an_objective_that_is_named_is_not_doubted() -> None:
    orpo = convert_config(FOREIGN / "trl_zephyr_orpo.yaml", "trl-orpo")
    assert orpo.settings["preference.loss_type"] == "orpo"
    assert not [note for note in orpo.notes if "DPO is assumed" in note]
    assert [
        n for n in convert_config(FOREIGN / "trl_zephyr_orpo.yaml").notes if "DPO is assumed" in n
    ]
    assert not [
        n for n in convert_settings(MODEL | {"beta": 1.0}, "trl-dpo").notes if "DPO is assumed" in n
    ]


@pytest.mark.parametrize(
    ("rl", "kind", "columns", "named"),
    [
        ("dpo", "chatml.intel", None, "rendered by the chat template, not as chatml there"),
        ("dpo", "llama3.argilla", None, "rendered by the chat template, not as llama3 there"),
        ("ipo", "chatml.icr", None, "rendered by the chat template"),
        ("dpo", "chatml.prompt_pairs", None, "unless the rows have a column `system`"),
        ("dpo", "chatml.ultra", None, "rendered by the chat template, not as chatml there"),
        ("simpo", "chatml.argilla_chat", None, "rendered by the chat template"),
        ("dpo", "chat_template.default", {"prompt": "messages"}, None),
        ("orpo", "chat_template.argilla", None, None),
        ("dpo", "zephyr.nectar", None, "zephyr.nectar: not known; pairs are prompt, chosen"),
        ("kto", "llama3.argilla", None, "rendered by the chat template, not as llama3 there"),
        ("kto", "chatml.ultra", None, "texts are used unchanged"),
        (
            "dpo",
            {"field_prompt": "q", "field_chosen": "chosen", "prompt_format": "{prompt}"},
            {"prompt": "q"},
            "prompt_format: texts are used unchanged",
        ),
    ],
)
def test_types_of_axolotl_name_columns(rl, kind, columns, named) -> None:
    given = AXOLOTL | {"rl": rl, "datasets": [{"path": "a.jsonl", "type": kind}]}
    out = convert_settings(given)
    assert out.settings.get("data.columns") == columns
    of_type = [note for note in out.notes if note.startswith("datasets[0].type")]
    assert [named in note for note in of_type] == ([True] if named else [])


def test_learning_rates_that_are_not_given_are_those_of_the_tool() -> None:
    assert convert_settings(MODEL | {"loss_type": "ipo"}).settings["optim.learning_rate"] == 1e-6
    assert convert_settings(MODEL, "trl").settings["optim.learning_rate"] == 2e-5


def script(tmp_path, text: str):
    file = tmp_path / "train.py"
    file.write_text(text)
    return convert_config(file)


def test_scripts_tell_the_objective_by_the_classes_they_call(tmp_path) -> None:
    head = "model = AutoModelForCausalLM.from_pretrained('org/m')\n"
    out = script(
        tmp_path,
        head + "ref = AutoModelForCausalLM.from_pretrained('org/m')\n"
        "args = DPOConfig('out', beta=0.3, loss_type='hinge', max_length=64)\n"
        "DPOTrainer(model, ref_model=ref, args=args, peft_config=LoraConfig(r=4))\n",
    )
    assert (out.tool, out.recipe) == ("trl", "prefer")
    assert out.settings["preference.loss_type"] == "hinge"
    assert out.settings["preference.beta"] == 0.3
    assert out.settings["data.sequence_length"] == 128
    assert out.settings["output_dir"] == "out"
    assert any(
        note.startswith("ref_model (DPOTrainer, line 4) ref: the reference is the model that")
        for note in out.notes
    )
    out = script(tmp_path, head + "KTOTrainer(model, None, args=KTOConfig(desirable_weight=2))\n")
    assert out.settings["preference.loss_type"] == "kto"
    assert out.settings["preference.desirable_weight"] == 2
    assert out.settings["optim.learning_rate"] == 1e-6
    out = script(tmp_path, head + "ORPOTrainer(model, args=ORPOConfig(beta=0.2))\n")
    assert out.settings["preference.loss_type"] == "orpo"
    out = script(
        tmp_path, head + "CPOTrainer(model, args=CPOConfig(loss_type='simpo', cpo_alpha=0.0))\n"
    )
    assert out.settings["preference.rpo_alpha"] == 0.0
    # Before TRL had a config of its own for it, Trainer's defaults held.
    out = script(tmp_path, head + "DPOTrainer(model, beta=0.2, args=TrainingArguments('o'))\n")
    assert (out.tool, out.settings["optim.learning_rate"]) == ("trainer", 5e-5)
    assert out.settings["preference.beta"] == 0.2


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ("GRPOTrainer(model='m', args=GRPOConfig(beta=0.1))", "GRPOTrainer of TRL: expected one"),
        (
            "SFTTrainer('m')\nDPOTrainer('m')",
            "trainers of DPO and SFT, but a config describes one run",
        ),
        ("DPOTrainer('m', None, args=DPOConfig(loss_type=['ipo', 'kto']))", "ipo, kto of"),
        (
            "DPOTrainer('m', 'other', DPOConfig('out'))",
            "ref_model other: the reference is the model",
        ),
        ("DPOTrainer('m', ref_model='other')", "ref_model other: the reference is the model"),
    ],
)
def test_scripts_of_another_objective_are_refused(calls, named, tmp_path) -> None:
    with pytest.raises(ConfigError, match=named):
        script(tmp_path, calls + "\n")


@HAS_REWARD
def test_reward_models_are_converted(tmp_path) -> None:
    given = {"center_rewards_coefficient": 0.01, "max_length": 512, "use_peft": True}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(MODEL | given | {"lora_task_type": "SEQ_CLS"}))
    out = convert_config(tmp_path / "a.yaml")
    assert not [note for note in out.notes if "lora_task_type" in note]
    expected = {
        "preference.loss_type": "reward",
        "preference.center_rewards_coefficient": 0.01,
        "data.sequence_length": 1024,
        "data.too_long": "drop",  # as there
        "optim.learning_rate": 1e-4,
    }
    assert {name: out.settings.get(name) for name in expected} == expected
    (tmp_path / "b.yaml").write_text(
        "{base_model: m, reward_model: true, num_labels: 1, datasets: [{path: a.jsonl, "
        "type: bradley_terry.chat_template}]}"
    )
    out = convert_config(tmp_path / "b.yaml")
    assert out.settings["preference.loss_type"] == "reward"
    assert "data.columns" not in out.settings  # `input` is recognised
    out = script(tmp_path, "RewardTrainer('m', args=RewardConfig('o', max_length=64))\n")
    assert out.settings["preference.loss_type"] == "reward"
