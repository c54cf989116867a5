"""Muon: effect of bfloat16 on its iteration, and transfer of its learning rate over width by rule.

    python benchmarks/statistics/muon.py --json benchmarks/results/muon.json

`distance`: runs of the demo's proxies at width 64 with 200 steps, whose Newton-Schulz iteration
computes in float32, as on a CPU, or in bfloat16, as on a GPU and in torch.optim.Muon. The result
has the differences of their losses, and the spread over seeds for comparison.

`rules`: the demo's search and its test over width, with each rule (`muon_rate`) and four seeds per
rate. `spectral` is `match_rms_adamw` at five times the rate, the same function, and is left out.

The script prints each verdict and writes the file after each rule. A rule takes about 6 minutes of
two cores. Rules in the file are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import describe_machine, write_result

from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model import muon
from forerun._proxies.training.single_trial import SingleTrialEngine

RULES = ("original", "unit_rms", "match_rms_adamw")
CORPUS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
WIDTH_TEST_ONLY = (
    "transfer.durations=[]",
    "transfer.hyperparameters={}",
    "transfer.num_seeds=4",
    "transfer.control_widths=[]",
)
"""Plan values that leave only the test of the learning rate over width."""
SEEDS, WIDTH, RATE, NUM_STEPS = range(4), 64, 0.03, 200
"""Seeds, width, learning rate and steps of the runs of `distance`."""


def run_forerun(folder: Path, *arguments: str) -> Any:
    """Run a command with --json and return its answer, whatever its verdict."""
    command = [sys.executable, "-m", "forerun", *arguments, "--json"]
    return json.loads(
        subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False).stdout
    )


def write_plan(folder: Path, rule: str) -> None:
    """Write a corpus, and the demo's plan with a rule."""
    run_forerun(folder, "tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS)
    values = (*WIDTH_TEST_ONLY, f'proxy.rules={{muon_rate="{rule}"}}')
    plan_options = [part for value in values for part in ("--set", value)]
    run_forerun(folder, "init", "--preset", "demo", "--optimizer", "muon", *plan_options)


def run_width_test(folder: Path) -> dict[str, Any]:
    """Run the transfer test over width and return its verdict."""
    answer = run_forerun(folder, "transfer", "plan.toml")
    [verdict] = [
        test["verdict"] for test in answer["tests"] if test["hyperparameter"] == LEARNING_RATE
    ]
    names = ("outcome", "drift_octaves_per_doubling", "regret_nats", "noise_nats")
    optima = {str(optimum["size"]): optimum["value"] for optimum in verdict["optima"]}
    return {**{name: verdict[name] for name in names}, "optima": optima}


def train_losses(study: Study, store: TokenStore, seed: int, dtype: torch.dtype) -> list[float]:
    """Train one run and return its training losses, with the validation loss last."""
    spec = study.build_run(
        shape=study.build_shape(WIDTH), point={LEARNING_RATE: RATE}, seed=seed, num_steps=NUM_STEPS
    )
    engine = SingleTrialEngine(store, device="cpu")
    with mock.patch.object(muon, "get_iteration_dtype", lambda device, weights: dtype):
        engine.admit(0, spec)
        ((_, result, curve),) = engine.advance(NUM_STEPS)
    assert result.loss_nats is not None
    return [*curve.train_loss_nats, result.loss_nats]


def measure_precision(folder: Path) -> dict[str, Any]:
    """Return the differences between runs whose iterations compute in float32 and in bfloat16."""
    study = read_study(folder / "plan.toml", folder / "study", ("proxy.num_slots=1",))
    store = TokenStore(folder / "corpus")
    runs = {
        dtype: [train_losses(study, store, seed, dtype) for seed in SEEDS]
        for dtype in (torch.float32, torch.bfloat16)
    }
    float32_runs, bfloat16_runs = runs.values()
    final_losses = [run[-1] for run in float32_runs]
    pairs = list(zip(float32_runs, bfloat16_runs, strict=True))
    differences = [bfloat16_run[-1] - float32_run[-1] for float32_run, bfloat16_run in pairs]
    largest_differences = [
        max(abs(a - b) for a, b in zip(float32_run, bfloat16_run, strict=True))
        for float32_run, bfloat16_run in pairs
    ]
    return {
        "width": WIDTH,
        "num_steps": NUM_STEPS,
        "learning_rate": RATE,
        "validation_nats": final_losses,
        "bfloat16_minus_float32_nats": differences,
        "largest_of_any_step_nats": largest_differences,
        "seeds_apart_nats": max(final_losses) - min(final_losses),
    }


def main() -> None:
    """Measure the rules that the file lacks, and write the result after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, required=True, help="Result file; rules in it are not measured again."
    )
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    torch.set_num_threads(1)
    for rule in RULES:
        if rule in result.get("rules", {}):
            continue
        with TemporaryDirectory() as name:
            write_plan(Path(name), rule)
            if "distance" not in result:
                result["distance"] = measure_precision(Path(name))
            result.setdefault("rules", {})[rule] = run_width_test(Path(name))
        print(f"{rule}: {result['rules'][rule]}", flush=True)
        result["command"] = (
            "python benchmarks/statistics/muon.py --json benchmarks/results/muon.json"
        )
        result["machine"] = describe_machine()
        write_result(options.json, result)


if __name__ == "__main__":
    main()
