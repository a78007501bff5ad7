"""Writes docs/objectives.md and docs/divergences.svg from the code: ``python -m tools.objectives_page`` (make docs).

What stands on the page is what ``triptych list`` shows; a test holds the committed page against the code.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch

from learner.corrections import RULES
from learner.divergences import BUILT_IN, Divergence
from learner.objectives import ObjectiveSettings, objective_class
from system.catalog import CatalogEntry, CatalogOption, catalog

DOCS = Path(__file__).parent.parent / "docs"

HEAD = """# Objectives

<!-- Written by tools/objectives_page.py from the code; change the code, then run `make docs`. -->

The objective is one line of a recipe, and so is each of its options:

```yaml
objective: {name: f_grpo, divergence: js}
```

`triptych list objectives NAME` says in a terminal what stands here. How to write one of your own:
[`learner/objectives/README.md`](../learner/objectives/README.md).

In the formulas lp is the policy's log-prob of a sampled token, lp_old that of the policy at the start of the pass,
lp_ref that of the frozen reference; m is the loss mask, T_i the trained tokens of completion i, G the completions of
a prompt, B those of the update, R_i a reward, a_i an advantage. Denominators are counts over the whole update, over
all ranks and micro-batches, so gradients do not depend on how it is cut.

| objective | | log-probs it needs | mixes in its gradient |
|---|---|---|---|
"""

DIVERGENCES = """
## Divergences

For `f_grpo` and `f_hal`. With the implicit reward r = beta (log pi - log pi_ref) of a whole completion, one of
positive advantage minimises `-g(r)`, one of negative advantage `f*(g(r))`. Branches that contain an exponential go on
as their tangents beyond |r| = 10; the metric `objective/tangent_share` says how often. One of your own is two
functions in a file (`divergence: my_curves.py:NAME`) or an entry point in the group `triptych.divergences`; it is
checked before anything starts.

![Both branches of every divergence](divergences.svg)

| divergence | `f(u)` | a > 0: `-g(r)` | a < 0: `f*(g(r))` | slopes at r = 0 | hazard |
|---|---|---|---|---|---|
"""

CORRECTIONS = """
## Off-policy corrections

`correction:` weighs what an older version sampled, by rho = exp(lp_old - lp_mu) with lp_mu as the engine reported it.
A recipe whose groups may be stale (`stream.max_staleness` above 0) and that names none gets the objective's own
default. Rules of scope *sequence* judge a completion as a whole; objectives of whole sequences refuse the others, and
say why.

| correction | scope | bounds | |
|---|---|---|---|
"""


def page() -> str:
    """docs/objectives.md."""
    entries = catalog("objectives")
    built_in = [entry for entry in entries if objective_class(entry.name).__module__.startswith("learner.objectives.")]
    parts = [HEAD, *(_row_of(entry) for entry in built_in)]
    for entry in built_in:
        parts += [f"\n## {entry.name}\n\n", _described(entry)]
    shared = [option for option in built_in[0].options if option.name in ObjectiveSettings.model_fields]
    parts += ["\n## Options of all objectives\n\nDefaults, where nothing else is said above.\n\n", option_table(shared)]
    parts += [DIVERGENCES, *(_divergence_row(divergence) for divergence in BUILT_IN.values())]
    parts += [CORRECTIONS, *(_correction_row(name) for name in RULES)]
    parts.append(
        "| bypass | token | | no weight: the objective's ratio is taken against the sampler itself, "
        "which saves a forward pass |\n"
    )
    return "".join(parts)


def _row_of(entry: CatalogEntry) -> str:
    kind = objective_class(entry.name)
    built = kind(kind.Options.model_construct())
    mixes = {"row": "tokens", "trajectory": "tokens of a completion", "group": "completions of a prompt"}[built.unit]
    needs = ", ".join(sorted(built.needs)) or "none"
    return f"| [{entry.name}](#{entry.name}) | {_cell(entry.summary)} | {needs} | {mixes} |\n"


def _described(entry: CatalogEntry) -> str:
    formula, *facts = entry.details.split("\n")
    fence = f"```text\n{textwrap.fill(formula, 116, break_long_words=False)}\n```"
    text = "\n\n".join([entry.summary, fence, *facts, f"Source: {entry.source}."]) + "\n"
    own = [option for option in entry.options if option.name in entry.own]
    return text + ("\n" + option_table(own) if own else "")


def option_table(options: list[CatalogOption]) -> str:
    """Name, default and meaning of each."""
    rows = [
        f"| `{option.name}` | {_cell(option.default)} | {_cell(option.description)} ({_cell(option.type)}) |\n"
        for option in options
    ]
    return "| option | default | |\n|---|---|---|\n" + "".join(rows)


def _divergence_row(divergence: Divergence) -> str:
    positive, negative = divergence.slopes_at_zero
    cells = [
        *(f"`{text}`" for text in (divergence.name, divergence.generator, *divergence.formulas)),
        f"{positive:.3f}, {negative:+.3f}",
        divergence.hazard or "none",
    ]
    return "| " + " | ".join(map(_cell, cells)) + " |\n"


def _correction_row(name: str) -> str:
    rule = RULES[name]
    bounds = ", ".join(f"{key} {value:g}" for key, value in (("low", rule.low), ("high", rule.high)) if value)
    meaning = " ".join((rule.apply.__doc__ or "").split()).rstrip(".")
    return f"| {name} | {rule.scope} | {bounds} | {_cell(meaning)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PANEL_WIDTH, PANEL_HEIGHT, COLUMNS, MARGIN = 176, 132, 5, 12
R_RANGE, LOSS_RANGE = (-5.0, 5.0), (-3.0, 5.0)
COLOURS = {"positive": "#1a7f5a", "negative": "#b3402a"}


def plot() -> str:
    """docs/divergences.svg: a panel per divergence with both branches."""
    rows = -(-len(BUILT_IN) // COLUMNS)
    width, height = COLUMNS * PANEL_WIDTH + 2 * MARGIN, rows * PANEL_HEIGHT + 3 * MARGIN + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="10">\n',
        f'<rect width="{width}" height="{height}" fill="white"/>\n',
        f'<text x="{MARGIN}" y="16"><tspan fill="{COLOURS["positive"]}">-g(r), a &gt; 0</tspan>'
        f'<tspan dx="14" fill="{COLOURS["negative"]}">f*(g(r)), a &lt; 0</tspan>'
        f'<tspan dx="14" fill="#666">r from {R_RANGE[0]:g} to {R_RANGE[1]:g}, '
        f"loss from {LOSS_RANGE[0]:g} to {LOSS_RANGE[1]:g}</tspan></text>\n",
    ]
    for place, divergence in enumerate(BUILT_IN.values()):
        left = MARGIN + place % COLUMNS * PANEL_WIDTH
        top = 2 * MARGIN + place // COLUMNS * PANEL_HEIGHT
        parts.append(_panel(divergence, left, top))
    return "".join([*parts, "</svg>\n"])


def _panel(divergence: Divergence, left: int, top: int) -> str:
    width, height = PANEL_WIDTH - MARGIN, PANEL_HEIGHT - 2 * MARGIN

    def x(r: float) -> float:
        return left + (r - R_RANGE[0]) / (R_RANGE[1] - R_RANGE[0]) * width

    def y(loss: float) -> float:
        return top + 14 + (LOSS_RANGE[1] - loss) / (LOSS_RANGE[1] - LOSS_RANGE[0]) * height

    lines = [
        f'<text x="{left}" y="{top + 10}" fill="#222">{divergence.name}</text>\n',
        f'<rect x="{left}" y="{top + 14}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>\n',
        f'<path d="M{left} {y(0):.1f}h{width}M{x(0):.1f} {top + 14}v{height}" stroke="#ddd" fill="none"/>\n',
    ]
    for side, curve in (("positive", divergence.positive), ("negative", divergence.negative)):
        lines.append(f'<path d="{_path(curve, x, y)}" stroke="{COLOURS[side]}" stroke-width="1.6" fill="none"/>\n')
    return "".join(lines)


def _path(
    curve: Callable[[torch.Tensor], torch.Tensor], x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    points = torch.linspace(*R_RANGE, 101, dtype=torch.float64)
    inside = [
        (r, loss)
        for r, loss in zip(points.tolist(), curve(points).tolist(), strict=True)
        if LOSS_RANGE[0] <= loss <= LOSS_RANGE[1]
    ]
    return "M" + "L".join(f"{x(r):.1f} {y(loss):.1f}" for r, loss in inside)


def main() -> int:
    (DOCS / "objectives.md").write_text(page(), encoding="utf-8")
    (DOCS / "divergences.svg").write_text(plot(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
