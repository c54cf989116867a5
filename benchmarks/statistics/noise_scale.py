"""The gradient noise scale, compared with the critical batch size of a batch sweep at width 64.

    python benchmarks/statistics/noise_scale.py --json benchmarks/results/noise_scale.json

The demo's proxies train on the source of Python's standard library, at a constant rate after a
short warmup, with batches of 256 to 16,384 tokens. Each batch is trained at rates an octave apart
until the best rate is inside them. The steps to a validation loss are read off a line through the
losses around it, and those at the best rate off a parabola in log2 of the rate. The law S = S_min
(1 + B_crit / B) (arXiv 1812.06162, section 2.3) is fitted to log S, with an interval by Student's
t.

For comparison, the noise scale is measured along the runs at the best rates
(`forerun._proxies.core.noise_scale`): within 0.1 nats of the target loss, and over all steps before
it. Last, the script measures the share of a run's time that the measurements take.

It prints a line for each batch and target, and writes all figures after each seed. It takes about
30 minutes of one core; `--quick` takes 2 minutes with three batches, one seed and an early target.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from muon import CORPUS, run_forerun
from scipy.optimize import least_squares
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import describe_machine, write_result

from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.noise_scale import NoiseLook, NoiseScale, estimate_noise_scale
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.training.gradient_noise import GradientNoiseProbe, compute_gradient_gram
from forerun._proxies.training.run_progress import read_validation_ids
from forerun._proxies.training.single_trial import SingleTrialEngine

WIDTH, WARMUP_STEPS, LEVEL = 64, 10, 0.9
BATCHES = tuple(2**power for power in range(8, 15))
QUICK_BATCHES = (512, 2048, 8192)
TARGETS_NATS, QUICK_TARGETS_NATS = (2.2, 2.1, 2.0), (2.3,)
FIRST_RATE, MAX_RATE = 2.0**-7, 2.0**-3
"""Rate at which 512 tokens start, and the highest first rate. First rates grow with the root of the
batch."""
FIRST_STEPS, STEPS_RATIO = 12, 1.1
"""Step at which the loss is first measured, and ratio of each such step to the one before."""
LOOK_EVERY, LOOK_PASSES, LOOK_SEQUENCES = 3, 24, 8
"""Measurements of the loss per look at the gradient noise, and passes and sequences of a look."""
NEAR_NATS = 0.1
"""Distance in nats from the target up to which losses and looks count as near it."""


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """Losses and noise measurements of one run at one batch size and rate."""

    steps: list[int]
    losses_nats: list[float]
    looks: list[tuple[float, NoiseLook]]
    """Looks at the noise scale, each with the validation loss at its step."""


def make_spec(study: Study, batch_tokens: int, rate: float, seed: int, num_steps: int) -> RunSpec:
    """Return a run of the demo's base plan at `WIDTH` with a constant rate."""
    run = study.build_run(
        shape=study.build_shape(WIDTH), point={LEARNING_RATE: rate}, seed=seed, num_steps=num_steps
    )
    schedule = Schedule(kind="constant", num_steps=num_steps, warmup_steps=WARMUP_STEPS)
    return dataclasses.replace(run, batch_tokens=batch_tokens, schedule=schedule)


def train(spec: RunSpec, store: TokenStore, until_nats: float) -> TrainedRun:
    """Train until the validation loss is reached, the steps are done, or the run diverges."""
    validation_ids_BT = read_validation_ids(store, spec.shape.seq_len)
    engine = SingleTrialEngine(store, device="cpu")
    engine.admit(0, spec)
    steps: list[int] = []
    losses: list[float] = []
    looks: list[tuple[float, NoiseLook]] = []
    step = FIRST_STEPS
    while step < spec.schedule.num_steps:
        if engine.advance(step - engine.steps[0]):
            break  # the run diverged
        with torch.no_grad():
            loss = float(
                compute_token_loss(
                    engine.predict(validation_ids_BT[:, :-1]), validation_ids_BT[:, 1:]
                )
            )
        steps.append(step)
        losses.append(loss)
        if len(steps) % LOOK_EVERY == 0:
            looks.append((loss, measure_noise(engine, spec, store, step)))
        if loss < until_nats:
            break
        step = max(step + 1, round(step * STEPS_RATIO))
    return TrainedRun(steps, losses, looks)


def measure_noise(
    engine: SingleTrialEngine, spec: RunSpec, store: TokenStore, step: int
) -> NoiseLook:
    """Measure the gradient noise of a run at its current step."""
    ids = store.read_train_batch(
        seed=spec.seed,
        first_sequence=step * spec.batch_sequences,
        num_sequences=LOOK_PASSES * LOOK_SEQUENCES,
        seq_len=spec.shape.seq_len,
    )
    model: Any = engine.model
    gram = compute_gradient_gram(
        spec, model, dict(model.named_parameters()), torch.from_numpy(ids), LOOK_PASSES
    )
    return NoiseLook(step=step, num_sequences=LOOK_SEQUENCES, gram=gram)


def interpolate_steps(run: TrainedRun, target_nats: float) -> float | None:
    """Return the steps to the target loss, by a line through the losses around it over log steps;
    None if the loss was not reached.
    """
    if not run.losses_nats or min(run.losses_nats) > target_nats:
        return None
    around = [i for i, loss in enumerate(run.losses_nats) if abs(loss - target_nats) < NEAR_NATS]
    if len(around) < 3:
        return None
    slope, offset = np.polyfit(
        np.log([run.steps[i] for i in around]), [run.losses_nats[i] for i in around], 1
    )
    return float(np.exp((target_nats - offset) / slope)) if slope < 0 else None


def tune_rate(
    study: Study,
    store: TokenStore,
    batch_tokens: int,
    seed: int,
    targets: tuple[float, ...],
    rate: float | None,
) -> dict[float, TrainedRun]:
    """Train at more rates until the rate with the fewest steps to the last target is neither the
    lowest nor the highest.

    Args:
        study: The demo's study.
        store: Its corpus.
        batch_tokens: Tokens per step.
        seed: Seed of the runs.
        targets: Target losses in nats, the lowest last.
        rate: Rate to begin with; None for one by the root of the batch.

    Returns:
        Runs by rate.
    """
    if rate is None:
        rate = min(MAX_RATE, FIRST_RATE * 2.0 ** round(math.log2(batch_tokens / 512) / 2))
    runs: dict[float, TrainedRun] = {}
    # More steps than any run needs: 819,200 tokens, and 4,000 steps on top for large batches.
    max_steps = 819_200 // batch_tokens + 4_000

    def count_steps(tried_rate: float) -> float:
        steps = interpolate_steps(runs[tried_rate], targets[-1])
        return math.inf if steps is None else steps

    next_rates = [rate, rate / 2, rate * 2]
    while next_rates:
        for next_rate in next_rates:
            # A rate that needs half as many steps again as the best one cannot win
            best = min(map(count_steps, runs), default=math.inf)
            num_steps = int(min(max_steps, 1.5 * best)) + 2
            spec = make_spec(study, batch_tokens, next_rate, seed, num_steps)
            runs[next_rate] = train(spec, store, targets[-1] - NEAR_NATS)
        best_rate = min(runs, key=count_steps)
        next_rates = [
            neighbor for neighbor in (best_rate / 2, best_rate * 2) if neighbor not in runs
        ]
    return runs


def find_fewest_steps(
    runs: dict[float, TrainedRun], target_nats: float
) -> tuple[float, float, float]:
    """Return the fewest steps to the target over all rates.

    Returns:
        Steps at the best rate, by a parabola through the best run and its neighbors; the rate of
        the best run; and log2 of the best rate between them.
    """
    steps_by_log2_rate = {
        math.log2(rate): steps
        for rate, run in runs.items()
        if (steps := interpolate_steps(run, target_nats)) is not None
    }
    best = min(steps_by_log2_rate, key=lambda rate: steps_by_log2_rate[rate])
    near = [rate for rate in (best - 1, best, best + 1) if rate in steps_by_log2_rate]
    if len(near) < 3:
        return steps_by_log2_rate[best], 2.0**best, best
    square, slope, offset = np.polyfit(near, np.log([steps_by_log2_rate[rate] for rate in near]), 2)
    log2_rate = -slope / (2 * square)
    return (
        float(np.exp(offset + log2_rate * (slope + square * log2_rate))),
        2.0**best,
        float(log2_rate),
    )


def fit_critical_batch(points: list[tuple[int, float]]) -> dict[str, Any]:
    """Fit S_min and B_crit to pairs of batch and steps by least squares in log S."""
    batches, steps = (np.array(values, dtype=float) for values in zip(*points, strict=True))

    def compute_errors(theta: np.ndarray) -> np.ndarray:
        log_steps_min, log_critical_batch = theta
        log_steps = log_steps_min + np.log1p(np.exp(log_critical_batch) / batches)
        return np.asarray(log_steps - np.log(steps))

    fit = least_squares(compute_errors, [math.log(steps.min()), math.log(4096)])
    degrees = len(points) - 2
    variance = float(np.sum(fit.fun**2)) / degrees
    error = math.sqrt(variance * np.linalg.inv(fit.jac.T @ fit.jac)[1, 1])
    half_width = float(student.ppf(0.5 + LEVEL / 2, degrees)) * error
    interval = [math.exp(fit.x[1] - half_width), math.exp(fit.x[1] + half_width)]
    return {
        "steps_min": math.exp(fit.x[0]),
        "critical_batch_tokens": math.exp(fit.x[1]),
        "interval": interval,
        "rms_off_share": math.sqrt(variance),
    }


def summarize_looks(looks: list[NoiseLook], seq_len: int) -> dict[str, Any]:
    """Return the noise scale of several looks together.

    The result also has the middle half of the estimates from single looks.
    """
    estimate: NoiseScale = estimate_noise_scale(looks, seq_len, LEVEL)
    singles = sorted(
        single.tokens
        for look in looks
        if (single := estimate_noise_scale([look], seq_len, LEVEL)).tokens is not None
    )
    return {
        "tokens": estimate.tokens,
        "interval": [estimate.low, estimate.high],
        "num_looks": len(looks),
        "middle_half_of_looks": [
            float(np.quantile(singles, 0.25)),
            float(np.quantile(singles, 0.75)),
        ]
        if singles
        else None,
    }


def measure_cost(study: Study, store: TokenStore, num_steps: int) -> dict[str, Any]:
    """Return the processor time of a run's looks as a share of the time of the rest of the run."""

    class Timed(GradientNoiseProbe):
        """A probe that adds up the processor seconds of its looks."""

        seconds = 0.0

        def measure_if_due(self, *arguments: Any) -> None:
            began = time.process_time()
            super().measure_if_due(*arguments)
            Timed.seconds += time.process_time() - began

    run = study.build_run(
        shape=study.build_shape(WIDTH),
        point={LEARNING_RATE: FIRST_RATE},
        seed=0,
        num_steps=num_steps,
    )
    engine = SingleTrialEngine(store, device="cpu")
    engine.noise = Timed()
    engine.admit(0, run)
    began = time.process_time()
    engine.advance(10**9)
    return {
        "num_steps": num_steps,
        "share": Timed.seconds / (time.process_time() - began - Timed.seconds),
    }


RunsByBatch = dict[tuple[int, int], dict[float, TrainedRun]]
"""Runs by batch and seed, then by rate."""


def sweep_batches(
    study: Study,
    store: TokenStore,
    batches: tuple[int, ...],
    num_seeds: int,
    targets: tuple[float, ...],
) -> Iterator[RunsByBatch]:
    """Yield the runs so far, after each seed."""
    runs: RunsByBatch = {}
    for seed in range(num_seeds):
        for batch in batches:
            began = time.monotonic()
            first_rate = find_fewest_steps(runs[batch, 0], targets[-1])[1] if seed else None
            runs[batch, seed] = tune_rate(study, store, batch, seed, targets, first_rate)
            steps, rate, log2_rate = find_fewest_steps(runs[batch, seed], targets[-1])
            print(
                f"batch {batch:6}, seed {seed}: {steps:7.1f} steps at 2^{log2_rate:.2f} (ran "
                f"2^{math.log2(rate):g}), "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
        yield runs


def compare_targets(
    runs: RunsByBatch, targets: tuple[float, ...], seq_len: int
) -> list[dict[str, Any]]:
    """Return the fitted critical batch and the noise scale for each target loss."""
    target_rows = []
    for target in targets:
        fewest = {key: find_fewest_steps(run_by_rate, target) for key, run_by_rate in runs.items()}
        fit = fit_critical_batch([(batch, steps) for (batch, _), (steps, _, _) in fewest.items()])
        rows, looks_near, looks_before = [], [], []
        for (batch, seed), (steps, rate, log2_rate) in fewest.items():
            looks = runs[batch, seed][rate].looks
            looks_of_run = [look for loss, look in looks if abs(loss - target) < NEAR_NATS]
            looks_near += looks_of_run
            looks_before += [
                look for loss, look in looks if loss > target and look.step > WARMUP_STEPS
            ]
            rows.append(
                {
                    "batch_tokens": batch,
                    "seed": seed,
                    "steps": steps,
                    "tokens": steps * batch,
                    "log2_rate": log2_rate,
                    "noise_scale": summarize_looks(looks_of_run, seq_len) if looks_of_run else None,
                }
            )
        row = {
            "target_nats": target,
            "knee": fit,
            "rows": rows,
            "noise_at_target": summarize_looks(looks_near, seq_len),
            "noise_until_target": summarize_looks(looks_before, seq_len),
        }
        row["ratio_at_target"] = row["noise_at_target"]["tokens"] / fit["critical_batch_tokens"]
        row["ratio_until_target"] = (
            row["noise_until_target"]["tokens"] / fit["critical_batch_tokens"]
        )
        print(json.dumps({key: value for key, value in row.items() if key != "rows"}), flush=True)
        target_rows.append(row)
    return target_rows


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument(
        "--quick", action="store_true", help="Use three batches, one seed and an early target."
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_forerun(folder, "tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS)
        run_forerun(folder, "init", "--preset", "demo")
        study, store = (
            read_study(folder / "plan.toml", folder / "study"),
            TokenStore(folder / "corpus"),
        )
        batches, seeds = (QUICK_BATCHES, 1) if options.quick else (BATCHES, 2)
        targets = QUICK_TARGETS_NATS if options.quick else TARGETS_NATS
        result: dict[str, Any] = {
            "width": WIDTH,
            "level": LEVEL,
            "cost": [
                measure_cost(study, store, steps)
                for steps in ((200,) if options.quick else (200, 600, 1600))
            ],
        }
        for runs in sweep_batches(study, store, batches, seeds, targets):
            result |= {"num_seeds": len({seed for _, seed in runs}), "machine": describe_machine()}
            result["targets"] = compare_targets(runs, targets, study.plan.model.seq_len)
            write_result(options.json, result)


if __name__ == "__main__":
    main()
