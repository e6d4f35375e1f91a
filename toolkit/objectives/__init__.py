"""Objectives: what a run minimises, as one object for recipe, evaluation, plan and rehearsal.

A recipe builds the objective of its settings and calls it on each micro-batch:

    objective = objectives.build(cfg, mesh)
    ...
    loss = objective(model, batch)

The planner and the rehearsal build the same object, so a new objective needs no change of either.
"""

from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.objective import Objective, build, objective_class, register
from toolkit.objectives.preference import PreferenceTuning
