"""The text of an estimate: time and cost in a sentence, the stages as a table, the main run.

The assumptions and every number of the layout are shown with `--full`.
"""

from __future__ import annotations

from typing import Any, cast

from launcher.cli.options import table
from proxies.core.notation import (
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_main_run_share,
    format_percent,
    format_rough_duration,
    format_significant,
)

_GB = 1e9
_GPU_WARNING_STARTS = ("GPU-hours", "dollars")
"""Beginnings of the warnings that matter only to users who asked about GPUs."""


def estimate_text(body: dict[str, Any], *, gpus: bool, full: bool, here: bool = True) -> str:
    """Format an estimate for people, beginning with a sentence on time and cost.

    Args:
        body: The estimate, as `--json` prints it.
        gpus: Whether to show GPU-hours and dollars, of the main run and of proxies trained on GPUs.
        full: Whether to show every assumption, way of counting, and number of the layout.
        here: Whether the study's workers run on this machine.
    """
    main = body["main_run"]
    parts = [_describe_total(body, gpus=gpus, here=here)]
    kinds = _format_kinds(body) if gpus else ""
    if full:
        stages = [*_format_stages(body), *filter(None, [kinds])] if "stages" in body else []
        return "\n\n".join([*parts, *stages, _format_main(main)])
    if "stages" in body:
        parts += [_format_short_stages(body, gpus=gpus), kinds]
    return "\n\n".join(filter(None, [*parts, "\n".join(_format_short_main(body, gpus=gpus))]))


def time_text(estimate: dict[str, Any]) -> str:
    """Return hours with their interval, in the unit that fits: `about 12 min (8 to 20)`."""
    value, *ends = format_rough_duration(
        *(3600 * hours for hours in (estimate["value"], *(estimate["interval"] or ())))
    )
    return f"about {value}" + (f" ({ends[0]} to {ends[1]})" if ends else "")


def _describe_total(body: dict[str, Any], *, gpus: bool, here: bool) -> str:
    """Describe the time and cost of the study, or of the main run of a frozen config."""
    if "stages" not in body:
        return (
            _describe_main_cost(body["main_run"]) if gpus else _describe_main_here(body["main_run"])
        )
    total, where = (
        body["total"],
        "this machine" if here else f"{counted(body['num_workers'], 'worker')}",
    )
    share = total["share_of_main_run"]
    return (
        f"{time_text(body['wall_hours'])} on {where} from `forerun run` to its report, "
        f"{format_main_run_share(share)}, {format_bytes(total['disk_bytes']['value'])} of disk"
    )


def _format_short_stages(body: dict[str, Any], *, gpus: bool) -> str:
    """Format a table with one row per stage."""
    num_workers = body["num_workers"]
    rows = [
        (
            stage["stage"],
            _format_num_runs(stage),
            time_text(stage["hours"]).removeprefix("about "),
            format_percent(stage["share_of_main_run"]),
            *(
                (
                    _format_estimate(stage["gpu_hours"], 2),
                    "-" if stage["usd"] is None else _format_estimate(stage["usd"], 2),
                )
                if gpus
                else ()
            ),
        )
        for stage in [*body["stages"], {**body["total"], "stage": "all runs"}]
    ]
    gpu_columns = ("or GPU-hours", "USD of these") if gpus else ()
    return table(
        (
            "stage",
            "runs",
            f"time on {counted(num_workers, 'worker')}",
            "share of main run",
            *gpu_columns,
        ),
        rows,
    )


def _format_kinds(body: dict[str, Any]) -> str:
    """Format a table of the cost by kind of worker; empty if there is only one kind."""
    rows = [
        (
            kind["kind"],
            str(kind["num_workers"]),
            _format_estimate(kind["gpu_hours"], 2),
            "-" if kind["usd"] is None else _format_estimate(kind["usd"], 2),
        )
        for kind in body.get("kinds", ())
    ]
    return table(("all runs by kind", "workers", "GPU-hours", "USD"), rows) if len(rows) > 1 else ""


def _format_short_main(body: dict[str, Any], *, gpus: bool) -> list[str]:
    """Return lines on the main run, the assumptions behind it, and the warnings about it."""
    main, lines = body["main_run"], []
    warnings = list(main["warnings"])
    if not gpus:  # Nobody asked for its hours.
        warnings = [text for text in warnings if "hours" not in text]
    if "stages" in body:
        speed = body["worker_flops"]
        lines.append(_describe_main_cost(main) if gpus else _describe_main_here(main, speed))
        lines.append(
            f"assumed: a worker reaches {_format_flops_estimate(speed)} FLOP/s ({speed['source']})"
        )
        lines.append(f"assumed: the main run's size is {body['main_run_from']}")
        warnings = [
            *(
                text
                for text in body["warnings"]
                if gpus or not text.startswith(_GPU_WARNING_STARTS)
            ),
            *warnings,
        ]
    return [*lines, *(f"warning: {text}" for text in warnings)]


def _describe_main_here(main: dict[str, Any], speed: dict[str, Any] | None = None) -> str:
    """Describe a main run that is too small for GPUs and trains on this machine's cores.

    Args:
        main: The main run, as JSON.
        speed: FLOP/s of a worker, with an interval; None for the assumed speed.
    """
    from launcher.calibration.study_cost import WORKER_FLOPS
    from sweeps.run.pool import num_cores

    speed = speed or cast(dict[str, Any], WORKER_FLOPS.told())
    ranks = min(main["machine"]["num_gpus"], int(num_cores()))
    seconds = main["flops"]["causal"] / max(1, ranks)
    ends = reversed(speed["interval"] or ())
    hours = {
        "value": seconds / speed["value"] / 3600,
        "interval": [seconds / end / 3600 for end in ends],
    }
    return (
        f"main run: {time_text(hours)} if it trains as fast as a worker, {_format_size(main)}, "
        f"{format_flops(main['flops']['six_nd'])} FLOPs, {format_bytes(main['disk_bytes'])} of disk"
    )


def _describe_main_cost(main: dict[str, Any]) -> str:
    price = (
        "no price is known: give --price-usd"
        if main["usd"] is None
        else f"USD {_format_estimate(main['usd'])}"
    )
    machine = main["machine"]
    return (
        f"main run: {time_text(_to_hours(main['days']))} on {machine['num_gpus']} "
        f"{machine['gpu']}, "
        f"{_format_estimate(main['gpu_hours'])} GPU-hours, {price}; {_format_size(main)}"
    )


def _to_hours(days: dict[str, Any]) -> dict[str, Any]:
    return {
        "value": 24 * days["value"],
        "interval": [24 * end for end in days["interval"] or ()] or None,
    }


def _format_size(main: dict[str, Any]) -> str:
    shape = main["shape"]
    return (
        f"{format_count(main['params'])} parameters ({counted(shape['num_layers'], 'layer')}, "
        f"width {shape['width']}), {format_count(main['tokens'])} tokens"
    )


def _format_stages(body: dict[str, Any]) -> list[str]:
    stages = [*body["stages"], {**body["total"], "stage": "all runs"}]
    run_rows = [
        (
            stage["stage"],
            _format_num_runs(stage),
            _format_flops_bounds(stage["flops"]),
            format_percent(stage["share_of_main_run"]),
            format_bytes(stage["disk_bytes"]["value"]),
        )
        for stage in stages
    ]
    time_rows = [
        (
            stage["stage"],
            _format_estimate(stage["hours"], 2),
            _format_estimate(stage["gpu_hours"], 2),
            "-" if stage["usd"] is None else _format_estimate(stage["usd"], 2),
        )
        for stage in stages
    ]
    hours_column = f"hours on {counted(body['num_workers'], 'worker')}"
    speed, share = body["worker_flops"], body["proxy_mfu"]
    notes = (
        f"a worker reaches {_format_flops_estimate(speed)} FLOP/s ({speed['source']})",
        f"a GPU reaches {_format_estimate(share)} of its peak ({share['source']})",
        f"from `forerun run` to its report: {body['wall_hours']['source']}",
        f"the main run's size is {body['main_run_from']}",
        *(
            [
                (
                    "the search is counted in full, an upper bound: search.pruner = "
                    f"{body['pruner']!r} stops trials early"
                )
            ]
            if body["pruner"] != "none"
            else []
        ),
    )
    return [
        table(("stage", "runs", "FLOPs", "share of main run", "disk"), run_rows),
        table(("stage", hours_column, "or GPU-hours", "USD of these"), time_rows),
        "\n".join(
            [
                "assumed:",
                *(f"- {text}" for text in notes),
                *(f"warning: {text}" for text in body["warnings"]),
            ]
        ),
    ]


def _format_num_runs(stage: dict[str, Any]) -> str:
    """Format a stage's number of runs. Checks are marked short: the ledger does not count them."""
    ends = " to ".join(str(number) for number in sorted(set(stage["num_runs"])))
    return f"{ends} short" if stage["stage"] == "check" else ends


def _format_main(main: dict[str, Any]) -> str:
    machine = main["machine"]
    peak = f"{format_flops(machine['peak_flops'])} FLOP/s"
    gpus = f"{machine['num_gpus']} {machine['gpu']} ({peak}, {machine['memory_gb']:g} GB)"
    mfu = (
        f"{_format_estimate(machine['mfu'])}, convention {machine['mfu_convention']} "
        f"({machine['mfu']['source']})"
    )
    step_seconds, gpu_hours, days = (
        _format_estimate(main[key]) for key in ("step_seconds", "gpu_hours", "days")
    )
    lines = [
        f"main run: {_format_size(main)}, {main['batch_tokens']} a step",
        "FLOPs: "
        + ", ".join(f"{name} {format_flops(value)}" for name, value in main["flops"].items())
        + (
            f"; the optimizer's own, in the hours too: {format_flops(main['optimizer_flops'])}"
            if main["optimizer_flops"]
            else ""
        ),
        f"on {gpus} at MFU {mfu} while it trains: {step_seconds} s a step",
        f"all hours paid: {gpu_hours} GPU-hours, {days} days, by a share of "
        f"{_format_estimate(machine['utilization'])} ({machine['utilization']['source']}), "
        + (
            "no price is known: give --price-usd"
            if main["usd"] is None
            else f"USD {_format_estimate(main['usd'])}"
        ),
    ]
    lines.append(
        "parallelism: "
        + ", ".join(f"{name} {value}" for name, value in main["parallelism"].items())
    )
    if memory := main["memory"]:
        parts = {
            name.removesuffix("_bytes"): value / _GB
            for name, value in memory.items()
            if name != "moment"
        }
        lines.append(
            "memory of a rank (GB): "
            + ", ".join(f"{name} {format_significant(value)}" for name, value in parts.items())
        )
    lines.append(f"disk, for checkpoints: {format_bytes(main['disk_bytes'])}")
    return "\n".join([*lines, *(f"warning: {sentence}" for sentence in main["warnings"])])


def _format_flops_bounds(estimate: dict[str, Any]) -> str:
    """Format FLOPs without and with every extension of the ranges that the plan allows."""
    return " to ".join(
        dict.fromkeys(map(format_flops, estimate["interval"] or [estimate["value"]]))
    )


def _format_estimate(estimate: dict[str, Any], digits: int = 3) -> str:
    return _join_ends(
        *(
            format_significant(number, digits)
            for number in (estimate["value"], *(estimate["interval"] or ()))
        )
    )


def _format_flops_estimate(estimate: dict[str, Any]) -> str:
    return _join_ends(
        *(format_flops(number) for number in (estimate["value"], *(estimate["interval"] or ())))
    )


def _join_ends(value: str, *ends: str) -> str:
    return f"{value} [{', '.join(ends)}]" if ends else value
