"""How an estimate reads: tables for the stages, lines for the main run."""

from __future__ import annotations

from typing import Any

from launcher.base.talk import duration
from launcher.cli.options import table

_GB = 1e9


def estimate_text(body: dict[str, Any]) -> str:
    """The answer in words and tables, for people."""
    return "\n\n".join([*(_stages(body) if "stages" in body else []), _main(body["main_run"])])


def _stages(body: dict[str, Any]) -> list[str]:
    every = [*body["stages"], body["total"]]
    ran = [
        (s["stage"], _runs(s["num_runs"]), _between(s["flops"]), f"{s['share_of_main_run']:.2g}",
         f"{s['disk_bytes']['value'] / 1e6:.2g} MB")
        for s in every
    ]  # fmt: skip
    taken = [
        (s["stage"], _span(s["hours"], 2), _span(s["gpu_hours"], 2), "-" if s["usd"] is None else _span(s["usd"], 2))
        for s in every
    ]
    on = f"hours on {body['num_workers']} worker{'s' * (body['num_workers'] != 1)}"
    speed, share = body["worker_flops"], body["proxy_mfu"]
    notes = (f"a worker reaches {_span(speed)} FLOP/s ({speed['source']})",
            f"a GPU reaches {_span(share)} of its peak ({share['source']})",
            f"from `forerun run` to its report: {body['wall_hours']['source']}",
            f"the main run's size is from {body['main_run_from']}",
            *([f"the search is counted in full, an upper bound: search.pruner = {body['pruner']!r} stops trials early"]
              if body["pruner"] != "none" else []))  # fmt: skip
    return [
        table(("stage", "runs", "FLOPs", "share of main run", "disk"), ran),
        table(("stage", on, "or GPU-hours", "USD of these"), taken),
        f"from `forerun run` to its report: {_time(body['wall_hours'])}; the upper end is for a busy machine",
        "\n".join(["assumed:", *(f"- {text}" for text in notes), *(f"warning: {text}" for text in body["warnings"])]),
    ]


def _time(hours: dict[str, Any]) -> str:
    low, high = (duration(3600.0 * end) for end in hours["interval"])
    return f"{low} to {high}"


def _runs(ends: list[int]) -> str:
    return " to ".join(str(number) for number in sorted(set(ends)))


def _main(main: dict[str, Any]) -> str:
    shape, machine = main["shape"], main["machine"]
    size = f"{main['params']:.4g} parameters ({shape['num_layers']} layers, width {shape['width']})"
    gpus = f"{machine['num_gpus']} {machine['gpu']} ({machine['peak_flops']:.4g} FLOP/s, {machine['memory_gb']:g} GB)"
    mfu = f"{_span(machine['mfu'])}, convention {machine['mfu_convention']} ({machine['mfu']['source']})"
    lines = [
        f"main run: {size}, {main['tokens']:.4g} tokens, {main['batch_tokens']} a step",
        "FLOPs: " + ", ".join(f"{name} {value:.4g}" for name, value in main["flops"].items()),
        f"on {gpus} at MFU {mfu} while it trains: {_span(main['step_seconds'])} s a step",
        f"all hours paid: {_span(main['gpu_hours'])} GPU-hours, {_span(main['days'])} days, by a share of "
        f"{_span(machine['utilization'])} ({machine['utilization']['source']}), "
        + ("no price is known: give --price-usd" if main["usd"] is None else f"USD {_span(main['usd'])}"),
    ]
    lines.append("parallelism: " + ", ".join(f"{name} {value}" for name, value in main["parallelism"].items()))
    if held := main["memory"]:
        parts = {name.removesuffix("_bytes"): value / _GB for name, value in held.items() if name != "moment"}
        lines.append("memory of a rank (GB): " + ", ".join(f"{name} {value:.3g}" for name, value in parts.items()))
    lines.append(f"disk, for checkpoints: {main['disk_bytes'] / _GB:.3g} GB")
    return "\n".join([*lines, *(f"warning: {sentence}" for sentence in main["warnings"])])


def _between(of: dict[str, Any]) -> str:
    """At least, and with every extension that the plan allows."""
    return " to ".join(dict.fromkeys(f"{end:.3g}" for end in of["interval"] or [of["value"]]))


def _span(of: dict[str, Any], digits: int = 3) -> str:
    value, *ends = (f"{number:.{digits}g}" for number in (of["value"], *(of["interval"] or ())))
    return f"{value} [{', '.join(ends)}]" if ends else value
