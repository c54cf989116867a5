"""Muon in other people's trainers: their groups hold the frozen numbers, and they train the
embedded trainer's run.
"""

import dataclasses

import numpy as np
import pytest
import test_huggingface_live as in_huggingface
import test_olmo_core_live as in_olmo_core
import test_torchtitan_live as in_torchtitan
from export_case import wide_decision
from live_case import LOSS_TOLERANCE_NATS, NORM_TOLERANCE, native
from trainer_venv import interpreter

from launcher.exporters import proof
from launcher.exporters.fidelity import exporter
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.rules import named
from proxies.data.tokens import Manifest

TRAINERS = ("torchtitan", "olmo-core", "huggingface")


def muon(manifest: Manifest, rate: str) -> Decision:
    rules = named("mup", muon_rate=rate)
    return wide_decision(
        manifest,
        optimizer="muon",
        parametrization=rules,
        parallelism=Parallelism(data_parallel_shard=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["original", "unit_rms"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_trainers_own_groups_hold_the_frozen_numbers(manifest, trainer, rate):
    decision, version = muon(manifest, rate), exporter(trainer).VERSIONS[-1]
    assert proof.prove(decision, trainer, version, interpreter(trainer)) == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_ranks_train_the_embedded_trainers_run(tmp_path, corpus, manifest, trainer):
    python, decision = interpreter(trainer), muon(manifest, "original")
    exporter(trainer).export(decision, tmp_path, exporter(trainer).VERSIONS[-1])
    if trainer == "huggingface":
        done = in_huggingface.trained(python, tmp_path, corpus, 2)
        assert done.returncode == 0, done.stderr[-3000:]
        found = in_huggingface.history(tmp_path)
    elif trainer == "olmo-core":
        done, found = in_olmo_core.trained(python, tmp_path, corpus, 2)
    else:
        done, rows = in_torchtitan.trained(python, tmp_path, corpus, 2)
        found = np.array(rows)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = dataclasses.replace(decision, parallelism=Parallelism(data_parallel_shard=1))
    apart = np.abs(found[:, :3] - native(alone, tmp_path, corpus)[:, :3]).max(axis=0)
    print(
        f"{trainer}: losses within {apart[1]:.1e} nats of the embedded trainer's, norms within "
        f"{apart[2]:.1e}"
    )
    assert apart[0] == 0
    assert apart[1] < LOSS_TOLERANCE_NATS
    assert apart[2] < NORM_TOLERANCE
