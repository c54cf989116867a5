"""Tests of Muon in other projects' trainers.

Their parameter groups must have the frozen numbers, and they must train like the embedded trainer.
"""

import dataclasses

import huggingface_case
import huggingface_live_case as in_huggingface
import numpy as np
import olmo_core_live_case as in_olmo_core
import pytest
import torchtitan_live_case as in_torchtitan
from export_case import make_wide_decision
from live_case import LOSS_TOLERANCE_NATS, NORM_TOLERANCE, train_natively
from trainer_venv import require_interpreter

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.registry import load_exporter
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.data.tokens import Manifest


def train_in_huggingface(python, export_dir, corpus, *, num_ranks):
    """Train an export in transformers; return the process and the curve of its steps."""
    process = huggingface_case.train_export(python, export_dir, corpus, num_ranks=num_ranks)
    assert process.returncode == 0, process.stderr[-3000:]
    return process, in_huggingface.read_history(export_dir)


TRAIN_EXPORT = {
    "torchtitan": in_torchtitan.train_export,
    "olmo-core": in_olmo_core.train_export,
    "huggingface": train_in_huggingface,
}
"""Function that trains an export, by trainer. It returns the process, and the step, loss, and
gradient norm of each step."""


def make_muon_decision(manifest: Manifest, muon_rate: str) -> Decision:
    """Return a decision of two ranks with Muon; `muon_rate` names a rule of its learning rates."""
    rules = get_parametrization("mup", muon_rate=muon_rate)
    return make_wide_decision(
        manifest,
        optimizer="muon",
        parametrization=rules,
        parallelism=Parallelism(data_parallel_shard=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("muon_rate", ["original", "unit_rms"])
@pytest.mark.parametrize("trainer", TRAIN_EXPORT)
def test_groups_of_each_trainer_have_the_frozen_numbers(manifest, trainer, muon_rate):
    decision = make_muon_decision(manifest, muon_rate)
    version = load_exporter(trainer).VERSIONS[-1]
    assert proof.prove(decision, trainer, version, require_interpreter(trainer)) == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAIN_EXPORT)
def test_two_ranks_train_like_the_embedded_trainer(tmp_path, corpus, manifest, trainer):
    python, decision = require_interpreter(trainer), make_muon_decision(manifest, "original")
    load_exporter(trainer).export(decision, tmp_path, load_exporter(trainer).VERSIONS[-1])
    process, rows = TRAIN_EXPORT[trainer](python, tmp_path, corpus, num_ranks=2)
    assert process.returncode == 0, process.stderr[-3000:]
    one_rank = dataclasses.replace(decision, parallelism=Parallelism(data_parallel_shard=1))
    expected = train_natively(one_rank, tmp_path, corpus)
    # The columns are step, loss, and gradient norm.
    differences = np.abs(np.array(rows)[:, :3] - expected[:, :3]).max(axis=0)
    step_difference, loss_difference_nats, norm_difference = differences
    assert step_difference == 0
    assert loss_difference_nats < LOSS_TOLERANCE_NATS
    assert norm_difference < NORM_TOLERANCE
