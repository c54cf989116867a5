"""Tests of the views of a study's loss curves: mean curves by width, and spikes of single runs."""

import dataclasses

import pytest
from tiny_study import run_json

from forerun._launcher.report.views import curve_comparison
from forerun._launcher.report.views.curve_comparison import compare_widths, describe_spikes
from forerun._launcher.study.experiments.transfer_results import load_transfer_result
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core.spec import Curve
from forerun._sweeps.store.ledger import Ledger
from forerun._transfer.question import Point


@pytest.fixture(scope="module")
def transfer_runs(finished_study_dir):
    """The study, its transfer result, and its results by run id."""
    study, ledger = (
        read_recorded_study(finished_study_dir / "study"),
        Ledger.read(finished_study_dir / "study"),
    )
    return study, load_transfer_result(study, ledger), ledger.get_results()


def plant_curves(transfer_runs, monkeypatch, num_steps):
    """Plant curves in place of those of the study, and return the comparison of widths.

    The curves fall by 0.01 nats a step, and are 0.5 nats lower at width 16 than at width 8.
    """
    study, transfer, results = transfer_runs
    widths = {spec.id: spec.shape.width for test in transfer.tests for spec in test.specs}
    steps = tuple(range(1, num_steps + 1))

    def make_curve(study, result):
        start = 5.0 - 0.5 * (widths[result.id] == 16)
        losses = tuple(start - 0.01 * step for step in steps)
        return Curve(steps=steps, grad_norm=(), train_loss_nats=losses)

    monkeypatch.setattr(curve_comparison, "load_curve_or_none", make_curve)
    return compare_widths(study, transfer.tests, results, transfer.log2_lr)


def test_each_width_has_the_mean_of_its_planted_curves(transfer_runs, monkeypatch):
    comparison = plant_curves(transfer_runs, monkeypatch, 100)
    assert comparison.learning_rate <= 2.0 ** (transfer_runs[1].log2_lr + 0.5)
    narrow, wide = comparison.curves
    assert (narrow.width, wide.width) == (8, 16)
    assert narrow.steps == wide.steps == sorted(set(narrow.steps))
    assert len(narrow.steps) <= curve_comparison.NUM_POINTS
    losses = zip(narrow.steps, narrow.train_loss_nats, wide.train_loss_nats, strict=True)
    for step, above, below in losses:
        assert above == pytest.approx(5.0 - 0.01 * step) and above - below == pytest.approx(0.5)


def test_runs_of_few_steps_have_no_curve(transfer_runs, monkeypatch, finished_study_dir):
    assert plant_curves(transfer_runs, monkeypatch, curve_comparison.MIN_STEPS - 1) is None
    _, body = run_json("report", finished_study_dir / "study")
    assert body["wider"] is None
    assert "Is wider better?" not in (finished_study_dir / "study" / "report.html").read_text()


@pytest.mark.parametrize(("stride", "spike_index"), [(1, 3), (10, 1)])
def test_spike_of_one_run_is_reported_with_the_others_median(
    transfer_runs, monkeypatch, stride, spike_index
):
    """Gradient norms of the warmup are left out. The end of the warmup is found by its step.

    A trainer may log only every tenth step, which is a stride of 10. Fewer logged entries then
    belong to the warmup than with a stride of 1.
    """
    study, transfer, results = transfer_runs
    test = next(
        test
        for test in transfer.tests
        if (test.hyperparameter, test.axis) == ("learning_rate", "width")
    )
    spec, value = test.grid.specs[0]
    culprit = Point(size=spec.shape.width, log2_value=value, loss_nats=5.0, seed=spec.seed)

    def make_spiked_curve(study, result):
        norms = [1.0] * 6
        norms[spike_index] = 14.0 if result.id == spec.id else 2.0
        steps = tuple(stride * n for n in range(1, 7))
        return Curve(steps=steps, train_loss_nats=(5.0,) * 6, grad_norm=tuple(norms))

    monkeypatch.setattr(curve_comparison, "load_curve_or_none", make_spiked_curve)
    sizes = {spec.id: test.grid.get_size(spec) for spec, _ in test.grid.specs}
    text = describe_spikes(study, test.grid.specs, results, sizes, culprit)
    assert "14 times its median" in text and "2 times" in text
    unknown = dataclasses.replace(culprit, seed=10**6)
    assert describe_spikes(study, test.grid.specs, results, sizes, unknown) == ""
