"""Tests of the report's view of the gradient noise scale and of the batch size judged by it.

A look is one measurement of the noise scale during a run. The planted noise scale follows a power
law in the tokens trained on, and the interval of the comparison must contain it.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from example_report import make_finished_body

from forerun._launcher.report.figures import plots
from forerun._launcher.report.figures.panel import MissingError, render_svg
from forerun._launcher.report.views.fit_findings import NoiseExponent, NoiseScale
from forerun._launcher.report.views.noise_scale import (
    build_look_rows,
    build_noise_section,
    compare_batch,
    fit_noise_looks,
    format_batch_comparison,
    format_noise_law,
)
from forerun._proxies.core.noise_scale import NoiseLook, estimate_noise_scale
from forerun._sweeps.store.curves import append_noise, get_noise_path, load_noise

RUN_ID = "a" * 64


def make_noise_scale(scale=4000.0, exponent=0.3, error=1e-5):
    """Return nine looks at a planted noise scale, with errors of its inverse.

    The noise scale is `scale` after 200k tokens and grows as tokens to the power `exponent`. The
    standard deviation of the errors is `error`.
    """
    num_errors = 1.8  # Standard errors from an estimate to an end of its interval at level 0.9
    rng = np.random.default_rng(0)
    looks = []
    for width in (32, 64, 96):
        for tokens in (5e4, 1.5e5, 4e5):
            inverse = 1 / (scale * (tokens / 2e5) ** exponent) + error * rng.normal()
            low = 1 / (inverse + num_errors * error)
            high = 1 / (inverse - num_errors * error) if inverse > num_errors * error else None
            looks.append(
                {
                    "width": width,
                    "num_layers": 2,
                    "run_tokens": 2 * tokens,
                    "batch_tokens": 512,
                    "step": 100,
                    "tokens": tokens,
                    "scale_tokens": 1 / inverse if inverse > 0 else None,
                    "interval": [low, high],
                    "inverse": inverse,
                    "inverse_error": error,
                }
            )
    return NoiseScale.model_validate({"level": 0.9, "looks": looks})


def draw_noise(noise):
    """Return the SVG of the noise scale."""
    section = None if noise is None else noise.to_json()
    return render_svg(plots.noise(make_finished_body() | {"noise_scale": section}))


@pytest.mark.parametrize(
    ("batch", "outcome", "phrase"),
    [(64, "under", "under"), (100_000, "over", "over"), (5_500, "about", "is about")],
)
def test_batch_is_judged_against_the_planted_law(batch, outcome, phrase):
    noise_law = fit_noise_looks(make_noise_scale().looks, level=0.9)
    comparison = compare_batch(noise_law, batch, num_tokens=4e5)
    low, high = comparison.interval
    planted_scale = 4000 * (4e5 / 2e5) ** 0.3
    assert comparison.outcome == outcome and low <= planted_scale <= high
    assert phrase in format_batch_comparison(comparison)


def test_too_few_or_too_noisy_looks_cannot_tell():
    comparison = compare_batch(None, batch_tokens=512, num_tokens=1e6)
    assert comparison.outcome == "cannot_tell"
    assert "too few looks" in format_batch_comparison(comparison)
    noise_law = fit_noise_looks(make_noise_scale(error=3e-4).looks, level=0.9)
    comparison = compare_batch(noise_law, batch_tokens=4000, num_tokens=4e7)
    assert comparison.outcome == "cannot_tell"
    assert format_batch_comparison(comparison).startswith("cannot tell")


def test_noise_section_is_read_from_the_files_of_the_runs(tmp_path):
    rng = np.random.default_rng(0)
    parts = 1.0 + 3 * rng.normal(size=(12, 40))
    look = NoiseLook(step=100, num_sequences=8, gram=tuple(map(tuple, (parts @ parts.T).tolist())))
    append_noise(
        tmp_path, RUN_ID, NoiseLook(step=100, num_sequences=8, gram=((1.0, 0.0), (0.0, 1.0)))
    )
    # A resumed run measures the step again, and the later look counts. A killed worker leaves half
    # a line.
    append_noise(tmp_path, RUN_ID, look)
    with get_noise_path(tmp_path, RUN_ID).open("a") as file:
        file.write('{"gram": [[1.0')
    assert load_noise(tmp_path, RUN_ID) == (look,)
    spec = SimpleNamespace(
        id=RUN_ID,
        shape=SimpleNamespace(seq_len=64, width=32, num_layers=2),
        num_tokens=102_400,
        batch_tokens=512,
        count_tokens_by=lambda step: 512 * step,
    )
    study = SimpleNamespace(
        study_dir=tmp_path, plan=SimpleNamespace(transfer=SimpleNamespace(level=0.9))
    )
    section = build_noise_section(study, [spec], None)
    (reported_look,) = section.looks
    assert reported_look.scale_tokens == estimate_noise_scale([look], 64).tokens
    assert (reported_look.tokens, section.law, section.judged) == (51_200, None, None)
    assert build_noise_section(study, [], None) is None
    assert "cannot tell" in format_noise_law(section)


def test_axis_of_the_figure_reaches_the_noise_scale_of_the_main_run():
    noise = make_noise_scale(exponent=1.0, error=1e-7)
    noise_law = fit_noise_looks(noise.looks, level=0.9)
    comparison = compare_batch(noise_law, batch_tokens=512, num_tokens=4e7)
    noise = noise.model_copy(update={"judged": comparison})
    assert noise.judged.scale_tokens == pytest.approx(800_000, rel=0.05)
    labels = re.findall(r">([^<]*)</text>", draw_noise(noise))
    y_labels = labels[labels.index("tokens trained on") + 1 :]
    assert "500,000" in y_labels or "1\xa0M" in y_labels, y_labels


def test_figure_and_table_show_every_look():
    noise = make_noise_scale(error=3e-4)
    changes = {
        "law": NoiseExponent(exponent=0.3, interval=(0.1, 0.5)),
        "judged": compare_batch(
            fit_noise_looks(noise.looks, level=0.9), batch_tokens=512, num_tokens=4e6
        ),
    }
    noise = noise.model_copy(update=changes)
    assert "noise scale" in draw_noise(noise)
    rows = build_look_rows(noise)
    assert len(rows) == 9
    assert any("or more" in row[-1] for row in rows)
    assert format_noise_law(noise).startswith("grows as tokens to the 0.30")
    with pytest.raises(MissingError, match="long enough"):
        draw_noise(None)
