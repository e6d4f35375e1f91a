"""Optimizers whose step does not depend on the number of ranks: 8-bit AdamW, Adafactor, Muon.

[Note: whole tensors] FSDP2 gives a rank some rows of each matrix. An optimizer that computes over
more than one value at a time must not take those for the matrix: its result, and its state in a
checkpoint, would be another on each number of ranks. Here blocks of 8-bit state lie within a row,
Adafactor's means are summed over the ranks, and Muon brings each matrix together on one rank.

`init_state(parameter)` of each is the state before the first step, laid out as it is sharded; a
checkpoint is read into it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.formats import like_dtensor, local_tensor, torch_private
from toolkit.models.packed_linear import import_bitsandbytes

_MOMENTUM = 0.95  # Muon's, with Nesterov's correction
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315), 5, 1e-7)  # coefficients, steps, epsilon
BLOCK = 256  # values of 8-bit state that share a scale: bitsandbytes' kernels know no other number
_AT_ONCE = 2**30  # values that one call of those kernels is given; they count in 32 bits


class _PartlyAdamW(torch.optim.AdamW):
    """Fused AdamW, but for the groups with `own: True`, which `step_own` steps."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        # The step count of an own group stays on the host, where it is read without a wait.
        groups = [g | {"fused": False} if g["own"] else g for g in groups]
        super().__init__(groups, fused=True, **defaults)

    def init_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if not any(parameter is p for g in self.param_groups if g["own"] for p in g["params"]):
            zeros = {n: torch.zeros_like(parameter.detach()) for n in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros(()), **zeros}
        return self.init_own(parameter)

    def init_own(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def step_own(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [g for g in groups if not g["own"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["own"]:
                self.step_own(group)
        return loss


class AdamW8bit(_PartlyAdamW):
    """AdamW with moments of 8 bits in blocks of a row (Dettmers et al. 2021, arXiv:2110.02861).

    2 bytes a value and 8 a block instead of 8 a value. The update is bitsandbytes' own kernel.
    """

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def init_own(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        tail = parameter.shape[1:]
        codes = {n: _rows_like(parameter, tail, torch.uint8) for n in ("exp_avg", "exp_avg_sq")}
        blocks = (tail.numel() // BLOCK,)
        scales = {f"{n}_scale": _rows_like(parameter, blocks, torch.float32) for n in codes}
        return {"step": torch.zeros(()), **codes, **scales}

    def step_own(self, group: dict[str, Any]) -> None:
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = self.state[parameter] = self.state[parameter] or self.init_state(parameter)
            state["step"] += 1
            held = [parameter.grad, parameter.detach(), *(state[n] for n in names)]
            parts = [local_tensor(t) for t in held]
            if not parts[0].numel():
                continue
            rows = max(1, _AT_ONCE // parameter.shape[1:].numel())
            for some in zip(*(t.split(rows) for t in parts), strict=True):
                self._update(group, int(state["step"]), *some)

    def _update(self, group: dict[str, Any], step: int, *tensors: torch.Tensor) -> None:
        grad, values = tensors[0].reshape(-1), tensors[1].view(-1)
        first, second, first_scale, second_scale = (t.view(-1) for t in tensors[2:])
        library, (beta1, beta2) = (
            import_bitsandbytes("optim.optim: adamw_8bit").functional,
            group["betas"],
        )
        if values.device not in self._maps:
            maps = [library.create_dynamic_map(signed=s).to(values.device) for s in (True, False)]
            self._maps[values.device] = maps[0], maps[1]
        signed, unsigned = self._maps[values.device]
        library.optimizer_update_8bit_blockwise(
            "adam", grad, values, first, second, beta1, beta2, 0.0, 0.0, group["eps"], step,
            group["lr"], signed, unsigned, first_scale, second_scale, group["weight_decay"],
        )  # fmt: skip


class Muon(_PartlyAdamW):
    """Momentum whose update is made orthogonal, of whole matrices; AdamW for the rest.

    As torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Jordan et al. 2024; Liu et al. 2025,
    arXiv:2502.16982), so that learning rate and decay are AdamW's. Each matrix is orthogonalised by
    one rank: its update travels there and back in the bfloat16 of the iteration, 4 bytes a value.
    A 3-D parameter is a stack of matrices, which sharding does not cut. State: one moment.
    """

    def init_own(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def step_own(self, group: dict[str, Any]) -> None:
        used = [p for p in group["params"] if p.grad is not None]
        updates: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in used:
            state = self.state[parameter] = self.state[parameter] or self.init_state(parameter)
            grad, momentum = (local_tensor(t) for t in (parameter.grad, state["momentum_buffer"]))
            momentum.lerp_(grad, 1 - _MOMENTUM)
            updates[parameter] = grad.lerp(momentum, _MOMENTUM).bfloat16()
        apart = [p for p in used if p.ndim == 2 and isinstance(p, DTensor)]
        # Of about one size, those that are worked on at the same time.
        apart.sort(key=lambda p: -p.numel())
        ranks = apart[0].device_mesh.size(-1) if apart else 1
        for i in range(0, len(apart), ranks):
            _orthogonalise_together(apart[i : i + ranks], updates)
        for parameter in set(used).difference(apart):
            part = updates[parameter]
            for matrix in part if part.ndim == 3 else part[None]:  # in place
                matrix.copy_(orthogonalise(matrix))
        for parameter in used:
            values = local_tensor(parameter.detach())
            values.mul_(1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            values.add_(updates[parameter], alpha=-group["lr"] * scale)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Return the orthogonal matrix near `matrix`, by torch.optim.Muon's iteration in bfloat16."""
    iterate = torch_private("optim._muon", "_zeropower_via_newtonschulz")
    return iterate(matrix, *_NEWTON_SCHULZ)


def _orthogonalise_together(
    parameters: list[Any], updates: dict[nn.Parameter, torch.Tensor]
) -> None:
    """Orthogonalise updates in place, of at most one sharded matrix a rank. Two exchanges."""
    mesh = parameters[0].device_mesh
    ranks, me = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)

    def sizes(parameter: Any) -> list[int]:
        """Return how many values of it each rank holds, as FSDP2 cuts rows."""
        rows, row = parameter.shape
        each = -(-rows // ranks)
        return [row * max(0, min(each, rows - r * each)) for r in range(ranks)]

    def exchange(values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = values.new_empty(sum(received))
        group = mesh.get_group(mesh.ndim - 1)
        dist.all_to_all_single(out, values, received, sent, group=group)
        return out

    # Under offload shards are in host memory, which the group of the device cannot send.
    parts = [updates[p].flatten().to(mesh.device_type) for p in parameters]
    mine = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    whole = sizes(parameters[me]) if me < len(parameters) else [0] * ranks
    matrix = exchange(torch.cat(parts), mine, whole)
    if me < len(parameters):
        matrix = orthogonalise(matrix.view(parameters[me].shape)).flatten()
    back = exchange(matrix.contiguous(), whole, mine).split(mine[: len(parts)])
    for parameter, part in zip(parameters, back, strict=True):
        updates[parameter].copy_(part.view_as(updates[parameter]))


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), over whole tensors.

    State: a value a row and a column of each matrix. The learning rate is relative to the size of a
    parameter: 1e-2 is usual. A step sums over the ranks twice, and leaves gradients changed.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def init_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        shape, dtype = parameter.shape, parameter.dtype
        step = {"step": torch.zeros(())}
        if parameter.ndim < 2:
            return step | {"variance": torch.zeros_like(parameter.detach())}
        if parameter.ndim == 2:  # every rank has all columns
            columns = local_tensor(parameter.detach()).new_zeros(1, shape[1])
        else:
            columns = _rows_like(parameter, (*shape[1:-2], 1, shape[-1]), dtype)
        rows = _rows_like(parameter, (*shape[1:-1], 1), dtype)
        return step | {"row_var": rows, "col_var": columns}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("Adafactor takes no closure")
        pairs = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        first, second = _Sums(), _Sums()
        for _, parameter in pairs:
            state = self.state[parameter] = self.state[parameter] or self.init_state(parameter)
            state["step"] += 1
            forget = float(state["step"]) ** -0.8
            grad = local_tensor(parameter.grad)
            square, columns = local_tensor(parameter.detach()).square().sum(), grad.new_empty(0)
            if parameter.ndim < 2:
                local_tensor(state["variance"]).lerp_(grad.square(), forget)
                rows = grad.new_empty(0)
            else:
                means = grad.square().mean(-1, keepdim=True)
                rows = local_tensor(state["row_var"]).lerp_(means, forget)
                columns = grad.square().sum(-2, keepdim=True)
            first[parameter] = [square]
            if parameter.ndim == 2:
                first[parameter] += [columns, rows.sum(-2, keepdim=True)]
            elif parameter.ndim > 2:
                columns.div_(parameter.shape[-2])
                local_tensor(state["col_var"]).lerp_(columns, forget)
        first.reduce()
        for _, parameter in pairs:
            state, grad = self.state[parameter], local_tensor(parameter.grad)
            forget = float(state["step"]) ** -0.8
            epsilon = torch.finfo(parameter.dtype).eps
            if parameter.ndim < 2:
                estimate = local_tensor(state["variance"]).clone()
            else:
                rows, columns = (local_tensor(state[n]) for n in ("row_var", "col_var"))
                mean = rows.mean(-2, keepdim=True)
                if parameter.ndim == 2:
                    _, total, mean = first[parameter]
                    columns.lerp_(total / parameter.shape[0], forget)
                    mean = mean / parameter.shape[0]
                estimate = (rows @ columns).div_(mean.clamp(min=epsilon))
            grad.mul_(estimate.clamp_(min=epsilon**2).rsqrt_())  # the update, from here on
            second[parameter] = [grad.square().sum()]
        second.reduce()
        for group, parameter in pairs:
            values, update = local_tensor(parameter.detach()), local_tensor(parameter.grad)
            step, root = float(self.state[parameter]["step"]), math.sqrt(parameter.numel())
            size = (first[parameter][0].sqrt() / root).clamp(min=1e-3)
            clipped = (second[parameter][0].sqrt() / root).clamp(min=1.0)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.addcmul_(update, -min(group["lr"], step**-0.5) * size / clipped)
        return None


class _Sums(dict[nn.Parameter, list[torch.Tensor]]):
    """Tensors of several parameters, summed over the ranks that share them in one all-reduce."""

    def reduce(self) -> None:
        sharded = [p for p in self if isinstance(p, DTensor)]
        if not sharded:
            return
        mesh = sharded[0].device_mesh
        parts = [part for p in sharded for part in self[p]]
        flat = torch.cat([part.float().flatten() for part in parts]).to(mesh.device_type)
        dist.all_reduce(flat, group=mesh.get_group(mesh.ndim - 1))
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))


def _rows_like(parameter: torch.Tensor, tail: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros [rows of `parameter`, *tail], sharded as it is."""
    own = local_tensor(parameter.detach())
    zeros = own.new_zeros(own.shape[0], *tail, dtype=dtype)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.empty(parameter.shape[0], *tail, device="meta")
    like = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape.shape,
        stride=shape.stride(),
    )
    return like_dtensor(like, zeros)  # which `from_local` moves out of host memory
