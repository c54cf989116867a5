"""The body of a report as a finished study gives it: planted truth, judged and fitted by the real rooms."""

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
from main_run import decision_of, spec_of

from proxies import canon
from scaling_fits.allocate import allocate
from scaling_fits.summary import allocation_summary, fit_summary, prediction_summary
from scaling_fits.table import from_columns
from scaling_fits.uncertainty import fit_runs, predict
from transfer.optimum import Point
from transfer.summary import verdict_summary
from transfer.verdict import judge

WIDTHS, OPTIMUM, BUDGET_FLOPS, DATA_ID = (32, 64, 128), -5.4, 1e13, "0123456789abcdef" * 4


def finished_body():
    """A fresh copy: a test may change it."""
    return json.loads(_finished_text())


@functools.cache
def _finished_text():
    rng = np.random.default_rng(0)
    spec = spec_of(DATA_ID)
    manifest = SimpleNamespace(tokenizer="bytes", vocab_size=256, num_tokens=lambda split: 12_345_678)
    decision = decision_of(spec, manifest)
    body = {
        "schema_version": 1,
        "question": {
            "data_id": DATA_ID,
            "proxy": {"parametrization": "mup", "num_steps": 200, "base_width": 32, "batch_tokens": 1024},
            "search": {"num_trials": 12, "clip_norm": [0.25, 4.0], "seed": 3},
            "transfer": {"widths": list(WIDTHS), "level": 0.9},
        },
        "corpus": {
            "data_id": DATA_ID, "tokenizer": "bytes", "num_documents": 1743,
            "num_train_tokens": 12_345_678, "num_validation_tokens": 234_567,
        },
        "progress": {"search": [12, 12], "transfer": [126, 126], "ladder": [16, 16]},
        "coordinates": {name: _check(name, grows) for name, grows in (("mup", 0.0), ("sp", 1.0))},
        "search": _search(rng),
        "transfer": _transfer(rng),
        **_scaling(rng),
        "gates": [
            {"name": "coordinates", "outcome": "passed", "reason": "all layers' updates keep their size"},
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
            "num_runs": 79, "by_status": {"finished": 77, "diverged": 2}, "flops_causal": 1.18e13,
            "worker_seconds": 1117.8, "share_of_target": 1.18,
        },
        "ledger_head": "fedcba9876543210" * 4,
    }  # fmt: skip
    return canon.canonical(body)


def _check(name, grows):
    layers = [
        {"layer": layer, "role": role, "expected": [0.0, 0.0],
         "change": [size * (w / WIDTHS[0]) ** grows for w in WIDTHS], "slope": grows,
         "interval": [grows - 0.1, grows + 0.1], "outcome": "blows_up" if grows else "passes",
         "cause": "hidden matrices' learning rate does not shrink with width" if grows else ""}
        for layer, role, size in (("tok_embeddings", "embedding", 0.04), ("layers.0.attention.wq", "hidden", 0.5),
                                  ("norm", "norm", 0.9), ("lm_head", "readout", 1.4))
    ]  # fmt: skip
    return {
        "parametrization": name, "widths": list(WIDTHS), "num_steps": 10, "num_seeds": 4, "learning_rate": 2**-7,
        "level": 0.9, "layers": layers, "axis": "width", "depths": [2] * len(WIDTHS), "mistakes": [], "notes": [],
        "not_finite_width": None, "not_finite_depth": None, "not_finite_step": None,
        "outcome": "blows_up" if grows else "passes",
    }  # fmt: skip


def _search(rng):
    trials = [
        {"index": i, "learning_rate": 2**rate, "warmup_fraction": float(rng.uniform(0.02, 0.3)),
         "clip_norm": 2 ** float(rng.uniform(-2, 2)), "status": "diverged" if i == 7 else "finished",
         "loss_nats": None if i == 7 else 2.1 + 0.05 * (rate - OPTIMUM) ** 2}
        for i, rate in enumerate(rng.uniform(-9, -3, size=12).tolist())
    ]  # fmt: skip
    return {"trials": trials, "best": {"learning_rate": 0.0238, "clip_norm": 0.572, "warmup_fraction": 0.293}}


def _transfer(rng):
    runs = []
    for arm, drift in (("mup", 0.0), ("sp", -1.0)):
        for width in WIDTHS:
            doublings = math.log2(width / WIDTHS[0])
            for log2_lr in (-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0):
                for seed in (0, 1, 2):
                    off = log2_lr - OPTIMUM - drift * doublings
                    lost = off > 4
                    loss = 2.2 - 0.1 * doublings + 0.03 * off**2 + float(rng.normal(0, 0.004))
                    runs.append({"arm": arm, "width": width, "log2_lr": log2_lr, "seed": seed,
                                 "loss_nats": None if lost else loss,
                                 "status": "diverged" if lost else "finished"})  # fmt: skip

    points = {
        arm: [Point(**{k: r[k] for k in ("width", "log2_lr", "loss_nats", "seed")}) for r in runs if r["arm"] == arm]
        for arm in ("mup", "sp")
    }
    verdict = judge(points["mup"], target_width=96, base_width=32, control_points=points["sp"])
    return {"verdict": verdict_summary(verdict), "runs": runs, "learning_rate": 0.02368, "at_base_optimum": True}


def _scaling(rng):
    rungs = [
        {"width": w, "params": 12 * w * w + 500 * w, "tokens": s * 1024}
        for w in (32, 48, 64, 96) for s in (100, 200, 400, 800)
    ]  # fmt: skip
    for rung in rungs:
        truth = 1.2 + 60 / rung["params"] ** 0.4 + 90 / rung["tokens"] ** 0.4
        rung |= {
            "loss_nats": truth * math.exp(float(rng.normal(0, 0.003))),
            "flops": 6.0 * rung["params"] * rung["tokens"],
        }
    fit = fit_runs(from_columns(*([rung[key] for rung in rungs] for key in ("params", "tokens", "loss_nats"))),
                   form="chinchilla", bootstrap=60)  # fmt: skip
    for rung in rungs:
        rung["fitted_nats"] = predict(fit, rung["params"], rung["tokens"]).loss_nats
    frontier = [
        allocate(fit, flops) for flops in np.geomspace(min(r["flops"] for r in rungs), BUDGET_FLOPS, 12).tolist()
    ]
    return {
        "ladder": {"rungs": rungs},
        "fit": fit_summary(fit),
        "frontier": [
            {"flops": p.flops, "params": p.params, "loss_nats": p.loss_nats, "interval": p.interval} for p in frontier
        ],
        "choice": {
            "budget_flops": BUDGET_FLOPS, "allocation": allocation_summary(frontier[-1], 1024),
            "params": 123_456, "params_non_embedding": 98_765, "num_steps": 13_184, "tokens": 13_500_416.0,
            "flops_causal": 9.1e12, "prediction": prediction_summary(predict(fit, 123_456, 13_500_416)),
        },
    }  # fmt: skip
