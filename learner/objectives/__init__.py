"""Objectives: pages of mathematics from log-probs to coefficients. Knows no model, no Ray, no DeepSpeed.

``build_objective`` makes one by name; the learner prepares a step once (``Objective.prepare``) and calls the objective
with an ``ObjectiveBatch`` per micro-batch. To add one, put a module with an ``Objective`` subclass in this folder.
"""

from learner.advantages import Denominators, StepRows, step_denominators
from learner.objectives.base import Objective, ObjectiveResult, StepPlan, TokenObjective
from learner.objectives.batch import ObjectiveBatch
from learner.objectives.inputs import LossInputs, Trajectories
from learner.objectives.metrics import MetricCollector, MetricSums
from learner.objectives.registry import build_objective, objective_class, objective_names
from learner.objectives.settings import ClippedSettings, ObjectiveSettings, TokenSettings

__all__ = [
    "ClippedSettings",
    "Denominators",
    "LossInputs",
    "MetricCollector",
    "MetricSums",
    "Objective",
    "ObjectiveBatch",
    "ObjectiveResult",
    "ObjectiveSettings",
    "StepPlan",
    "StepRows",
    "TokenObjective",
    "TokenSettings",
    "Trajectories",
    "build_objective",
    "objective_class",
    "objective_names",
    "step_denominators",
]
