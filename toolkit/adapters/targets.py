"""Choose the modules that get adapters (linear layers, experts, embeddings); refuse unfit ones."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit import ranks
from toolkit.config.lora import LoraConfig
from toolkit.errors import ConfigError, ModelError, one_line
from toolkit.formats import assets_of
from toolkit.models.classes import model_class_name
from toolkit.models.layers import children_bypassed, modules_outside_text
from toolkit.models.patterns import format_no_match, replace_numbers
from toolkit.models.peft_model import ADAPTER, adapted_modules, adapted_parameters, copied_modules
from toolkit.models.reward import HEAD, reward_head

if TYPE_CHECKING:
    from peft import PeftModel

# The export supports these classes. PEFT also adapts convolutions, which the merge and its proof do
# not support.
_ADAPTABLE = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class Targets:
    """The modules that the LoRA settings select in a model, as full names in the base model.

    It has a set each for modules with an adapter, excluded modules, and modules trained in full.
    """

    cfg: LoraConfig
    names: tuple[str, ...]  # every module
    modules: set[str]  # modules that get an adapter
    excluded: set[str]
    saved: set[str]  # modules that are trained in full
    towers: set[str]  # outermost modules outside the text path; excluded
    unfit: set[str]  # excluded by all-linear, because they cannot be adapted
    linear: tuple[str, ...]  # the linear layers among `names`
    tied: set[str]  # the input embedding and modules tied to it; often empty

    @property
    def all_linear(self) -> bool:
        """True if `target_modules` is `all-linear`: every linear layer that can be adapted."""
        target_modules = self.cfg.target_modules
        return isinstance(target_modules, str) and target_modules.lower() == "all-linear"

    def without(self, ends: set[str], why: str) -> "Targets":
        """Return a copy that excludes more modules, and log that `all-linear` skips them.

        Args:
            ends: names or endings of names; all modules that match are excluded.
            why: the reason, for the log.
        """
        removed = set[str]().union(*(_names_ending_with(end, self.names) for end in ends))
        listed = ", ".join(sorted(ends)[:5]) + " ..." * (len(ends) > 5)
        ranks.log_once(f"adapters   all-linear skips {listed}: {why}")
        modules = self.modules - removed
        excluded = self.excluded | removed
        return replace(self, modules=modules, excluded=excluded, unfit=self.unfit | ends)

    @property
    def needs_weight_tying(self) -> bool:
        """True if a tied module is trained in full, so PEFT must keep its trained copies tied."""
        return bool(self.saved & self.tied)


def select_targets(model: PreTrainedModel, cfg: LoraConfig) -> Targets:
    """Select the modules of `model` that the LoRA settings name. Adds no adapters.

    With `all-linear`, modules that cannot be adapted or exported are skipped, and this is logged.
    The head of a reward model is always trained in full.

    Raises:
        ModelError: a name matches nothing, embedding and head would no longer be tied, or a named
            module cannot be adapted or exported.
        ConfigError: a setting is no valid regular expression.
    """
    modules_by_name = {name: module for name, module in model.named_modules() if name}
    saved_modules = _find_modules_to_save(modules_by_name, cfg)
    # The head is new, or was trained for one number. A low-rank change does not suit it.
    if reward_head(model) is not None:
        saved_modules.add(HEAD)
    towers = set(modules_outside_text(model))
    beside = _names_inside(modules_by_name, towers)
    excluded = _find_excluded_names(cfg, modules_by_name) | beside
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    _refuse_flat_experts(
        model, _match_names("lora.target_parameters", cfg.target_parameters, parameters)
    )
    modules = _select_modules(model, cfg, modules_by_name)
    if modules and modules <= beside:
        raise ModelError(
            f"lora.target_modules {cfg.target_modules} names only modules outside the text path, "
            f"such as {min(modules)}; name modules of the text path"
        )
    modules -= excluded | _names_inside(modules_by_name, saved_modules)
    tied = _find_tied_modules(model)
    _refuse_untying(tied, modules, saved_modules)
    _refuse_new_rows(model, saved_modules | tied if saved_modules & tied else saved_modules)
    linear = linear_names(modules_by_name)
    targets = Targets(
        cfg, tuple(modules_by_name), modules, excluded, saved_modules, towers, set(), linear, tied
    )
    obstacles = {n: _find_obstacle(modules_by_name[n]) for n in sorted(modules)}
    if cfg.from_ is None:
        # An adapter that a run continues may have them, as PEFT does not exclude them.
        obstacles |= _find_bypassed(model, modules)
    if unfit := {n: why for n, why in obstacles.items() if why}:
        why = " ".join(next(iter(unfit.items())))
        if targets.all_linear:
            return targets.without(shortest_suffixes(set(unfit), targets.names), why)
        raise ModelError(
            f"{model_class_name(model)} cannot be adapted ({why}); {_exclusion_advice(cfg, unfit)}"
        )
    return targets


def linear_names(modules: dict[str, nn.Module]) -> tuple[str, ...]:
    """List the names of the linear layers (`nn.Linear`, `Conv1D`) among `modules`."""
    return tuple(name for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D))


def check_target_names(model: PreTrainedModel, cfg: LoraConfig) -> None:
    """Raise an error if `model` lacks modules that `cfg` names.

    Does not import PEFT, whose import starts CUDA. If the model has fused experts, names in
    `target_modules` are not checked, because PEFT may know names that the model lacks.

    Raises:
        ModelError: a name matches nothing; also the errors of `select_targets`.
    """
    targets = select_targets(model, cfg)
    fused = any(p.ndim == 3 for p in model.parameters())
    for pattern in cfg.target_modules if isinstance(cfg.target_modules, list) else ():
        if cfg.from_ is None and not fused and not _names_ending_with(pattern, targets.names):
            raise ModelError(_format_unknown_target(pattern, targets.linear))


def _match_names(
    setting: str, patterns: list[str], names: Iterable[str], *, may_miss: bool = False
) -> set[str]:
    """Find the names that equal one of `patterns` or end with it after a dot.

    Args:
        setting: name of the setting, for the error.
        patterns: full names or endings of names.
        names: names of modules or parameters.
        may_miss: accept patterns that match nothing. PEFT writes names that a model may lack
            (`classifier` for every reward model) into an adapter that a run continues.

    Raises:
        ModelError: a pattern matches nothing, and `may_miss` is False.
    """
    matches: set[str] = set()
    for pattern in patterns:
        matched = _names_ending_with(pattern, names)
        if not matched and not may_miss:
            raise ModelError(_format_no_match(setting, pattern, names))
        matches |= matched
    return matches


# Names of the same role in different architectures: of attention and of MLPs.
# fmt: off
_ROLES = (
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv",
        "query", "key", "value", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
        "wq", "wk", "wv", "to_q", "to_k", "to_v", "q_lin", "k_lin", "v_lin", "in_proj",
    },
    {"o_proj", "out_proj", "c_proj", "dense", "wo", "to_out", "out_lin", "attn_out"},
    {
        "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h", "fc_in",
        "w1", "w3", "lin1", "up", "gate", "wi", "linear_in", "input_linear",
    },
    {
        "down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "w2", "lin2", "down",
        "linear_out", "output_linear",
    },
)
# fmt: on


def _format_unknown_target(pattern: str, linear: Iterable[str]) -> str:
    """Format the error for a target that matches no module, with the names of linear layers.

    Names of the same role in other architectures, or with similar spelling, are suggested first.

    Args:
        pattern: the name in `lora.target_modules`.
        linear: names of the model's linear layers.
    """
    leaves = dict.fromkeys(_last_part(name) for name in linear)
    ending = pattern.rpartition(".")[2]
    near = [n for n in leaves for role in _ROLES if {ending, n.rpartition(".")[2]} <= role]
    near = near or difflib.get_close_matches(ending, leaves, n=4, cutoff=0.6)
    other_names = ", ".join([name for name in leaves if name not in near][:12]) or "none"
    advice = f"; its linear layers: {other_names}"
    if near:
        suggestions = ", ".join(dict.fromkeys(near))
        advice = f"; did you mean {suggestions}? Its other linear layers: {other_names}"
    return f"lora.target_modules: {pattern!r} matches no module of the model{advice}"


def _last_part(name: str) -> str:
    """Return the last part of a module's name; if that is a number, the last two parts."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _find_excluded_names(cfg: LoraConfig, names: Iterable[str]) -> set[str]:
    """Find the modules among `names` that match the setting `lora.exclude_modules`.

    Raises:
        ModelError: a pattern matches nothing, and the run does not continue an adapter
            (`lora.from`).
    """
    patterns = cfg.exclude_modules
    continues = cfg.from_ is not None
    if isinstance(patterns, list):
        return _match_names("lora.exclude_modules", patterns, names, may_miss=continues)
    pattern = _compile_pattern("lora.exclude_modules", patterns)
    matched = {name for name in names if pattern.fullmatch(name)}
    if matched or continues:
        return matched
    raise ModelError(
        _format_no_match("lora.exclude_modules", patterns, names)
        + "; a text is one regular expression for full names, a list has endings of names"
    )


def _compile_pattern(setting: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression from a setting; raise a ConfigError that names the setting."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting} {pattern!r} is no regular expression: {error}") from error


def _format_no_match(setting: str, pattern: str, names: Iterable[str]) -> str:
    """Format the error message for a pattern that matches none of `names`, with similar names."""
    kind_of_name = "parameter" if setting == "lora.target_parameters" else "module"
    return format_no_match(setting, pattern, kind_of_name, {*map(replace_numbers, names)})


def _names_ending_with(pattern: str, names: Iterable[str]) -> set[str]:
    """Find the names that equal `pattern` or end with it after a dot."""
    return {name for name in names if f".{name}".endswith(f".{pattern}")}


def _exclusion_advice(cfg: LoraConfig, names: Iterable[str]) -> str:
    """Format the advice to add the last part of each name to `lora.exclude_modules`."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    if isinstance(cfg.exclude_modules, str):
        return f"name {', '.join(leaves)} in lora.exclude_modules too"
    excluded = dict.fromkeys([*cfg.exclude_modules, *leaves])
    return f"set lora.exclude_modules: [{', '.join(excluded)}]"


def shortest_suffixes(modules: set[str], names: Iterable[str]) -> set[str]:
    """Find for each of `modules` the shortest ending of its name that matches no other module.

    The ending may match several of `modules`.

    Args:
        modules: full names of some modules.
        names: full names of all modules.
    """
    other_names = set(names) - modules
    suffixes = set[str]()
    for module in sorted(modules):
        parts = module.split(".")
        tails = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        suffixes.add(
            next((tail for tail in tails if not _names_ending_with(tail, other_names)), module)
        )
    return suffixes


def _names_inside(names: Iterable[str], outer: set[str]) -> set[str]:
    """Find the names that are in `outer`, or that lie inside a module of `outer`."""
    return {n for n in names if any(n == o or n.startswith(o + ".") for o in outer)}


def _find_modules_to_save(modules: dict[str, nn.Module], cfg: LoraConfig) -> set[str]:
    """Find the full names of the modules that `lora.modules_to_save` trains in full.

    Raises:
        ModelError: a name matches nothing (unless `lora.from` is set), a container such as
            ModuleList, or a module inside another match.
    """
    setting = "lora.modules_to_save"
    matches = _match_names(setting, cfg.modules_to_save, modules, may_miss=cfg.from_ is not None)
    for name in sorted(matches):
        if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            raise ModelError(f"{setting}: {name} holds modules and is never called; name those")
        if outer := [o for o in matches if name.startswith(o + ".")]:
            raise ModelError(f"{setting} names {name} and {outer[0]}, which holds it; name one")
    return matches


def _select_modules(
    model: PreTrainedModel, cfg: LoraConfig, modules: dict[str, nn.Module]
) -> set[str]:
    """Find the full names of the modules that `lora.target_modules` names.

    `all-linear` selects all linear layers except the output head.

    Raises:
        ModelError: a regular expression matches nothing. Endings in a list may match nothing.
    """
    targets = cfg.target_modules
    if isinstance(targets, list):
        return set().union(*(_names_ending_with(pattern, modules) for pattern in targets))
    if targets.lower() == "all-linear":
        head = model.get_output_embeddings()
        return {
            n for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head
        }
    pattern = _compile_pattern("lora.target_modules", targets)
    if matched := {n for n in modules if pattern.fullmatch(n)}:
        return matched
    raise ModelError(
        _format_unknown_target(targets, linear_names(modules))
        + "; a text is one regular expression for full names, a list has endings of names"
    )


def _find_tied_modules(model: PreTrainedModel) -> set[str]:
    """Find the modules that share the input embedding's matrix, including the embedding itself.

    Returns:
        Full names; empty if only the embedding holds the matrix.
    """
    embedding = model.get_input_embeddings()
    embedding_ids = set() if embedding is None else set(map(id, embedding.parameters()))
    parameters = model.named_parameters(remove_duplicate=False)
    modules = {
        name.rpartition(".")[0] for name, parameter in parameters if id(parameter) in embedding_ids
    }
    return modules if len(modules) > 1 else set()


def _refuse_untying(tied: set[str], expected: set[str], saved: set[str]) -> None:
    """Raise a ModelError if adapters or trained copies would untie the embedding and the head.

    An adapter on a tied module always does. PEFT keeps the tie of modules that are trained in full
    only if they are named `embed_tokens` and `lm_head`.

    Args:
        tied: the tied modules; empty if nothing is tied.
        expected: modules that get an adapter.
        saved: modules that are trained in full.
    """
    ends = {name.rpartition(".")[2] for name in tied}
    if name := min(tied & expected, default=""):
        raise ModelError(
            f"lora.target_modules: {name} is one matrix with {', '.join(sorted(tied - {name}))}: "
            "an adapter would untie them. Train it in full (lora.modules_to_save), or remove it"
        )
    if (name := min(saved & tied, default="")) and ends != {"embed_tokens", "lm_head"}:
        raise ModelError(
            f"lora.modules_to_save: {name} is one matrix with {', '.join(sorted(tied - {name}))}: "
            "the tie would break, as PEFT keeps a tie of embed_tokens and lm_head only: remove it"
        )


def _refuse_new_rows(model: PreTrainedModel, saved: set[str]) -> None:
    """Raise a ModelError if a resized embedding or head is not trained in full.

    Args:
        model: the base model.
        saved: modules that are trained in full.
    """
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
    """Raise a ModelError if a parameter among `names` stacks experts as rows of a 2-d matrix.

    PEFT can adapt experts only if they are stacked along a separate dim.
    """
    for name in sorted(names):
        owner = model.get_submodule(name.rpartition(".")[0])
        flat = model.get_parameter(name).ndim == 2 and not isinstance(owner, _ADAPTABLE)
        if flat and "expert" in name:
            raise ModelError(
                f"lora.target_parameters names {name}, whose experts are rows of one matrix: PEFT "
                "adapts experts that are stacked along a third dim. Remove it"
            )


def _find_obstacle(module: nn.Module) -> str:
    """Return the reason why a module cannot be adapted; empty if it can.

    A subclass of `nn.Linear` with its own forward is called on meta to check its output.
    """
    if not isinstance(module, _ADAPTABLE):
        return f"is {type(module).__name__}, whose adapter could not be exported"
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return ""
    if any(kind.__module__.startswith("bitsandbytes") for kind in type(module).__mro__):
        # bitsandbytes stores the weight in another form and computes what nn.Linear does.
        return ""
    probe = torch.empty(1, module.in_features, dtype=module.weight.dtype, device="meta")
    try:
        output = module(probe)
    except Exception as error:
        # The module may run any code.
        return f"cannot be called like a linear layer: {type(error).__name__}: {error}"
    fits = isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)
    return "" if fits else "does not compute the output of a linear layer"


def _find_bypassed(model: nn.Module, names: set[str]) -> dict[str, str]:
    """Find the linear layers among `names` whose weight the model reads without their forward.

    Returns:
        Name -> the reason why an adapter would have no effect.
    """
    bypassed = {}
    for name in sorted(names):
        outer, _, leaf = name.rpartition(".")
        kind: Any = type(model.get_submodule(outer))
        if leaf in children_bypassed(kind) and isinstance(
            model.get_submodule(name), nn.Linear | Conv1D
        ):
            bypassed[name] = (
                f"is read by {kind.__name__} without its forward, so an adapter may have no effect"
            )
    return bypassed


def _refuse_unmatched_patterns(cfg: LoraConfig, names: set[str]) -> None:
    """Raise a ModelError if a key of `rank_pattern` or `alpha_pattern` matches none of `names`.

    Settings of an adapter that the run continues (`lora.from`) are not checked.
    """
    if cfg.from_ is not None:
        return
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(cfg, setting):
            ends = _compile_pattern(f"lora.{setting}", rf"(.*\.)?({pattern})")
            if not any(map(ends.fullmatch, names)):
                raise ModelError(_format_no_match(f"lora.{setting}", pattern, names))


def explain_refusal(model: nn.Module, targets: Targets, error: Exception) -> ModelError:
    """Build the ModelError that explains an error of PEFT, and advises which setting to change."""
    target_modules = targets.cfg.target_modules
    for pattern in target_modules if isinstance(target_modules, list) else ():
        if not _names_ending_with(pattern, targets.names):
            return ModelError(_format_unknown_target(pattern, targets.linear))
    problem = " ".join(str(error).split())
    remedy = "name other modules in lora.target_modules, or some in lora.exclude_modules"
    if "lora_dropout" in problem or "use_dora" in problem:
        remedy = (
            "fused experts are adapted as parameters, which works only without lora.lora_dropout "
            "and lora.use_dora; remove those, or list the modules in lora.target_modules"
        )
    elif unfit := modules_peft_refuses(error, targets):
        remedy = _exclusion_advice(targets.cfg, unfit)
    return ModelError(f"{model_class_name(model)} cannot be adapted ({one_line(error)}); {remedy}")


def modules_peft_refuses(error: Exception, targets: Targets) -> set[str]:
    """Parse an error of PEFT for the modules that it cannot adapt.

    Returns:
        Full names or endings of names; empty if the error names no module.
    """
    problem = " ".join(str(error).split())
    match = re.search(r"[Mm]odule '([\w.]+)'", problem)
    if match is None or "lora_dropout" in problem or "use_dora" in problem:
        return set()
    also = re.search(r"[Ii]ncompatible modules: \{([^}]*)\}", problem)
    other_names = re.findall(r"'([\w.]+)'", also[1]) if also else []
    return {
        match[1],
        *(other for other in other_names if _names_ending_with(other, targets.modules)),
    }


def check_adapted(adapted: "PeftModel", targets: Targets) -> None:
    """Raise a ModelError if PEFT adapted other modules than the settings select.

    With `all-linear`, modules that PEFT skipped are logged instead.
    """
    cfg = targets.cfg
    expected = targets.modules
    modules = set(adapted_modules(adapted))
    parameters = set(adapted_parameters(adapted))
    # PEFT looks for these names as modules. It took other names for parts of a fused parameter, as
    # older checkpoints of some types have them.
    left_over = getattr(adapted.peft_config[ADAPTER], "target_modules", None) or ()
    for pattern in cfg.target_modules if isinstance(cfg.target_modules, list) else ():
        if _names_ending_with(pattern, modules):
            continue
        if not _names_ending_with(pattern, targets.names):
            if pattern in left_over and cfg.from_ is None:
                raise ModelError(_format_unknown_target(pattern, targets.linear))
        elif not _names_ending_with(pattern, expected):
            raise ModelError(
                f"lora.target_modules: {pattern!r} names only modules of lora.exclude_modules or "
                "lora.modules_to_save; remove it from one"
            )
    for pattern in cfg.target_parameters:
        if not _names_ending_with(pattern, parameters):
            raise ModelError(
                f"lora.target_parameters: PEFT left {pattern!r} unadapted; name the parameter "
                "(mlp.experts.gate_up_proj) itself, and not its module too"
            )
    if adapted_anyway := sorted(_names_inside(parameters, targets.excluded)):
        raise ModelError(
            f"PEFT adapts {adapted_anyway[0]} although lora.exclude_modules names its module; give "
            "lora.target_modules as a list of the names that are meant"
        )
    _refuse_unmatched_patterns(cfg, modules | parameters)
    by_parameter = {n.rpartition(".")[0] for n in parameters} - expected
    if additional := sorted(modules - expected - by_parameter):
        raise ModelError(
            f"PEFT adapts {len(additional)} module(s) beyond lora.target_modules, such as "
            f"{additional[0]}; use a list of names instead of a regular expression"
        )
    lost = sorted(expected - modules)
    # PEFT has its own list of modules that it cannot adapt.
    if lost and targets.all_linear:
        kinds = ", ".join(dict.fromkeys(map(replace_numbers, lost)))
        ranks.log_once(f"adapters   all-linear skips {kinds:.200}: PEFT adapts its experts instead")
    elif lost:
        raise ModelError(
            f"PEFT skipped {len(lost)} module(s) of lora.target_modules, such as {lost[0]}; "
            f"{_exclusion_advice(cfg, lost)}"
        )
    copied = copied_modules(adapted)
    tied = targets.tied
    expected_saved = targets.saved | (tied if targets.needs_weight_tying else set())
    if copied.keys() != expected_saved:
        raise ModelError(
            f"lora.modules_to_save names {', '.join(sorted(expected_saved))}, and PEFT would train "
            f"{', '.join(sorted(copied))}, since it compares the ends of names; name other modules"
        )
    if targets.needs_weight_tying and len({id(copied[name][1].weight) for name in tied}) != 1:
        raise ModelError(
            f"{', '.join(sorted(tied))} are one matrix, and PEFT's copies are not; leave them out "
            "of lora.modules_to_save"
        )
