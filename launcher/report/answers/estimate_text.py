"""The text of an estimate: time and cost of a study in a sentence, its stages as a table, and its
main run. With `--full`, the text also has the assumptions and every number of the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._proxies.core.notation import (
    NONE,
    format_bytes,
    format_count,
    format_counted,
    format_flops,
    format_main_run_share,
    format_percent,
    format_rough_duration,
    format_significant,
)

GPU_TOTALS = ("dollars", "GPU-hours")
"""Totals of a study that matter only to users who asked about GPUs. The estimate holds its warnings
as plain text; a warning about a total begins with its name."""


def format_study_estimate(body: dict[str, Any], *, gpus: bool, full: bool, is_local: bool) -> str:
    """Format an estimate for people, beginning with a sentence on time and cost.

    Args:
        body: The estimate, as `--json` prints it.
        gpus: Whether to show GPU-hours and dollars, of the main run and of proxies trained on GPUs.
        full: Whether to show every assumption, way of counting, and number of the layout.
        is_local: Whether the study's workers run on this machine.
    """
    main = body["main_run"]
    if "stages" not in body:
        total = _describe_main_run(main, None, gpus=gpus)
        details = _format_main(main) if full else _format_warnings(_select_warnings(main, gpus))
        return "\n\n".join(filter(None, [total, details]))
    parts = [_describe_study(body, is_local=is_local)]
    kinds = _format_kinds(body) if gpus else ""
    if full:
        parts += [*_format_full_stages(body), kinds, _format_main(main)]
    else:
        parts += [_format_stages(body, gpus=gpus), kinds, _format_assumptions(body, gpus=gpus)]
    return "\n\n".join(filter(None, parts))


def format_hours(estimate: dict[str, Any]) -> str:
    """Return hours with their interval, in the unit that fits: `about 12 min (8 to 20)`."""
    value, *ends = format_rough_duration(*(3600 * hours for hours in _list_numbers(estimate)))
    return f"about {value}" + (f" ({ends[0]} to {ends[1]})" if ends else "")


# ---- The study ----


def _describe_study(body: dict[str, Any], *, is_local: bool) -> str:
    """Describe the time and cost of the study."""
    total = body["total"]
    place = "this machine" if is_local else format_counted(body["num_workers"], "worker")
    return (
        f"{format_hours(body['wall_hours'])} on {place} from `forerun run` to its report, "
        f"{format_main_run_share(total['share_of_main_run'])}, "
        f"{format_bytes(total['disk_bytes']['value'])} of disk"
    )


def _list_stages(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*body["stages"], {**body["total"], "stage": "all runs"}]


def _format_stages(body: dict[str, Any], *, gpus: bool) -> str:
    """Format a table with one row per stage."""
    head = (
        "stage",
        "runs",
        f"time on {format_counted(body['num_workers'], 'worker')}",
        "share of main run",
        *(("or GPU-hours", "USD of these") if gpus else ()),
    )
    rows = [
        (
            stage["stage"],
            _format_num_runs(stage),
            format_hours(stage["hours"]).removeprefix("about "),
            format_percent(stage["share_of_main_run"]),
            *(_format_gpu_cost(stage) if gpus else ()),
        )
        for stage in _list_stages(body)
    ]
    return format_table(head, rows)


def _format_full_stages(body: dict[str, Any]) -> list[str]:
    """Format the stages with every number, and the assumptions behind them."""
    stages = _list_stages(body)
    run_rows = [
        (
            stage["stage"],
            _format_num_runs(stage),
            # The interval's ends are the FLOPs without extensions of the search ranges, and with
            # every extension that the plan allows.
            " to ".join(
                dict.fromkeys(map(format_flops, _list_numbers(stage["flops"])[1:]))
                or [format_flops(stage["flops"]["value"])]
            ),
            format_percent(stage["share_of_main_run"]),
            format_bytes(stage["disk_bytes"]["value"]),
        )
        for stage in stages
    ]
    time_rows = [
        (stage["stage"], _format_estimate(stage["hours"], digits=2), *_format_gpu_cost(stage))
        for stage in stages
    ]
    time_column = f"hours on {format_counted(body['num_workers'], 'worker')}"
    proxy_mfu = body["proxy_mfu"]
    assumptions = [
        _describe_worker(body),
        f"a GPU reaches {_format_estimate(proxy_mfu)} of its peak ({proxy_mfu['source']})",
        f"from `forerun run` to its report: {body['wall_hours']['source']}",
        f"the main run's size is {body['main_run_from']}",
    ]
    if body["pruner"] != "none":
        assumptions.append(
            "the search is counted in full, an upper bound: search.pruner = "
            f"{body['pruner']!r} stops trials early"
        )
    notes = "\n".join(["assumed:", *(f"- {text}" for text in assumptions)])
    return [
        format_table(("stage", "runs", "FLOPs", "share of main run", "disk"), run_rows),
        format_table(("stage", time_column, "or GPU-hours", "USD of these"), time_rows),
        "\n".join(filter(None, [notes, _format_warnings(body["warnings"])])),
    ]


def _format_kinds(body: dict[str, Any]) -> str:
    """Format a table of the cost by kind of worker; empty if there is only one kind."""
    rows = [
        (kind["kind"], str(kind["num_workers"]), *_format_gpu_cost(kind)) for kind in body["kinds"]
    ]
    head = ("all runs by kind", "workers", "GPU-hours", "USD")
    return format_table(head, rows) if len(rows) > 1 else ""


def _format_assumptions(body: dict[str, Any], *, gpus: bool) -> str:
    """Describe the main run, the assumptions behind it, and the warnings about it."""
    study_warnings = [
        warning for warning in body["warnings"] if gpus or not warning.startswith(GPU_TOTALS)
    ]
    lines = [
        _describe_main_run(body["main_run"], body["worker_flops"], gpus=gpus),
        f"assumed: {_describe_worker(body)}",
        f"assumed: the main run's size is {body['main_run_from']}",
        _format_warnings([*study_warnings, *_select_warnings(body["main_run"], gpus)]),
    ]
    return "\n".join(filter(None, lines))


def _describe_worker(body: dict[str, Any]) -> str:
    speed = body["worker_flops"]
    return (
        f"a worker reaches {_format_estimate(speed, write=format_flops)} FLOP/s ({speed['source']})"
    )


def _format_num_runs(stage: dict[str, Any]) -> str:
    """Format a stage's number of runs. Checks are marked short: the ledger does not count them."""
    ends = " to ".join(str(number) for number in sorted(set(stage["num_runs"])))
    return f"{ends} short" if stage["stage"] == "check" else ends


def _format_gpu_cost(costs: dict[str, Any]) -> tuple[str, str]:
    """Format GPU-hours, and dollars if a price is known."""
    usd = NONE if costs["usd"] is None else _format_estimate(costs["usd"], digits=2)
    return _format_estimate(costs["gpu_hours"], digits=2), usd


# ---- The main run ----


def _describe_main_run(main: dict[str, Any], speed: dict[str, Any] | None, *, gpus: bool) -> str:
    """Describe time and cost of the main run on GPUs; without `gpus` on this machine's cores.

    Args:
        main: The main run, as JSON.
        speed: FLOP/s of a worker, with an interval; None for the assumed speed.
        gpus: Whether the main run trains on GPUs.
    """
    from forerun._launcher.study.calibration.study_cost import WORKER_FLOPS
    from forerun._sweeps.run.cores import count_cores

    if gpus:
        machine, days = main["machine"], main["days"]
        hours = {
            "value": 24 * days["value"],
            "interval": [24 * end for end in days["interval"] or ()],
        }
        return (
            f"main run: {format_hours(hours)} on {machine['num_gpus']} {machine['gpu']}, "
            f"{_format_estimate(main['gpu_hours'])} GPU-hours, {_format_price(main)}; "
            f"{_format_size(main)}"
        )
    speed = speed or cast(dict[str, Any], WORKER_FLOPS.to_json())
    num_ranks = max(1, min(main["machine"]["num_gpus"], int(count_cores())))
    flops_per_rank = main["flops"]["causal"] / num_ranks
    # The highest speed gives the lowest hours, so the ends of the interval change places.
    hours = {
        "value": flops_per_rank / speed["value"] / 3600,
        "interval": [flops_per_rank / end / 3600 for end in reversed(speed["interval"] or ())],
    }
    return (
        f"main run: {format_hours(hours)} if it trains as fast as a worker, {_format_size(main)}, "
        f"{format_flops(main['flops']['six_nd'])} FLOPs, {format_bytes(main['disk_bytes'])} of disk"
    )


def _format_price(main: dict[str, Any]) -> str:
    if main["usd"] is None:
        return "no price is known: give --price-usd"
    return f"USD {_format_estimate(main['usd'])}"


def _format_size(main: dict[str, Any]) -> str:
    shape = main["shape"]
    return (
        f"{format_count(main['params'])} parameters "
        f"({format_counted(shape['num_layers'], 'layer')}, "
        f"width {shape['width']}), {format_count(main['tokens'])} tokens"
    )


def _select_warnings(main: dict[str, Any], gpus: bool) -> list[str]:
    """Return the warnings about the main run; without `gpus`, leave out those about GPU-hours.

    A warning about GPU-hours is recognized by the word "hours" in its text. The texts are those of
    `forerun._launcher.main_run.estimates.main_run`.
    """
    return [warning for warning in main["warnings"] if gpus or "hours" not in warning]


def _format_warnings(warnings: list[str]) -> str:
    return "\n".join(f"warning: {warning}" for warning in warnings)


def _format_main(main: dict[str, Any]) -> str:
    """Format every number of the main run."""
    machine = main["machine"]
    mfu, utilization = machine["mfu"], machine["utilization"]
    flops = _join_named({name: format_flops(value) for name, value in main["flops"].items()})
    if main["optimizer_flops"]:
        flops += f"; the optimizer's own, in the hours too: {format_flops(main['optimizer_flops'])}"
    lines = [
        f"main run: {_format_size(main)}, {main['batch_tokens']} a step",
        f"FLOPs: {flops}",
        (
            f"on {machine['num_gpus']} {machine['gpu']} ({format_flops(machine['peak_flops'])} "
            f"FLOP/s, {machine['memory_gb']:g} GB) at MFU {_format_estimate(mfu)}, convention "
            f"{machine['mfu_convention']} ({mfu['source']}) while it trains: "
            f"{_format_estimate(main['step_seconds'])} s a step"
        ),
        (
            f"all hours paid: {_format_estimate(main['gpu_hours'])} GPU-hours, "
            f"{_format_estimate(main['days'])} days, by a share of {_format_estimate(utilization)} "
            f"({utilization['source']}), {_format_price(main)}"
        ),
        f"parallelism: {_join_named(main['parallelism'])}",
    ]
    if main["memory"]:
        gigabytes = {
            name.removesuffix("_bytes"): format_significant(value / 1e9)
            for name, value in main["memory"].items()
            if name != "moment"  # The moment of a step when memory is highest; no number
        }
        lines.append(f"memory of a rank (GB): {_join_named(gigabytes)}")
    lines.append(f"disk, for checkpoints: {format_bytes(main['disk_bytes'])}")
    return "\n".join(filter(None, [*lines, _format_warnings(main["warnings"])]))


# ---- Numbers ----


def _join_named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _list_numbers(estimate: dict[str, Any]) -> list[float]:
    """Return the value of an estimate, and the ends of its interval if it has one."""
    return [estimate["value"], *(estimate["interval"] or ())]


def _format_estimate(
    estimate: dict[str, Any], digits: int = 3, write: Callable[[float], str] | None = None
) -> str:
    """Format an estimate with its interval, in significant digits or by a function."""
    write = write or (lambda number: format_significant(number, digits))
    value, *ends = map(write, _list_numbers(estimate))
    return f"{value} [{', '.join(ends)}]" if ends else value
