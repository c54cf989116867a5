"""The verb that estimates the cost of a plan or a frozen config before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.frozen_config import find_config_folder, read_sound_config
from forerun._launcher.cli.names import PlanOrFrozen
from forerun._launcher.cli.options import (
    AMOUNT,
    PATH,
    full_option,
    json_option,
    print_result,
    set_option,
)
from forerun._launcher.main_run.estimates.machine import MachineOptions, Span, make_exact
from forerun._launcher.main_run.estimates.main_run import (
    WIDE_RATIO,
    MainEstimate,
    MainRun,
    build_main_body,
    estimate_main,
)
from forerun._launcher.main_run.estimates.utilization import MIN_PUBLISHED_PARAMS, PROXY_MFU
from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.launch_file import attest
from forerun._launcher.report.answers.estimate_text import GPU_TOTALS, format_study_estimate
from forerun._launcher.study.stages.gates import warn_of_data
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.notation import format_factor, format_significant
from forerun._proxies.core.spec import Run
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

if TYPE_CHECKING:
    from forerun._launcher.study.calibration.study_cost import Speeds, StageCost
    from forerun._launcher.study.plan.study import Study


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
    type=PATH,
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
    """Estimate what PLAN and its main run take before anything runs: the runs of each stage, FLOPs,
    hours, dollars, disk.

    PLAN may be a frozen config. The estimate is then for its main run alone, exactly as frozen, and
    is saved as an attestation in its folder.
    """
    is_frozen = path.is_dir() or path.suffix == ".json"
    study, body, run = _read_frozen(path, overrides) if is_frozen else _read_plan(path, overrides)
    machine = MachineOptions(
        num_gpus=run.layout.num_ranks if num_gpus is None else num_gpus,
        **_choose_machine(study, typed),
    )
    main_run = estimate_main(run, machine)
    if study is None and study_dir is not None:
        raise click.UsageError("--study is for a plan: a frozen config trains no proxies")
    if study is not None:
        folder = _find_study(path.parent, study_dir)
        ledger = None if folder is None else Ledger.read(folder)
        runs = () if ledger is None else ledger.read_runs()
        body |= _build_stages_body(study, main_run, _load_speeds(study, folder, ledger), runs)
    body["main_run"] = build_main_body(main_run)
    if is_frozen:
        attest(find_config_folder(path), "estimate", str(body["digest"]), body)
    next_step = f"run {shlex.quote(str(path))}"
    if is_frozen:
        next_step = f"rehearse {shlex.quote(shorten_config_name(path))}"
    gpus = full or num_gpus is not None or _asks_for_gpus(study, typed, main_run)
    is_local = study is None or not (study.plan.cluster.address or study.plan.cluster.slurm_options)
    text = format_study_estimate(body, gpus=gpus, full=full, is_local=is_local)
    print_result(as_json, body, f"{text}\n\nnext: forerun {next_step}")


def _asks_for_gpus(study: Study | None, typed: dict[str, Any], main_run: MainEstimate) -> bool:
    """Return whether to show GPU-hours: an option or the plan is about GPUs, or the main run is as
    large as published runs.
    """
    has_gpu = study is not None and (study.plan.launch.gpu or study.plan.cluster.worker_gpus)
    is_large = count_params(main_run.run.shape).total >= MIN_PUBLISHED_PARAMS
    return bool(has_gpu or is_large or any(value is not None for value in typed.values()))


def _choose_machine(study: Study | None, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; for the others, the plan's own GPU and price."""
    given = {name: value for name, value in typed.items() if value is not None}
    if study is None or "gpu" in given:
        return given
    launch = study.plan.launch
    plan_values = {"gpu": launch.gpu, "price_usd": launch.usd_per_gpu_hour}
    return {name: value for name, value in plan_values.items() if value} | given


_Request = tuple["Study | None", dict[str, Json], MainRun]
"""The study (None for a frozen config), the first part of the JSON answer, and the main run."""


def _read_frozen(path: Path, overrides: tuple[str, ...]) -> _Request:
    if overrides:
        raise click.UsageError("--set changes a plan; a frozen config cannot be changed")
    decision, _ = read_sound_config(path)
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
    from forerun._launcher.study.calibration.study_cost import plan_main_run
    from forerun._launcher.study.stages.study_folder import read_study

    # An estimate does not depend on the source of a user's own model, so any hash will do.
    study = read_study(path, path.parent, overrides, source_sha256="0" * 64)
    return study, {}, plan_main_run(study)


def _find_study(here: Path, study_dir: Path | None) -> Path | None:
    """Return the folder of the named study. If none is named, return the plan's folder or `study`
    in it, if one of them holds a study, else None.
    """
    folders = (here, here / "study") if study_dir is None else (study_dir,)
    return next((folder for folder in folders if (folder / LEDGER_NAME).exists()), study_dir)


def _load_speeds(study: Study, folder: Path | None, ledger: Ledger | None) -> Speeds:
    """Return the speeds of proxies: those that a study's calibration recorded, or assumed ones."""
    from forerun._launcher.study.calibration.procedure import group_runs, read_calibrations
    from forerun._launcher.study.calibration.study_cost import Speeds, collect_speeds

    records = () if ledger is None else read_calibrations(ledger)
    if not records:
        return Speeds()
    source = f"as calibrated in {folder}, with all its workers at once"
    recorded_keys = {record.asked.key for record in records}
    shapes = [group.asked for group in group_runs(study)]
    num_open = sum(bool(shape.open) and shape.key not in recorded_keys for shape in shapes)
    if num_open:
        source += (
            f"; shapes that a later stage decides ({num_open}) have the speed of the nearest shape"
        )
    return collect_speeds(records, study, source)


def _build_stages_body(
    study: Study, main: MainEstimate, speeds: Speeds, runs: Sequence[Run]
) -> dict[str, Json]:
    """Return the cost of the stages on the study's workers, and on GPUs like the main run's."""
    from forerun._launcher.study.calibration.study_cost import (
        assume_worker_speed,
        compute_stage_costs,
        count_workers,
        divide_cost_by_kind,
        estimate_run_overhead,
        estimate_wall_hours,
        sum_dollars,
        sum_stage_costs,
    )

    machine, gpus = main.machine, study.plan.cluster.worker_gpus
    measured_gpus = gpus if speeds.measured else 0.0
    if not speeds.measured and gpus:
        speeds = assume_worker_speed(study, machine.name, machine.peak_flops)
    workers = count_workers(study, speeds.num_workers)
    stages = compute_stage_costs(study, speeds)
    kinds = speeds.kinds if measured_gpus else ()

    def price(kind: str) -> Span | None:
        """Return the price of an hour of the cluster's GPUs of a kind, else of the main run's."""
        usd = study.plan.cluster.caps.find_price(kind) if kinds else None
        return machine.price_usd if usd is None else make_exact(usd)

    def build_row(stage: StageCost) -> dict[str, Json]:
        on_gpu = stage.gpu_hours(machine.peak_flops, measured_gpus)
        usd = sum_dollars(divide_cost_by_kind(on_gpu, kinds, price))
        return _build_stage_row(stage, stage.hours(workers), on_gpu, usd, main.run)

    mfu = PROXY_MFU
    if measured_gpus:
        peak_flops = gpus * machine.peak_flops
        mfu = replace(speeds.over_all.scale(1 / peak_flops), source=speeds.source)
    total = sum_stage_costs(stages)
    on_gpu = total.gpu_hours(machine.peak_flops, measured_gpus)
    costs = divide_cost_by_kind(on_gpu, kinds, price)
    dollars, gpu_hours = GPU_TOTALS
    spans = {dollars: sum_dollars(costs), gpu_hours: on_gpu, "hours": total.hours(workers)}
    return {
        "stages": [build_row(stage) for stage in stages],
        "total": build_row(total),
        "wall_hours": estimate_wall_hours(
            stages, workers, estimate_run_overhead(study, runs, speeds)
        ).to_json(),
        "warnings": [
            *filter(None, [warn_of_data(study, main.run.num_tokens)]),
            *_find_wide_span(spans, gpus=gpus, measured=bool(speeds.measured)),
        ],
        "pruner": study.plan.search.pruner,
        "num_workers": workers,
        "kinds": [cost.to_json() for cost in costs if kinds],
        "worker_flops": speeds.over_all.to_json(),
        "proxy_mfu": mfu.to_json(),
        "main_run_from": _explain_main_run(study, main.run),
    }


def _explain_main_run(study: Study, run: MainRun) -> str:
    """Return where the size of the main run comes from, in words."""
    tokens_per_param = run.num_tokens / count_params(run.shape).total
    return (
        f"a guess until the ladder is fitted: {format_significant(tokens_per_param)} tokens a "
        "parameter, as near to 20 as the budget and target.width_multiple = "
        f"{study.plan.target.width_multiple} allow"
    )


def _build_stage_row(
    stage: StageCost, hours: Span, on_gpu: Span, usd: Span | None, main_run: MainRun
) -> dict[str, Json]:
    return {
        "stage": stage.name,
        "num_runs": list(stage.num_runs),
        "flops": stage.flops.to_json(),
        "core_hours": stage.core_hours.to_json(),
        "hours": hours.to_json(),
        "gpu_hours": on_gpu.to_json(),
        "usd": None if usd is None else usd.to_json(),
        "disk_bytes": stage.disk_bytes.to_json(),
        "share_of_main_run": stage.flops.value / main_run.flops["causal"],
    }


def _find_wide_span(spans: Mapping[str, Span | None], *, gpus: float, measured: bool) -> list[Json]:
    """Return a warning about the least certain total of a study, with what would narrow it; empty
    if all totals are certain enough to be useful.
    """
    for name, span in spans.items():
        if span and span.high > WIDE_RATIO * span.low:
            remedy = (
                "a sweep, which measures the speed of proxies first; then run `forerun estimate "
                "PLAN --study STUDY`"
            )
            if measured and (gpus or name == "hours"):
                remedy = (
                    "fewer extensions in the plan (search.max_extensions, transfer.max_extensions)"
                )
            factor = format_factor(span.high / span.low)
            sentence = f"{name} of the study are known only within a factor of {factor}"
            return [f"{sentence}; what narrows them: {remedy}"]
    return []
