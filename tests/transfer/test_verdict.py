import dataclasses
import statistics

import pytest
from planted_valleys import SMALL, WIDE, cpu_grid, linex, rng, two_parabolas

from proxies import canon
from transfer import verdict as verdict_room
from transfer.optimum import Point, TransferError
from transfer.verdict import Verdict, judge

MARGIN = 0.01


def verdicts(world, num, **spike):
    for seed in range(num):
        points, base = world.draw(rng(1000 + seed), **spike)
        yield base, judge(points, target_width=world.target_width, base_width=world.widths[0], seed=seed, draws=600)


@pytest.mark.parametrize(("world", "decided"), [(WIDE, 0.95), (SMALL, 0.65)])
@pytest.mark.parametrize("regret_nats", [0.0, 3 * MARGIN])
def test_planted_transfer_is_judged_rightly(world, decided, regret_nats):
    world = dataclasses.replace(world, regret_nats=regret_nats)
    outcomes, covered = [], []
    for _, verdict in verdicts(world, 80):
        outcomes.append(verdict.outcome)
        covered.append(verdict.drift.low <= world.drift <= verdict.drift.high)
    right, wrong = ("drifts", "holds") if regret_nats else ("holds", "drifts")
    print(f"{len(world.widths)} widths, {regret_nats} nats: {outcomes.count(right) / 80:.2f} right, "
          f"{outcomes.count(wrong) / 80:.2f} wrong, drift covered {statistics.mean(covered):.2f}")  # fmt: skip
    assert outcomes.count(wrong) < 0.05 * len(outcomes)
    assert outcomes.count(right) >= decided * len(outcomes)
    assert statistics.mean(covered) >= 0.85


@pytest.mark.parametrize("valley", [linex, two_parabolas])
@pytest.mark.parametrize("world", [WIDE, SMALL])
def test_the_regret_interval_covers_what_the_rate_really_costs(world, valley):
    world, covered = dataclasses.replace(world, regret_nats=3 * MARGIN, valley=valley), []
    for base, verdict in verdicts(world, 80):
        off = verdict.transferred_log2_lr - world.optimum(world.target_width, base)
        covered.append(verdict.regret_nats.low <= world.valley(off, world.curvature) <= verdict.regret_nats.high)
    print(f"{valley.__name__}, {len(world.widths)} widths: regret covered {statistics.mean(covered):.2f}")
    assert statistics.mean(covered) >= 0.85


@pytest.mark.parametrize("spike", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_one_spiked_run_never_makes_a_drift(spike, num_seeds):
    for plain in (WIDE, SMALL):
        world = dataclasses.replace(plain, num_seeds=num_seeds, noise_nats=0.005, target_width=1024)
        assert "drifts" not in {verdict.outcome for _, verdict in verdicts(world, 30, spike=spike)}


def test_without_the_check_for_a_lone_culprit_spikes_do_make_drifts(monkeypatch):
    monkeypatch.setattr(verdict_room, "_lone_culprit", lambda *_: None)
    world = dataclasses.replace(SMALL, num_seeds=1, noise_nats=0.005, target_width=1024)
    assert "drifts" in {verdict.outcome for _, verdict in verdicts(world, 60, spike=0.4)}


def test_real_mup_does_not_drift_and_real_sp_does():
    mup, sp = cpu_grid("mup", (32, 64, 128)), cpu_grid("sp", (64, 128, 256))
    found = judge(mup, target_width=256, base_width=32, control_points=sp, transferred_log2_lr=-5.5)
    assert found.outcome in {"holds", "cannot_tell"}
    assert abs(found.drift.value) < 0.25
    control = judge(sp, target_width=512, base_width=64)
    assert control.outcome == "drifts"
    assert control.drift.high < -0.5
    two = judge(cpu_grid("sp", (64, 128)), target_width=256, base_width=64)
    assert two.outcome != "holds"


def test_the_control_arm_is_reported_and_changes_nothing():
    mup, sp = cpu_grid("mup", (32, 64, 128)), cpu_grid("sp", (64, 128, 256))
    plain = judge(mup, target_width=256, base_width=64)
    both = judge(mup, target_width=256, base_width=64, control_points=sp)
    assert plain.control is None and both.control.control is None
    assert both.control.drift.value == pytest.approx(-1.1, abs=0.3)
    assert dataclasses.replace(both, control=None) == plain


def test_one_width_cannot_tell():
    found = judge(cpu_grid("mup", (64,)), target_width=256, base_width=64)
    assert found.outcome == "cannot_tell" and found.drift is None and found.regret_nats is None
    assert "one width" in " ".join(found.reasons)


def test_an_unusable_width_forbids_a_verdict_and_is_mended():
    points = [*cpu_grid("mup", (32, 64)), *(p for p in cpu_grid("mup", (128,)) if p.log2_lr <= -6)]
    found = judge(points, target_width=256, base_width=32)
    assert found.outcome == "cannot_tell"
    assert [o.status for o in found.optima] == ["ok", "ok", "edge"]
    assert found.drift is not None
    assert str(found.what_to_run[0]).startswith("run width 128 at 2^-5 (1 seed)")


def test_an_open_verdict_says_what_would_decide():
    world = dataclasses.replace(SMALL, num_seeds=1, noise_nats=0.02, target_width=4096)
    points, _ = world.draw(rng(4))
    found = judge(points, target_width=4096, base_width=32)
    assert found.outcome == "cannot_tell" and found.what_to_run


def test_a_wrong_rate_given_by_hand_is_charged_for():
    found = judge(cpu_grid("mup", (32, 64, 128)), target_width=256, base_width=32, transferred_log2_lr=-8.0)
    assert found.outcome == "drifts"
    assert found.offset.value == pytest.approx(-2.4, abs=0.3)
    assert 0.1 < found.regret_nats.value < 0.4  # measured at 256: 2.185 - 1.957


def test_cliff_and_cost_are_said():
    diverged = [Point(width=128, log2_lr=-2.0, loss_nats=None)]
    found = judge([*cpu_grid("mup", (32, 64, 128)), *diverged], target_width=256, base_width=32)
    assert any("diverged 3.6 octaves above" in reason for reason in found.reasons)
    assert 0.01 < found.cost_of_2x_off_nats.value < 0.08


def test_same_question_same_verdict_and_a_canonical_form():
    points, _ = SMALL.draw(rng(0))
    one, two = (judge(points, target_width=256, base_width=32, control_points=points) for _ in range(2))
    assert canon.canonical(one) == canon.canonical(two)
    assert canon.decode(Verdict, canon.parse(canon.canonical(one))) == one


def test_everything_wrong_with_the_question_is_said_at_once():
    with pytest.raises(TransferError) as caught:
        judge([], target_width=0, base_width=0, transferred_log2_lr=float("nan"), margin_nats=0, level=1, draws=1)
    assert len(caught.value.problems) == 7
    with pytest.raises(TransferError, match="base_width = 48 has no runs"):
        judge(cpu_grid("mup", (32, 64)), target_width=256, base_width=48)
