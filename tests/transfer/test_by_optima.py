import math

import pytest

from transfer.by_optima import judge_optima
from transfer.optimum import TransferError

WIDTHS = (128, 256, 512, 1024, 2048)
# Megatron-LM PR 3058: optima by width.
MEGATRON_SP = tuple(zip(WIDTHS, map(math.log2, (9.77e-4, 4.88e-4, 2.44e-4, 1.22e-4, 6.10e-5)), strict=True))
MEGATRON_MUP = tuple(zip(WIDTHS, map(math.log2, (9.77e-4, 9.77e-4, 9.77e-4, 9.77e-4, 1.95e-3)), strict=True))
# microsoft/mup issue 66: nanoGPT on a broken set-up.
BROKEN = ((96, -9.0), (192, -10.0), (384, -11.0), (768, -11.0))


def judge(optima):
    return judge_optima(optima, target_width=optima[-1][0] * 2, base_width=optima[0][0])


def test_megatron_in_standard_parametrization_drifts_an_octave_per_doubling():
    found = judge(MEGATRON_SP)
    assert found.outcome == "drifts"
    assert found.drift.value == pytest.approx(-1, abs=0.01)
    assert found.drift.low < -1 < found.drift.high < -0.5
    assert found.regret_nats is None


def test_megatron_in_mup_is_near_no_drift():
    found = judge(MEGATRON_MUP)
    assert found.outcome != "drifts"
    assert found.drift.low <= 0 <= found.drift.high and found.drift.low > -1


def test_a_broken_set_up_drifts():
    found = judge(BROKEN)
    assert found.outcome == "drifts"
    assert found.drift.value == pytest.approx(-0.7)


def test_fine_and_equal_optima_hold():
    fine = tuple((width, -6 + 0.02 * (-1) ** i) for i, width in enumerate(WIDTHS))
    assert judge(fine).outcome == "holds"


def test_a_rate_written_with_fewer_digits_is_no_finer_grid():
    exact, rounded = ([(w, math.log2(lr)) for w, lr in zip((128, 256, 512), rates, strict=True)]
                      for rates in ((2**-6,) * 3, (2**-6, 0.0156, 2**-6)))  # fmt: skip
    assert judge(exact).outcome == judge(rounded).outcome == "cannot_tell"


def test_equal_optima_on_an_unknown_grid_are_only_known_to_half_a_step():
    found = judge(tuple((width, -6.0) for width in WIDTHS))
    assert found.drift.high > 0.1


def test_two_optima_or_no_base_are_refused():
    with pytest.raises(TransferError) as caught:
        judge_optima([(64, -6.0), (128, -7.0)], target_width=256, base_width=32)
    assert len(caught.value.problems) == 2
