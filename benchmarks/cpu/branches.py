"""Decay branches: their losses and FLOPs compared with full runs, and with averaged weights.

    python benchmarks/cpu/branches.py --json benchmarks/results/branches.json

With a `wsd` schedule, a shorter run can branch off from a longer one where its decay begins. A
trunk is one width, seed and learning rate of the demo's proxies. Each trunk has runs of 100, 200,
400 and 800 steps, of which the last fifth decays (linearly, or as 1 - sqrt). Each run is trained
twice: from step 0, and from the state that the next shorter run left where its decay began.

The script prints each row and writes:

- how many pairs of losses differ, the largest difference, and the spread over seeds
- the FLOPs of full runs and of branches
- by duration: the loss of each decay, of a constant rate without decay, and of the weights of the
  constant rate averaged over the last 10, 20 or 40 percent of its steps (a span that grows with the
  step, as in arXiv 2312.02696)

It takes about ten minutes of one core; `--quick` trains one trunk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_runs import write_python_corpus
from result_files import describe_machine, write_result

from forerun._proxies.core.branches import compute_branch_step, compute_own_flops, compute_trunk_id
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import DecayShape, Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.run_progress import read_validation_ids
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.slot_state import SlotState, to_branch_state, to_trunk_state

BASE = Shape(
    num_layers=2, width=32, num_heads=2, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=64
)
DURATIONS, WARMUP_STEPS, DECAY_SHARE = (100, 200, 400, 800), 20, 0.2
DECAY_SHAPES: tuple[DecayShape, ...] = ("linear", "sqrt")
Trunk = tuple[int, int, float]
"""Width, seed and learning rate of a trunk."""
NUM_SEEDS = 5
TRUNKS: list[Trunk] = [(BASE.width, seed, 2.0**-6) for seed in range(NUM_SEEDS)]
TRUNKS += [(BASE.width, 0, 2.0**-5), (2 * BASE.width, 0, 2.0**-6)]
"""All trunks. The first `NUM_SEEDS` differ in their seeds only."""
SPANS = (0.1, 0.2, 0.4)
"""Shares of the steps so far over which weights are averaged."""


@dataclass(frozen=True, kw_only=True)
class BranchTrainer:
    """A trainer of full runs and of branches on one corpus."""

    store: TokenStore

    def make_spec(self, trunk: Trunk, num_steps: int, decay_shape: DecayShape) -> RunSpec:
        """Return the spec of one run of a trunk."""
        width, seed, rate = trunk
        return RunSpec(
            optimizer="adamw",
            shape=BASE.at_width(width),
            base_shape=BASE,
            parametrization=get_parametrization("mup"),
            hparams=Hparams(learning_rate=rate, clip_norm=1.0),
            schedule=Schedule(
                kind="wsd",
                num_steps=num_steps,
                warmup_steps=WARMUP_STEPS,
                decay_steps=round(DECAY_SHARE * num_steps),
                decay_shape=decay_shape,
            ),
            batch_tokens=1024,
            data_id=self.store.manifest.data_id,
            seed=seed,
            numerics=Numerics(),
        )

    def train(self, spec: RunSpec, state: SlotState | None = None) -> tuple[float, SlotState]:
        """Train a run from step 0 or from its trunk's state.

        Returns:
            Its validation loss in nats, and its state where the decay begins.
        """
        engine = SingleTrialEngine(self.store, device="cpu")
        engine.admit(0, spec, None if state is None else to_branch_state(state, spec.id))
        engine.advance(compute_branch_step(spec) - engine.steps[0])
        branch_state = to_trunk_state(engine.get_state(0), compute_trunk_id(spec))
        [(_, result, _)] = engine.advance(spec.schedule.num_steps)
        assert result.loss_nats is not None
        return result.loss_nats, branch_state

    def measure_averages(self, spec: RunSpec) -> Iterator[tuple[int, dict[str, float]]]:
        """Train at a constant rate and yield, at each duration, the losses of several weights.

        These are the last weights, and the averages of the weights over each of `SPANS`.
        """
        constant = replace(
            spec,
            schedule=replace(spec.schedule, kind="constant", decay_steps=0, decay_shape="linear"),
        )
        engine = SingleTrialEngine(self.store, device="cpu")
        engine.admit(0, constant)
        means = {span: [p.detach().clone() for p in engine.model.parameters()] for span in SPANS}
        for step in range(1, max(DURATIONS)):
            engine.advance(1)
            weights = [p.detach() for p in engine.model.parameters()]
            for span, mean in means.items():
                torch._foreach_lerp_(mean, weights, min(1.0, 1 / (span * step)))
            if step + 1 in DURATIONS:
                averages = {
                    f"average over {span:g}": self._evaluate(engine, mean)
                    for span, mean in means.items()
                }
                yield step + 1, {"constant": self._evaluate(engine, weights), **averages}

    def _evaluate(self, engine: SingleTrialEngine, weights: list[torch.Tensor]) -> float:
        """Return the validation loss of other weights, and put the run's own weights back."""
        own_weights = [p.detach().clone() for p in engine.model.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(engine.model.parameters()), weights)
            ids_BT = read_validation_ids(self.store, BASE.seq_len)
            loss = torch.nn.functional.cross_entropy(
                engine.predict(ids_BT[:, :-1]), ids_BT[:, 1:].flatten()
            )
            torch._foreach_copy_(list(engine.model.parameters()), own_weights)
        return float(loss)


def compare_trunks(trainer: BranchTrainer, trunks: list[Trunk]) -> dict[str, Any]:
    """Train all runs of these trunks in both ways and return the comparison."""
    rows, flops = [], {"full": 0, "branches": 0}
    for trunk in trunks:
        states: dict[DecayShape, SlotState | None] = dict.fromkeys(DECAY_SHAPES)
        specs = {
            shape: [trainer.make_spec(trunk, steps, shape) for steps in DURATIONS]
            for shape in DECAY_SHAPES
        }
        for index, num_steps in enumerate(DURATIONS):
            row: dict[str, Any] = {"trunk": list(trunk), "num_steps": num_steps}
            for shape in DECAY_SHAPES:
                spec = specs[shape][index]
                row[shape], _ = trainer.train(spec)
                row[f"{shape} branch"], states[shape] = trainer.train(spec, states[shape])
            rows.append(row)
            print(row, flush=True)
        flops["full"] += sum(spec.flops for spec in specs["linear"])
        flops["branches"] += sum(compute_own_flops(specs["linear"]))
        for num_steps, losses in trainer.measure_averages(specs["linear"][-1]):
            row = next(
                row for row in rows if (row["trunk"], row["num_steps"]) == (list(trunk), num_steps)
            )
            row.update(losses)
    pairs = [
        (row[shape], row[f"{shape} branch"])
        for row in rows
        for shape in DECAY_SHAPES
        # The shortest run has no state to branch from
        if row["num_steps"] != DURATIONS[0]
    ]
    losses_by_duration = {
        num_steps: [row["linear"] for row in rows if row["num_steps"] == num_steps]
        for num_steps in DURATIONS
    }
    loss_names = [
        name for name in rows[0] if name not in ("trunk", "num_steps") and "branch" not in name
    ]
    return {
        "rows": rows,
        "num_pairs": len(pairs),
        "num_pairs_that_differ": sum(full != branch for full, branch in pairs),
        "largest_difference_nats": max(abs(full - branch) for full, branch in pairs),
        "flops": flops,
        "seed_sd_nats": {
            num_steps: statistics.stdev(losses[:NUM_SEEDS])
            for num_steps, losses in losses_by_duration.items()
            if len(losses) >= NUM_SEEDS
        },
        "over_linear_nats": {
            name: {
                num_steps: statistics.mean(
                    row[name] - row["linear"] for row in rows if row["num_steps"] == num_steps
                )
                for num_steps in DURATIONS
            }
            for name in loss_names
        },
    }


def main() -> None:
    """Tokenize Python's standard library, compare, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="Result file.")
    parser.add_argument(
        "--quick", action="store_true", help="Train one trunk, to show that the script runs."
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        trainer = BranchTrainer(store=write_python_corpus(Path(name)))
        result = compare_trunks(trainer, TRUNKS[: 1 if options.quick else None])
    result |= {
        "command": "python benchmarks/cpu/branches.py --json benchmarks/results/branches.json",
        "machine": describe_machine(),
    }
    write_result(options.json, result)
    print({name: result[name] for name in result if name != "rows"})


if __name__ == "__main__":
    main()
