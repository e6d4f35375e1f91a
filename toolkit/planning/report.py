"""`toolkit plan` and `toolkit inspect --plan`: facts for programs as JSON, text for people."""

import math
import textwrap
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.disk_space import count_checkpoints_on_disk
from toolkit.config.settings import RunConfig
from toolkit.mesh import DP_REPLICATE, DP_SHARD
from toolkit.models.classes import model_class_name
from toolkit.models.peft_model import base_of
from toolkit.planning.automatic import auto_settings, choose, format_decision, set_accumulation
from toolkit.planning.changes import compare_layouts, find_remedies
from toolkit.planning.devices import Device
from toolkit.planning.estimates import list_reserves, reserved_bytes
from toolkit.planning.fake_ranks import planned_ranks, sharded
from toolkit.planning.meter import HOST
from toolkit.planning.search import Longest, Plan, find_longest, make_plan
from toolkit.planning.simulation import State, state_of
from toolkit.sharding.unit_table import (
    dtype_ledger,
    format_dtype_ledger,
    format_unit_table,
    unit_rows,
)
from toolkit.tables import count_text, format_table, size_text

_WIDTH = 80  # of the text, in characters
_CHANGE_WIDTH = 40  # of the name of a change in a table
_COMPILED = "Layers are planned as torch_compile makes them: what its partitioner keeps."


@dataclass(frozen=True)
class PlanReport:
    """The result of `toolkit plan`: the plan of a run, and the plans of changes to it."""

    plan: Plan
    last: State
    """State of the last rank, whose shards are the smallest. Those of the first are the largest."""
    device: Device
    memory: int | None
    """Bytes that the run must fit into."""
    remedies: list[Plan] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Change that cannot be planned -> the reason."""
    layouts: list[Plan] = field(default_factory=list)
    decision: str = ""
    """The values that `auto` becomes, as text."""
    longest: Longest | None = None
    """The largest sizes that fit, if they were searched for."""

    @property
    def fits(self) -> bool:
        """True if the run fits into the memory, or if no memory is given."""
        return self.plan.fits(self.memory)

    # ---- Facts -----------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Collect plan, estimates, remedies and layouts as a dict for JSON (bytes and seconds)."""
        sim = self.plan.sim
        estimate = self.plan.estimate
        calibration = self.plan.calibration
        facts = {
            "model": sim.model,
            "parameters": sim.values,
            "trained": sim.trained,
            "world_size": self.plan.world_size,
            "mesh": {"dp_replicate": sim.mesh[0], "dp_shard": sim.mesh[1]},
            "exact": {"first_rank": asdict(sim.state), "last_rank": asdict(self.last)},
            "peak": {"phase": sim.phase, "bytes": sim.peak.nbytes, "layer": sim.peak.layer},
            "phases": {name: asdict(peak) for name, peak in sim.peaks.items()},
            "reserve": reserved_bytes(self.device, sim.mesh),
            "calibration": None if calibration is None else asdict(calibration),
            "memory": estimate.memory,
            "device_memory": self.memory,
            "margin": None if self.memory is None else self.memory - estimate.memory,
            "fits": self.fits,
            "device": asdict(self.device),
            "estimate": asdict(estimate) | {"tokens_per_second": estimate.tokens_per_second},
            "disk": self._disk_facts(),
            "run": self._run_facts(),
            "auto": self.decision,
            "remedies": [self._change_facts(p) for p in self.remedies],
            "not_planned": [{"change": name, "why": why} for name, why in self.failed.items()],
            "layouts": [self._change_facts(p) for p in self.layouts],
            "notes": list(sim.notes),
        }
        if self.longest is not None:
            facts["longest"] = self.longest.summary()
        return facts

    def _change_facts(self, plan: Plan) -> dict[str, Any]:
        """Collect memory, time and relative cost of a changed plan, for JSON and the table."""
        return {
            "change": plan.change,
            "memory": plan.estimate.memory,
            "fits": plan.fits(self.memory),
            "same_training": plan.same_training,
            "world_size": plan.world_size,
            "step": plan.estimate.step,
            "cost": plan.estimate.device_time / self.plan.estimate.device_time,
        }

    def _disk_facts(self) -> dict[str, int]:
        """Return the bytes of a `checkpoint` and of an `export`, and the number of `checkpoints`.

        The number is the largest that is on the disk at one time.
        """
        sim = self.plan.sim
        count = count_checkpoints_on_disk(self.plan.cfg.checkpoint, self._run_facts()["max_steps"])
        return {"checkpoint": sim.checkpoint, "checkpoints": count, "export": sim.export}

    def _run_facts(self) -> dict[str, Any]:
        """Return `max_steps`, `tokens` and `seconds` of the complete run, by these names.

        All are None if `train.max_steps` is not set.
        """
        steps = self.plan.cfg.train.max_steps
        if steps < 1:
            return {"max_steps": None, "tokens": None, "seconds": None}
        return {
            "max_steps": steps,
            "tokens": steps * self.plan.estimate.tokens_per_step,
            "seconds": steps * self.plan.estimate.step,
        }

    # ---- Text ------------------------------------------------------------------------------------

    def text(self) -> str:
        """Format the report for the terminal, 80 columns wide, in one text."""
        sim = self.plan.sim
        lines = [
            *self._run_lines(),
            "",
            "Held by a rank, exact, in bytes",
            *_indent(self._state_table()),
            "",
            "At the peak of each phase of a step, simulated (a rank, in GB)",
            *_indent(self._peak_table()),
            f"The {sim.phase} peaks{f' at {sim.peak.layer}' if sim.peak.layer else ''} "
            "(*: assumed).",
            f"A device needs {size_text(self.plan.estimate.memory)}.",
        ]
        if sim.sharding.torch_compile == "layer":
            lines.append(_COMPILED)
        lines += self._calibration_lines()
        lines += [f"note: {note}" for note in sim.notes]
        lines += ["", f"Estimates, on {self.device.name} ({self.device.source})"]
        lines += _indent(self._estimate_table())
        if self.memory is not None:
            margin = self.memory - self.plan.estimate.memory
            verdict = f"fits: {size_text(margin)} are left"
            if margin < 0:
                verdict = f"DOES NOT FIT: {size_text(-margin)} are missing"
            lines += ["", f"In {size_text(self.memory)} it {verdict}."]
        if self.remedies:
            any_fits = any(p.fits(self.memory) for p in self.remedies)
            title = "Changes that make it fit, the cheapest first" if any_fits else "No change fits"
            lines += ["", title, *_indent(self._change_table(self.remedies))]
        if self.layouts:
            lines += ["", "Layouts, the fastest that fits first"]
            lines += _indent(self._change_table(self.layouts))
        if self.longest is not None:
            lines += ["", "The largest that fit", *_indent(list(self.longest.lines))]
        lines += [f"not planned: {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)

    def _run_lines(self) -> list[str]:
        """Format lines with the model, the mesh, the batch and the values chosen for `auto`."""
        sim = self.plan.sim
        train = self.plan.cfg.train
        length = self.plan.cfg.data.sequence_length
        counts = f"{count_text(sim.values)} parameters, {count_text(sim.trained)} trained"
        lines = [
            f"model   {sim.model}, {counts}",
            f"mesh    {self.plan.world_size} rank(s): dp_replicate {sim.mesh[0]} x dp_shard "
            f"{sim.mesh[1]}{_format_expert_parallel(sim.sharding.expert_parallel)}",
            f"batch   {train.micro_batch} x {length:,} tokens, {train.gradient_accumulation_steps} "
            f"accumulated: {self.plan.estimate.tokens_per_step:,} tokens a step",
        ]
        if self.decision:
            text = f"auto    {self.decision}"
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 8)
        return lines

    def _calibration_lines(self) -> list[str]:
        """Format lines that describe the calibration that was used; empty if there is none."""
        calibration = self.plan.calibration
        if calibration is None:
            return []
        return textwrap.wrap(
            f"Corrected by {calibration.source}: memory in addition to what is held x "
            f"{calibration.memory:.3f}, computing x {calibration.time:.3f}.",
            _WIDTH,
        )

    def _state_table(self) -> list[str]:
        """Format a table of the bytes that the first and the last rank hold between two steps."""
        first = asdict(self.plan.sim.state)
        last = asdict(self.last)
        rows = [["", "first rank", "last rank"]]
        for name, nbytes in first.items():
            title = "optimizer state" if name == "optimizer" else name
            rows.append([title, f"{nbytes:,}", f"{last[name]:,}"])
        return format_table(rows, right={1, 2})

    def _peak_table(self) -> list[str]:
        """Format a table of the memory in GB at the peak of each phase, one row per kind of memory.

        A kind is omitted if it is below 5 MB and below 1 % of the peak.
        """
        peaks = self.plan.sim.peaks
        rows = [["", *peaks]]
        largest: dict[str, int] = {}
        for peak in peaks.values():
            for kind, nbytes in peak.kinds.items():
                largest[kind] = max(nbytes, largest.get(kind, 0))
        for kind in sorted(sorted(largest), key=lambda kind: -largest[kind]):
            # Small kinds are omitted, unless the model is small.
            if largest[kind] >= 5e6 or largest[kind] * 100 >= self.plan.sim.peak.nbytes:
                title = "(in host memory)" if kind == HOST else kind
                rows.append([title, *(_gigabytes(p.kinds.get(kind, 0)) for p in peaks.values())])
        rows.append(["all on the device", *(_gigabytes(p.nbytes) for p in peaks.values())])
        for name, nbytes in list_reserves(self.device, self.plan.sim.mesh).items():
            rows.append([f"{name} *", *[_gigabytes(nbytes)] * len(peaks)])
        return format_table(rows, right={*range(1, 1 + len(peaks))})

    def _estimate_table(self) -> list[str]:
        """Format a table of time, speed, traffic, host memory and disk."""
        sim = self.plan.sim
        estimate = self.plan.estimate
        run = self._run_facts()
        disk = self._disk_facts()
        processes = min(self.plan.world_size, self.device.per_node)
        load = size_text(processes * estimate.host_at_load)
        save = size_text(processes * estimate.host_at_save)
        copies = f", copies {estimate.copies:,.3g}" if estimate.copies else ""
        compiled = "compiled" if sim.sharding.torch_compile == "layer" else "not compiled"
        rows = [
            [
                "step",
                f"{estimate.step:,.3g} s: computing {estimate.compute:,.3g}, communicating "
                f"{estimate.communication:,.3g}{copies}",
            ],
            [
                "speed",
                f"{estimate.tokens_per_second:,.0f} tokens/s, {estimate.mfu:.1%} MFU, {compiled}",
            ],
            [
                "traffic",
                f"a rank sends {size_text(estimate.gathered)} to gather, "
                f"{size_text(estimate.reduced)} to reduce, in a step",
            ],
            ["host", f"{load} to load, {save} to save, of each machine"],
            [
                "disk",
                f"{disk['checkpoints']} checkpoint(s) of {size_text(disk['checkpoint'])}, an "
                f"export of {size_text(sim.export)}",
            ],
        ]
        if run["max_steps"] is not None:
            tokens = count_text(run["tokens"])
            duration = _format_duration(run["seconds"])
            rows.append(["run", f"{run['max_steps']:,} steps, {tokens} tokens, {duration}"])
        return format_table(rows, right=set())

    def _change_table(self, plans: list[Plan]) -> list[str]:
        """Format a table of changed plans: memory, time, relative cost, and whether each fits.

        A legend follows. Plans that train the model differently are marked with `*`.
        """
        rows = [["", "needs", "step", "cost", "fits"]]
        for plan in plans:
            facts = self._change_facts(plan)
            fits = "yes" if facts["fits"] else "no"
            numbers = [
                size_text(facts["memory"]),
                f"{facts['step']:,.3g} s",
                f"x {facts['cost']:.2f}",
                fits if self.memory is not None else "-",
            ]
            name = plan.change + ("" if plan.same_training else " *")
            *first_parts, last_part = textwrap.wrap(name, _CHANGE_WIDTH)
            rows += [[part, "", "", "", ""] for part in first_parts]
            rows.append([last_part, *numbers])
        legend = ["cost: device-seconds of a token, relative to the run as it is"]
        if not all(plan.same_training for plan in plans):
            legend.append("*: another training, not only another layout")
        return [*format_table(rows, right={1, 2, 3}), *legend]


def plan_run(
    cfg: RunConfig,
    world_size: int | None,
    device: Device,
    memory: int | None = None,
    *,
    sweep: bool = False,
    sizes: bool = False,
) -> PlanReport:
    """Plan a run and, if it does not fit into `memory`, changes that make it fit.

    Settings that are `auto` are decided first. Takes seconds for each plan, because each simulates
    a step. Shows a progress bar.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks; None: the product of the mesh in the settings.
        device: the figures of the devices.
        memory: bytes of each device into which the run must fit; None: no limit.
        sweep: also compare several meshes, each with three modes of activation checkpointing.
        sizes: also find the longest sequence and the largest micro-batch that fit into `memory`. If
            `memory` is None, the device's memory is the limit.

    Raises:
        ConfigError: the number of ranks is not known.
        PlanningError: the run cannot be simulated.
    """
    world_size = planned_ranks(cfg.sharding, world_size)
    device_memory = memory or int(device.memory)
    with tqdm(unit="plan", disable=None, leave=False) as bar:

        def report(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        report("the run as it is")
        if auto_settings(cfg):
            plan = choose(cfg, world_size, device, device_memory)[1]
        else:
            plan = make_plan(set_accumulation(cfg, world_size), world_size, device, memory)
        decided = replace(plan.cfg, sharding=plan.sim.sharding)
        last = plan.sim.state
        if world_size > 1:
            last = state_of(decided, world_size, world_size - 1)
        remedies: list[Plan] = []
        failed: dict[str, str] = {}
        if memory is not None and not plan.fits(memory):
            remedies, failed = find_remedies(plan, device, memory, report)
        layouts = compare_layouts(plan, device, memory, report) if sweep else []
        longest = find_longest(plan, device, device_memory, report) if sizes else None
    decision = format_decision(cfg, plan.cfg)
    return PlanReport(plan, last, device, memory, remedies, failed, layouts, decision, longest)


def _indent(lines: list[str]) -> list[str]:
    """Indent each line by two spaces."""
    return [f"  {line}" for line in lines]


def _gigabytes(nbytes: int) -> str:
    """Format bytes as a number of GB with three decimals, without the unit."""
    return f"{nbytes / 1e9:,.3f}"


def _format_duration(seconds: float) -> str:
    """Format seconds as minutes (below 2 hours), hours (below 2 days) or days."""
    if seconds < 7200:
        minutes = math.ceil(seconds / 60)
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    return f"{seconds / 3600:,.1f} hours" if seconds < 172800 else f"{seconds / 86400:,.1f} days"


# ---- Units ---------------------------------------------------------------------------------------


def summarise_units(cfg: RunConfig, world_size: int | None = None) -> dict[str, Any]:
    """Describe as a dict for JSON how a run would be sharded on GPUs: units, dtypes, text tables.

    Shards the model on meta in a fake process group, without weights.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks; None: the product of the mesh in the settings.

    Raises:
        ConfigError: the number of ranks is not known.
    """
    world_size = planned_ranks(cfg.sharding, world_size)
    # Recomputation changes no unit, and deciding its `auto` would take plans.
    cfg = replace(cfg, sharding=replace(cfg.sharding, activation_checkpointing="none"))
    with sharded(cfg, world_size) as (sharded_model, sharding):
        rows = unit_rows(sharded_model, sharding)
        return {
            "model": model_class_name(base_of(sharded_model.model)),
            "parameters": sum(row.parameters for row in rows),
            "world_size": world_size,
            "mesh": {name: sharded_model.mesh.axes[name] for name in (DP_REPLICATE, DP_SHARD)},
            "expert_parallel": sharding.expert_parallel,
            "bytes_sharded": sum(row.bytes_sharded for row in rows),
            "units": [asdict(row) for row in rows],
            "dtypes": dtype_ledger(sharded_model, sharding),
            "layers": list(sharded_model.plan.layers),
            "table": format_unit_table(sharded_model, sharding),
            "ledger": format_dtype_ledger(sharded_model, sharding),
        }


def _format_expert_parallel(parts: int) -> str:
    """Format the end of a line about the mesh; "" if experts are not divided."""
    return f" (expert_parallel {parts})" if parts > 1 else ""


def format_units(summary: dict[str, Any]) -> str:
    """Format the result of `summarise_units` as text."""
    mesh = summary["mesh"]
    return (
        f"model   {summary['model']}, {summary['parameters']:,} parameters\n"
        f"mesh    {summary['world_size']} ranks: dp_replicate {mesh['dp_replicate']} x dp_shard "
        f"{mesh['dp_shard']}{_format_expert_parallel(summary['expert_parallel'])}; "
        f"{summary['bytes_sharded'] / 1e6:,.1f} MB of parameters a rank\n"
        f"dtypes  {summary['ledger']}\n\n{summary['table']}"
    )
