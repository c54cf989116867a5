"""Checks of a plan before anything runs: problems (missing files, and values from which no main run
can result), and warnings (gates that cannot pass, and unwise values).

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from forerun._launcher.main_run.estimates.layout import find_layout_problems, read_parallelism
from forerun._launcher.study.calibration.study_cost import plan_main_run
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.problems import count_law_parameters
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.first_plan import find_manifest
from forerun._launcher.study.stages.gates import warn_of_data
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._proxies.core.notation import format_counted, format_factor, format_main_run_share
from forerun._proxies.data.tokens import MANIFEST, describe_missing_corpus, find_corpus_problems
from forerun._proxies.external.command import CommandError, find_program
from forerun._scaling_fits.forecast.conclusive import FARTHEST_REACH
from forerun._scaling_fits.laws.forms import MIN_POINTS

MAX_SHARE = 0.3
"""Maximum share of the main run's FLOPs that proxies may take without a warning."""


def find_missing_files(plan: Plan, here: Path) -> list[str]:
    """Return a problem for each file that a plan in the folder `here` names and that does not
    exist: its corpus, its program, or its module.
    """
    corpus, code_dir, problems = here / plan.data.path, here / plan.proxy.code_path, []
    if plan.data.path and not (corpus / MANIFEST).exists():
        problems.append(f"data.path = {plan.data.path!r}: {describe_missing_corpus(corpus)}")
    with contextlib.suppress(SpecError):  # the plan's own checks report it
        if plan.command is not None:
            try:
                find_program(shlex.split(plan.command.template)[0], code_dir)
            except CommandError as error:
                problems.append(f"proxy.command: {error}")
    module = plan.proxy.factory.partition(":")[0].partition(".")[0]
    if (
        module
        and not any((code_dir / name).exists() for name in (module, f"{module}.py"))
        and not find_spec(module)
    ):
        problems.append(f"proxy.factory: no module {module} in {code_dir}, nor installed")
    manifest = find_manifest(plan, here)
    problems += [] if manifest is None else find_corpus_problems(corpus, manifest)
    return problems


def find_problems(study: Study) -> list[str]:
    """Return a problem for each value from which no main run can result, with its key and limit."""
    plan, shape = study.plan, study.base_shape
    step_flops = compute_flops_per_token(shape) * plan.proxy.batch_tokens
    problem = (
        f"target.budget_flops = {plan.target.budget_flops:g}: must be at least {step_flops:.2g}, "
        f"one step of the model of width {shape.width}"
    )
    return [problem] if plan.target.budget_flops < step_flops else []


def find_warnings(study: Study, plan_summary: Mapping[str, Json]) -> list[str]:
    """Return warnings about a plan: a batch size for which the forecast does not hold,
    hyperparameters that are not searched, too little data, proxies that cost too much or teach
    little, and gates that cannot pass.

    Args:
        study: Study of the plan.
        plan_summary: Summary of the plan, from `first_plan.summarize_plan`.
    """
    plan, notes = study.plan, []
    if plan.ladder_batch_tokens != plan.target_batch_tokens:
        notes.append(
            f"target.batch_tokens = {plan.target_batch_tokens}: the ladder's batches have "
            f"{plan.ladder_batch_tokens} tokens, and the forecast is for those "
            "(ladder.batch_tokens)"
        )
    notes += [
        f"{name} is not searched: proxy.command has no "
        f"{{{get_hyperparameter(name).placeholder_name}}}"
        for name in plan.not_searched
    ]
    tokens, width = cast(float, plan_summary["tokens"]), cast(int, plan_summary["width"])
    share = cast(float, plan_summary["share_of_main_run"])
    notes += filter(None, [warn_of_data(study, tokens)])
    if share > MAX_SHARE:
        notes.append(
            f"the proxies cost {format_main_run_share(share)}, too much for this run alone; use a "
            "larger target.budget_flops or a smaller preset"
        )
    notes += [
        *_explain_model_gates(study),
        *_explain_ladder_gates(study),
        *_find_layout_problems(study),
    ]
    if width < 2 * plan.proxy.base_width:
        notes.append(
            f"the main run's guessed width is {width}, proxy.base_width {plan.proxy.base_width}: "
            "there is hardly anything to transfer; use a larger target.budget_flops or a smaller "
            "preset"
        )
    return notes


def _explain_model_gates(study: Study) -> Iterator[str]:
    """Yield the reasons why the gates of the model and its data cannot pass."""
    proxy, accept = study.plan.proxy, "`forerun freeze --accept {} --reason TEXT`"
    if proxy.command:
        yield (
            "gates coordinates and data: forerun sees neither the activations of a command nor its "
            "data, so both gates will say 'cannot tell'; check them in your trainer, then use "
            f"{accept.format('coordinates --accept data')}"
        )
    elif proxy.parametrization == "sp":
        yield (
            "gate coordinates: proxy.parametrization = 'sp' does not keep the size of activations "
            "over width, so the gate will fail; use another parametrization, or "
            f"{accept.format('coordinates')}"
        )


def _explain_ladder_gates(study: Study) -> Iterator[str]:
    """Yield the reasons why the gates of the ladder cannot pass: too few rungs, too small ones, or
    none that is checked.
    """
    plan, ladder, shapes = study.plan, study.plan.ladder, study.ladder_shapes
    tokens = [plan.count_tokens(steps, plan.ladder_batch_tokens) for steps in ladder.num_steps]
    num_rungs = len(shapes) * len(tokens)
    needed = MIN_POINTS if ladder.form in ("auto", "compute") else count_law_parameters(plan) + 1
    if (num_rungs - 1) * ladder.num_seeds < needed:
        yield (
            f"gate fit: with {format_counted(num_rungs, 'rung')} the largest one cannot be held "
            f"out, so the gate will say 'cannot tell'; at least {needed + 1} rungs are needed "
            "(ladder.widths, ladder.num_steps)"
        )
    reach = plan.target.budget_flops / (6.0 * max(map(study.count_params, shapes)) * max(tokens))
    if reach > FARTHEST_REACH:
        yield (
            f"gate fit: target.budget_flops is {format_factor(reach)} times the largest rung's "
            f"FLOPs, and no forecast is trusted beyond {FARTHEST_REACH:g} times, so the gate will "
            "say 'cannot tell'; add larger rungs (ladder.widths, ladder.num_steps)"
        )
    flops = [compute_flops_per_token(shape) * count for shape in shapes for count in tokens]
    if not ladder.check_offsets_octaves:
        yield (
            "gate ladder_tuned: ladder.check_offsets_octaves is empty, so no rung is checked at "
            "other rates and the gate will say 'cannot tell'"
        )
    elif min(flops) > ladder.check_share * sum(flops):
        yield (
            f"gate ladder_tuned: ladder.check_share = {ladder.check_share:g} pays for no rung (the "
            f"cheapest is {min(flops) / sum(flops):.2g} of the ladder), so none is checked at "
            "other rates and the gate will say 'cannot tell'; raise ladder.check_share"
        )


def _find_layout_problems(study: Study) -> Iterator[str]:
    """Yield the problems for which `forerun freeze` refuses the layout of a main run of the guessed
    size.
    """
    if study.plan.proxy.command:  # the user's own trainer chooses the layout
        return
    run = plan_main_run(study)
    for problem in find_layout_problems(
        read_parallelism(study.plan.launch.model_dump()), run.shape, run.batch_tokens
    ):
        yield f"launch: {problem}; `forerun freeze` refuses such a layout"
