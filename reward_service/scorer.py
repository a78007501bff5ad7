"""Scores groups with local reward functions: all rewards of a group's data source at once, then their weighted sum.

A completion that any weighted reward could not judge has no reward, but the error; never a partial sum, never 0.
Results are matched by id. The same request asked twice is judged once. ``build_scorer`` makes the picklable factory
that an actor calls in its own process; ``LocalScorer`` belongs to the event loop that uses it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_service.answers import AnswerBook
from reward_service.pool import ProcessesDown, ProcessPool, all_or_first_error
from reward_service.processes import Verdict
from reward_service.results import InvalidResult, Judgement, read_number
from reward_service.settings import RewardSettings, check_reward_list
from system.core.errors import ConfigError, ScoringDown
from system.core.protocols import Score, ScoreError, ScoreItem, ScoreRequest
from system.core.records import REWARD_ERROR_KEY

INFO_KEY = "reward_info"


@dataclass(frozen=True)
class RewardMetrics:
    """What one reward did since the scorer was made."""

    calls: int
    items: int
    judged: int
    errors: Mapping[str, int]
    """Items that could not be judged, by code: timeout, raised, crashed, invalid, declined, outage."""
    latency_s: float
    """Seconds from call to verdicts, summed over calls, waiting included."""
    running_s: float
    waiting_s: float
    processes_started: int
    processes_replaced: int


@dataclass
class _Counters:
    calls: int = 0
    items: int = 0
    judged: int = 0
    latency_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class LocalScorer:
    """Implements ``system.core.protocols.Scorer`` with functions in local processes."""

    def __init__(self, rewards: Sequence[RewardSettings], folder: str = ".") -> None:
        """
        Args:
            folder: where relative reward files are looked for when the working folder does not have them.
        """
        self._rewards = {reward.name: reward for reward in rewards}
        self._pools = {reward.name: ProcessPool(reward, folder) for reward in rewards}
        self._counters = {reward.name: _Counters() for reward in rewards}
        self._book = AnswerBook()

    async def start(self) -> None:
        """Starts one process per reward, so that the first group does not wait for imports.

        Raises:
            ConfigError: a function cannot be used.
            ScoringDown: no process can be started for ``outage_s``.
        """
        try:
            await all_or_first_error([pool.start() for pool in self._pools.values()])
        except ProcessesDown as failure:
            raise ScoringDown(str(failure)) from None

    async def score(self, request: ScoreRequest) -> list[Score]:
        """Judges the items of one group. Cancelling it kills the processes that were judging.

        Returns:
            One score per item, in the order of the items.
        Raises:
            ConfigError: no reward applies to the request's data source.
            ScoringDown: a reward with ``on_outage: fail`` is down for ``outage_s``.
            ValueError: two items of one id.
        """
        if len({item.id for item in request.items}) != len(request.items):
            raise ValueError(f"score request '{request.request_id}' has two items of one id")
        applying = [reward for reward in self._rewards.values() if reward.applies_to(request.source)]
        if not any(reward.weight != 0 for reward in applying):
            raise ConfigError(f"rewards: nothing judges the data source '{request.source}'")
        return await self._book.ask(request, lambda: self._score(request, applying))

    async def close(self) -> None:
        """Ends all processes at once; requests under way are cancelled."""
        await self._book.close()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def metrics(self) -> dict[str, RewardMetrics]:
        """Counts and times by reward name."""
        return {
            name: RewardMetrics(
                calls=counters.calls,
                items=counters.items,
                judged=counters.judged,
                errors=dict(counters.errors),
                latency_s=counters.latency_s,
                running_s=self._pools[name].counters.running_s,
                waiting_s=self._pools[name].counters.waiting_s,
                processes_started=self._pools[name].counters.started,
                processes_replaced=self._pools[name].counters.replaced,
            )
            for name, counters in self._counters.items()
        }

    def pids(self) -> dict[str, list[int]]:
        """Living processes by reward name."""
        return {name: pool.pids for name, pool in self._pools.items()}

    async def _score(self, request: ScoreRequest, applying: Sequence[RewardSettings]) -> list[Score]:
        items = [wire_item(item) for item in request.items]
        if not items:
            return []
        judged = await all_or_first_error([self._judge(reward, items) for reward in applying])
        verdicts = {reward.name: by_id for reward, by_id in zip(applying, judged, strict=True)}
        return [
            combine(item.id, applying, {name: by_id[item.id] for name, by_id in verdicts.items()})
            for item in request.items
        ]

    async def _judge(self, reward: RewardSettings, items: Sequence[Mapping[str, Any]]) -> dict[str, Verdict]:
        counters = self._counters[reward.name]
        began_s = time.monotonic()
        try:
            verdicts = await self._pools[reward.name].judge(items)
        except ProcessesDown as failure:
            if reward.on_outage == "fail":
                raise ScoringDown(f"{failure}. With on_outage: skip its rewards would be null instead") from None
            verdicts = {str(item["id"]): ScoreError("outage", str(failure), retryable=True) for item in items}
        counters.calls += 1
        counters.items += len(items)
        counters.latency_s += time.monotonic() - began_s
        for verdict in verdicts.values():
            if isinstance(verdict, ScoreError):
                counters.errors[verdict.code] += 1
            else:
                counters.judged += 1
        return verdicts


@dataclass(frozen=True)
class ScorerFactory:
    """Makes a scorer inside the process that uses it. Picklable."""

    rewards: tuple[RewardSettings, ...]
    folder: str
    """The working folder of the process that read the recipe."""

    def __call__(self) -> LocalScorer:
        return LocalScorer(self.rewards, self.folder)


def build_scorer(rewards: Sequence[RewardSettings], sources: Sequence[str]) -> ScorerFactory:
    """The factory of a recipe's scorer.

    Args:
        sources: names of the recipe's data sources.

    Raises:
        ConfigError: as ``check_reward_list``.
    """
    check_reward_list(rewards, sources)
    return ScorerFactory(tuple(rewards), os.getcwd())


def wire_item(item: ScoreItem) -> dict[str, Any]:
    """An item as it crosses to a reward process; the label and the metadata exactly as they came."""
    return {
        "id": item.id,
        "completion": item.completion,
        "prompt": item.prompt,
        "label": item.label,
        "metadata": item.metadata,
        "finish_reason": item.finish_reason,
        "completion_tokens": item.completion_tokens,
    }


def combine(item_id: str, rewards: Sequence[RewardSettings], verdicts: Mapping[str, Verdict]) -> Score:
    """The weighted sum of one item's verdicts, or the first error of a reward whose weight is not 0.

    ``parts`` holds each reward unweighted under its name, and a function's own parts under ``name/part``. ``info``
    holds what functions attached under ``reward_info``, and errors under ``reward_error``, both by reward name.
    """
    total = 0.0
    parts: dict[str, float] = {}
    infos: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    error: ScoreError | None = None
    for reward in rewards:
        verdict = verdicts[reward.name]
        if isinstance(verdict, Judgement):
            total += reward.weight * verdict.reward
            parts[reward.name] = verdict.reward
            parts.update({f"{reward.name}/{part}": value for part, value in verdict.parts.items()})
            if verdict.info != "{}":
                infos[reward.name] = json.loads(verdict.info)
        else:
            errors[reward.name] = {"code": verdict.code, "message": verdict.message}
            if reward.weight != 0 and error is None:
                error = verdict
    if error is None:
        try:
            read_number(total, "the weighted sum")
        except InvalidResult as failure:
            error = ScoreError("invalid", f"item '{item_id}': {failure}")
    attached = {INFO_KEY: infos} if infos else {}
    if errors:
        attached[REWARD_ERROR_KEY] = errors
    return Score(item_id, None if error else total, parts, json.dumps(attached), error)
