"""Each form's own parameters give the loss that its six coordinates give."""

import numpy as np
import pytest
from planted_ladders import SIZES, TRUTHS, law_loss

from scaling_fits.laws import solver
from scaling_fits.laws.forms import SHAPES

THETAS = {
    "chinchilla": [0.3, 4.0, 5.0, 0.4, 0.3, 1.0],
    "coupled": [0.3, 6.0, 7.0, 0.6, 0.5, 0.6],
    "power": [-700.0, 4.0, 5.0, 0.2, 0.3, 1.0],
}


@pytest.mark.parametrize("form", list(SHAPES))
def test_names_mean_what_the_paper_means(form):
    names, theta = TRUTHS[form], THETAS[form]
    values = dict(zip(SHAPES[form].names, SHAPES[form].natural(np.array([theta])), strict=True))
    assert list(values) == list(names)
    tokens = np.geomspace(1e8, 1e5, len(SIZES))
    said = law_loss(values, SIZES, tokens)
    assert np.log(said) == pytest.approx(
        solver.log_loss(np.array([theta]), np.log(SIZES), np.log(tokens))[0], rel=1e-12
    )
