"""Balance of experts: the routers' auxiliary loss, DeepSeek's bias, and what is logged of loads.

[Note: balance of experts] A router gives each token logits over the E experts of its layer and
sends it to the k largest. f_e is the share of tokens sent to expert e (they sum to k), P_e the mean
of its softmax probability. Two ways keep loads even:

    the auxiliary loss   c * E * sum_e f_e P_e, with the c of config.json: Switch Transformers
                         (Fedus et al. 2022, arXiv:2101.03961, eq. 4). `pooled`: f and P of all
                         layers together, as transformers has it; `layer`: the mean over layers,
                         where no layer makes up for another.
    the bias             b_e += rate * sign(mean load - load_e) after each step, of the bias that
                         decides who is chosen and weights nothing: DeepSeek-V3 (2024,
                         arXiv:2412.19437, section 2.1.2), Wang et al. 2024 (arXiv:2408.15664).

Both are of the global batch, which lets a rank's own documents be of one kind (Qiu et al. 2025,
arXiv:2501.11873). P is linear in tokens: what ranks and micro-batches give is added up. f has no
gradient; its counts are added up over the ranks, of each micro-batch by itself: those of later ones
are not known yet. The bias sees the loads of the whole step. Tokens that fill rows up are routed
too, and count nowhere.

What a router answers is noted by a hook in the forward of an `Update`, without an operation, so
that a recomputation, where it notes nothing, runs the same ones.
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
from toolkit.formats import local_tensor, nested_items, part_of, reshard
from toolkit.models.causal_lm import requests_router_loss
from toolkit.models.layers import active_expert_shares, expert_counts, experts_per_token
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of
from toolkit.sharding.fsdp import Sharded

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # JetMoe's, DBRX's
_BIASES = ("e_score_correction_bias", "expert_bias")  # buffers, or parameters that are not trained
_PROBABILITIES = ("Gemma4TextRouter",)  # hand out those in place of logits
_NOTED = "_toolkit_answers"  # of a router, in this forward
_OF_KEYS = ("DogeCDMoE",)  # whose logits are of halves of an expert's number


@dataclass(frozen=True)
class Balance:
    """How even the loads of a step were; on the device."""

    aux: torch.Tensor | None
    """0-d: the auxiliary loss of the global batch, without its coefficient; None: there is none."""
    loads: torch.Tensor
    """[layers]: the largest load of an expert over the mean; 1 is even."""

    def line(self) -> dict[str, Any]:
        """Return what a line of metrics has of it. Waits for the device."""
        loads = {f"router_load/{i}": load for i, load in enumerate(self.loads.tolist())}
        aux = {} if self.aux is None else {"router_aux": float(self.aux)}
        return aux | {"router_load": max(loads.values())} | loads


@dataclass(frozen=True)
class RouterPlan:
    """What is done for the balance of a model's experts, and the line that says it."""

    routers: dict[str, tuple[nn.Module, int]]
    """Name -> a router, and which of its outputs are logits."""
    loss: Literal["pooled", "layer"] | None
    coefficient: float
    biases: dict[str, torch.Tensor]
    """Name of a router -> the bias that is moved, empty where it stays."""
    line: str


def plan_router(model: nn.Module, cfg: RunConfig) -> RouterPlan | None:
    """Return what `cfg` asks for the experts of `model`, on meta or not; None of a dense model.

    ModelError: a loss is asked for, and transformers hands out no logits of its routers, or
    config.json has no coefficient; or a bias is to be moved that is not there, or is not to be.
    ConfigError: one is to be moved under adapters, whose base stays as it is.
    """
    base, train = base_of(model), cfg.train
    routers = _routers(base)
    asked, rate = train.router_aux_loss, train.router_bias_update_rate
    if rate and cfg.adapters is not None:
        raise ConfigError(
            "train.router_bias_update_rate with lora.r: the bias is of the base, which an adapter "
            "leaves as it is; leave it out"
        )
    asks, mixture = requests_router_loss(base), routers or active_expert_shares(base)
    if not mixture and not asks and asked in ("auto", "none") and not rate:
        return None
    own = base.config.get_text_config().to_dict()
    settings = dict(nested_items(own)) | own
    coefficient = next((settings[n] for n in _COEFFICIENTS if settings.get(n)), 0.0)
    asks = asks and coefficient > 0
    missing = _missing(base, routers)
    if asked in ("pooled", "layer"):
        if not missing and not coefficient > 0:
            missing = f"config.json of {module_class_name(base)} has no {_COEFFICIENTS[0]} above 0"
        if missing:
            raise ModelError(f"train.router_aux_loss {asked}: {missing}; set it to none")
    biases = _biases(base, routers)
    if rate:
        _check_biases(base, biases)
    loss: Any = "pooled" if asked == "auto" else asked
    if asked == "none" or (asked == "auto" and (missing or not asks)):
        loss = None
    if loss == "pooled":
        _check_pooled(routers)
    line = "router     " + _loss_text(train, loss, coefficient, asks, missing)
    if biases:
        moves = f"moves by {rate:g} after each step" if rate else "stays as it is"
        line += f"; the bias of experts {moves} (train.router_bias_update_rate)"
    return RouterPlan(routers, loss, coefficient, biases if rate else {}, line)


def _routers(base: PreTrainedModel) -> dict[str, tuple[nn.Module, int]]:
    """Return name -> a router, and where its logits are in what it returns, as transformers knows
    them to hand them out.
    """
    named = dict(base.named_modules())
    inside = [m for m in named.values() if isinstance(m, PreTrainedModel)]
    found: dict[str, tuple[nn.Module, int]] = {}
    for recorded in [getattr(m, "_can_record_outputs", None) or {} for m in inside]:
        specs = recorded.get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            kind = getattr(spec, "target_class", spec)
            index = getattr(spec, "index", 1)  # what a bare class stands for
            if isinstance(kind, type) and kind.__name__ not in _OF_KEYS:
                found |= {n: (m, index) for n, m in named.items() if isinstance(m, kind)}
    return found


def _check_pooled(routers: dict[str, tuple[nn.Module, int]]) -> None:
    """Raise a ModelError if layers have unequal numbers of experts, as far as routers say them."""
    counts = {name: _number_of_experts(router) for name, (router, _) in routers.items()}
    numbers = sorted({count for count in counts.values() if count is not None})
    if len(numbers) > 1:
        raise ModelError(
            f"train.router_aux_loss pooled: layers have {numbers} experts, which cannot be pooled; "
            "set layer or none"
        )


def _number_of_experts(router: nn.Module) -> int | None:
    """Return how many experts a router chooses from, by its weight [experts, width] or its
    attributes; None if neither says it.
    """
    weight = getattr(router, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2:
        return weight.shape[0]
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((n for name in names if type(n := getattr(router, name, None)) is int), None)


def _missing(base: PreTrainedModel, routers: dict[str, tuple[nn.Module, int]]) -> str:
    """Return why there are no logits of routers, empty where there are."""
    if not routers:
        return f"transformers hands out no logits of the experts of {module_class_name(base)}"
    kinds = {kind.__name__ for router, _ in routers.values() for kind in type(router).__mro__}
    if given := kinds.intersection(_PROBABILITIES):
        return f"{given.pop()} of {module_class_name(base)} hands out probabilities, not logits"
    return ""


def _loss_text(
    train: TrainConfig, loss: str | None, coefficient: float, asks: bool, missing: str
) -> str:
    asked = f"train.router_aux_loss {train.router_aux_loss}"
    if loss is not None:
        kind = "pooled over layers" if loss == "pooled" else "of each layer"
        return f"auxiliary loss {kind}, coefficient {coefficient:g} of config.json ({asked})"
    if missing:
        return f"no auxiliary loss ({missing})"
    if not coefficient > 0:
        return f"no auxiliary loss ({asked}; config.json has no {_COEFFICIENTS[0]} above 0)"
    why = "" if asks else ": config.json does not ask for it, pooled or layer turn it on"
    return f"no auxiliary loss ({asked}{why}; its coefficient is {coefficient:g})"


def _biases(
    base: PreTrainedModel, routers: dict[str, tuple[nn.Module, int]]
) -> dict[str, torch.Tensor]:
    """Return the biases that decide who is chosen, by the router that each belongs to: the one in
    the innermost module around both.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in [*base.named_buffers(), *base.named_parameters()]:
        around, _, leaf = name.rpartition(".")
        while leaf in _BIASES and around:
            near = [n for n in routers if n == around or n.startswith(around + ".")]
            if near:
                found[near[0]] = tensor
                break
            around = around.rpartition(".")[0]
    return found


def _check_biases(base: PreTrainedModel, biases: dict[str, torch.Tensor]) -> None:
    what, why = "train.router_bias_update_rate", ""
    if not biases:
        why = (
            f"{module_class_name(base)} has no bias of experts ({', '.join(_BIASES)}); leave it out"
        )
    for name, bias in biases.items():
        if bias.numel() not in expert_counts(base):
            why = (
                f"the bias of {name} has {bias.numel()} values, which is no number of experts in "
                "config.json: it steers more than their loads; leave it out"
            )
        elif bias.dtype != torch.float32:
            why = (
                f"the bias of {name} is stored in {str(bias.dtype).removeprefix('torch.')}, in "
                "which small steps are lost; set model.dtype: float32"
            )
    if why:
        raise ModelError(f"{what}: {why}")


@dataclass(frozen=True)
class _Answer:
    """What a router answered in a forward: [tokens, k], [tokens, experts]."""

    chosen: torch.Tensor | None
    logits: torch.Tensor | None
    tokens: int
    experts: int


class Router:
    """Watches the routers of a sharded model while it trains; see [Note: balance of experts].

    An `Update` calls it: `begin` before the forwards of a step, `watching` around each of them,
    `part` after it, and `step` after the optimizer's.
    """

    def __init__(self, sharded: Sharded, plan: RouterPlan, rate: float = 0.0) -> None:
        self.plan, self._rate, self._among = plan, rate, sharded.mesh.loss
        self._per_token = experts_per_token(sharded.model) or 1
        self._noting, self._real = False, torch.empty(0)
        self._tokens = torch.ones(())  # of the step
        self._aux, self._loads = list[torch.Tensor](), list[torch.Tensor]()  # of micro-batches
        self._experts: dict[str, int] = {}  # of each router that was asked
        self.logged = True
        """Whether the loads of the next step are logged. Loads that are neither logged nor change
        the training are not counted: about 12 small kernels a layer and micro-batch. The same on
        every rank."""
        # One hook for all, and what it notes kept by the module: else each compiled layer would
        # have a graph of its own. One that recomputes would break at the hook, if it did not get
        # leave to note nothing then, which is what is meant.
        hooks = {index: partial(self._note, index) for _, index in plan.routers.values()}
        for router, index in plan.routers.values():
            router.register_forward_hook(hooks[index])
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True

    @property
    def acts(self) -> bool:
        """Whether it changes what is trained, by a loss or a bias."""
        return self.plan.loss is not None or bool(self.plan.biases)

    def begin(self, tokens: torch.Tensor) -> None:
        """Begin a step of so many `tokens` on all ranks, without those that fill rows up."""
        self._tokens = tokens.clamp(min=1).float()
        self._aux, self._loads = [], []

    @contextlib.contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Note what routers answer inside, where there is a gradient to be."""
        self._real, self._noting = batch.trained.real.flatten(), True
        for router, _ in self.plan.routers.values():
            vars(router).pop(_NOTED, None)
        try:
            yield
        finally:
            self._noting = False

    def _note(self, index: int, router: nn.Module, _: Any, output: Any) -> None:
        if not self._noting or not torch.is_grad_enabled():  # or the loss tries the model
            return
        answers = output if isinstance(output, tuple) else (output,)
        logits, chosen = answers[index], None
        for answer in answers:
            if torch.is_tensor(answer) and answer.dtype == torch.int64 and answer.ndim > 1:
                chosen = answer
        kept = logits if chosen is None or self.plan.loss is not None else None
        *tokens, experts = logits.shape
        answer = _Answer(chosen, kept, math.prod(tokens), experts)
        before = getattr(router, _NOTED, ())  # where a layer is run several times
        setattr(router, _NOTED, (*before, answer))

    def part(self) -> torch.Tensor | float:
        """Return this rank's part of the loss of the micro-batch that was watched, with its
        coefficient; parts of ranks and micro-batches add up. Collective where there is a loss.
        """
        real, by_name = self._real, self._asked()
        if not (self.acts or self.logged):
            by_name = {}
        seen, self._experts = [*by_name.values()], {n: own[0].experts for n, own in by_name.items()}
        if not seen:
            return 0.0
        loads = torch.cat([self._load(own, real) for own in seen])
        if self.plan.loss is None:
            self._loads.append(loads)
            return 0.0
        counts = self._among.sum(torch.cat([loads, real.sum()[None]]))
        self._loads.append(counts[:-1])
        sizes = [*self._experts.values()]
        shares = (counts[:-1] / counts[-1].clamp(min=1)).split(sizes)
        means = [_probabilities(own, real) / self._tokens for own in seen]
        calls = [len(own) for own in seen]  # of a layer that is run several times
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

    def _asked(self) -> dict[str, tuple[_Answer, ...]]:
        """Return what the routers answered that were asked for every token of the micro-batch (one
        for images is not); TrainingError where something depends on another.
        """
        seen = {n: vars(m).pop(_NOTED, ()) for n, (m, _) in self.plan.routers.items()}
        asked = {name: own for name, own in seen.items() if own}
        found = {n: own for n, own in asked.items() if {a.tokens for a in own} == {len(self._real)}}
        if self.acts and (not found or found.keys() != asked.keys()):
            raise TrainingError(
                f"{len(asked) - len(found)} of {len(asked)} routers that were asked answered for "
                "other tokens than those of the micro-batch, so that experts cannot be balanced; "
                "set train.router_aux_loss: none and train.router_bias_update_rate: 0"
            )
        return found

    def _load(self, answers: tuple[_Answer, ...], real: torch.Tensor) -> torch.Tensor:
        """Return how many real tokens a layer sent to each expert, int64."""
        load = torch.zeros(answers[0].experts, dtype=torch.int64, device=real.device)
        for answer in answers:
            chosen = answer.chosen
            if chosen is None and answer.logits is not None:
                chosen = answer.logits.topk(self._per_token, -1).indices
            assert chosen is not None
            counted = real[:, None].expand(-1, chosen.shape[-1])
            load.scatter_add_(0, chosen.flatten(), counted.flatten().long())
        return load

    @torch.no_grad()
    def step(self, fine: torch.Tensor) -> Balance | None:
        """Move the biases by the loads of the step where it was `fine`, 0-d bool, and return how
        even they were, None where no router told. Collective.
        """
        if not self._experts:
            return None
        total, aux = torch.stack(self._loads).sum(0), None
        if self.plan.loss is None:
            self._among.sum(total)
        else:
            aux = self._among.sum(torch.stack(self._aux).sum())
        parts = total.double().split([*self._experts.values()])
        loads = dict(zip(self._experts, parts, strict=True))
        for name, bias in self.plan.biases.items():
            move = self._rate * (loads[name].mean() - loads[name]).sign()
            move = move.where(fine, 0.0).view(bias.shape).to(bias.dtype)
            own = local_tensor(bias)
            own += part_of(move, bias).to(own.device)
        even = (load.max() / load.mean().clamp(min=1e-9) for load in loads.values())
        return Balance(aux, torch.stack([*even]))


def _probabilities(answers: tuple[_Answer, ...], real: torch.Tensor) -> torch.Tensor:
    """Return the sum over real tokens of the probability of each expert, in fp32."""

    def sum_of_probabilities(logits: torch.Tensor) -> torch.Tensor:
        return real.float() @ logits.flatten(0, -2).softmax(-1, dtype=torch.float32)

    # The backward computes the probabilities again: kept, they would take twice the logits.
    sums = [
        checkpoint(
            sum_of_probabilities, answer.logits, use_reentrant=False, preserve_rng_state=False
        )
        for answer in answers
        if answer.logits is not None
    ]
    return torch.stack(sums).sum(0)


def build_router(sharded: Sharded, cfg: RunConfig) -> Router | None:
    """Return what watches the routers of a model, before its first step; None of a dense one."""
    reshard(sharded.model)
    plan = plan_router(sharded.model, cfg)
    return None if plan is None else Router(sharded, plan, cfg.train.router_bias_update_rate)
