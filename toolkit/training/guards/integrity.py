"""Detect silent corruption: weights, optimizer state or data position that changed or differ.

[Note: integrity] The check compares checksums. A checksum is the wrapping integer sum of a tensor's
bits, so any single flipped bit changes it. The check compares:

    - trained weights and optimizer state, right after one step of the optimizer and right before
      the next: nothing else may change them;
    - frozen parameters, with the start of the run;
    - copies, with those of other ranks: tensors that are not sharded, saved buffers, and the shards
      of HSDP's replicas;
    - step, position in the data and schedule, with those of other ranks.

docs/observing.md says what the check cannot find.

Hooks of the optimizer compute the checksums around its step on the device, and nothing waits. They
are read, and the other checksums computed, when metrics are logged and before a save. Each rank
contributes a few numbers; only if these differ, tensor names are exchanged.
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

# For each device: tensor names and one value per name.
Values = list[tuple[list[str], torch.Tensor]]
_MAX_LISTED = 3  # tensors of a rank in an error
# Tensors below this size are stacked and summed together, because a call costs more than reading.
_SMALL_BYTES = 2**16
_STEP_COUNTS = "the optimizer's step counts"
_HARDWARE_ADVICE = (
    "This state is not saved: the newest checkpoint is from before. Memory, a device or a driver "
    "of that machine is at fault; start the same command again, without that machine if it recurs"
)
_RECIPE_ADVICE = (
    "This state is not saved: the newest checkpoint is from before. Does the recipe change it on "
    "some ranks only? If not, start the same command again"
)


class Integrity:
    """Checks a run's state against its past and against other ranks; see [Note: integrity].

    Creating it registers hooks on the optimizer, and reshards the model.

    Args:
        state: a `TrainState` with model and optimizer, before the first step after a start.
        every: after each step whose number is a multiple of `every`, checksums of the state are
            stored, and compared right before the next optimizer step.
        moved: parameters that change without the optimizer, such as biases of experts.
    """

    def __init__(
        self, state: TrainState, every: int = 1, moved: Iterable[torch.Tensor] = ()
    ) -> None:
        reshard(state.model)
        self._moved_ids = {id(p) for p in moved}
        self._state = state
        self._parameters = dict(state.model.named_parameters())
        self._buffers = persistent_buffers(state.model)
        for prefix, module in state.model.named_modules():
            # Running statistics follow a rank's own samples, so they differ between ranks.
            if getattr(module, "track_running_stats", False):
                for name, _ in module.named_buffers(prefix, recurse=False):
                    self._buffers.pop(name, None)
        self._every = every
        self._last_step = state.step
        self._start_sums = _checksums(self._frozen_weights())
        # Step, and checksums of weights and optimizer state after it, if that step is checked.
        self._sums_after_step: tuple[int, list[Values]] | None = None
        # Descriptions of when a change happened, with flags on the device that are not read yet.
        self._unread = list[tuple[str, Values]]()
        # Checksums of all tensors, and names of the sharded ones, at the last `compute_checksums`.
        self._copies = self._start_sums
        self._sharded_names = set[str]()
        optimizer = state.required_optimizer
        optimizer.register_step_pre_hook(lambda *_: self._compare_before_step())
        optimizer.register_step_post_hook(lambda *_: self._sum_after_step())

    def record(self, step: int) -> None:
        """Record that `step` is done. Call it after every step."""
        self._last_step = step

    def _compare_before_step(self) -> None:
        """Hook before an optimizer step: compare the state with that after the previous step.

        Does nothing if the previous step was not checked. The result stays on the device until
        `compute_checksums` reads it.
        """
        if self._sums_after_step is not None:
            self._queue_comparison(self._compute_current_sums())
            self._sums_after_step = None

    def _sum_after_step(self) -> None:
        """Hook after an optimizer step: store checksums of the state if this step is checked.

        A step is checked if its number is a multiple of `every`. Does not wait for the device.
        """
        step = self._last_step + 1
        if step % self._every == 0:
            self._sums_after_step = step, self._compute_current_sums()

    def _compute_current_sums(self) -> list[Values]:
        """Return a list of the trained weights' checksums and the optimizer state's checksums."""
        return [_checksums(self._trained_weights()), _checksums(self._optimizer_state())]

    def _queue_comparison(self, now: list[Values]) -> None:
        """Compare checksums with the stored ones, and append the result to `_unread`.

        The stored ones are those after the last checked step. Does not wait for the device. Does
        nothing if no step was checked since the last comparison.

        Args:
            now: result of `_compute_current_sums`.
        """
        if self._sums_after_step is not None:
            step, before = self._sums_after_step
            when = f"between the optimizer's steps {step} and {step + 1}"
            for then, sums in zip(before, now, strict=True):
                self._unread.append((when, _compare_checksums(then, sums)))

    def compute_checksums(self) -> list[int]:
        """Compute the five integers of this rank that `compare_ranks` needs.

        Waits for the device, and reads weights, optimizer state and buffers once.

        Returns:
            Five integers of at most 64 bits. The first is 1 if a tensor has changed unexpectedly,
            otherwise 0. The second is the index of this rank's shard, which HSDP's replicas share.
            Then follow hashes: of the sharded tensors' checksums, of the other tensors' checksums,
            and of data position and schedule.
        """
        weight_tensors, state_tensors, frozen_tensors = (
            self._trained_weights(),
            self._optimizer_state(),
            self._frozen_weights(),
        )
        weights, state, frozen, buffers = map(
            _checksums, (weight_tensors, state_tensors, frozen_tensors, self._buffers)
        )
        self._queue_comparison([weights, state])
        frozen_changed = _compare_checksums(self._start_sums, frozen)
        self._unread.append(("since the start, though not trained", frozen_changed))
        sharded = _select_sharded(weight_tensors | state_tensors | frozen_tensors)
        self._copies = weights + state + frozen + buffers
        self._sharded_names = set(sharded)
        sums = _values_by_name(self._copies)
        shards = _hash_json([(n, value) for n, value in sums.items() if n in self._sharded_names])
        copies = _hash_json(
            [(n, value) for n, value in sums.items() if n not in self._sharded_names]
        )
        has_changed = any(bool(flags.any()) for _, values in self._unread for _, flags in values)
        shard_index = next(map(_shard_index, sharded.values()), 0)
        return [
            int(has_changed),
            shard_index,
            shards,
            copies,
            _hash_json(_collect_other_state(self._state)),
        ]

    def compare_ranks(self, step: int, rows: list[list[int]]) -> None:
        """Raise a `TrainingError` if a rank's state has changed or differs from its replicas.

        The error names tensors, ranks and hosts. The call is collective only if it raises, so all
        ranks must pass the same `rows`.

        Args:
            step: number of the last step.
            rows: results of `compute_checksums` on all ranks.
        """
        changed, shard_indices, shards, copies, facts = (
            list(column) for column in zip(*rows, strict=True)
        )
        ranks_by_shard: dict[int, list[int]] = {}
        for rank, index in enumerate(shard_indices):
            ranks_by_shard.setdefault(index, []).append(rank)
        if any(changed):
            text = self._describe_changed()
            raise ranks.mark_collective(TrainingError(f"{text}. {_HARDWARE_ADVICE}"))
        replicas_differ = any(
            len({shards[rank] for rank in group}) > 1 for group in ranks_by_shard.values()
        )
        if len({*copies}) > 1 or replicas_differ:
            text = self._describe_differing_copies(step, [*ranks_by_shard.values()])
            raise ranks.mark_collective(TrainingError(f"{text}. {_HARDWARE_ADVICE}"))
        if len({*facts}) > 1:
            text = _describe_state_differences(
                step, ranks.gather(_collect_other_state(self._state))
            )
            raise ranks.mark_collective(TrainingError(f"{text}. {_RECIPE_ADVICE}"))
        self._unread.clear()

    def _describe_changed(self) -> str:
        """Format by rank the tensors that changed outside of optimizer steps. Collective."""
        local = [
            (name, when)
            for when, values in self._unread
            for name, is_changed in _values_by_name(values).items()
            if is_changed
        ]
        by_rank = ranks.gather((socket.gethostname(), local))
        return "; ".join(
            f"rank {rank} ({host}): bits of {_list_names([name for name, _ in changes])} changed "
            f"{changes[0][1]}"
            for rank, (host, changes) in enumerate(by_rank)
            if changes
        )

    def _describe_differing_copies(self, step: int, replicas: list[list[int]]) -> str:
        """Format by deviating rank the tensors whose copies differ between ranks. Collective.

        Args:
            step: number of the last step.
            replicas: groups of ranks that hold the same shards.
        """
        by_rank = ranks.gather((socket.gethostname(), _values_by_name(self._copies)))
        names_by_rank: dict[int, list[str]] = {}
        for name in by_rank[0][1]:
            all_ranks = [list(range(len(by_rank)))]
            for group in replicas if name in self._sharded_names else all_ranks:
                for rank in _deviating_ranks({rank: by_rank[rank][1].get(name) for rank in group}):
                    names_by_rank.setdefault(rank, []).append(name)
        return "; ".join(
            f"rank {rank} ({by_rank[rank][0]}): bits of {_list_names(names)} differ from the "
            f"copies on other ranks after step {step}"
            for rank, names in names_by_rank.items()
        )

    def _trained_weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the optimizer trains, by name."""
        trained = self._trained_ids()
        return {n: p for n, p in self._parameters.items() if id(p) in trained}

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimizer's state by a name such as `exp_avg of PARAMETER`.

        The step counts, which are 0-d, are stacked into one tensor per device.
        """
        tensors = dict[str, torch.Tensor]()
        step_counts = list[torch.Tensor]()
        for name, parameter in self._trained_weights().items():
            for key, value in self._state.required_optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.ndim:
                    tensors[f"{key} of {name}"] = value
                elif torch.is_tensor(value):
                    step_counts.append(value)
        for device in dict.fromkeys(count.device for count in step_counts):
            on_device = [count for count in step_counts if count.device == device]
            tensors[f"{_STEP_COUNTS} ({device.type})"] = torch.stack(on_device)
        return tensors

    def _frozen_weights(self) -> dict[str, torch.Tensor]:
        """Return by name the parameters that must not change: neither trained nor among `moved`."""
        changing = self._trained_ids() | self._moved_ids
        return {n: p for n, p in self._parameters.items() if id(p) not in changing}

    def _trained_ids(self) -> set[int]:
        """Return the `id()` of each parameter that the optimizer trains."""
        return {
            id(p) for group in self._state.required_optimizer.param_groups for p in group["params"]
        }


@torch.no_grad()  # with gradients, taking a DTensor's local part costs as much as the sum
def _checksums(tensors: Mapping[str, torch.Tensor]) -> Values:
    """Compute the checksum (`bit_sums`) of this rank's shard of each tensor, on its device.

    Does not wait for the device.
    """
    groups: dict[Any, dict[str, torch.Tensor]] = {}  # tensors that are summed in one call
    for name, tensor in tensors.items():
        part = local_tensor(tensor)
        key = (part.device, part.dtype, part.shape, "" if part.nbytes < _SMALL_BYTES else name)
        groups.setdefault(key, {})[name] = part
    by_device: dict[torch.device, list[tuple[list[str], torch.Tensor]]] = {}
    for (device, *_), group in groups.items():
        rows = [*group.values()]
        stacked = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        by_device.setdefault(device, []).append(([*group], bit_sums(stacked)))
    return [
        ([n for names, _ in sums for n in names], torch.cat([values for _, values in sums]))
        for sums in by_device.values()
    ]


def _compare_checksums(then: Values, now: Values) -> Values:
    """Compare two sets of checksums; the result has True for each tensor whose checksum changed.

    Tensors that are only in one set are skipped. Does not wait for the device.
    """
    if [names for names, _ in then] == [names for names, _ in now]:
        return [(names, a != b) for (names, a), (_, b) in zip(then, now, strict=True)]
    # The tensors differ, for example because a recipe unfroze parameters.
    old, new = (
        {n: s for names, sums in values for n, s in zip(names, sums, strict=True)}
        for values in (then, now)
    )
    return [([n], (old[n] != new[n])[None]) for n in old if n in new]


def _values_by_name(values: Values) -> dict[str, int]:
    """Convert checksums or flags on devices to a dict: tensor name -> Python value.

    Waits for the device.
    """
    return {
        name: value
        for names, tensor in values
        for name, value in zip(names, tensor.tolist(), strict=True)
    }


def _select_sharded(tensors: Mapping[str, torch.Tensor]) -> dict[str, DTensor]:
    """Return by name the DTensors that are split, so that no rank holds all of their values."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)
    }


def _shard_index(tensor: DTensor) -> int:
    """Compute the index of this rank's shard of `tensor`. Replicas of a shard share the index."""
    index = 0
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate() or ()
    for dim, (coordinate, placement) in enumerate(zip(coordinates, tensor.placements, strict=True)):
        if not placement.is_replicate():
            index = index * mesh.size(dim) + coordinate
    return index


def _collect_other_state(state: TrainState) -> dict[str, Any]:
    """Return data position, schedule step and learning rates as JSON values.

    They must be equal on all ranks. The keys are names for messages.
    """
    return {
        "the position in the data": None if state.data is None else state.data.state_dict(),
        "the schedule's step": None if state.scheduler is None else state.scheduler.last_epoch,
        "the learning rate": [
            float(group["lr"]) for group in state.required_optimizer.param_groups
        ],
    }


def _describe_state_differences(step: int, by_rank: list[dict[str, Any]]) -> str:
    """Format the values in which a minority of ranks differs from the others.

    Args:
        step: number of the last step.
        by_rank: results of `_collect_other_state` on all ranks.
    """
    differences = []
    for name in by_rank[0]:
        texts = {
            rank: json.dumps(facts[name], sort_keys=True) for rank, facts in enumerate(by_rank)
        }
        for rank in _deviating_ranks(texts):
            differences.append(
                f"rank {rank}: {name} is {_format_deviating_value(by_rank, name, rank)}"
            )
    return f"after step {step} the ranks differ: {'; '.join(differences)}"


def _format_deviating_value(by_rank: list[dict[str, Any]], name: str, rank: int) -> str:
    """Format a rank's value of the entry `name`.

    If the value is a dict, only the keys that differ between ranks are included.

    Args:
        by_rank: results of `_collect_other_state` on all ranks.
        name: key of these results.
        rank: the rank.
    """
    value = by_rank[rank][name]
    if not isinstance(value, dict):
        return str(value)
    values = [facts[name] for facts in by_rank]
    differing = [k for k in value if len({json.dumps(v.get(k)) for v in values}) > 1]
    return ", ".join(f"{key} {value[key]}" for key in differing)


def _deviating_ranks(values: Mapping[int, Hashable]) -> list[int]:
    """List the ranks whose value is not the most frequent one; all ranks if there is no such value.

    The list is empty if all values are equal.
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    majority = counts[0][0] if counts[0][1] > counts[1][1] else object()
    return [rank for rank, value in values.items() if value != majority]


def _list_names(names: list[str]) -> str:
    """Join the first 3 distinct names with commas; if there are more, add their number."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _hash_json(content: Any) -> int:
    """Compute a 63-bit hash of JSON values. The order of keys does not matter."""
    text = json.dumps(content, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
