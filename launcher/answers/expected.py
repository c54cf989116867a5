"""`forerun transfer PLAN --dry-run`: what would be run, what it costs, and how sharp the verdicts will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.cli.options import table
from launcher.experiments.sweep_grids import (
    FIRST_SIZES,
    axis_sizes,
    base_sizes,
    built_in,
    measured,
    run_at,
    wanted_tests,
)
from launcher.experiments.transferred import target_guess
from launcher.plan.study import Study
from launcher.study.opening import plan_study
from proxies.core.canon import Json
from transfer.question import Axis, Question
from transfer.verdict.planner import USUAL_CURVATURE_NATS, USUAL_NOISE_NATS, Cells, Expectation, expect


def expected(plan_path: Path, study_dir: Path, overrides: tuple[str, ...]) -> dict[str, Json]:
    """Every test of a plan: its first runs, their share of the target's FLOPs, and what verdict to expect.

    Raises:
        PlanError, DataError: what is wrong with the plan or its corpus.
    """
    study = plan_study(plan_path, study_dir, overrides)
    tests: list[Json] = []
    for name, axis in wanted_tests(study):
        design = _design(study, axis) if name == "learning_rate" else _others(study, axis)
        body: dict[str, Json] = {
            "hyperparameter": name,
            "axis": axis,
            "sizes": [cells.size for cells in design],
            "num_runs": sum(len(cells.offsets_octaves) * cells.num_seeds for cells in design),
            "share_of_target": _share(study, axis, design),
            "expectations": [],
        }
        if name == "learning_rate":
            question = _question(study, axis)
            hard, easy = (USUAL_NOISE_NATS[1], USUAL_CURVATURE_NATS[0]), (USUAL_NOISE_NATS[0], USUAL_CURVATURE_NATS[1])
            body["target_size"] = question.target_size
            body["expectations"] = [
                _summary(expect(design, question, noise_nats=noise, curvature=curvature))
                for noise, curvature in (easy, hard)
            ]
        tests.append(body)
    return {"tests": tests, "margin_nats": study.plan.transfer.margin_nats}


def _question(study: Study, axis: Axis) -> Question:
    transfer = study.plan.transfer
    return Question(
        axis=axis,
        base_size=base_sizes(study).along(axis),
        target_size=target_guess(study).along(axis),
        power=None if measured(study, axis) else 0.0,
        built_in=built_in(study, "learning_rate", axis),
        margin_nats=transfer.margin_nats,
        level=transfer.level,
    )


def _design(study: Study, axis: Axis) -> list[Cells]:
    """The learning rate's first runs over an axis, as `launcher.experiments.sweep_grids` asks for them."""
    transfer, base = study.plan.transfer, base_sizes(study).along(axis)
    sizes = axis_sizes(study, axis)
    full = {base, *sizes[:FIRST_SIZES]}
    num_seeds = transfer.num_seeds if axis == "width" else transfer.axis_num_seeds
    return [
        Cells(
            size=size,
            offsets_octaves=transfer.offsets_octaves if size in full else transfer.narrow_offsets_octaves,
            num_seeds=transfer.num_seeds if size == base else num_seeds,
            follows=size not in full,
        )
        for size in sizes
    ]


def _others(study: Study, axis: Axis) -> list[Cells]:
    transfer = study.plan.transfer
    sizes = study.plan.hyperparameter_widths if axis == "width" else axis_sizes(study, axis)
    return [
        Cells(size=size, offsets_octaves=transfer.hyperparameter_offsets_octaves, num_seeds=transfer.axis_num_seeds)
        for size in sizes
    ]


def _share(study: Study, axis: Axis, design: list[Cells]) -> float:
    point = study.space.lowest
    flops = 0.0
    for cells in design:
        spec = run_at(study, axis, cells.size, point, 0)
        flops += len(cells.offsets_octaves) * cells.num_seeds * spec.flops
    return flops / study.plan.target.budget_flops


def _summary(found: Expectation) -> dict[str, Json]:
    return {
        "noise_nats": found.noise_nats,
        "curvature_nats_per_octave_squared": found.curvature,
        "num_simulations": found.num_simulations,
        "nothing_lost": dict(found.nothing_lost),
        "margins_lost": None if found.margins_lost is None else dict(found.margins_lost),
        "regret_high_nats": found.regret_high_nats,
        "drift_width_octaves": found.drift_width_octaves,
        "decided": found.decided,
    }


def expected_text(body: dict[str, Json]) -> str:
    """The same in a table: from the easy end of what is usual to the hard one."""
    tests: Any = body["tests"]
    head = ("test", "runs", "of the target", "rightly decided", "nats lost, at most", "drift's interval")
    total = sum(test["share_of_target"] for test in tests)
    (quiet, loud), (shallow, steep) = USUAL_NOISE_NATS, USUAL_CURVATURE_NATS
    said = [
        f"first runs: {total:.2%} of the target's FLOPs, less what tests share; what verdicts ask for comes on top",
        f"simulated for noise of {quiet:g} to {loud:g} nats and curvature of {steep:g} to {shallow:g} nats per octave",
        f"squared, margin {body['margin_nats']:g}; of hyperparameters other than the learning rate nothing is foretold",
    ]
    return "\n".join([table(head, [_row(test) for test in tests]), *said])


def _row(test: Any) -> tuple[str, ...]:
    found = [
        " to ".join("unknown" if case[key] is None else f"{case[key]:{spec}}" for case in test["expectations"]) or "-"
        for key, spec in (("decided", ".0%"), ("regret_high_nats", ".4f"), ("drift_width_octaves", ".2f"))
    ]
    name = f"{test['hyperparameter'].replace('_', ' ')} over {test['axis']}"
    return (name, str(test["num_runs"]), f"{test['share_of_target']:.2%}", *found)
