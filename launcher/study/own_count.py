"""A user's own model: the number of its parameters, for the fit, the budgets, and the forecast,
and its description for people.

forerun counts a shape's parameters as its own model families have them. A factory's model is built
and counted; for a command, the program `proxy.describe` prints one line of JSON. If that line has
`flops_per_token`, N is a sixth of it: the parameters of the law 6 N D, of which a mixture of
experts has fewer than it stores. The counts are made once, at four widths, and recorded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from launcher.base.talk import say
from launcher.calibration.procedure import COUNTED, calibrated
from launcher.plan.study import Study
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.errors import InputError
from proxies.core.hyperparameters import LEARNING_RATE, with_warmup
from proxies.core.notation import format_count
from proxies.core.redaction import LineRedactor
from proxies.core.spec import RunSpec
from proxies.external.command import command_environment, filled, find_program, placeholder_values
from scaling_fits.allocation.shapes import WidthCount
from sweeps.store.ledger import Ledger

WIDTHS = (1, 2, 4)
"""Factors on the base width; a polynomial of the second degree passes through the three counts."""
AGREE = 0.02
"""Maximum relative deviation of the count at twice the largest width from that polynomial."""
_MAX_STDERR_CHARS = 500
"""Number of characters of the program's stderr in an error message."""


class DescribeError(InputError):
    """`proxy.describe` did not report how large the model is."""


def count(study: Study, ledger: Ledger) -> Study:
    """Count the parameters of a new study's own model, record them, and return the study as its
    ledger has it. A study that has runs is not counted again.

    Raises:
        DescribeError: The counts are not available; nothing is recorded.
        FactoryError, FactoryChangedError: The factory cannot build a shape, or has changed.
    """
    if (
        ledger.records_for_plan(COUNTED)
        or ledger.own_results()
        or not (study.factory or study.plan.proxy.describe)
    ):
        return calibrated(study, ledger)
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
    return calibrated(study, ledger)


def _fit_width_count(
    study: Study, depth: int, count_params: Callable[[Study, RunSpec], float]
) -> WidthCount:
    """Fit the counts at one depth as a polynomial of the width, and warn if the count at another
    width deviates from it.
    """
    base = study.plan.proxy.base_width
    widths = [base * times for times in (*WIDTHS, 2 * WIDTHS[-1])]
    counts = [count_params(study, _build_run(study, width, depth)) for width in widths]
    try:
        width_count = WidthCount.through(dict(zip(widths[:3], counts[:3], strict=True)))
    except SpecError as error:
        raise DescribeError(
            f"at widths {widths[:3]} the model has {counts[:3]} parameters: {error}"
        ) from error
    expected = width_count.params(widths[3])
    if abs(counts[3] / expected - 1) > AGREE:
        say(
            f"warning: the model has {format_count(counts[3])} parameters at width {widths[3]}, "
            f"where those of widths {', '.join(map(str, widths[:3]))} go on to "
            f"{format_count(expected)}: its size is no polynomial of the width, and the forecast's "
            "is so far off"
        )
    return width_count


def _build_run(study: Study, width: int, depth: int) -> RunSpec:
    """Return a run of the study at this width and depth."""
    point = with_warmup({LEARNING_RATE: study.plan.transfer.check_learning_rate}, 0.0)
    shape = study.shape(width).at_depth(depth)
    return study.run(shape=shape, point=point, seed=0, num_steps=study.plan.proxy.num_steps)


def _count_factory_params(study: Study, spec: RunSpec) -> float:
    """Return the number of parameters of the model that the user's factory builds."""
    from proxies.external.construction import outline
    from proxies.external.factory import checked_load

    assert spec.factory is not None
    module = outline(checked_load(spec.factory, study.code_dir, spec.own_values), spec.shape)
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _describe_params(study: Study, spec: RunSpec) -> float:
    """Return the number of parameters that the plan's `proxy.describe` prints for a run.

    Raises:
        DescribeError: The program fails, or its last line is not a JSON object with `params`.
    """
    assert spec.command is not None
    words = filled(study.plan.proxy.describe, placeholder_values(spec, Path(), study.corpus))
    find_program(words[0], study.code_dir)
    where = f"proxy.describe at width {spec.shape.width}"
    try:
        process = subprocess.run(
            words,
            cwd=study.code_dir,
            env=command_environment(spec.command, Path(), os.environ.get("PYTHONPATH")),
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
            f'{where} printed {last[:200]!r}: its last line must be JSON such as {{"params": '
            f"124439808}}, with "
            '"flops_per_token" (training, forward and backward) where that is not 6 times as much'
        )
    return float(params) if flops is None else float(flops) / 6


def _is_count(value: object) -> bool:
    return type(value) in (int, float) and 1 <= cast(float, value) < float("inf")


# ---- Descriptions for people ----


def own_model(study: Study) -> dict[str, Json]:
    """Return the facts about a factory's model at the largest width of the coordinate check, which
    are known before it trains.

    Raises:
        FactoryError: The model cannot be trained under the plan's parametrization.
    """
    from proxies.external.description import describe
    from proxies.external.factory import load

    spec = study.check_runs(study.plan.parametrization)[-1][0]
    description = describe(load(study.plan.proxy.factory, study.code_dir, spec.own_values)[0], spec)
    parameters: list[Json] = [
        {
            "name": parameter.name,
            "kind": parameter.kind,
            "factor": description.factors[parameter.name],
        }
        for parameter in description.numbers
    ]
    return {"width": spec.shape.width, "parameters": parameters}
