"""Decay branches: are they the runs they stand for, what do they save, which decay, and does
averaging replace it?

    python benchmarks/cpu/branches.py --json benchmarks/results/branches.json

The demo's proxies under `wsd`, a fifth of the steps decaying. A trunk is one width, seed and rate;
its durations are 100 to 800 steps. Each duration is run from step 0, and again from the state that
the next shorter one left at its branch step, by both decays (linear, 1 - sqrt). Told: the pairs
whose losses differ at all, beside how far seeds lie apart; the FLOPs of both ways; by duration the
loss of each decay, of the constant rate without one, and of the weights averaged along it over the
last tenth, fifth or two fifths of the steps (a span that grows with the step, as in arXiv
2312.02696). Some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from proxies.core.branches import branch_step, own_flops, trunk_id
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import DecayShape, Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.data.corpus import tokenize
from proxies.data.tokens import TokenStore
from proxies.training.outcome import validation_ids
from proxies.training.slot_state import SlotState, of_branch, of_trunk
from proxies.training.solo import Solo

BASE = Shape(
    num_layers=2, width=32, num_heads=2, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=64
)
DURATIONS, WARMUP_STEPS, DECAY = (100, 200, 400, 800), 20, 0.2
SHAPES: tuple[DecayShape, ...] = ("linear", "sqrt")
TRUNKS = [(32, seed, 2.0**-6) for seed in range(5)] + [(32, 0, 2.0**-5), (64, 0, 2.0**-6)]
SPANS = (0.1, 0.2, 0.4)
"""Of the steps so far, that an average reaches back."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where runs are trained."""

    store: TokenStore

    def spec(
        self, trunk: tuple[int, int, float], num_steps: int, decay_shape: DecayShape
    ) -> RunSpec:
        """One run of a trunk."""
        width, seed, rate = trunk
        return RunSpec(
            optimizer="adamw",
            shape=BASE.at_width(width),
            base_shape=BASE,
            parametrization=named("mup"),
            hparams=Hparams(learning_rate=rate, clip_norm=1.0),
            schedule=Schedule(
                kind="wsd",
                num_steps=num_steps,
                warmup_steps=WARMUP_STEPS,
                decay_steps=round(DECAY * num_steps),
                decay_shape=decay_shape,
            ),
            batch_tokens=1024,
            data_id=self.store.manifest.data_id,
            seed=seed,
            numerics=Numerics(),
        )

    def trained(self, spec: RunSpec, state: SlotState | None = None) -> tuple[float, SlotState]:
        """The loss of a run, from step 0 or from its trunk's state, and the trunk's state where it
        leaves it.
        """
        engine = Solo(self.store, device="cpu")
        engine.admit(0, spec, None if state is None else of_branch(state, spec.id))
        engine.advance(branch_step(spec) - engine.steps[0])
        left = of_trunk(engine.state(0), trunk_id(spec))
        [(_, result, _)] = engine.advance(spec.schedule.num_steps)
        assert result.loss_nats is not None
        return result.loss_nats, left

    def averaged(self, spec: RunSpec) -> Iterator[tuple[int, dict[str, float]]]:
        """Losses of a constant rate at each duration: of its last weights, and of averages of
        them.
        """
        constant = replace(
            spec,
            schedule=replace(spec.schedule, kind="constant", decay_steps=0, decay_shape="linear"),
        )
        engine = Solo(self.store, device="cpu")
        engine.admit(0, constant)
        means = {span: [p.detach().clone() for p in engine.model.parameters()] for span in SPANS}
        for step in range(1, max(DURATIONS)):
            engine.advance(1)
            weights = [p.detach() for p in engine.model.parameters()]
            for span, mean in means.items():
                torch._foreach_lerp_(mean, weights, min(1.0, 1 / (span * step)))
            if step + 1 in DURATIONS:
                found = {
                    f"average over {span:g}": self._loss(engine, mean)
                    for span, mean in means.items()
                }
                yield step + 1, {"constant": self._loss(engine, weights), **found}

    def _loss(self, engine: Solo, weights: list[torch.Tensor]) -> float:
        """On the validation windows, of other weights; the run's own are put back."""
        own = [p.detach().clone() for p in engine.model.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(engine.model.parameters()), weights)
            ids_BT = validation_ids(self.store, BASE.seq_len)
            loss = torch.nn.functional.cross_entropy(
                engine.predict(ids_BT[:, :-1]), ids_BT[:, 1:].flatten()
            )
            torch._foreach_copy_(list(engine.model.parameters()), own)
        return float(loss)


def measured(runs: Runs, trunks: list[tuple[int, int, float]]) -> dict[str, Any]:
    """Every pair, and the readouts by duration."""
    rows, flops = [], {"full": 0, "branches": 0}
    for trunk in trunks:
        states: dict[DecayShape, SlotState | None] = dict.fromkeys(SHAPES)
        specs = {shape: [runs.spec(trunk, steps, shape) for steps in DURATIONS] for shape in SHAPES}
        for index, num_steps in enumerate(DURATIONS):
            row: dict[str, Any] = {"trunk": list(trunk), "num_steps": num_steps}
            for shape in SHAPES:
                spec = specs[shape][index]
                row[shape], _ = runs.trained(spec)
                row[f"{shape} branch"], states[shape] = runs.trained(spec, states[shape])
            rows.append(row)
            print(row, flush=True)
        flops["full"] += sum(spec.flops for spec in specs["linear"])
        flops["branches"] += sum(own_flops(specs["linear"]))
        for num_steps, found in runs.averaged(specs["linear"][-1]):
            next(
                r for r in rows if r["trunk"] == list(trunk) and r["num_steps"] == num_steps
            ).update(found)
    pairs = [
        (row[s], row[f"{s} branch"])
        for row in rows
        for s in SHAPES
        if row["num_steps"] != DURATIONS[0]
    ]
    seeds = {
        n: [r["linear"] for r in rows if r["num_steps"] == n and r["trunk"][0] == 32]
        for n in DURATIONS
    }
    readouts = [
        name for name in rows[0] if name not in ("trunk", "num_steps") and "branch" not in name
    ]
    return {
        "rows": rows,
        "num_pairs": len(pairs),
        "num_pairs_that_differ": sum(a != b for a, b in pairs),
        "largest_difference_nats": max(abs(a - b) for a, b in pairs),
        "flops": flops,
        "seed_sd_nats": {
            n: statistics.stdev(seeds[n][:5]) for n in DURATIONS if len(seeds[n]) >= 5
        },
        "over_linear_nats": {
            name: {
                n: statistics.mean(r[name] - r["linear"] for r in rows if r["num_steps"] == n)
                for n in DURATIONS
            }
            for name in readouts
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="Where the findings go.")
    parser.add_argument("--quick", action="store_true", help="One trunk: to see that it runs.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        library = Path(sysconfig.get_paths()["stdlib"])
        tokenize(
            [library],
            Path(name) / "corpus",
            suffixes=(".py",),
            excluded=("site-packages", "dist-packages"),
        )
        body = measured(
            Runs(store=TokenStore(Path(name) / "corpus")), TRUNKS[: 1 if options.quick else None]
        )
    body |= {
        "command": "python benchmarks/cpu/branches.py --json benchmarks/results/branches.json",
        "machine": machine(),
    }
    options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    print({name: body[name] for name in body if name != "rows"})


if __name__ == "__main__":
    main()
