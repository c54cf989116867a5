"""Runs of two ranks, one after the other under one torchrun: its start costs as much as they do.
See `two_ranks`.

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

import pytest
import torch.distributed as dist
from care_case import Poisoned, care_decision
from care_ranks import Flipping, Ruler, slowed
from main_run import all_choices, by_muon, decision_of, tiny_decision

from launcher.base.policy import Monitoring
from launcher.frozen.frozen import Parallelism
from launcher.frozen.launch_file import write_launch
from launcher.trainer import assembly, passes
from launcher.trainer.rank import RankOptions, run
from launcher.trainer.replay import RecordingReduceScatter
from launcher.trainer.training import Trainer
from proxies.data.tokens import read_manifest

RULERS = {"watched": Ruler(), "muon": Ruler()}
EXCHANGED = {}
"""What went through the exchanges of a run that accumulates, by the run's name."""
MAX, all_reduce = dist.ReduceOp.MAX, dist.all_reduce
DRAWN = []
"""Names of the parameters whose initial values this rank has drawn."""
CUT = 6
"""Where those that are cut stop once, and their folder is copied to `cut`."""


def ruled(name, decision, store, run_dir, interrupted, **_):
    """With a ruler; and, watched, with one rank that is slow."""
    trainer = Trainer(decision, store, run_dir, interrupted, (RULERS[name],))
    if trainer.rank == 1 and name == "watched":
        slowed(trainer)
    return trainer


def poisoned(decision, store, run_dir, interrupted, **_):
    return Trainer(decision, Poisoned(store), run_dir, interrupted)


def drawing(name, *given, drawn=assembly.drawn):
    DRAWN.append(name)
    return drawn(name, *given)


def counting(name, *given, **places):
    """Counts exchanges of gradients, of replicas where there are some; by `split` no rank has room
    for a whole one.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("split"):
            patch.setattr(passes, "_device_bytes", lambda: 0.0)
        trainer = Trainer(*given, **places)
    EXCHANGED[name] = heard = []
    if "replicas" in name:
        dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, **how: (
            heard.extend([tensor] * (op != MAX and group is not None)),
            all_reduce(tensor, op, group, **how),
        )[-1]
    else:
        RecordingReduceScatter.of(trainer.model).heard = heard
    return trainer


def runs_of(corpus):
    """By name: the decision, what builds its trainer, and whether it is cut."""
    tiny = tiny_decision(corpus, num_ranks=2)
    muon = decision_of(by_muon(corpus), read_manifest(corpus), num_ranks=2)
    watched = Monitoring(layers_every_steps=5, replay_every_steps=2, validate_every_steps=6)
    watched = dataclasses.replace(tiny, monitoring=watched)
    small, replicas = (
        {"microbatch_sequences": 1},
        {"data_parallel_shard": 1, "data_parallel_replicate": 2},
    )
    layouts = {
        "small": Parallelism(data_parallel_shard=2, **small),
        "split": Parallelism(data_parallel_shard=2, **small),
        "split replicas": Parallelism(**replicas, **small),
        "replicas": Parallelism(**replicas),
    }
    return {
        **{
            name: (dataclasses.replace(tiny, parallelism=layout), partial(counting, name), False)
            for name, layout in layouts.items()
        },
        "plain": (tiny, Trainer, False),
        "cut": (tiny, Trainer, True),
        "choices": (
            decision_of(all_choices(corpus), read_manifest(corpus), num_ranks=2),
            Trainer,
            False,
        ),
        "watched": (watched, partial(ruled, "watched"), False),
        "muon": (
            dataclasses.replace(muon, monitoring=Monitoring(layers_every_steps=5)),
            partial(ruled, "muon"),
            True,
        ),
        "flipped": (watched, Flipping, False),
        "back": (care_decision(corpus, num_ranks=2), poisoned, False),
    }


def main():
    corpus, out = map(Path, sys.argv[1:])
    assembly.drawn = drawing
    for name, (decision, build, is_cut) in runs_of(corpus).items():
        config = out / name / "frozen" / decision.digest / "launch.json"
        if dist.get_rank() == 0:
            write_launch(out / name / "frozen", decision)
        dist.barrier()
        options = RankOptions(config=config, data=corpus, out=out / name / "run")
        if is_cut:
            run(dataclasses.replace(options, stop_after=CUT), build=build)
            if dist.get_rank() == 0:
                shutil.copytree(out / name / "run", out / name / "cut")
            dist.barrier()
        DRAWN.clear()
        run(options, build=build)
        (out / name / f"drawn-{dist.get_rank()}.json").write_text(json.dumps(DRAWN))
    if dist.get_rank() == 0:
        told = {name: len(heard) for name, heard in EXCHANGED.items()}
        (out / "exchanged.json").write_text(json.dumps(told))
        (out / "ruler.json").write_text(
            json.dumps({name: ruler.measured for name, ruler in RULERS.items()})
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
