"""Departure of learning-rate optima from the line through the optima of smaller sizes.

    python benchmarks/statistics/walk.py --tables DIR --json benchmarks/results/walk.json

forerun extends the line through the optima to a larger size, and adds a random walk of the line's
slope beyond the runs. This script measures which scale of the walk
(`forerun._transfer.regret.extrapolation.WALK_OCTAVES`) predicts the optima of larger sizes best.

A family is a grid of learning rates at three sizes or more with all else equal. The families over
width are this project's recorded tables. Others are read from every CSV of DIR with the columns
width, params, tokens, batch, lr and loss (StepLaw dense and mixture of experts, OpenEuroLLM,
Gemstones): over params at fixed tokens and batch, and over tokens at fixed model and batch. The
first two sizes or more predict every larger one, at most four doublings away. For each scale of the
walk the table has the mean log score of the held-out optimum and the coverage of its 90 % interval.
Both include the noise of the held-out optimum itself.

The split: `held_out` is each study's score at the scale that is best for all other studies.
`--optima FILE` takes the optima of an earlier result instead of the tables.

The script prints a row for each study and writes the rows with all optima. Without --tables it
needs no other data and takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from forerun._transfer.basin.optimum import find_optima
from forerun._transfer.question import Axis, Point, TransferError
from forerun._transfer.regret.extrapolation import LINE_PRIORS, draw_walk_end, extend_line_to_target

RESULTS = Path(__file__).parents[1] / "results"
SCALES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Scales of the walk to compare, in octaves."""
SIZE_COLUMNS: dict[Axis, str] = {"width": "width", "params": "params", "duration": "tokens"}
"""Column of a table that has the size, by axis."""
FIXED_COLUMNS: dict[Axis, tuple[str, ...]] = {
    "width": ("layers",),
    "params": ("tokens", "batch"),
    "duration": ("params", "width", "layers", "batch", "ffn"),
}
"""Columns that are equal in all runs of a family, by axis."""
MAX_DOUBLINGS = 4.0
NUM_DRAWS = 800
MIN_NOISE_OCTAVES = 0.03
"""Floor of the noise of a held-out optimum: grids are rounded."""


def fit_family(points: Sequence[Point]) -> dict[str, Any] | None:
    """Return the usable optima of a family; None with fewer than three.

    The result has log2 of the sizes (`u`), log2 of the optima (`opt`) and their covariance (`cov`).
    """
    try:
        fitted = find_optima(points, level=0.9, draws=500, rng=np.random.default_rng(0))
    except TransferError:
        return None
    usable = [optimum for optimum in fitted.optima if optimum.status == "ok"]
    if len(usable) < 3 or fitted.basins is None:
        return None
    columns = [fitted.fitted.index(optimum.size) for optimum in usable]
    optimum = fitted.basins.optimum[:, columns]
    return {
        "u": np.log2([optimum.size for optimum in usable]).tolist(),
        "opt": optimum[0].tolist(),
        "cov": np.cov(optimum[1:], rowvar=False).tolist(),
    }


def read_families(path: Path, axis: Axis) -> Iterator[tuple[str, list[Point]]]:
    """Yield the families of one table over an axis."""
    families: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            size = row.get(SIZE_COLUMNS[axis])
            if not size or not row["lr"]:
                continue
            loss = float(row["loss"] or "nan")
            key = tuple(row.get(name) or "" for name in FIXED_COLUMNS[axis])
            families[key].append(
                Point(
                    size=int(float(size)),
                    log2_value=round(math.log2(float(row["lr"])), 3),
                    loss_nats=loss if math.isfinite(loss) else None,
                )
            )
    for key, points in sorted(families.items()):
        rates: dict[int, set[float]] = defaultdict(set)
        for point in points:
            rates[point.size].add(point.log2_value)
        enough = [point for point in points if len(rates[point.size]) >= 4]
        if len({point.size for point in enough}) >= 3:
            yield ", ".join(key), enough


def fit_families(tables: Path | None) -> list[dict[str, Any]]:
    """Fit all families of the recorded tables and of a folder of tables."""
    recorded = sorted([*RESULTS.glob("gpu_transfer*.csv"), *RESULTS.glob("vocabulary_4096-*.csv")])
    sources: list[tuple[Path, str, Axis]] = [
        (path, f"ours-{'sp' if path.stem.endswith('sp') else 'mup'}", "width") for path in recorded
    ]
    for path in sorted(tables.glob("*.csv")) if tables else []:
        study = path.stem.split("__")[0]
        axes: tuple[Axis, ...] = ("width",) if study == "gemstones" else ("params", "duration")
        # Misfitting has only three rates per duration
        sources += [(path, study, axis) for axis in axes if study != "misfitting"]
    families = []
    for path, study, axis in sources:
        for name, points in read_families(path, axis):
            if (family := fit_family(points)) is not None:
                families.append(
                    {"study": study, "axis": axis, "name": f"{path.stem}: {name}", **family}
                )
    return families


def score_family(family: dict[str, Any]) -> list[list[tuple[float, bool]]]:
    """Return for each case the log score and the coverage at every scale."""
    log2_size, optimum, covariance = (np.array(family[key]) for key in ("u", "opt", "cov"))
    axis: Axis = family["axis"]
    draws = np.random.default_rng(0).multivariate_normal(optimum, covariance, NUM_DRAWS)
    rows, cases = np.vstack([optimum, draws]), []
    prior_without_walk = LINE_PRIORS[axis]._replace(walk_octaves=0.0)
    for num_known in range(2, len(log2_size)):
        for held_out in range(num_known, len(log2_size)):
            beyond = float(log2_size[held_out] - log2_size[num_known - 1])
            if beyond > MAX_DOUBLINGS:
                continue
            # `extend_line_to_target` reads the prior from `LINE_PRIORS`
            with mock.patch.dict(LINE_PRIORS, {axis: prior_without_walk}):
                line = extend_line_to_target(
                    rows[:, :num_known],
                    log2_size[:num_known],
                    log2_size[held_out],
                    log2_size[0],
                    axis,
                    np.random.default_rng(1),
                )
            sd = max(math.sqrt(covariance[held_out, held_out]), MIN_NOISE_OCTAVES)
            noise = sd * np.random.default_rng(4).standard_normal(NUM_DRAWS)
            case = []
            for scale in SCALES:
                walk = draw_walk_end(NUM_DRAWS + 1, beyond, scale, np.random.default_rng(3))
                at_target = (line.at_target + walk)[1:]
                # Density of the held-out optimum, without the constant factor 1 / sqrt(2 pi)
                density = np.mean(np.exp(-0.5 * ((optimum[held_out] - at_target) / sd) ** 2)) / sd
                low, high = np.quantile(at_target - optimum[held_out] - noise, [0.05, 0.95])
                case.append((math.log(density + 1e-12), bool(low <= 0 <= high)))
            cases.append(case)
    return cases


def summarize(families: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return scores and coverage by study and axis.

    Each row also has the score at the scale that is best for the other studies.
    """
    by_study: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for family in families:
        study = "steplaw" if family["study"].startswith("steplaw") else family["study"]
        by_study[study, family["axis"]] += score_family(family)
    means = {
        key: np.mean(np.array(cases, dtype=float), axis=0)
        for key, cases in by_study.items()
        if cases
    }
    rows = []
    for (study, axis), mean in means.items():
        other_scores = [
            other_mean[:, 0]
            for (other_study, _), other_mean in means.items()
            if other_study != study
        ]
        chosen = int(np.mean(other_scores, axis=0).argmax())
        rows.append(
            {
                "study": study,
                "axis": axis,
                "num_cases": len(by_study[study, axis]),
                "scales": list(SCALES),
                "log_score": mean[:, 0].round(3).tolist(),
                "covered": mean[:, 1].round(3).tolist(),
                "held_out": {
                    "scale": SCALES[chosen],
                    "log_score": float(mean[chosen, 0]),
                    "covered": float(mean[chosen, 1]),
                },
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Fit the families, score them, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, help="Folder of learning-rate tables.")
    parser.add_argument(
        "--optima", type=Path, help="An earlier result, whose optima are scored again."
    )
    parser.add_argument("--json", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    families = (
        json.loads(options.optima.read_text())["families"]
        if options.optima
        else fit_families(options.tables)
    )
    result = {"summary": summarize(families), "families": families}
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
