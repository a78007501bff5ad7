"""What a learner step costs with shared prefixes; all of it is in ``learner_step``.

    .venv/bin/python benchmarks/learner.py [--rounds 5] [--threads N] [--model models/smollm2] [--scenario short]

This file has the name of the package that it measures, and Python looks in a script's own folder first: imported under
that name (by any script here), it makes room for the package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    from learner_step import main

    main()
elif __name__ == "learner":
    searched = list(sys.path)
    sys.path[:] = [entry for entry in searched if Path(entry).resolve() != Path(__file__).resolve().parent]
    del sys.modules[__name__]
    importlib.import_module(__name__)
    sys.path[:] = searched
