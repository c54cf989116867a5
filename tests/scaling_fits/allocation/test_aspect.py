"""Tests of the best aspect ratio (width per layer): a planted optimum and the loss at other ratios
are recovered, and ladders that do not determine them are refused.
"""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.allocation.aspect import ShapedRun, fit_aspect_term
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns

BEST_ASPECT = 24.0
CURVATURE = 0.01
"""Growth of the log loss at a factor of two from the best aspect ratio."""
NOISE = 0.001
"""Standard deviation of the log loss."""


def make_ladder(
    best=BEST_ASPECT,
    curvature=CURVATURE,
    noise=NOISE,
    seed=0,
    depths=(1, 2, 4),
    widths=(32, 48, 64, 96),
    law_error_exponent=0.0,
):
    """Return runs of a grid whose loss has a parabola in log2 of the width per layer.

    The law that predicts them is off by the factor N**`law_error_exponent`.
    """
    generator = np.random.default_rng(seed)
    runs = []
    for width in widths:
        for depth in depths:
            for tokens in (1e5, 3e5, 1e6):
                params, aspect = 12.0 * depth * width**2, width / depth
                law = 1.5 + 400 / params**0.35 + 300 / tokens**0.35
                log_excess = (
                    curvature * math.log2(aspect / best) ** 2 + noise * generator.standard_normal()
                )
                runs.append(
                    ShapedRun(
                        params=params,
                        tokens=tokens,
                        width_per_layer=aspect,
                        loss_nats=law * math.exp(log_excess),
                        predicted_nats=law * params**law_error_exponent,
                    )
                )
    return runs


def test_planted_optimum_and_its_cost_are_recovered():
    term = fit_aspect_term(make_ladder(), 0.9)
    best = term.find_best()
    assert term.determined
    assert best.low < BEST_ASPECT < best.high < 1.3 * best.low
    for factor in (0.5, 2.0):
        cost = term.estimate_cost(BEST_ASPECT * factor, BEST_ASPECT)
        assert cost.low < CURVATURE < cost.high
        assert cost.estimate == pytest.approx(CURVATURE, rel=0.25)
    # The law that was fitted to all runs already includes the mean of the term
    assert np.mean(
        [term.estimate_shift(run.width_per_layer).estimate for run in make_ladder()]
    ) == pytest.approx(0, abs=1e-9)


def test_law_that_is_off_by_a_power_of_size_does_not_move_the_optimum():
    assert fit_aspect_term(
        make_ladder(law_error_exponent=0.01), 0.9
    ).find_best().estimate == pytest.approx(
        fit_aspect_term(make_ladder(), 0.9).find_best().estimate
    )


def test_intervals_cover_the_optimum_at_their_level():
    # The bounds allow for chance over 100 ladders at a level of 0.9
    covered = []
    for seed in range(100):
        best = fit_aspect_term(make_ladder(noise=0.004, seed=seed), 0.9).find_best()
        covered.append(best.low <= BEST_ASPECT <= best.high)
    assert 0.82 <= np.mean(covered) <= 0.97


def test_intervals_cover_when_runs_of_one_shape_deviate_together():
    """Runs deviate together when they are checkpoints of one run, or when the law misses a
    shape.
    """
    covered = []
    for seed in range(100):
        generator = np.random.default_rng(1000 + seed)
        shapes = {(run.params, run.width_per_layer): None for run in make_ladder()}
        common = {shape: 0.005 * generator.standard_normal() for shape in shapes}
        runs = [
            run._replace(
                loss_nats=run.loss_nats * math.exp(common[run.params, run.width_per_layer])
            )
            for run in make_ladder(noise=0.001, seed=seed)
        ]
        best = fit_aspect_term(runs, 0.9).find_best()
        covered.append(best.low <= BEST_ASPECT <= best.high)
    assert np.mean(covered) >= 0.82


def test_optimum_is_limited_to_the_shapes_that_were_run():
    term = fit_aspect_term(make_ladder(best=500.0), 0.9)
    # The largest ratio of the ladder: width 96 with one layer
    assert term.find_best().estimate == pytest.approx(96.0)
    assert not term.is_within_reach(200.0)


def test_noise_alone_does_not_determine_a_shape():
    undecided = [
        not fit_aspect_term(make_ladder(curvature=0.0, noise=0.01, seed=seed), 0.9).determined
        for seed in range(20)
    ]
    assert sum(undecided) >= 17


@pytest.mark.parametrize(
    "runs",
    [
        make_ladder()[:6],
        make_ladder(depths=(2,))[:9],
        [r for r in make_ladder() if r.tokens == 1e5 and r.width_per_layer < 33],
    ],
    ids=["few", "one depth of three widths", "one duration"],
)
def test_ladder_that_does_not_determine_the_shape_is_refused(runs):
    with pytest.raises(SpecError, match="aspect ratio"):
        fit_aspect_term(runs, 0.9)


def test_plain_parabola_fit_confuses_the_laws_error_with_the_shape():
    """A parabola without columns for the size attributes the law's own error to the shape."""
    runs = make_ladder(law_error_exponent=0.03, widths=(32, 64, 128, 256))
    assert abs(math.log2(fit_aspect_term(runs, 0.9).find_best().estimate / BEST_ASPECT)) < 0.15
    x = np.log2([run.width_per_layer for run in runs])
    residuals = np.log([run.loss_nats / run.predicted_nats for run in runs])
    curvature, slope, _ = np.polyfit(x - x.mean(), residuals, 2)
    assert abs(math.log2(2 ** (x.mean() - slope / (2 * curvature)) / BEST_ASPECT)) > 0.5


GEMSTONES = Path(__file__).resolve().parents[4] / "shared" / "data" / "gemstones" / "hot.csv"


@pytest.mark.skipif(not GEMSTONES.exists(), reason="public data not here")
@pytest.mark.parametrize("folds", [(3,), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_losses_of_held_out_public_shapes_are_predicted(folds):
    """Gemstones (arXiv 2502.06857): 22 shapes of 50 million to 2 billion parameters.

    Their width per layer is 3 to 320.

    Fold 3 holds out the shapes that a law of size alone predicts worst.
    """
    with GEMSTONES.open() as file:
        rows = [
            {name: float(value) for name, value in row.items() if name != "run_name"}
            for row in csv.DictReader(file)
        ]
    shapes = sorted({(row["width"], row["depth"]) for row in rows})
    errors = {"size": [], "shape": []}
    for fold in folds:
        kept, held_out = [], []
        for row in rows:
            is_held_out = shapes.index((row["width"], row["depth"])) % 4 == fold
            (held_out if is_held_out else kept).append(row)
        fit = fit_runs(
            from_columns(*([r[c] for r in kept] for c in ("params", "tokens", "loss"))),
            "chinchilla",
            0,
        )

        def predict_loss(row, fit=fit):
            return predict(fit, row["params"], row["tokens"]).loss_nats

        term = fit_aspect_term(
            [
                ShapedRun(
                    params=r["params"],
                    tokens=r["tokens"],
                    width_per_layer=r["width"] / r["depth"],
                    loss_nats=r["loss"],
                    predicted_nats=predict_loss(r),
                )
                for r in kept
            ],
            0.9,
        )
        for row in held_out:
            by_size = predict_loss(row)
            by_shape = by_size * math.exp(term.estimate_shift(row["width"] / row["depth"]).estimate)
            errors["size"].append(abs(by_size / row["loss"] - 1))
            errors["shape"].append(abs(by_shape / row["loss"] - 1))
    quantiles = {name: np.quantile(values, [0.5, 0.9, 1.0]) for name, values in errors.items()}
    assert quantiles["shape"][0] < 0.01
    assert quantiles["shape"][1] < quantiles["size"][1]
