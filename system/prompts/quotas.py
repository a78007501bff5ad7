"""Which source each position of the prompt stream belongs to: exact quotas, a pure function of weights and position.

The quota method of apportionment (Balinski and Young, 1975): position t goes to the source with the earliest
``(count + 1) / share`` among those whose count is below ``share * (t + 1)``. What always holds, for every source and
after every number of positions: ``floor(share * positions) <= count <= ceil(share * positions)``. So where
``share * n`` is whole, *every* n consecutive positions hold exactly that many, wherever they begin; elsewhere a
window is at most one off its share on either side and the debt is carried, so that long-run proportions are exact.
Arithmetic is rational; the pattern repeats and at most one period of it is kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction


class SourceQuotas:
    """Maps positions to sources. Same weights, same answers, in whatever order they are asked."""

    def __init__(self, weights: Sequence[float]) -> None:
        """``weights``: positive, in any unit; 0.1 means one tenth exactly."""
        if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
            raise ValueError(f"weights must be positive and finite: {list(weights)}")
        exact = [Fraction(repr(weight)) for weight in weights]
        self.shares: tuple[Fraction, ...] = tuple(weight / sum(exact) for weight in exact)
        self.period: int = math.lcm(*(share.denominator for share in self.shares))
        self._counts = [0] * len(self.shares)
        self._source = array("l")
        self._ordinal = array("q")

    def place(self, position: int) -> tuple[int, int]:
        """(source, ordinal): which source the position belongs to, and how many of its positions come before."""
        if position < 0:
            raise ValueError(f"positions begin at 0, got {position}")
        periods, offset = divmod(position, self.period)
        while len(self._source) <= offset:
            self._extend()
        source = self._source[offset]
        return source, periods * int(self.shares[source] * self.period) + self._ordinal[offset]

    def _extend(self) -> None:
        reached = len(self._source) + 1
        _, chosen = min(
            (Fraction(count + 1) / share, index)
            for index, (share, count) in enumerate(zip(self.shares, self._counts, strict=True))
            if count < share * reached
        )
        self._source.append(chosen)
        self._ordinal.append(self._counts[chosen])
        self._counts[chosen] += 1
