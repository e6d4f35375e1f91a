"""What the keys of axolotl, TRL and Trainer mean in settings of the toolkit.

Every key is carried, or named in a note. Names are those of `names`; here is what values mean, and
what a tool does where a key is missing is in `unsaid`.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.accelerate_yaml import translate
from toolkit.config.names import leaves_of, renamed, why_left
from toolkit.config.outputs import Tracker
from toolkit.config.settings import FinetuneConfig, Schedule
from toolkit.config.unsaid import LORA, UNSAID, axolotl_warmup
from toolkit.errors import ConfigError, LaunchError, is_secret_name, looks_secret

TOOLS = ("axolotl", "trl", "trainer")
_TOP = ("output_dir", "seed")
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_PRECISIONS = ("bf16", "fp16", "bfloat16", "float16")
_OPTIMIZERS = {
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_torch": "adamw_torch_fused",
    "adamw_hf": "adamw_torch_fused",
    "paged_adamw_32bit": "adamw_torch_fused",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "muon": "muon",
}
_ATTENTION = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa"} | {
    "eager_attention": "eager"
}
_LIGER = (
    *("use_liger_kernel", "use_liger", "liger_kernel", "liger_rope", "liger_rms_norm"),
    *("liger_swiglu", "liger_glu_activation", "liger_layer_norm"),
)
_ATTENTION_NAMES = {"flash": "flash_attention_2", "flash_attention": "flash_attention_2"}


@dataclass
class Conversion:
    """What became of a config."""

    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted setting -> value."""
    notes: list[str] = field(default_factory=list)
    """A line for each key that is not carried, or means something else here."""
    text: str = ""
    """The YAML."""


def convert(
    given: dict[str, Any], tool: str | None = None, computed: Mapping[str, str] | None = None
) -> Conversion:
    """Return what the keys of a config are here, not yet as a text, and not yet parsed.

    Args:
        computed: of a script: keys whose values only its run knows, each with its note.
    """
    out = Conversion(tool or _tool_of(given), notes=list((computed or {}).values()))
    # A script calls PEFT itself, whose defaults are not those of TRL's command line.
    lora = LORA[out.tool if computed is None else "trainer"]
    _Converter(given, set(computed or ()), out, lora).run()
    return out


def _tool_of(given: Mapping[str, Any]) -> str:
    if {"base_model", "micro_batch_size", "sequence_len"} & set(given):
        return "axolotl"
    of_trl = {"use_peft", "dataset_mixture", "max_length", "assistant_only_loss", "packing"}
    return "trl" if {"model_name_or_path", *of_trl} & set(given) else "trainer"


class _Converter:
    """Takes key after key out of `left`; what nothing takes is named at the end."""

    def __init__(
        self, given: dict[str, Any], computed: set[str], out: Conversion, lora: dict[str, Any]
    ) -> None:
        self.left = {key: _number(value) for key, value in given.items()}
        self.out, self.tool, self.lora = out, out.tool, lora
        self.adapted = any(given.get(key) for key in ("adapter", "use_peft", "r"))
        unsaid = UNSAID[self.tool] | (lora if self.adapted else {})
        said = {key for key, value in given.items() if value is not None} | computed
        names = {self.setting_of(key) for key in said - {"use_peft"}} | said
        for key, value in unsaid.items():
            if self.setting_of(key) not in names and not (key == "bf16" and given.get("fp16")):
                self.left[key] = value

    @staticmethod
    def setting_of(key: str) -> str:
        found = leaves_of(FinetuneConfig, key)
        return renamed(key) or (found[0] if len(found) == 1 else key)

    def run(self) -> None:
        nothing: tuple[Any, ...] = (None, "", [], {})
        # A limit that is empty keeps all checkpoints, here as there.
        empty = [k for k, v in self.left.items() if v in nothing and k != "save_total_limit"]
        for key in empty:
            del self.left[key]
        if empty:
            self.note(", ".join(empty), "empty there, so left out")
        self.model_and_precision()
        self.memory()
        self.sharding()
        self.data()
        self.optimisation()
        self.schedule_of_run()
        self.adapters()
        self.outputs()
        for key, value in list(self.left.items()):
            self.rest(key, value)
        if "model.name_or_path" not in self.out.settings:
            self.set("model.name_or_path", "MODEL")
            self.note("model", "none is named there; set model.name_or_path")

    # ---- Steps that all share

    def set(self, name: str, value: Any) -> None:
        self.out.settings[name] = value

    def note(self, key: str, why: str, value: Any = None) -> None:
        secret = is_secret_name(key) or looks_secret(str(value))
        shown = "" if value is None or secret else f" {str(value)[:60]}"
        self.out.notes.append(f"{key}{shown}: {why}")

    def take(self, *names: str) -> tuple[str, Any] | None:
        """Return the first of the keys that is there, with its value; it counts as carried."""
        for name in names:
            if name in self.left:
                return name, self.left.pop(name)
        return None

    def one(self, setting: str, *names: str) -> None:
        """Carry one of the keys to `setting`."""
        if (found := self.take(*names)) is not None:
            self.set(setting, found[1])

    def rest(self, key: str, value: Any) -> None:
        """Carry a key by the table of names, or say why not."""
        del self.left[key]
        if is_secret_name(key):
            self.note(key, "a config holds no token; use `hf auth login` or HF_TOKEN")
        elif reason := why_left(key):
            self.note(key, reason, value)
        elif key == "trust_remote_code" and value and self.adapted:
            self.note(key, "adapters are proven on a base without code from outside", value)
        elif (setting := self.setting_of(key)) != key or key in _TOP:
            self.set(setting, value)
        else:
            self.note(key, "not known to the toolkit", value)

    # ---- Model

    def model_and_precision(self) -> None:
        self.one("model.name_or_path", "base_model", "model_name_or_path", "model_id")
        self.one("model.revision", "model_revision", "revision_of_model")
        if found := self.take("torch_dtype", "dtype"):
            key, value = found
            if value in ("float16", "fp16", "half"):
                self.note(key, "there is no float16 training here; bfloat16 is set", value)
                value = "bfloat16"
            known = value in ("auto", "bfloat16", "float32")
            if known:
                self.set("model.dtype", value)
            else:
                self.note(key, "model.dtype is auto, bfloat16 or float32", value)
            if known and value != "float32" and not self.adapted:
                what = "the optimizer updates weights of that dtype, as there"
                self.note(key, f"{what}; model.dtype: float32 keeps float32 masters", value)
        asked = {key: self.left.pop(key) for key in _PRECISIONS if key in self.left}
        half = {key for key, value in asked.items() if value not in (False, "false", "no")}
        if half & {"fp16", "float16"} and not half & {"bf16", "bfloat16"}:
            what = "float16 needs loss scaling, which is not here; computed in bfloat16"
            self.note("fp16", f"{what} (sharding.param_dtype)", True)
        for key in half:
            if asked[key] not in (True, "auto", "full", "true"):
                self.note(key, "neither true nor false, taken as true", asked[key])
        if asked:
            self.set("sharding.param_dtype", "bfloat16" if half else "float32")
        if self.tool == "axolotl" and half and not self.adapted:
            what = "weights are kept in float32 and computed in bfloat16"
            self.note("bf16", f"{what}; model.dtype: bfloat16 keeps them as axolotl does")
        self.kernels()

    def kernels(self) -> None:
        named = self.take("attention", "attn_implementation")
        if named:
            name = _ATTENTION_NAMES.get(str(named[1]), named[1])
            self.set("model.attn_implementation", name)
        for key, name in _ATTENTION.items():
            if found := self.take(key):
                if named:
                    self.note(key, f"{named[0]} says which attention", found[1])
                elif found[1]:
                    self.set("model.attn_implementation", name)
        liger = {key: self.left.pop(key) for key in _LIGER if key in self.left}
        if any(liger.values()):
            self.set("model.kernels", "liger")
            shown = ", ".join(f"{key} {value}" for key, value in liger.items())
            self.note(shown, "kernels of norms, rotary positions and MLPs, all or none")

    # ---- Memory and sharding

    def memory(self) -> None:
        if found := self.take("gradient_checkpointing"):
            self.set("sharding.activation_checkpointing", "full" if found[1] else "none")
            if found[1] in ("offload", "offload_disk"):
                self.set("sharding.activation_offload", True)
        if found := self.take("gradient_checkpointing_kwargs"):
            if not isinstance(found[1], dict) or found[1].get("use_reentrant", True):
                self.note(found[0], "recomputation is not reentrant here; same numbers", found[1])
            more = (
                {k for k in found[1] if k != "use_reentrant"} if isinstance(found[1], dict) else ()
            )
            for key in more:
                self.note(f"{found[0]}.{key}", "no equivalent", found[1][key])
        if (found := self.take("activation_offloading")) and found[1]:
            self.set("sharding.activation_offload", True)
            if self.out.settings.get("sharding.activation_checkpointing") != "full":
                self.set("sharding.activation_checkpointing", "full")
                self.note(found[0], "goes with sharding.activation_checkpointing: full, now set")
        self.one("sharding.torch_compile", "torch_compile", "compile")
        if found := self.take("deepspeed"):
            what = "no DeepSpeed here: FSDP2 shards as ZeRO-3 does (section sharding)"
            self.note(found[0], f"{what}; offload: sharding.cpu_offload: true", found[1])

    def sharding(self) -> None:
        words = self.take("fsdp")
        asked = str(words[1]).replace(",", " ").split() if words else []
        asked = words[1] if words and isinstance(words[1], list) else asked
        for word in asked:
            if word == "offload":
                self.set("sharding.cpu_offload", True)
            elif word == "shard_grad_op":
                self.set("sharding.reshard_after_forward", False)
            elif word not in ("full_shard", "auto_wrap", "True", "true"):
                self.note(f"fsdp {word}", "set sharding.dp_replicate and sharding.dp_shard")
        found, version = self.take("fsdp_config"), self.take("fsdp_version")
        content = found[1] if found and isinstance(found[1], dict) else {}
        asked_version = content.get("fsdp_version", content.get("version", version and version[1]))
        if (words or content) and str(asked_version) != "2":
            self.note("fsdp_version", "FSDP1 there, FSDP2 here", asked_version)
        env = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
        of_key = {}
        for key, value in content.items():
            # What an Accelerate YAML has under the same name is a variable in capitals.
            name = key.removeprefix("fsdp_").replace("_layer_cls_to_wrap", "_cls_to_wrap")
            of_key[key] = f"FSDP_{name.upper()}"
            env[of_key[key]] = ",".join(value) if isinstance(value, list) else str(value)
        env["FSDP_VERSION"] = "2"
        try:
            settings, notes = translate(env)
            same = [
                key
                for key, variable in of_key.items()
                if variable != "FSDP_VERSION"
                and translate({n: v for n, v in env.items() if n != variable}) == (settings, notes)
            ]
        except LaunchError as error:
            raise ConfigError(f"fsdp_config: {error}") from error
        del settings["sharding.param_dtype"]  # bf16 and fp16 say it
        self.out.settings |= settings
        self.out.notes += [f"fsdp_config: {note}" for note in notes]
        if same:
            self.note(f"fsdp_config: {', '.join(same)}", "changes nothing under FSDP2")

    # ---- Data

    def data(self) -> None:
        length = ("sequence_len", "max_length", "max_seq_length", "max_seq_len", "model_max_length")
        self.one("data.sequence_length", *length)
        strategy = self.take("packing_strategy")
        if found := self.take("sample_packing", "packing", "multipack_real_batches"):
            way = "wrapped" if strategy and strategy[1] == "wrapped" else "bfd"
            self.set("data.packing", way if found[1] else "none")
            if found[1] and strategy and strategy[1] not in ("bfd", "wrapped"):
                self.note("packing_strategy", "packed by best fit decreasing (bfd)", strategy[1])
        if found := self.take("excess_length_strategy"):
            self.set("data.too_long", "error" if found[1] == "raise" else found[1])
        self.supervision()
        self.template()
        self.sources()
        if found := self.take("val_set_size", "test_split_size"):
            key, value = found
            if isinstance(value, int | float) and 0 <= value < 1:
                self.set("data.eval_split", float(value))
            else:
                what = "a number of rows there; data.eval_split is a share, such as 0.01"
                self.note(key, what, value)

    def supervision(self) -> None:
        inputs = self.take("train_on_inputs", "train_on_input")
        if inputs and inputs[1]:
            self.set("data.supervise", "all")
        if (found := self.take("assistant_only_loss")) and found[1]:
            self.set("data.supervise", "assistant")
        elif (completion := self.take("completion_only_loss")) is not None:
            self.set("data.supervise", "completion" if completion[1] else "all")
        elif self.tool == "trl":
            what = "of conversations TRL learns every token by default, here the assistant's turns"
            self.note("assistant_only_loss", f"{what}; data.supervise: all does as TRL")
        if roles := self.take("roles_to_train"):
            if set(roles[1]) == {"assistant"}:
                self.set("data.supervise", "assistant")
            else:
                self.note("roles_to_train", "only the assistant's turns can be chosen", roles[1])

    def template(self) -> None:
        jinja = self.take("chat_template_jinja")
        if found := self.take("chat_template", "chat_template_path"):
            key, value = found
            if "{" in str(value) or str(value).endswith((".jinja", ".j2")):
                self.set("data.chat_template", value)
            elif value == "jinja" and jinja:
                self.set("data.chat_template", jinja[1])
            elif value != "tokenizer_default":
                what = "a name there; data.chat_template takes the template or its file"
                self.note(key, f"{what} (empty: the tokenizer's own)", value)

    def sources(self) -> None:
        mixture = self.take("dataset_mixture", "dataset_mixer", "datasets")
        entries: Any = mixture[1] if mixture else []
        if isinstance(entries, dict) and "datasets" in entries:
            for key in entries.keys() - {"datasets"}:
                if key == "test_split_size" and entries[key] is not None:
                    self.left[key] = entries[key]
                elif entries[key] is not None:
                    self.note(
                        f"{mixture[0]}.{key}" if mixture else key, "no equivalent", entries[key]
                    )
            entries = entries["datasets"]
        if isinstance(entries, dict):  # name -> share
            entries = [{"path": name, "weight": share} for name, share in entries.items()]
        if not isinstance(entries, list):
            where = mixture[0] if mixture else "datasets"
            raise ConfigError(f"{where}: expected a list of data sets, got {entries!r}")
        several = len(entries) > 1
        found = [self.source(entry, i, several) for i, entry in enumerate(entries)]
        if len(found) > 1:
            self.set("data.sources", found)
        for source in found[:1] if len(found) == 1 else ():
            names = {"files": "train_files"}
            self.out.settings |= {f"data.{names.get(k, k)}": v for k, v in source.items()}
        self.one("data.dataset_name", "dataset_name", "dataset_id_or_path", "dataset_path")
        self.one("data.dataset_config_name", "dataset_config", "dataset_config_name")
        self.one("data.dataset_split", "dataset_train_split", "dataset_split")
        name = self.out.settings.get("data.dataset_name")
        if isinstance(name, str) and _is_file(name):
            self.set("data.train_files", self.out.settings.pop("data.dataset_name"))

    def source(self, entry: Any, index: int, several: bool) -> dict[str, Any]:
        """Return one data set as a mapping of `data.sources`; names what of it is not carried."""
        out: dict[str, Any] = {}
        entry = dict(entry) if isinstance(entry, dict) else {"path": entry}
        where = f"datasets[{index}]"
        path = entry.pop("path", None) or entry.pop("id", None)
        files = entry.pop("data_files", None)
        if files or _is_file(str(path)):
            out["files"] = files or path
            if files and not _is_file(str(path)) and path not in ("json", "csv", "parquet", "text"):
                self.note(f"{where}.path", "its data_files are read from this machine", path)
        else:
            out["dataset_name"] = path
        for key, name in {"name": "dataset_config_name", "config": "dataset_config_name"}.items():
            if (value := entry.pop(key, None)) is not None:
                out[name] = value
        if (value := entry.pop("split", None)) is not None:
            out["dataset_split"] = value
        for key, value in entry.items():
            if value is None or (key == "ds_type" and "files" in out):
                continue
            if key == "field" and several:
                what = "data.text_column is one for all sources; rename the column to text"
                self.note(f"{where}.field", what, value)
            elif key == "field":
                self.set("data.text_column", value)
            elif key == "type":
                self.kind(f"{where}.type", value)
            elif key == "columns" and set(value) <= {"messages", "text", "chat_template_kwargs"}:
                continue  # what is recognised anyway
            elif not self.usual(key, value):
                self.note(f"{where}.{key}", why_left(key) or "no equivalent", value)
        return out

    def usual(self, key: str, value: Any) -> bool:
        """Whether a key says what is recognised by the columns without being said."""
        if key in ("field_messages", "message_field_role", "message_field_content"):
            return value in ("messages", "conversations", "role", "content", "from", "value")
        pairs = ({"role": "from", "content": "value"}, {"role": "role", "content": "content"})
        return key == "message_property_mappings" and value in pairs

    def kind(self, key: str, value: Any) -> None:
        kind = str(value).partition(".")[0]
        if kind == "alpaca":
            self.note(key, "rendered by the chat template, not in Alpaca's own words", value)
        elif kind not in ("completion", "chat_template", "sharegpt"):  # texts are learned whole
            self.note(key, "rows are recognised by their columns (docs/finetuning.md)", value)

    # ---- Optimiser and schedule

    def optimisation(self) -> None:
        if found := self.take("optimizer", "optim"):
            name = _OPTIMIZERS.get(str(found[1]))
            if name is None:
                what = "optim.optim is adamw_torch_fused, adamw_8bit, adafactor or muon"
                self.note(found[0], f"{what}; adamw_torch_fused is set", found[1])
            self.set("optim.optim", name or "adamw_torch_fused")
            if str(found[1]).startswith("paged"):
                self.note(
                    found[0], "state is not paged here; sharding.cpu_offload holds it on the host"
                )
        if found := self.take("lr_scheduler", "lr_scheduler_type"):
            if found[1] in typing.get_args(Schedule):
                self.set("optim.lr_scheduler_type", found[1])
            else:
                what = f"optim.lr_scheduler_type is one of {', '.join(typing.get_args(Schedule))}"
                self.note(found[0], f"{what}; cosine is set", found[1])
                self.set("optim.lr_scheduler_type", "cosine")
        kwargs = self.take("lr_scheduler_kwargs")
        more = dict(kwargs[1]) if kwargs and isinstance(kwargs[1], dict) else {}
        least = self.take("cosine_min_lr_ratio") or ("", more.pop("min_lr_rate", None))
        if least[1] is not None:
            if self.out.settings.get("optim.lr_scheduler_type") != "cosine_warmup_with_min_lr":
                self.set("optim.lr_scheduler_type", "cosine_with_min_lr")
            self.set("optim.min_lr_rate", least[1])
        if more:
            self.set("optim.lr_scheduler_kwargs", more)
        steps, ratio = self.take("warmup_steps"), self.take("warmup_ratio")
        if warmup := (steps if steps and steps[1] else ratio or steps):
            self.set("optim.warmup_steps", warmup[1])
        elif self.tool == "axolotl":
            value, what = axolotl_warmup(self.left.get("max_steps"))
            self.set("optim.warmup_steps", value)
            self.note("warmup_steps", what)
        if steps and steps[1] and ratio:
            self.note("warmup_ratio", "warmup_steps wins, as there", ratio[1])
        if self.out.settings.get("optim.warmup_steps") and (
            self.out.settings.get("optim.lr_scheduler_type") == "constant"
        ):
            given = self.out.settings.pop("optim.warmup_steps")
            what = "`constant` ignores it, as in transformers; constant_with_warmup has one"
            self.note("warmup_steps", what, given)

    def schedule_of_run(self) -> None:
        strategies = ("eval_strategy", "evaluation_strategy")
        strategy = self.take(*strategies)
        how = str(strategy[1]) if strategy else ""
        if strategy and how in ("no", "False"):
            if (found := self.take("eval_steps")) is not None:
                self.note("eval_steps", "eval_strategy is no", found[1])
            self.out.settings.setdefault("data.eval_split", 0.0)
        elif how == "epoch":
            what = "train.eval_steps counts steps; evaluated at the end"
            self.note(strategy[0] if strategy else "", what, how)
        elif how == "steps" and "eval_steps" not in self.left:
            self.set("train.eval_steps", self.left.get("logging_steps", 500))
        for key in ("eval_steps", "save_steps", "logging_steps"):
            if isinstance(self.left.get(key), float) and self.left[key] < 1:
                what = "a share of all steps there; a number of steps is needed"
                self.note(key, what, self.left.pop(key))
        if (found := self.take("save_strategy")) and found[1] != "steps":
            what = "checkpoint.save_steps counts steps; the last step is saved in any case"
            self.note(found[0], what, found[1])
        if (found := self.take("logging_strategy")) and found[1] != "steps":
            self.note(found[0], "train.logging_steps counts steps", found[1])
        if found := self.take("save_total_limit"):
            self.set("checkpoint.save_total_limit", found[1] and max(2, found[1]))
            if found[1] is not None and found[1] < 2:
                self.note(found[0], "at least 2: one is whole while another is written", found[1])
        if (found := self.take("load_best_model_at_end")) and found[1]:
            if self.out.settings.get("checkpoint.save_total_limit", 2) is None:
                self.note(found[0], "all checkpoints are kept, the best one among them", found[1])
            elif self.left.get("eval_steps") or "train.eval_steps" in self.out.settings:
                self.set("checkpoint.keep_best", True)
            else:
                self.note(found[0], "checkpoint.keep_best needs train.eval_steps", found[1])
        if "early_stopping_patience" in self.left and not (
            self.left.get("eval_steps") or "train.eval_steps" in self.out.settings
        ):
            found = self.left.pop("early_stopping_patience")
            self.note("early_stopping_patience", "needs train.eval_steps", found)

    # ---- Adapters

    def adapters(self) -> None:
        kind = self.take("adapter")
        self.take("use_peft")
        eight, four = self.take("load_in_8bit"), self.take("load_in_4bit")
        if not self.adapted:
            mine = [k for k in self.left if k.startswith(("lora_", "bnb_4bit_"))]
            for key in mine:
                self.note(key, "no adapters are asked for there", self.left.pop(key))
            if (four and four[1]) or (eight and eight[1]):
                self.note("load_in_4bit or 8bit", "only under adapters (lora.r)", True)
            return
        if kind and kind[1] not in ("lora", "qlora"):
            self.note("adapter", "lora and qlora are known", kind[1])
        if (four and four[1]) or (kind and kind[1] == "qlora"):
            self.set("lora.load_in_4bit", True)
            if four and not four[1]:
                self.note(four[0], "adapter qlora has a base in 4 bits", four[1])
        if eight and eight[1]:
            what = "no 8-bit base: it stays in its dtype"
            self.note("load_in_8bit", f"{what}; lora.load_in_4bit: true is the nearest", True)
        self.one("lora.r", "lora_r", "r")
        if "lora.r" not in self.out.settings:
            self.set("lora.r", 8)
            self.note("lora_r", "none is given; 8 is set")
        self.targets()
        double = ("bnb_4bit_use_double_quant", "use_bnb_nested_quant")
        for setting, names in {
            "lora.bnb_4bit_quant_type": ("bnb_4bit_quant_type",),
            "lora.bnb_4bit_use_double_quant": double,
        }.items():
            if found := self.take(*names):
                if "lora.load_in_4bit" in self.out.settings:
                    self.set(setting, found[1])
                elif found[0] not in self.lora:
                    self.note(found[0], "the base is not in 4 bits", found[1])
        if (found := self.take("bnb_4bit_compute_dtype")) and found[1] != "bfloat16":
            self.note(found[0], "sharding.param_dtype is what is computed in", found[1])
        for key, usual in (("bias", "none"), ("lora_bias", "none"), ("task_type", "CAUSAL_LM")):
            if (found := self.take(key)) and found[1] != usual:
                self.note(key, f"{usual} is what there is", found[1])

    def targets(self) -> None:
        linear = self.take("lora_target_linear")
        named = self.take("lora_target_modules", "target_modules")
        if linear and linear[1]:
            self.set("lora.target_modules", "all-linear")
            if named:
                self.note(named[0], "lora_target_linear adapts every linear layer", named[1])
        elif named:
            one = isinstance(named[1], list) and len(named[1]) == 1 and named[1][0]
            self.set("lora.target_modules", one if one == "all-linear" else named[1])
        elif "lora_target_parameters" not in self.left:
            what = "PEFT chooses by architecture there (mostly q_proj and v_proj)"
            self.note("lora_target_modules", f"{what}; all linear layers here")

    # ---- Outputs

    def outputs(self) -> None:
        asked = self.take("report_to")
        names = asked[1] if asked and isinstance(asked[1], list) else [asked[1]] if asked else []
        known = [name for name in names if name in typing.get_args(Tracker)]
        for name in names:
            if name not in known and name not in ("none", "no"):
                self.note("report_to", f"one of {', '.join(typing.get_args(Tracker))}", name)
        for key, tracker in (("use_wandb", "wandb"), ("wandb_project", "wandb")):
            if self.left.get(key) and tracker not in known:
                known.append(tracker)
        self.left.pop("use_wandb", None)
        if known:
            self.set("metrics.report_to", known if len(known) > 1 else known[0])
        if self.left.get("push_to_hub") and not self.left.get("hub_model_id"):
            what = "hub.push_to_hub needs hub.hub_model_id: ORG/NAME"
            self.note("push_to_hub", what, self.left.pop("push_to_hub"))
        if (found := self.take("hub_model_id")) is not None:
            name = str(found[1])
            self.set("hub.hub_model_id", name)
            if "/" not in name:
                self.note("hub_model_id", "without an owner; ORG/NAME is expected", name)


def _number(value: Any) -> Any:
    """Return `2e-5`, which is a text to PyYAML, as the number that it is."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _is_file(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(
        (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
    )
