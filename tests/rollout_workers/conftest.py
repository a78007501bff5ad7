"""Tiny models shared by the tests of the rollout workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``first`` and ``second`` differ in every weight; the ``tied_`` ones share embedding and head."""
    folder = tmp_path_factory.mktemp("tiny_llamas")
    return {
        f"{prefix}{name}": save_tiny_llama(folder / f"{prefix}{name}", tied=bool(prefix), seed=seed)
        for prefix in ("", "tied_")
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of a module, since a started engine belongs to one."""
    with asyncio.Runner() as runner:
        yield runner
