"""The coordinate checks of a study: its parametrization over widths and depths, and the standard form beside it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from launcher.base.talk import say
from launcher.plan.study import DEPTH, Study
from launcher.study.gates import describe_check
from proxies.coordinates.coordinates import CoordinateCheck, CoordinateProbe, RunReadings, check_coordinates
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
    """Nobody sees the activations of a trainer that is not ours."""

    exit_code = ExitCode.CANNOT_TELL


def checks_of(
    study: Study, ledger: Ledger, workers: Callable[[], Pool], check_stop: Callable[[], None],
    advance: Callable[[float], None] = lambda flops: None,
) -> dict[str, canon.Json]:  # fmt: skip
    """Every check of the study, by name; those that the ledger lacks are run by its workers and recorded.

    Args:
        study: as its ledger has it.
        ledger: open for writing.
        workers: the pool, idle; asked for only where there is something to run.
        check_stop: raises what ends the work; called a few times a second where workers are other processes.
        advance: receives the FLOPs of every part of a check that has ended.

    Raises:
        UnseenError: a command trains.
        RunsFail: a run failed as often as the plan allows, or no attempt can help.
        PoolDead: as named.
    """
    if study.corpus is None or study.plan.command is not None:
        raise UnseenError(
            "forerun cannot see the activations of a command: run the coordinate check in its own trainer"
        )
    needed, own = study.coordinate_checks, study.plan.proxy.parametrization
    if study.factory is not None:  # what cannot be built is said before anything trains
        from proxies.external.description import describe
        from proxies.external.factory import load

        for runs in needed.values():
            describe(load(study.plan.proxy.factory, study.code_dir, runs[-1][0].own_values)[0], runs[-1][0])
    for name, runs in needed.items():
        if name not in ledger.records_for_plan("coordinates"):
            found = _check(study, name, runs, workers(), check_stop, advance)
            ledger.append_for_plan("coordinates", name, found)
            say(f"coordinate check ({name}): {describe_check(name, found.outcome, own)}")
    return ledger.records_for_plan("coordinates")


def _check(
    study: Study, name: str, runs: Sequence[Sequence[RunSpec]], pool: Pool, check_stop: Callable[[], None],
    advance: Callable[[float], None],
) -> CoordinateCheck:  # fmt: skip
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
        lambda probes: _read(pool, probes, check_stop, study.plan.cluster.max_attempts),
        axis=axis,
        level=study.plan.transfer.level,
        progress=progress,
    )


def _read(
    pool: Pool, probes: Sequence[CoordinateProbe], check_stop: Callable[[], None], max_attempts: int
) -> list[RunReadings]:
    """What workers read of runs, each by whichever is idle; a worker that fails or is silent is restarted.

    Raises:
        RunsFail: `max_attempts` at one of the runs failed, or one says that no other can help.
    """
    left, idle = list(reversed(range(len(probes)))), list(reversed(range(pool.num_workers)))
    busy, asked_at, found, num_lost = dict[int, int](), dict[int, float](), dict[int, RunReadings](), Counter[int]()
    while len(found) < len(probes):
        while left and idle:
            worker = idle.pop()
            busy[worker], asked_at[worker] = left.pop(), time.monotonic()
            ask(pool, worker, cast(dict[str, canon.Json], canon.to_json(probes[busy[worker]])))
        for report in take_answers(pool, asked_at, HANG_SECONDS):
            index = busy.pop(report.worker)
            idle.append(report.worker)
            if report.answer is not None:
                found[index] = canon.decode(RunReadings, report.answer)
                continue
            num_lost[index] += 1
            left.append(index)
            if report.refused or num_lost[index] >= max_attempts:
                shape, kind = probes[index].spec.shape, CAUSES[report.cause]
                raise RunsFail(
                    f"coordinate check: a run of width {shape.width} with {counted(shape.num_layers, 'layer')} "
                    f"failed: {kind.words}: {report.error or 'the worker did not answer'}. To do: {kind.advice}; "
                    "then run the same command again"
                )
        check_stop()
    return [found[index] for index in range(len(probes))]
