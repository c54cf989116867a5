"""How many parameters the user's own code counts: what fits, budgets and the forecast then follow.

forerun counts a shape's parameters as its own families have them. A factory's model is counted
itself; a command's by `proxy.describe`, which prints a line of JSON. With `flops_per_token` there,
N is a sixth of it: the parameters of the law 6 N D, of which a mixture of experts has fewer than it
stores. Counted once, at three widths, and recorded.
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
"""Times the base width: a polynomial of the second degree goes through three."""
AGREE = 0.02
"""Share by which the count at twice the largest of them may be another than that polynomial's."""
_LAST_CHARACTERS = 500


class DescribeError(InputError):
    """`proxy.describe` did not say how large the model is."""


def count(study: Study, ledger: Ledger) -> Study:
    """Count and record what a new study's own code has; the study as its ledger has it. One that
    has runs stays.

    Raises:
        DescribeError: see there; nothing is recorded.
        FactoryError, FactoryChangedError: the factory cannot build a shape, or is another.
    """
    if (
        ledger.records_for_plan(COUNTED)
        or ledger.own_results()
        or not (study.factory or study.plan.proxy.describe)
    ):
        return calibrated(study, ledger)
    one = _of_factory if study.factory else _described
    own = study.plan.model.num_layers
    depths = {own, study.plan.target_num_layers, *([2 * own] if study.plan.scales_depth else [])}
    for depth, found in {depth: _through(study, depth, one) for depth in sorted(depths)}.items():
        ledger.append_for_plan(COUNTED, str(depth), dataclasses.asdict(found))
    return calibrated(study, ledger)


def _through(study: Study, depth: int, one: Callable[[Study, RunSpec], float]) -> WidthCount:
    """The counts of a depth as a polynomial of the width; a count that is not on it is said."""
    base = study.plan.proxy.base_width
    widths = [base * times for times in (*WIDTHS, 2 * WIDTHS[-1])]
    counts = [one(study, _run(study, width, depth)) for width in widths]
    try:
        found = WidthCount.through(dict(zip(widths[:3], counts[:3], strict=True)))
    except SpecError as error:
        raise DescribeError(
            f"at widths {widths[:3]} the model has {counts[:3]} parameters: {error}"
        ) from error
    expected = found.params(widths[3])
    if abs(counts[3] / expected - 1) > AGREE:
        say(
            f"warning: the model has {format_count(counts[3])} parameters at width {widths[3]}, "
            "where those of "
            f"widths {', '.join(map(str, widths[:3]))} go on to {format_count(expected)}: its size "
            "is no polynomial "
            "of the width, and the forecast's is so far off"
        )
    return found


def _run(study: Study, width: int, depth: int) -> RunSpec:
    point = with_warmup({LEARNING_RATE: study.plan.transfer.check_learning_rate}, 0.0)
    shape = study.shape(width).at_depth(depth)
    return study.run(shape=shape, point=point, seed=0, num_steps=study.plan.proxy.num_steps)


def _of_factory(study: Study, spec: RunSpec) -> float:
    from proxies.external.construction import outline
    from proxies.external.factory import checked_load

    assert spec.factory is not None
    module = outline(checked_load(spec.factory, study.code_dir, spec.own_values), spec.shape)
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _described(study: Study, spec: RunSpec) -> float:
    """What the plan's `proxy.describe` prints for a run.

    Raises:
        DescribeError: it fails, or its last line is no JSON object with `params`.
    """
    assert spec.command is not None
    words = filled(study.plan.proxy.describe, placeholder_values(spec, Path(), study.corpus))
    find_program(words[0], study.code_dir)
    where = f"proxy.describe at width {spec.shape.width}"
    try:
        ended = subprocess.run(
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
    said = "\n".join(map(redact, ended.stderr[-_LAST_CHARACTERS:].splitlines()))
    if ended.returncode:
        raise DescribeError(f"{where} ended with exit code {ended.returncode}: {said}")
    last = ended.stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        found = None
    numbers: Any = found if isinstance(found, dict) else {}
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
