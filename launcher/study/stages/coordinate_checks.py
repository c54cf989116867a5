"""The coordinate checks of a study: its parametrization over widths and depths, and the standard
parametrization as a control.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.experiments.coordinate_record import (
    COORDINATES,
    RecordedCheck,
    read_coordinate_checks,
)
from forerun._launcher.study.plan.study import DEPTH_CHECK, Study
from forerun._launcher.study.stages.gates import describe_check
from forerun._proxies.coordinates.coordinate_check import (
    CoordinateCheck,
    CoordinateProbe,
    RunReadings,
    check_coordinates,
)
from forerun._proxies.coordinates.verdict import Axis
from forerun._proxies.core import canon
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.failures import CAUSES
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.driver import MAX_SILENCE_SECONDS
from forerun._sweeps.run.pool import Pool, send_probe, take_answers
from forerun._sweeps.store.errors import RunsFail
from forerun._sweeps.store.ledger import Ledger


class UnseenError(InputError):
    """The activations cannot be checked, because a user's command trains the model."""

    exit_code = ExitCode.CANNOT_TELL


def run_coordinate_checks(
    study: Study,
    ledger: Ledger,
    workers: Callable[[], Pool],
    check_stop: Callable[[], None],
    advance: Callable[[float], None] = lambda flops: None,
) -> dict[str, RecordedCheck]:
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
    needed, parametrization = study.coordinate_checks, study.plan.proxy.parametrization
    if study.factory is not None:  # report a model that cannot be built before anything trains
        from forerun._proxies.external.description import describe_model
        from forerun._proxies.external.factory import load_factory

        for runs in needed.values():
            describe_model(
                load_factory(study.plan.proxy.factory, study.code_dir, runs[-1][0].user_values)[0],
                runs[-1][0],
            )
    for name, runs in needed.items():
        if name not in ledger.read_records_for_plan(COORDINATES):
            result = _run_check(study, name, runs, workers(), check_stop, advance)
            ledger.append_for_plan(COORDINATES, name, result)
            words = describe_check(name, result.outcome, parametrization)
            print_progress(f"coordinate check ({name}): {words}")
    return read_coordinate_checks(ledger)


def _run_check(
    study: Study,
    name: str,
    runs: Sequence[Sequence[RunSpec]],
    pool: Pool,
    check_stop: Callable[[], None],
    advance: Callable[[float], None],
) -> CoordinateCheck:
    """Run one coordinate check on the workers."""
    axis: Axis = "depth" if name == DEPTH_CHECK else "width"
    flops_by_size: dict[int, float] = {}
    for row in runs:
        size = row[0].shape.num_layers if axis == "depth" else row[0].shape.width
        flops_by_size[size] = float(sum(run.flops for run in row))

    def progress(size: int) -> None:
        advance(flops_by_size[size])
        check_stop()

    return check_coordinates(
        runs,
        lambda probes: _measure_runs(pool, probes, check_stop, study.plan.cluster.max_attempts),
        axis=axis,
        level=study.plan.transfer.level,
        progress=progress,
    )


def _measure_runs(
    pool: Pool, probes: Sequence[CoordinateProbe], check_stop: Callable[[], None], max_attempts: int
) -> list[RunReadings]:
    """Execute the runs on the workers, and return the measured sizes of the activations, in the
    order of `probes`. Any idle worker takes the next run. A worker that fails or is silent is
    restarted.

    Raises:
        RunsFail: A run failed `max_attempts` times, or its error says that another attempt cannot
            help.
    """
    # `pop` takes from the end, so the first run and the first worker stand there.
    queue, idle = list(reversed(range(len(probes)))), list(reversed(range(pool.num_workers)))
    busy = dict[int, int]()
    asked_at = dict[int, float]()
    readings = dict[int, RunReadings]()
    num_lost = Counter[int]()
    while len(readings) < len(probes):
        while queue and idle:
            worker = idle.pop()
            busy[worker], asked_at[worker] = queue.pop(), time.monotonic()
            send_probe(pool, worker, {"coordinates": canon.to_json(probes[busy[worker]])})
        for report in take_answers(pool, asked_at, MAX_SILENCE_SECONDS):
            index = busy.pop(report.worker)
            idle.append(report.worker)
            if report.answer is not None:
                readings[index] = canon.decode(RunReadings, report.answer)
                continue
            num_lost[index] += 1
            queue.append(index)
            if report.ends_study or num_lost[index] >= max_attempts:
                shape, kind = probes[index].spec.shape, CAUSES[report.cause]
                raise RunsFail(
                    f"coordinate check: a run of width {shape.width} with "
                    f"{format_counted(shape.num_layers, 'layer')} failed: {kind.words}: "
                    f"{report.error or 'the worker did not answer'}. To do: {kind.advice}; then "
                    "run the same command again"
                )
        check_stop()
    return [readings[index] for index in range(len(probes))]
