"""What ``triptych list rewards`` prints, and the check that a recipe's rewards can be used, for ``--dry-run`` and
start.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from reward_service.functions import FunctionSpec
from reward_service.processes import LoadRefused, RewardProcess, StartFailed
from reward_service.settings import RewardSettings, check_reward_list
from reward_service.verifiers import VERIFIERS, plug_ins, type_name, verifier_names
from system.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class OptionDescription:
    """One option of a verifier."""

    name: str
    type: str
    default: str | None
    """As Python writes it; None when the option is required."""


@dataclass(frozen=True)
class RewardDescription:
    """One name that ``use:`` knows."""

    name: str
    summary: str
    """One line."""
    details: str
    options: tuple[OptionDescription, ...]


def describe_rewards(name: str | None = None) -> list[RewardDescription]:
    """All rewards that ``use:`` knows by name, or the one named.

    Raises:
        ConfigError: no reward of this name.
    """
    names = verifier_names()
    if name is not None and name not in names:
        raise ConfigError(f"no reward '{name}'{nearest(name, names)}")
    return [_describe(entry) for entry in ([name] if name is not None else names)]


def check_rewards(rewards: Sequence[RewardSettings], sources: Sequence[str]) -> None:
    """Checks the list and loads every function in a process of its own, without judging anything.

    Runs an event loop of its own: call it from synchronous code.

    Raises:
        ConfigError: names each reward that cannot be used, with the file and the mend.
        InfrastructureError: a process cannot be started.
    """
    check_reward_list(rewards, sources)
    asyncio.run(check_functions(rewards))


async def check_functions(rewards: Sequence[RewardSettings]) -> None:
    """As ``check_rewards``, inside an event loop and without the check of the list."""
    problems = [problem for problem in await asyncio.gather(*map(_problem_of, rewards)) if problem is not None]
    if problems:
        raise ConfigError("\n".join(problems))


async def _problem_of(reward: RewardSettings) -> str | None:
    spec = FunctionSpec(reward.name, reward.use, dict(reward.options))
    try:
        process = await RewardProcess.start(spec, reward.start_deadline_s)
    except LoadRefused as failure:
        return f"reward '{reward.name}': {failure}"
    except StartFailed as failure:
        return f"reward '{reward.name}' ({reward.use}): {failure}; does importing it end the process, or take too long?"
    process.kill()
    return None


def _describe(name: str) -> RewardDescription:
    if name not in VERIFIERS:
        return RewardDescription(name, f"installed plug-in: {plug_ins()[name].value}", "", ())
    factory = VERIFIERS[name]
    summary, _, details = inspect.getdoc(factory).partition("\n")  # type: ignore[union-attr]
    hints = typing.get_type_hints(factory)
    options = tuple(
        OptionDescription(
            parameter.name,
            type_name(hints[parameter.name]),
            None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in inspect.signature(factory).parameters.values()
    )
    return RewardDescription(name, summary, details.strip(), options)
