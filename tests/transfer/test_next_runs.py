import pytest

from transfer.next_runs import mend, power, sharpen
from transfer.optimum import Optimum, Point


def unusable(status):
    return Optimum(width=64, status=status, log2_lr=None, interval_log2=None, loss_nats=None, num_runs=1,
                   num_diverged=0, cliff_octaves=None, curve=())  # fmt: skip


def usable(width):
    return Optimum(width=width, status="ok", log2_lr=-6.0, interval_log2=(-6.1, -5.9), loss_nats=2.0, num_runs=5,
                   num_diverged=0, cliff_octaves=None, curve=())  # fmt: skip


def points(losses, width=64, seeds=1):
    return [
        Point(width=width, log2_lr=-8.0 + i, loss_nats=x, seed=s) for i, x in enumerate(losses) for s in range(seeds)
    ]


@pytest.mark.parametrize(("losses", "rates"), [
    ([2.0, 2.1, 2.2, 2.3], [-9]), ([2.3, 2.2, 2.1, 2.0], [-4]), ([2.3, 2.2, 2.1, 2.0, None], [-4.5]),
])  # fmt: skip
def test_an_edge_is_extended_on_its_side_but_not_over_the_cliff(losses, rates):
    assert [s.log2_lr for s in mend(unusable("edge"), points(losses))] == rates


def test_too_few_rates_are_filled_up_round_the_best():
    assert [s.log2_lr for s in mend(unusable("too_few"), points([2.2, 2.1, 2.2]))] == [-9]
    assert len(mend(unusable("too_few"), points([2.0]))) == 3


def test_a_flat_valley_gets_seeds_and_a_wider_range():
    found = mend(unusable("flat"), points([2.1, 2.0, 2.1, 2.05, 2.1], seeds=2))
    assert [s.log2_lr for s in found] == [-9, -8, -7, -6, -5]


def test_where_everything_diverged_lower_rates_are_asked_for():
    assert [s.log2_lr for s in mend(unusable("too_few"), points([None, None]))] == [-10, -11, -12, -13]


def test_seeds_are_bought_where_they_are_cheap():
    runs = [p for w in (32, 64) for p in points([2.2, 2.1, 2.0, 2.1, 2.2], w, seeds=2)]
    found = sharpen(runs, [usable(32), usable(64)], pull=(1, 1), sds=(0.1, 0.1), share=0.9, target_width=128)
    assert {s.width for s in found} == {32}
    assert sorted({s.log2_lr for s in found}) == [-8, -7, -6, -5]


def test_when_seeds_do_not_suffice_a_wider_proxy_is_named_first():
    runs = [p for w in (32, 64) for p in points([2.2, 2.1, 2.0, 2.1, 2.2], w, seeds=2)]
    found = sharpen(runs, [usable(32), usable(64)], pull=(1, 1), sds=(0.1, 0.1), share=0.05, target_width=1024)
    assert found[0].width == 128


def test_rates_are_written_as_powers_of_two():
    assert (power(-3.0), power(-5.5849625)) == ("2^-3", "2^-5.58")
    text = str(mend(unusable("edge"), points([2.3, 2.2, 2.1, 2.0], seeds=2))[0])
    assert text.startswith("run width 64 at 2^-4 (2 seeds): ")
