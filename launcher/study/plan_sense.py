"""Whether a plan makes sense: what it names and is not there, what could lead to nothing, what would be unwise.

Nothing is run, no torch.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from launcher.plan.plan import Plan
from launcher.plan.study import Study
from launcher.study.first_plan import manifest_of
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.flops import flops_per_token
from proxies.data.tokens import MANIFEST, shard_problems
from proxies.external.command import CommandError, find_program

MOST_EPOCHS = 4.0
"""Repeated data are as good as new ones up to so many epochs (arXiv 2305.16264)."""
MOST_SHARE = 0.3
"""Proxies that take a larger share of the main run's FLOPs get a warning."""


def missing(plan: Plan, here: Path) -> list[str]:
    """What a plan in a folder names and is not there: corpus, program, module."""
    corpus, code_dir, problems = here / plan.data.path, here / plan.proxy.code_path, []
    if plan.data.path and not (corpus / MANIFEST).is_file():
        problems.append(
            f"data.path = {plan.data.path!r}: no corpus there; `forerun tokenize SOURCE... --out {corpus}` makes it"
        )
    with contextlib.suppress(SpecError):  # said already
        if plan.command is not None:
            try:
                find_program(shlex.split(plan.command.template)[0], code_dir)
            except CommandError as error:
                problems.append(f"proxy.command: {error}")
    module = plan.proxy.factory.partition(":")[0].partition(".")[0]
    if module and not any((code_dir / name).exists() for name in (module, f"{module}.py")) and not find_spec(module):
        problems.append(f"proxy.factory: no module {module} in {code_dir}, nor installed")
    manifest = manifest_of(plan, here)
    problems += [] if manifest is None else shard_problems(corpus, manifest)
    return problems


def problems(study: Study) -> list[str]:
    """What nothing can come of: each key with its value, what is wanted, and why."""
    plan, shape = study.plan, study.base_shape
    step = flops_per_token(shape) * plan.proxy.batch_tokens
    said = (
        f"target.budget_flops = {plan.target.budget_flops:g}: at least {step:.2g} is wanted, one step of the model "
        f"of width {shape.width}: with less there is no main run"
    )
    return [said] if plan.target.budget_flops < step else []


def warnings(study: Study, found: Mapping[str, Json]) -> list[str]:
    """What is unwise: another batch than the forecast's, too little data, proxies that cost too much, or teach little.

    `found` is what the plan comes to (`first_plan.summary`).
    """
    plan, said = study.plan, []
    batch = plan.ladder.batch_tokens or plan.proxy.batch_tokens
    if batch != plan.target_batch_tokens:
        said.append(
            f"target.batch_tokens = {plan.target_batch_tokens}: the ladder's batches have {batch} tokens, and the "
            "forecast is for those (ladder.batch_tokens)"
        )
    tokens, width = cast(float, found["tokens"]), cast(int, found["width"])
    share = cast(float, found["share_of_main_run"])
    there = study.manifest.num_tokens("train")
    if there and tokens > MOST_EPOCHS * there:
        said.append(
            f"the main run takes about {tokens:.3g} tokens and the corpus has {there:.3g}: {tokens / there:.1f} "
            f"epochs, and beyond {MOST_EPOCHS:g} repeated data are worth less than new ones (arXiv 2305.16264): more "
            "data, or a smaller target.budget_flops"
        )
    if share > MOST_SHARE:
        said.append(
            f"the proxies take {share:.2g} times the main run's FLOPs: worth it for what is learned, not for this run; "
            "a larger target.budget_flops, or a smaller preset"
        )
    if width < 2 * plan.proxy.base_width:
        said.append(
            f"the main run's guessed width is {width}, proxy.base_width {plan.proxy.base_width}: there is hardly "
            "anything to transfer; a larger target.budget_flops, or a smaller preset"
        )
    return said
