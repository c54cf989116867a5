"""A ladder over widths and depths: held-out shapes predicted from the others, and what the width
per layer costs.

    python benchmarks/statistics/depth.py --json benchmarks/results/depth.json [--study FOLDER]

The demo's plan with CompleteP on a grid of three widths and three depths, three durations and two
seeds; some 8 minutes on two cores, or none with the folder of such a study. Each shape in turn is
left out with all its runs; the law is fitted to the others, with and without the term of the width
per layer, and predicts the loss of each of its runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from launcher.study import decide
from launcher.study.evidence import gather
from launcher.study.study_folder import recorded_study
from launcher.views.aspect import aspect_body
from proxies.core.checks import SpecError
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.law import CannotTellError
from sweeps.store.ledger import Ledger

CORPUS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
PLAN = (
    "proxy.parametrization=completep",
    "ladder.depths=[1,2,4]",
    "ladder.widths=[32,64,96]",
    "ladder.num_steps=[150,400,1000]",
    "ladder.num_seeds=2",
    "transfer.durations=[]",
)


def trained(folder: Path) -> Path:
    """A finished study."""
    changed = [part for value in PLAN for part in ("--set", value)]
    for line in (
        ["tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS],
        ["init", "--preset", "demo", *changed],
        ["run", "plan.toml", "--study", "study"],
    ):
        subprocess.run([sys.executable, "-m", "launcher", *line], cwd=folder, check=False)
    return folder / "study"


def held_out(study_dir: Path) -> dict[str, Any]:
    """Errors of every shape as predicted from the others, and what the whole ladder says of the
    width per layer.
    """
    study, ledger = recorded_study(study_dir), Ledger.read(study_dir)
    found = gather(study, ledger)
    results, level = ledger.results(), study.plan.transfer.level
    shapes = sorted({(spec.shape.width, spec.shape.num_layers) for spec in found.ladder})
    errors: dict[str, list[float]] = {"by size": [], "by size and shape": []}
    rows = []
    for out in shapes:
        kept, left = (
            [
                spec
                for spec in found.ladder
                if ((spec.shape.width, spec.shape.num_layers) == out) is of
            ]
            for of in (False, True)
        )
        try:
            fit = fit_runs(
                decide.ladder_table(study, kept, results),
                form=study.plan.ladder.form,
                bootstrap=0,
                level=level,
            )
            term = decide.aspect_of(study, fit, kept, [results[spec.id] for spec in kept])
        except (CannotTellError, SpecError):
            continue
        for spec in left:
            loss = results[spec.id].loss_nats
            if loss is None:
                continue
            plain = predict(fit, study.num_params(spec.shape), spec.num_tokens).loss_nats
            aspect = spec.shape.width / spec.shape.num_layers
            shaped = plain * math.exp(term.log_loss(aspect).value) if term is not None else plain
            errors["by size"].append(plain / loss - 1)
            errors["by size and shape"].append(shaped / loss - 1)
            rows.append(
                {
                    "width": out[0],
                    "depth": out[1],
                    "steps": spec.schedule.num_steps,
                    "loss_nats": loss,
                    "by_size": plain / loss - 1,
                    "by_shape": shaped / loss - 1,
                }
            )
    told = {
        name: {
            "median_abs": statistics.median(map(abs, each)),
            "largest_abs": max(map(abs, each)),
            "num_runs": len(each),
        }
        for name, each in errors.items()
    }
    assert found.choice is not None and found.verdicts is not None
    tests = {
        f"{test.hyperparameter} over {test.axis}": {"outcome": one.verdict.outcome}
        for test, one in found.verdicts.tests
    }
    body: Any = aspect_body(found.choice)
    return {
        "held_out": told,
        "rows": rows,
        "tests": tests,
        "shape": {"width": found.choice.shape.width, "num_layers": found.choice.shape.num_layers},
        "aspect": {name: value for name, value in body.items() if name not in ("points", "curve")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="Where the findings go.")
    parser.add_argument(
        "--study", type=Path, help="A finished study of this plan; without it one is run."
    )
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = held_out(options.study or trained(Path(folder)))
    command = "python benchmarks/statistics/depth.py --json benchmarks/results/depth.json"
    options.json.write_text(
        json.dumps({"command": command, "machine": machine(), **found}, indent=1, sort_keys=True)
        + "\n"
    )
    print(
        json.dumps(
            {name: found[name] for name in ("held_out", "tests", "shape", "aspect")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
