"""Reward files on disk, requests, and scorers that are closed at the end of a test."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from reward_service.scorer import LocalScorer
from reward_service.settings import RewardSettings
from system.core.protocols import Score, ScoreItem, ScoreRequest


def request_of(
    completions: Sequence[str], label: Any = None, request_id: str = "run/0/0", **fields: Any
) -> ScoreRequest:
    """A request with one item per completion; ids are "c0", "c1", ..."""
    source = fields.pop("source", "sums")
    items = tuple(
        ScoreItem(id=f"c{index}", prompt="2+3=", completion=text, finish_reason="stop", label=label, **fields)
        for index, text in enumerate(completions)
    )
    return ScoreRequest(request_id, source, 0, items)


def with_scorer(
    rewards: Sequence[RewardSettings], use: Callable[[LocalScorer], Awaitable[Any]], limit_s: float = 60.0
) -> Any:
    """Runs ``use`` with a scorer in a fresh event loop; whatever happens, the scorer is closed."""

    async def run() -> Any:
        scorer = LocalScorer(rewards)
        try:
            return await asyncio.wait_for(use(scorer), limit_s)
        finally:
            await scorer.close()

    return asyncio.run(run())


def score_once(rewards: Sequence[RewardSettings], request: ScoreRequest) -> dict[str, Score]:
    """The scores of one request, by item id."""
    scores = with_scorer(rewards, lambda scorer: scorer.score(request))
    return {score.id: score for score in scores}


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[..., RewardSettings]:
    """Writes a reward file and returns settings that use its function ``reward`` (or the one named)."""

    def write(source: str, function: str = "reward", **settings: Any) -> RewardSettings:
        path = tmp_path / "style.py"
        path.write_text(textwrap.dedent(source))
        return RewardSettings(**{"name": "style", "use": f"{path}:{function}", "workers": 1, **settings})

    return write
