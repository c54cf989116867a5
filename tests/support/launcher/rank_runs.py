"""A program that trains all runs of two ranks that the trainer's tests look at.

    torchrun --nproc-per-node 2 rank_runs.py CORPUS OUT

The fixture `two_rank_runs` starts the program once, because starting torchrun takes as long as the
runs. The folder OUT/NAME/run has the files of a run. OUT/NAME/drawn-RANK.json lists the parameters
whose initial values a rank drew. OUT/exchanged.json has the number of gradient exchanges of some
runs, and OUT/reference.json the reference values of the layer telemetry.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from hook_ranks import FlippingTrainer, ReferenceTelemetry, slow_down
from main_run import make_decision, make_muon_spec, make_spec_with_all_choices, make_tiny_decision
from spike_case import PoisonedStore, make_spike_decision

from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.frozen.run_policies import Monitoring
from forerun._launcher.main_run.trainer import model_builder
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.replay import RecordingReduceScatter
from forerun._launcher.main_run.trainer.training import Trainer, run
from forerun._proxies.data.tokens import read_manifest

REFERENCES = {"monitored": ReferenceTelemetry(), "muon": ReferenceTelemetry()}
"""Callbacks that compute the reference values of the layer telemetry, by the run's name."""
EXCHANGED = {}
"""Recorded gradient exchanges between the ranks, by the name of the run."""
all_reduce = dist.all_reduce
"""The original function, which `build_counting` replaces."""
DRAWN = []
"""Names of the parameters whose initial values this rank has drawn."""
CUT = 6
"""Step at which a cut run stops once; its folder is then copied to `cut`."""


def build_with_reference(name, decision, store, run_dir, interrupted, *, slow_rank=None, **_):
    """Build a trainer with the reference callback of the run `name`, and make one rank slow."""
    trainer = Trainer(decision, store, run_dir, interrupted, (REFERENCES[name],))
    if trainer.rank == slow_rank:
        slow_down(trainer)
    return trainer


def build_poisoned(decision, store, run_dir, interrupted, **_):
    """Build a trainer whose loss spikes."""
    return Trainer(decision, PoisonedStore(store), run_dir, interrupted)


def draw_and_record(name, *args, draw_tensor=model_builder.draw_tensor):
    """Draw the initial value of a parameter, and record that this rank has drawn it."""
    DRAWN.append(name)
    return draw_tensor(name, *args)


class CountingReduceScatter(RecordingReduceScatter):
    """A reduce-scatter that adds the shape of each exchanged gradient to a list."""

    def __init__(self, model, exchanges):
        super().__init__(model)
        self.exchanges = exchanges

    def __call__(self, output_tensor, input_tensor, *args, **options):
        self.exchanges.append(input_tensor.shape)
        return super().__call__(output_tensor, input_tensor, *args, **options)


def build_counting(name, *args, **options):
    """Build a trainer that records its gradient exchanges in `EXCHANGED`.

    Replicas exchange gradients by all-reduces, and shards by reduce-scatters.
    """
    trainer = Trainer(*args, **options)
    EXCHANGED[name] = exchanges = []

    def record_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **kwargs):
        # With MAX, the trainer exchanges exit codes.
        if op != dist.ReduceOp.MAX and group is not None:
            exchanges.append(tensor.shape)
        return all_reduce(tensor, op, group, **kwargs)

    if trainer.decision.parallelism.data_parallel_replicate > 1:
        dist.all_reduce = record_all_reduce
    else:
        trainer.recorder = CountingReduceScatter(trainer.model, exchanges)
    return trainer


class TwoRankRun(NamedTuple):
    """A run of two ranks."""

    decision: Decision
    build: Callable[..., Trainer] = Trainer
    """Function that builds the trainer of a rank."""
    is_cut: bool = False
    """Whether the run stops once at step `CUT`, and then resumes."""


def list_runs(corpus):
    """Return the runs by name."""
    tiny = make_tiny_decision(corpus, num_ranks=2)
    muon = make_decision(make_muon_spec(corpus), read_manifest(corpus), num_ranks=2)
    monitoring = Monitoring(layers_every_steps=5, replay_every_steps=2, validate_every_steps=6)
    monitored = dataclasses.replace(tiny, monitoring=monitoring)
    microbatches = {"microbatch_sequences": 1}
    replicas = {"data_parallel_shard": 1, "data_parallel_replicate": 2}
    layouts = {
        "microbatches": Parallelism(data_parallel_shard=2, **microbatches),
        "replicas with microbatches": Parallelism(**replicas, **microbatches),
        "replicas": Parallelism(**replicas),
    }
    return {
        **{
            name: TwoRankRun(
                dataclasses.replace(tiny, parallelism=layout), partial(build_counting, name)
            )
            for name, layout in layouts.items()
        },
        "plain": TwoRankRun(tiny),
        "cut": TwoRankRun(tiny, is_cut=True),
        "no default choice": TwoRankRun(
            make_decision(make_spec_with_all_choices(corpus), read_manifest(corpus), num_ranks=2)
        ),
        "monitored": TwoRankRun(monitored, partial(build_with_reference, "monitored", slow_rank=1)),
        "muon": TwoRankRun(
            dataclasses.replace(muon, monitoring=Monitoring(layers_every_steps=5)),
            partial(build_with_reference, "muon"),
            is_cut=True,
        ),
        "flipped bit": TwoRankRun(monitored, FlippingTrainer),
        "rolled back": TwoRankRun(make_spike_decision(corpus, num_ranks=2), build_poisoned),
    }


def main():
    corpus, out = map(Path, sys.argv[1:])
    model_builder.draw_tensor = draw_and_record
    for name, (decision, build, is_cut) in list_runs(corpus).items():
        config = out / name / "frozen" / decision.digest / "launch.json"
        if dist.get_rank() == 0:
            write_launch(out / name / "frozen", decision)
        dist.barrier()
        options = RunOptions(config=config, data=corpus, out=out / name / "run")
        if is_cut:
            run(dataclasses.replace(options, stop_after=CUT), build=build)
            if dist.get_rank() == 0:
                shutil.copytree(out / name / "run", out / name / "cut")
            dist.barrier()
        DRAWN.clear()
        run(options, build=build)
        dist.all_reduce = all_reduce
        (out / name / f"drawn-{dist.get_rank()}.json").write_text(json.dumps(DRAWN))
    if dist.get_rank() == 0:
        num_exchanges = {name: len(exchanges) for name, exchanges in EXCHANGED.items()}
        (out / "exchanged.json").write_text(json.dumps(num_exchanges))
        (out / "reference.json").write_text(
            json.dumps({name: reference.measured for name, reference in REFERENCES.items()})
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
