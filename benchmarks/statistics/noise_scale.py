"""The gradient noise scale beside the knee of a real batch sweep, at width 64.

    python benchmarks/statistics/noise_scale.py --json benchmarks/results/noise_scale.json

The demo's proxies on the source of Python's standard library, at a constant rate after a short
warmup, with batches of 256 to 16,384 tokens. Each batch has rates an octave apart until the best
lies inside them; the steps to a validation loss are read off a line through the losses around it,
and those at the best rate off a parabola in log2 of the rate. The law S = S_min (1 + B_crit / B)
(arXiv 1812.06162, section 2.3) is fitted to log S, with an interval by Student's t. Beside it the
noise scale of looks along the runs at the best rates (`proxies.core.noise_scale`): those within .1
nats of the target, and all those on the way to it. Last, what the looks of a rung take of its time.
Some 30 minutes of one core; `--quick` has three batches, one seed and an early target, in 2.
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
from muon import CORPUS, forerun
from scipy.optimize import least_squares
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from launcher.plan.study import Study
from launcher.study.study_folder import plan_study
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.noise_scale import NoiseLook, NoiseScale, noise_scale
from proxies.core.schedule import Schedule
from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore
from proxies.model.loss import token_loss
from proxies.training.gradient_noise import NoiseLooks, gram
from proxies.training.outcome import validation_ids
from proxies.training.solo import Solo

WIDTH, WARMUP_STEPS, LEVEL = 64, 10, 0.9
BATCHES = tuple(2**power for power in range(8, 15))
QUICK_BATCHES = (512, 2048, 8192)
TARGETS_NATS, QUICK_TARGETS_NATS = (2.2, 2.1, 2.0), (2.3,)
FIRST_RATE, MOST_RATE = 2.0**-7, 2.0**-3
"""At 512 tokens; other batches start at its root with the batch, up to the most."""
FIRST_STEPS, APART = 12, 1.1
"""Losses are measured from there on, each time after so many times the steps."""
LOOK_EVERY, LOOK_PASSES, LOOK_SEQUENCES = 3, 24, 8
"""Every third measurement of the loss there is a look, of as many passes of as many sequences."""
NEAR_NATS = 0.1


@dataclasses.dataclass(frozen=True)
class Course:
    """Course of one run at one batch and rate."""

    steps: list[int]
    losses_nats: list[float]
    looks: list[tuple[float, NoiseLook]]
    """Looks at the noise scale, each with the validation loss at its step."""


def spec_of(study: Study, batch_tokens: int, rate: float, seed: int, num_steps: int) -> RunSpec:
    """A run of the demo's base plan at the width, its rate constant."""
    run = study.run(
        shape=study.shape(WIDTH), point={LEARNING_RATE: rate}, seed=seed, num_steps=num_steps
    )
    schedule = Schedule(kind="constant", num_steps=num_steps, warmup_steps=WARMUP_STEPS)
    return dataclasses.replace(run, batch_tokens=batch_tokens, schedule=schedule)


def course(spec: RunSpec, store: TokenStore, until_nats: float) -> Course:
    """Train until the loss is reached, or the steps are done."""
    held_BT = validation_ids(store, spec.shape.seq_len)
    engine = Solo(store, device="cpu")
    engine.admit(0, spec)
    steps: list[int] = []
    losses: list[float] = []
    looks: list[tuple[float, NoiseLook]] = []
    at = FIRST_STEPS
    while at < spec.schedule.num_steps:
        if engine.advance(at - engine.steps[0]):
            break  # it diverged
        with torch.no_grad():
            loss = float(token_loss(engine.predict(held_BT[:, :-1]), held_BT[:, 1:]))
        steps.append(at)
        losses.append(loss)
        if len(steps) % LOOK_EVERY == 0:
            looks.append((loss, look(engine, spec, store, at)))
        if loss < until_nats:
            break
        at = max(at + 1, round(at * APART))
    return Course(steps, losses, looks)


def look(engine: Solo, spec: RunSpec, store: TokenStore, step: int) -> NoiseLook:
    """The gradient noise of a run as it is."""
    ids = store.train_batch(
        seed=spec.seed,
        first_sequence=step * spec.batch_sequences,
        num_sequences=LOOK_PASSES * LOOK_SEQUENCES,
        seq_len=spec.shape.seq_len,
    )
    model: Any = engine.model
    found = gram(spec, model, dict(model.named_parameters()), torch.from_numpy(ids), LOOK_PASSES)
    return NoiseLook(step=step, num_sequences=LOOK_SEQUENCES, gram=found)


def steps_to(run: Course, target_nats: float) -> float | None:
    """Return the steps to the target loss, or None if it was not reached.

    They are interpolated in log steps between the losses around the target.
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


def tuned(
    study: Study,
    store: TokenStore,
    batch_tokens: int,
    seed: int,
    targets: tuple[float, ...],
    rate: float | None,
) -> dict[float, Course]:
    """Runs by rate, from a `rate` on, until the one with the fewest steps to the last target lies
    inside them.
    """
    if rate is None:
        rate = min(MOST_RATE, FIRST_RATE * 2.0 ** round(math.log2(batch_tokens / 512) / 2))
    runs: dict[float, Course] = {}
    most = 40 * 512 * 40 // batch_tokens + 4_000

    def needed(at: float) -> float:
        found = steps_to(runs[at], targets[-1])
        return math.inf if found is None else found

    wanted = [rate, rate / 2, rate * 2]
    while wanted:
        for at in wanted:
            best = min(map(needed, runs), default=math.inf)
            num_steps = int(min(most, 1.5 * best)) + 2
            spec = spec_of(study, batch_tokens, at, seed, num_steps)
            runs[at] = course(spec, store, targets[-1] - NEAR_NATS)
        best_rate = min(runs, key=needed)
        wanted = [at for at in (best_rate / 2, best_rate * 2) if at not in runs]
    return runs


def fewest(runs: dict[float, Course], target_nats: float) -> tuple[float, float, float]:
    """Steps to the target at the best rate by a parabola through the best one and its neighbours;
    the rate of those run that was best; log2 of the best between them.
    """
    found = {
        math.log2(rate): steps
        for rate, run in runs.items()
        if (steps := steps_to(run, target_nats)) is not None
    }
    best = min(found, key=lambda rate: found[rate])
    near = [rate for rate in (best - 1, best, best + 1) if rate in found]
    if len(near) < 3:
        return found[best], 2.0**best, best
    square, slope, offset = np.polyfit(near, np.log([found[rate] for rate in near]), 2)
    at = -slope / (2 * square)
    return float(np.exp(offset + at * (slope + square * at))), 2.0**best, float(at)


def knee(points: list[tuple[int, float]]) -> dict[str, Any]:
    """S_min and B_crit of (batch, steps), least squares in log S."""
    batches, steps = (np.array(values, dtype=float) for values in zip(*points, strict=True))

    def off(values: np.ndarray) -> np.ndarray:
        return np.asarray(values[0] + np.log1p(np.exp(values[1]) / batches) - np.log(steps))

    fit = least_squares(off, [math.log(steps.min()), math.log(4096)])
    freedom = len(points) - 2
    variance = float(np.sum(fit.fun**2)) / freedom
    error = math.sqrt(variance * np.linalg.inv(fit.jac.T @ fit.jac)[1, 1])
    reach = float(student.ppf(0.5 + LEVEL / 2, freedom)) * error
    ends = [math.exp(fit.x[1] - reach), math.exp(fit.x[1] + reach)]
    return {
        "steps_min": math.exp(fit.x[0]),
        "critical_batch_tokens": math.exp(fit.x[1]),
        "interval": ends,
        "rms_off_share": math.sqrt(variance),
    }


def scale(looks: list[NoiseLook], seq_len: int) -> dict[str, Any]:
    """The noise scale of some looks together, and the spread of theirs alone."""
    found: NoiseScale = noise_scale(looks, seq_len, LEVEL)
    alone = sorted(
        one.tokens
        for look in looks
        if (one := noise_scale([look], seq_len, LEVEL)).tokens is not None
    )
    return {
        "tokens": found.tokens,
        "interval": [found.low, found.high],
        "num_looks": len(looks),
        "middle_half_of_looks": [float(np.quantile(alone, 0.25)), float(np.quantile(alone, 0.75))]
        if alone
        else None,
    }


def cost(study: Study, store: TokenStore, num_steps: int) -> dict[str, Any]:
    """Measure the share of a rung's processor time that the looks take."""

    class Timed(NoiseLooks):
        seconds = 0.0

        def look(self, *arguments: Any) -> None:
            began = time.process_time()
            super().look(*arguments)
            Timed.seconds += time.process_time() - began

    run = study.run(
        shape=study.shape(WIDTH), point={LEARNING_RATE: FIRST_RATE}, seed=0, num_steps=num_steps
    )
    engine = Solo(store, device="cpu")
    engine.noise = Timed()
    engine.admit(0, run)
    began = time.process_time()
    engine.advance(10**9)
    return {
        "num_steps": num_steps,
        "share": Timed.seconds / (time.process_time() - began - Timed.seconds),
    }


Runs = dict[tuple[int, int], dict[float, Course]]
"""Runs by batch and seed, then by rate."""


def sweep(
    study: Study,
    store: TokenStore,
    batches: tuple[int, ...],
    num_seeds: int,
    targets: tuple[float, ...],
) -> Iterator[Runs]:
    """Yield the runs so far, after each seed."""
    runs: Runs = {}
    for seed in range(num_seeds):
        for batch in batches:
            began = time.monotonic()
            start = fewest(runs[batch, 0], targets[-1])[1] if seed else None
            runs[batch, seed] = tuned(study, store, batch, seed, targets, start)
            steps, rate, at = fewest(runs[batch, seed], targets[-1])
            print(
                f"batch {batch:6}, seed {seed}: {steps:7.1f} steps at 2^{at:.2f} (ran "
                f"2^{math.log2(rate):g}), "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
        yield runs


def judged(runs: Runs, targets: tuple[float, ...], seq_len: int) -> list[dict[str, Any]]:
    """For each target its knee and the noise scale along the runs."""
    body = []
    for target in targets:
        found = {key: fewest(one, target) for key, one in runs.items()}
        fitted = knee([(batch, steps) for (batch, _), (steps, _, _) in found.items()])
        rows, near, before = [], [], []
        for (batch, seed), (steps, rate, at) in found.items():
            looks = runs[batch, seed][rate].looks
            here = [look for loss, look in looks if abs(loss - target) < NEAR_NATS]
            near += here
            before += [look for loss, look in looks if loss > target and look.step > WARMUP_STEPS]
            rows.append(
                {
                    "batch_tokens": batch,
                    "seed": seed,
                    "steps": steps,
                    "tokens": steps * batch,
                    "log2_rate": at,
                    "noise_scale": scale(here, seq_len) if here else None,
                }
            )
        row = {
            "target_nats": target,
            "knee": fitted,
            "rows": rows,
            "noise_at_target": scale(near, seq_len),
            "noise_until_target": scale(before, seq_len),
        }
        row["ratio_at_target"] = row["noise_at_target"]["tokens"] / fitted["critical_batch_tokens"]
        row["ratio_until_target"] = (
            row["noise_until_target"]["tokens"] / fitted["critical_batch_tokens"]
        )
        print(json.dumps({key: value for key, value in row.items() if key != "rows"}), flush=True)
        body.append(row)
    return body


def main() -> None:
    """Print the tables and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument(
        "--quick", action="store_true", help="Three batches, one seed, an early target."
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        forerun(folder, "tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS)
        forerun(folder, "init", "--preset", "demo")
        study, store = (
            plan_study(folder / "plan.toml", folder / "study"),
            TokenStore(folder / "corpus"),
        )
        batches, seeds = (QUICK_BATCHES, 1) if asked.quick else (BATCHES, 2)
        targets = QUICK_TARGETS_NATS if asked.quick else TARGETS_NATS
        body: dict[str, Any] = {
            "width": WIDTH,
            "level": LEVEL,
            "cost": [
                cost(study, store, steps) for steps in ((200,) if asked.quick else (200, 600, 1600))
            ],
        }
        for runs in sweep(study, store, batches, seeds, targets):
            body |= {"num_seeds": len({seed for _, seed in runs}), "machine": machine()}
            body["targets"] = judged(runs, targets, study.plan.model.seq_len)
            if asked.json:
                asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
