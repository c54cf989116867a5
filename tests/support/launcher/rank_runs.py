"""A program that trains the two-rank cases of the trainer's tests one after the other, because
starting torchrun costs as much as the runs. The fixture `two_rank_runs` starts it.

torchrun --nproc-per-node 2 rank_runs.py CORPUS OUT
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from hook_ranks import FlippingTrainer, ReferenceTelemetry, slow_down
from main_run import make_decision, make_muon_spec, make_spec_with_all_choices, make_tiny_decision
from spike_case import PoisonedStore, make_spike_decision

from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.frozen.run_policies import Monitoring
from forerun._launcher.main_run.trainer import model_builder
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.replay import RecordingReduceScatter
from forerun._launcher.main_run.trainer.training import Trainer, run
from forerun._proxies.data.tokens import read_manifest

REFERENCES = {"watched": ReferenceTelemetry(), "muon": ReferenceTelemetry()}
"""Callbacks that compute the reference values of the layer telemetry, by the run's name."""
EXCHANGED = {}
"""Recorded gradient exchanges between the ranks, by the name of the run."""
# The original function. With MAX, the trainer exchanges exit codes, not gradients.
all_reduce, MAX = dist.all_reduce, dist.ReduceOp.MAX
DRAWN = []
"""Names of the parameters whose initial values this rank has drawn."""
CUT = 6
"""Step at which a cut run stops once; its folder is then copied to `cut`."""


def build_with_reference(name, decision, store, run_dir, interrupted, **_):
    """Build a trainer with its reference callback; for the run "watched", make rank 1 slow."""
    trainer = Trainer(decision, store, run_dir, interrupted, (REFERENCES[name],))
    if trainer.rank == 1 and name == "watched":
        slow_down(trainer)
    return trainer


def build_poisoned(decision, store, run_dir, interrupted, **_):
    return Trainer(decision, PoisonedStore(store), run_dir, interrupted)


def draw_and_record(name, *args, draw_tensor=model_builder.draw_tensor):
    DRAWN.append(name)
    return draw_tensor(name, *args)


class CountingReduceScatter(RecordingReduceScatter):
    """A reduce-scatter that records its calls in a list."""

    def __init__(self, model, exchanges):
        super().__init__(model)
        self.exchanges = exchanges

    def __call__(self, output_tensor, input_tensor, *args, **options):
        self.exchanges.append(input_tensor.shape)
        return super().__call__(output_tensor, input_tensor, *args, **options)


def build_counting(name, *args, **options):
    """Build a trainer that records its gradient exchanges.

    Replicas exchange gradients by all-reduces, and shards by reduce-scatters.
    """
    trainer = Trainer(*args, **options)
    EXCHANGED[name] = exchanges = []

    def record_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **kwargs):
        if op != MAX and group is not None:
            exchanges.append(tensor)
        return all_reduce(tensor, op, group, **kwargs)

    if "replicas" in name:
        dist.all_reduce = record_all_reduce
    else:
        trainer.recorder = CountingReduceScatter(trainer.model, exchanges)
    return trainer


def list_runs(corpus):
    """Return the runs by name.

    Each has its decision, the function that builds its trainer, and whether it stops once at step
    CUT and then resumes.
    """
    tiny = make_tiny_decision(corpus, num_ranks=2)
    muon = make_decision(make_muon_spec(corpus), read_manifest(corpus), num_ranks=2)
    monitoring = Monitoring(layers_every_steps=5, replay_every_steps=2, validate_every_steps=6)
    watched = dataclasses.replace(tiny, monitoring=monitoring)
    small = {"microbatch_sequences": 1}
    replicas = {"data_parallel_shard": 1, "data_parallel_replicate": 2}
    layouts = {
        "small": Parallelism(data_parallel_shard=2, **small),
        "small replicas": Parallelism(**replicas, **small),
        "replicas": Parallelism(**replicas),
    }
    return {
        **{
            name: (
                dataclasses.replace(tiny, parallelism=layout),
                partial(build_counting, name),
                False,
            )
            for name, layout in layouts.items()
        },
        "plain": (tiny, Trainer, False),
        "cut": (tiny, Trainer, True),
        "choices": (
            make_decision(make_spec_with_all_choices(corpus), read_manifest(corpus), num_ranks=2),
            Trainer,
            False,
        ),
        "watched": (watched, partial(build_with_reference, "watched"), False),
        "muon": (
            dataclasses.replace(muon, monitoring=Monitoring(layers_every_steps=5)),
            partial(build_with_reference, "muon"),
            True,
        ),
        "flipped": (watched, FlippingTrainer, False),
        "back": (make_spike_decision(corpus, num_ranks=2), build_poisoned, False),
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
