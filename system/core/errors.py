"""Errors, each with the exit code a shell sees.

One class per kind of cause. The message is for the person who must act: what happened, to which thing,
what was expected, what to do. Anything that is not a ``TriptychError`` is a defect and exits with 1 and a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TriptychError(Exception):
    """Base of all expected failures."""

    exit_code = 1


class ConfigError(TriptychError):
    """The recipe or the command line asks for something that cannot be."""

    exit_code = 2


class DataError(TriptychError):
    """A data source cannot give what the recipe asks of it."""

    exit_code = 3


class InfrastructureError(TriptychError):
    """A process, node, network or service failed. Never becomes a reward."""

    exit_code = 4


class WorkerLost(InfrastructureError):
    """A rollout or reference worker died and its restart budget is spent."""


class SyncFailed(InfrastructureError):
    """The current weights could not be moved, or do not verify."""


class PlacementInfeasible(InfrastructureError):
    """The cluster cannot hold the roles the recipe asks for."""


class ScoringDown(InfrastructureError):
    """Rewards cannot be computed for longer than the recipe allows."""


class LearnerLost(InfrastructureError):
    """A learner rank died and the pool's restart budget is spent."""


class OutOfMemory(InfrastructureError):
    """An allocation failed; the same settings would fail again, so nothing is started anew."""


class CheckpointDamaged(InfrastructureError):
    """A checkpoint is missing a part, or a part does not match its checksum."""


class StalledError(TriptychError):
    """No progress within ``stall_s``."""

    exit_code = 5


class Interrupted(TriptychError):
    """Stopped by the user (Ctrl-C, ``run stop``); a checkpoint is written."""

    exit_code = 130


class Preempted(TriptychError):
    """Stopped by SIGTERM; a checkpoint is written, the same command goes on."""

    exit_code = 143


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest valid name, or the list of valid names when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(names)}" if names else ""
