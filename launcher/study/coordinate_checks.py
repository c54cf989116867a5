"""The coordinate checks of a study: its parametrization over widths and depths, and the standard
parametrization as a control.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from launcher.base.talk import say
from launcher.plan.study import DEPTH, Study
from launcher.study.gates import describe_check
from proxies.coordinates.coordinates import (
    CoordinateCheck,
    CoordinateProbe,
    RunReadings,
    check_coordinates,
)
from proxies.coordinates.verdict import Axis
from proxies.core import canon
from proxies.core.errors import ExitCode, InputError
from proxies.core.failures import CAUSES
from proxies.core.notation import counted
from proxies.core.spec import RunSpec
from sweeps.run.driver import HANG_SECONDS
from sweeps.run.pool import Pool, ask, take_answers
from sweeps.store.errors import RunsFail
from sweeps.store.ledger import Ledger


class UnseenError(InputError):
    """The activations cannot be checked, because a user's command trains the model."""

    exit_code = ExitCode.CANNOT_TELL


def checks_of(
    study: Study,
    ledger: Ledger,
    workers: Callable[[], Pool],
    check_stop: Callable[[], None],
    advance: Callable[[float], None] = lambda flops: None,
) -> dict[str, canon.Json]:
    """Return every coordinate check of the study by name. Workers run the checks that the ledger
    lacks, and their results are recorded.

    Args:
        study: Study as its ledger has it.
        ledger: Ledger, open for writing.
        workers: Returns the idle pool; called only if there is something to run.
        check_stop: Raises the error that ends the work; called a few times per second if the
            workers are other processes.
        advance: Receives the FLOPs of every part of a check that has ended.

    Raises:
        UnseenError: A command trains the model.
        RunsFail: A run failed as often as the plan allows, or no further attempt can help.
        PoolDead: The workers are gone.
    """
    if study.corpus is None or study.plan.command is not None:
        raise UnseenError(
            "forerun cannot see the activations of a command: run the coordinate check in its own "
            "trainer"
        )
    needed, own = study.coordinate_checks, study.plan.proxy.parametrization
    if study.factory is not None:  # report a model that cannot be built before anything trains
        from proxies.external.description import describe
        from proxies.external.factory import load

        for runs in needed.values():
            describe(
                load(study.plan.proxy.factory, study.code_dir, runs[-1][0].own_values)[0],
                runs[-1][0],
            )
    for name, runs in needed.items():
        if name not in ledger.records_for_plan("coordinates"):
            result = _run_check(study, name, runs, workers(), check_stop, advance)
            ledger.append_for_plan("coordinates", name, result)
            say(f"coordinate check ({name}): {describe_check(name, result.outcome, own)}")
    return ledger.records_for_plan("coordinates")


def _run_check(
    study: Study,
    name: str,
    runs: Sequence[Sequence[RunSpec]],
    pool: Pool,
    check_stop: Callable[[], None],
    advance: Callable[[float], None],
) -> CoordinateCheck:
    """Run one coordinate check on the workers."""
    axis: Axis = "depth" if name == DEPTH else "width"
    work: dict[int, float] = {}
    for row in runs:
        point = row[0].shape.num_layers if axis == "depth" else row[0].shape.width
        work[point] = float(sum(run.flops for run in row))

    def progress(point: int) -> None:
        advance(work[point])
        check_stop()

    return check_coordinates(
        runs,
        lambda probes: _read_runs(pool, probes, check_stop, study.plan.cluster.max_attempts),
        axis=axis,
        level=study.plan.transfer.level,
        progress=progress,
    )


def _read_runs(
    pool: Pool, probes: Sequence[CoordinateProbe], check_stop: Callable[[], None], max_attempts: int
) -> list[RunReadings]:
    """Return the readings of runs. Any idle worker takes the next run; a worker that fails or is
    silent is restarted.

    Raises:
        RunsFail: A run failed `max_attempts` times, or its error says that another attempt cannot
            help.
    """
    queue, idle = list(reversed(range(len(probes)))), list(reversed(range(pool.num_workers)))
    busy, asked_at, readings, num_lost = (
        dict[int, int](),
        dict[int, float](),
        dict[int, RunReadings](),
        Counter[int](),
    )
    while len(readings) < len(probes):
        while queue and idle:
            worker = idle.pop()
            busy[worker], asked_at[worker] = queue.pop(), time.monotonic()
            ask(pool, worker, cast(dict[str, canon.Json], canon.to_json(probes[busy[worker]])))
        for report in take_answers(pool, asked_at, HANG_SECONDS):
            index = busy.pop(report.worker)
            idle.append(report.worker)
            if report.answer is not None:
                readings[index] = canon.decode(RunReadings, report.answer)
                continue
            num_lost[index] += 1
            queue.append(index)
            if report.refused or num_lost[index] >= max_attempts:
                shape, kind = probes[index].spec.shape, CAUSES[report.cause]
                raise RunsFail(
                    f"coordinate check: a run of width {shape.width} with "
                    f"{counted(shape.num_layers, 'layer')} failed: {kind.words}: "
                    f"{report.error or 'the worker did not answer'}. To do: {kind.advice}; then "
                    "run the same command again"
                )
        check_stop()
    return [readings[index] for index in range(len(probes))]
