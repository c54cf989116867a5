"""A table of runs, judged as the command does: numbers however absurd end in a sentence, never in a
traceback.
"""

import json
import math
import random

import pytest

from launcher.answers.transfer_verdict import judge_table
from transfer.question import TransferError
from transfer.tables.cells import TableError


@pytest.fixture
def judged(tmp_path):
    def judged(text, **options):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        found = judge_table(path, **options)
        json.dumps(found, allow_nan=False)
        return found

    return judged


def table(loss, *, sizes=(32, 64, 128), octaves=range(-9, -3), columns="width,lr,loss"):
    rows = [f"{size},{2.0**octave},{loss(size, octave)}" for size in sizes for octave in octaves]
    return "\n".join([columns, *rows])


def valley(drift):
    """Noise is what a sine of everything makes of it, so that the test is one and the same every
    time.
    """
    return lambda size, o: (
        3 + 0.06 * (o + 6.2 - drift * math.log2(size / 32)) ** 2 + 0.003 * math.sin(size * o)
    )


STEADY, MOVING = table(valley(0)), table(valley(-1))


def test_a_drift_is_followed_by_the_measured_power_only(judged):
    assert judged(MOVING)["outcome"] == "drifts"
    found = judged(MOVING, power="measured")
    assert found["power_is_measured"] and found["outcome"] != "drifts"
    assert found["power"] == pytest.approx(-1, abs=0.2)
    assert judged(MOVING, power=-1.0)["outcome"] != "drifts"


BAD = [
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


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said for _, said in BAD])
def test_absurd_options_are_refused_in_a_sentence(judged, options, said):
    with pytest.raises(TransferError, match=said):
        judged(STEADY, **options)


def test_what_overflows_on_the_way_is_refused_in_a_sentence(judged):
    """Each number is allowed; the power they make is 100 octaves per doubling, and the target 60
    doublings away.
    """
    text = "width,lr_optimum\n1,1e-30\n2,1\n4,1e30\n"
    assert judged(text, power="measured")["outcome"] in ("holds", "drifts", "cannot_tell")
    with pytest.raises(TransferError, match="numbers too far apart"):
        judged(text, power="measured", target_size=10**18)


def _wild(seed):
    """A table of numbers that are allowed one by one, and options likewise."""
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
def test_wild_tables_end_in_a_verdict_or_a_sentence(judged, seed):
    """Numpy warnings are errors here, and a traceback is any other exception."""
    text, options = _wild(seed)
    try:
        assert judged(text, **options)["outcome"] in ("holds", "drifts", "cannot_tell")
    except (TransferError, TableError) as error:
        assert error.problems
