"""The embedded trainer's side of a trainer's own run: first weights and logits, losses and gradient
norms.
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
from export_case import SHAPE, wide_decision
from trainer_venv import torchrun

from launcher.base import metrics
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import write_launch
from launcher.trainer import assembly
from proxies.core.schedule import Schedule
from proxies.data.tokens import Manifest
from proxies.model.decoder import Decoder, Multipliers

# Float32 on both sides, through other kernels. Logits: as a share of the largest.
LOGITS_TOLERANCE = 3e-6
LOSS_TOLERANCE_NATS = 1e-5
NORM_TOLERANCE = 1e-4

GROWING_BATCH = Schedule(
    kind="cosine",
    num_steps=12,
    warmup_steps=3,
    final_fraction=0.1,
    batch_warmup_steps=4,
    batch_warmup_stages=2,
)


def varied(manifest: Manifest, **changes: Any) -> Decision:
    """A decision in which no forward multiplier is one, and attention's is not 1 / sqrt(head
    dim).
    """
    decision = wide_decision(manifest, **changes)
    return dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, attention=0.2, residual=0.6)
    )


def tied(manifest: Manifest) -> dict[str, Any]:
    """What of a decision changes with one matrix for embedding and readout."""
    groups = [g for g in wide_decision(manifest).groups if g.kind != "readout"]
    return {"shape": dataclasses.replace(SHAPE, tied=True), "groups": tuple(groups)}


def first_pass(decision: Decision, ids_BT: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The embedded trainer's first weights by name, and the logits they give."""
    model = Decoder(decision.shape)
    assembly.initialize(model, decision.groups, decision.seed)
    with torch.no_grad():
        logits = model(
            torch.from_numpy(ids_BT), Multipliers(**dataclasses.asdict(decision.forward))
        ).numpy()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, logits


def share_apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference of two trainers' logits, as a share of the largest."""
    return float(np.abs(ours.reshape(theirs.shape) - theirs).max() / np.abs(theirs).max())


def native(decision: Decision, folder: Path, corpus: Path) -> np.ndarray:
    """The embedded trainer's steps, losses, gradient norms and tokens, on one rank."""
    config = write_launch(folder / "frozen", decision)
    done = subprocess.run(
        [
            *torchrun(Path(sys.executable), 1),
            "-m",
            "launcher.trainer",
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
    assert done.returncode == 0, done.stderr[-3000:]
    return curve([row for row in metrics.read(folder / "run") if "event" not in row])


def curve(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array(
        [[row["step"], row["train_loss_nats"], row["grad_norm"], row["tokens"]] for row in rows]
    )


def assert_same_run(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Twelve steps with the same losses and norms within the tolerances, and all else equal."""
    assert found.shape == wanted.shape
    assert len(found) == 12
    apart = np.abs(found - wanted).max(axis=0)
    print(
        f"{name}: losses within {apart[1]:.1e} nats of the embedded trainer's, norms within "
        f"{apart[2]:.1e}"
    )
    assert apart[0] == 0
    assert (apart[3:] == 0).all()
    assert apart[1] < LOSS_TOLERANCE_NATS
    assert apart[2] < NORM_TOLERANCE
