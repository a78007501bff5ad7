"""Every objective's loss and gradient of a Llama in float32: the same in every layout, cut and number of ranks.

Run with ``-s`` it prints the gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from learner.layout_choice import choose_layout
from learner.logprobs import LogprobModel
from learner.model import load_causal_lm
from learner.packing import Layout
from system.core.model import ModelSettings
from tests.learner.test_step import CASES, learn

CUTS: tuple[tuple[int, int, Layout], ...] = (
    (100_000, 1, "shared_prefix"),
    (30, 2, "shared_prefix"),
    (30, 4, "padded"),
)
"""Tokens of a micro-batch, ranks, layout; all rows at once, padded, on one rank is what they are held against."""
LOOSE = {"correction": "k3_mask", "correction_high": 50.0}
"""Lets through some of the random log-probs."""
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def policy(tied_llama) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = LogprobModel(load_causal_lm(ModelSettings(path=str(tied_llama), dtype="float32")), 0.9)
        choose_layout(model, "shared_prefix")
        return model

    return made


@pytest.mark.parametrize("old_logprobs", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_loss_and_gradient_do_not_depend_on_how_the_work_is_cut(
    policy: Callable[[], nn.Module], name: str, options: dict[str, Any], old_logprobs: bool
):
    options = LOOSE if options.get("correction") == "k3_mask" else options
    whole, loss, sums, passes = learn(name, options, 100_000, 1, module=policy, old_logprobs=old_logprobs)
    assert passes == 1
    assert whole.norm() > 1e-4
    scale = whole.norm()
    if options.get("statistics") == "graph":
        # What is left of a gradient eighty times as large when normalisation is differentiated, too: the rounding of
        # the large one stays, and how much it is depends on the processor.
        detached = options | {"statistics": "detached"}
        scale = learn(name, detached, 100_000, 1, module=policy, old_logprobs=old_logprobs)[0].norm()
    for budget_tokens, ranks, layout in CUTS:
        gradient, other_loss, other_sums, _ = learn(
            name, options, budget_tokens, ranks, layout=layout, module=policy, old_logprobs=old_logprobs
        )
        gap = float((gradient - whole).norm() / scale)
        print(f"{gap:.1e}, loss {abs(other_loss - loss):.1e}: {name} {options}, {budget_tokens}, {ranks}, {layout}")
        assert gap <= RELATIVE
        assert other_loss == pytest.approx(loss, rel=RELATIVE, abs=1e-6)
        assert other_sums.means() == pytest.approx(sums.means(), rel=1e-4, abs=1e-5)
