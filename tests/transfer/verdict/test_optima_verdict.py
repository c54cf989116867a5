"""Tests of verdicts from a table of optima, without the runs behind them."""

import math

import pytest

from forerun._transfer.question import Question, TransferError
from forerun._transfer.verdict.optima_verdict import judge_optima

WIDTHS = (128, 256, 512, 1024, 2048)


def judge(optima, **question):
    """Judge optima; unless the question says otherwise, the target is twice the largest size."""
    sizes = [size for size, _ in optima]
    return judge_optima(
        optima, Question(**{"target_size": 2 * sizes[-1], "base_size": sizes[0], **question})
    )


def test_steady_drift_is_measured_and_extended_to_the_target():
    verdict = judge([(width, -6 - math.log2(width / 128)) for width in WIDTHS])
    assert verdict.outcome == "drifts"
    assert verdict.drift.estimate == pytest.approx(-1)
    assert verdict.offset.estimate == pytest.approx(5)
    assert (verdict.transferred_log2, verdict.regret_nats) == (-6, None)


def test_steady_drift_is_followed_with_the_measured_power():
    """A value that follows the measured power stays at the optimum, although the optima drift."""
    verdict = judge([(width, -6 - math.log2(width / 128)) for width in WIDTHS], power=None)
    assert verdict.power == pytest.approx(-1)
    assert verdict.offset.estimate == pytest.approx(0, abs=1e-6)
    assert verdict.outcome != "drifts"


def test_nearly_equal_optima_on_a_fine_grid_hold():
    optima = tuple((width, -6 + 0.02 * (-1) ** i) for i, width in enumerate(WIDTHS))
    assert judge(optima).outcome == "holds"


def test_too_few_optima_and_a_missing_base_are_refused():
    with pytest.raises(TransferError) as caught:
        judge([(64, -6.0), (128, -7.0)], base_size=32)
    assert len(caught.value.problems) == 2


def test_value_far_from_constant_optima_is_no_drift():
    verdict = judge([(w, -6.0) for w in WIDTHS], base_size=32, transferred_log2=-2.0)
    assert verdict.offset.estimate == pytest.approx(4) and verdict.offset.low > 1
    assert verdict.drift.low <= 0 <= verdict.drift.high
    assert verdict.outcome == "cannot_tell"
