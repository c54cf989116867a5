"""Tests of `judge_table`, the verdict on a user's table of runs.

`judge_table` reads a table of runs and says whether the learning rate transfers: its outcome is
"holds", "drifts", or "cannot_tell". Two tables are planted. The best learning rate is the same at
every width in `STEADY`, and halves with each doubling of the width in `MOVING`. Absurd numbers must
be refused with a sentence.
"""

import json
import math
import random

import pytest

from forerun._launcher.report.answers.transfer_verdict import judge_table
from forerun._proxies.core.tables.table_files import TableError
from forerun._transfer.question import TransferError


@pytest.fixture
def judge(tmp_path):
    """Function that judges a table given as text; the verdict must be valid JSON."""

    def judge_text(text, **options):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        verdict = judge_table(path, **options)
        json.dumps(verdict, allow_nan=False)
        return verdict

    return judge_text


def make_table(octaves_per_doubling):
    """Return the CSV text of runs with a planted optimum.

    The best rate is 2^-6.2 at width 32 and moves by `octaves_per_doubling` with each doubling of
    the width. The loss is 3 nats at the optimum, and higher by 0.06 nats at a distance of one
    octave. The noise is a sine of width and rate, so the table is always the same.
    """
    rows = []
    for width in (32, 64, 128):
        best_log2 = -6.2 + octaves_per_doubling * math.log2(width / 32)
        for log2_rate in range(-9, -3):
            noise = 0.003 * math.sin(width * log2_rate)
            loss = 3 + 0.06 * (log2_rate - best_log2) ** 2 + noise
            rows.append(f"{width},{2.0**log2_rate},{loss}")
    return "\n".join(["width,lr,loss", *rows])


STEADY = make_table(octaves_per_doubling=0)
MOVING = make_table(octaves_per_doubling=-1)


def test_steady_rate_holds(judge):
    verdict = judge(STEADY)
    assert (verdict["outcome"], verdict["power"]) == ("holds", 0.0)
    assert judge(STEADY, power="measured")["outcome"] == "holds"


def test_moving_rate_drifts_unless_it_is_scaled_by_its_power_of_the_width(judge):
    """A power p multiplies the rate that is transferred to a wider model by width^p."""
    assert judge(MOVING)["outcome"] == "drifts"
    verdict = judge(MOVING, power="measured")
    assert verdict["power_is_measured"] and verdict["outcome"] == "holds"
    assert verdict["power"] == pytest.approx(-1, abs=0.2)
    assert judge(MOVING, power=-1.0)["outcome"] == "holds"


BAD_OPTIONS = [
    ({"target_size": 0}, "target_size = 0: must be a whole number from 1 to"),
    (
        {"target_size": -3, "base_size": 0, "margin_nats": -1.0},
        "target_size = -3.*base_size = 0.*margin_nats = -1.0",
    ),
    ({"margin_nats": 1e300}, "margin_nats = .*: must be from 1e-06 to 1000"),
    ({"power": 1e308}, "power = .*: must be from -10 to 10"),
    ({"level": 1.0}, "level = 1.0"),
    ({"level": 1e-9}, "level = 1e-09: must be from 0.5 to 0.999"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD_OPTIONS, ids=[message for _, message in BAD_OPTIONS]
)
def test_absurd_options_are_refused_in_a_sentence(judge, options, message):
    with pytest.raises(TransferError, match=message):
        judge(STEADY, **options)


def test_overflow_is_refused_in_a_sentence(judge):
    """Each number is allowed by itself, but together they overflow.

    The optimum moves by 100 octaves with each doubling, and the target is 60 doublings away.
    """
    text = "width,lr_optimum\n1,1e-30\n2,1\n4,1e30\n"
    assert judge(text, power="measured")["outcome"] in ("holds", "drifts", "cannot_tell")
    with pytest.raises(TransferError, match="numbers too far apart"):
        judge(text, power="measured", target_size=10**18)


def draw_wild_table(seed):
    """Draw a table and options whose numbers are extreme, though most are allowed by themselves."""
    draw = random.Random(seed)
    losses = [
        lambda: draw.choice([1e-6, 1e6]),
        lambda: 10 ** draw.uniform(-6, 6),
        lambda: 3 + 1e-16 * draw.random(),
        lambda: "nan" if draw.random() < 0.3 else draw.uniform(2, 4),
    ]
    values = [lambda: 2.0 ** draw.uniform(-99, 99), lambda: 2.0 ** draw.randint(-8, -2)]
    loss, value, name = draw.choice(losses), draw.choice(values), draw.choice(["lr", "clip", "wd"])
    sizes = sorted({int(2 ** draw.uniform(0, 59)) for _ in range(draw.randint(2, 4))})
    rates = [value() for _ in range(draw.randint(3, 7))]
    rows = [
        f"{size},{rate},{loss()}"
        for size in sizes
        for rate in rates
        for _ in range(draw.randint(1, 2))
    ]
    options = {
        "target_size": draw.choice([None, 1, 10**18]),
        "power": draw.choice([0.0, 10.0, 1e300, "measured"]),
        "margin_nats": draw.choice([1e-320, 1e-6, 1e300]),
        "level": draw.choice([1e-300, 0.5, 0.999]),
    }
    return "\n".join([f"width,{name},loss", *rows]), options


@pytest.mark.parametrize("seed", range(4))
def test_wild_table_ends_in_a_verdict_or_a_sentence(judge, seed):
    """Any other exception fails the test, and so does a warning of NumPy."""
    text, options = draw_wild_table(seed)
    try:
        assert judge(text, **options)["outcome"] in ("holds", "drifts", "cannot_tell")
    except (TransferError, TableError) as error:
        assert error.problems
