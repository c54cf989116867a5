"""The width per layer: a planted optimum is found, its cost too; what a ladder cannot tell is not
told.
"""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from proxies.core.checks import SpecError
from scaling_fits.allocation.aspect import ShapedRun, aspect_term
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

BEST, BEND, NOISE = 24.0, 0.01, 0.001


def ladder(
    best=BEST, bend=BEND, noise=NOISE, seed=0, depths=(1, 2, 4), widths=(32, 48, 64, 96), wrong=0.0
):
    """Runs of a grid whose loss has a parabola in log2 of width per layer; `wrong`: a law off by N
    to that power.
    """
    generator, runs = np.random.default_rng(seed), []
    for width in widths:
        for depth in depths:
            for tokens in (1e5, 3e5, 1e6):
                params, aspect = 12.0 * depth * width**2, width / depth
                law = 1.5 + 400 / params**0.35 + 300 / tokens**0.35
                added = bend * math.log2(aspect / best) ** 2 + noise * generator.standard_normal()
                runs.append(
                    ShapedRun(
                        params=params,
                        tokens=tokens,
                        width_per_layer=aspect,
                        loss_nats=law * math.exp(added),
                        predicted_nats=law * params**wrong,
                    )
                )
    return runs


def test_a_planted_optimum_and_its_cost_are_found():
    term = aspect_term(ladder(), 0.9)
    best = term.best()
    assert term.determined
    assert best.low < BEST < best.high < 1.3 * best.low
    for factor in (0.5, 2.0):
        cost = term.cost(BEST * factor, BEST)
        assert cost.low < BEND < cost.high
        assert cost.value == pytest.approx(BEND, rel=0.25)
    # The law of all runs has the mean of the term in it.
    assert np.mean([term.log_loss(run.width_per_layer).value for run in ladder()]) == pytest.approx(
        0, abs=1e-9
    )


def test_a_law_that_is_off_by_a_power_of_size_changes_nothing():
    assert aspect_term(ladder(wrong=0.01), 0.9).best().value == pytest.approx(
        aspect_term(ladder(), 0.9).best().value
    )


def test_intervals_hold_the_truth_as_often_as_they_say():
    inside = [
        term.best().low <= BEST <= term.best().high
        for term in (aspect_term(ladder(noise=0.004, seed=seed), 0.9) for seed in range(100))
    ]
    assert 0.82 <= np.mean(inside) <= 0.97


def test_runs_of_one_shape_that_depart_together_widen_the_interval():
    """Checkpoints of one run, or a shape that the law misses: the truth is still inside as often as
    it says.
    """
    inside = []
    for seed in range(100):
        generator = np.random.default_rng(1000 + seed)
        common = dict.fromkeys({(run.params, run.width_per_layer) for run in ladder()}, 0.0)
        common = {shape: 0.005 * generator.standard_normal() for shape in common}
        runs = [
            dataclasses.replace(
                run, loss_nats=run.loss_nats * math.exp(common[run.params, run.width_per_layer])
            )
            for run in ladder(noise=0.001, seed=seed)
        ]
        best = aspect_term(runs, 0.9).best()
        inside.append(best.low <= BEST <= best.high)
    assert np.mean(inside) >= 0.82


def test_beyond_what_was_tried_nothing_is_claimed():
    term = aspect_term(ladder(best=500.0), 0.9)
    assert term.best().value == pytest.approx(96.0)
    assert not term.reaches(200.0)


def test_noise_alone_determines_no_shape():
    undecided = [
        not aspect_term(ladder(bend=0.0, noise=0.01, seed=seed), 0.9).determined
        for seed in range(20)
    ]
    assert sum(undecided) >= 17


@pytest.mark.parametrize(
    "runs",
    [
        ladder()[:6],
        ladder(depths=(2,))[:9],
        [r for r in ladder() if r.tokens == 1e5 and r.width_per_layer < 33],
    ],
    ids=["few", "one depth of three widths", "one duration"],
)
def test_a_ladder_that_cannot_tell_is_refused(runs):
    with pytest.raises(SpecError, match="aspect ratio"):
        aspect_term(runs, 0.9)


def test_the_comparison_can_fail():
    """Without the columns of size a law's own error is taken for the shape's."""
    runs = ladder(wrong=0.03, widths=(32, 64, 128, 256))
    assert abs(math.log2(aspect_term(runs, 0.9).best().value / BEST)) < 0.15
    x = np.log2([run.width_per_layer for run in runs])
    left = np.log([run.loss_nats / run.predicted_nats for run in runs])
    bend, slope, _ = np.polyfit(x - x.mean(), left, 2)
    assert abs(math.log2(2 ** (x.mean() - slope / (2 * bend)) / BEST)) > 0.5


GEMSTONES = Path(__file__).resolve().parents[4] / "shared" / "data" / "gemstones" / "hot.csv"


@pytest.mark.skipif(not GEMSTONES.exists(), reason="public data not here")
def test_held_out_shapes_of_public_models_are_predicted():
    """Gemstones (arXiv 2502.06857): 22 shapes of 50 million to 2 billion parameters, 3 to 320
    widths a layer.
    """
    with GEMSTONES.open() as file:
        rows = [
            {name: float(value) for name, value in row.items() if name != "run_name"}
            for row in csv.DictReader(file)
        ]
    shapes = sorted({(row["width"], row["depth"]) for row in rows})
    errors = {"size": [], "shape": []}
    for fold in range(4):
        kept, left = (
            [r for r in rows if (shapes.index((r["width"], r["depth"])) % 4 == fold) is of]
            for of in (False, True)
        )
        fit = fit_runs(
            from_columns(*([r[c] for r in kept] for c in ("params", "tokens", "loss"))),
            "chinchilla",
            0,
        )

        def predicted(row, fit=fit):
            return predict(fit, row["params"], row["tokens"]).loss_nats

        term = aspect_term(
            [
                ShapedRun(
                    params=r["params"],
                    tokens=r["tokens"],
                    width_per_layer=r["width"] / r["depth"],
                    loss_nats=r["loss"],
                    predicted_nats=predicted(r),
                )
                for r in kept
            ],
            0.9,
        )
        for row in left:
            by_shape = predicted(row) * math.exp(term.log_loss(row["width"] / row["depth"]).value)
            errors["size"].append(abs(predicted(row) / row["loss"] - 1))
            errors["shape"].append(abs(by_shape / row["loss"] - 1))
    quantiles = {name: np.quantile(each, [0.5, 0.9, 1.0]) for name, each in errors.items()}
    print({name: each.round(4).tolist() for name, each in quantiles.items()})
    assert quantiles["shape"][0] < 0.01
    assert quantiles["shape"][1] < quantiles["size"][1]
