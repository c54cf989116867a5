"""Helpers that compare another trainer with forerun's embedded trainer: first weights and logits,
losses, and gradient norms.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export_case import SHAPE, make_wide_decision
from trainer_venv import build_torchrun_command

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import Decision, assign_groups
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.data.tokens import Manifest
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.parametrization.parametrization import draw_tensor

# Both trainers compute in float32 with different kernels, so their results differ by rounding.
LOGITS_TOLERANCE = 3e-6
"""Largest difference of a logit, relative to the largest logit."""
LOSS_TOLERANCE_NATS = 1e-5
NORM_TOLERANCE = 1e-4
"""Largest difference of a step's gradient norm."""

GROWING_BATCH = Schedule(
    kind="cosine",
    num_steps=12,
    warmup_steps=3,
    final_fraction=0.1,
    batch_warmup_steps=4,
    batch_warmup_stages=2,
)


def make_varied_decision(manifest: Manifest, **changes: Any) -> Decision:
    """Return a decision in which no forward multiplier is one and attention's is not
    1 / sqrt(head dim).
    """
    decision = make_wide_decision(manifest, **changes)
    return dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, attention=0.2, residual=0.6)
    )


def make_tied_changes(manifest: Manifest) -> dict[str, Any]:
    """Return the changes that give a decision one matrix for embedding and readout."""
    groups = [g for g in make_wide_decision(manifest).groups if g.kind != "readout"]
    return {"shape": dataclasses.replace(SHAPE, tied=True), "groups": tuple(groups)}


def run_first_pass(
    decision: Decision, ids_BT: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the embedded trainer's first weights by name, and the logits they give."""
    model = Decoder(decision.shape)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, group in assign_groups(decision.groups, [*named]).items():
            size = tuple(named[name].shape)
            named[name].copy_(draw_tensor(name, size, group.kind, group.init_std, decision.seed))
        logits = model(
            torch.from_numpy(ids_BT), Multipliers(**dataclasses.asdict(decision.forward))
        ).numpy()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, logits


def measure_logit_difference(logits: np.ndarray, reference_logits: np.ndarray) -> float:
    """Return the largest difference of two trainers' logits, relative to the largest logit."""
    return float(
        np.abs(logits.reshape(reference_logits.shape) - reference_logits).max()
        / np.abs(reference_logits).max()
    )


def train_natively(decision: Decision, folder: Path, corpus: Path) -> np.ndarray:
    """Train one rank with the embedded trainer; return steps, losses, gradient norms, tokens."""
    config = write_launch(folder / "frozen", decision)
    process = subprocess.run(
        [
            *build_torchrun_command(Path(sys.executable), 1),
            "-m",
            "forerun._launcher.main_run.trainer",
            "--config",
            config,
            "--data",
            corpus,
            "--out",
            folder / "run",
            "--allow-world-size",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return build_curve(
        [row for row in metrics_file.read_lines(folder / "run") if "event" not in row]
    )


def build_curve(rows: list[dict[str, Any]]) -> np.ndarray:
    """Return step, loss, gradient norm and tokens of every logged row."""
    return np.array(
        [[row["step"], row["train_loss_nats"], row["grad_norm"], row["tokens"]] for row in rows]
    )


def assert_same_run(curve: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Assert that two curves of `build_curve` have the same twelve steps and tokens.

    Losses and gradient norms must agree within the tolerances.
    """
    assert curve.shape == expected.shape
    assert len(curve) == 12
    differences = np.abs(curve - expected).max(axis=0)
    step_difference, loss_difference_nats, norm_difference, *token_difference = differences
    assert step_difference == 0, name
    assert not any(token_difference), name
    assert loss_difference_nats < LOSS_TOLERANCE_NATS, name
    assert norm_difference < NORM_TOLERANCE, name
