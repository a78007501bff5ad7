"""Who learns on the bandit, and who stalls."""

from __future__ import annotations

from tests.learner.bandit import rewards_over_rounds

NOTE = {"anchor": "reference", "statistics": "graph", "std_floor": 0.0, "eps": 1e-8}
"""GIFT with a fixed anchor and the statistics in its gradient."""


def test_gift_with_its_floor_learns_as_fast_as_grpo():
    gift = rewards_over_rounds("gift", 200)
    assert gift[0] < 0.30
    assert gift[20] >= 0.80
    assert gift[200] >= 0.85


def test_grpo_learns_all_there_is():
    assert rewards_over_rounds("grpo", 200)[200] >= 0.90


def test_gift_anchored_at_the_reference_with_statistics_in_the_graph_stalls():
    """Once its log-ratios agree with the rewards nothing asks for a wider spread, and a fixed anchor never moves."""
    stalled = rewards_over_rounds("gift", 200, **NOTE)
    assert max(stalled) < 0.5
    assert abs(stalled[200] - stalled[100]) < 0.01


def test_without_the_floor_the_first_update_of_every_round_drowns_the_others():
    assert rewards_over_rounds("gift", 10, std_floor=0.0)[10] < rewards_over_rounds("gift", 10)[10] - 0.05
