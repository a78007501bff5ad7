"""The learner ranks as one: spreads a step's rows over them by cost, calls them all, merges what they say.

Every call has a deadline, and calls made at the same time run one after the other. The first error of any rank is the
pool's error, at once; a pool that lost a rank is only closed, or started again from a checkpoint. An error of a weight
transfer leaves the pool as it was, under every ZeRO stage. Called by the run's loop and the weight sync.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.handles import ActorRank, LocalRank
from learner.objectives import build_objective
from learner.packing import Layout, PackItem, split_in_order, spread_over_ranks
from learner.rank import LearnerPlan, RankFacts, StepReport
from learner.rank_group import CLOSE_DEADLINE_S, RankGroup
from learner.token_batch import ScoredRow
from system.core.errors import ConfigError, LearnerLost
from system.core.records import Group, Row
from system.core.weights.sender import SenderBackend, SendReport
from system.core.weights.wire import DEFAULT_BUCKET_BYTES, Endpoint, Manifest

log = logging.getLogger("triptych.learner")

TRANSFER_GRACE_S = 5.0
"""A transfer ends at its own deadline with an error that names what broke; the pool waits this much longer for it."""

TOLERANCE = 0.1
"""How much more than the even share a rank may have before groups are cut."""

COUPLED_TOLERANCE = 0.3
"""The same where a cut group costs a second forward pass over all rows."""


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
        self._started: RankGroup | None = None
        self._tolerance = TOLERANCE
        self.layout: Layout = "padded"
        """How the ranks lay rows out; known after ``start``."""
        self.layout_reason = "not started"
        self._keys_per_token: float | None = None

    async def start(self) -> None:
        """Creates the ranks, lets them meet and load the model.

        Raises:
            LearnerLost: not within ``learner.start_deadline_s``.
            ConfigError: from a rank, as it was raised.
        """
        deadline_s = self.plan.learner.start_deadline_s
        if self._local:
            self._started = RankGroup([LocalRank(self.plan)])
        else:
            ranks = range(self.size)
            self._started = RankGroup([ActorRank(self.plan, rank, self.size, self._options[rank]) for rank in ranks])
        meeting = None
        if self.size > 1:
            meeting = await self._ranks.first("meeting", deadline_s, await self.sender_address(deadline_s))
        facts: RankFacts = (await self._ranks.all("setup", deadline_s, meeting))[0]
        self.layout, self.layout_reason, self._keys_per_token = facts
        log.info("rows are laid out as %s: %s", self.layout, self.layout_reason)
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
        settings = self.plan.learner
        shares = share_rows(
            groups, self.size, settings.minibatches_per_step, self._tolerance, self.layout, self._keys_per_token
        )
        calls = [(share, step, version) for share in shares]
        reports: list[StepReport] = await self._ranks.each("step", settings.step_deadline_s, calls)
        return replace(reports[0], learn_s=max(report.learn_s for report in reports))

    async def probe(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of ``tokens[1:]`` under the current weights."""
        return (await self._ranks.all("probe", self.plan.learner.step_deadline_s, tokens, temperature))[0]

    async def save(self, folder: str | Path) -> None:
        """Writes a checkpoint that ``load`` restores bit by bit at the same number of ranks."""
        await self._ranks.all("save", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def load(self, folder: str | Path) -> None:
        """Restores a checkpoint."""
        await self._ranks.all("load", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def save_hf(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder."""
        await self._ranks.all("save_hf", self.plan.learner.checkpoint_deadline_s, str(folder))

    async def weight_manifest(self, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
        """What a sync of the current weights as ``version`` will send."""
        return await self._ranks.first("weight_manifest", self.plan.learner.step_deadline_s, version, bucket_bytes)

    async def open_transfer(
        self, deadline_s: float, backend: SenderBackend = "gloo", address: str | None = None
    ) -> Endpoint:
        """Rank 0 leaves any former transfer group and listens at ``address``; default: ``sender_address``."""
        address = address or await self.sender_address(deadline_s)
        return await self._ranks.first("open_transfer", deadline_s, backend, address)

    async def sender_address(self, deadline_s: float) -> str:
        """Where rank 0's machine is reached: loopback while Ray has no other machine."""
        return await self._ranks.address(deadline_s)

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        """Rank 0 waits for ``world_size - 1`` receivers.

        Raises:
            SyncFailed: not all came; the pool is as it was.
        """
        await self._ranks.first("connect_transfer", deadline_s + TRANSFER_GRACE_S, world_size, deadline_s)

    async def send_weights(self, manifest: Manifest, deadline_s: float) -> SendReport:
        """Sends the manifest's weights.

        Raises:
            SyncFailed: the transfer broke. The pool is as it was: open and connect again, then send again.
        """
        return (await self._ranks.all("send_weights", deadline_s + TRANSFER_GRACE_S, manifest, deadline_s))[0]

    async def close_transfer(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Rank 0 leaves the transfer group."""
        await self._ranks.first("close_transfer", deadline_s)

    async def close(self) -> None:
        """Ends all ranks, also those that hang."""
        started, self._started = self._started, None
        if started is not None:
            await started.close()

    @property
    def _ranks(self) -> RankGroup:
        if self._started is None:
            raise LearnerLost("the learner pool is not started")
        return self._started


def share_rows(
    groups: Sequence[Group],
    ranks: int,
    minibatches: int,
    tolerance: float = TOLERANCE,
    layout: Layout = "padded",
    keys_per_token: float | None = None,
) -> list[list[Group]]:
    """The rows of each rank, as groups; a group that is cut appears on several ranks with different rows.

    Groups are cut where the heaviest rank would else have more than ``1 + tolerance`` of the even share. Every
    minibatch is spread by itself, and so are groups whose rewards are all equal (their passes may be left out).
    ``keys_per_token``: see ``spread_over_ranks``.
    """
    by_id = {group.group_id: group for group in groups}
    shares: list[list[Group]] = [[] for _ in range(ranks)]
    for group_ids in split_in_order(list(by_id), minibatches) if by_id else []:
        for silent in (False, True):
            rows = [row for group_id in group_ids for row in by_id[group_id].rows]
            rows = [row for row in rows if by_id[row.group_id].has_zero_signal() == silent]
            items = [_pack_item(row) for row in rows]
            spread = spread_over_ranks(items, ranks, tolerance, layout, keys_per_token) if rows else []
            for rank, indices in enumerate(spread):
                shares[rank].extend(_as_groups([rows[index] for index in indices]))
    return shares


def _pack_item(row: Row) -> PackItem:
    """A row without a reward is not computed."""
    if row.reward is None:
        return PackItem(0, row.group_id, row.trajectory_id)
    scored = ScoredRow(row.prompt_tokens, row.completion_tokens)
    return scored.pack_item(row.group_id, row.trajectory_id)


def _as_groups(rows: Sequence[Row]) -> list[Group]:
    by_id: dict[int, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row.group_id, []).append(row)
    return [Group(tuple(members)) for members in by_id.values()]
