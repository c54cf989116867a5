"""The batch beside the noise scale: judged, in words, drawn, kept in a file; and what the looks add
to an estimate.
"""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.calibration.study_cost import _count_noise_flops
from launcher.figures import plots
from launcher.figures.panel import MissingError, svg_of
from launcher.views.batch import judged, judged_text, law_of, law_text, looks_rows, noise_body
from proxies.core.noise_scale import NoiseLook, noise_scale
from sweeps.store.curves import append_noise, load_noise, noise_path

RUN_ID = "a" * 64


def looks(scale=4000.0, exponent=0.3, error=1e-5):
    rng = np.random.default_rng(0)
    found = []
    for width in (32, 64, 96):
        for tokens in (5e4, 1.5e5, 4e5):
            inverse = 1 / (scale * (tokens / 2e5) ** exponent) + error * rng.normal()
            high = 1 / (inverse - 1.8 * error) if inverse > 1.8 * error else None
            found.append(
                {
                    "width": width,
                    "num_layers": 2,
                    "run_tokens": 2 * tokens,
                    "batch_tokens": 512,
                    "step": 100,
                    "tokens": tokens,
                    "scale_tokens": 1 / inverse if inverse > 0 else None,
                    "interval": [1 / (inverse + 1.8 * error), high],
                    "inverse": inverse,
                    "inverse_error": error,
                }
            )
    return {"level": 0.9, "looks": found}


@pytest.mark.parametrize(
    ("batch", "outcome", "said"),
    [(64, "under", "under"), (100_000, "over", "over"), (5_500, "about", "is about")],
)
def test_a_batch_is_judged_against_the_planted_law(batch, outcome, said):
    found = judged(law_of(looks()), batch, 4e5)
    assert (found["outcome"], found["interval"][0] <= 4000 * 2**0.3 <= found["interval"][1]) == (
        outcome,
        True,
    )
    assert said in judged_text(found)


def test_what_cannot_be_told_is_not_told():
    assert judged(None, 512, 1e6)["outcome"] == "cannot_tell"
    assert "too few looks" in judged_text(judged(None, 512, 1e6))
    wide = judged(law_of(looks(error=3e-4)), 4000, 4e7)
    assert wide["outcome"] == "cannot_tell"
    assert judged_text(wide).startswith("cannot tell")


def test_the_body_comes_of_the_files_beside_the_curves(tmp_path):
    rng = np.random.default_rng(0)
    parts = 1.0 + 3 * rng.normal(size=(12, 40))
    look = NoiseLook(step=100, num_sequences=8, gram=tuple(map(tuple, (parts @ parts.T).tolist())))
    append_noise(
        tmp_path, RUN_ID, NoiseLook(step=100, num_sequences=8, gram=((1.0, 0.0), (0.0, 1.0)))
    )
    append_noise(tmp_path, RUN_ID, look)  # after a resume, the step is measured again
    with noise_path(tmp_path, RUN_ID).open("a") as file:
        file.write('{"gram": [[1.0')  # a killed worker's
    assert load_noise(tmp_path, RUN_ID) == (look,)
    spec = SimpleNamespace(
        id=RUN_ID,
        shape=SimpleNamespace(seq_len=64, width=32, num_layers=2),
        num_tokens=102_400,
        batch_tokens=512,
        tokens_by=lambda step: 512 * step,
    )
    study = SimpleNamespace(
        study_dir=tmp_path, plan=SimpleNamespace(transfer=SimpleNamespace(level=0.9))
    )
    body = noise_body(study, [spec], None)
    [told] = body["looks"]
    assert told["scale_tokens"] == noise_scale([look], 64).tokens
    assert (told["tokens"], body["law"], body["judged"]) == (51_200, None, None)
    assert noise_body(study, [], None) is None
    assert "cannot tell" in law_text(body)


def test_the_law_reaches_the_main_run_inside_the_picture():
    body = looks(exponent=1.0, error=1e-7)
    body |= {"judged": judged(law_of(body), 512, 4e7)}
    assert body["judged"]["scale_tokens"] == pytest.approx(800_000, rel=0.05)
    labels = re.findall(r">([^<]*)</text>", svg_of(plots.noise({"noise_scale": body})))
    upright = labels[labels.index("tokens trained on") + 1 :]
    assert "500,000" in upright or "1\xa0M" in upright, upright


def test_a_figure_and_rows_of_all_looks():
    body = looks(error=3e-4)
    body |= {
        "law": {"exponent": 0.3, "interval": [0.1, 0.5]},
        "judged": judged(law_of(body), 512, 4e6),
    }
    assert "noise scale" in svg_of(plots.noise({"noise_scale": body}))
    assert len(looks_rows(body)) == 9
    assert any("or more" in row[-1] for row in looks_rows(body))
    assert law_text(body).startswith("grows as tokens to the 0.30")
    with pytest.raises(MissingError, match="long enough"):
        plots.noise({"noise_scale": None})


def test_an_estimate_counts_the_looks_of_runs_that_have_some():
    def run(num_steps, factory=None):
        return SimpleNamespace(
            batch_sequences=8,
            pass_sequences=lambda _: 8,
            schedule=SimpleNamespace(num_steps=num_steps),
            factory=factory,
            command=None,
            flops=1e9,
        )

    assert _count_noise_flops([run(100)]) == _count_noise_flops([run(600, factory="theirs")]) == 0.0
    assert 0 < _count_noise_flops([run(600)]) <= 1e9 / 60
    assert math.isclose(
        _count_noise_flops([run(600), run(100), run(600)]), 2 * _count_noise_flops([run(600)])
    )
