"""Muon's iteration in bfloat16 and float32, and the transfer of its rate over width by rule.

    python benchmarks/statistics/muon.py --json benchmarks/results/muon.json

Distance: runs of the demo's proxies at width 64 and 200 steps, whose Newton-Schulz iteration
computes in float32, as on a CPU, or in bfloat16, as on a GPU and in torch.optim.Muon. The results
have the difference of their losses, and that of two seeds for comparison. Rules: the demo's search
and its test over width with each rule (`muon_rate`) and four seeds per rate, about 6 minutes each
on two cores. Rules in the file are not measured again. `spectral` is `match_rms_adamw` at five
times the rate, the same function, and is left out.
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

from process_tree import machine

from launcher.plan.study import Study
from launcher.study.study_folder import plan_study
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.data.tokens import TokenStore
from proxies.model import muon
from proxies.training.solo import Solo

RULES = ("original", "unit_rms", "match_rms_adamw")
CORPUS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
ONE_TEST = (
    "transfer.durations=[]",
    "transfer.hyperparameters={}",
    "transfer.num_seeds=4",
    "transfer.control_widths=[]",
)
SEEDS, WIDTH, RATE = range(4), 64, 0.03


def forerun(folder: Path, *line: str) -> Any:
    """The answer of a command as JSON, whatever its verdict."""
    command = [sys.executable, "-m", "launcher", *line, "--json"]
    return json.loads(
        subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False).stdout
    )


def planned(folder: Path, rule: str) -> None:
    """A corpus, and the demo's plan by a rule."""
    forerun(folder, "tokenize", sysconfig.get_paths()["stdlib"], "--out", "corpus", *CORPUS)
    values = (*ONE_TEST, f'proxy.rules={{muon_rate="{rule}"}}')
    changed = [part for value in values for part in ("--set", value)]
    forerun(folder, "init", "--preset", "demo", "--optimizer", "muon", *changed)


def over_width(folder: Path) -> dict[str, Any]:
    """What the test over width found."""
    found = forerun(folder, "transfer", "plan.toml")
    [verdict] = [
        test["verdict"] for test in found["tests"] if test["hyperparameter"] == LEARNING_RATE
    ]
    told = ("outcome", "drift_octaves_per_doubling", "regret_nats", "noise_nats")
    optima = {str(one["size"]): one["value"] for one in verdict["optima"]}
    return {**{name: verdict[name] for name in told}, "optima": optima}


def curve(study: Study, store: TokenStore, seed: int, dtype: torch.dtype) -> list[float]:
    """Training losses of a run, the validation loss last."""
    spec = study.run(
        shape=study.shape(WIDTH), point={LEARNING_RATE: RATE}, seed=seed, num_steps=200
    )
    engine = Solo(store, device="cpu")
    with mock.patch.object(muon, "iteration_dtype", lambda device, weights: dtype):
        engine.admit(0, spec)
        ((_, result, logged),) = engine.advance(10**6)
    assert result.loss_nats is not None
    return [*logged.train_loss_nats, result.loss_nats]


def distance(folder: Path) -> dict[str, Any]:
    """How far runs part whose iterations compute in other precisions."""
    study = plan_study(folder / "plan.toml", folder / "study", ("proxy.num_slots=1",))
    store = TokenStore(folder / "corpus")
    runs = {
        dtype: [curve(study, store, seed, dtype) for seed in SEEDS]
        for dtype in (torch.float32, torch.bfloat16)
    }
    single, half = runs.values()
    ends = [run[-1] for run in single]
    apart = [b[-1] - a[-1] for a, b in zip(single, half, strict=True)]
    steps = [
        max(abs(x - y) for x, y in zip(a, b, strict=True))
        for a, b in zip(single, half, strict=True)
    ]
    return {
        "width": WIDTH,
        "num_steps": 200,
        "learning_rate": RATE,
        "validation_nats": ends,
        "bfloat16_minus_float32_nats": apart,
        "largest_of_any_step_nats": steps,
        "seeds_apart_nats": max(ends) - min(ends),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, required=True, help="Where the findings go, and what is there already."
    )
    options = parser.parse_args()
    body: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    torch.set_num_threads(1)
    for rule in RULES:
        if rule in body.get("rules", {}):
            continue
        with TemporaryDirectory() as name:
            planned(Path(name), rule)
            if "distance" not in body:
                body["distance"] = distance(Path(name))
            body.setdefault("rules", {})[rule] = over_width(Path(name))
        print(f"{rule}: {body['rules'][rule]}", flush=True)
        body["command"] = "python benchmarks/statistics/muon.py --json benchmarks/results/muon.json"
        body["machine"] = machine()
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
