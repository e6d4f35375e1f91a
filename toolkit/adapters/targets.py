"""Choose the modules that get adapters (linear layers, experts, embeddings); refuse unfit ones."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit import ranks
from toolkit.config.lora import LoraConfig
from toolkit.errors import ConfigError, ModelError, one_line
from toolkit.formats import assets_of
from toolkit.models.classes import model_class_name
from toolkit.models.layers import modules_outside_text
from toolkit.models.patterns import no_match, replace_numbers
from toolkit.models.peft_model import ADAPTER, adapted_modules, adapted_parameters, copied_modules
from toolkit.models.reward import HEAD, reward_head

if TYPE_CHECKING:
    from peft import PeftModel

# Kinds that the export knows; PEFT adapts convolutions, too, which no merge or proof can follow.
_ADAPTABLE = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class Targets:
    """Modules of a model that `cfg` names; whole names of modules of the base."""

    cfg: LoraConfig
    names: tuple[str, ...]  # every module
    modules: set[str]  # what gets an adapter
    excluded: set[str]
    saved: set[str]  # what is trained in full
    towers: set[str]  # the outermost modules that text does not run through; among the excluded
    unfit: set[str]  # what all-linear leaves out, since it cannot be adapted; among the excluded
    linear: tuple[str, ...]  # the linear layers among `names`
    tied: set[str]  # one matrix with the input embedding, itself among them; often empty

    @property
    def all_linear(self) -> bool:
        """Return whether every linear layer is meant, as far as it can be adapted."""
        named = self.cfg.target_modules
        return isinstance(named, str) and named.lower() == "all-linear"

    def without(self, ends: set[str], why: str) -> "Targets":
        """Return the targets without the modules of those `ends` of names, and say so."""
        left = set[str]().union(*(_ending(end, self.names) for end in ends))
        shown = ", ".join(sorted(ends)[:5]) + " ..." * (len(ends) > 5)
        ranks.log_once(f"adapters   all-linear leaves out {shown}: {why}")
        modules, excluded = self.modules - left, self.excluded | left
        return replace(self, modules=modules, excluded=excluded, unfit=self.unfit | ends)

    @property
    def ties(self) -> bool:
        """Return whether a tied matrix is trained in full: PEFT must then keep its copies one."""
        return bool(self.saved & self.tied)


def select_targets(model: PreTrainedModel, cfg: LoraConfig) -> Targets:
    """Return what `cfg` names in `model`, without adapters yet. ModelError: a name that matches
    nothing, a tie that would come apart, a module that cannot be adapted, or not exported.
    """
    named = {name: module for name, module in model.named_modules() if name}
    saved = _modules_to_save(named, cfg)
    if reward_head(model) is not None:  # new, or made for one sum: no small change of what it was
        saved.add(HEAD)
    towers = set(modules_outside_text(model))
    beside = _inside(named, towers)
    excluded = _excluded_names(cfg, named) | beside
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    _refuse_flat_experts(model, _named("lora.target_parameters", cfg.target_parameters, parameters))
    modules = _expected(model, cfg, named)
    if modules and modules <= beside:
        raise ModelError(
            f"lora.target_modules {cfg.target_modules} names only what text does not run through, "
            f"such as {min(modules)}; name text's modules"
        )
    modules -= excluded | _inside(named, saved)
    tied = _tied_modules(model)
    _refuse_ties_apart(tied, modules, saved)
    _refuse_new_rows(model, saved | tied if saved & tied else saved)
    linear = linear_names(named)
    targets = Targets(cfg, tuple(named), modules, excluded, saved, towers, set(), linear, tied)
    if unfit := {n: why for n in sorted(modules) if (why := _misfit(named[n]))}:
        why = " ".join(next(iter(unfit.items())))
        if targets.all_linear:
            return targets.without(set(unfit), why)
        raise ModelError(
            f"{model_class_name(model)} cannot be adapted ({why}); {_excluding(cfg, unfit)}"
        )
    return targets


def linear_names(named: dict[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the linear layers among the modules `named`."""
    return tuple(name for name, m in named.items() if isinstance(m, nn.Linear | Conv1D))


def check_target_names(model: PreTrainedModel, cfg: LoraConfig) -> None:
    """Refuse what `cfg` names and `model` lacks, without PEFT, which starts CUDA. Raises as
    `targets_of` does. Where experts are fused, PEFT may know names that the model has not.
    """
    targets = select_targets(model, cfg)
    fused = any(p.ndim == 3 for p in model.parameters())
    for pattern in cfg.target_modules if isinstance(cfg.target_modules, list) else ():
        if cfg.from_ is None and not fused and not _ending(pattern, targets.names):
            raise ModelError(_unknown_target(pattern, targets.linear))


def _named(
    setting: str, patterns: list[str], names: Iterable[str], *, may_miss: bool = False
) -> set[str]:
    """Return which of `names` the patterns name: completely, or their end at a dot. Each pattern
    must match, unless it `may_miss`: PEFT writes names that a model may lack (`classifier` for
    every reward model) into an adapter that a run continues.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = _ending(pattern, names)
        if not matched and not may_miss:
            raise ModelError(_unknown(setting, pattern, names))
        found |= matched
    return found


# Names of the same role in different architectures: of attention and of MLPs.
_ROLES = (
    {
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
        *("query", "key", "value", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("wq", "wk", "wv", "to_q", "to_k", "to_v", "q_lin", "k_lin", "v_lin", "in_proj"),
    },
    {"o_proj", "out_proj", "c_proj", "dense", "wo", "to_out", "out_lin", "attn_out"},
    {
        *("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h", "fc_in"),
        *("w1", "w3", "lin1", "up", "gate", "wi", "linear_in", "input_linear"),
    },
    {
        *("down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "w2", "lin2", "down"),
        *("linear_out", "output_linear"),
    },
)


def _unknown_target(pattern: str, linear: Iterable[str]) -> str:
    """Return the error for a target that names no module: which linear layers the model has."""
    leaves = dict.fromkeys(_leaf(name) for name in linear)
    wanted = pattern.rpartition(".")[2]
    near = [n for n in leaves for role in _ROLES if {wanted, n.rpartition(".")[2]} <= role]
    near = near or difflib.get_close_matches(wanted, leaves, n=4, cutoff=0.6)
    others = ", ".join([name for name in leaves if name not in near][:12]) or "none"
    rest = f"; its linear layers: {others}"
    if near:
        rest = f"; did you mean {', '.join(dict.fromkeys(near))}? Its other linear layers: {others}"
    return f"lora.target_modules: {pattern!r} matches no module of the model{rest}"


def _leaf(name: str) -> str:
    """Return the end of a module's name, with what stands before a number."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _excluded_names(cfg: LoraConfig, names: Iterable[str]) -> set[str]:
    """Return the modules that `lora.exclude_modules` names; each entry of a list must name some,
    except in the settings of an adapter that a run continues.
    """
    patterns, continues = cfg.exclude_modules, cfg.from_ is not None
    if isinstance(patterns, list):
        return _named("lora.exclude_modules", patterns, names, may_miss=continues)
    pattern = _compiled("lora.exclude_modules", patterns)
    matched = {name for name in names if pattern.fullmatch(name)}
    if matched or continues:
        return matched
    raise ModelError(
        _unknown("lora.exclude_modules", patterns, names)
        + "; a text is one regular expression of whole names, a list is of ends of names"
    )


def _compiled(setting: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting} {pattern!r} is no regular expression: {error}") from error


def _unknown(setting: str, pattern: str, names: Iterable[str]) -> str:
    what = "parameter" if setting == "lora.target_parameters" else "module"
    return no_match(setting, pattern, what, {*map(replace_numbers, names)})


def _ending(pattern: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if f".{name}".endswith(f".{pattern}")}


def _excluding(cfg: LoraConfig, names: Iterable[str]) -> str:
    """Return the setting that leaves modules out, by the ends of their names."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    if isinstance(cfg.exclude_modules, str):
        return f"name {', '.join(leaves)} in lora.exclude_modules too"
    excluded = dict.fromkeys([*cfg.exclude_modules, *leaves])
    return f"set lora.exclude_modules: [{', '.join(excluded)}]"


def shortest_suffixes(modules: set[str], names: Iterable[str]) -> set[str]:
    """Return the shortest ends of names that name all of `modules` and no other of `names`."""
    others, ends = set(names) - modules, set[str]()
    for module in sorted(modules):
        parts = module.split(".")
        tails = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        ends.add(next((tail for tail in tails if not _ending(tail, others)), module))
    return ends


def _inside(names: Iterable[str], outer: set[str]) -> set[str]:
    return {n for n in names if any(n == o or n.startswith(o + ".") for o in outer)}


def _modules_to_save(named: dict[str, nn.Module], cfg: LoraConfig) -> set[str]:
    """Return the whole names of the modules that are trained in full."""
    setting = "lora.modules_to_save"
    found = _named(setting, cfg.modules_to_save, named, may_miss=cfg.from_ is not None)
    for name in sorted(found):
        if isinstance(named[name], nn.ModuleList | nn.ModuleDict):
            raise ModelError(f"{setting}: {name} holds modules and is never called; name those")
        if outer := [o for o in found if name.startswith(o + ".")]:
            raise ModelError(f"{setting} names {name} and {outer[0]}, which holds it; name one")
    return found


def _expected(model: PreTrainedModel, cfg: LoraConfig, named: dict[str, nn.Module]) -> set[str]:
    """Return the modules that `target_modules` names."""
    targets = cfg.target_modules
    if isinstance(targets, list):
        return set().union(*(_ending(pattern, named) for pattern in targets))
    if targets.lower() == "all-linear":
        head = model.get_output_embeddings()
        return {n for n, m in named.items() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    pattern = _compiled("lora.target_modules", targets)
    if matched := {n for n in named if pattern.fullmatch(n)}:
        return matched
    raise ModelError(
        _unknown_target(targets, linear_names(named))
        + "; a text is one regular expression of whole names, a list is of ends of names"
    )


def _tied_modules(model: PreTrainedModel) -> set[str]:
    """Return the modules that share a parameter with the input embedding, where any does."""
    embedding = model.get_input_embeddings()
    own = set() if embedding is None else set(map(id, embedding.parameters()))
    named = model.named_parameters(remove_duplicate=False)
    found = {name.rpartition(".")[0] for name, parameter in named if id(parameter) in own}
    return found if len(found) > 1 else set()


def _refuse_ties_apart(tied: set[str], expected: set[str], saved: set[str]) -> None:
    ends = {name.rpartition(".")[2] for name in tied}
    if name := min(tied & expected, default=""):
        raise ModelError(
            f"lora.target_modules: {name} is one matrix with {', '.join(sorted(tied - {name}))}: "
            "an adapter would untie them. Train it in full (lora.modules_to_save), or leave it out"
        )
    if (name := min(saved & tied, default="")) and ends != {"embed_tokens", "lm_head"}:
        raise ModelError(
            f"lora.modules_to_save: {name} is one matrix with {', '.join(sorted(tied - {name}))}: "
            "they would come apart, as PEFT keeps a tie of embed_tokens and lm_head only: leave it "
            "out"
        )


def _refuse_new_rows(model: PreTrainedModel, saved: set[str]) -> None:
    """Refuse new tokens whose rows nobody would train, and no adapter would hold."""
    if not assets_of(model).resized:
        return
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    lacking = [n for n, m in model.named_modules() if any(m is e for e in ends) and n not in saved]
    if lacking:
        leaves = ", ".join(name.rpartition(".")[2] for name in lacking)
        raise ModelError(
            f"model.resize_embeddings adds rows to {', '.join(lacking)}, which adapters neither "
            f"train nor hold; set lora.modules_to_save: [{leaves}]"
        )


def _refuse_flat_experts(model: PreTrainedModel, names: set[str]) -> None:
    """Refuse experts that are the rows of one matrix: their module is never called as such."""
    for name in sorted(names):
        owner = model.get_submodule(name.rpartition(".")[0])
        flat = model.get_parameter(name).ndim == 2 and not isinstance(owner, _ADAPTABLE)
        if flat and "expert" in name:
            raise ModelError(
                f"lora.target_parameters names {name}, whose experts lie one below the other: PEFT "
                "adapts stacked ones. Leave it out"
            )


def _misfit(module: nn.Module) -> str:
    """Return why the module cannot be adapted; empty where it can."""
    if not isinstance(module, _ADAPTABLE):
        return f"is {type(module).__name__}, of which no adapter could be exported"
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return ""
    if any(kind.__module__.startswith("bitsandbytes") for kind in type(module).__mro__):
        return ""  # stored otherwise, and answers as nn.Linear does
    probe = torch.empty(1, module.in_features, dtype=module.weight.dtype, device="meta")
    try:
        answer = module(probe)
    except Exception as error:  # any code of a model
        return f"cannot be called as a linear layer is: {type(error).__name__}: {error}"
    fits = isinstance(answer, torch.Tensor) and answer.shape == (1, module.out_features)
    return "" if fits else "does not answer as a linear layer does"


def _check_patterns(cfg: LoraConfig, names: set[str]) -> None:
    """Refuse a pattern of ranks or alphas that matches nothing; those of `lora.from` are PEFT's."""
    if cfg.from_ is not None:
        return
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(cfg, setting):
            ends = _compiled(f"lora.{setting}", rf"(.*\.)?({pattern})")
            if not any(map(ends.fullmatch, names)):
                raise ModelError(_unknown(f"lora.{setting}", pattern, names))


def explain_refusal(model: nn.Module, targets: Targets, error: Exception) -> ModelError:
    """Return what to say where PEFT refuses, with the setting that helps."""
    listed = targets.cfg.target_modules
    for pattern in listed if isinstance(listed, list) else ():
        if not _ending(pattern, targets.names):
            return ModelError(_unknown_target(pattern, targets.linear))
    problem = " ".join(str(error).split())
    remedy = "name other modules in lora.target_modules, or some in lora.exclude_modules"
    if "lora_dropout" in problem or "use_dora" in problem:
        remedy = (
            "fused experts are adapted as parameters, without lora.lora_dropout and lora.use_dora "
            "only; leave those out, or list the modules in lora.target_modules"
        )
    elif unfit := unfit_modules(error, targets):
        remedy = _excluding(targets.cfg, unfit)
    return ModelError(f"{model_class_name(model)} cannot be adapted ({one_line(error)}); {remedy}")


def unfit_modules(error: Exception, targets: Targets) -> set[str]:
    """Return the modules, by the ends of their names, that PEFT says it cannot adapt."""
    problem = " ".join(str(error).split())
    named = re.search(r"[Mm]odule '([\w.]+)'", problem)
    if named is None or "lora_dropout" in problem or "use_dora" in problem:
        return set()
    also = re.search(r"[Ii]ncompatible modules: \{([^}]*)\}", problem)
    others = re.findall(r"'([\w.]+)'", also[1]) if also else []
    return {named[1], *(other for other in others if _ending(other, targets.modules))}


def check_adapted(adapted: "PeftModel", targets: Targets) -> None:
    """Raise a ModelError for what PEFT left out or added without a word."""
    cfg, expected = targets.cfg, targets.modules
    modules, parameters = set(adapted_modules(adapted)), set(adapted_parameters(adapted))
    # Names that PEFT still looks for as modules; others it took for the parts of a fused parameter,
    # as older checkpoints of some types have them.
    left_over = getattr(adapted.peft_config[ADAPTER], "target_modules", None) or ()
    for pattern in cfg.target_modules if isinstance(cfg.target_modules, list) else ():
        if _ending(pattern, modules):
            continue
        if not _ending(pattern, targets.names):
            if pattern in left_over and cfg.from_ is None:
                raise ModelError(_unknown_target(pattern, targets.linear))
        elif not _ending(pattern, expected):
            raise ModelError(
                f"lora.target_modules: {pattern!r} names only modules of lora.exclude_modules or "
                "lora.modules_to_save; leave it out of one"
            )
    for pattern in cfg.target_parameters:
        if not _ending(pattern, parameters):
            raise ModelError(
                f"lora.target_parameters: PEFT left {pattern!r} unadapted; name the parameter "
                "(mlp.experts.gate_up_proj) itself, and not its module too"
            )
    if touched := sorted(_inside(parameters, targets.excluded)):
        raise ModelError(
            f"PEFT adapts {touched[0]} although lora.exclude_modules names its module; give "
            "lora.target_modules as a list of the names that are meant"
        )
    _check_patterns(cfg, modules | parameters)
    by_parameter = {n.rpartition(".")[0] for n in parameters} - expected
    if wider := sorted(modules - expected - by_parameter):
        raise ModelError(
            f"PEFT adapts {len(wider)} module(s) beyond lora.target_modules, such as {wider[0]}; "
            "give a list of names instead of a regular expression"
        )
    lost = sorted(expected - modules)
    if lost and targets.all_linear:  # PEFT knows why: it has its own list of what it cannot adapt
        kinds = ", ".join(dict.fromkeys(map(replace_numbers, lost)))
        ranks.log_once(
            f"adapters   all-linear leaves out {kinds:.200}: PEFT adapts its experts instead"
        )
    elif lost:
        raise ModelError(
            f"PEFT left out {len(lost)} module(s) of lora.target_modules, such as {lost[0]}; "
            f"{_excluding(cfg, lost)}"
        )
    saved, tied = copied_modules(adapted), targets.tied
    asked = targets.saved | (tied if targets.ties else set())
    if saved.keys() != asked:
        raise ModelError(
            f"lora.modules_to_save names {', '.join(sorted(asked))}, and PEFT would train "
            f"{', '.join(sorted(saved))}, since it compares the ends of names; name other modules"
        )
    if targets.ties and len({id(saved[name][1].weight) for name in tied}) != 1:
        raise ModelError(
            f"{', '.join(sorted(tied))} are one matrix, and PEFT's copies are not; leave them out "
            "of lora.modules_to_save"
        )
