"""A random permutation that needs no memory: one entry is computed at a time, the same on every machine and version.

A Feistel network over the smallest even number of bits that holds the size, walked until it lands inside
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Bijective for every key by construction.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6
"""Small domains need more than the four rounds that suffice for large ones."""


def permuted_index(key: str, index: int, size: int) -> int:
    """The entry ``index`` of the permutation of ``range(size)`` that ``key`` names."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in 0..{size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(_ROUNDS):
            text = f"{key}/{number}/{right}".encode()
            noise = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            left, right = right, left ^ (noise & mask)
        index = left << half_bits | right
        if index < size:
            return index
