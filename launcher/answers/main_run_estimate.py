"""How an estimate reads: time and cost in a sentence, the stages as a table, the main run; the rest
with `--full`.
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
_OF_GPUS = ("GPU-hours", "dollars")
"""How warnings begin that concern nobody who did not ask for GPUs."""


def estimate_text(body: dict[str, Any], *, gpus: bool, full: bool, here: bool = True) -> str:
    """The answer for people: the sentence that says what it takes first.

    Args:
        body: what `--json` prints.
        gpus: GPU-hours and dollars too, of a main run and of proxies that train on GPUs.
        full: every assumption, way of counting and number of the layout.
        here: the study's workers are this machine's.
    """
    main = body["main_run"]
    parts = [_first(body, gpus=gpus, here=here)]
    kinds = _kinds(body) if gpus else ""
    if full:
        stages = [*_stages(body), *filter(None, [kinds])] if "stages" in body else []
        return "\n\n".join([*parts, *stages, _main(main)])
    if "stages" in body:
        parts += [_short_stages(body, gpus=gpus), kinds]
    return "\n\n".join(filter(None, [*parts, "\n".join(_short_main(body, gpus=gpus))]))


def time_text(of: dict[str, Any]) -> str:
    """Return hours with their interval, in the unit that fits: `about 12 min (8 to 20)`."""
    value, *ends = format_rough_duration(
        *(3600 * hours for hours in (of["value"], *(of["interval"] or ())))
    )
    return f"about {value}" + (f" ({ends[0]} to {ends[1]})" if ends else "")


def _first(body: dict[str, Any], *, gpus: bool, here: bool) -> str:
    """Time and cost of what is asked about: the study, or the main run of a frozen config."""
    if "stages" not in body:
        return _main_cost(body["main_run"]) if gpus else _main_here(body["main_run"])
    total, where = (
        body["total"],
        "this machine" if here else f"{counted(body['num_workers'], 'worker')}",
    )
    share = total["share_of_main_run"]
    return (
        f"{time_text(body['wall_hours'])} on {where} from `forerun run` to its report, "
        f"{format_main_run_share(share)}, {format_bytes(total['disk_bytes']['value'])} of disk"
    )


def _short_stages(body: dict[str, Any], *, gpus: bool) -> str:
    """One row a stage."""
    num = body["num_workers"]
    rows = [
        (
            s["stage"],
            _runs(s),
            time_text(s["hours"]).removeprefix("about "),
            format_percent(s["share_of_main_run"]),
            *(
                (_span(s["gpu_hours"], 2), "-" if s["usd"] is None else _span(s["usd"], 2))
                if gpus
                else ()
            ),
        )
        for s in [*body["stages"], {**body["total"], "stage": "all runs"}]
    ]
    more = ("or GPU-hours", "USD of these") if gpus else ()
    return table(
        ("stage", "runs", f"time on {counted(num, 'worker')}", "share of main run", *more), rows
    )


def _kinds(body: dict[str, Any]) -> str:
    """What the workers of each kind take, where there are several."""
    rows = [
        (
            one["kind"],
            str(one["num_workers"]),
            _span(one["gpu_hours"], 2),
            "-" if one["usd"] is None else _span(one["usd"], 2),
        )
        for one in body.get("kinds", ())
    ]
    return table(("all runs by kind", "workers", "GPU-hours", "USD"), rows) if len(rows) > 1 else ""


def _short_main(body: dict[str, Any], *, gpus: bool) -> list[str]:
    """The main run, what the answer rests on, and every warning that concerns it."""
    main, lines = body["main_run"], []
    warned = list(main["warnings"])
    if not gpus:  # nobody asked for its hours
        warned = [text for text in warned if "hours" not in text]
    if "stages" in body:
        speed = body["worker_flops"]
        lines.append(_main_cost(main) if gpus else _main_here(main, speed))
        lines.append(f"assumed: a worker reaches {_flops_span(speed)} FLOP/s ({speed['source']})")
        lines.append(f"assumed: the main run's size is {body['main_run_from']}")
        warned = [
            *(text for text in body["warnings"] if gpus or not text.startswith(_OF_GPUS)),
            *warned,
        ]
    return [*lines, *(f"warning: {text}" for text in warned)]


def _main_here(main: dict[str, Any], speed: dict[str, Any] | None = None) -> str:
    """A main run too small for GPUs, on this machine's cores at a worker's speed: FLOP/s, assumed
    where not given.
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
        f"main run: {time_text(hours)} if it trains as fast as a worker, {_size(main)}, "
        f"{format_flops(main['flops']['six_nd'])} FLOPs, {format_bytes(main['disk_bytes'])} of disk"
    )


def _main_cost(main: dict[str, Any]) -> str:
    price = (
        "no price is known: give --price-usd"
        if main["usd"] is None
        else f"USD {_span(main['usd'])}"
    )
    machine = main["machine"]
    return (
        f"main run: {time_text(_in_hours(main['days']))} on {machine['num_gpus']} "
        f"{machine['gpu']}, "
        f"{_span(main['gpu_hours'])} GPU-hours, {price}; {_size(main)}"
    )


def _in_hours(days: dict[str, Any]) -> dict[str, Any]:
    return {
        "value": 24 * days["value"],
        "interval": [24 * end for end in days["interval"] or ()] or None,
    }


def _size(main: dict[str, Any]) -> str:
    shape = main["shape"]
    return (
        f"{format_count(main['params'])} parameters ({counted(shape['num_layers'], 'layer')}, "
        "width "
        f"{shape['width']}), {format_count(main['tokens'])} tokens"
    )


def _stages(body: dict[str, Any]) -> list[str]:
    every = [*body["stages"], {**body["total"], "stage": "all runs"}]
    ran = [
        (
            s["stage"],
            _runs(s),
            _between(s["flops"]),
            format_percent(s["share_of_main_run"]),
            format_bytes(s["disk_bytes"]["value"]),
        )
        for s in every
    ]
    taken = [
        (
            s["stage"],
            _span(s["hours"], 2),
            _span(s["gpu_hours"], 2),
            "-" if s["usd"] is None else _span(s["usd"], 2),
        )
        for s in every
    ]
    on = f"hours on {counted(body['num_workers'], 'worker')}"
    speed, share = body["worker_flops"], body["proxy_mfu"]
    notes = (
        f"a worker reaches {_flops_span(speed)} FLOP/s ({speed['source']})",
        f"a GPU reaches {_span(share)} of its peak ({share['source']})",
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
        table(("stage", "runs", "FLOPs", "share of main run", "disk"), ran),
        table(("stage", on, "or GPU-hours", "USD of these"), taken),
        "\n".join(
            [
                "assumed:",
                *(f"- {text}" for text in notes),
                *(f"warning: {text}" for text in body["warnings"]),
            ]
        ),
    ]


def _runs(stage: dict[str, Any]) -> str:
    """Checks are short, and none of the runs that the ledger and `status` count."""
    ends = " to ".join(str(number) for number in sorted(set(stage["num_runs"])))
    return f"{ends} short" if stage["stage"] == "check" else ends


def _main(main: dict[str, Any]) -> str:
    machine = main["machine"]
    peak = f"{format_flops(machine['peak_flops'])} FLOP/s"
    gpus = f"{machine['num_gpus']} {machine['gpu']} ({peak}, {machine['memory_gb']:g} GB)"
    mfu = (
        f"{_span(machine['mfu'])}, convention {machine['mfu_convention']} "
        f"({machine['mfu']['source']})"
    )
    lines = [
        f"main run: {_size(main)}, {main['batch_tokens']} a step",
        "FLOPs: "
        + ", ".join(f"{name} {format_flops(value)}" for name, value in main["flops"].items())
        + (
            f"; the optimizer's own, in the hours too: {format_flops(main['optimizer_flops'])}"
            if main["optimizer_flops"]
            else ""
        ),
        f"on {gpus} at MFU {mfu} while it trains: {_span(main['step_seconds'])} s a step",
        f"all hours paid: {_span(main['gpu_hours'])} GPU-hours, {_span(main['days'])} days, by a "
        "share of "
        f"{_span(machine['utilization'])} ({machine['utilization']['source']}), "
        + (
            "no price is known: give --price-usd"
            if main["usd"] is None
            else f"USD {_span(main['usd'])}"
        ),
    ]
    lines.append(
        "parallelism: "
        + ", ".join(f"{name} {value}" for name, value in main["parallelism"].items())
    )
    if held := main["memory"]:
        parts = {
            name.removesuffix("_bytes"): value / _GB
            for name, value in held.items()
            if name != "moment"
        }
        lines.append(
            "memory of a rank (GB): "
            + ", ".join(f"{name} {format_significant(value)}" for name, value in parts.items())
        )
    lines.append(f"disk, for checkpoints: {format_bytes(main['disk_bytes'])}")
    return "\n".join([*lines, *(f"warning: {sentence}" for sentence in main["warnings"])])


def _between(of: dict[str, Any]) -> str:
    """At least, and with every extension that the plan allows."""
    return " to ".join(dict.fromkeys(map(format_flops, of["interval"] or [of["value"]])))


def _span(of: dict[str, Any], digits: int = 3) -> str:
    return _join_ends(
        *(format_significant(number, digits) for number in (of["value"], *(of["interval"] or ())))
    )


def _flops_span(of: dict[str, Any]) -> str:
    return _join_ends(*(format_flops(number) for number in (of["value"], *(of["interval"] or ()))))


def _join_ends(value: str, *ends: str) -> str:
    return f"{value} [{', '.join(ends)}]" if ends else value
