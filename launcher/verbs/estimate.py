"""The verb that estimates the cost of a plan or a frozen config before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.answers.main_run_estimate import estimate_text
from launcher.base.study_names import shown_name
from launcher.cli.names import PlanOrFrozen
from launcher.cli.options import (
    AMOUNT,
    answer,
    folder_of,
    full_option,
    json_option,
    set_option,
    sound_config,
)
from proxies.core.canon import Json
from proxies.core.notation import format_factor, format_significant

if TYPE_CHECKING:
    from launcher.calibration.study_cost import Speeds, StageCost
    from launcher.estimates.machine import Span
    from launcher.estimates.main_run import MainEstimate, MainRun
    from launcher.plan.study import Study
    from proxies.core.spec import Run
    from sweeps.store.ledger import Ledger


@click.command()
@click.argument("path", metavar="[PLAN|FROZEN]", type=PlanOrFrozen(), default=Path("plan.toml"))
@click.option(
    "--gpu", help="Accelerator of the main run. Default: the plan's launch.gpu, else H100."
)
@click.option(
    "--gpus",
    "num_gpus",
    type=int,
    help="Number of GPUs. Default: the plan's or frozen config's ranks.",
)
@click.option(
    "--tokens-per-second",
    "tokens_per_gpu_second",
    type=AMOUNT,
    help="Measured tokens per second of one GPU. Default: hours by published runs.",
)
@click.option(
    "--price-usd",
    type=AMOUNT,
    help="Price of one GPU-hour. Default: the plan's, else a published one, if any.",
)
@click.option(
    "--study",
    "study_dir",
    type=click.Path(path_type=Path),
    help="Study whose calibration gives proxies' speed. Default: PLAN's folder, or study in it.",
)
@set_option
@full_option
@json_option
def estimate(
    path: Path,
    num_gpus: int | None,
    overrides: tuple[str, ...],
    full: bool,
    as_json: bool,
    study_dir: Path | None,
    **typed: Any,
) -> None:
    """Estimate what PLAN and its main run take before anything runs: runs of each stage, FLOPs,
    hours, dollars, disk.

    PLAN may be a frozen config: the estimate is then for its main run alone, exactly as frozen, and
    is saved as an attestation beside it.
    """
    from launcher.estimates.machine import MachineOptions
    from launcher.estimates.main_run import estimate_main, main_body
    from sweeps.store.ledger import Ledger

    frozen = path.is_dir() or path.suffix == ".json"
    study, body, run = _read_frozen(path, overrides) if frozen else _read_plan(path, overrides)
    main_run = estimate_main(
        run,
        MachineOptions(
            num_gpus=run.layout.num_ranks if num_gpus is None else num_gpus,
            **_choose_machine(study, typed),
        ),
    )
    if study is None and study_dir is not None:
        raise click.UsageError("--study is for a plan: a frozen config trains no proxies")
    if study is not None:
        folder = _find_study(path.parent, study_dir)
        ledger = None if folder is None else Ledger.read(folder)
        runs = () if ledger is None else ledger.runs()
        body |= _build_stages_body(study, main_run, _load_speeds(study, folder, ledger), runs)
    body["main_run"] = main_body(main_run)
    if frozen:
        from launcher.frozen.launch_file import attest

        attest(folder_of(path), "estimate", str(body["digest"]), body)
    next_step = (
        f"next: forerun {'rehearse' if frozen else 'run'} "
        f"{shlex.quote(shown_name(path) if frozen else str(path))}"
    )
    gpus = full or num_gpus is not None or _asks_for_gpus(study, typed, main_run)
    is_here = study is None or not (study.plan.cluster.address or study.plan.cluster.slurm_options)
    answer(
        as_json, body, f"{estimate_text(body, gpus=gpus, full=full, here=is_here)}\n\n{next_step}"
    )


def _asks_for_gpus(study: Study | None, typed: dict[str, Any], main_run: MainEstimate) -> bool:
    """Return whether hours of GPUs concern the user: a GPU is named, or the main run is too large
    for a laptop.
    """
    from launcher.estimates.utilization import SMALLEST_PUBLISHED
    from proxies.core.flops import count_params

    has_gpu = study is not None and (study.plan.launch.gpu or study.plan.cluster.worker_gpus)
    is_large = count_params(main_run.run.shape).total >= SMALLEST_PUBLISHED
    return bool(has_gpu or is_large or any(value is not None for value in typed.values()))


def _choose_machine(study: Study | None, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; for the others, the plan's own GPU and price."""
    given = {name: value for name, value in typed.items() if value is not None}
    if study is None or "gpu" in given:
        return given
    launch = study.plan.launch
    plan_values = {"gpu": launch.gpu, "price_usd": launch.usd_per_gpu_hour}
    return {name: value for name, value in plan_values.items() if value} | given


_Request = tuple["Study | None", dict[str, Json], "MainRun"]
"""The study (None for a frozen config), the first part of its answer, and its main run."""


def _read_frozen(path: Path, overrides: tuple[str, ...]) -> _Request:
    from launcher.estimates.main_run import MainRun

    if overrides:
        raise click.UsageError("--set changes a plan; a frozen config cannot be changed")
    decision, _ = sound_config(path)
    run = MainRun(
        shape=decision.shape,
        num_tokens=decision.num_tokens,
        batch_tokens=decision.batch_tokens,
        precision="float32" if decision.precision == "float64" else decision.precision,
        layout=decision.parallelism,
        optimizer=decision.optimizer,
    )
    return None, {"digest": decision.digest}, run


def _read_plan(path: Path, overrides: tuple[str, ...]) -> _Request:
    from launcher.calibration.study_cost import planned_main_run
    from launcher.study.study_folder import plan_study

    study = plan_study(path, path.parent, overrides, source_sha256="0" * 64)
    return study, {}, planned_main_run(study)


def _find_study(here: Path, study_dir: Path | None) -> Path | None:
    """Return the named study's folder, or that of a study in or next to the plan's folder; None if
    there is none.
    """
    from sweeps.store.ledger import LEDGER_NAME

    folders = (here, here / "study") if study_dir is None else (study_dir,)
    return next((folder for folder in folders if (folder / LEDGER_NAME).exists()), study_dir)


def _load_speeds(study: Study, folder: Path | None, ledger: Ledger | None) -> Speeds:
    """Return the speed of proxies: as a study's calibration recorded it, or as assumed."""
    from launcher.calibration.procedure import calibrations, groups_of
    from launcher.calibration.study_cost import Speeds, speeds_of

    records = () if ledger is None else calibrations(ledger)
    if not records:
        return Speeds()
    source, recorded_keys = (
        f"as calibrated in {folder}, with all its workers at once",
        {record.asked.key for record in records},
    )
    if num_open := sum(
        bool(group.asked.open) and group.asked.key not in recorded_keys
        for group in groups_of(study)
    ):
        source += (
            f"; shapes that a later stage decides ({num_open}) have the speed of the nearest shape"
        )
    return speeds_of(records, study, source)


def _build_stages_body(
    study: Study, main: MainEstimate, speeds: Speeds, runs: Sequence[Run]
) -> dict[str, Json]:
    """Return the cost of the stages on the study's workers, and on GPUs like the main run's."""
    from launcher.calibration.study_cost import (
        dollars,
        kind_costs,
        num_workers,
        own_seconds,
        stages_of,
        total_of,
        wall_hours,
        worker_speed,
    )
    from launcher.estimates.machine import exactly
    from launcher.estimates.utilization import PROXY_MFU
    from launcher.study.gates import data_warning
    from proxies.core.flops import count_params

    machine, gpus = main.machine, study.plan.cluster.worker_gpus
    measured_gpus = gpus * bool(speeds.measured)
    if not speeds.measured and gpus:
        speeds = worker_speed(study, machine.name, machine.peak_flops)
    workers = num_workers(study, speeds.num_workers)
    stages = stages_of(study, speeds)
    kinds = speeds.kinds if measured_gpus else ()

    def price(kind: str) -> Span | None:
        """Return the price of the study's own GPUs from its cluster, else of the main run's."""
        usd = study.plan.cluster.caps.price(kind) if kinds else None
        return machine.price_usd if usd is None else exactly(usd)

    def build_row(stage: StageCost) -> dict[str, Json]:
        on_gpu = stage.gpu_hours(machine.peak_flops, measured_gpus)
        usd = dollars(kind_costs(on_gpu, kinds, price))
        return _build_stage_row(stage, stage.hours(workers), on_gpu, usd, main.run)

    mfu, params = PROXY_MFU, count_params(main.run.shape).total
    if measured_gpus:
        peak_flops = gpus * machine.peak_flops
        mfu = replace(speeds.over_all.scaled(1 / peak_flops), source=speeds.source)
    on_gpu = (total := total_of(stages)).gpu_hours(machine.peak_flops, measured_gpus)
    costs = kind_costs(on_gpu, kinds, price)
    spans = {"dollars": dollars(costs), "GPU-hours": on_gpu, "hours": total.hours(workers)}
    return {
        "stages": [build_row(stage) for stage in stages],
        "total": build_row(total),
        "wall_hours": wall_hours(stages, workers, own_seconds(study, runs, speeds)).told(),
        "warnings": [
            *filter(None, [data_warning(study, main.run.num_tokens)]),
            *_find_wide_span(spans, gpus=gpus, measured=bool(speeds.measured)),
        ],
        "pruner": study.plan.search.pruner,
        "num_workers": workers,
        "kinds": [cost.told() for cost in costs if kinds],
        "worker_flops": speeds.over_all.told(),
        "proxy_mfu": mfu.told(),
        "main_run_from": _explain_main_run(study, main.run.num_tokens / params),
    }


def _build_stage_row(
    stage: StageCost, hours: Span, on_gpu: Span, usd: Span | None, main_run: MainRun
) -> dict[str, Json]:
    return {
        "stage": stage.name,
        "num_runs": list(stage.num_runs),
        "flops": stage.flops.told(),
        "core_hours": stage.core_hours.told(),
        "hours": hours.told(),
        "gpu_hours": on_gpu.told(),
        "usd": None if usd is None else usd.told(),
        "disk_bytes": stage.disk_bytes.told(),
        "share_of_main_run": stage.flops.value / main_run.flops["causal"],
    }


def _explain_main_run(study: Study, tokens_per_param: float) -> str:
    return (
        f"a guess until the ladder is fitted: {format_significant(tokens_per_param)} tokens a "
        "parameter, as near to 20 as the budget and target.width_multiple = "
        f"{study.plan.target.width_multiple} allow"
    )


def _find_wide_span(spans: Mapping[str, Span | None], *, gpus: float, measured: bool) -> list[Json]:
    """Return a warning about the least certain total of a study, with what would narrow it; empty
    if all totals are certain enough to be useful.
    """
    from launcher.estimates.main_run import WIDE

    wide = [
        (name, span.high / span.low)
        for name, span in spans.items()
        if span and span.high > WIDE * span.low
    ]
    if not wide:
        return []
    name, factor = wide[0]
    remedy = (
        "a sweep, which measures the speed of proxies first; then run `forerun estimate PLAN "
        "--study STUDY`"
    )
    if measured and (gpus or name == "hours"):
        remedy = "fewer extensions in the plan (search.max_extensions, transfer.max_extensions)"
    return [
        (
            f"{name} of the study are known only within a factor of {format_factor(factor)}; what "
            f"narrows them: {remedy}"
        )
    ]
