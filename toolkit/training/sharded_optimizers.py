"""Optimizers whose step does not depend on the number of ranks: 8-bit AdamW, Adafactor, Muon.

[Note: full tensors] FSDP2 gives a rank some rows of each matrix. An optimizer that combines several
values must not treat these rows as the matrix, or its result and the state in its checkpoints would
depend on the number of ranks. Here, blocks of 8-bit state lie within a row, Adafactor's means are
summed over the ranks, and Muon gathers each matrix on one rank.

`init_state(parameter)` of each optimizer returns the state before the first step, sharded like the
parameter. A checkpoint is loaded into it.
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
BLOCK = 256  # values of 8-bit state that share a scale; fixed in bitsandbytes' kernels
# Values in one call of these kernels, whose index has 32 bits.
_MAX_CALL_VALUES = 2**30


class _AdamWWithSpecialGroups(torch.optim.AdamW):
    """Fused AdamW that updates parameter groups with `special: True` in another way.

    Subclasses implement that update in `init_special_state` and `step_special`.
    """

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        # The step count of a special group stays on the host, so that reading it does not wait.
        groups = [g | {"fused": False} if g["special"] else g for g in groups]
        super().__init__(groups, fused=True, **defaults)

    def init_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Create the state of a parameter before the first step, sharded like the parameter.

        The state is Adam's, or for parameters of special groups that of `init_special_state`.
        """
        special = (p for g in self.param_groups if g["special"] for p in g["params"])
        if not any(parameter is p for p in special):
            zeros = {n: torch.zeros_like(parameter.detach()) for n in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros(()), **zeros}
        return self.init_special_state(parameter)

    def init_special_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Create the state of a parameter in a special group. Subclasses implement it."""
        raise NotImplementedError

    def step_special(self, group: dict[str, Any]) -> None:
        """Do one optimizer step for the parameters of a special group. Subclasses implement it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step on all groups; see `torch.optim.Optimizer.step`."""
        groups = self.param_groups
        self.param_groups = [g for g in groups if not g["special"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["special"]:
                self.step_special(group)
        return loss


class AdamW8bit(_AdamWWithSpecialGroups):
    """AdamW with 8-bit moments, quantised in blocks (Dettmers et al. 2021, arXiv:2110.02861).

    The blocks lie within a row, so the result does not depend on sharding. The state takes 2 bytes
    per value and 8 bytes per block of 256 values, instead of 8 bytes per value. A kernel of
    bitsandbytes computes the update.
    """

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def init_special_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Create the 8-bit moments and their scales, one per block of 256 values, as zeros."""
        tail = parameter.shape[1:]
        codes = {n: _zeros_per_row(parameter, tail, torch.uint8) for n in ("exp_avg", "exp_avg_sq")}
        blocks = (tail.numel() // BLOCK,)
        scales = {f"{n}_scale": _zeros_per_row(parameter, blocks, torch.float32) for n in codes}
        return {"step": torch.zeros(()), **codes, **scales}

    def step_special(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient, and their 8-bit moments."""
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        for parameter in (p for p in group["params"] if p.grad is not None):
            state = self.state[parameter] = self.state[parameter] or self.init_state(parameter)
            state["step"] += 1
            tensors = [parameter.grad, parameter.detach(), *(state[n] for n in names)]
            local = [local_tensor(t) for t in tensors]
            if not local[0].numel():
                continue
            rows = max(1, _MAX_CALL_VALUES // parameter.shape[1:].numel())
            for chunks in zip(*(t.split(rows) for t in local), strict=True):
                self._update(group, int(state["step"]), *chunks)

    def _update(self, group: dict[str, Any], step: int, *tensors: torch.Tensor) -> None:
        """Update some rows of a parameter and its moments in place by one call of bitsandbytes.

        Args:
            group: the parameter group, with its hyperparameters.
            step: number of the step, counting from 1.
            tensors: the rows of six tensors: gradient, parameter, first moment, second moment,
                scales of the first, scales of the second.
        """
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


class Muon(_AdamWWithSpecialGroups):
    """Muon for matrices, which is momentum with an orthogonalised update; AdamW for the rest.

    The update is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Jordan et al.
    2024; Liu et al. 2025, arXiv:2502.16982), so learning rate and decay of AdamW can be used.

    A sharded matrix is orthogonalised on one rank. Its update is sent there and back in bfloat16,
    the dtype of the iteration, which takes 4 bytes per value. A 3-D parameter is a stack of
    matrices, which sharding does not split. The state is one moment.
    """

    def init_special_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Create the momentum as zeros, sharded like the parameter."""
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def step_special(self, group: dict[str, Any]) -> None:
        """Do one Muon step for the parameters of a group that have a gradient. Collective.

        Updates their momentum, orthogonalises the update and applies it with weight decay.
        """
        used = [p for p in group["params"] if p.grad is not None]
        updates: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in used:
            state = self.state[parameter] = self.state[parameter] or self.init_state(parameter)
            grad, momentum = (local_tensor(t) for t in (parameter.grad, state["momentum_buffer"]))
            momentum.lerp_(grad, 1 - _MOMENTUM)
            updates[parameter] = grad.lerp(momentum, _MOMENTUM).bfloat16()
        sharded = [p for p in used if p.ndim == 2 and isinstance(p, DTensor)]
        # Sorted, so that ranks work on matrices of similar size at the same time.
        sharded.sort(key=lambda p: -p.numel())
        ranks = sharded[0].device_mesh.size(-1) if sharded else 1
        for i in range(0, len(sharded), ranks):
            _orthogonalise_sharded(sharded[i : i + ranks], updates)
        for parameter in set(used).difference(sharded):
            update = updates[parameter]
            for matrix in update if update.ndim == 3 else update[None]:
                matrix.copy_(orthogonalise(matrix))
        for parameter in used:
            values = local_tensor(parameter.detach())
            values.mul_(1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            values.add_(updates[parameter], alpha=-group["lr"] * scale)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate the orthogonal matrix nearest to `matrix`, by torch.optim.Muon's iteration.

    The iteration runs in bfloat16.
    """
    iterate = torch_private("optim._muon", "_zeropower_via_newtonschulz")
    return iterate(matrix, *_NEWTON_SCHULZ)


def _orthogonalise_sharded(
    parameters: list[Any], updates: dict[nn.Parameter, torch.Tensor]
) -> None:
    """Orthogonalise the updates of sharded matrices in place, each on one rank.

    Collective, with two all-to-alls: rank r gathers the rows of matrix r, and sends the result
    back.

    Args:
        parameters: sharded matrices, at most as many as ranks.
        updates: parameter -> this rank's rows of its update.
    """
    mesh = parameters[0].device_mesh
    ranks, rank = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)

    def count_values(parameter: Any) -> list[int]:
        """Count the values of a matrix on each rank, as FSDP2 distributes rows."""
        rows, row_values = parameter.shape
        rows_per_rank = -(-rows // ranks)
        return [
            row_values * max(0, min(rows_per_rank, rows - r * rows_per_rank)) for r in range(ranks)
        ]

    def all_to_all(values: torch.Tensor, sizes: list[int], out_sizes: list[int]) -> torch.Tensor:
        out = values.new_empty(sum(out_sizes))
        group = mesh.get_group(mesh.ndim - 1)
        dist.all_to_all_single(out, values, out_sizes, sizes, group=group)
        return out

    # With offloading, shards are in host memory, which the device's group cannot send.
    parts = [updates[p].flatten().to(mesh.device_type) for p in parameters]
    local_sizes = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    has_matrix = rank < len(parameters)
    matrix_sizes = count_values(parameters[rank]) if has_matrix else [0] * ranks
    matrix = all_to_all(torch.cat(parts), local_sizes, matrix_sizes)
    if has_matrix:
        matrix = orthogonalise(matrix.view(parameters[rank].shape)).flatten()
    returned = all_to_all(matrix.contiguous(), matrix_sizes, local_sizes)
    for parameter, part in zip(parameters, returned.split(local_sizes[: len(parts)]), strict=True):
        updates[parameter].copy_(part.view_as(updates[parameter]))


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), exact for sharded tensors.

    The state of a matrix is one value per row and per column. The learning rate is relative to the
    root mean square of a parameter; 1e-2 is usual. A step needs two all-reduces, and overwrites the
    gradients.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def init_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Create the state of a parameter before the first step, sharded like the parameter.

        It is a variance per value, or for matrices one per row and one per column.
        """
        shape, dtype = parameter.shape, parameter.dtype
        step = {"step": torch.zeros(())}
        if parameter.ndim < 2:
            return step | {"variance": torch.zeros_like(parameter.detach())}
        if parameter.ndim == 2:
            # Every rank stores the values of all columns.
            columns = local_tensor(parameter.detach()).new_zeros(1, shape[1])
        else:
            columns = _zeros_per_row(parameter, (*shape[1:-2], 1, shape[-1]), dtype)
        rows = _zeros_per_row(parameter, (*shape[1:-1], 1), dtype)
        return step | {"row_var": rows, "col_var": columns}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one optimizer step, and overwrite the gradients. Collective.

        Raises:
            NotImplementedError: `closure` is given.
        """
        if closure is not None:
            raise NotImplementedError("Adafactor takes no closure")
        pairs = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        # Sums over the ranks: squares of parameters, columns and rows; and squares of updates.
        first, second = _PooledSums(), _PooledSums()
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
            # From here on, `grad` holds the update.
            grad.mul_(estimate.clamp_(min=epsilon**2).rsqrt_())
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


class _PooledSums(dict[nn.Parameter, list[torch.Tensor]]):
    """A dict of parameter -> local tensors, which one all-reduce sums over the ranks."""

    def reduce(self) -> None:
        """Sum the tensors of sharded parameters over the ranks in place. Collective.

        Tensors of unsharded parameters are not changed.
        """
        # Divided experts have another mesh than other parameters, with two axes to sum over.
        by_layout: dict[tuple, list[torch.Tensor]] = {}
        for p in self:
            if isinstance(p, DTensor):
                axes = tuple(i for i, kind in enumerate(p.placements) if not kind.is_replicate())
                by_layout.setdefault((p.device_mesh, axes), []).extend(self[p])
        for (mesh, axes), parts in by_layout.items():
            flat = torch.cat([part.float().flatten() for part in parts]).to(mesh.device_type)
            for axis in axes:
                dist.all_reduce(flat, group=mesh.get_group(axis))
            for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(total.view_as(part))


def _zeros_per_row(
    parameter: torch.Tensor, tail: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Create zeros of shape [rows, *tail] for the rows of a parameter, sharded like it."""
    local = local_tensor(parameter.detach())
    zeros = local.new_zeros(local.shape[0], *tail, dtype=dtype)
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
    # `from_local` moves offloaded zeros out of host memory; this keeps them there.
    return like_dtensor(like, zeros)
