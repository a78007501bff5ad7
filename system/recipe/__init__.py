"""The recipe: settings of all rooms composed, read from YAML, checked as a whole, and turned into a plan."""

from system.recipe.checks import Plan, build_objective_of, check_recipe, print_plan
from system.recipe.loading import differing_keys, load_recipe, read_resolved, resolved_yaml
from system.recipe.partners import reference_settings
from system.recipe.placement import Placement
from system.recipe.plan import PlanLine
from system.recipe.settings import (
    EvaluationSettings,
    LogSettings,
    ObjectiveSettings,
    PlacementSettings,
    Recipe,
    RunSettings,
    SyncSettings,
    ThreadSettings,
)

__all__ = [
    "EvaluationSettings",
    "LogSettings",
    "ObjectiveSettings",
    "Placement",
    "PlacementSettings",
    "Plan",
    "PlanLine",
    "Recipe",
    "RunSettings",
    "SyncSettings",
    "ThreadSettings",
    "build_objective_of",
    "check_recipe",
    "differing_keys",
    "load_recipe",
    "print_plan",
    "read_resolved",
    "reference_settings",
    "resolved_yaml",
]
