"""From a lease and what came of it to a score request, and from there to the group that is handed in. Pure.

Scores are matched by id, never by position; what cannot be judged has no reward, whatever the scorer put in its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_workers.contract import EngineOutput
from system.core.protocols import Lease, Score, ScoreError, ScoreItem, ScoreRequest
from system.core.records import Group, Row, merge_metadata


@dataclass(frozen=True)
class Completion:
    """One finished trajectory of a lease."""

    trajectory_id: int
    seed: int
    retries: int
    """How often this worker tried again after a failure."""
    output: EngineOutput


def score_request(run_name: str, lease: Lease, completions: Sequence[Completion]) -> ScoreRequest:
    """The one request that judges a group. Its id is the same only for the same answers."""
    return ScoreRequest(
        request_id=f"{run_name}/{lease.group_id}/{lease.incarnation}.{lease.attempt}",
        source=lease.prompt.source,
        policy_version=newest_version(completions),
        items=tuple(
            ScoreItem(
                id=str(completion.trajectory_id),
                prompt=lease.prompt.text,
                completion=completion.output.text,
                finish_reason=completion.output.finish_reason,
                label=lease.prompt.label,
                metadata=lease.prompt.metadata,
                completion_tokens=len(completion.output.tokens),
            )
            for completion in completions
        ),
    )


def newest_version(completions: Sequence[Completion]) -> int:
    """The highest policy version that sampled any token of the group."""
    return max(max(completion.output.versions) for completion in completions)


def match_scores(request: ScoreRequest, scores: Sequence[Score]) -> list[Score]:
    """One score per item, in the request's order. A missing, doubled or non-finite one becomes an error."""
    by_id: dict[str, list[Score]] = {}
    for score in scores:
        by_id.setdefault(score.id, []).append(score)
    return [_only(item.id, by_id.get(item.id, [])) for item in request.items]


def _only(item_id: str, scores: list[Score]) -> Score:
    if len(scores) != 1:
        return _refused(item_id, "unmatched", f"{len(scores)} scores for item {item_id}")
    score = scores[0]
    if score.error is not None:
        return Score(item_id, None, info=score.info, error=score.error)
    if score.reward is None or not math.isfinite(score.reward):
        return _refused(item_id, "not_a_number", f"reward {score.reward!r} of item {item_id}")
    parts = {name: value for name, value in score.parts.items() if math.isfinite(value)}
    return Score(item_id, float(score.reward), parts, score.info)


def _refused(item_id: str, code: str, message: str) -> Score:
    return Score(item_id, None, error=ScoreError(code, message))


def assemble(
    worker: str,
    lease: Lease,
    completions: Sequence[Completion],
    scores: Sequence[Score],
    reference_logprobs: Sequence[np.ndarray] | None,
) -> Group:
    """The group as the learner will see it; the i-th score and reference row belong to the i-th completion."""
    rows = []
    for index, (completion, score) in enumerate(zip(completions, scores, strict=True)):
        output = completion.output
        rows.append(
            Row(
                group_id=lease.group_id,
                trajectory_id=completion.trajectory_id,
                prompt_id=lease.prompt.prompt_id,
                source=lease.prompt.source,
                prompt_tokens=np.asarray(lease.prompt.tokens, dtype=np.int32),
                completion_tokens=np.asarray(output.tokens, dtype=np.int32),
                rollout_logprobs=np.asarray(output.logprobs, dtype=np.float32),
                versions=np.asarray(output.versions, dtype=np.int32),
                finish_reason=output.finish_reason,
                seed=completion.seed,
                worker=worker,
                completion_text=output.text,
                reference_logprobs=None if reference_logprobs is None else reference_logprobs[index],
                reward=score.reward,
                reward_parts=score.parts,
                attempt=lease.attempt + completion.retries,
                incarnation=lease.incarnation,
                metadata=merge_metadata(lease.prompt.metadata, score.info, _error_text(score.error)),
            )
        )
    return Group(tuple(rows))


def _error_text(error: ScoreError | None) -> str:
    if error is None:
        return "{}"
    return json.dumps({"score_error": {"code": error.code, "message": error.message}}, ensure_ascii=False)
