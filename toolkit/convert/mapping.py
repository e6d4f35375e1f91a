"""Convert settings with the names of axolotl, TRL and Trainer to settings of the toolkit.

Every key is converted or noted. `toolkit.config.other_tools` maps names, `tables_of_tools` has the
defaults of the tools, and this module converts values.
"""

import re
import typing
from collections.abc import Mapping
from typing import Any

from toolkit.config.accelerate_yaml import translate_environment
from toolkit.config.lora import STRUCTURE
from toolkit.config.other_tools import ADAPTER_HINT, OBJECTIVE_HINT, find_setting
from toolkit.config.outputs import Tracker
from toolkit.config.settings import Schedule
from toolkit.convert.keys import Keys, Translation
from toolkit.convert.preferences import find_objective, take_preference
from toolkit.convert.sources import take_sources
from toolkit.convert.tables_of_tools import (
    DEFAULT_RATES,
    LORA_DEFAULTS,
    TOOL_DEFAULTS,
    reason_not_converted,
)
from toolkit.errors import ConfigError, LaunchError, is_secret_name

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
# Key, or value of the key `attention` -> attention implementation.
_ATTENTION = {"flash_attention": "flash_attention_2", "flash": "flash_attention_2"} | {
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
# Settings that are taken from the adapter of `lora.from`.
_STRUCTURE = {f"lora.{name}" for name in STRUCTURE}
_WITH_REFERENCE = ("dpo", "kto")  # objectives that use a reference model
_DATA = {"data.train_files", "data.dataset_name", "data.sources"}
_LIGER = (
    *("use_liger_kernel", "use_liger", "liger_kernel", "liger_rope", "liger_rms_norm"),
    *("liger_swiglu", "liger_glu_activation", "liger_layer_norm"),
)
_OF_4BIT_BASE = (["bnb_4bit_use_double_quant", "use_bnb_nested_quant"], ["quantize_moe_experts"])


class Converter(Keys):
    """Converts one config of axolotl, TRL or Trainer to settings of this toolkit.

    Keys that no method converts get a note.

    Args:
        source: key -> value.
        tool: axolotl, trl or trainer, followed by a dash and the objective if it is known; for a
            translation, the original tool.
        computed: for a script, key whose value only the running script knows -> note about it; None
            if `source` does not come from a script.
        translation: the translation that `source` comes from. It includes the tool's defaults.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        tool: str,
        computed: Mapping[str, str] | None = None,
        translation: Translation | None = None,
    ) -> None:
        # PyYAML reads `2e-5` as a text.
        numbers = {k: float(v) for k, v in source.items() if _FLOAT.fullmatch(str(v))}
        super().__init__({**source, **numbers}, (computed or {}).values())
        self.lora: Mapping[str, Any] = {}
        if translation is not None:
            self.tool, self.objective, self.is_named = tool, translation.objective, True
            self.notes += translation.notes
            self.has_adapters = bool(source.get("use_peft"))
            return
        self.tool, _, self.objective = tool.partition("-")
        self.is_named = bool(self.objective) or self.tool == "axolotl"
        self.objective = self.objective or find_objective(source, self.tool)
        marks = ["adapter", "use_peft", "r", *(["lora_r", "lora_rank"] * (self.tool == "trainer"))]
        self.has_adapters = any(source.get(key) for key in marks)
        # A script calls PEFT itself, whose defaults are not those of TRL's command line.
        self.lora = LORA_DEFAULTS[self.tool if computed is None else "trainer"]
        self._fill_in_defaults(source, computed or {})

    def _fill_in_defaults(self, source: Mapping[str, Any], computed: Mapping[str, str]) -> None:
        """Add the tool's defaults to `unconverted`, for keys that the config does not have.

        Only defaults that differ from those of the toolkit are added.

        Args:
            source: the config.
            computed: keys that a script computes, which count as present.
        """
        present = {key for key, value in source.items() if value is not None} | {*computed}
        if self.tool == "trl" and source.get("max_length", 0) is None:
            del self.unconverted["max_length"]
            present.add("max_length")
            reason = "no limit there; 1,024 tokens here unless you set it (data.sequence_length)"
            self.note("max_length", reason)
        names = {find_setting(key) for key in present - {"use_peft"}} | present
        defaults = {**TOOL_DEFAULTS[self.tool], **(self.lora if self.has_adapters else {})}
        if rate := DEFAULT_RATES[self.tool].get(self.objective):
            defaults["learning_rate"] = rate
        for key, value in defaults.items():
            if find_setting(key) not in names and not (key == "bf16" and source.get("fp16")):
                self.unconverted[key] = value

    def run(self) -> tuple[str, dict[str, Any], list[str]]:
        """Convert all keys of the config.

        If it names no model or no data, placeholders are set and noted.

        Returns:
            (recipe `finetune` or `prefer`, dotted setting -> value, notes).

        Raises:
            ConfigError: the converted config would train something else.
        """
        empty_values: tuple[Any, ...] = (None, "", [], {})
        # An empty save_total_limit is not dropped: it keeps all checkpoints in all tools.
        empty = [
            key
            for key, value in self.unconverted.items()
            if value in empty_values and key != "save_total_limit"
        ]
        if self.take_all(empty):
            self.note(", ".join(empty), "empty there, so omitted")
        if self.objective:
            take_preference(self, self.objective, is_named=self.is_named)
        self.convert_model()
        self.convert_memory()
        self.convert_sharding()
        self.convert_data()
        self.convert_optimisation()
        self.convert_intervals()
        self.convert_adapters()
        self.convert_outputs()
        for key, value in list(self.unconverted.items()):
            self.convert_by_name(key, value)
        model = str(self.settings.get("model.name_or_path", ""))
        if self.has_adapters and re.search(r"[-_](q?lora|adapter)s?$", model, re.IGNORECASE):
            reason = "an adapter by its name: set its base as model.name_or_path, the adapter as"
            self.note("model.name_or_path", f"{reason} lora.from", model)
        if "model.name_or_path" not in self.settings:
            self.settings["model.name_or_path"] = "MODEL"
            self.note("model", "none is named there; set model.name_or_path")
        if not _DATA & {*self.settings}:
            self.settings["data.train_files"] = "DATA"
            self.note("data", "none is named there; set data.train_files or data.dataset_name")
        return "prefer" if self.objective else "finetune", self.settings, self.notes

    def convert_by_name(self, key: str, value: Any) -> None:
        """Convert a key whose value stays the same, or add a note if it has no equivalent.

        Raises:
            ConfigError: an unknown key seems to change what is trained, judged by its name.
        """
        if is_secret_name(key):
            self.note(key, "a config contains no token; use `hf auth login` or HF_TOKEN")
        elif reason := reason_not_converted(key):
            self.note(key, reason, value)
        elif key == "trust_remote_code" and value and self.has_adapters:
            self.note(key, "adapters are proven on a base without code from outside", value)
        elif (setting := find_setting(key)) != key or key in ("output_dir", "seed"):
            if self.settings.get(setting, value) != value:
                other = self.settings[setting]
                self.note(key, f"{setting} had {other} from another key; the last one wins", value)
            self.settings[setting] = value
        elif value and (ADAPTER_HINT.search(key) or OBJECTIVE_HINT.search(key)):
            raise ConfigError(
                f"{key} {str(value)[:60]} is not known to the toolkit, and by its name it changes "
                "what is trained; remove it if it does not, or name the tool of the config: "
                "--from TOOL"
            )
        else:
            self.note(key, "not known to the toolkit", value)

    # ---- Model

    def convert_model(self) -> None:
        """Convert dtypes, attention and kernels to `model.*` and `sharding.param_dtype`."""
        key, dtype = self.take("torch_dtype", "dtype")
        if dtype in ("float16", "fp16", "half"):
            self.note(key, "there is no float16 training here; bfloat16 is set", dtype)
            dtype = "bfloat16"
        if dtype in ("auto", "bfloat16", "float32"):
            self.settings["model.dtype"] = dtype
            if dtype != "float32" and not self.has_adapters:
                reason = "the optimizer updates weights of that dtype, as there"
                self.note(key, f"{reason}; model.dtype: float32 keeps float32 masters", dtype)
        elif key:
            self.note(key, "model.dtype is auto, bfloat16 or float32", dtype)
        precisions = self.take_all(_PRECISIONS)
        half = {key for key, value in precisions.items() if value not in (False, "false", "no")}
        if half & {"fp16", "float16"} and not half & {"bf16", "bfloat16"}:
            reason = "float16 needs loss scaling, which is not supported; computed in bfloat16"
            self.note("fp16", f"{reason} (sharding.param_dtype)", True)
        for key in half:
            if precisions[key] not in (True, "auto", "full", "true"):
                self.note(key, "neither true nor false, taken as true", precisions[key])
        if precisions:
            self.settings["sharding.param_dtype"] = "bfloat16" if half else "float32"
        if self.tool == "axolotl" and half and not self.has_adapters:
            reason = "weights are kept in float32 and computed in bfloat16"
            self.note("bf16", f"{reason}; model.dtype: bfloat16 keeps them as axolotl does")
        attention_key, value = self.take("attention", "attn_implementation")
        if attention_key:
            self.settings["model.attn_implementation"] = _ATTENTION.get(str(value), value)
        for key, value in self.take_all(_ATTENTION).items():
            if attention_key:
                self.note(key, f"{attention_key} says which attention", value)
            elif value:
                self.settings["model.attn_implementation"] = _ATTENTION[key]
        liger = self.take_all(_LIGER)
        if any(liger.values()):
            self.settings["model.kernels"] = "liger"
            settings_text = ", ".join(f"{key} {value}" for key, value in liger.items())
            self.note(settings_text, "kernels of norms, rotary positions and MLPs, all or none")

    # ---- Memory and sharding

    def convert_memory(self) -> None:
        """Convert the settings of activation checkpointing and offloading to `sharding.*`.

        DeepSpeed gets a note.
        """
        recomputed = "sharding.activation_checkpointing"
        key, value = self.take("gradient_checkpointing")
        if key:
            self.settings[recomputed] = "full" if value else "none"
        if value in ("offload", "offload_disk"):
            self.settings["sharding.activation_offload"] = True
        key, kwargs = self.take("gradient_checkpointing_kwargs")
        more = dict(kwargs) if isinstance(kwargs, dict) else {}
        if key and more.pop("use_reentrant", True):
            self.note(key, "recomputation is not reentrant here; same numbers", kwargs)
        self.note_all(key, more, "no equivalent")
        key, value = self.take("activation_offloading")
        if value:
            self.settings["sharding.activation_offload"] = True
            if self.settings.get(recomputed) != "full":
                self.settings[recomputed] = "full"
                self.note(key, f"goes with {recomputed}: full, now set")
        key, value = self.take("deepspeed")
        if key:
            reason = "no DeepSpeed here: FSDP2 shards as ZeRO-3 does (section sharding)"
            self.note(key, f"{reason}; offload: sharding.cpu_offload: true", value)

    def convert_mesh(self) -> None:
        """Convert axolotl's sizes of parallelism; note tensor parallelism."""
        for names, new in (
            (("expert_parallel_size",), "expert_parallel"),
            (("context_parallel_size", "sequence_parallel_degree"), "context_parallel"),
        ):
            if (size := self.take(*names)[1]) not in (None, 1):
                self.settings[f"sharding.{new}"] = size
        parts = self.settings.get("sharding.context_parallel", 1)  # dp_shard includes these ranks
        for name, factor in (("dp_replicate", 1), ("dp_shard", parts)):
            if size := self.take(f"{name}_size")[1]:
                self.settings[f"sharding.{name}"] = size * factor if size > 0 else size
        if (size := self.take(key := "tensor_parallel_size")[1]) not in (None, 1):
            reason = "not converted; its ranks become data-parallel ones, so the global batch is"
            self.note(key, f"tensor parallelism is {reason} {size} times as large", size)

    def convert_sharding(self) -> None:
        """Convert the settings of FSDP and of parallelism to `sharding.*`.

        Raises:
            ConfigError: `fsdp_config` has a value that the toolkit refuses.
        """
        self.convert_mesh()
        words = self.take("fsdp")[1] or []
        for word in words if isinstance(words, list) else str(words).replace(",", " ").split():
            if word == "offload":
                self.settings["sharding.cpu_offload"] = True
            elif word == "shard_grad_op":
                self.settings["sharding.reshard_after_forward"] = False
            elif word not in ("full_shard", "auto_wrap", "True", "true"):
                self.note(f"fsdp {word}", "set sharding.dp_replicate and sharding.dp_shard")
        fsdp_config, version = self.take("fsdp_config")[1], self.take("fsdp_version")[1]
        content = fsdp_config if isinstance(fsdp_config, dict) else {}
        version = content.get("fsdp_version", content.get("version", version))
        if (words or content) and str(version) != "2":
            self.note("fsdp_version", "FSDP1 there, FSDP2 here", version)
        # Accelerate passes each key of its YAML in an environment variable with this name.
        variables = {
            key: f"FSDP_{key.removeprefix('fsdp_').replace('_layer_cls_', '_cls_').upper()}"
            for key in content
        }
        env = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
        for key, value in content.items():
            env[variables[key]] = ",".join(value) if isinstance(value, list) else str(value)
        env["FSDP_VERSION"] = "2"
        try:
            settings, notes = translate_environment(env)
            unused = [
                key
                for key, variable in variables.items()
                if variable != "FSDP_VERSION"
                and translate_environment({n: v for n, v in env.items() if n != variable})
                == (settings, notes)
            ]
        except LaunchError as error:
            raise ConfigError(f"fsdp_config: {error}") from error
        del settings["sharding.param_dtype"]  # bf16 and fp16 say it
        self.settings |= settings
        self.notes += [f"fsdp_config: {note}" for note in notes]
        if unused:
            self.note(f"fsdp_config: {', '.join(unused)}", "changes nothing under FSDP2")

    # ---- Data

    def convert_data(self) -> None:
        """Convert packing, supervision, template, data sets and evaluation split to `data.*`."""
        strategy = self.take("packing_strategy")[1]
        key, packed = self.take("sample_packing", "packing", "multipack_real_batches")
        if key:
            way = "wrapped" if strategy == "wrapped" else "bfd"
            self.settings["data.packing"] = way if packed else "none"
        if packed and strategy not in (None, "bfd", "wrapped"):
            self.note("packing_strategy", "packed by best fit decreasing (bfd)", strategy)
        key, value = self.take("excess_length_strategy")
        if key:
            self.settings["data.too_long"] = "error" if value == "raise" else value
        if not self.objective:
            self.convert_supervision()
        jinja = self.take("chat_template_jinja")[1]
        key, value = self.take("chat_template", "chat_template_path")
        if value in (None, "jinja") and jinja:
            self.settings["data.chat_template"] = jinja
        elif "{" in str(value) or str(value).endswith((".jinja", ".j2")):
            self.settings["data.chat_template"] = value
        elif value not in (None, "tokenizer_default"):
            reason = "a name there; data.chat_template takes the template or its file"
            self.note(key, f"{reason} (empty: the tokenizer's own)", value)
        take_sources(self, self.objective)
        key, value = self.take("val_set_size", "test_split_size")
        if isinstance(value, int | float) and 0 <= value < 1:
            self.settings["data.eval_split"] = float(value)
        elif key:
            reason = "a number of rows there; data.eval_split is a share, such as 0.01"
            self.note(key, reason, value)

    def convert_supervision(self) -> None:
        """Convert the settings that select the supervised tokens to `data.supervise`."""
        if self.take("train_on_inputs", "train_on_input")[1]:
            self.settings["data.supervise"] = "all"
        if self.take("assistant_only_loss")[1]:
            self.settings["data.supervise"] = "assistant"
        elif (completion := self.take("completion_only_loss"))[0]:
            self.settings["data.supervise"] = "completion" if completion[1] else "all"
        elif self.tool == "trl":
            reason = (
                "in conversations TRL supervises every token by default, here the assistant's turns"
            )
            self.note("assistant_only_loss", f"{reason}; data.supervise: all does as TRL")
        if self.take("mask_history")[1]:
            self.settings["data.supervise"] = "last_assistant"
        key, roles = self.take("roles_to_train")
        if roles == ["assistant"]:
            self.settings["data.supervise"] = "assistant"
        elif key:
            self.note(key, "only the assistant's turns can be chosen", roles)

    # ---- Optimiser and schedule

    def convert_optimisation(self) -> None:
        """Convert optimizer, schedule, warm-up and router loss to the toolkit's settings.

        Notes are added for unknown optimizers and schedules, which adamw_torch_fused and cosine
        replace. A router coefficient of 0 sets `train.router_aux_loss: none`; others give a note.
        """
        key, value = self.take("optimizer", "optim")
        if key:
            name = _OPTIMIZERS.get(str(value))
            self.settings["optim.optim"] = name or "adamw_torch_fused"
            if name is None:
                reason = "optim.optim is adamw_torch_fused, adamw_8bit, adafactor or muon"
                self.note(key, f"{reason}; adamw_torch_fused is set", value)
            if str(value).startswith("paged"):
                reason = "state is not paged here; sharding.cpu_offload holds it on the host"
                self.note(key, reason)
        schedule = "optim.lr_scheduler_type"
        key, value = self.take("lr_scheduler", "lr_scheduler_type")
        if key and value not in typing.get_args(Schedule):
            reason = f"{schedule} is one of {', '.join(typing.get_args(Schedule))}"
            self.note(key, f"{reason}; cosine is set", value)
            value = "cosine"
        if key:
            self.settings[schedule] = value
        kwargs = self.take("lr_scheduler_kwargs")[1]
        more = dict(kwargs) if isinstance(kwargs, dict) else {}
        key, least = self.take("cosine_min_lr_ratio")
        least = least if key else more.pop("min_lr_rate", None)
        if least is not None:
            if value != "cosine_warmup_with_min_lr":
                self.settings[schedule] = "cosine_with_min_lr"
            more["min_lr_rate"] = least
        if more:
            self.settings["optim.lr_scheduler_kwargs"] = more
        self.convert_warmup(self.take("warmup_steps")[1], self.take("warmup_ratio")[1])
        key, value = self.take("router_aux_loss_coef")
        if value:
            reason = "it is config.json's; train.router_aux_loss says whether it is added"
            self.note(key, reason, value)
        elif key:
            self.settings["train.router_aux_loss"] = "none"

    def convert_warmup(self, steps: Any, ratio: Any) -> None:
        """Set `optim.warmup_steps` from a number of steps or, if that is 0 or None, from a ratio.

        Without either, axolotl's default is set if the config is one of axolotl.
        """
        warmup = steps if steps or ratio is None else ratio
        if steps and ratio is not None:
            self.note("warmup_ratio", "warmup_steps wins, as there", ratio)
        if warmup is None and self.tool == "axolotl":
            max_steps, reason = self.unconverted.get("max_steps"), ""
            if isinstance(max_steps, int) and max_steps > 0:
                warmup = min(int(0.03 * max_steps), 100)
            else:
                warmup, reason = 0.03, "; here 3 % without that limit"
            rule = "not set, for which axolotl takes 3 % of all steps, at most 100"
            self.note("warmup_steps", rule + reason)
        if warmup and self.settings.get("optim.lr_scheduler_type") == "constant":
            reason = "`constant` ignores it, as in transformers; constant_with_warmup has one"
            self.note("warmup_steps", reason, warmup)
        elif warmup is not None:
            self.settings["optim.warmup_steps"] = warmup

    def convert_intervals(self) -> None:
        """Convert how often to evaluate, save and log, and which checkpoints to keep."""
        key, strategy = self.take("eval_strategy", "evaluation_strategy")
        if strategy in ("no", False):
            if "eval_steps" in self.unconverted:
                self.note("eval_steps", "eval_strategy is no", self.unconverted.pop("eval_steps"))
            self.settings.setdefault("data.eval_split", 0.0)
        elif strategy not in (None, "steps"):
            self.note(key, "train.eval_steps counts steps; evaluated at the end", strategy)
        elif strategy == "steps" and "eval_steps" not in self.unconverted:
            self.settings["train.eval_steps"] = self.unconverted.get("logging_steps", 500)
        for key in ("eval_steps", "save_steps", "logging_steps"):
            if isinstance(self.unconverted.get(key), float) and self.unconverted[key] < 1:
                reason = "a share of all steps there; a number of steps is needed"
                self.note(key, reason, self.unconverted.pop(key))
        last = "; the last step is saved in any case"
        for key, reason in {
            "save_strategy": f"checkpoint.save_steps counts steps{last}",
            "logging_strategy": "train.logging_steps counts steps",
        }.items():
            if (value := self.take(key)[1]) not in (None, "steps"):
                self.note(key, reason, value)
        key, value = self.take("save_total_limit")
        if key:
            self.settings["checkpoint.save_total_limit"] = value and max(2, value)
        if value is not None and value < 2:
            self.note(key, "at least 2: one is complete while another is written", value)
        evaluated = self.unconverted.get("eval_steps") or "train.eval_steps" in self.settings
        key, value = self.take("load_best_model_at_end")
        if value and self.settings.get("checkpoint.save_total_limit", 2) is None:
            self.note(key, "all checkpoints are kept, the best one among them", value)
        elif value and evaluated:
            self.settings["checkpoint.keep_best"] = True
        elif value:
            self.note(key, "checkpoint.keep_best needs train.eval_steps", value)
        if not evaluated and "early_stopping_patience" in self.unconverted:
            key, value = self.take("early_stopping_patience")
            self.note(key, "needs train.eval_steps", value)

    # ---- Adapters

    def convert_adapters(self) -> None:
        """Convert the settings of adapters and of a quantised base to `lora.*`.

        If the config trains no adapters, these settings only get notes.
        """
        kind = self.take("adapter")[1]
        self.take("use_peft")
        eight, four = self.take("load_in_8bit")[1], self.take("load_in_4bit")[1]
        if not self.has_adapters:
            prefixes = ("lora_", "bnb_4bit_", "quantize_")
            names = [k for k in self.unconverted if k.startswith(prefixes)]
            for key, value in self.take_all(names).items():
                self.note(key, "adapters are off there", value)
            if four or eight:
                self.note("load_in_4bit or 8bit", "only under adapters (lora.r)", True)
            return
        if kind not in (None, "lora", "qlora"):
            self.note("adapter", "lora and qlora are known", kind)
        four_bits = four or kind == "qlora"
        if four_bits:
            self.settings["lora.load_in_4bit"] = True
            if four is False:
                self.note("load_in_4bit", "adapter qlora has a base in 4 bits", four)
        if eight:
            reason = "the base stays in its dtype; lora.load_in_4bit: true is the nearest"
            self.note("load_in_8bit", reason, True)
        continued = self.take("lora_model_dir", "adapter_name_or_path")[1]
        if continued:
            self._continue_adapter(continued)
        else:
            if not {"lora_r", "r", "lora_rank"} & {*self.unconverted}:
                self.settings["lora.r"] = 8
                self.note("lora_r", "none is given; 8 is set")
            self.convert_targets()
        for name, *other in _OF_4BIT_BASE:
            key, value = self.take(name, *other)
            if key and four_bits:
                self.settings[f"lora.{name}"] = value
            elif key and key not in self.lora:
                self.note(key, "the base is not in 4 bits", value)
        key, value = self.take("bnb_4bit_quant_type")
        if four_bits and value not in (None, "nf4"):
            self.note(key, "nf4 is what there is", value)
        for key, usual, reason in (
            ("bnb_4bit_compute_dtype", "bfloat16", "sharding.param_dtype is what is computed in"),
            ("bias", "none", "none is what there is"),
            ("lora_bias", "none", "none is what there is"),
            ("task_type", "CAUSAL_LM", "CAUSAL_LM is what there is"),
            ("lora_task_type", "CAUSAL_LM", "CAUSAL_LM is what there is"),
        ):
            if (value := self.take(key)[1]) not in (None, usual):
                self.note(key, reason, value)

    def _continue_adapter(self, adapter: Any) -> None:
        """Set `lora.from` to the adapter to continue; note settings that this adapter determines.

        Raises:
            ConfigError: there are several adapters.
        """
        adapters = adapter if isinstance(adapter, list) else [adapter]
        if len(adapters) != 1 or not isinstance(adapters[0], str):
            raise ConfigError(
                f"expected one adapter to continue (lora.from), got {str(adapter)[:80]}; merge the "
                "others into the base"
            )
        self.settings["lora.from"] = adapters[0]
        if self.objective in _WITH_REFERENCE:
            reason = "the reference is the base with this adapter here; tools that turn adapters"
            self.note("lora.from", f"{reason} off for it use the base alone", adapters[0])
        structure = [
            key
            for key in self.unconverted
            if find_setting(key) in _STRUCTURE or key in ("lora_target_linear", "target_modules")
        ]
        for key, value in self.take_all(structure).items():
            self.note(key, "taken from the adapter that lora.from continues", value)

    def convert_targets(self) -> None:
        """Convert the names of the modules that get adapters to `lora.target_modules`."""
        linear = self.take("lora_target_linear")[1]
        key, modules = self.take("lora_target_modules", "target_modules")
        if linear:
            self.settings["lora.target_modules"] = "all-linear"
            if key:
                self.note(key, "lora_target_linear adapts every linear layer", modules)
        elif key:
            self.settings["lora.target_modules"] = (
                modules if modules != ["all-linear"] else modules[0]
            )
        elif "lora_target_parameters" not in self.unconverted:
            reason = "PEFT chooses by architecture there (mostly q_proj and v_proj)"
            self.note("lora_target_modules", f"{reason}; all linear layers here")

    # ---- Outputs

    def convert_outputs(self) -> None:
        """Convert trackers to `metrics.report_to`, and the Hub repository to `hub.hub_model_id`."""
        names = self.take("report_to")[1] or []
        supported = typing.get_args(Tracker)
        trackers = list[str]()
        for name in names if isinstance(names, list) else [names]:
            if name in supported:
                trackers.append(name)
            elif name not in ("none", "no"):
                self.note("report_to", f"one of {', '.join(supported)}", name)
        uses_wandb = self.take("use_wandb")[1] or self.unconverted.get("wandb_project")
        if uses_wandb and "wandb" not in trackers:
            trackers.append("wandb")
        if trackers:
            self.settings["metrics.report_to"] = trackers if len(trackers) > 1 else trackers[0]
        if self.unconverted.get("push_to_hub") and not self.unconverted.get("hub_model_id"):
            reason = "hub.push_to_hub needs hub.hub_model_id: ORG/NAME"
            self.note("push_to_hub", reason, self.unconverted.pop("push_to_hub"))
        if (value := self.take(key := "hub_model_id")[1]) is not None:
            self.settings["hub.hub_model_id"] = str(value)
            if "/" not in str(value):
                self.note(key, "without an owner; ORG/NAME is expected", str(value))
