"""Settings: how YAML and flags become a config, and what is said of those that cannot be one."""

import ast
import collections
import dataclasses
import itertools
import re
import time
from pathlib import Path

import pytest
import yaml

from toolkit import config
from toolkit.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    PreferConfig,
    PretrainConfig,
    ShardingConfig,
    data,
    lora,
    other_tools,
    outputs,
    settings,
)
from toolkit.config.data import SourceConfig
from toolkit.config.fields import setting_name
from toolkit.config.other_tools import REMOVED
from toolkit.errors import ConfigError

MODEL = "model: {name_or_path: here}\n"


@pytest.fixture
def parse(tmp_path):
    """Return a function (YAML, flags) -> config."""

    def run(text: str = MODEL, *flags: str) -> PretrainConfig:
        file = tmp_path / "config.yaml"
        file.write_text(text, "utf-8")
        return config.parse(PretrainConfig, ["--config", str(file), *flags])

    return run


@pytest.fixture
def refusal(parse):
    """Return a function (YAML, flags) -> what is said against them."""

    def run(text: str = MODEL, *flags: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(text, *flags)
        said = str(caught.value)
        assert "\n" not in said
        assert "class '" not in said
        return said

    return run


def fields(
    kind: type = PretrainConfig, prefix: str = ""
) -> dict[str, tuple[type, dataclasses.Field]]:
    """Return dotted name -> (class, field) of every setting."""
    found = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            found |= fields(field.type, f"{prefix}{setting_name(field.name)}.")
        else:
            found[prefix + setting_name(field.name)] = (kind, field)
    return found


# --------------------------------------------------------------------------------------------------
# What is read
# --------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_dataclasses(parse) -> None:
    assert parse() == PretrainConfig(ModelConfig("here"))


def test_flags_override_the_file_and_later_files_earlier_ones(parse, tmp_path) -> None:
    text = MODEL + "train: {max_steps: 3, logging_steps: 7}\noptim: {learning_rate: 1e-3}\n"
    cfg = parse(text, "--train.max_steps", "5", "--sharding.param_dtype=float32")
    assert (cfg.train.max_steps, cfg.train.logging_steps) == (5, 7)
    assert cfg.optim.learning_rate == 1e-3  # which YAML itself takes for a text
    assert cfg.sharding.param_dtype == "float32"
    (tmp_path / "more.yaml").write_text("train: {max_steps: 9}")
    cfg = parse(text, "--config", str(tmp_path / "more.yaml"), "--train.logging_steps", "1")
    assert (cfg.train.max_steps, cfg.train.logging_steps) == (9, 1)


def test_flags_alone_are_enough() -> None:
    cfg = config.parse(PretrainConfig, ["--model.name_or_path", "here", "--seed", "1"])
    assert (cfg.model.name_or_path, cfg.seed) == ("here", 1)


def test_no_settings_at_all() -> None:
    with pytest.raises(ConfigError, match=r"model\.name_or_path is required"):
        config.parse(PretrainConfig, [])


def test_the_default_file_is_read_where_no_other_is_named(tmp_path, parse) -> None:
    (tmp_path / "default.yaml").write_text("model: {name_or_path: default}\n")
    cfg = config.parse(PretrainConfig, ["--seed", "1"], tmp_path / "default.yaml")
    assert (cfg.model.name_or_path, cfg.seed) == ("default", 1)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("a.txt", "a.txt"),
        ("data/*.jsonl", "data/*.jsonl"),
        ("[ab].txt", "[ab].txt"),
        ("[a.txt, b.txt]", ["a.txt", "b.txt"]),
        ("[]", []),
    ],
)
def test_a_list_of_files_may_be_one_text(parse, flag, value) -> None:
    assert parse(MODEL, "--data.train_files", flag).data.train_files == value
    assert parse(MODEL + f"data: {{train_files: {value!r}}}").data.train_files == value


def test_a_text_and_the_list_of_it_are_one_setting(parse) -> None:
    one, listed = (parse(MODEL + f"data: {{train_files: {f}}}") for f in ("a.txt", "[a.txt]"))
    assert config.find_differences(one, listed) == {}
    two = parse(MODEL + "data: {train_files: [a.txt, b.txt]}")
    assert list(config.find_differences(one, two)) == ["data.train_files"]


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("2", 2), ("auto", "auto")]
)
def test_settings_of_several_types_keep_theirs(parse, text, value) -> None:
    cfg = parse(MODEL + f"sharding: {{reshard_after_forward: {text}}}")
    assert (
        cfg.sharding.reshard_after_forward is value or cfg.sharding.reshard_after_forward == value
    )
    assert type(cfg.sharding.reshard_after_forward) is type(value)


def test_what_is_dumped_is_loaded_as_the_same(tmp_path) -> None:
    for cfg in (
        PretrainConfig(ModelConfig("here")),
        PretrainConfig(
            ModelConfig(
                "hier/größe: 1", tokenizer_name_or_path="- b", revision="1e3", dtype="auto"
            ),
            ShardingConfig(reshard_after_forward=2, activation_checkpointing=True),
            DataConfig(["*.txt", "- a", "yes"], max_eval_samples=3, eval_split=0.5),
            seed=-1,
            output_dir="runs/# 1",
        ),
    ):
        file = tmp_path / "config.yaml"
        file.write_text(config.dump(cfg), "utf-8")
        assert config.load(PretrainConfig, file) == cfg
        assert config.dump(config.load(PretrainConfig, file)) == file.read_text("utf-8")


def test_pretraining_has_its_own_defaults(parse) -> None:
    optim = parse().optim
    assert (optim.learning_rate, optim.weight_decay, optim.adam_beta2) == (3e-4, 0.1, 0.95)
    assert (optim.lr_scheduler_type, optim.warmup_steps) == ("cosine_with_min_lr", 0.01)
    tuned = config.parse(FinetuneConfig, ["--model.name_or_path", "here"]).optim
    assert (tuned.learning_rate, tuned.lr_scheduler_type, tuned.warmup_steps) == (5e-5, "linear", 0)
    for given in ("20", "0.5", "0"):
        assert parse(MODEL, "--optim.warmup_steps", given).optim.warmup_steps == float(given)


def test_differences_are_named_by_their_setting(parse) -> None:
    old, new = parse(), parse(MODEL, "--train.max_steps", "3", "--seed", "1")
    assert config.find_differences(old, new) == {"train.max_steps": (-1, 3), "seed": (42, 1)}


def test_the_demo_config_is_good() -> None:
    for file in sorted((Path(__file__).parent.parent / "recipes/configs").glob("pretrain*.yaml")):
        assert config.load(PretrainConfig, file).model.name_or_path


# --------------------------------------------------------------------------------------------------
# What is shown
# --------------------------------------------------------------------------------------------------


def sentences() -> dict[tuple[str, str], str]:
    """Return (class, field) -> the docstring below the field, as `config.py` has it."""
    found = {}
    texts = [Path(module.__file__).read_text("utf-8") for module in (settings, data, lora, outputs)]
    for node in itertools.chain(*(ast.parse(text).body for text in texts)):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[node.name, field.target.id] = " ".join(below.value.value.split())
    return found


def test_help_shows_every_setting_with_its_sentence(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        config.parse(PretrainConfig, ["--help"])
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    known = sentences()
    for name, (owner, field) in fields().items():
        assert f"--{name} " in said
        owners = [c.__name__ for c in owner.__mro__ if (c.__name__, field.name) in known]
        assert known[owners[0], field.name] in said, name
    for section in dataclasses.fields(PretrainConfig):  # each is listed by its settings alone
        assert f"--{section.name} CONFIG" not in said
    assert "compute dtype, and recomputation:" in said  # a heading is a whole sentence
    assert len(said.split(" options: ")[0]) < 200  # usage is one line, not all flags


def test_print_config_is_a_config(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        config.parse(
            PretrainConfig,
            ["--model.name_or_path", "here", "--train.max_steps", "3", "--print_config"],
        )
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["train"]["max_steps"] == 3
    (tmp_path / "printed.yaml").write_text(printed)
    cfg = config.load(PretrainConfig, tmp_path / "printed.yaml")
    assert config.find_differences(PretrainConfig(ModelConfig("here")), cfg) == {
        "train.max_steps": (-1, 3)
    }


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


def test_who_sets_what_went_reads_what_to_do(refusal) -> None:
    settings = {
        *config.flatten_settings(config.parse(config.FinetuneConfig, ["--model.name_or_path", "x"]))
    }
    assert not settings & REMOVED.keys()
    for name, instead in REMOVED.items():
        for named in re.findall(
            r"\b(?:data|model|optim|sharding|train|lora|checkpoint)\.\w+", instead
        ):
            assert named in settings, (name, named)
    said = refusal(MODEL + "sharding: {layers_per_unit: 2}")
    assert "'sharding.layers_per_unit'" in said
    assert "which was removed: a unit is a decoder layer" in said


def test_an_unknown_setting_is_named_with_the_nearest_ones(refusal, tmp_path) -> None:
    said = refusal(MODEL + "optim: {learning_rat: 1}")
    assert "unknown setting 'optim.learning_rat'" in said
    assert str(tmp_path / "config.yaml") in said
    assert "did you mean optim.learning_rate?" in said
    assert said.endswith("all settings: docs/reference/settings.md, or `toolkit train --help`")
    with pytest.raises(ConfigError, match=r"or `toolkit finetune --help`$"):
        config.parse(config.FinetuneConfig, ["--model.name_or_path", "m", "--optim.lrr", "1"])
    said = refusal(MODEL, "--optim.lrr", "1")
    assert "unknown setting 'optim.lrr' (command line); nearest: optim.l" in said
    assert "'optimizer' (" in refusal(MODEL + "optimizer: {learning_rate: 1}")
    assert "unknown setting 'train.max-steps'" in refusal(MODEL, "--train.max-steps", "1")
    assert "data.train_files takes a value" in refusal(MODEL, "--data.train_files.a", "b")
    assert "unknown setting '1'" in refusal(MODEL + "1: 2")
    assert "unknown setting 'config'" in refusal(MODEL + "config: other.yaml")


def test_every_unknown_setting_is_named_on_one_short_line(refusal, tmp_path, monkeypatch) -> None:
    wrong = "optim: {learning_rat: 1, zz: 2}\ntrain: {max_step: 3}\nfoo: 1\n"
    said = refusal(MODEL + wrong, "--bf16", "true")
    said = said.replace(f"{tmp_path}/", "")
    assert said.startswith("5 unknown settings (config.yaml, command line): 'optim.learning_rat'")
    for name in ("optim.zz", "train.max_step", "foo", "bf16"):
        assert repr(name) in said
    assert len(said) <= 300
    many = "\n".join(f"unknown_setting_{i}: 1" for i in range(50))
    said = refusal(MODEL + many).replace(f"{tmp_path}/", "")
    assert said.startswith("50 unknown settings (config.yaml): 'unknown_setting_0'")
    assert "; and 4" in said
    assert len(said) <= 300


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{files: a, weight: 0}", "weight must be a number above 0 or empty, got 0"),
        ("{files: a, weight: -1}", "weight must be a number above 0 or empty, got -1"),
        ("{files: a, max_repeats: 0}", "max_repeats must be a number above 0 or empty, got 0"),
        ("{files: a, weight: much}", "weight must be a number above 0"),
    ],
)
def test_a_wrong_value_of_a_source_is_named(refusal, entry, said) -> None:
    assert f"data.sources[1].{said}" in refusal(
        MODEL + f"data: {{sources: [{{files: b}}, {entry}]}}"
    )
    assert f"data.sources[1].{said}" in refusal(MODEL, "--data.sources", f"[{{files: b}}, {entry}]")


def test_a_config_of_another_encoding_is_one_line(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    for encoding in ("utf-16", "latin-1"):
        file.write_bytes((MODEL + "seed: 1 # \xfc\n").encode(encoding))
        with pytest.raises(ConfigError, match="not text in UTF-8; save it as UTF-8"):
            config.parse(PretrainConfig, ["--config", str(file)])
    file.write_bytes((MODEL + "seed: 1 # \xfc\n").encode("utf-8"))
    assert config.load(PretrainConfig, file).seed == 1


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("learning_rate", "optim.learning_rate"),  # the right name in the wrong section
        ("train.save_steps", "checkpoint.save_steps"),
        ("report_to", "metrics.report_to"),
        ("optim.per_device_train_batch_size", "train.per_device_train_batch_size"),
        ("bf16", "sharding.param_dtype: bfloat16"),  # what others call it
        ("data.max_length", "data.sequence_length"),
        ("train.gradient_checkpointing", "sharding.activation_checkpointing: full"),
        ("data.train_on_inputs", "data.supervise: all"),
        ("lora.rank", "lora.r"),
        ("optim.learning_rat", "optim.learning_rate"),  # a typo, here and elsewhere
        ("train.lerning_rate", "optim.learning_rate"),
    ],
)
def test_a_name_that_people_bring_is_answered_by_the_setting(given: str, here: str) -> None:
    start = ["--model.name_or_path", "here", f"--{given}", "1"]
    with pytest.raises(ConfigError) as caught:
        config.parse(FinetuneConfig, start)
    assert f"unknown setting {given!r} (command line), did you mean {here}?" in str(caught.value)
    tuning = here.startswith("lora.") or "supervise" in here
    with pytest.raises(ConfigError) as caught:
        config.parse(PretrainConfig, start)
    said = f"did you mean {here} of fine-tuning (toolkit finetune" if tuning else f"mean {here}?"
    assert said in str(caught.value)


def test_a_config_of_fine_tuning_is_known_where_pretraining_is_asked_for(tmp_path) -> None:
    """A ready config, started with the wrong one of the two commands."""
    (tmp_path / "config.yaml").write_text("model: {name_or_path: here}\nlora: {r: 16}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load(PretrainConfig, tmp_path / "config.yaml")
    assert "did you mean lora of fine-tuning (toolkit finetune" in str(caught.value)


@pytest.mark.parametrize("cls", [PretrainConfig, FinetuneConfig])
@pytest.mark.parametrize("given", ["rl_beta", "data.pref_beta", "preference.beta", "preference"])
def test_a_name_of_preference_tuning_names_its_command(cls: type, given: str, tmp_path) -> None:
    here = "preference" if given == "preference" else "preference.beta"
    with pytest.raises(ConfigError) as caught:
        config.parse(cls, ["--model.name_or_path", "here", f"--{given}", "1"])
    assert f"did you mean {here} of preference tuning (toolkit prefer" in str(caught.value)
    if given not in (here, "preference.beta"):
        with pytest.raises(ConfigError, match=re.escape("did you mean preference.beta?")):
            config.parse(PreferConfig, ["--model.name_or_path", "here", f"--{given}", "1"])


def test_every_name_that_people_bring_leads_to_a_setting() -> None:
    known, elsewhere = fields(PreferConfig), other_tools.OTHER_NAMES
    count = collections.Counter(itertools.chain(*map(str.split, elsewhere.values())))
    assert count.most_common(1)[0][1] == 1
    for here, others in elsewhere.items():
        setting = here.partition(":")[0]
        assert setting in known or " " in setting, setting
        for name in others.split():
            assert not [n for n in known if n.split(".")[-1] == name], f"{name} is a name of ours"
            said = other_tools.suggest_setting(PreferConfig, PreferConfig, "", name)
            assert said == here, name


def test_what_is_near_nothing_gets_no_suggestion() -> None:
    for cls, name in ((PretrainConfig, "zzzz"), (SourceConfig, "learning_rate")):
        assert other_tools.suggest_setting(cls, cls, "", name) is None


def test_a_switch_without_its_value_and_a_key_of_a_source(refusal) -> None:
    said = refusal(MODEL, "--sharding.cpu_offload")
    assert said.endswith(
        "must be followed by its value, true or false: --sharding.cpu_offload true"
    )
    said = refusal(MODEL, "--train.max_steps", "--seed", "1")
    assert said.startswith("--train.max_steps must be followed by its value, an integer of at le")
    said = refusal(MODEL, "--data.sources", "[{files: a, wieght: 2}]")
    assert "unknown setting 'wieght' (data.sources[0]), did you mean weight?" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train: {max_steps: many}",
            "train.max_steps must be an integer of at least 1, or -1 for all, got many",
        ),
        (
            "train: {max_steps: 1.5}",
            "train.max_steps must be an integer of at least 1, or -1 for all, got 1.5",
        ),
        (
            "train: {max_steps: true}",
            "train.max_steps must be an integer of at least 1, or -1 for all, got True",
        ),
        (
            "train: {max_steps: null}",
            "train.max_steps must be an integer of at least 1, or -1 for all, got nothing (null)",
        ),
        (
            "optim: {learning_rate: fast}",
            "optim.learning_rate must be a number of at least 0, got fast",
        ),
        ("sharding: {cpu_offload: maybe}", "sharding.cpu_offload must be true or false, got maybe"),
        ("sharding: {param_dtype: fp32}", "must be one of float32, bfloat16, got fp32"),
        (
            "sharding: {reshard_after_forward: later}",
            "must be true or false, an integer or auto, got later",
        ),
        ("data: {train_files: [1, 2]}", "data.train_files must be text or a list, got [1, 2]"),
        (
            "data: {train_files: {a: b}}",
            "data.train_files must be text or a list, got {'a': 'b'}",
        ),
        (
            "data: {max_eval_samples: few}",
            "data.max_eval_samples must be an integer of at least 1 or empty, got few",
        ),
        (
            "optim: {lr_scheduler_kwargs: 3}",
            "optim.lr_scheduler_kwargs must be a mapping from text to anything, got 3",
        ),
        ("output_dir: 5", "output_dir must be text, got 5"),
        ("output_dir: null", "output_dir must be text, got nothing (null)"),
        ("train: 5", "is a section of settings, got 5"),
        ("train: [1]", "is a section of settings, got [1]"),
        ("train:", "is a section of settings, got None"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(refusal, text, said) -> None:
    assert said in refusal(MODEL + text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected a YAML file with settings"),
        ("# only a comment", "is empty"),
        ("- a", "must hold a mapping of settings, got list"),
        ("model: [", "is not readable YAML"),
        ("model: {name_or_path: a}\n\tseed: 1", "is not readable YAML"),
        ("model: !!python/object/apply:os.getcwd []", "has a value with a tag"),
        ("seed: 1", "model.name_or_path is required; set it in the file of --config, or with"),
        (
            MODEL + "optim: {weight_decay: 1}\noptim: {learning_rate: 1}",
            "'optim' occurs twice in one mapping, in lines 2 and 3",
        ),
        (
            MODEL + "train:\n  max_steps: 1\n  max_steps: 2",
            "'max_steps' occurs twice in one mapping, in lines 3 and 4",
        ),
    ],
)
def test_a_file_that_is_no_config(refusal, text, said) -> None:
    assert said in refusal(text)


def test_a_file_that_is_not_there(tmp_path) -> None:
    for name, what in (("none.yaml", "does not exist"), (".", "is not a file")):
        with pytest.raises(ConfigError, match=what) as caught:
            config.parse(PretrainConfig, ["--config", str(tmp_path / name)])
        assert str(tmp_path) in str(caught.value)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        config.load(PretrainConfig, tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("lm_head.weight", "got lm_head.weight; write [lm_head.weight]"),
        ("[*norm*, a]", "; put an entry that begins with * in quotes: \"['*']\""),
    ],
)
def test_what_is_no_list_is_answered_with_one(refusal, value: str, advice: str) -> None:
    said = refusal(MODEL, "--model.frozen_parameters", value)
    assert "model.frozen_parameters must be a list, got " in said
    assert advice in said


@pytest.mark.parametrize(
    "text",
    [
        "seed: " + "9" * 100_000,
        "seed: 0x" + "f" * 100_000,
        "seed: " + "1:" * 100_000 + "1",
        "seed: '" + "9" * 20_000 + "'",
        "seed: '" + "[" * 20_000 + "'",
        "seed: '" + "[" * 100_000 + "'",
        "seed: !!int x",
        "seed: !!timestamp x",
        "seed: 2024-01-01",
        "output_dir: !!binary x",
        "data: " + "{a: " * 100_000,
        "data: {train_files: " + "[" * 100_000 + "]" * 100_000 + "}",
        "# " + "x" * 2**20,
    ],
    ids=lambda text: text[:24],
)
def test_bombs_are_one_error_line(refusal, text) -> None:
    begun = time.monotonic()
    said = refusal(MODEL + text)
    assert len(said) < 1000
    if text.startswith("seed: "):
        assert len(refusal(MODEL, "--seed", text[6:].strip("'"))) < 1000
        assert len(refusal(MODEL, "--seed=" + text[6:].strip("'"))) < 1000
    assert time.monotonic() - begun < 30  # without bounds it would take hours


def test_a_date_is_a_text(parse) -> None:
    assert parse(MODEL + "output_dir: 2024-01-01").output_dir == "2024-01-01"
    assert parse("model: {name_or_path: 2024-01-02}").model.name_or_path == "2024-01-02"


def test_a_config_of_100_mb_is_not_read(tmp_path) -> None:
    file = tmp_path / "large.yaml"
    with open(file, "wb") as f:
        f.write(MODEL.encode() + b"a: [")
        f.truncate(100_000_000)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="is larger than"):
        config.load(PretrainConfig, file)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["stray.yaml"], "unexpected on the command line: stray.yaml"),
        (["--data.train_files", "a.txt", "b.txt"], "--data.train_files '[a.txt, b.txt]'"),
        (
            ["--train", "5"],
            "--train is a section of settings; give them one by one: --train.max_steps",
        ),
        (["--train.max_steps"], "--train.max_steps must be followed by its value"),
    ],
)
def test_a_command_line_that_is_none(refusal, flags, said) -> None:
    assert said in refusal(MODEL, *flags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "data: {dataset_name: a, train_files: b}",
            "dataset_name and data.train_files are both set",
        ),
        ("data: {train_files: ''}", "data.train_files is an empty text"),
        ("data: {eval_files: [a, '']}", "data.eval_files is an empty text"),
        ("output_dir: ''", "output_dir is an empty text"),
        ("data: {sequence_length: 1}", "data.sequence_length must be an integer of at least 2"),
        ("data: {eval_split: 1}", "data.eval_split must be a number from 0 to below 1, got 1"),
        ("data: {num_workers: -1}", "data.num_workers must be an integer of at least 0, got -1"),
        (
            "data: {max_eval_samples: 0}",
            "data.max_eval_samples must be an integer of at least 1 or empty, got 0",
        ),
        (
            "checkpoint: {save_total_limit: 1}",
            "checkpoint.save_total_limit must be an integer of at least 2 or empty, got 1",
        ),
        (
            "checkpoint: {save_steps: 0}",
            "checkpoint.save_steps must be an integer of at least 1, got 0",
        ),
        ("train: {max_steps: 0}", "train.max_steps must be an integer of at least 1, or -1"),
        (
            "data: {sources: [{files: b}, {files: a, weight: 0}]}",
            "data.sources[1].weight must be a number above 0 or empty, got 0",
        ),
        ("data: {sources: [{files: a, weight: .nan}]}", "data.sources[0].weight must be a number"),
        ("data: {sources: [{files: a, max_repeats: -1}]}", "max_repeats must be a number above 0"),
        (
            "data: {sources: [{files: a, weight: 1}, {files: b}]}",
            "data.sources: set a weight for every source, or for none",
        ),
        ("train: {num_train_epochs: 0}", "train.num_train_epochs must be a number above 0, got 0"),
        (
            "train: {num_train_epochs: .inf}",
            "train.num_train_epochs must be a number above 0, got inf",
        ),
        (
            "train: {per_device_train_batch_size: 0}",
            "per_device_train_batch_size must be an integer of at least 1",
        ),
        (
            "train: {gradient_accumulation_steps: 0}",
            "gradient_accumulation_steps must be an integer of at least 1",
        ),
        (
            "train: {eval_steps: 0}",
            "train.eval_steps must be an integer of at least 1 or empty, got 0",
        ),
        (
            "optim: {learning_rate: -1}",
            "optim.learning_rate must be a number of at least 0, got -1",
        ),
        (
            "optim: {learning_rate: .nan}",
            "optim.learning_rate must be a number of at least 0, got nan",
        ),
        (
            "optim: {max_grad_norm: .inf}",
            "optim.max_grad_norm must be a number of at least 0, got inf",
        ),
        ("optim: {adam_beta1: 1}", "optim.adam_beta1 must be a number from 0 to below 1, got 1"),
        ("sharding: {dp_shard: 0}", "sharding.dp_shard must be an integer of at least 1, or -1"),
        (
            "sharding: {activation_checkpointing: full, activation_offload: true, "
            "torch_compile: layer}",
            "activation_offload runs uncompiled code in each layer",
        ),
        (
            "sharding: {dp_replicate: 0}",
            "sharding.dp_replicate must be an integer of at least 1, or -1",
        ),
        ("sharding: {dp_replicate: -2}", "or -1 for all, got -2"),
        ("sharding: {param_dtype: float16}", "got float16 (it needs loss scaling, which"),
        (
            "sharding: {reduce_dtype: float16}",
            "sharding.reduce_dtype must be one of float32, bfloat16, got float16",
        ),
    ],
)
def test_values_that_cannot_be(refusal, text, said) -> None:
    assert said in refusal(MODEL + text)


# --------------------------------------------------------------------------------------------------
# Secrets
# --------------------------------------------------------------------------------------------------


def test_a_token_is_no_setting(refusal):
    """Refused by name and by look, and never repeated: config.yaml and logs are files."""
    token = "hf_" + "canaryCanary" * 3
    for text, flags, word in [
        (MODEL + f"hub: {{hub_token: {token}}}\n", [], "hub.hub_token"),
        (MODEL, ["--hub.token", token], "hub.token"),
        (MODEL, [f"--hub.hub_model_id={token}"], "--hub.hub_model_id"),
        (MODEL, ["--hub.hub_model_id", token], "command line"),
        (MODEL + f"hub: {{hub_model_id: {token}}}\n", [], "hub.hub_model_id"),
        (MODEL + f"hub: {token}\n", [], "hub"),
        (MODEL + f"train: {{max_steps: {token}}}\n", [], "train.max_steps"),
        (MODEL + "data: {train_files: ['https://me:canary@host/x']}\n", [], "data.train_files"),
    ]:
        said = refusal(text, *flags)
        assert word in said
        assert "canary" not in said.lower()


def test_pushing_needs_a_name(refusal):
    assert "hub.hub_model_id" in refusal(MODEL + "hub: {push_to_hub: true}\n")
