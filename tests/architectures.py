"""Compare every causal-LM type of transformers, sharded against plain, in one table.

    python tests/architectures.py [--types llama,gpt2] [--world 2] [--uneven] [--write FILE]
    python tests/architectures.py --packing docs/evidence/packing_types.md

Each type is built tiny with random values, saved by transformers, and then goes through the toolkit
on gloo ranks: load, gradients, two SGD steps, checkpoint, export, random start. Everything is
compared with one plain unsharded fp32 model. Many types share one group of processes, since
starting one takes longer than checking a type; a type that fails is recorded with its reason, one
that hangs or kills its process costs its group alone. Results lie as JSON lines in `--work`, so
that an interrupted run goes on where it stopped.

Owns the checks and the table. `test_architectures.py` runs a few types of it in every test run.
"""

# ruff: noqa: E402 - as a program it first says where the toolkit is
import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from sharded import apply_fsdp, init_mesh, loss_sum, sharded_of, train_step
from tiny_models import (
    TYPES,
    UNEVEN,
    float64_throughout,
    own_section,
    rows,
    save,
    tiny_class,
    tiny_config,
    tiny_model,
)
from torch.distributed.tensor import DTensor

from toolkit import checkpoint, ranks
from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
from toolkit.errors import ToolkitError
from toolkit.export import consolidate
from toolkit.formats import local_tensor
from toolkit.loading import init_weights, load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.layers import parameters_outside_text
from toolkit.models.packing_probe import PackingVerdict, probe_packing

TOLERANCE = 1e-5
LIMIT = 90.0
"""Seconds that one type may take before its processes are ended."""
_FP32 = ShardingConfig(param_dtype="float32", dp_replicate=1)
_BF16 = ShardingConfig(param_dtype="bfloat16", dp_replicate=1)
_RATE = 0.05
_NEAR_FP64 = "as near to fp64 as one process is"
CHECKS = {
    "load": "parameters, buffers and logits after load_pretrained into the sharded model",
    "gradients": "every parameter's gradient, before clipping, each rank with its part of a batch",
    "steps": "weights after two steps of SGD",
    "export": "save, consolidate and from_pretrained give the trained weights and their logits",
    "keys": "names of the exported tensors are those of the original checkpoint",
    "bfloat16": "parameters and buffers after a load in bfloat16, where some stay in fp32, against "
    "from_pretrained",
    "random": "init_weights: the same for 1 and all ranks, distributed as transformers draws",
}


# Checks that a type may refuse by name and still pass -> what it then refuses.
_MAY_REFUSE = {"bfloat16": "storage in bfloat16", "random": "random start"}


class Mismatch(Exception):
    """A check failed; the text says which tensor."""


# --------------------------------------------------------------------------------------------------
# Comparing
# --------------------------------------------------------------------------------------------------


def difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float = 0.0
) -> float:
    """Return the largest difference relative to its tensor's largest value; 0.0 is exact.

    Args:
        floor: the smallest scale, relative to the largest value of all tensors. Gradients that are
            zero by symmetry (the bias of attention keys) consist of rounding alone: a tensor below
            a hundredth of the floor on both sides counts as zero.

    Raises:
        Mismatch: other names, shapes or dtypes, values that are not finite, or a difference above
            the tolerance.
    """
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        raise Mismatch(f"{len(odd)} names differ: {', '.join(odd[:3])}")
    largest = max((_largest(t) for t in expected.values()), default=0.0)
    worst = 0.0
    for name, want in expected.items():
        have = found[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise Mismatch(
                f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}"
            )
        if torch.equal(have, want) or not want.numel():
            continue
        if max(_largest(have), _largest(want)) < 1e-2 * floor * largest:
            continue
        if not have.isfinite().all() and not torch.equal(have.isfinite(), want.isfinite()):
            raise Mismatch(f"{name} has values that are not finite")
        gap = _largest(have.double() - want.double())
        relative = gap / max(_largest(want), floor * largest, 1e-30)
        if not relative <= TOLERANCE:
            raise Mismatch(f"{name} differs by {relative:.1e}")
        worst = max(worst, relative)
    return worst


def _largest(tensor: torch.Tensor) -> float:
    return tensor.detach().double().nan_to_num().abs().max().item() if tensor.numel() else 0.0


def whole(model: torch.nn.Module, buffers: bool = False) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters (or buffers) of `model`, copies. Collective."""
    tensors = model.named_buffers() if buffers else model.named_parameters()
    return {n: gathered(t).clone() for n, t in tensors}


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded values of a tensor. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Tensors = dict[str, torch.Tensor]


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps the gradients it is given, unsharded."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.parameters(), lr=_RATE)
        self.model = model
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.gradients.append(
            {
                n: gathered(p.grad).clone() if p.grad is not None else torch.zeros(p.shape)
                for n, p in self.model.named_parameters()
            }
        )
        super().step(closure)


# --------------------------------------------------------------------------------------------------
# One type
# --------------------------------------------------------------------------------------------------


@dataclass
class Sabotage:
    """What a test breaks on purpose, to see the check fail."""

    weight: str | None = None
    """After the load, one element of this parameter is changed on the rank that holds it."""
    gradient_scale: float = 1.0
    """The loss of rank 0 is multiplied by this."""
    key: str | None = None
    """This tensor of the export gets another name."""
    exported: str | None = None
    """One element of this tensor of the export is changed."""
    seed_of_rank: bool = False
    """Each rank draws random weights from a seed of its own."""


def check_type(
    kind: str,
    folder: Path,
    *,
    uneven: bool = False,
    sabotage: Sabotage | None = None,
    only: tuple[str, ...] = tuple(CHECKS),
) -> dict[str, Any]:
    """Return what the checks of one type found, on every rank the same. Collective.

    A check's value is 0.0 where sharded equals plain bit for bit, else the largest relative
    difference; a text says why it failed.
    """
    return _Checks(kind, folder, uneven, sabotage or Sabotage()).run(only)


class _Checks:
    """The checks of one type, in order; each goes on from what the one before left."""

    def __init__(self, kind: str, folder: Path, uneven: bool, sabotage: Sabotage):
        self.kind, self.folder, self.uneven, self.sabotage = kind, folder, uneven, sabotage
        self.world = ranks.world_size()
        self.batch = rows(2 * self.world)
        self.found: dict[str, Any] = {"type": kind, "class": tiny_class(kind).__name__}
        self.notes: list[str] = []

    def run(self, only: tuple[str, ...]) -> dict[str, Any]:
        begun = time.perf_counter()
        steps: dict[str, Callable[[], float]] = {
            "load": self.load,
            "gradients": self.gradients,
            "steps": self.steps,
            "export": self.export,
            "keys": self.keys,
            "bfloat16": self.bfloat16,
            "random": self.random,
        }
        try:
            self.prepare()
        except Exception as error:
            self.found["cannot"] = _said(error)
            return self.found | {"seconds": round(time.perf_counter() - begun, 1)}
        for name in only:
            try:
                self.found[name] = steps[name]()
            except Mismatch as error:
                self.found[name] = str(error)
            except ToolkitError as error:
                self.found[name] = f"refused: {error}"
                if name == "load":
                    break
            except Exception as error:
                self.found[name] = _said(error)
                self.found.setdefault("trace", traceback.format_exc()[-1500:])
                if name in ("load", "gradients"):
                    break
        self.found["notes"] = self.notes
        return self.found | {"seconds": round(time.perf_counter() - begun, 1)}

    def prepare(self) -> None:
        """Build the plain model and write it as a checkpoint."""
        self.plain: Any = tiny_model(self.kind, uneven=self.uneven)
        self.found["parameters"] = sum(p.numel() for p in self.plain.parameters())
        self.source = self.folder / "source"
        ranks.on_main(lambda: str(save(self.plain, self.source, self.kind, uneven=self.uneven)))

    def load(self) -> float:
        self.model = self._sharded()
        plan = sharded_of(self.model).plan
        self.found["units"] = len(plan.units)
        names = [_pattern(u.modules) for u in plan.units if u.modules != ("",)]
        self.found["patterns"] = list(dict.fromkeys(names))
        if plan.root_only is not None:
            self.notes.append(f"root only: {plan.root_only}")
        load_pretrained(self.model, self.source, "cpu")
        # Before any forward: one without a backward leaves the root's parameters gathered.
        self.optimizer = RecordingSGD(self.model)
        if self.sabotage.weight is not None:
            _spoil(dict(self.model.named_parameters())[self.sabotage.weight])
        worst = difference(whole(self.model), whole(self.plain))
        worst = max(worst, difference(whole(self.model, True), whole(self.plain, True)))
        flags = {n for n, p in self.plain.named_parameters() if not p.requires_grad}
        flags |= parameters_outside_text(self.model) & {n for n, _ in self.model.named_parameters()}
        mine = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        if flags != mine:
            raise Mismatch(f"requires_grad differs: {', '.join(sorted(flags ^ mine)[:3])}")
        return max(worst, self._logits(self.model, self.plain))

    def gradients(self) -> float:
        self.model.train()
        self.plain.train()
        plain = RecordingSGD(self.plain)
        rank = ranks.rank()
        mine = {k: v[2 * rank : 2 * rank + 2] for k, v in self.batch.items()}
        scale = self.sabotage.gradient_scale if rank == 0 else 1.0

        def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return loss_sum(model, batch) * scale

        for _ in range(2):
            stats = train_step(self.model, self.optimizer, [mine], max_grad_norm=0.0, loss=loss_of)
            loss, norm = self._plain_step(plain)
        for found, expected, what in (
            (stats.loss, loss, "loss"),
            (stats.grad_norm, norm, "gradient norm"),
        ):
            if not abs(found - expected) <= 1e-4 * abs(expected):
                raise Mismatch(f"{what} is {found:.6f}, plain {expected:.6f}")
        try:
            return difference(self.optimizer.gradients[0], plain.gradients[0], floor=1e-4)
        except Mismatch as error:
            reason = str(error)
        try:
            return self._same_parts(reason)
        except Mismatch:
            found = self.optimizer.gradients[0]
            return self._as_near_to_fp64(found, plain.gradients[0], self._in_fp64()[0], reason)

    def _as_near_to_fp64(
        self, found: Tensors, plain: Tensors, exact: Tensors, reason: str
    ) -> float:
        """Compare by the distance from fp64, where that of one plain model in fp32 is above the
        tolerance: twice it is as good. The distance is that of the worst tensor; over 12 random
        starts of hy_v4, qwen3_5_text, gemma4_text and cpmant it was 0.3 to 1.7 times the plain
        model's in one process without shards, about the same in the median.
        """
        largest, farthest = max(map(_largest, plain.values())), [0.0, 0.0]
        for name, want in exact.items():
            scale = max(_largest(want), 1e-4 * largest, 1e-30)
            far = (_largest(values[name].double() - want) / scale for values in (found, plain))
            farthest = list(map(max, farthest, far))
        ours, theirs = farthest
        if not ours <= max(TOLERANCE, 2 * theirs):
            raise Mismatch(f"{ours:.1e} from fp64, plain {theirs:.1e}; {reason}")
        self.notes.append(f"{_NEAR_FP64} (one process {theirs:.0e}); to each other: {reason}")
        return ours

    def _in_fp64(self) -> tuple[Tensors, Tensors]:
        """Return the first gradients and the weights after two steps of one plain model in fp64."""
        exact: Any = tiny_model(self.kind, uneven=self.uneven).train().double()
        tokens = (self.batch["labels"][:, 1:] != -100).sum()
        exact.set_experts_implementation("eager")  # grouped products have no fp64
        optimizer = RecordingSGD(exact)
        for _ in range(2):
            with float64_throughout():
                (_loss_sum(exact, self.batch) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.gradients[0], whole(exact)

    def _same_parts(self, reason: str) -> float:
        """Compare with a plain model that goes through the ranks' parts one after the other.

        Where the whole batch at once rounds otherwise than its parts, by more than the tolerance,
        even one plain model does not agree with itself.
        """
        alone: Any = tiny_model(self.kind, uneven=self.uneven).train()
        tokens = (self.batch["labels"][:, 1:] != -100).sum()
        for rank in range(self.world):
            part = {k: v[2 * rank : 2 * rank + 2] for k, v in self.batch.items()}
            (_loss_sum(alone, part) / tokens).backward()
        by_parts = RecordingSGD(alone)
        by_parts.step()
        worst = difference(self.optimizer.gradients[0], by_parts.gradients[0], floor=1e-4)
        self.notes.append(
            f"compared by parts: with the whole batch at once {reason}, in one process too"
        )
        return worst

    def steps(self) -> float:
        found, plain = whole(self.model), whole(self.plain)
        try:
            return difference(found, plain)
        except Mismatch as error:
            return self._as_near_to_fp64(found, plain, self._in_fp64()[1], str(error))

    def export(self) -> float:
        """Save and consolidate; the files must hold what a plain model with these weights saves."""
        run, self.exported = self.folder / "run", self.folder / "export"
        checkpoint.save(checkpoint.TrainState(self.model, step=2), run, CheckpointConfig())
        trained = whole(self.model)
        persistent = self.model.state_dict().keys()
        trained |= {n: b for n, b in whole(self.model, True).items() if n in persistent}
        self.model.eval()
        logits = self._forward(self.model)
        ranks.on_main(lambda: consolidate(run, self.exported, dtype="float32"))
        ranks.on_main(self._spoil_export)
        return ranks.on_main(lambda: self._compare_export(trained, logits))

    def _compare_export(self, trained: dict[str, torch.Tensor], logits: torch.Tensor) -> float:
        self.plain.load_state_dict(trained, strict=False)
        reference = self.folder / "reference"
        self.plain.save_pretrained(reference)
        difference_in_files = difference(
            load_file(self.exported / FILE), load_file(reference / FILE)
        )
        if difference_in_files:
            raise Mismatch(f"the exported file differs by {difference_in_files:.1e}")
        cls = tiny_class(self.kind)
        again = cls.from_pretrained(self.exported, dtype=torch.float32).eval()
        theirs = cls.from_pretrained(reference, dtype=torch.float32).eval()
        have, want = again.state_dict(), self.plain.state_dict()
        lost = [n for n in want if not torch.equal(have[n], want[n])]
        if lost and all(torch.equal(have[n], theirs.state_dict()[n]) for n in want):
            self.notes.append(f"transformers itself does not load {lost[0]} as it was saved")
            expected = self._forward(theirs)
        elif lost:
            raise Mismatch(f"{lost[0]} is not what was trained")
        else:
            expected = logits
        return difference({"logits": self._forward(again)}, {"logits": expected})

    def keys(self) -> float:
        mine, theirs = (set(load_file(f / FILE)) for f in (self.exported, self.source))
        if mine != theirs:
            odd = sorted(mine ^ theirs)
            raise Mismatch(f"{len(odd)} names differ: {', '.join(odd[:3])}")
        return 0.0

    def bfloat16(self) -> float:
        model = self._sharded(dtype="bfloat16", sharding=_BF16)
        load_pretrained(model, self.source, "cpu")
        if self.sabotage.weight is not None:
            _spoil(dict(model.named_parameters())[self.sabotage.weight])
        theirs = tiny_class(self.kind).from_pretrained(self.source, dtype=torch.bfloat16)
        worst = difference(whole(model), whole(theirs))
        return max(worst, difference(whole(model, True), whole(theirs, True)))

    def random(self) -> float:
        seed = 5 + (ranks.rank() if self.sabotage.seed_of_rank else 0)
        model, alone = self._sharded("random"), self._sharded("random", sharding=None)
        init_weights(model, "cpu", seed)
        init_weights(alone, "cpu", seed)
        found = whole(model)
        if difference(found, whole(alone)) > 0:
            raise Mismatch("weights depend on the number of ranks")
        difference(whole(model, True), whole(alone, True))
        _same_distribution(found, [self._drawn(s) for s in (1, 2)])
        return 0.0

    def _drawn(self, seed: int) -> dict[str, torch.Tensor]:
        return whole(tiny_model(self.kind, uneven=self.uneven, seed=seed, perturbed=False))

    def _sharded(
        self,
        init: str = "pretrained",
        dtype: str = "float32",
        sharding: ShardingConfig | None = _FP32,
    ) -> Any:
        model = build_on_meta(ModelConfig(str(self.source), dtype=dtype, init=init))
        if sharding is not None:
            apply_fsdp(model, init_mesh("cpu", self.world, sharding), sharding)
        return model

    @torch.no_grad()
    def _forward(self, model: Any) -> torch.Tensor:
        return model(input_ids=self.batch["input_ids"]).logits.clone()

    def _logits(self, model: Any, plain: Any) -> float:
        model.eval()
        plain.eval()
        return difference({"logits": self._forward(model)}, {"logits": self._forward(plain)})

    def _plain_step(self, optimizer: RecordingSGD) -> tuple[float, float]:
        loss = _loss_sum(self.plain, self.batch) / (self.batch["labels"][:, 1:] != -100).sum()
        loss.backward()
        gradients = [p.grad for p in self.plain.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    def _spoil_export(self) -> None:
        from safetensors.torch import save_file

        if self.sabotage.key is None and self.sabotage.exported is None:
            return
        tensors = load_file(self.exported / FILE)
        if self.sabotage.exported is not None:
            _spoil(tensors[self.sabotage.exported])
        if self.sabotage.key is not None:
            tensors["other_name"] = tensors.pop(self.sabotage.key)
        save_file(tensors, self.exported / FILE, {"format": "pt"})


FILE = "model.safetensors"


def _loss_sum(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).float()
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


@torch.no_grad()
def _spoil(tensor: torch.Tensor) -> None:
    local = local_tensor(tensor.detach())
    if local.numel():
        local.view(-1)[0] += 0.01


def _same_distribution(
    found: dict[str, torch.Tensor], drawn: list[dict[str, torch.Tensor]]
) -> None:
    """Compare with two draws of transformers: what they agree on exactly must be exact here too.

    The rest is compared by Kolmogorov and Smirnov's statistic, tensors of the same place in
    different layers together, and large tensors also by mean and deviation; all at odds of one in
    a million or less.

    Raises:
        Mismatch: names the tensor.
    """
    first, second = drawn
    mine: dict[str, list[torch.Tensor]] = {}
    theirs: dict[str, list[torch.Tensor]] = {}
    for name, value in found.items():
        one, two = first[name], second[name]
        if torch.equal(one, two):
            gap = _largest(value.double() - one.double()) / max(_largest(one), 1e-30)
            if not gap <= 1e-6:
                raise Mismatch(f"{name} should be the same in every draw, differs by {gap:.1e}")
            continue
        place = re.sub(r"\d+", "*", name)
        # Rows that are the same in every draw (a pad row of zeros) must be so here.
        same = (one == two).flatten()
        if not torch.equal(value.flatten()[same], one.flatten()[same]):
            raise Mismatch(f"{name} has values that should be the same in every draw")
        mine.setdefault(place, []).append(value.flatten()[~same])
        theirs.setdefault(place, []).extend(t.flatten()[~same] for t in (one, two))
        if value.unique().numel() < 0.5 * min(one.unique().numel(), two.unique().numel()):
            raise Mismatch(f"{name} repeats itself")
    for place in mine:
        ours, both = torch.cat(mine[place]).double(), torch.cat(theirs[place]).double()
        n, m = len(ours), len(both)
        values = torch.cat([ours, both]).sort().values
        below = [torch.searchsorted(t.sort().values, values, right=True) for t in (ours, both)]
        statistic = (below[0] / n - below[1] / m).abs().max().item()
        if statistic > 2.7 * ((n + m) / (n * m)) ** 0.5:
            raise Mismatch(
                f"{place} is drawn otherwise: mean {ours.mean():.2e} and deviation "
                f"{ours.std():.2e}, transformers {both.mean():.2e} and {both.std():.2e}"
            )
        if n < 256:
            continue
        deviation = both.std().item()
        fourth = ((both - both.mean()) ** 4).mean().item() / deviation**4
        if abs(ours.std().item() / deviation - 1) > 5 * (max(fourth - 1, 0.1) / n) ** 0.5:
            raise Mismatch(
                f"{place} has deviation {ours.std():.2e}, transformers draws {deviation:.2e}"
            )


def _pattern(modules: tuple[str, ...]) -> str:
    """Return the path of a unit's modules with a star for each number."""
    places = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in modules))
    return " + ".join(places) + (f" ({len(modules)} together)" if len(modules) > 1 else "")


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --------------------------------------------------------------------------------------------------
# A group of ranks that goes through many types
# --------------------------------------------------------------------------------------------------


def serve(rank: int, world: int, work: Path, kinds: list[str], uneven: bool) -> None:
    """Check `kinds` one after the other; rank 0 appends a line for each to `results.jsonl`."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    store = dist.FileStore(str(work / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for kind in kinds:
        if rank == 0:
            (work / "current").write_text(kind)
        if rank == world - 1 and os.environ.get("ARCHITECTURES_KILL") == kind:
            os.kill(os.getpid(), signal.SIGKILL)  # for a test of what then happens
        folder = Path(ranks.on_main(lambda: tempfile.mkdtemp(prefix="arch-")))
        try:
            mine = check_type(kind, folder, uneven=uneven)
            if verdict(mine) != "passed":
                print(kind, json.dumps(mine), file=sys.stderr, flush=True)
            found = _worst(ranks.gather(mine))
        finally:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        if rank == 0:
            with open(work / "results.jsonl", "a") as file:
                file.write(json.dumps(found) + "\n")
    if rank == 0:
        (work / "current").write_text("")
    dist.barrier()
    # Gloo's threads may abort an interpreter that is going down: see `launch._exit_process`.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _worst(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result for all ranks: a failure anywhere counts, else the largest difference."""
    out = dict(found[0])
    for other in found[1:]:
        for name in (*CHECKS, "cannot", "trace"):
            value, mine = other.get(name), out.get(name)
            if isinstance(value, str) and not isinstance(mine, str):
                out[name] = value
            elif isinstance(value, float) and isinstance(mine, float):
                out[name] = max(value, mine)
    return out


def sweep(kinds: list[str], world: int, work: Path, uneven: bool) -> dict[str, dict[str, Any]]:
    """Check `kinds` in as many groups as it takes; return type -> result."""
    work.mkdir(parents=True, exist_ok=True)
    results = work / "results.jsonl"
    while remaining := [k for k in kinds if k not in read_results(results)]:
        for name in ("store", "current"):
            (work / name).unlink(missing_ok=True)
        part = remaining[:50]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--rank", str(rank), "--world", str(world)),
                    *("--work", str(work), "--types", ",".join(part)),
                    *(["--uneven"] if uneven else []),
                ],
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=open(work / f"rank{rank}.err", "ab"),  # noqa: SIM115
            )
            for rank in range(world)
        ]
        reason = _watch(processes, work)
        for process in processes:  # each leads a process group of its own: its children go with it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        current = (work / "current").read_text() if (work / "current").exists() else part[0]
        if reason is not None and current and current not in read_results(results):
            with open(results, "a") as file:
                file.write(json.dumps({"type": current, "died": reason}) + "\n")
    found = read_results(results)
    return {k: found[k] for k in kinds}


def _watch(processes: list[subprocess.Popen], work: Path) -> str | None:
    """Return None when all processes ended well, else why the type at hand did not."""
    shown, since = None, time.monotonic()
    while True:
        time.sleep(0.2)
        codes = [p.poll() for p in processes]
        if bad := [c for c in codes if c not in (None, 0)]:
            time.sleep(1.0)
            what = f"signal {-bad[0]}" if bad[0] < 0 else f"exit status {bad[0]}"
            return f"a process ended with {what}"
        if all(c == 0 for c in codes):
            return None
        current = (work / "current").read_text() if (work / "current").exists() else ""
        if current != shown:
            print(f"  {current}", file=sys.stderr, flush=True)
            shown, since = current, time.monotonic()
        if time.monotonic() - since > LIMIT:
            return f"not done after {LIMIT:.0f} seconds"


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["type"]: line for line in lines}


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def document(even: dict[str, Any], uneven: dict[str, Any], seconds: float) -> str:
    """Return the text of `docs/evidence/architectures.md`."""
    import transformers

    good, refused, bad, absent = (
        [k for k, r in even.items() if verdict(r) == v]
        for v in ("passed", "refused", "failed", "cannot be built")
    )
    exact = {c: sum(even[k][c] == 0.0 for k in good) for c in CHECKS}
    near = [k for k in good if any(note.startswith(_NEAR_FP64) for note in even[k]["notes"])]
    others = [even[k][c] for k in good if k not in near for c in CHECKS]
    numbers = [value for value in others if isinstance(value, float)]
    worst = max(numbers, default=0.0)
    checks = "\n".join(
        f"- **{name}** (bit for bit in {exact[name]} of the types): {what}"
        for name, what in CHECKS.items()
    )
    listed = "".join(
        f"- {what}: {len(kinds)}{': ' if kinds else ''}{', '.join(kinds)}\n"
        for what, kinds in (
            ("refused by name", refused),
            *(
                (f"{what} refused by name", [k for k in good if isinstance(even[k][c], str)])
                for c, what in _MAY_REFUSE.items()
            ),
            ("failed", bad),
            ("cannot be built here, by transformers itself", absent),
        )
    )
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{os.cpu_count()} cores of {found[1].strip() if found else platform.processor()}"
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}"
    )
    odd = sum(verdict(r) == "passed" for r in uneven.values())
    return f"""# Architectures

Every type of transformers' causal-LM mapping, tiny and with random values, on gloo ranks against
one plain unsharded process, in fp32. Written by `make architectures`.

- {len(even)} types: **{len(good)} pass every check**; what is not bit for bit differs by at most
  {worst:.0e} of a tensor's largest value ({TOLERANCE:.0e} is allowed), but for {len(near)} types
  that one process in fp32 has no nearer to fp64 (within a factor of two; their distance from
  it is shown)
{listed}- uneven sizes on 3 ranks: {odd} of {len(uneven)} types pass
- {machine}, {seconds:.0f} s in all; {versions}
- command: `python tests/architectures.py --write docs/evidence/architectures.md`

What is compared:

{checks}

Gradients that are zero by symmetry consist of rounding: a tensor whose largest gradient is below
1e-6 of the model's largest, on both sides, counts as equal. `test_architectures.py` breaks a
weight, a gradient, an exported value, an exported name and a seed on purpose, and sees each check
fail.

## On 2 ranks

{table(even)}

## Uneven sizes, on 3 ranks

Sizes that the ranks do not divide, dims that are shorter than the ranks are many, two experts for
three ranks.

{table(uneven)}
"""


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    heads = ["type", "class", "parameters", "units", "units besides the root", *CHECKS, "notes"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for kind, found in results.items():
        cells = [
            kind,
            found.get("class", ""),
            f"{found['parameters']:,}" if "parameters" in found else "",
        ]
        units = ", ".join(f"`{pattern}`" for pattern in found.get("patterns", []))
        cells += [str(found.get("units", "")), units]
        said = [found[k] for k in ("cannot", "died") if k in found]
        for name in CHECKS:
            value = found.get(name)
            if isinstance(value, str):
                said.append(value)
                cells.append("refused" if value.startswith("refused") else "**no**")
            else:
                cells.append("" if value is None else "exact" if value == 0.0 else f"{value:.0e}")
        notes = "; ".join([*said, *found.get("notes", [])])
        cells.append(re.sub(r"/tmp/\S*?/source", "it", notes).replace("|", "/"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """Return "passed", "refused", "cannot be built" or "failed".

    A type passes whose storage in bfloat16 or whose random start is refused by name.
    """
    values = {name: result.get(name) for name in CHECKS}
    refused = [n for n, v in values.items() if str(v).startswith("refused: ")]
    if "load" in refused:
        return "refused"
    if all(isinstance(v, float) or (n in refused and n in _MAY_REFUSE) for n, v in values.items()):
        return "passed"
    return "cannot be built" if "cannot" in result and "class" in result else "failed"


def packing_document() -> str:
    """Return the text of `packing_types.md`: what the probe finds of every type. 20 s."""
    import transformers

    transformers.logging.set_verbosity_error()

    def tried(packed: bool) -> dict[str, PackingVerdict]:
        configs = {kind: own_section(tiny_config(kind), tiny_class(kind)) for kind in TYPES}
        return {k: probe_packing(c, tiny_class(k), packed=packed) for k, c in configs.items()}

    found = tried(packed=True)
    safe = [k for k, v in found.items() if v.ok]
    unmasked = [k for k in safe if found[k].mask is None]
    masked = [k for k in safe if found[k].mask is not None]
    others = [k for k in found if not found[k].ok]
    whole = sum(verdict.mask is None for verdict in tried(packed=False).values())

    def lines(kinds: list[str], reason: Callable[[PackingVerdict], str | None]) -> str:
        groups: dict[str, list[str]] = {}
        for kind in kinds:
            why = re.sub(r" by \S+ of their spread", "", reason(found[kind]) or "")
            groups.setdefault(re.sub(r"`", "", why)[:160], []).append(kind)
        by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
        return "\n".join(f"- {why}: {', '.join(them)}" for why, them in by_size)

    return f"""# Which types pack

What `data.packing: auto` finds of every type of transformers' causal-LM mapping, tiny and with
random values, in fp32 on a CPU. A run tries its own model, whose layers may be others. Written by
`python tests/architectures.py --packing docs/evidence/packing_types.md`; torch {torch.__version__},
transformers {transformers.__version__}.

- {len(found)} types: **{len(safe)} keep packed samples apart**, {len(unmasked)} without a mask
- whole rows (`wrapped`): {whole} types without a mask

Without a mask: {", ".join(unmasked)}.

## With a mask, and why

{lines(masked, lambda verdict: verdict.mask)}

## Not, and why

{lines(others, lambda verdict: verdict.why)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--types", default="", help="comma-separated; all by default")
    parser.add_argument("--world", type=int, default=0, help="ranks: 2, or 3 with --uneven")
    parser.add_argument("--uneven", action="store_true", help="sizes that the ranks do not divide")
    parser.add_argument("--work", type=Path, help="folder of the results; kept, and resumed")
    parser.add_argument("--write", type=Path, help="do both sweeps, write the tables to this file")
    parser.add_argument("--packing", type=Path, help="write which types pack to this file, no more")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.packing is not None:
        arguments.packing.write_text(packing_document(), "utf-8")
        return 0
    kinds = [k for k in arguments.types.split(",") if k]
    if unknown := [k for k in kinds if k not in TYPES]:
        parser.error(f"unknown types: {', '.join(unknown)}")
    if arguments.rank is not None:
        serve(arguments.rank, arguments.world, arguments.work, kinds, arguments.uneven)
    work = arguments.work or Path(tempfile.mkdtemp(prefix="architectures-"))
    begun = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for uneven in (False, True):
        if uneven != arguments.uneven and arguments.write is None:
            continue
        known = UNEVEN if uneven else TYPES
        chosen = [k for k in kinds or known if k in known]
        world = arguments.world or (3 if uneven else 2)
        found["uneven" if uneven else "even"] = sweep(
            chosen, world, work / ("uneven" if uneven else "even"), uneven
        )
    spent = work / "seconds"  # of all runs that went into these results
    seconds = time.monotonic() - begun + (float(spent.read_text()) if spent.exists() else 0.0)
    spent.write_text(f"{seconds:.1f}")
    if arguments.write is not None:
        arguments.write.write_text(document(found["even"], found["uneven"], seconds), "utf-8")
    failed = 0
    for results in found.values():
        for kind, result in results.items():
            if (what := verdict(result)) != "passed":
                failed += what == "failed"
                reasons = [
                    str(result[k])
                    for k in (*CHECKS, "cannot", "died")
                    if isinstance(result.get(k), str)
                ]
                print(f"{kind} {what}: {'; '.join(reasons)}")
    total = sum(map(len, found.values()))
    print(f"{total - failed} of {total} as they should be, in {seconds:.0f} s; results in {work}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
