"""The order of a table's rows decides nothing: not what is judged, and not the verdict."""

import itertools
import json
import random
from pathlib import Path

import published_grids as grids
import pytest
from planted_valleys import cpu_grid

from launcher.answers.transfer_verdict import judge_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def crossed(second, values, best, losses=None):
    """A learning-rate grid at every value of a second factor, whose optimum drifts at all values
    but one.
    """
    lines = [f"width,lr,{second},seed,loss"]
    for width, rate, value, seed in itertools.product(
        (64, 128, 256), range(-9, -3), values, (0, 1)
    ):
        drift = 0 if value == best else -0.8
        octaves = rate + 6 - drift * (width.bit_length() - 7)
        floor = 3 - 0.05 * width.bit_length() + (0 if value == best else 0.02)
        noise = random.Random(f"{width}, {rate}, {value}, {seed}").gauss(0, 0.002)
        lines.append(f"{width},{2.0**rate},{value},{seed},{floor + 0.06 * octaves**2 + noise}")
    return "\n".join(lines)


def from_points(points):
    lines = [f"{p.size},{2.0**p.log2_value},{p.seed},{p.loss_nats}" for p in points]
    return "\n".join(["width,lr,seed,loss", *lines])


TABLES = {
    "crossed with weight decay": crossed("weight_decay", (0, 0.1), 0.1),
    "crossed with batch": crossed("batch", (64, 128, 256), 128),
    "crossed with clipping": crossed("clip", (1.0, 0.5), 1.0),
    "demo, muP": from_points(cpu_grid("mup", (32, 64, 128))),
    "published, by width": grids.by_width(grids.BROKEN_MUP),
    "published, batches": grids.batches(),
    "published, durations": grids.durations(),
    "optima": "width,lr_optimum\n128,9.77e-4\n128,4.88e-4\n256,9.77e-4\n512,9.77e-4\n1024,9.77e-4\n2048,1.95e-3",  # noqa: E501
    **{path.stem: path.read_text() for path in sorted(RESULTS.glob("*.csv"))},
}


def judge_text(text, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    axis = "width" if text.startswith("width,lr,batch") else None
    return json.dumps(judge_table(path, axis=axis), sort_keys=True)


@pytest.mark.parametrize("name", TABLES)
def test_shuffled_rows_give_the_same_answer(name, tmp_path):
    header, *rows = TABLES[name].strip().split("\n")
    answers = set()
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        answers.add(judge_text("\n".join([header, *rows]), tmp_path))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("second", "values", "best"), [("weight_decay", (0, 0.1), 0.1), ("clip", (1.0, 0.5), 0.5)]
)
def test_of_equally_large_slices_the_one_with_the_lowest_loss_is_judged(
    second, values, best, tmp_path
):
    for order in (values, values[::-1]):
        answer = json.loads(judge_text(crossed(second, order, best), tmp_path))
        assert any(f"those at {second} {best:g}; " in note for note in answer["notes"])
        assert abs(answer["drift_octaves_per_doubling"]["value"]) < 0.2
