import math

import pytest

from transfer.question import Question, TransferError
from transfer.verdict.optima_verdict import judge_optima

WIDTHS = (128, 256, 512, 1024, 2048)


def judge(optima, **question):
    sizes = [size for size, _ in optima]
    return judge_optima(
        optima, Question(**{"target_size": 2 * sizes[-1], "base_size": sizes[0], **question})
    )


def test_a_steady_drift_is_measured_and_costs_octaves_at_the_target():
    found = judge([(width, -6 - math.log2(width / 128)) for width in WIDTHS])
    assert found.outcome == "drifts"
    assert found.drift.value == pytest.approx(-1)
    assert found.offset.value == pytest.approx(5)
    assert (found.transferred_log2, found.regret_nats) == (-6, None)


def test_with_the_measured_power_a_steady_drift_is_followed():
    """The same optima: what drifts under no rule lies on the optimum under its own."""
    found = judge([(width, -6 - math.log2(width / 128)) for width in WIDTHS], power=None)
    assert found.power == pytest.approx(-1)
    assert found.offset.value == pytest.approx(0, abs=1e-6)
    assert found.outcome != "drifts"


def test_fine_and_equal_optima_hold():
    fine = tuple((width, -6 + 0.02 * (-1) ** i) for i, width in enumerate(WIDTHS))
    assert judge(fine).outcome == "holds"


def test_two_optima_or_no_base_are_refused():
    with pytest.raises(TransferError) as caught:
        judge([(64, -6.0), (128, -7.0)], base_size=32)
    assert len(caught.value.problems) == 2


def test_a_value_far_off_optima_that_stay_put_is_no_drift():
    found = judge([(w, -6.0) for w in WIDTHS], base_size=32, transferred_log2=-2.0)
    assert found.offset.value == pytest.approx(4) and found.offset.low > 1
    assert found.drift.low <= 0 <= found.drift.high
    assert found.outcome == "cannot_tell"
