"""The body of a report as a finished study gives it: planted truth, judged and fitted by the real
rooms.
"""

import dataclasses
import functools
import json
import math
from types import SimpleNamespace

import numpy as np
from main_run import decision_of, spec_of

from launcher.views import tables
from launcher.views.aspect import aspect_body
from proxies.core import canon
from scaling_fits.allocation.allocate import allocate
from scaling_fits.allocation.aspect import ShapedRun, aspect_term
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns
from scaling_fits.summary import allocation_summary, prediction_summary
from transfer.question import Point, Question, from_log2
from transfer.verdict.joint_verdict import judge_together
from transfer.verdict.summary import estimate_summary, together_summary, verdict_summary
from transfer.verdict.verdict import examine

WIDTHS, OPTIMUM, BUDGET_FLOPS, DATA_ID = (32, 64, 128), -5.4, 1e13, "0123456789abcdef" * 4
TARGET_WIDTH, TARGET_TOKENS, BASE_TOKENS = 96, 13_500_416, 204_800
DURATIONS = tuple(int(BASE_TOKENS * ratio) for ratio in (0.5, 1, 2, 4))
CLIP, WARMUP = 0.572, 0.2
RATES = tuple(float(rate) for rate in range(-9, -2))
DURATION_POWER = -0.25


BRANCHES = {
    "width": 96,
    "curves": [
        {
            "num_steps": n,
            "branch_step": 4 * n // 5,
            "steps": [n // 2, 4 * n // 5, n],
            "train_loss_nats": [77, 66, 55],
        }
        for n in (200, 400)
    ],
}


def finished_body():
    """A fresh copy: a test may change it."""
    return json.loads(_finished_text())


@functools.cache
def _finished_text():
    rng = np.random.default_rng(0)
    spec = spec_of(DATA_ID)
    manifest = SimpleNamespace(
        tokenizer="bytes", vocab_size=256, num_tokens=lambda split: 12_345_678
    )
    decision = decision_of(spec, manifest)
    body = {
        "schema_version": 1,
        "question": {
            "data_id": DATA_ID,
            "proxy": {
                "parametrization": "mup",
                "num_steps": 200,
                "base_width": 32,
                "batch_tokens": 1024,
            },
            "search": {"num_trials": 12, "clip_norm": [0.25, 4.0], "seed": 3},
            "transfer": {"widths": list(WIDTHS), "level": 0.9},
        },
        "corpus": {
            "data_id": DATA_ID,
            "tokenizer": "bytes",
            "vocab_size": 256,
            "num_documents": 1743,
            "num_train_tokens": 12_345_678,
            "num_validation_tokens": 234_567,
        },
        "progress": {"search": [12, 12], "transfer": [126, 126], "ladder": [16, 16]},
        "calibration": [
            {"part": "proxy", "width": 32, "mode": "4 slots", "figures": [{}]},
            {"part": "ladder", "width": 32, "mode": "one slot", "figures": []},
        ],
        "wider": WIDER,
        "coordinates": {name: _check(name, grows) for name, grows in (("mup", 0.0), ("sp", 1.0))},
        "search": _search(rng),
        "transfer": _transfer(rng),
        **_scaling(rng),
        "gates": [
            {
                "name": "coordinates",
                "outcome": "passed",
                "reason": "all layers' updates keep their size",
            },
            {"name": "transfer", "outcome": "passed", "reason": "costs 0.0001 nats"},
            {"name": "fit", "outcome": "passed", "reason": "inside its 90% interval"},
            {"name": "data", "outcome": "passed", "reason": "enough"},
        ],
        "accepted": {},
        "decision": decision,
        "digest": decision.digest,
        "own_run": None,
        "main_run": None,
        "spend": {
            "num_runs": 79,
            "num_imported": 0,
            "by_status": {"finished": 77, "diverged": 2},
            "flops_causal": 1.18e13,
            "worker_seconds": 1117.8,
            "share_of_target": 1.18,
        },
        "ledger_head": "fedcba9876543210" * 4,
        "has_logbook": False,
    }
    return canon.canonical(body)


def _check(name, grows):
    layers = [
        {
            "layer": layer,
            "role": role,
            "expected": [0.0, 0.0],
            "change": [size * (w / WIDTHS[0]) ** grows for w in WIDTHS],
            "slope": grows,
            "interval": [grows - 0.1, grows + 0.1],
            "outcome": "blows_up" if grows else "passes",
            "cause": "hidden matrices' learning rate does not shrink with width" if grows else "",
        }
        for layer, role, size in (
            ("tok_embeddings", "embedding", 0.04),
            ("layers.0.attention.wq", "hidden", 0.5),
            ("norm", "norm", 0.9),
            ("lm_head", "readout", 1.4),
        )
    ]
    return {
        "parametrization": name,
        "widths": list(WIDTHS),
        "num_steps": 10,
        "num_seeds": 4,
        "learning_rate": 2**-7,
        "level": 0.9,
        "layers": layers,
        "axis": "width",
        "depths": [2] * len(WIDTHS),
        "mistakes": [],
        "notes": [],
        "not_finite_width": None,
        "not_finite_depth": None,
        "not_finite_step": None,
        "outcome": "blows_up" if grows else "passes",
    }


def _search(rng):
    trials = [
        {
            "index": i,
            "learning_rate": 2**rate,
            "warmup_fraction": float(rng.uniform(0.02, 0.3)),
            "clip_norm": 2 ** float(rng.uniform(-2, 2)),
            "status": "diverged" if i == 7 else "finished",
            "loss_nats": None if i == 7 else 2.1 + 0.05 * (rate - OPTIMUM) ** 2,
        }
        for i, rate in enumerate(rng.uniform(-9, -3, size=12).tolist())
    ]
    return {
        "trials": trials,
        "best": {"learning_rate": 0.0238, "clip_norm": 0.572, "warmup_fraction": 0.293},
        "best_trial": 3,
        "sampler": "tpe",
        "can_be_off": [],
        "growth": [],
        "open_edges": [],
        "stopped": [],
        "ranges": {
            "learning_rate": [2**-9, 2**-3],
            "warmup_fraction": [0.02, 0.3],
            "clip_norm": [0.25, 4.0],
        },
        "replicates": None,
    }


def valley_runs(
    rng, *, arm="mup", sizes, base, values, num_seeds=3, optimum, drift=0.0, curvature=0.03
):
    """Runs of one arm over an axis; a value four octaves above its optimum diverges."""
    runs = []
    for size in sizes:
        doublings = math.log2(size / base)
        for log2_value in values:
            for seed in range(num_seeds):
                off = log2_value - optimum - drift * doublings
                lost = off > 4
                loss = 2.2 - 0.1 * doublings + curvature * off**2 + float(rng.normal(0, 0.004))
                ended = {
                    "loss_nats": None if lost else loss,
                    "status": "diverged" if lost else "finished",
                }
                runs.append(
                    {"arm": arm, "size": size, "log2_value": log2_value, "seed": seed, **ended}
                )
    return runs


def points_of(runs, arm="mup"):
    return [
        Point(**{k: run[k] for k in ("size", "log2_value", "loss_nats", "seed")})
        for run in runs
        if run["arm"] == arm
    ]


def judged_test(runs, **question):
    """One entry of a report's tests, and what `judge_together` wants."""
    asked = Question(**question)
    judged = examine(points_of(runs), asked, control_points=points_of(runs, "sp"))
    test = {
        "axis": asked.axis,
        "hyperparameter": asked.hyperparameter,
        "verdict": verdict_summary(judged.verdict),
        "runs": runs,
    }
    return json.loads(canon.canonical(test)), judged


def _tests(rng):
    width = {"sizes": WIDTHS, "base": WIDTHS[0]}
    over_width = {"axis": "width", "base_size": WIDTHS[0], "target_size": TARGET_WIDTH}
    runs = valley_runs(rng, **width, values=RATES, optimum=OPTIMUM)
    runs += valley_runs(rng, **width, values=RATES, optimum=OPTIMUM, arm="sp", drift=-1.0)
    first = judged_test(runs, **over_width)
    rate = first[0]["verdict"]["optima"][0]["log2_value"]
    longer = valley_runs(
        rng,
        sizes=DURATIONS,
        base=BASE_TOKENS,
        values=RATES,
        num_seeds=2,
        optimum=OPTIMUM,
        drift=DURATION_POWER,
    )
    second = judged_test(
        longer,
        axis="duration",
        base_size=BASE_TOKENS,
        target_size=TARGET_TOKENS,
        power=None,
        transferred_log2=rate,
    )
    others = []
    for name, value, bend in (("clip_norm", CLIP, 0.0), ("warmup_fraction", WARMUP, 0.008)):
        here = math.log2(value)
        tried = [here + offset for offset in (-2.0, -1.0, 0.0, 1.0, 2.0)]
        runs = valley_runs(
            rng, **width, values=tried, num_seeds=4, optimum=here + 0.2, curvature=bend
        )
        others.append(
            judged_test(runs, hyperparameter=name, transferred_log2=here, **over_width)[0]
        )
    return [first[0], second[0], *others], (first[1], second[1])


def _transfer(rng):
    tests, judged = _tests(rng)
    doublings = {
        "width": math.log2(TARGET_WIDTH / WIDTHS[0]),
        "duration": math.log2(TARGET_TOKENS / BASE_TOKENS),
        "depth": 0.0,
        "batch": 0.0,
    }
    together = judge_together(judged, doublings)
    base = judged[0].verdict.transferred_log2
    values = [
        _value(
            "learning_rate",
            tests[:2],
            base,
            together.transferred_log2,
            "the base's, times (tokens / tokens "
            "at the base)^power as measured; width by the parametrization's rule",
            together.outcome,
            estimate_summary(together.regret_nats),
            [],
        )
    ]
    for test in tests[2:]:
        of = test["verdict"]
        values.append(
            _value(
                test["hyperparameter"],
                [test],
                of["transferred_log2"],
                of["transferred_log2"],
                "unchanged",
                of["outcome"],
                of["regret_nats"],
                ["duration"],
            )
        )
    return {
        "tests": tests,
        "together": together_summary(together),
        "values": values,
        "learning_rate": 2.0**base,
        "at_base_optimum": True,
    }


def _value(name, tests, base, there, rule, outcome, regret, untested):
    return {
        "hyperparameter": name,
        "base_value": from_log2(name, base),
        "target_value": from_log2(name, there),
        "rule": rule,
        "tested": [test["axis"] for test in tests],
        "untested": untested,
        "outcome": outcome,
        "drifts": {test["axis"]: test["verdict"]["drift_octaves_per_doubling"] for test in tests},
        "regret_nats": regret,
        "cost_of_2x_off_nats": tests[0]["verdict"]["cost_of_2x_off_nats"],
    }


def _scaling(rng):
    rungs = [
        {"width": w, "params": 12 * w * w + 500 * w, "tokens": s * 1024}
        for w in (32, 48, 64, 96)
        for s in (200, 400, 800, 1600)
    ]
    for rung in rungs:
        truth = 1.2 + 60 / rung["params"] ** 0.4 + 90 / rung["tokens"] ** 0.4
        rung |= {
            "loss_nats": truth * math.exp(float(rng.normal(0, 0.003))),
            "flops": 6.0 * rung["params"] * rung["tokens"],
        }
    return scaling_of(rungs)


WIDER = {
    "outcome": "cannot_tell",
    "level": 0.9,
    "margin_nats": 0.01,
    "learning_rate": 0.03125,
    "pairs": [
        {
            "small": 32,
            "large": 64,
            "learning_rate": 0.03125,
            "num_seeds": 2,
            "steps": [32, 50],
            "excess_nats": -0.0309,
            "interval": [-0.081, 0.019],
            "outcome": "cannot_tell",
        },
    ],
    "curves": [
        {
            "width": width,
            "steps": [4.0, 20.0, 100.0, 200.0],
            "train_loss_nats": [5.11, 4.11 - gain, 3.11 - gain, 2.61],
        }
        for width, gain in ((32, 0.0), (64, 0.1))
    ],
}


def scaling_of(rungs, form="auto", bootstrap=60):
    """Ladder, fit, frontier and choice of rungs with width, params, tokens, loss_nats and flops."""
    columns = (
        [rung[key] for rung in rungs if rung["loss_nats"]]
        for key in ("params", "tokens", "loss_nats")
    )
    table = from_columns(*columns)
    fit = fit_runs(table, form=form, bootstrap=bootstrap)
    for rung in rungs:
        rung["fitted_nats"] = predict(fit, rung["params"], rung["tokens"]).loss_nats
    frontier = [allocate(fit, flops) for flops in tables.frontier_flops(fit, BUDGET_FLOPS)]
    at = predict(fit, 123_456, 13_500_416)
    return {
        "ladder": {"rungs": rungs, "branches": BRANCHES, **_checks(rungs)},
        "fit": tables.fit_body(fit, at),
        "frontier": [
            {"flops": p.flops, "params": p.params, "loss_nats": p.loss_nats, "interval": p.interval}
            for p in frontier
        ],
        "choice": {
            "budget_flops": BUDGET_FLOPS,
            "allocation": allocation_summary(frontier[-1], 1024),
            "params": 123_456,
            "params_non_embedding": 98_765,
            "num_steps": 13_184,
            "tokens": 13_500_416.0,
            "flops_causal": 9.1e12,
            "prediction": prediction_summary(at),
            "aspect": _aspect(at),
            "shape": {"width": 64, "num_layers": 3},
        },
    }


def _aspect(at):
    """What a grid of widths and depths would say of the width per layer."""
    runs = [
        ShapedRun(
            params=12.0 * depth * width**2,
            tokens=1e6,
            width_per_layer=width / depth,
            predicted_nats=2.0,
            loss_nats=2.0
            * math.exp(
                0.01 * math.log2(width / depth / 20) ** 2 + 0.001 * (-1) ** (width // 16 + depth)
            ),
        )
        for width in (32, 48, 64, 96)
        for depth in (1, 2, 4)
    ]
    runs = [dataclasses.replace(run, tokens=tokens) for run in runs for tokens in (1e5, 1e6)]
    shape = SimpleNamespace(width=64, num_layers=3)
    ends = (SimpleNamespace(width=48, num_layers=2), SimpleNamespace(width=96, num_layers=5))
    return aspect_body(
        SimpleNamespace(shape=shape, aspect=aspect_term(runs, 0.9), ends=ends, prediction=at)
    )


def _checks(rungs):
    """Two rungs at three rates: the one is tuned, of the other nothing can be told."""
    checks = []
    for rung, bend, outcome in ((rungs[0], 0.02, "tuned"), (rungs[-2], 0.004, "cannot_tell")):
        tried = [
            {
                "octaves": octaves,
                "learning_rate": 0.0238 * 2**octaves,
                "num_seeds": 1,
                "loss_nats": rung["loss_nats"] + bend * ((octaves - 0.2) ** 2 - 0.04),
            }
            for octaves in (-1.0, 0.0, 1.0)
        ]
        checks.append(
            {
                "width": rung["width"],
                "params": rung["params"],
                "tokens": rung["tokens"],
                "num_steps": rung["tokens"] // 1024,
                "offsets": tried,
                "noise_nats": 0.004,
                "excess_nats": {"value": 0.04 * bend, "interval": [0.0, 0.3 * bend]},
                "optimum_octaves": {"value": 0.2, "interval": [-0.1, 0.4]},
                "better_octaves": None,
                "outcome": outcome,
                "words": f"width {rung['width']}: ladder.check_num_seeds = 5 would settle it",
            }
        )
    return {
        "checks": checks,
        "tuned": {"outcome": "cannot_tell", "reason": "1 of 2 checked rungs is tuned"},
    }
