"""Case for tests of the hook and the drills: a decision for a main run of a user's own trainer."""

import dataclasses
import sys
from pathlib import Path

from main_run import make_decision, make_spec
from planted_watch import MANIFEST

from forerun._launcher.main_run.frozen.frozen import OwnTrainer
from forerun._proxies.core.programs import PATH_PLACEHOLDERS, Command
from forerun._proxies.external.command import get_placeholder_values

TEMPLATE = sys.executable + (
    " hook_trainer.py --width {width} --base-width {base_width} --num-steps {num_steps}"
    " --warmup {warmup_steps} --seed {seed} --batch-sequences {batch_sequences}"
    " --seq-len {seq_len} --lr {lr} --wd {weight_decay} --eps {eps} --clip {clip_norm}"
    " --out {run_dir}"
)
"""Command of the trainer, with placeholders for the values of a run."""


def make_user_decision(mistake=""):
    """Return a decision for a main run of `hook_trainer.py`.

    Args:
        mistake: Name of the mistake that the trainer makes; empty for none.
    """
    template = TEMPLATE + (f" --mistake '{mistake}'" if mistake else "")
    command = Command(
        template=template,
        metrics_path="{run_dir}/metrics.jsonl",
        metrics_format="jsonl",
        train_loss_key="train_loss",
        validation_loss_key="val_loss",
        step_key="step",
        grad_norm_key="",
    )
    # Every gradient norm is above this clip norm.
    spec = dataclasses.replace(make_spec("data", eps=1e-6, clip_norm=1e-3), command=command)
    values = {
        name: value
        for name, value in get_placeholder_values(spec, Path(), None).items()
        if name not in PATH_PLACEHOLDERS
    }
    plain = make_decision(dataclasses.replace(spec, command=None), MANIFEST)
    return dataclasses.replace(plain, groups=(), own=OwnTrainer(command=command, values=values))
