"""Writes the tables of settings of docs/learner.md from the code: ``python -m tools.learner_page`` (make docs).

What stands before the mark is written by hand; a test holds the rest against the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from learner.settings import LearnerSettings, ReferenceSettings
from system.catalog import option_of
from tools.objectives_page import option_table

PAGE = Path(__file__).parent.parent / "docs" / "learner.md"
MARK = "<!-- From here on written by `make docs` from learner/settings.py; change that. -->\n"


def page() -> str:
    """docs/learner.md."""
    parts = [PAGE.read_text(encoding="utf-8").partition(MARK)[0], MARK]
    for key, settings in (("learner", LearnerSettings), ("reference", ReferenceSettings)):
        options = [option_of(name, field) for name, field in settings.model_fields.items()]
        parts.append(f"\n## Settings of `{key}:`\n\n{settings.__doc__}\n\n{option_table(options)}")
    return "".join(parts)


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
