"""One learner rank: the policy, its optimiser, and everything a pool asks of them. A plain class without Ray.

All ranks get the same calls in the same order (``open_transfer``, ``connect_transfer`` and ``close_transfer`` go to
rank 0 alone). A method runs to its end in the caller's thread; whoever owns the rank keeps to one thread.
"""

from __future__ import annotations

import functools
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from learner import deepspeed_engine
from learner.deepspeed_engine import TrainingEngine
from learner.layout_choice import choose_layout
from learner.logprobs import LogprobModel, completion_logprobs
from learner.model import load_causal_lm, save_checkpoint_folder
from learner.objectives import build_objective
from learner.objectives.metrics import MetricSums
from learner.out_of_memory import Doing, explained
from learner.packing import Layout, split_in_order
from learner.schedule import learning_rate_at
from learner.settings import LearnerSettings
from learner.step import StepRunner, StepTotals
from learner.token_batch import ScoredRow, TokenCounts
from learner.weights import PolicyWeights
from learner.world import Meeting, MeetingPoint, World
from system.core.errors import CheckpointDamaged, ConfigError
from system.core.model import ModelSettings
from system.core.records import Group
from system.core.weights.sender import Sender, SenderBackend, SendReport, manifest_of
from system.core.weights.wire import DEFAULT_BUCKET_BYTES, Endpoint, Manifest

STATE_FILE = "learner.json"

TrajectoryKey = tuple[int, int]
"""(group_id, trajectory_id)."""


@dataclass(frozen=True)
class LearnerPlan:
    """What a rank is made of; the same on all ranks, and picklable."""

    model: ModelSettings
    learner: LearnerSettings
    objective: Mapping[str, Any]
    """``name``, its options, and ``file`` for a user's own."""
    temperature: float = 1.0
    """The run's sampling temperature."""
    total_updates: int | None = None
    """Optimiser updates of the whole run; a falling schedule needs it."""


class RankFacts(NamedTuple):
    """What a rank knows once it has its model."""

    layout: Layout
    """How rows are laid out; the same on all ranks."""
    layout_reason: str
    keys_per_token: float
    """See ``learner.packing.spread_over_ranks``."""


@dataclass(frozen=True)
class StepReport:
    """What a step did; the same on every rank, except for ``learn_s``."""

    step: int
    version: int
    """Policy version that the step started from."""
    loss: float
    """Mean over the step's updates."""
    grad_norm: float
    """Norm before clipping, mean over the step's updates; NaN when there was none."""
    learning_rate: float
    """Of the last update, or what the next one will have when there was none."""
    updates: int
    """Optimiser updates made; 0 when no row could change the policy."""
    metrics: dict[str, float] = field(default_factory=dict)
    advantages: dict[TrajectoryKey, float | None] = field(default_factory=dict)
    """As trained; None for a trajectory that took no part."""
    completion_tokens: int = 0
    """Generated tokens of all sampled rows, masked or not."""
    trained_tokens: int = 0
    """Tokens under the loss mask of the rows that take part."""
    learn_s: float = 0.0
    padding_share: float = 0.0
    """Share of the computed tokens that is padding, on all ranks."""
    shared_prompt_share: float = 0.0
    """Share of the rows' prompt tokens that were not computed because another row had them, on all ranks."""
    entropy: float | None = None
    """Nats, mean over the trained tokens whose passes were computed, on all ranks and in all updates; NaN when there
    were none, None where ``learner.entropy`` is off."""

    def figures(self) -> dict[str, float]:
        """What its passes were filled with and gave by the way, for the step's line of metrics."""
        figures = {
            "learner/padding_share": self.padding_share,
            "learner/shared_prompt_share": self.shared_prompt_share,
        }
        return figures if self.entropy is None else {**figures, "learner/entropy": self.entropy}


Method = TypeVar("Method", bound=Callable[..., Any])


def _explaining_memory(method: Method) -> Method:
    """An allocation that fails in ``method`` becomes an ``OutOfMemory`` that says where and what to lower."""

    @functools.wraps(method)
    def explaining(self: LearnerRank, *arguments: Any) -> Any:
        with explained(self.rank, self.doing, self.plan.learner, on_cpu=not torch.cuda.is_available()):
            return method(self, *arguments)

    return cast(Method, explaining)


class LearnerRank:
    """Rank ``rank`` of ``size``; ``setup`` loads the model and joins the others."""

    def __init__(self, plan: LearnerPlan, rank: int = 0, size: int = 1) -> None:
        self.plan = plan
        self.rank = rank
        self.size = size
        self.updates = 0
        self.doing = Doing()
        self._meeting_point: MeetingPoint | None = None
        self._sender: Sender | None = None

    def meeting(self, address: str = "127.0.0.1") -> Meeting:
        """On rank 0: binds the port at which the ranks meet, on this node's ``address``."""
        self._meeting_point = MeetingPoint(address)
        return self._meeting_point.meeting

    @_explaining_memory
    def setup(self, meeting: Meeting | None = None) -> RankFacts:
        """Loads the model and builds the optimiser; collective.

        Raises:
            OutOfMemory: for what the model and its optimiser need.
            ConfigError: model or objective cannot be, or not the layout asked for.
            InfrastructureError: the ranks did not meet.
        """
        settings = self.plan.learner
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        deepspeed_engine.choose_accelerator(device)
        objective = build_objective(**self.plan.objective)
        causal_lm = load_causal_lm(self.plan.model, device)
        if settings.activation_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        causal_lm.train()
        self.model = LogprobModel(causal_lm, self.plan.temperature)
        self.model.check_head()
        choose_layout(self.model, settings.layout)
        self.model.with_entropy = settings.entropy
        self.world = World.open(
            self.rank, self.size, device, settings.collective_timeout_s, meeting, self._meeting_point
        )
        choices = self.world.gather((self.model.layout, self.model.layout_reason))
        self.model.layout, self.model.layout_reason = min(choices, key=lambda choice: choice[0] != "padded")
        self.engine = TrainingEngine(self.model, settings, self.world)
        self.runner = StepRunner(self.engine, objective, self.world, settings.tokens_per_microbatch, self.model.layout)
        self.runner.doing = self.doing
        self.weights = PolicyWeights(causal_lm, self.engine.whole, keep_copies=settings.zero == 3)
        return RankFacts(self.model.layout, self.model.layout_reason, self.model.keys_per_token)

    @_explaining_memory
    def step(self, groups: Sequence[Group], step: int, version: int) -> StepReport:
        """Learns the step's groups (this rank's share of their rows); collective.

        Raises:
            OutOfMemory: on this rank; the others wait for it in vain and are to be ended.
            NonFiniteError: loss or gradient is not finite; load a checkpoint before going on.
            ConfigError: reference log-probs that the objective needs are missing.
        """
        started_s = time.monotonic()
        self.doing.place = f"the beginning of step {step}"
        self.weights.release()
        settings, runner = self.plan.learner, self.runner
        lines = runner.lines_of(groups)
        several_updates = settings.epochs_per_step * settings.minibatches_per_step > 1
        if runner.objective.needs_logprobs_first:
            runner.recompute_old_logprobs(lines)
        facts = runner.gather_facts(lines)
        flags = facts.active[facts.first : facts.first + len(lines)]
        active = [line for line, moves in zip(lines, flags, strict=True) if moves]
        if several_updates and "old" in runner.objective.needs and not runner.objective.needs_logprobs_first:
            runner.recompute_old_logprobs(active)
        moving = facts.moving_groups
        totals = StepTotals()
        rate = self._learning_rate()
        first_update = self.updates
        for _ in range(settings.epochs_per_step):
            for group_ids in split_in_order(facts.rows.group_ids, settings.minibatches_per_step):
                chosen = set(group_ids)
                if not chosen & moving:
                    continue
                denominators = runner.denominators(facts, chosen, lines)
                runner.accumulate([line for line in active if line.row.group_id in chosen], denominators, facts, totals)
                rate = self._learning_rate()
                self.doing.place = "the optimiser's update"
                totals.gradient_norms.append(self.engine.update(rate))
                self.updates += 1
        parts = self.world.gather(totals)
        updates = self.updates - first_update
        sums = sum((part.sums for part in parts), facts.plan.sums if parts else MetricSums())
        tokens = sum((part.tokens for part in parts), TokenCounts())
        return StepReport(
            step=step,
            version=version,
            loss=sum(sum(part.losses) for part in parts) / updates if updates else 0.0,
            grad_norm=sum(totals.gradient_norms) / updates if updates else float("nan"),
            learning_rate=rate,
            updates=updates,
            metrics=sums.means(),
            advantages={
                (group_id, trajectory_id): advantage
                for group_id, trajectory_id, advantage in zip(
                    facts.rows.group_ids, facts.rows.trajectory_ids, facts.plan.advantages, strict=True
                )
                if group_id >= 0
            },
            completion_tokens=facts.sampled_tokens,
            trained_tokens=facts.plan.denominators.tokens,
            learn_s=time.monotonic() - started_s,
            padding_share=tokens.padding_share,
            shared_prompt_share=tokens.shared_prompt_share,
            entropy=_mean_entropy(parts) if settings.entropy else None,
        )

    def probe(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of ``tokens[1:]``, each given what stands before it, under the current weights; collective."""
        if len(tokens) < 2:
            raise ConfigError(f"a probe prompt needs two tokens or more (got {len(tokens)})")
        line = ScoredRow(_array(tokens[:1]), _array(tokens[1:]))
        (logprobs,) = completion_logprobs(self.model, [line], self.plan.learner.tokens_per_microbatch, temperature)
        return [float(value) for value in logprobs]

    def save(self, folder: str | Path) -> None:
        """Writes all that ``load`` needs into ``folder`` (seen by all ranks); collective."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder)
        torch.save({"random_state": torch.get_rng_state()}, folder / f"rank_{self.rank}.pt")
        if self.rank == 0:
            state = {"ranks": self.size, "zero": self.plan.learner.zero, "updates": self.updates}
            (folder / STATE_FILE).write_text(json.dumps({**state, "dtype": self.plan.model.dtype}))

    def load(self, folder: str | Path) -> None:
        """Restores weights, optimiser, schedule and random state as ``save`` wrote them, bit by bit; collective.

        Raises:
            CheckpointDamaged: a part is missing or cannot be read.
            ConfigError: it was written by another number of ranks, ZeRO stage or dtype.
        """
        folder = Path(folder)
        self.weights.release()
        try:
            state = json.loads((folder / STATE_FILE).read_text())
        except (OSError, ValueError) as failure:
            raise CheckpointDamaged(f"checkpoint {folder}: {STATE_FILE} cannot be read: {failure}") from None
        now = {"ranks": self.size, "zero": self.plan.learner.zero, "dtype": self.plan.model.dtype}
        for key, mend in (("ranks", "learner.workers"), ("zero", "learner.zero"), ("dtype", "model.dtype")):
            if state.get(key) != now[key]:
                raise ConfigError(
                    f"checkpoint {folder} was written with {mend} = {state.get(key)}, this run has {now[key]}; "
                    f"set {mend} back to go on with it"
                )
        self.engine.load(folder)
        try:
            own = torch.load(folder / f"rank_{self.rank}.pt", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as failure:
            raise CheckpointDamaged(f"checkpoint {folder}: rank_{self.rank}.pt cannot be read: {failure}") from None
        torch.set_rng_state(own["random_state"])
        self.updates = int(state["updates"])

    def save_hf(self, folder: str | Path) -> None:
        """Writes the policy as a plain Hugging Face folder, with tokenizer and generation config; collective."""
        causal_lm = self.model.causal_lm
        with self.engine.whole(list(causal_lm.parameters())):
            if self.rank == 0:
                save_checkpoint_folder(causal_lm, self.plan.model.path, Path(folder))
        self.world.gather(None)

    def weight_source(self) -> PolicyWeights:
        """The current weights for a weight sync."""
        return self.weights

    def weight_manifest(self, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
        """What a sync of the current weights as ``version`` will send."""
        return manifest_of(self.weights, version, bucket_bytes)

    def open_transfer(self, backend: SenderBackend = "gloo", address: str = "127.0.0.1") -> Endpoint:
        """On rank 0: leaves any former transfer group and listens for receivers."""
        self.close_transfer()
        self._sender = Sender(backend, address)
        return self._sender.open()

    def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        """On rank 0: waits for ``world_size - 1`` receivers."""
        self._open_sender().connect(world_size, deadline_s)

    def send_weights(self, manifest: Manifest, deadline_s: float) -> SendReport | None:
        """Rank 0 sends the manifest's weights and reports; under ZeRO 3 the others gather with it.

        Raises:
            SyncFailed: on rank 0, the transfer broke; the same manifest can be sent again.
        """
        together = self.plan.learner.zero == 3
        try:
            if self.rank > 0:
                if together:
                    self.weights.follow(self.world)
                return None
            with self.weights.lead(self.world) if together else nullcontext(self.weights) as source:
                return self._open_sender().send(manifest, source, deadline_s)
        finally:
            self.weights.release()

    def close_transfer(self) -> None:
        """On rank 0: leaves the transfer group; receivers that wait get an error."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self) -> None:
        """Leaves all groups and frees the model."""
        self.close_transfer()
        if self._meeting_point is not None:
            self._meeting_point.close()
        if hasattr(self, "engine"):
            self.engine.close()
            self.world.close()
            del self.engine, self.runner, self.weights, self.model

    def _learning_rate(self) -> float:
        return learning_rate_at(self.plan.learner, self.updates, self.plan.total_updates)

    def _open_sender(self) -> Sender:
        if self._sender is None:
            raise ConfigError("weight transfer: open_transfer comes first")
        return self._sender


def _mean_entropy(parts: Sequence[StepTotals]) -> float:
    tokens = sum(part.entropy_tokens for part in parts)
    return sum(part.entropy_nats for part in parts) / tokens if tokens else float("nan")


def _array(tokens: Sequence[int]) -> Any:
    import numpy as np

    return np.asarray(tokens, np.int32)
