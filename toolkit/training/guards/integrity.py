"""Weights, optimizer state and position that are not what they were left as, or differ on ranks.

[Note: integrity] Compared are sums of a tensor's bits, taken as integers that wrap around, which
any single changed bit changes: of what is at rest, from right after a step of the optimizer to
right before the next; of what is never trained, with the start of the run; of copies (what is not
sharded, buffers that are saved too, and shards of HSDP's replicas), with other ranks. So are the
step, the position in the data and the schedule. docs/observing.md says what is not found.

The first is summed around the optimizer's step, in torch's hooks, on the device, and nothing waits
for it. It is read, and the others are made, where a line of metrics is due and before anything is
saved: each rank brings a few numbers, and only where they do not fit tensors are named.
"""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.errors import TrainingError
from toolkit.formats import local_tensor, reshard
from toolkit.formats.bit_sums import bit_sums
from toolkit.models.peft_model import persistent_buffers
from toolkit.training.train_state import TrainState

Values = list[tuple[list[str], torch.Tensor]]  # on each device: names, and a value for each
_NAMED = 3  # tensors of a rank
_SMALL = 2**16  # bytes: a call costs more than reading them
_COUNTS = "the optimizer's step counts"
_ADVICE = (
    "Nothing of it is saved: the newest checkpoint is from before. Memory, a device or a driver of "
    "that machine is at fault; start the same command again, without it where it comes back"
)
_APART = (
    "Nothing of it is saved: the newest checkpoint is from before. Does the recipe move them on "
    "some ranks only? Else start the same command again"
)


class Integrity:
    """Checks the state of a run against itself and against other ranks'; see [Note: integrity].

    Args:
        state: a `TrainState` with model and optimizer, before the first step of this start.
        every: steps from one check at rest to the next.
        moved: parameters that something else than the optimizer changes.
    """

    def __init__(
        self, state: TrainState, every: int = 1, moved: Iterable[torch.Tensor] = ()
    ) -> None:
        reshard(state.model)
        self._moved = {id(p) for p in moved}
        self._state, self._parameters = state, dict(state.model.named_parameters())
        self._buffers = persistent_buffers(state.model)
        for prefix, module in state.model.named_modules():
            if getattr(module, "track_running_stats", False):  # of a rank's own samples
                for name, _ in module.named_buffers(prefix, recurse=False):
                    self._buffers.pop(name, None)
        self._every, self._done = every, state.step
        self._start = _sums_of(self._frozen())
        # Of weights and the optimizer's state since its last step, where a check is due.
        self._open: tuple[int, list[Values]] | None = None
        self._unread = list[tuple[str, Values]]()  # when; whether it differs, not looked at yet
        self._copies, self._sharded = self._start, set[str]()  # of the last look
        state.required_optimizer.register_step_pre_hook(lambda *_: self._stepping())
        state.required_optimizer.register_step_post_hook(lambda *_: self._stepped())

    def take(self, step: int) -> None:
        """Note that `step` is done."""
        self._done = step

    def _stepping(self) -> None:
        """Compare what the optimizer has left with what it finds; does not wait."""
        if self._open is not None:
            self._compare(self._at_rest())
            self._open = None

    def _stepped(self) -> None:
        """Sum what the optimizer has written, where a check is due; does not wait."""
        step = self._done + 1
        if step % self._every == 0:
            self._open = step, self._at_rest()

    def _at_rest(self) -> list[Values]:
        return [_sums_of(self._weights()), _sums_of(self._optimizer_state())]

    def _compare(self, now: list[Values]) -> None:
        if self._open is not None:
            step, before = self._open
            when = f"between the optimizer's steps {step} and {step + 1}"
            for then, sums in zip(before, now, strict=True):
                self._unread.append((when, _changed(then, sums)))

    def numbers(self) -> list[int]:
        """Return what `judge` compares, of this rank: integers of 64 bits. Waits for the device,
        and reads everything once.
        """
        mine = self._weights(), self._optimizer_state(), self._frozen(), self._buffers
        weights, state, frozen, buffers = map(_sums_of, mine)
        self._compare([weights, state])
        frozen_changed = _changed(self._start, frozen)
        self._unread.append(("since the start, though not trained", frozen_changed))
        sharded = _sharded(mine[0] | mine[1] | mine[2])
        self._copies, self._sharded = weights + state + frozen + buffers, set(sharded)
        sums = _by_name(self._copies)
        shards = _hash([(n, value) for n, value in sums.items() if n in self._sharded])
        whole = _hash([(n, value) for n, value in sums.items() if n not in self._sharded])
        changed = any(bool(flags.any()) for _, found in self._unread for _, flags in found)
        place = next(map(_place, sharded.values()), 0)
        return [int(changed), place, shards, whole, _hash(_facts(self._state))]

    def judge(self, step: int, rows: list[list[int]]) -> None:
        """Raise a `TrainingError` where the `numbers` of the ranks after `step` do not fit.
        Collective where they do not: tensors, ranks and hosts are told.
        """
        changed, where, shards, whole, facts = (list(column) for column in zip(*rows, strict=True))
        alike: dict[int, list[int]] = {}  # ranks that hold the same shards
        for rank, place in enumerate(where):
            alike.setdefault(place, []).append(rank)
        if any(changed):
            raise ranks.mark_collective(TrainingError(f"{self._name_changed()}. {_ADVICE}"))
        if len({*whole}) > 1 or any(len({shards[r] for r in g}) > 1 for g in alike.values()):
            copies = self._name_copies(step, [*alike.values()])
            raise ranks.mark_collective(TrainingError(f"{copies}. {_ADVICE}"))
        if len({*facts}) > 1:
            told = ranks.gather(_facts(self._state))
            raise ranks.mark_collective(TrainingError(f"{_name_facts(step, told)}. {_APART}"))
        self._unread.clear()

    def _name_changed(self) -> str:
        mine = [(n, when) for when, found in self._unread for n, f in _by_name(found).items() if f]
        told = ranks.gather((socket.gethostname(), mine))
        return "; ".join(
            f"rank {rank} ({host}): bits of {_listed([name for name, _ in found])} changed "
            f"{found[0][1]}"
            for rank, (host, found) in enumerate(told)
            if found
        )

    def _name_copies(self, step: int, alike: list[list[int]]) -> str:
        told = ranks.gather((socket.gethostname(), _by_name(self._copies)))
        found: dict[int, list[str]] = {}
        for name in told[0][1]:
            every = [list(range(len(told)))]
            for group in alike if name in self._sharded else every:
                for rank in _odd({rank: told[rank][1].get(name) for rank in group}):
                    found.setdefault(rank, []).append(name)
        return "; ".join(
            f"rank {rank} ({told[rank][0]}): bits of {_listed(names)} are not those of its copies "
            f"on other ranks after step {step}"
            for rank, names in found.items()
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return trained parameters by name."""
        held = self._held()
        return {n: p for n, p in self._parameters.items() if id(p) in held}

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors by name."""
        found, counts = dict[str, torch.Tensor](), list[torch.Tensor]()
        for name, parameter in self._weights().items():
            for key, value in self._state.required_optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.ndim:
                    found[f"{key} of {name}"] = value
                elif torch.is_tensor(value):
                    counts.append(value)
        for device in dict.fromkeys(count.device for count in counts):
            one = [count for count in counts if count.device == device]
            found[f"{_COUNTS} ({device.type})"] = torch.stack(one)
        return found

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return the other parameters, by name, without those that are moved."""
        held = self._held() | self._moved
        return {n: p for n, p in self._parameters.items() if id(p) not in held}

    def _held(self) -> set[int]:
        return {
            id(p) for group in self._state.required_optimizer.param_groups for p in group["params"]
        }


@torch.no_grad()  # with gradients a DTensor's part costs as much as its sum
def _sums_of(tensors: Mapping[str, torch.Tensor]) -> Values:
    """Return `bit_sums` of this rank's part of each tensor, on its device; does not wait."""
    alike: dict[Any, dict[str, torch.Tensor]] = {}  # small ones are summed in one call
    for name, tensor in tensors.items():
        part = local_tensor(tensor)
        key = (part.device, part.dtype, part.shape, "" if part.nbytes < _SMALL else name)
        alike.setdefault(key, {})[name] = part
    parts: dict[torch.device, list[tuple[list[str], torch.Tensor]]] = {}
    for (device, *_), some in alike.items():
        rows = [*some.values()]
        stacked = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        parts.setdefault(device, []).append(([*some], bit_sums(stacked)))
    return [
        ([n for names, _ in sums for n in names], torch.cat([values for _, values in sums]))
        for sums in parts.values()
    ]


def _changed(then: Values, now: Values) -> Values:
    """Return which sums differ, of the tensors that both have; does not wait."""
    if [names for names, _ in then] == [names for names, _ in now]:
        return [(names, a != b) for (names, a), (_, b) in zip(then, now, strict=True)]
    old, new = (  # as where a recipe thaws parameters
        {n: s for names, sums in one for n, s in zip(names, sums, strict=True)}
        for one in (then, now)
    )
    return [([n], (old[n] != new[n])[None]) for n in old if n in new]


def _by_name(values: Values) -> dict[str, int]:
    """Return them by name. Waits for the device."""
    return {n: v for names, some in values for n, v in zip(names, some.tolist(), strict=True)}


def _sharded(tensors: Mapping[str, torch.Tensor]) -> dict[str, DTensor]:
    """Return those of which each rank holds a part."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)
    }


def _place(tensor: DTensor) -> int:
    """Return a number that ranks with the same shard of `tensor` have in common."""
    place, mesh = 0, tensor.device_mesh
    for dim, (at, placement) in enumerate(
        zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    ):
        if not placement.is_replicate():
            place = place * mesh.size(dim) + at
    return place


def _facts(state: TrainState) -> dict[str, Any]:
    """Return what has to be the same on all ranks beside tensors, as JSON values."""
    return {
        "the position in the data": None if state.data is None else state.data.state_dict(),
        "the schedule's step": None if state.scheduler is None else state.scheduler.last_epoch,
        "the learning rate": [
            float(group["lr"]) for group in state.required_optimizer.param_groups
        ],
    }


def _name_facts(step: int, told: list[dict[str, Any]]) -> str:
    """Return which ranks have other facts than most, and which."""
    named = []
    for what in told[0]:
        texts = {rank: json.dumps(facts[what], sort_keys=True) for rank, facts in enumerate(told)}
        for rank in _odd(texts):
            named.append(f"rank {rank}: {what} is {_difference(told, what, rank)}")
    return f"after step {step} ranks do not stand at the same place: {'; '.join(named)}"


def _difference(told: list[dict[str, Any]], what: str, rank: int) -> str:
    """Return the value of a rank, of a dict what differs of it."""
    value = told[rank][what]
    if not isinstance(value, dict):
        return str(value)
    every = [facts[what] for facts in told]
    differing = [k for k in value if len({json.dumps(one.get(k)) for one in every}) > 1]
    return ", ".join(f"{key} {value[key]}" for key in differing)


def _odd(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks whose value is not that of most; all where as many have another."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    most = counts[0][0] if counts[0][1] > counts[1][1] else object()
    return [rank for rank, value in values.items() if value != most]


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _hash(content: Any) -> int:
    """Return 63 bits of a digest of JSON values."""
    text = json.dumps(content, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
