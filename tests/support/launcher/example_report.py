"""An example of `report.json`: a finished study whose losses are planted.

The runs' losses follow planted basins and a planted law; verdicts, fit, and forecast are computed
from them by the real code.
"""

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
from main_run import make_decision, make_spec

from forerun._launcher.report.views import tables
from forerun._launcher.report.views.aspect import build_aspect_section
from forerun._proxies.core import canon
from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.allocation.aspect import ShapedRun, fit_aspect_term
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns
from forerun._scaling_fits.summary import summarize_allocation, summarize_prediction
from forerun._transfer.question import Point, Question, from_log2
from forerun._transfer.verdict.joint_verdict import judge_axes_together
from forerun._transfer.verdict.summary import (
    summarize_estimate,
    summarize_joint_verdict,
    summarize_verdict,
)
from forerun._transfer.verdict.verdict import judge

WIDTHS, OPTIMUM_LOG2, BUDGET_FLOPS, DATA_ID = (32, 64, 128), -5.4, 1e13, "0123456789abcdef" * 4
TARGET_WIDTH, TARGET_TOKENS, BASE_TOKENS = 96, 13_500_416, 204_800
DURATIONS = tuple(int(BASE_TOKENS * ratio) for ratio in (0.5, 1, 2, 4))
CLIP_NORM, WARMUP_FRACTION = 0.572, 0.2
LOG2_RATES = tuple(float(rate) for rate in range(-9, -2))
DURATION_POWER = -0.25


# Loss curves of runs whose decays branch off from one run; the losses are not those of a law.
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


def make_finished_body():
    """Return the report as JSON values, a new copy that a test may change."""
    return json.loads(_format_finished_body())


@functools.cache
def _format_finished_body():
    """Return the report as JSON text.

    The sections draw from one generator, so their order fixes the losses of the report.
    """
    rng = np.random.default_rng(0)
    spec = make_spec(DATA_ID)
    manifest = SimpleNamespace(
        tokenizer="bytes", vocab_size=256, count_tokens=lambda split: 12_345_678
    )
    decision = make_decision(spec, manifest)
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
        "coordinates": {
            name: _make_coordinate_check(name, grows) for name, grows in (("mup", 0.0), ("sp", 1.0))
        },
        "search": _make_search(rng),
        "transfer": _make_transfer(rng),
        **_make_scaling(rng),
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
    return canon.to_canonical_json(body)


def _make_coordinate_check(name, grows):
    """Return a coordinate check whose outputs grow as width to the power `grows`."""
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


def _make_search(rng):
    """Return a search of twelve trials around the optimum, one of which diverged."""
    trials = [
        {
            "index": i,
            "learning_rate": 2**rate,
            "warmup_fraction": float(rng.uniform(0.02, 0.3)),
            "clip_norm": 2 ** float(rng.uniform(-2, 2)),
            "status": "diverged" if i == 7 else "finished",
            "loss_nats": None if i == 7 else 2.1 + 0.05 * (rate - OPTIMUM_LOG2) ** 2,
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


def make_basin_runs(
    rng, *, arm="mup", sizes, base, values, num_seeds=3, optimum, drift=0.0, curvature=0.03
):
    """Return runs of one arm over an axis; a value four octaves above its optimum diverges.

    The optimum moves by `drift` octaves with each doubling of the size.
    """
    runs = []
    for size in sizes:
        doublings = math.log2(size / base)
        for log2_value in values:
            for seed in range(num_seeds):
                octaves = log2_value - optimum - drift * doublings
                diverged = octaves > 4
                noise = float(rng.normal(0, 0.004))
                loss_nats = 2.2 - 0.1 * doublings + curvature * octaves**2 + noise
                runs.append(
                    {
                        "arm": arm,
                        "size": size,
                        "log2_value": log2_value,
                        "seed": seed,
                        "loss_nats": None if diverged else loss_nats,
                        "status": "diverged" if diverged else "finished",
                    }
                )
    return runs


def _to_points(runs, arm="mup"):
    """Return the runs of one arm as the points of a verdict."""
    return [
        Point(**{k: run[k] for k in ("size", "log2_value", "loss_nats", "seed")})
        for run in runs
        if run["arm"] == arm
    ]


def judge_test(runs, **question_fields):
    """Judge whether a hyperparameter's optimum stays the same over the runs' sizes.

    Args:
        runs: Runs of `make_basin_runs`.
        question_fields: Fields of the `Question`, such as axis, base size, and target size.

    Returns:
        An entry of the report's tests, and the verdict itself.
    """
    question = Question(**question_fields)
    verdict = judge(_to_points(runs), question, control_points=_to_points(runs, "sp"))
    test = {
        "axis": question.axis,
        "hyperparameter": question.hyperparameter,
        "verdict": summarize_verdict(verdict),
        "runs": runs,
    }
    return json.loads(canon.to_canonical_json(test)), verdict


def _make_tests(rng):
    """Return the four tests, and the verdicts of the two tests of the learning rate."""
    width = {"sizes": WIDTHS, "base": WIDTHS[0]}
    over_width = {"axis": "width", "base_size": WIDTHS[0], "target_size": TARGET_WIDTH}
    runs = make_basin_runs(rng, **width, values=LOG2_RATES, optimum=OPTIMUM_LOG2)
    runs += make_basin_runs(
        rng, **width, values=LOG2_RATES, optimum=OPTIMUM_LOG2, arm="sp", drift=-1.0
    )
    width_test, width_verdict = judge_test(runs, **over_width)
    base_log2 = width_test["verdict"]["optima"][0]["log2_value"]
    longer = make_basin_runs(
        rng,
        sizes=DURATIONS,
        base=BASE_TOKENS,
        values=LOG2_RATES,
        num_seeds=2,
        optimum=OPTIMUM_LOG2,
        drift=DURATION_POWER,
    )
    duration_test, duration_verdict = judge_test(
        longer,
        axis="duration",
        base_size=BASE_TOKENS,
        target_size=TARGET_TOKENS,
        power=None,
        transferred_log2=base_log2,
    )
    tests = [width_test, duration_test]
    for name, value, curvature in (
        ("clip_norm", CLIP_NORM, 0.0),
        ("warmup_fraction", WARMUP_FRACTION, 0.008),
    ):
        value_log2 = math.log2(value)
        runs = make_basin_runs(
            rng,
            **width,
            values=[value_log2 + offset for offset in (-2.0, -1.0, 0.0, 1.0, 2.0)],
            num_seeds=4,
            optimum=value_log2 + 0.2,
            curvature=curvature,
        )
        test, _ = judge_test(runs, hyperparameter=name, transferred_log2=value_log2, **over_width)
        tests.append(test)
    return tests, (width_verdict, duration_verdict)


def _make_transfer(rng):
    """Return the section `transfer`."""
    tests, rate_verdicts = _make_tests(rng)
    doublings = {
        "width": math.log2(TARGET_WIDTH / WIDTHS[0]),
        "duration": math.log2(TARGET_TOKENS / BASE_TOKENS),
        "depth": 0.0,
        "batch": 0.0,
    }
    together = judge_axes_together(rate_verdicts, doublings)
    base = rate_verdicts[0].transferred_log2
    values = [
        _make_value_row(
            "learning_rate",
            tests=tests[:2],
            base_log2=base,
            target_log2=together.transferred_log2,
            rule="the base's, times (tokens / tokens "
            "at the base)^power as measured; width by the parametrization's rule",
            outcome=together.outcome,
            regret=summarize_estimate(together.regret_nats),
            untested=[],
        )
    ]
    for test in tests[2:]:
        verdict = test["verdict"]
        values.append(
            _make_value_row(
                test["hyperparameter"],
                tests=[test],
                base_log2=verdict["transferred_log2"],
                target_log2=verdict["transferred_log2"],
                rule="unchanged",
                outcome=verdict["outcome"],
                regret=verdict["regret_nats"],
                untested=["duration"],
            )
        )
    return {
        "tests": tests,
        "together": summarize_joint_verdict(together),
        "values": values,
        "learning_rate": 2.0**base,
        "at_base_optimum": True,
    }


def _make_value_row(name, *, tests, base_log2, target_log2, rule, outcome, regret, untested):
    """Return a hyperparameter's row of values for the target."""
    return {
        "hyperparameter": name,
        "base_value": from_log2(name, base_log2),
        "target_value": from_log2(name, target_log2),
        "rule": rule,
        "tested": [test["axis"] for test in tests],
        "untested": untested,
        "outcome": outcome,
        "drifts": {test["axis"]: test["verdict"]["drift_octaves_per_doubling"] for test in tests},
        "regret_nats": regret,
        "cost_of_2x_off_nats": tests[0]["verdict"]["cost_of_2x_off_nats"],
    }


def _make_scaling(rng):
    """Return the sections that come from sixteen rungs, the sizes and durations of the ladder.

    Their losses follow a scaling law with 0.3 % noise.
    """
    rungs = [
        {"width": width, "params": 12 * width * width + 500 * width, "tokens": num_steps * 1024}
        for width in (32, 48, 64, 96)
        for num_steps in (200, 400, 800, 1600)
    ]
    for rung in rungs:
        loss_nats = 1.2 + 60 / rung["params"] ** 0.4 + 90 / rung["tokens"] ** 0.4
        rung |= {
            "loss_nats": loss_nats * math.exp(float(rng.normal(0, 0.003))),
            "flops": 6.0 * rung["params"] * rung["tokens"],
        }
    return _build_scaling_sections(rungs)


# Loss curves of two widths at one learning rate; the wider one has the lower loss in the middle.
WIDER = {
    "learning_rate": 0.03125,
    "curves": [
        {
            "width": width,
            "steps": [4.0, 20.0, 100.0, 200.0],
            "train_loss_nats": [5.11, 4.11 - gain, 3.11 - gain, 2.61],
        }
        for width, gain in ((32, 0.0), (64, 0.1))
    ],
}


def _build_scaling_sections(rungs):
    """Fit the rungs and return the sections `ladder`, `fit`, `frontier`, and `choice`."""
    columns = ([rung[key] for rung in rungs] for key in ("params", "tokens", "loss_nats"))
    table = from_columns(*columns)
    fit = fit_runs(table, form="auto", bootstrap=60)
    for rung in rungs:
        rung["fitted_nats"] = predict(fit, rung["params"], rung["tokens"]).loss_nats
    frontier = [allocate(fit, flops) for flops in tables.list_frontier_flops(fit, BUDGET_FLOPS)]
    prediction = predict(fit, 123_456, 13_500_416)
    return {
        "ladder": {"rungs": rungs, "branches": BRANCHES, **_make_rate_checks(rungs)},
        "fit": tables.build_fit_section(fit, prediction).to_json(),
        "frontier": [
            {
                "flops": point.flops,
                "params": point.params,
                "loss_nats": point.loss_nats,
                "interval": point.interval,
            }
            for point in frontier
        ],
        "choice": {
            "budget_flops": BUDGET_FLOPS,
            "allocation": summarize_allocation(frontier[-1], 1024),
            "params": 123_456,
            "params_non_embedding": 98_765,
            "num_steps": 13_184,
            "tokens": 13_500_416.0,
            "flops_causal": 9.1e12,
            "prediction": summarize_prediction(prediction),
            "aspect": _describe_aspect(prediction),
            "shape": {"width": 64, "num_layers": 3},
        },
    }


def _describe_aspect(prediction):
    """Return the report's section on the aspect, the width per layer, from a planted grid.

    The best width per layer in the grid of widths and depths is 20.
    """
    runs = []
    for width in (32, 48, 64, 96):
        for depth in (1, 2, 4):
            noise = 0.001 * (-1) ** (width // 16 + depth)
            log_excess = 0.01 * math.log2(width / depth / 20) ** 2 + noise
            for tokens in (1e5, 1e6):
                run = ShapedRun(
                    params=12.0 * depth * width**2,
                    tokens=tokens,
                    width_per_layer=width / depth,
                    predicted_nats=2.0,
                    loss_nats=2.0 * math.exp(log_excess),
                )
                runs.append(run)
    shape = SimpleNamespace(width=64, num_layers=3)
    ends = (SimpleNamespace(width=48, num_layers=2), SimpleNamespace(width=96, num_layers=5))
    return build_aspect_section(
        SimpleNamespace(
            shape=shape, aspect=fit_aspect_term(runs, 0.9), ends=ends, prediction=prediction
        )
    ).to_json()


def _make_rate_checks(rungs):
    """Return checks of two rungs at three rates: one is tuned, the other cannot tell."""
    checks = []
    for rung, curvature, outcome in ((rungs[0], 0.02, "tuned"), (rungs[-2], 0.004, "cannot_tell")):
        offsets = [
            {
                "octaves": octaves,
                "learning_rate": 0.0238 * 2**octaves,
                "num_seeds": 1,
                "loss_nats": rung["loss_nats"] + curvature * ((octaves - 0.2) ** 2 - 0.04),
            }
            for octaves in (-1.0, 0.0, 1.0)
        ]
        checks.append(
            {
                "width": rung["width"],
                "params": rung["params"],
                "tokens": rung["tokens"],
                "num_steps": rung["tokens"] // 1024,
                "offsets": offsets,
                "noise_nats": 0.004,
                "excess_nats": {"value": 0.04 * curvature, "interval": [0.0, 0.3 * curvature]},
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
