"""When the probe of an engine counts as the learner's."""

from __future__ import annotations

import numpy as np
import pytest

from system.probe import ProbeDisagrees, ProbeLimit


def test_in_float32_a_gap_above_1e_4_is_refused() -> None:
    assert ProbeLimit(True).gaps([-1.0, -2.00009], [-1.0, -2.0]).max() == pytest.approx(9e-5)
    with pytest.raises(ProbeDisagrees, match=r"largest gap 2\.00e-04 nat, limit 0\.0001"):
        ProbeLimit(True).gaps([-1.0, -2.0002], [-1.0, -2.0])


def test_in_bfloat16_three_times_the_first_gap_is_the_limit() -> None:
    limit = ProbeLimit(float32=False, yardstick=0.05)
    assert limit.verdict(np.full(4, 0.149)) is None
    assert "limit 0.150" in (limit.verdict(np.full(4, 0.151)) or "")
    assert ProbeLimit(False, yardstick=0.001).verdict(np.full(4, 0.05)) is None


def test_the_largest_mean_gap_of_the_first_sync_becomes_the_yardstick_and_stays() -> None:
    first = ProbeLimit(False).measured([np.full(2, 0.1), np.full(2, 0.04)])
    assert first.yardstick == pytest.approx(0.1)
    assert first.measured([np.full(2, 0.2)]) == first
    assert ProbeLimit(False).measured([]).yardstick is None
    assert ProbeLimit(True).measured([np.full(2, 0.1)]).yardstick is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_probe_that_is_not_a_number_is_never_fine(bad: float) -> None:
    for limit in (ProbeLimit(True), ProbeLimit(False), ProbeLimit(False, 0.1)):
        assert limit.verdict(np.array([0.0, bad])) is not None


def test_a_probe_of_another_length_is_refused_rather_than_zipped() -> None:
    with pytest.raises(ProbeDisagrees, match="2 log-probs, the learner's 3"):
        ProbeLimit(True).gaps([-1.0, -2.0], [-1.0, -2.0, -3.0])
