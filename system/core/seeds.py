"""Seeds of sampling requests: a pure function of what is sampled, never of how often it was tried.

The attempt does not enter, so a group issued again after a crash draws the same answers under the same version.
``continuation`` counts resumptions of a partial completion, so that noise is never used twice.
"""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, group_id: int, trajectory_id: int, continuation: int = 0) -> int:
    """A 63-bit seed, uniform over distinct arguments (vLLM refuses seeds of 2^64 and more)."""
    text = f"triptych/{run_seed}/{group_id}/{trajectory_id}/{continuation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
