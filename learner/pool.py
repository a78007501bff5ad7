"""The learner ranks as one: spreads a step's rows over them by cost, calls them all, merges what they say.

Every call has a deadline. The first error of any rank is the pool's error, at once; the other ranks may then hang in a
collective, so a pool that failed is only closed, or started again from a checkpoint. Called by the run's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.deepspeed_engine import NonFiniteError
from learner.handles import ActorRank, LocalRank, RankHandle
from learner.objectives import build_objective
from learner.packing import PackItem, split_in_order, spread_over_ranks
from learner.rank import LearnerPlan, StepReport
from system.core.deadlines import first_line, within
from system.core.errors import ConfigError, InfrastructureError, LearnerLost, TriptychError
from system.core.records import Group, Row
from system.core.weights.sender import LOOPBACK, SenderBackend, SendReport
from system.core.weights.wire import DEFAULT_BUCKET_BYTES, Endpoint, Manifest

CLOSE_DEADLINE_S = 20.0
"""A rank that is idle closes in milliseconds; one that hangs is not waited for longer than this."""

TOLERANCE = 0.1
"""How much more than the even share a rank may have before groups are cut."""

COUPLED_TOLERANCE = 0.3
"""The same where a cut group costs a second forward pass over all rows."""

OTHERS_DEADLINE_S = 3.0
"""How long after a rank's error the others may still say what happened to them, which may be its cause."""


class LearnerPool:
    """1..N learner ranks: actors, or one in this process."""

    def __init__(
        self, plan: LearnerPlan, *, local: bool = False, actor_options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """
        Args:
            local: one rank in this process, without Ray.
            actor_options: per rank, Ray's options of its actor; default: none.
        Raises:
            ConfigError: several ranks in one process, or options for another number of ranks.
        """
        self.plan = plan
        self.size = plan.learner.workers
        if local and self.size > 1:
            raise ConfigError(f"learner.workers: {self.size}: one process holds one rank; set it to 1, or run with Ray")
        options = list(actor_options) if actor_options is not None else [{}] * self.size
        if len(options) != self.size:
            raise ConfigError(f"learner: actor options for {len(options)} ranks, learner.workers is {self.size}")
        self._local = local
        self._options = options
        self._ranks: list[RankHandle] = []
        self._failed: str | None = None
        self._tolerance = TOLERANCE

    async def start(self) -> None:
        """Creates the ranks, lets them meet and load the model.

        Raises:
            LearnerLost: not within ``learner.start_deadline_s``.
            ConfigError: from a rank, as it was raised.
        """
        deadline_s = self.plan.learner.start_deadline_s
        if self._local:
            self._ranks = [LocalRank(self.plan)]
        else:
            self._ranks = [ActorRank(self.plan, rank, self.size, self._options[rank]) for rank in range(self.size)]
        self._failed = None
        meeting = None
        if self.size > 1:
            calls = [rank.node_address() for rank in self._ranks]
            addresses = await self._gather(calls, deadline_s, "its node's address")
            address = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
            meeting = await self._one("meeting", deadline_s, address)
        await self._all("setup", deadline_s, meeting)
        couples = build_objective(**self.plan.objective).unit == "group"
        self._tolerance = COUPLED_TOLERANCE if couples else TOLERANCE

    async def restart(self, folder: str | Path | None) -> None:
        """Ends all ranks and starts new ones, from the checkpoint in ``folder`` where there is one."""
        await self.close()
        await self.start()
        if folder is not None:
            await self.load(folder)

    async def step(self, groups: Sequence[Group], step: int, version: int) -> StepReport:
        """Learns a step's groups.

        Raises:
            NonFiniteError, ConfigError: from a rank, as they were raised.
            LearnerLost: a rank is gone, or did not answer within ``learner.step_deadline_s``.
        """
        shares = share_rows(groups, self.size, self.plan.learner.minibatches_per_step, self._tolerance)
        deadline_s = self.plan.learner.step_deadline_s
        calls = [rank.call("step", share, step, version) for rank, share in zip(self._usable(), shares, strict=True)]
        reports: list[StepReport] = await self._gather(calls, deadline_s, f"step {step}")
        return replace(reports[0], learn_s=max(report.learn_s for report in reports))

    async def probe(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of ``tokens[1:]`` under the current weights."""
        return (await self._all("probe", self.plan.learner.step_deadline_s, tokens, temperature))[0]

    async def save(self, folder: str | Path) -> None:
        """Writes a checkpoint that ``load`` restores bit by bit at the same number of ranks."""
        await self._all("save", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def load(self, folder: str | Path) -> None:
        """Restores a checkpoint."""
        await self._all("load", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def save_hf(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder."""
        await self._all("save_hf", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def weight_manifest(self, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
        """What a sync of the current weights as ``version`` will send."""
        return await self._one("weight_manifest", self.plan.learner.step_deadline_s, version, bucket_bytes)

    async def open_transfer(
        self, deadline_s: float, backend: SenderBackend = "gloo", address: str | None = None
    ) -> Endpoint:
        """Rank 0 leaves any former transfer group and listens; ``address`` defaults to loopback."""
        return await self._one("open_transfer", deadline_s, backend, address or LOOPBACK)

    async def sender_address(self, deadline_s: float) -> str:
        """Address of rank 0's node, for receivers on other nodes."""
        return await within(self._usable()[0].node_address(), deadline_s, "learner rank 0: address", LearnerLost)

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        """Rank 0 waits for ``world_size - 1`` receivers; an error of the transfer leaves the pool usable."""
        await self._one("connect_transfer", deadline_s, world_size, deadline_s)

    async def send_weights(self, manifest: Manifest, deadline_s: float) -> SendReport:
        """Sends the manifest's weights; an error of the transfer leaves a pool below ZeRO 3 usable."""
        return (await self._all("send_weights", deadline_s, manifest, deadline_s))[0]

    async def close_transfer(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Rank 0 leaves the transfer group."""
        await self._one("close_transfer", deadline_s)

    async def close(self) -> None:
        """Ends all ranks, also those that hang."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            try:
                await within(rank.close(), CLOSE_DEADLINE_S, f"{rank.name}: close")
            except InfrastructureError:
                continue

    def _usable(self) -> list[RankHandle]:
        if self._failed is not None:
            raise LearnerLost(f"the learner pool failed before: {self._failed}; start it again from a checkpoint")
        if not self._ranks:
            raise LearnerLost("the learner pool is not started")
        return self._ranks

    async def _one(self, method: str, deadline_s: float, *arguments: Any) -> Any:
        rank = self._usable()[0]
        return (await self._gather([rank.call(method, *arguments)], deadline_s, method))[0]

    async def _all(self, method: str, deadline_s: float, *arguments: Any) -> list[Any]:
        return await self._gather([rank.call(method, *arguments) for rank in self._usable()], deadline_s, method)

    async def _gather(self, calls: Sequence[Any], deadline_s: float, what: str) -> list[Any]:
        """All answers, or the first error as soon as it is there."""
        tasks = [
            asyncio.ensure_future(within(call, deadline_s, f"{rank.name}: {what}", LearnerLost))
            for rank, call in zip(self._ranks, calls, strict=False)
        ]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=OTHERS_DEADLINE_S)
        for task in waiting:
            task.cancel()
        failures = [task.exception() for task in tasks if task not in waiting]
        errors = [failure for failure in failures if failure is not None]
        if not errors:
            return [task.result() for task in tasks]
        first = _root_cause(errors)
        self._note_failure(first, bool(waiting))
        raise first

    def _note_failure(self, failure: BaseException, others_hang: bool) -> None:
        """Remembers a failure after which the ranks no longer agree, or hang."""
        if others_hang or isinstance(failure, LearnerLost | NonFiniteError) or not isinstance(failure, TriptychError):
            self._failed = f"{type(failure).__name__}: {first_line(failure)}"


def share_rows(
    groups: Sequence[Group], ranks: int, minibatches: int, tolerance: float = TOLERANCE
) -> list[list[Group]]:
    """The rows of each rank, as groups; a group that is cut appears on several ranks with different rows.

    Groups are cut where the heaviest rank would else have more than ``1 + tolerance`` of the even share. Every
    minibatch is spread by itself, and so are groups whose rewards are all equal (their passes may be left out).
    """
    by_id = {group.group_id: group for group in groups}
    shares: list[list[Group]] = [[] for _ in range(ranks)]
    for group_ids in split_in_order(list(by_id), minibatches) if by_id else []:
        for silent in (False, True):
            rows = [row for group_id in group_ids for row in by_id[group_id].rows]
            rows = [row for row in rows if by_id[row.group_id].has_zero_signal() == silent]
            items = [PackItem(_cost_tokens(row), row.group_id, row.trajectory_id) for row in rows]
            for rank, indices in enumerate(spread_over_ranks(items, ranks, tolerance) if rows else []):
                shares[rank].extend(_as_groups([rows[index] for index in indices]))
    return shares


def _cost_tokens(row: Row) -> int:
    return 0 if row.reward is None else len(row.prompt_tokens) + row.length


def _as_groups(rows: Sequence[Row]) -> list[Group]:
    by_id: dict[int, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row.group_id, []).append(row)
    return [Group(tuple(members)) for members in by_id.values()]


def _root_cause(failures: Sequence[BaseException]) -> BaseException:
    """A named error says more than a lost rank, and a lost rank more than the broken connections it leaves behind."""

    def rank(failure: BaseException) -> int:
        if isinstance(failure, LearnerLost):
            return 1
        return 0 if isinstance(failure, TriptychError) else 2

    return min(failures, key=rank)
