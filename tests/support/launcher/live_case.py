"""Cases and helpers for tests that compare another trainer with forerun's embedded trainer: first
weights and logits, losses, and gradient norms.
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
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism, assign_groups
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCase:
    """A run of twelve steps that another trainer must train like the embedded trainer."""

    parallelism: Parallelism
    schedule: Schedule = GROWING_BATCH
    is_tied: bool = False
    """Whether embedding and readout share one matrix."""
    is_resumed: bool = False
    """Whether the run loses its last checkpoint, and is then resumed from the one before."""

    def make_decision(self, manifest: Manifest) -> Decision:
        """Return the decision of the run."""
        changes = make_tied_changes(manifest) if self.is_tied else {}
        return make_varied_decision(
            manifest, schedule=self.schedule, parallelism=self.parallelism, **changes
        )


def make_varied_decision(manifest: Manifest, **changes: Any) -> Decision:
    """Return a decision in which no forward multiplier has its usual value.

    The usual value of the attention multiplier is 1 / sqrt(head dim). The others are usually 1.
    """
    decision = make_wide_decision(manifest, **changes)
    return dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, attention=0.2, residual=0.6)
    )


def make_tied_changes(manifest: Manifest) -> dict[str, Any]:
    """Return changes for `make_varied_decision` that tie the readout to the embedding."""
    groups = [g for g in make_wide_decision(manifest).groups if g.kind != "readout"]
    return {"shape": dataclasses.replace(SHAPE, tied=True), "groups": tuple(groups)}


def run_first_pass(
    decision: Decision, ids_BT: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the embedded trainer's initial weights by name, and the logits of token ids."""
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
    """Train a decision on one rank of the embedded trainer; return the curve of `build_curve`."""
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
    """Return the step, loss, gradient norm, and tokens of each logged row, [steps, 4]."""
    return np.array(
        [[row["step"], row["train_loss_nats"], row["grad_norm"], row["tokens"]] for row in rows]
    )


def assert_same_run(curve: np.ndarray, expected: np.ndarray) -> None:
    """Assert that two curves describe the same run of twelve steps.

    Steps and tokens must be equal. Losses and gradient norms must agree within the tolerances. The
    curves are those of `build_curve`, with or without the column of tokens.
    """
    assert curve.shape == expected.shape
    assert len(curve) == 12
    differences = np.abs(curve - expected).max(axis=0)
    step_difference, loss_difference_nats, norm_difference, *token_difference = differences
    assert step_difference == 0
    assert not any(token_difference)
    assert loss_difference_nats < LOSS_TOLERANCE_NATS
    assert norm_difference < NORM_TOLERANCE
