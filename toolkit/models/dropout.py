"""Switch off everything that makes a training forward random.

Preference tuning compares a model with its reference, so both must be the same function. Dropout
has many names (`attention_dropout`, `layerdrop`, `router_jitter_noise`), and some are read from the
config in each forward. So there is no list: a tiny copy of the model runs in training mode, with
draws forced to either end, and the numbers that change its output are set to 0.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit import ranks
from toolkit.errors import ModelError, one_line
from toolkit.models.modes import forked_rng
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of
from toolkit.models.tiny_copy import (
    SPECIAL,
    VOCABULARY,
    build_meta_model,
    build_noisy_copy,
    describe_layer_kinds,
    shrunk_configs,
)

_MOST_PARAMETERS = 2**28
_ROUNDING = 1e-4  # differences of logits below this share of their spread count as rounding
_HINTS = ("drop", "jitter", "noise")  # parts of names that are tried first
_SEEDS = (1, 2)


@dataclass(frozen=True)
class NoiseSetting:
    """A float attribute of a module class or config class that makes training forwards random."""

    owner: str  # name of the class
    attribute: str


def disable_dropout(model: nn.Module) -> None:
    """Disable all randomness in training forwards of `model`, in place. Collective.

    Sets the rates of dropout modules to 0. Other settings that add noise are found by trials on a
    tiny copy of the model, which take seconds; they are set to 0 and logged. If no copy can be
    built, a warning is logged.

    Raises:
        ModelError: a module still behaves differently in training and eval mode, or in each
            forward, and no setting disables that; the error names the module.
    """
    disable_dropout_modules(model)
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        return
    settings, problem = ranks.on_main(lambda: find_noise_settings(type(base), base.config))
    for setting in settings:
        for owner in _find_owners(base, setting):
            setattr(owner, setting.attribute, 0.0)
    names = ", ".join(f"{s.owner}.{s.attribute}" for s in settings)
    if settings:
        ranks.log_once(f"dropout    off, as is {names}")
    if problem:
        ranks.log_once(
            f"WARNING: dropout modules are off, but whether {module_class_name(base)} draws "
            f"anything else in training could not be tried on a tiny copy: {problem}"
        )


def find_noise_settings(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[list[NoiseSetting], str]:
    """Find the settings, besides dropout modules, that make training forwards random.

    Tries a tiny copy of the model on the CPU. Not collective.

    Returns:
        (settings, reason why no copy could be tried). The reason is "" if a copy was tried.

    Raises:
        ModelError: the copy is random, and no setting disables that.
    """
    try:
        kinds = describe_layer_kinds(build_meta_model(model_class, config))
    except Exception as error:  # the code of any model
        return [], one_line(error, 200)
    problem = f"{model_class.__name__} has no decoder layers to look at"
    for small in shrunk_configs(config, kinds, None) if kinds else ():
        _use_plain_attention(small, model_class)
        try:
            size = sum(p.numel() for p in build_meta_model(model_class, small).parameters())
            if size > _MOST_PARAMETERS:
                problem = f"it would have {size / 1e6:.0f} M parameters"
                continue
            copy = build_noisy_copy(model_class, small, torch.device("cpu"))
            disable_dropout_modules(copy)
            trial = _NoiseTrial(copy)
        except Exception as error:  # the code of any model
            problem = one_line(error, 200)
            continue
        return trial.disable_noise(), ""
    return [], problem


def _use_plain_attention(config: PreTrainedConfig, model_class: Any) -> None:
    """Set the attention of `config` to SDPA or eager, which run on a CPU, if it is another one."""
    kernel = str(config._attn_implementation)
    if kernel not in ("eager", "sdpa"):
        config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"


def disable_dropout_modules(model: nn.Module) -> None:
    """Set to 0 the rates of dropout modules, and all float attributes with "dropout" in the name.

    Attributes whose names end with "pdrop" are set to 0, too. Not collective. Other sources of
    noise need `disable_dropout`.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)


def _find_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the distinct transformers configs that the model's modules have as `config`."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [config for config in configs.values() if isinstance(config, PreTrainedConfig)]


def _find_owners(model: nn.Module, setting: NoiseSetting) -> list[Any]:
    """Return the modules and configs of a model that have the attribute of `setting`."""
    owners: list[Any] = [*model.modules(), *_find_configs(model)]
    return [
        owner
        for owner in owners
        if module_class_name(owner) == setting.owner and setting.attribute in vars(owner)
    ]


@dataclass
class _NoiseTrial:
    """A tiny copy of a model, with fixed tokens and the logits that eval mode gives for them."""

    model: PreTrainedModel
    ids: torch.Tensor = field(init=False)
    expected: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.ids = torch.randint(SPECIAL, VOCABULARY, (2, 16), generator=drawn)
        self.expected = self.compute_logits(training=False)
        if not self.expected.isfinite().all():
            raise ModelError("its logits are not finite")
        # A copy that does not run fails here.
        for mode in _random_number_modes():
            self.compute_logits(training=True, mode=mode)

    def compute_logits(
        self, *, training: bool, mode: Callable[[], Any] = contextlib.nullcontext
    ) -> Any:
        """Run a forward on the fixed tokens without gradients, and return the logits in fp32.

        Args:
            training: run in training mode instead of eval mode.
            mode: creates a context that controls the random numbers of the forward.
        """
        self.model.train(training)
        with (
            torch.no_grad(),
            forked_rng(),
            torch.compiler.set_stance("force_eager"),
            mode(),
        ):
            return self.model(input_ids=self.ids, use_cache=False).logits.float()

    def matches_eval_mode(self, logits: torch.Tensor) -> bool:
        """Return True if `logits` are finite and equal those of eval mode up to rounding."""
        spread = float(self.expected.std()) or 1.0
        if logits.shape != self.expected.shape or not logits.isfinite().all():
            return False
        return float((logits - self.expected).abs().max()) <= _ROUNDING * spread

    def find_differing_mode(self) -> Callable[[], Any] | None:
        """Find random numbers with which training mode gives other logits than eval mode.

        Returns:
            The first function of `_random_number_modes` for which they differ; None if they never
            do.
        """
        for mode in _random_number_modes():
            if not self.matches_eval_mode(self.compute_logits(training=True, mode=mode)):
                return mode
        return None

    def disable_noise(self) -> list[NoiseSetting]:
        """Set every setting that adds noise to 0 in the copy, and return those settings.

        Raises:
            ModelError: the copy is still random; the error names the module.
        """
        chosen = [*self._zero_harmless_numbers(hinted=True)]
        if self.find_differing_mode() is None:
            return chosen
        unhinted = self._zero_harmless_numbers(hinted=False)
        if (mode := self.find_differing_mode()) is not None:
            self._raise_for_noise(mode)
        # Keep only the settings without which there is noise.
        for setting, values in unhinted.items():
            self._set_values(setting, values)
            if self.find_differing_mode() is not None:
                self._set_values(setting, [0.0] * len(values))
                chosen.append(setting)
        return chosen

    def _zero_harmless_numbers(self, *, hinted: bool) -> dict[NoiseSetting, list[float]]:
        """Set to 0 every float setting in (0, 1] that has no effect in eval mode.

        Args:
            hinted: True: only settings with "drop", "jitter" or "noise" in the name. False: only
                all others.

        Returns:
            Changed setting -> previous value in each module and config that has it.
        """
        settings = dict.fromkeys(
            NoiseSetting(module_class_name(owner), name)
            for owner in (*self.model.modules(), *_find_configs(self.model))
            for name, value in vars(owner).items()
            if isinstance(value, float)
            and 0.0 < value <= 1.0
            and any(hint in name for hint in _HINTS) == hinted
        )
        zeroed: dict[NoiseSetting, list[float]] = {}
        for setting in settings:
            owners = _find_owners(self.model, setting)
            values = [getattr(owner, setting.attribute) for owner in owners]
            self._set_values(setting, [0.0] * len(values))
            if self.matches_eval_mode(self.compute_logits(training=False)):
                zeroed[setting] = values
            else:
                # The setting has another meaning: eval mode changed.
                self._set_values(setting, values)
        return zeroed

    def _set_values(self, setting: NoiseSetting, values: list[float]) -> None:
        """Set a setting to `values`, one for each module and config that has it."""
        for owner, value in zip(_find_owners(self.model, setting), values, strict=True):
            setattr(owner, setting.attribute, value)

    def _raise_for_noise(self, mode: Callable[[], Any]) -> None:
        """Raise a ModelError that names the first module whose outputs differ for equal inputs.

        Args:
            mode: the function that `find_differing_mode` returned.
        """
        calls = [
            self._record_module_calls(training=False),
            self._record_module_calls(training=True, mode=mode),
        ]
        name = next(
            (
                name
                for (name, *expected), (other, *actual) in zip(*calls, strict=False)
                if name == other
                and _are_close(expected[0], actual[0])
                and not _are_close(expected[1], actual[1])
            ),
            "",
        )
        kind = type(self.model.get_submodule(name)).__name__
        raise ModelError(
            f"preference tuning: {name or 'the model'} ({kind}) of {module_class_name(self.model)} "
            "computes something else in training than in eval mode, or in each forward, and no "
            "setting switches that off. The model and its reference must be the same function; "
            "use a model without it"
        )

    def _record_module_calls(
        self, **options: Any
    ) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
        """Run a forward and record each module call, in the order in which the calls end.

        Args:
            options: arguments of `compute_logits`.

        Returns:
            (module name, copies of its input tensors, copies of its output tensors) of each call.
        """
        calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []
        with contextlib.ExitStack() as stack:
            before: dict[str, list[torch.Tensor]] = {}
            for name, module in self.model.named_modules():

                def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    before[name] = _copy_float_tensors([args, kwargs])

                def end(_: Any, __: Any, output: Any, name: str = name) -> None:
                    calls.append((name, before[name], _copy_float_tensors(output)))

                handle = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(end).remove)
            self.compute_logits(**options)
        return calls


def _copy_float_tensors(value: Any) -> list[torch.Tensor]:
    """Copy the floating tensors in nested dicts, lists and tuples, as a flat list."""
    if torch.is_tensor(value):
        return [value.detach().clone()] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _copy_float_tensors(entry)]
    return []


def _are_close(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Return True if two lists of tensors have equal shapes and, up to rounding, equal values."""
    return len(expected) == len(actual) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=_ROUNDING, atol=1e-6, equal_nan=True)
        for x, y in zip(expected, actual, strict=True)
    )


def _random_number_modes() -> list[Callable[[], Any]]:
    """Return functions that each create a context for the random numbers of a forward.

    In the first two contexts, all draws are the lowest or highest possible. The others set a seed.
    """

    def seeded(seed: int) -> Callable[[], Any]:
        def mode() -> Any:
            torch.manual_seed(seed)
            return contextlib.nullcontext()

        return mode

    return [lambda: _ExtremeDraws(0.0), lambda: _ExtremeDraws(1.0), *map(seeded, _SEEDS)]


class _ExtremeDraws(TorchDispatchMode):
    """A context in which all random draws are extreme.

    With `end` 0, uniform draws give the low end of their range and Bernoulli draws 0. With `end` 1,
    they give the high end and 1. Other distributions are not changed.
    """

    def __init__(self, end: float) -> None:
        super().__init__()
        self._end = end

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        below_1 = 1.0 - 2.0**-24
        if name in ("rand", "rand_like"):
            return result.fill_(self._end * below_1)
        if name == "uniform_":
            low = args[1] if len(args) > 1 else 0.0
            high = args[2] if len(args) > 2 else 1.0
            return result.fill_(low + (high - low) * self._end * below_1)
        if name in ("bernoulli_", "bernoulli"):
            return result.fill_(self._end)
        return result
