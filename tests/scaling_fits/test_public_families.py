"""On public runs: the prior and the frontier are worth their place. Skipped where the data is
absent.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from scaling_fits.allocation.allocate import allocate
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

POINTS = (
    Path(__file__).resolve().parents[3]
    / "shared"
    / "data"
    / "porian_refinedweb"
    / "isoflop_points.csv"
)
TUNED = {
    "hparams": "tuned",
    "warmup": "short",
    "decay": "const",
    "param_count": "standard",
    "val": "val",
}


@pytest.fixture(scope="module")
def tuned():
    if not POINTS.is_file():
        pytest.skip(f"{POINTS.name} is not beside the checkout")
    with POINTS.open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if all(row[name] == value for name, value in TUNED.items())
        ]
    columns = [[float(row[name]) for row in rows] for name in ("params", "tokens", "loss", "flops")]
    return from_columns(*columns)


def test_a_tenth_of_the_budget_predicts_the_best_runs(tuned):
    """One law with even weights is 9 % off and its best size a third of what it should be."""
    below = tuned.rows(tuned.flops < tuned.flops.max() / 9)
    top = tuned.rows(tuned.flops > tuned.flops.max() / 1.1)
    good = top.rows(top.loss <= 1.02 * top.loss.min())
    fits = {form: fit_runs(below, form, bootstrap=60) for form in ("auto", "chinchilla")}
    errors, sizes = {}, {}
    for form, fit in fits.items():
        said = [predict(fit, n, d) for n, d in zip(good.params, good.tokens, strict=True)]
        errors[form] = np.median(
            [abs(each.loss_nats / y - 1) for each, y in zip(said, good.loss, strict=True)]
        )
        sizes[form] = allocate(fit, 6 * float(good.params[0] * good.tokens[0])).params
        if form == "auto":
            assert all(each.low <= y <= each.high for each, y in zip(said, good.loss, strict=True))
    assert errors["auto"] < 0.04 < errors["chinchilla"]
    best = top.params[top.loss.argmin()]
    assert abs(np.log(sizes["auto"] / best)) < 0.5 < abs(np.log(sizes["chinchilla"] / best))
