"""A bandit of 64 prompts with 8 answers each, a quarter of them right: the smallest place where objectives differ.

A policy is a table of logits that starts uniform. A round samples 8 answers per prompt and makes two Adam updates on
them, with the policy of the round's start as ``old`` and the uniform one as reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learner.objectives import ObjectiveBatch, build_objective

PROMPTS, ANSWERS, GROUP_SIZE = 64, 8, 8
UPDATES_PER_ROUND = 2
LEARNING_RATE = 0.08


def rewards_over_rounds(name: str, rounds: int, seed: int = 0, **options: Any) -> list[float]:
    """The policy's expected reward before the first round and after each, averaged over prompts."""
    generator = torch.Generator().manual_seed(seed)
    table = (torch.rand(PROMPTS, ANSWERS, generator=generator) < 0.25).double()
    logits = torch.zeros(PROMPTS, ANSWERS, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=LEARNING_RATE)
    objective = build_objective(name, **options)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP_SIZE)
    trajectories = torch.arange(GROUP_SIZE).repeat(PROMPTS)
    history = [_expected(logits, table)]
    for _ in range(rounds):
        policy = torch.softmax(logits.detach(), dim=1)
        answers = torch.multinomial(policy, GROUP_SIZE, replacement=True, generator=generator).flatten()
        old = policy[prompts, answers].log()[:, None]
        for _ in range(UPDATES_PER_ROUND):
            logprobs = torch.log_softmax(logits, dim=1)[prompts, answers][:, None]
            result = objective(
                ObjectiveBatch(
                    logprobs=logprobs.detach(),
                    old_logprobs=old,
                    reference_logprobs=torch.full_like(old, 1 / ANSWERS).log(),
                    mask=torch.ones_like(old, dtype=torch.bool),
                    group_ids=prompts,
                    trajectory_ids=trajectories,
                    rewards=table[prompts, answers],
                )
            )
            optimiser.zero_grad()
            (result.coefficients * logprobs).sum().backward()
            optimiser.step()
        history.append(_expected(logits, table))
    return history


def _expected(logits: Tensor, table: Tensor) -> float:
    return float((torch.softmax(logits.detach(), dim=1) * table).sum(dim=1).mean())
