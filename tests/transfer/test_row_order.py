"""Tests that neither the judged slice nor the verdict depends on the order of a table's rows."""

import itertools
import json
import random
from pathlib import Path

import published_grids as grids
import pytest
from planted_basins import list_cpu_points

from forerun._launcher.report.answers.transfer_verdict import judge_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def build_grid(factor, values, best):
    """Return a learning-rate grid for every value of another factor, as a table.

    The optimum drifts at all values of the factor except `best`, which also has the lowest losses.
    """
    lines = [f"width,lr,{factor},seed,loss"]
    for width, rate, value, seed in itertools.product(
        (64, 128, 256), range(-9, -3), values, (0, 1)
    ):
        is_best = value == best
        drift = 0 if is_best else -0.8
        # A width of 64 has 7 bits: its optimum is 2^-6
        octaves_off = rate + 6 - drift * (width.bit_length() - 7)
        floor = 3 - 0.05 * width.bit_length() + (0 if is_best else 0.02)
        noise = random.Random(f"{width}, {rate}, {value}, {seed}").gauss(0, 0.002)
        lines.append(f"{width},{2.0**rate},{value},{seed},{floor + 0.06 * octaves_off**2 + noise}")
    return "\n".join(lines)


def format_points(points):
    """Return a table of these points."""
    lines = [f"{p.size},{2.0**p.log2_value},{p.seed},{p.loss_nats}" for p in points]
    return "\n".join(["width,lr,seed,loss", *lines])


TABLES = {
    "crossed with weight decay": build_grid("weight_decay", (0, 0.1), 0.1),
    "crossed with batch": build_grid("batch", (64, 128, 256), 128),
    "crossed with clipping": build_grid("clip", (1.0, 0.5), 1.0),
    "demo, muP": format_points(list_cpu_points("mup", (32, 64, 128))),
    "published, by width": grids.format_by_width(grids.BROKEN_MUP),
    "published, batches": grids.format_batches(),
    "published, durations": grids.format_durations(),
    "optima": "width,lr_optimum\n128,9.77e-4\n128,4.88e-4\n256,9.77e-4\n512,9.77e-4\n1024,9.77e-4\n2048,1.95e-3",  # noqa: E501
    **{path.stem: path.read_text() for path in sorted(RESULTS.glob("*.csv"))},
}


def judge_text(text, tmp_path):
    """Return the verdict on a table as JSON."""
    path = tmp_path / "runs.csv"
    path.write_text(text)
    # Width and batch both vary in this table, so the axis must be named
    axis = "width" if text.startswith("width,lr,batch") else None
    return json.dumps(judge_table(path, axis=axis), sort_keys=True)


@pytest.mark.parametrize("name", TABLES)
def test_shuffled_rows_give_the_same_verdict(name, tmp_path):
    header, *rows = TABLES[name].strip().split("\n")
    answers = set()
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        answers.add(judge_text("\n".join([header, *rows]), tmp_path))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("factor", "values", "best"), [("weight_decay", (0, 0.1), 0.1), ("clip", (1.0, 0.5), 0.5)]
)
def test_slice_with_the_lowest_loss_is_judged_among_equally_large_ones(
    factor, values, best, tmp_path
):
    for order in (values, values[::-1]):
        answer = json.loads(judge_text(build_grid(factor, order, best), tmp_path))
        assert any(f"those at {factor} {best:g}; " in note for note in answer["notes"])
        assert abs(answer["drift_octaves_per_doubling"]["value"]) < 0.2
