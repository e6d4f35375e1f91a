"""`toolkit plan`: a run, and where it does not fit, what makes it fit."""

from dataclasses import replace

from tqdm import tqdm

from toolkit.planning.automatic import accumulated, choose, chosen_names, in_words
from toolkit.planning.changes import Plan, layouts, make_plan, remedies
from toolkit.planning.devices import Device
from toolkit.planning.report import PlanReport
from toolkit.planning.simulation import Config, state_of
from toolkit.sharding.unit_table import planned_ranks


def plan_run(
    cfg: Config,
    world_size: int | None,
    device: Device,
    memory: int | None = None,
    *,
    sweep: bool = False,
) -> PlanReport:
    """Return the plan of a run on `device`; with `memory`, in bytes, what makes it fit.

    Seconds for each layout or change that is tried: one simulated step each. `sweep` compares
    meshes and recomputation. ConfigError: the number of processes is not known.
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
    return PlanReport(plan, last, device, memory, found, failed, compared, in_words(asked, cfg))
