"""`toolkit plan`: a run, and what makes it fit, for people in 80 columns, for programs as JSON."""

import math
import textwrap
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.disk import checkpoints_kept
from toolkit.config.settings import RunConfig
from toolkit.planning.automatic import accumulated, choose, chosen_names, in_words
from toolkit.planning.changes import Plan, layouts, make_plan, remedies
from toolkit.planning.devices import Device
from toolkit.planning.estimates import reserve_of, reserves
from toolkit.planning.fake_ranks import planned_ranks
from toolkit.planning.longest import Longest, longest
from toolkit.planning.meter import HOST
from toolkit.planning.simulation import State, state_of
from toolkit.tables import count_text, size_text, table

_COMPILED = "Layers are planned as torch_compile makes them: what its partitioner keeps."
_NAME = 40  # characters of a change in a line, of 80


@dataclass(frozen=True)
class PlanReport:
    """What `toolkit plan` found."""

    plan: Plan
    last: State
    """Of the last rank, whose shards are the smallest; the first rank's are the largest."""
    device: Device
    memory: int | None
    remedies: list[Plan] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Changes that cannot be planned, and why."""
    layouts: list[Plan] = field(default_factory=list)
    chosen: str = ""
    """What `auto` became."""
    longest: Longest | None = None
    """The largest sizes that fit, where they were asked for."""

    @property
    def fits(self) -> bool:
        return self.plan.fits(self.memory)

    def summary(self) -> dict[str, Any]:
        """Return all of it, ready for JSON; bytes and seconds."""
        sim, found, calibration = self.plan.sim, self.plan.estimate, self.plan.calibration
        return {
            "model": sim.model,
            "parameters": sim.values,
            "trained": sim.trained,
            "world_size": self.plan.world_size,
            "mesh": {"dp_replicate": sim.mesh[0], "dp_shard": sim.mesh[1]},
            "exact": {"first_rank": asdict(sim.state), "last_rank": asdict(self.last)},
            "peak": {"phase": sim.phase, "bytes": sim.peak.nbytes, "layer": sim.peak.layer},
            "phases": {name: asdict(peak) for name, peak in sim.peaks.items()},
            "reserve": reserve_of(self.device, sim.mesh),
            "calibration": None if calibration is None else asdict(calibration),
            "memory": found.memory,
            "device_memory": self.memory,
            "margin": None if self.memory is None else self.memory - found.memory,
            "fits": self.fits,
            "device": asdict(self.device),
            "estimate": asdict(found) | {"tokens_per_second": found.tokens_per_second},
            "disk": self._disk(),
            "run": self._run(),
            "auto": self.chosen,
            "remedies": [self._row(p) for p in self.remedies],
            "not_planned": [{"change": name, "why": why} for name, why in self.failed],
            "layouts": [self._row(p) for p in self.layouts],
            "notes": list(sim.notes),
        } | ({} if self.longest is None else {"longest": self.longest.summary()})

    def text(self) -> str:
        """Return all of it for people."""
        sim, found = self.plan.sim, self.plan.estimate
        train, data = self.plan.cfg.train, self.plan.cfg.data
        batch = train.micro_batch, data.sequence_length
        lines = [
            f"model   {sim.model}, {count_text(sim.values)} parameters, "
            f"{count_text(sim.trained)} trained",
            f"mesh    {self.plan.world_size} rank(s): dp_replicate {sim.mesh[0]} x dp_shard "
            f"{sim.mesh[1]}",
            f"batch   {batch[0]} x {batch[1]:,} tokens, {train.gradient_accumulation_steps} "
            f"accumulated: {found.tokens_per_step:,} tokens a step",
            *textwrap.wrap(f"auto    {self.chosen}", 80, subsequent_indent=" " * 8)[
                : 80 * bool(self.chosen)
            ],
            "",
            "Held by a rank, exact, in bytes",
            *_indent(self._state_rows()),
            "",
            "At the peak of each phase of a step, simulated (a rank, in GB)",
            *_indent(self._peak_rows()),
            f"The {sim.phase} peaks{f' at {sim.peak.layer}' if sim.peak.layer else ''} "
            "(*: assumed).",
            f"A device needs {size_text(found.memory)}.",
            *[_COMPILED] * (sim.sharding.torch_compile == "layer"),
            *self._calibration_lines(),
            *(f"note: {note}" for note in sim.notes),
            "",
            f"Estimates, on {self.device.name} ({self.device.source})",
            *_indent(self._estimate_rows()),
        ]
        if self.memory is not None:
            margin = self.memory - found.memory
            word = f"fits: {size_text(margin)} are left" if margin >= 0 else "DOES NOT FIT: "
            word += "" if margin >= 0 else f"{size_text(-margin)} are missing"
            lines += ["", f"In {size_text(self.memory)} it {word}."]
        if self.remedies:
            some = any(p.fits(self.memory) for p in self.remedies)
            what = "Changes that make it fit, the cheapest first" if some else "No change fits"
            lines += ["", what, *_indent(self._change_rows(self.remedies))]
        if self.layouts:
            lines += ["", "Layouts, the fastest that fits first"]
            lines += _indent(self._change_rows(self.layouts))
        if self.longest is not None:
            lines += ["", "The largest that fit", *_indent(list(self.longest.lines))]
        lines += [f"not planned: {name}: {why}" for name, why in self.failed]
        return "\n".join(lines)

    def _calibration_lines(self) -> list[str]:
        found = self.plan.calibration
        if found is None:
            return []
        said = f"Corrected by {found.source}: memory beside what is held x {found.memory:.3f}, "
        return textwrap.wrap(f"{said}computing x {found.time:.3f}.", 80)

    def _state_rows(self) -> list[str]:
        first, last = asdict(self.plan.sim.state), asdict(self.last)
        rows = [["", "first rank", "last rank"]]
        rows += [[n.replace("optimizer", "optimizer state"), f"{v:,}", f"{last[n]:,}"]
                 for n, v in first.items()]  # fmt: skip
        return table(rows, right={1, 2})

    def _peak_rows(self) -> list[str]:
        peaks = self.plan.sim.peaks
        kinds = {kind for peak in peaks.values() for kind in peak.kinds}
        rows = [["", *peaks]]
        for kind in sorted(kinds, key=lambda k: -max(p.kinds.get(k, 0) for p in peaks.values())):
            sizes = [peak.kinds.get(kind, 0) for peak in peaks.values()]
            if max(sizes) >= 5e6 or max(sizes) * 100 >= self.plan.sim.peak.nbytes:
                name = "(in host memory)" if kind == HOST else kind
                rows.append([name, *(f"{size / 1e9:,.3f}" for size in sizes)])
        rows.append(["all on the device", *(f"{p.nbytes / 1e9:,.3f}" for p in peaks.values())])
        for name, size in reserves(self.device, self.plan.sim.mesh).items():
            rows.append([f"{name} *", *[f"{size / 1e9:,.3f}"] * len(peaks)])
        return table(rows, right={1, 2, 3})

    def _estimate_rows(self) -> list[str]:
        sim, found, run = self.plan.sim, self.plan.estimate, self._run()
        per_node = min(self.plan.world_size, self.device.per_node)
        disk = self._disk()
        compiled = "compiled" if sim.sharding.torch_compile == "layer" else "not compiled"
        copies = f", copies {found.copies:,.3g}" if found.copies else ""
        gathered, reduced = size_text(found.gathered), size_text(found.reduced)
        load, save = (size_text(per_node * n) for n in (found.host_at_load, found.host_at_save))
        checkpoint, export = size_text(disk["checkpoint"]), size_text(sim.export)
        lines = {
            "step": f"{found.step:,.3g} s: computing {found.compute:,.3g}, communicating "
            f"{found.communication:,.3g}{copies}",
            "speed": f"{found.tokens_per_second:,.0f} tokens/s, {found.mfu:.1%} MFU, {compiled}",
            "traffic": f"a rank sends {gathered} to gather, {reduced} to reduce, in a step",
            "host": f"{load} to load, {save} to save, of each machine",
            "disk": f"{disk['checkpoints']} checkpoint(s) of {checkpoint}, an export of {export}",
        }
        if run["max_steps"] is not None:
            steps, tokens = f"{run['max_steps']:,} steps", f"{count_text(run['tokens'])} tokens"
            lines["run"] = f"{steps}, {tokens}, {_hours(run['seconds'])}"
        return table([list(item) for item in lines.items()], right=set())

    def _change_rows(self, plans: list[Plan]) -> list[str]:
        now = self.plan.estimate.device_time
        rows = [["", "needs", "step", "cost", "fits"]]
        for plan in plans:
            cost = plan.estimate.device_time / now
            fits = "yes" if plan.fits(self.memory) else "no"
            name = plan.change + ("" if plan.kept else " *")
            parts = textwrap.wrap(name, _NAME)
            numbers = [
                size_text(plan.estimate.memory),
                f"{plan.estimate.step:,.3g} s",
                f"x {cost:.2f}",
                fits if self.memory is not None else "-",
            ]
            rows += [[part, "", "", "", ""] for part in parts[:-1]] + [[parts[-1], *numbers]]
        said = ["cost: device-seconds of a token, against the run as it is"]
        said += ["*: another training, not only another layout"] * (not all(p.kept for p in plans))
        return [*table(rows, right={1, 2, 3}), *said]

    def _row(self, plan: Plan) -> dict[str, Any]:
        return {
            "change": plan.change,
            "memory": plan.estimate.memory,
            "fits": plan.fits(self.memory),
            "same_training": plan.kept,
            "world_size": plan.world_size,
            "step": plan.estimate.step,
            "cost": plan.estimate.device_time / self.plan.estimate.device_time,
        }

    def _disk(self) -> dict[str, int]:
        sim, cfg = self.plan.sim, self.plan.cfg
        kept = checkpoints_kept(cfg.checkpoint, self._run()["max_steps"])
        return {"checkpoint": sim.checkpoint, "checkpoints": kept, "export": sim.export}

    def _run(self) -> dict[str, Any]:
        steps, found = self.plan.cfg.train.max_steps, self.plan.estimate
        if steps < 1:
            return {"max_steps": None, "tokens": None, "seconds": None}
        return {
            "max_steps": steps,
            "tokens": steps * found.tokens_per_step,
            "seconds": steps * found.step,
        }


def plan_run(
    cfg: RunConfig,
    world_size: int | None,
    device: Device,
    memory: int | None = None,
    *,
    sweep: bool = False,
    sizes: bool = False,
) -> PlanReport:
    """Return the plan of a run on `device`; with `memory`, in bytes, what makes it fit.

    Seconds for each layout or change that is tried: one simulated step each. `sweep` compares
    meshes and recomputation, `sizes` finds the longest sequence and the largest batch that fit,
    into the `device` where there is no `memory`. ConfigError: the number of processes is not known.
    """
    world = planned_ranks(cfg.sharding, world_size)
    with tqdm(unit="plan", disable=None, leave=False) as bar:

        def say(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        say("the run as it is")
        asked = cfg
        if chosen_names(cfg):
            plan = choose(cfg, world, device, memory or int(device.memory))[1]
            cfg = plan.cfg
        else:
            cfg = accumulated(cfg, world)
            plan = make_plan(cfg, world, device, memory)
        decided = replace(cfg, sharding=plan.sim.sharding)  # what `auto` is on this device
        last = state_of(decided, world, world - 1) if world > 1 else plan.sim.state
        found: list[Plan] = []
        failed: list[tuple[str, str]] = []
        if memory is not None and not plan.fits(memory):
            found, failed = remedies(plan, device, memory, say)
        compared = layouts(plan, device, memory, say) if sweep else []
        most = longest(plan, device, memory or int(device.memory), say) if sizes else None
    said = in_words(asked, cfg)
    return PlanReport(plan, last, device, memory, found, failed, compared, said, most)


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _hours(seconds: float) -> str:
    if seconds < 7200:
        minutes = math.ceil(seconds / 60)
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    return f"{seconds / 3600:,.1f} hours" if seconds < 172800 else f"{seconds / 86400:,.1f} days"
