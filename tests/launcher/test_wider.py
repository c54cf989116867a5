"""What curves of a study say: a planted crossing of widths fails, a planted spike is told beside
the verdict.
"""

import dataclasses

import pytest
from tiny_study import ask

from launcher.experiments import wider as of_curves
from launcher.experiments.transferred_values import transferred
from launcher.experiments.wider import curves_by_width, spike_words, wider, wider_body
from launcher.study.study_folder import recorded_study
from launcher.views.wider import wider_text
from proxies.core.spec import Curve
from sweeps.store.ledger import Ledger
from transfer.question import Point


@pytest.fixture(scope="module")
def known(finished):
    study, ledger = recorded_study(finished / "study"), Ledger.read(finished / "study")
    return study, transferred(study, ledger), ledger.results()


def curves(known):
    study, moved, results = known
    return curves_by_width(study, moved.tests, results, moved.log2_lr)


def test_the_curves_are_of_two_widths_at_one_rate_seed_by_seed(known):
    found = curves(known)
    assert found
    for value, by_width in found.items():
        assert value <= known[1].log2_lr + 0.5
        assert len(by_width) > 1
        assert len({frozenset(runs) for runs in by_width.values()}) == 1


def test_a_planted_crossing_fails_and_is_said(known):
    study = known[0]
    steps = tuple(range(1, 101))

    def planted_curve(seed, wide):
        losses = (
            5.0 - 0.01 * n + 1e-4 * seed * (n % 3) + (0.5 if n > 50 and wide else 0.0)
            for n in steps
        )
        return Curve(steps=steps, grad_norm=(), train_loss_nats=tuple(losses))

    planted = {
        value: {
            width: {seed: planted_curve(seed, width == 16) for seed in runs}
            for width, runs in by_width.items()
        }
        for value, by_width in curves(known).items()
    }
    found = wider(study, planted)
    assert found.outcome == "fails"
    said = wider_text(wider_body(found, planted))
    assert said.startswith("fails: training loss over widths 8 and 16")
    assert "+0.5" in said


def test_runs_of_fewer_steps_than_parts_say_nothing(finished):
    _, body = ask("report", finished / "study")
    assert body["wider"] is None
    assert "Is wider better?" not in (finished / "study" / "report.html").read_text()


@pytest.mark.parametrize(("stride", "at"), [(1, 3), (10, 1)])
def test_a_lone_runs_spike_is_told_beside_the_others(known, monkeypatch, stride, at):
    """Also where a trainer logs every tenth step: a warmup is a number of steps, not of entries."""
    study, moved, results = known
    test = next(
        one for one in moved.tests if (one.hyperparameter, one.axis) == ("learning_rate", "width")
    )
    spec, value = test.condition.specs[0]
    culprit = Point(size=spec.shape.width, log2_value=value, loss_nats=5.0, seed=spec.seed)

    def planted(study, result):
        norms = [1.0] * 6
        norms[at] = 14.0 if result.id == spec.id else 2.0
        steps = tuple(stride * n for n in range(1, 7))
        return Curve(steps=steps, train_loss_nats=(5.0,) * 6, grad_norm=tuple(norms))

    monkeypatch.setattr(of_curves, "curve_of", planted)
    sizes = {one.id: test.condition.size(one) for one, _ in test.condition.specs}
    said = spike_words(study, test.condition.specs, results, sizes, culprit)
    assert "14 times its median" in said and "2 times" in said
    other = dataclasses.replace(culprit, seed=10**6)
    assert spike_words(study, test.condition.specs, results, sizes, other) == ""
