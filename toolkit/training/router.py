"""Balance of experts: the auxiliary loss of routers, DeepSeek's bias, and the logged loads.

[Note: balance of experts] A router computes for each token logits over the E experts of its layer,
and sends the token to the k largest. f_e is the share of tokens sent to expert e (the shares sum to
k), P_e the mean of its softmax probability. Two methods keep the loads even:

    the auxiliary loss   c * E * sum_e f_e P_e, with the c of config.json: Switch Transformers
                         (Fedus et al. 2022, arXiv:2101.03961, eq. 4). `pooled`: f and P are
                         computed over all layers together, as transformers does; `layer`: the
                         loss is the mean over layers, so an uneven layer is not compensated by
                         another one.
    the bias             b_e += rate * sign(mean load - load_e) after each step. The bias affects
                         only which experts are chosen, not their weights: DeepSeek-V3 (2024,
                         arXiv:2412.19437, section 2.1.2), Wang et al. 2024 (arXiv:2408.15664).

Both use the global batch, so that the documents of one rank may be of one kind (Qiu et al. 2025,
arXiv:2501.11873). P is linear in the tokens, so the parts of ranks and micro-batches add up. f has
no gradient. Its counts are summed over the ranks for each micro-batch separately, since those of
later micro-batches are not known yet. The bias uses the loads of the complete step. Padding tokens
are routed too, but not counted.

A hook records the outputs of a router during the forward of an `Update`. It adds no operation and
records nothing during recomputation, so the recomputed forward runs the same operations.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.config.settings import RunConfig, TrainConfig
from toolkit.data.samples.batch import Batch
from toolkit.errors import ConfigError, ModelError, TrainingError
from toolkit.formats import local_tensor, nested_items, reshard, slice_like
from toolkit.models.causal_lm import requests_router_loss
from toolkit.models.layers import active_expert_shares, expert_counts, experts_per_token
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of
from toolkit.sharding.fsdp import Sharded

# Names of the coefficient in config.json; the last two are those of JetMoe and DBRX.
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
_BIASES = ("e_score_correction_bias", "expert_bias")  # buffers, or parameters that are not trained
_PROBABILITY_ROUTERS = ("Gemma4TextRouter",)  # return probabilities instead of logits
_RECORDED = "_toolkit_answers"  # attribute of a router with its outputs in this forward
_PRODUCT_KEY_ROUTERS = ("DogeCDMoE",)  # their logits are for halves of an expert's number


@dataclass(frozen=True)
class Balance:
    """Result of a step: how evenly it loaded the experts, as tensors on the device."""

    aux: torch.Tensor | None
    """0-d: the auxiliary loss of the global batch, without its coefficient; None without one."""
    loads: torch.Tensor
    """[layers]: the largest load of an expert divided by the mean load; 1 is even."""

    def metrics(self) -> dict[str, Any]:
        """Return the values as numbers, under their names in `metrics.jsonl`. Waits for the device.

        `router_aux` is the loss, `router_load` the largest of the loads, and `router_load/I` the
        load of layer I.
        """
        loads = {f"router_load/{i}": load for i, load in enumerate(self.loads.tolist())}
        aux = {} if self.aux is None else {"router_aux": float(self.aux)}
        return aux | {"router_load": max(loads.values())} | loads


@dataclass(frozen=True)
class RouterPlan:
    """The decision how the experts of a model are balanced: by a loss, a bias, or not at all."""

    routers: dict[str, tuple[nn.Module, int]]
    """Name -> a router, and the index of the logits among its outputs."""
    loss: Literal["pooled", "layer"] | None
    coefficient: float
    biases: dict[str, torch.Tensor]
    """Name of a router -> its bias; empty if biases are not updated."""
    line: str
    """The plan as a log line."""


def plan_router(model: nn.Module, cfg: RunConfig) -> RouterPlan | None:
    """Decide from the config how the experts of `model` are balanced. The model may be on meta.

    Returns:
        The plan; None for a model without experts, if the config requests no balancing.

    Raises:
        ModelError: the auxiliary loss is configured, but transformers does not return the routers'
            logits, config.json has no coefficient, or layers have different numbers of experts. Or
            updates of a bias are configured, but the model has no such bias or it must not be
            updated.
        ConfigError: updates of a bias are configured with adapters, whose base must not change.
    """
    base, train = base_of(model), cfg.train
    routers = _find_routers(base)
    setting, rate = train.router_aux_loss, train.router_bias_update_rate
    if rate and cfg.adapters is not None:
        raise ConfigError(
            "train.router_bias_update_rate with lora.r: the bias belongs to the base model, which "
            "adapters do not change; remove the setting"
        )
    wants_loss = requests_router_loss(base)
    has_experts = routers or active_expert_shares(base)
    if not has_experts and not wants_loss and setting in ("auto", "none") and not rate:
        return None
    text_config = base.config.get_text_config().to_dict()
    model_settings = dict(nested_items(text_config)) | text_config
    coefficient = next((model_settings[n] for n in _COEFFICIENTS if model_settings.get(n)), 0.0)
    wants_loss = wants_loss and coefficient > 0
    missing = _explain_missing_logits(base, routers)
    if setting in ("pooled", "layer"):
        if not missing and not coefficient > 0:
            missing = f"config.json of {module_class_name(base)} has no {_COEFFICIENTS[0]} above 0"
        if missing:
            raise ModelError(f"train.router_aux_loss {setting}: {missing}; set it to none")
    biases = _find_biases(base, routers)
    if rate:
        _check_biases(base, biases)
    loss: Any = "pooled" if setting == "auto" else setting
    if setting == "none" or (setting == "auto" and (missing or not wants_loss)):
        loss = None
    if loss == "pooled":
        _check_equal_expert_counts(routers)
    line = "router     " + _format_auxiliary_loss(train, loss, coefficient, wants_loss, missing)
    if biases:
        change = f"changes by {rate:g} after each step" if rate else "stays unchanged"
        line += f"; the bias of experts {change} (train.router_bias_update_rate)"
    return RouterPlan(routers, loss, coefficient, biases if rate else {}, line)


def _find_routers(base: PreTrainedModel) -> dict[str, tuple[nn.Module, int]]:
    """Find the modules of a model that transformers records for `router_logits`.

    They are found by their classes, in `_can_record_outputs`. Product-key routers are skipped.

    Returns:
        Name of a router -> its module, and the index of the logits among its outputs.
    """
    modules = dict(base.named_modules())
    models = [m for m in modules.values() if isinstance(m, PreTrainedModel)]
    routers: dict[str, tuple[nn.Module, int]] = {}
    for recorded in [getattr(m, "_can_record_outputs", None) or {} for m in models]:
        specs = recorded.get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            kind = getattr(spec, "target_class", spec)
            index = getattr(spec, "index", 1)  # transformers' default for a bare class
            if isinstance(kind, type) and kind.__name__ not in _PRODUCT_KEY_ROUTERS:
                routers |= {n: (m, index) for n, m in modules.items() if isinstance(m, kind)}
    return routers


def _check_equal_expert_counts(routers: dict[str, tuple[nn.Module, int]]) -> None:
    """Raise a `ModelError` if routers have different numbers of experts.

    Routers whose number is not known are ignored.
    """
    counts = {name: _read_expert_count(router) for name, (router, _) in routers.items()}
    numbers = sorted({count for count in counts.values() if count is not None})
    if len(numbers) > 1:
        raise ModelError(
            f"train.router_aux_loss pooled: layers have {numbers} experts, which cannot be pooled; "
            "set layer or none"
        )


def _read_expert_count(router: nn.Module) -> int | None:
    """Return a router's number of experts, from its weight [experts, width] or its attributes.

    Returns None if it has neither.
    """
    weight = getattr(router, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2:
        return weight.shape[0]
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((n for name in names if type(n := getattr(router, name, None)) is int), None)


def _explain_missing_logits(
    base: PreTrainedModel, routers: dict[str, tuple[nn.Module, int]]
) -> str:
    """Explain why the routers return no logits; the text is empty if they do."""
    if not routers:
        return f"transformers does not return the router logits of {module_class_name(base)}"
    kinds = {kind.__name__ for router, _ in routers.values() for kind in type(router).__mro__}
    if names := kinds.intersection(_PROBABILITY_ROUTERS):
        return f"{names.pop()} of {module_class_name(base)} returns probabilities, not logits"
    return ""


def _format_auxiliary_loss(
    train: TrainConfig, loss: str | None, coefficient: float, wants_loss: bool, missing: str
) -> str:
    """Format the part of the log line that describes the auxiliary loss, or why there is none.

    Args:
        train: the section `train` of the config.
        loss: the loss of the plan; None: there is none.
        coefficient: its coefficient in config.json; 0 if there is none.
        wants_loss: True if config.json enables the loss.
        missing: why the routers return no logits; empty if they do.
    """
    setting = f"train.router_aux_loss {train.router_aux_loss}"
    if loss is not None:
        kind = "pooled over layers" if loss == "pooled" else "of each layer"
        return f"auxiliary loss {kind}, coefficient {coefficient:g} of config.json ({setting})"
    if missing:
        return f"no auxiliary loss ({missing})"
    if not coefficient > 0:
        return f"no auxiliary loss ({setting}; config.json has no {_COEFFICIENTS[0]} above 0)"
    reason = "" if wants_loss else ": config.json does not enable it; set pooled or layer"
    return f"no auxiliary loss ({setting}{reason}; its coefficient is {coefficient:g})"


def _find_biases(
    base: PreTrainedModel, routers: dict[str, tuple[nn.Module, int]]
) -> dict[str, torch.Tensor]:
    """Find the biases that are added to routers' scores only for the choice of experts.

    Such a bias belongs to the first router in the innermost module that contains both.

    Returns:
        Name of a router -> its bias.
    """
    biases: dict[str, torch.Tensor] = {}
    for name, tensor in [*base.named_buffers(), *base.named_parameters()]:
        parent, _, leaf = name.rpartition(".")
        while leaf in _BIASES and parent:
            near = [n for n in routers if n == parent or n.startswith(parent + ".")]
            if near:
                biases[near[0]] = tensor
                break
            parent = parent.rpartition(".")[0]
    return biases


def _check_biases(base: PreTrainedModel, biases: dict[str, torch.Tensor]) -> None:
    """Raise a `ModelError` if there is no bias, or if a bias must not be updated.

    That is the case if its size is no number of experts, or if it is not stored in float32.
    """
    problem = ""
    if not biases:
        names = ", ".join(_BIASES)
        problem = f"{module_class_name(base)} has no bias of experts ({names}); remove the setting"
    for name, bias in biases.items():
        if bias.numel() not in expert_counts(base):
            problem = (
                f"the bias of {name} has {bias.numel()} values, which is no number of experts in "
                "config.json, so it does not only balance loads; remove the setting"
            )
        elif bias.dtype != torch.float32:
            problem = (
                f"the bias of {name} is stored in {str(bias.dtype).removeprefix('torch.')}, in "
                "which small steps are lost; set model.dtype: float32"
            )
    if problem:
        raise ModelError(f"train.router_bias_update_rate: {problem}")


@dataclass(frozen=True)
class _RouterOutput:
    """The recorded output of a router in one forward."""

    chosen: torch.Tensor | None
    """[tokens, k]: indices of experts; None if the router does not return them."""
    logits: torch.Tensor | None
    """[tokens, experts]; None if not needed."""
    tokens: int
    experts: int


class Router:
    """Balances the experts of a sharded model during training; see [Note: balance of experts].

    An `Update` calls it: `start_step` before the forwards of a step, `record_outputs` around each
    forward, `auxiliary_loss` after it, and `finish_step` after the optimizer's step. Creating it
    registers forward hooks on the routers.
    """

    def __init__(self, sharded: Sharded, plan: RouterPlan, rate: float = 0.0) -> None:
        self.plan = plan
        self._rate = rate
        self._ranks = sharded.mesh.loss
        self._experts_per_token = experts_per_token(sharded.model) or 1
        self._is_recording = False
        self._is_real = torch.empty(0)  # of each token of the micro-batch: it is not padding
        self._tokens = torch.ones(())  # number of real tokens in the step
        # Auxiliary losses and loads of the micro-batches of this step.
        self._aux = list[torch.Tensor]()
        self._loads = list[torch.Tensor]()
        self._experts: dict[str, int] = {}  # number of experts of each router that ran
        self.is_next_step_logged = True
        """True if the loads of the next step are logged; equal on every rank. Loads that are
        neither logged nor used for balancing are not counted, which saves about 12 small kernels
        per layer and micro-batch."""
        # All routers share one hook per index, and their modules store the outputs. With a hook per
        # router, each compiled layer would get its own graph. The Dynamo setting lets the hook
        # record nothing during recomputation, as intended; without it, compilation would break at
        # the hook.
        hooks = {index: partial(self._record_output, index) for _, index in plan.routers.values()}
        for router, index in plan.routers.values():
            router.register_forward_hook(hooks[index])
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True

    @property
    def changes_training(self) -> bool:
        """True if a loss or a bias balances the experts; False if loads are only logged."""
        return self.plan.loss is not None or bool(self.plan.biases)

    def start_step(self, tokens: torch.Tensor) -> None:
        """Start a step, and drop the loads of the previous one.

        Args:
            tokens: number of tokens of the step on all ranks without padding, 0-d.
        """
        self._tokens = tokens.clamp(min=1).float()
        self._aux, self._loads = [], []

    @contextlib.contextmanager
    def record_outputs(self, batch: Batch) -> Iterator[None]:
        """Within the block, record the routers' outputs in forwards with gradients enabled.

        Outputs of an earlier micro-batch are dropped first.

        Args:
            batch: the micro-batch, which tells padding from real tokens.
        """
        self._is_real = batch.trained.real.flatten()
        self._is_recording = True
        for router, _ in self.plan.routers.values():
            vars(router).pop(_RECORDED, None)
        try:
            yield
        finally:
            self._is_recording = False

    def _record_output(self, index: int, router: nn.Module, _: Any, output: Any) -> None:
        """Forward hook: add a router's output to the attribute `_RECORDED` of its module.

        Does nothing outside of `record_outputs`, or without gradients.
        """
        # Without gradients the loss only tries the model, or the forward is an evaluation.
        if not self._is_recording or not torch.is_grad_enabled():
            return
        outputs = output if isinstance(output, tuple) else (output,)
        logits, chosen = outputs[index], None
        for tensor in outputs:
            if torch.is_tensor(tensor) and tensor.dtype == torch.int64 and tensor.ndim > 1:
                chosen = tensor
        needed_logits = logits if chosen is None or self.plan.loss is not None else None
        *tokens, experts = logits.shape
        answer = _RouterOutput(chosen, needed_logits, math.prod(tokens), experts)
        # A layer that runs several times has several answers.
        earlier = getattr(router, _RECORDED, ())
        setattr(router, _RECORDED, (*earlier, answer))

    def auxiliary_loss(self) -> torch.Tensor | float:
        """Compute this rank's part of the auxiliary loss, and count the loads of the experts.

        Both come from the recorded outputs, which are removed. Collective if the plan has a loss.

        Returns:
            The loss times its coefficient, 0-d; the parts of ranks and micro-batches add up to the
            loss of the step. 0.0 if the plan has no loss.

        Raises:
            TrainingError: a router did not process each token of the micro-batch, or layers with
                different numbers of experts are pooled.
        """
        is_real, by_router = self._is_real, self._take_outputs()
        if not (self.changes_training or self.is_next_step_logged):
            by_router = {}
        layers = [*by_router.values()]
        self._experts = {name: answers[0].experts for name, answers in by_router.items()}
        if not layers:
            return 0.0
        loads = torch.cat([self._count_load(answers, is_real) for answers in layers])
        if self.plan.loss is None:
            self._loads.append(loads)
            return 0.0
        counts = self._ranks.sum(torch.cat([loads, is_real.sum()[None]]))
        self._loads.append(counts[:-1])
        sizes = [*self._experts.values()]
        shares = (counts[:-1] / counts[-1].clamp(min=1)).split(sizes)
        means = [_sum_probabilities(answers, is_real) / self._tokens for answers in layers]
        calls = [len(answers) for answers in layers]  # more than 1 if a layer runs several times
        if self.plan.loss == "pooled":
            if len({*sizes}) > 1:
                raise TrainingError(
                    f"train.router_aux_loss pooled: layers have {sorted({*sizes})} experts, which "
                    "cannot be pooled; set layer"
                )
            shares, means = ([torch.stack([*x]).sum(0)] for x in (shares, means))
            calls = [sum(calls)]
        terms = [
            len(p) * (f * p).sum() / n**2 for f, p, n in zip(shares, means, calls, strict=True)
        ]
        aux = torch.stack(terms).mean()
        self._aux.append(aux.detach())
        return self.plan.coefficient * aux

    def _take_outputs(self) -> dict[str, tuple[_RouterOutput, ...]]:
        """Remove the recorded outputs from the routers, and map names of complete routers to them.

        A router is complete if it processed each token of the micro-batch. A router of an image
        tower, for example, is not.

        Raises:
            TrainingError: a router is not complete although balancing changes the training.
        """
        recorded = {n: vars(m).pop(_RECORDED, ()) for n, (m, _) in self.plan.routers.items()}
        recorded = {name: answers for name, answers in recorded.items() if answers}
        complete = {
            name: answers
            for name, answers in recorded.items()
            if {answer.tokens for answer in answers} == {len(self._is_real)}
        }
        if self.changes_training and (not complete or complete.keys() != recorded.keys()):
            raise TrainingError(
                f"{len(recorded) - len(complete)} of {len(recorded)} routers processed other "
                "tokens than those of the micro-batch, so experts cannot be balanced; set "
                "train.router_aux_loss: none and train.router_bias_update_rate: 0"
            )
        return complete

    def _count_load(
        self, answers: tuple[_RouterOutput, ...], is_real: torch.Tensor
    ) -> torch.Tensor:
        """Count how many tokens without padding a router sent to each expert: int64 [experts].

        Args:
            answers: the router's outputs; several if its layer runs several times.
            is_real: bool [tokens], False for padding.
        """
        load = torch.zeros(answers[0].experts, dtype=torch.int64, device=is_real.device)
        for answer in answers:
            chosen = answer.chosen
            if chosen is None and answer.logits is not None:
                chosen = answer.logits.topk(self._experts_per_token, -1).indices
            assert chosen is not None
            increments = is_real[:, None].expand(-1, chosen.shape[-1])
            load.scatter_add_(0, chosen.flatten(), increments.flatten().long())
        return load

    @torch.no_grad()
    def finish_step(self, is_applied: torch.Tensor) -> Balance | None:
        """Update the biases by the loads of the step, and measure the balance. Collective.

        Args:
            is_applied: 0-d bool. False if the step was skipped; then biases do not change.

        Returns:
            How evenly the experts were loaded; None if no loads were counted.
        """
        if not self._experts:
            return None
        total, aux = torch.stack(self._loads).sum(0), None
        if self.plan.loss is None:
            self._ranks.sum(total)
        else:
            aux = self._ranks.sum(torch.stack(self._aux).sum())
        parts = total.double().split([*self._experts.values()])
        loads = dict(zip(self._experts, parts, strict=True))
        for name, bias in self.plan.biases.items():
            change = self._rate * (loads[name].mean() - loads[name]).sign()
            change = change.where(is_applied, 0.0).view(bias.shape).to(bias.dtype)
            local_bias = local_tensor(bias)
            local_bias += slice_like(change, bias).to(local_bias.device)
        ratios = (load.max() / load.mean().clamp(min=1e-9) for load in loads.values())
        return Balance(aux, torch.stack([*ratios]))


def _sum_probabilities(answers: tuple[_RouterOutput, ...], is_real: torch.Tensor) -> torch.Tensor:
    """Sum each expert's probability over the tokens without padding: float32 [experts].

    Args:
        answers: the router's outputs; several if its layer runs several times.
        is_real: bool [tokens], False for padding.
    """

    def sum_of_probabilities(logits: torch.Tensor) -> torch.Tensor:
        return is_real.float() @ logits.flatten(0, -2).softmax(-1, dtype=torch.float32)

    # The backward computes the probabilities again. Storing them would take twice the logits.
    sums = [
        checkpoint(
            sum_of_probabilities, answer.logits, use_reentrant=False, preserve_rng_state=False
        )
        for answer in answers
        if answer.logits is not None
    ]
    return torch.stack(sums).sum(0)


def build_router(sharded: Sharded, cfg: RunConfig) -> Router | None:
    """Build the `Router` of a model before its first step; None if `plan_router` returns None.

    The model is resharded first. The errors are those of `plan_router`.
    """
    reshard(sharded.model)
    plan = plan_router(sharded.model, cfg)
    return None if plan is None else Router(sharded, plan, cfg.train.router_bias_update_rate)
