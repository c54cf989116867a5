"""A user's own model: the number of its parameters, for the fit, the budgets, and the forecast,
and its description for people.

The parameters of forerun's own model families follow from the shape. A factory's model is built and
its parameters are counted. For a command, the program `proxy.describe` prints one line of JSON. If
that line has `flops_per_token`, N is a sixth of it, because the law counts 6 N D FLOPs: a mixture
of experts uses fewer parameters for a token than it stores. The parameters are counted once, at
four widths, and recorded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.calibration.procedure import COUNTED, apply_calibrations
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.hyperparameters import LEARNING_RATE, replace_warmup
from forerun._proxies.core.notation import format_count
from forerun._proxies.core.redaction import LineRedactor
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.external.command import (
    fill_template,
    find_program,
    get_placeholder_values,
    make_command_environment,
)
from forerun._scaling_fits.allocation.shapes import WidthCount
from forerun._sweeps.store.ledger import Ledger

WIDTH_FACTORS = (1, 2, 4)
"""Widths at which parameters are counted, as multiples of the base width. A polynomial of the
second degree passes through the three counts.
"""
MAX_COUNT_ERROR = 0.02
"""Maximum relative deviation of a fourth count, at twice the largest of these widths, from that
polynomial, without a warning.
"""
_MAX_STDERR_CHARS = 500
"""Maximum number of characters of the program's stderr in an error message."""


class DescribeError(InputError):
    """`proxy.describe` did not report the size of the model."""


def record_user_params(study: Study, ledger: Ledger) -> Study:
    """Count the parameters of a new study's own model, record them, and return the study as its
    ledger has it. A study that has runs is not counted again.

    Raises:
        DescribeError: The counts are not available; nothing is recorded.
        FactoryError, FactoryChangedError: The factory cannot build a shape, or has changed.
    """
    if (
        ledger.read_records_for_plan(COUNTED)
        or ledger.get_own_results()
        or not (study.factory or study.plan.proxy.describe)
    ):
        return apply_calibrations(study, ledger)
    count_params = _count_factory_params if study.factory else _describe_params
    base_depth = study.plan.model.num_layers
    depths = {
        base_depth,
        study.plan.target_num_layers,
        *([2 * base_depth] if study.plan.scales_depth else []),
    }
    for depth, width_count in {
        depth: _fit_width_count(study, depth, count_params) for depth in sorted(depths)
    }.items():
        ledger.append_for_plan(COUNTED, str(depth), dataclasses.asdict(width_count))
    return apply_calibrations(study, ledger)


def _fit_width_count(
    study: Study, depth: int, count_params: Callable[[Study, RunSpec], float]
) -> WidthCount:
    """Fit a polynomial of the width to the counts at one depth, and warn if the count at a larger
    width deviates from it.
    """
    base = study.plan.proxy.base_width
    widths = [base * times for times in (*WIDTH_FACTORS, 2 * WIDTH_FACTORS[-1])]
    counts = [count_params(study, _build_run(study, width, depth)) for width in widths]
    try:
        width_count = WidthCount.fit(dict(zip(widths[:3], counts[:3], strict=True)))
    except SpecError as error:
        raise DescribeError(
            f"at widths {widths[:3]} the model has {counts[:3]} parameters: {error}"
        ) from error
    expected = width_count.count_params(widths[3])
    if abs(counts[3] / expected - 1) > MAX_COUNT_ERROR:
        print_progress(
            f"warning: the model has {format_count(counts[3])} parameters at width {widths[3]}, "
            f"but its numbers at widths {', '.join(map(str, widths[:3]))} predict "
            f"{format_count(expected)}: they are no polynomial of the width, so the number of "
            "parameters in the forecast may be as wrong"
        )
    return width_count


def _build_run(study: Study, width: int, depth: int) -> RunSpec:
    """Return a run of the study at this width and depth."""
    point = replace_warmup({LEARNING_RATE: study.plan.transfer.check_learning_rate}, 0.0)
    shape = study.build_shape(width).at_depth(depth)
    return study.build_run(shape=shape, point=point, seed=0, num_steps=study.plan.proxy.num_steps)


def _count_factory_params(study: Study, spec: RunSpec) -> float:
    """Return the number of parameters of the model that the user's factory builds."""
    from forerun._proxies.external.construction import construct_on_meta
    from forerun._proxies.external.factory import load_unchanged_factory

    assert spec.factory is not None
    module = construct_on_meta(
        load_unchanged_factory(spec.factory, study.code_dir, spec.user_values), spec.shape
    )
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _describe_params(study: Study, spec: RunSpec) -> float:
    """Return the number of parameters that the plan's `proxy.describe` prints for a run.

    Raises:
        DescribeError: The program fails, or its last line is not a JSON object with `params`.
    """
    assert spec.command is not None
    words = fill_template(
        study.plan.proxy.describe, get_placeholder_values(spec, Path(), study.corpus)
    )
    find_program(words[0], study.code_dir)
    where = f"proxy.describe at width {spec.shape.width}"
    try:
        process = subprocess.run(
            words,
            cwd=study.code_dir,
            env=make_command_environment(spec.command, Path(), os.environ.get("PYTHONPATH")),
            capture_output=True,
            text=True,
            timeout=study.plan.proxy.timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DescribeError(
            f"{where}: no answer within proxy.timeout_seconds = {error.timeout:g}"
        ) from error
    redact = LineRedactor()
    errors = "\n".join(map(redact, process.stderr[-_MAX_STDERR_CHARS:].splitlines()))
    if process.returncode:
        raise DescribeError(f"{where} ended with exit code {process.returncode}: {errors}")
    last = process.stdout.strip().rpartition("\n")[2]
    try:
        parsed = json.loads(last)
    except (ValueError, RecursionError):
        parsed = None
    numbers: Any = parsed if isinstance(parsed, dict) else {}
    params, flops = numbers.get("params"), numbers.get("flops_per_token")
    if not (_is_count(params) and (flops is None or _is_count(flops))):
        raise DescribeError(
            f"{where} printed {last[:200]!r}: its last line must be JSON such as "
            '{"params": 124439808}, with "flops_per_token" (training, forward and backward) if '
            "that is not 6 times as much"
        )
    return float(params) if flops is None else float(flops) / 6


def _is_count(value: object) -> bool:
    return type(value) in (int, float) and 1 <= cast(float, value) < float("inf")


# ---- Descriptions for people ----


def describe_user_model(study: Study) -> dict[str, Json]:
    """Return the facts about a factory's model that are known before it trains, at the largest
    width of the coordinate check.

    Raises:
        FactoryError: The model cannot be trained under the plan's parametrization.
    """
    from forerun._proxies.external.description import describe_model
    from forerun._proxies.external.factory import load_factory

    spec = study.coordinate_checks[study.plan.proxy.parametrization][-1][0]
    description = describe_model(
        load_factory(study.plan.proxy.factory, study.code_dir, spec.user_values)[0], spec
    )
    parameters: list[Json] = [
        {
            "name": parameter.name,
            "kind": parameter.kind,
            "factor": description.factors[parameter.name],
        }
        for parameter in description.numbers
    ]
    return {"width": spec.shape.width, "parameters": parameters}
