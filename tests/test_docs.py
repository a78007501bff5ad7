"""Pages that are written from the code say what the code says; examples in pages run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from learner.divergences import BUILT_IN, find_divergence
from learner.objectives import build_objective
from learner.settings import LearnerSettings, ReferenceSettings
from tests.learner.objective_cases import fixture_batch
from tools import learner_page, objectives_page

ROOT = Path(__file__).parent.parent
README = ROOT / "learner" / "objectives" / "README.md"


def test_the_page_of_objectives_is_what_the_code_says():
    assert (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8") == objectives_page.page(), "run: make docs"


def test_the_page_of_the_learner_is_what_the_code_says():
    assert learner_page.PAGE.read_text(encoding="utf-8") == learner_page.page(), "run: make docs"


@pytest.mark.parametrize("settings", [LearnerSettings, ReferenceSettings])
def test_every_setting_of_the_learner_is_explained(settings):
    assert [name for name, field in settings.model_fields.items() if not field.description] == []


def test_the_plot_shows_both_branches_of_every_divergence():
    plot = (ROOT / "docs" / "divergences.svg").read_text(encoding="utf-8")
    assert plot == objectives_page.plot(), "run: make docs"
    for name in BUILT_IN:
        assert f">{name}</text>" in plot
    assert plot.count('stroke-width="1.6"') == 2 * len(BUILT_IN)


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readmes_objective_and_divergence_run(tmp_path):
    objective, divergence = blocks(README)
    (tmp_path / "mine.py").write_text(objective, encoding="utf-8")
    (tmp_path / "curves.py").write_text(
        f"import torch\nfrom learner.divergences import Divergence\n{divergence}", encoding="utf-8"
    )
    built = build_objective("cispo_like", file=tmp_path / "mine.py", cap=1.28)
    shipped = build_objective("cispo")(fixture_batch("FIX_B"))
    assert built(fixture_batch("FIX_B")).loss == pytest.approx(shipped.loss)
    assert find_divergence(f"{tmp_path / 'curves.py'}:neyman").slopes_at_zero == (-1.0, 1.0)
    for name in [name for name in sys.modules if name.startswith("triptych_plugin_")]:
        del sys.modules[name]
