"""The coordinate checks of a study: its parametrization over widths and depths, and the standard form beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from launcher.base.talk import say
from launcher.plan.study import DEPTH, Study
from launcher.study.gates import GateError, coordinate_gate
from proxies.coordinates.coordinates import CoordinateCheck, check_coordinates
from proxies.coordinates.verdict import Axis
from proxies.core import canon
from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore
from proxies.external.description import describe
from proxies.external.factory import build_model, load
from sweeps.store.ledger import Ledger


class UnseenError(ValueError):
    """Nobody sees the activations of a trainer that is not ours."""


def checks_of(
    study: Study, ledger: Ledger, store: TokenStore | None, check_stop: Callable[[], None],
    advance: Callable[[float], None] = lambda flops: None,
) -> dict[str, canon.Json]:  # fmt: skip
    """Every check of the study, by name; those that the ledger lacks are run and recorded.

    `advance` receives the FLOPs of every part of a check that has ended, `check_stop` is called after each.

    Raises:
        UnseenError: a command trains.
    """
    if store is None or study.plan.command is not None:
        raise UnseenError(
            "forerun cannot see the activations of a command: run the coordinate check in its own trainer"
        )
    needed, own = study.coordinate_checks, study.plan.proxy.parametrization
    if study.factory is not None:  # what cannot be built is said before anything trains
        for runs in needed.values():
            describe(load(study.plan.proxy.factory, study.code_dir, runs[-1][0].own_values)[0], runs[-1][0])
    for name, runs in needed.items():
        if ledger.find("coordinates", name) is None:
            found = _check(study, name, runs, store, check_stop, advance)
            torch.cuda.empty_cache()  # the workers' now: this process keeps none of it through the study
            ledger.append("coordinates", name, found)
            expected = ", as it should" if name == "sp" and own != "sp" and found.outcome == "blows_up" else ""
            say(f"coordinate check ({name}): {found.outcome.replace('_', ' ')}{expected}")
    return {record.key: record.body for record in ledger.records("coordinates")}


def _check(
    study: Study, name: str, runs: Sequence[Sequence[RunSpec]], store: TokenStore, check_stop: Callable[[], None],
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
        store,
        axis=axis,
        level=study.plan.transfer.level,
        build=(lambda spec: build_model(spec, study.code_dir)) if study.factory is not None else None,
        progress=progress,
    )


def refuse_failed(study: Study, checks: dict[str, canon.Json]) -> None:
    """Raises GateError if the study's own parametrization fails its check; the standard form is expected to."""
    name = study.plan.parametrization.name
    gate = coordinate_gate(checks, name)
    if name != "sp" and gate.outcome == "failed":
        raise GateError(
            f"the coordinate check of {study.plan.proxy.factory} fails: {gate.reason}. Fix the model, or sweep it "
            'as it is with proxy.parametrization = "sp"'
        )
