"""Accuracy of losses predicted for shapes left out of a ladder over widths and depths.

    python benchmarks/statistics/depth.py --json benchmarks/results/depth.json [--study FOLDER]

A ladder is the set of proxies of several sizes and durations to which a study fits its law of the
loss. The study is the demo's plan with CompleteP, three widths by three depths, three durations and
two seeds. Each shape in turn is left out with all its runs. The law is fitted to the other shapes,
with and without a term for the width per layer, and predicts the loss of each run that was left
out.

The script prints and writes the errors of both predictions, the verdicts of the study, and the
shape that the whole ladder recommends. It runs the study first, which takes about 8 minutes of two
cores, unless `--study` names the folder of a finished one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import describe_machine, write_result

from forerun._launcher.report.views.aspect import build_aspect_section
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.study_findings import gather_findings
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.law import CannotTellError
from forerun._sweeps.store.ledger import Ledger

CORPUS_OPTIONS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
PLAN = (
    "proxy.parametrization=completep",
    "ladder.depths=[1,2,4]",
    "ladder.widths=[32,64,96]",
    "ladder.num_steps=[150,400,1000]",
    "ladder.num_seeds=2",
    "transfer.durations=[]",
)
"""Keys of the plan that differ from the demo's."""


def run_study(folder: Path) -> Path:
    """Run the study and return its folder."""
    plan_options = [part for value in PLAN for part in ("--set", value)]
    for arguments in (
        ["tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS_OPTIONS],
        ["init", "--preset", "demo", *plan_options],
        ["run", "plan.toml", "--study", "study"],
    ):
        # `run` fails if a gate of the study does not pass, which is no error here.
        subprocess.run([sys.executable, "-m", "forerun", *arguments], cwd=folder, check=False)
    return folder / "study"


def predict_shape(
    study: Study,
    ladder: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    shape: tuple[int, int],
) -> list[dict[str, Any]]:
    """Return a row for each run of one shape (width, depth), predicted from all other shapes.

    There are no rows if the other shapes determine no law.
    """
    fitted = [spec for spec in ladder if (spec.shape.width, spec.shape.num_layers) != shape]
    left_out = [spec for spec in ladder if (spec.shape.width, spec.shape.num_layers) == shape]
    try:
        fit = fit_runs(
            main_run_choice.build_ladder_table(study, fitted, results),
            form=study.plan.ladder.form,
            bootstrap=0,
            level=study.plan.transfer.level,
        )
        term = main_run_choice.fit_aspect_term(
            study, fit, fitted, [results[spec.id] for spec in fitted]
        )
    except (CannotTellError, SpecError):
        return []
    rows = []
    for spec in left_out:
        loss = results[spec.id].loss_nats
        if loss is None:
            continue
        by_size = predict(fit, study.count_params(spec.shape), spec.num_tokens).loss_nats
        aspect = spec.shape.width / spec.shape.num_layers
        factor = 1.0 if term is None else math.exp(term.estimate_shift(aspect).estimate)
        rows.append(
            {
                "width": shape[0],
                "depth": shape[1],
                "steps": spec.schedule.num_steps,
                "loss_nats": loss,
                "by_size": by_size / loss - 1,
                "by_shape": by_size * factor / loss - 1,
            }
        )
    return rows


def predict_held_out(study_dir: Path) -> dict[str, Any]:
    """Return the errors of each shape as predicted from the others.

    The result also has the width per layer that the whole ladder recommends.
    """
    study, ledger = read_recorded_study(study_dir), Ledger.read(study_dir)
    findings = gather_findings(study, ledger)
    results = ledger.get_results()
    shapes = sorted({(spec.shape.width, spec.shape.num_layers) for spec in findings.ladder})
    errors: dict[str, list[float]] = {"by size": [], "by size and shape": []}
    rows = []
    for shape in shapes:
        for row in predict_shape(study, findings.ladder, results, shape):
            rows.append(row)
            errors["by size"].append(row["by_size"])
            errors["by size and shape"].append(row["by_shape"])
    summaries = {
        name: {
            "median_abs": statistics.median(map(abs, shape_errors)),
            "largest_abs": max(map(abs, shape_errors)),
            "num_runs": len(shape_errors),
        }
        for name, shape_errors in errors.items()
    }
    assert findings.choice is not None and findings.verdicts is not None
    tests = {
        f"{test.hyperparameter} over {test.axis}": {"outcome": verdict.outcome}
        for test, verdict in findings.verdicts.tests
    }
    aspect = build_aspect_section(findings.choice)
    return {
        "held_out": summaries,
        "rows": rows,
        "tests": tests,
        "shape": {
            "width": findings.choice.shape.width,
            "num_layers": findings.choice.shape.num_layers,
        },
        "aspect": aspect.model_dump(exclude_unset=True, exclude={"points", "curve"}),
    }


def main() -> None:
    """Predict, write the result, and print its summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="Result file.")
    parser.add_argument("--study", type=Path, help="Folder of a finished study of this plan.")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = predict_held_out(options.study or run_study(Path(folder)))
    command = "python benchmarks/statistics/depth.py --json benchmarks/results/depth.json"
    write_result(options.json, {"command": command, "machine": describe_machine(), **result})
    printed = ("held_out", "tests", "shape", "aspect")
    print(json.dumps({name: result[name] for name in printed}, indent=1))


if __name__ == "__main__":
    main()
