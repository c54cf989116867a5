"""The verb that says what a plan, or a frozen config, takes before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from launcher.verbs.options import answer, json_option, set_option, table
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.estimates.main_run import MainEstimate, MainRun
    from launcher.estimates.speeds import Speeds
    from launcher.study import Study

_GB = 1e9


@click.command()
@click.argument("path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--gpu", default="H100", show_default=True, help="Accelerator of the main run.")
@click.option("--gpus", "num_gpus", type=int, help="How many. Default: the ranks of the plan, or of the frozen config.")
@click.option(
    "--mfu", type=float, help="Share of the peak, attention's whole square counted (full). Default: 0.25 to 0.45."
)
@click.option("--tokens-per-second", "tokens_per_gpu_second", type=float,
              help="Of one GPU, measured; in place of --mfu.")  # fmt: skip
@click.option("--price-usd", type=float, help="Of one GPU for an hour. Default: published, where there is one.")
@click.option("--peak-flops", type=float, help="A second, of one GPU, dense BF16. Default: the table's.")
@click.option("--memory-gb", type=float, help="Of one GPU. Default: the table's.")
@click.option("--failures", "failures_per_1000_node_days", type=float,
              help="Interruptions per 1,000 node-days, nodes of 8. Default: 3.79, between 2.3 and 7.6.")  # fmt: skip
@click.option("--accepted-loss-minutes", type=float, default=60.0, show_default=True,
              help="Work that one interruption may cost: saves are no farther apart.")  # fmt: skip
@click.option("--study", "study_dir", type=click.Path(path_type=Path),
              help="Whose calibration tells how fast proxies are. Default: PLAN's folder, or study in it.")  # fmt: skip
@click.option("--measure", "measured", is_flag=True,
              help="Calibrate here, with one worker: seconds a shape, minutes where it compiles.")  # fmt: skip
@click.option("--dry-shard", "dry", is_flag=True,
              help="Shard the real shape by the chosen degrees over a fake process group: seconds.")  # fmt: skip
@set_option
@json_option
def estimate(path: Path, num_gpus: int | None, overrides: tuple[str, ...], dry: bool, as_json: bool,
             study_dir: Path | None, measured: bool, **typed: Any) -> None:  # fmt: skip
    """What PLAN takes before anything runs: runs of each stage, FLOPs, hours, dollars, time, disk; and its main run.

    PLAN may be a frozen config instead: then it is the main run alone, exactly as frozen, and the answer is attested
    beside it.
    """
    from launcher.estimates.machine import Given
    from launcher.estimates.main_run import estimate_main, main_body

    frozen = path.is_dir() or path.suffix == ".json"
    study, body, run, ranks = _of_frozen(path, overrides) if frozen else _of_plan(path, overrides)
    found = estimate_main(run, Given(num_gpus=ranks if num_gpus is None else num_gpus, **typed))
    if study is None and (measured or study_dir is not None):
        raise click.UsageError("--measure and --study are for a plan: a frozen config trains no proxies")
    if study is not None:
        body |= _stages_body(study, found, _speeds(study, path.parent, study_dir, measured))
    body["main_run"] = main_body(found)
    if dry:
        from launcher.estimates.dry_shard import dry_shard
        from proxies import canon

        body["dry_shard"] = canon.to_json(dry_shard(run.shape, found.parallel.layout))
    if frozen:
        from launcher.attestations import attest
        from launcher.verbs.options import folder_of

        attest(folder_of(path), "estimate", str(body["digest"]), body)
    answer(as_json, body, estimate_text(body))


_Asked = tuple["Study | None", dict[str, Json], "MainRun", int]
"""The study there is, what is said of it first, its main run, and the ranks of that."""


def _of_frozen(path: Path, overrides: tuple[str, ...]) -> _Asked:
    from launcher.estimates.layout import layout_of
    from launcher.estimates.main_run import MainRun
    from launcher.launch_file import read_launch

    if overrides:
        raise click.UsageError("--set changes a plan: a frozen config is what it is")
    decision = read_launch(path)
    run = MainRun(
        shape=decision.shape, num_tokens=decision.num_tokens, batch_tokens=decision.batch_tokens,
        precision="float32" if decision.precision == "float64" else decision.precision, layout=layout_of(decision),
        frozen=True,
    )  # fmt: skip
    return None, {"digest": decision.digest}, run, decision.parallelism.num_ranks


def _of_plan(path: Path, overrides: tuple[str, ...]) -> _Asked:
    from launcher.estimates.study_cost import planned_main_run
    from launcher.opening import plan_study

    study = plan_study(path, path.parent, overrides, source_sha256="0" * 64)
    run = planned_main_run(study)
    assert run.layout is not None  # a plan's [launch] always has one
    return study, {}, run, run.layout.num_ranks


def _speeds(study: Study, here: Path, study_dir: Path | None, measured: bool) -> Speeds:
    """How fast proxies train: as measured now, as a study's calibration recorded it, or as assumed."""
    from launcher.calibrating import calibrations, measured_here
    from launcher.estimates.speeds import Speeds, speeds_of
    from sweeps.ledger import LEDGER_NAME, Ledger

    if measured:
        if study.factory is not None or study.plan.command is not None:
            raise click.UsageError("--measure: proxies train by code of your own here, which its first runs time")
        if study.plan.proxy.num_ranks > 1:
            raise click.UsageError(
                f"--measure: one process measures, and proxy.num_ranks = {study.plan.proxy.num_ranks} wants as many: "
                "leave --measure away"
            )
        if study.plan.cluster.backend == "ray" and not study.plan.cluster.worker_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for its workers, which see no GPU
        return speeds_of(measured_here(study), study, "measured now, one worker alone")
    folders = (here, here / "study") if study_dir is None else (study_dir,)
    folder = next((each for each in folders if (each / LEDGER_NAME).exists()), study_dir)
    found = () if folder is None else calibrations(Ledger.read(folder))
    if not found:
        return Speeds()
    return speeds_of(found, study, f"as {folder} was calibrated, all its workers at once", found[-1].num_workers)


def _stages_body(study: Study, main: MainEstimate, speeds: Speeds) -> dict[str, Json]:
    """The stages on the study's workers, and as they would be on the main run's GPUs."""
    from launcher.estimates.cost import usd_of
    from launcher.estimates.study_cost import PROXY_MFU, num_workers, stages_of
    from launcher.plan_cluster import rank_needs
    from sweeps.cores import num_cores

    workers, machine = num_workers(study, speeds.num_workers), main.machine
    stages: list[Json] = []
    for stage in stages_of(study, speeds):
        on_gpu = stage.gpu_hours(machine.peak_flops)
        usd = None if machine.price_usd is None else usd_of(on_gpu, machine.price_usd).told()
        stages.append(
            {
                "stage": stage.name, "num_runs": list(stage.num_runs), "flops": stage.flops.told(),
                "core_hours": stage.core_hours.told(), "hours": stage.hours(workers).told(),
                "gpu_hours": on_gpu.told(), "usd": usd, "disk_bytes": stage.disk_bytes.told(),
                "share_of_main_run": stage.flops.value / main.run.flops["causal"],
            }
        )  # fmt: skip
    return {
        "stages": stages, "pruner": study.plan.search.pruner, "num_workers": workers,
        "rank_needs": list(rank_needs(study.plan, num_cores())),
        "worker_flops": speeds.over_all.told(), "proxy_mfu": PROXY_MFU.told(),
        "main_run_from": "the budget, at 20 tokens a parameter: a guess until the ladder is fitted",
    }  # fmt: skip


def estimate_text(body: dict[str, Any]) -> str:
    """The answer in words and tables, for people."""
    return "\n\n".join([*(_stages(body) if "stages" in body else []), *_main(body["main_run"]), *_dry(body)])


def _stages(body: dict[str, Any]) -> list[str]:
    rows = [
        (s["stage"], " to ".join(str(number) for number in sorted(set(s["num_runs"]))), _span(s["flops"]),
         _span(s["hours"]), _span(s["gpu_hours"]), "-" if s["usd"] is None else _span(s["usd"]),
         f"{s['disk_bytes']['value'] / 1e6:.2g} MB", f"{s['share_of_main_run']:.3g}")
        for s in body["stages"]
    ]  # fmt: skip
    on = f"{body['num_workers']} {'ranks' if body['rank_needs'] else 'workers'}"
    head = ("stage", "runs", "FLOPs", f"hours on {on}", "or GPU-hours", "USD", "disk", "of the main run")
    speed, share = body["worker_flops"], body["proxy_mfu"]
    said = (f"a worker reaches {_span(speed)} FLOP/s ({speed['source']})", f"a GPU {_span(share)} ({share['source']})",
            f"the main run's size is from {body['main_run_from']}", *body["rank_needs"],
            *([f"the search is counted whole, an upper bound: search.pruner = {body['pruner']!r} gives trials up"]
              if body["pruner"] != "none" else []))  # fmt: skip
    return ["\n".join([table(head, rows), *said])]


def _main(main: dict[str, Any]) -> list[str]:
    shape, machine, fails = main["shape"], main["machine"], main["failures"]
    size = f"{main['params']:.4g} parameters ({shape['num_layers']} layers, width {shape['width']})"
    gpus = f"{machine['num_gpus']} {machine['gpu']} ({machine['peak_flops']:.4g} FLOP/s, {machine['memory_gb']:g} GB)"
    mfu = f"{_span(machine['mfu'])}, convention {machine['mfu_convention']} ({machine['mfu']['source']})"
    lines = [
        f"main run: {size}, {main['tokens']:.4g} tokens, {main['batch_tokens']} a step",
        "FLOPs: " + ", ".join(f"{name} {value:.4g}" for name, value in main["flops"].items()),
        f"on {gpus} at MFU {mfu}",
        f"{_span(main['gpu_hours'])} GPU-hours, {_span(main['days'])} days, {_span(main['step_seconds'])} s a step, "
        + ("no price is known: --price-usd" if main["usd"] is None else f"USD {_span(main['usd'])}"),
    ]
    degrees = ("shard", "replicate", "tensor", "pipeline", "context", "microbatch_sequences")
    layout = main["parallelism"]
    who, told = layout["from"].partition(":")[0], ", ".join(f"{name} {layout[name]}" for name in degrees)
    lines.append(f"parallelism ({who}): {told}, checkpointing {layout['checkpointing']}")
    lines += [f"- {reason}" for reason in layout["reasons"]]
    parts = {name.removesuffix("_bytes"): value / _GB for name, value in main["memory"].items() if name != "moment"}
    lines.append("memory of a rank (GB): " + ", ".join(f"{name} {value:.3g}" for name, value in parts.items()))
    lines.append(
        f"an interruption every {_span(fails['mtbf_seconds'], 3600)} hours; save every "
        f"{fails['save_every_seconds'] / 60:.3g} minutes, "
        f"{fails['save_every_steps']} steps ({fails['checkpoint_bytes'] / _GB:.3g} GB in "
        f"{_span(fails['write_seconds'])} s; {'the work one accepts to lose' if fails['capped'] else 'Daly'} sets it); "
        f"goodput {_span(fails['goodput'])}; disk {main['disk_bytes'] / _GB:.3g} GB"
    )
    lines += [f"threshold: {said}" for said in main["thresholds"]] + [f"warning: {said}" for said in main["warnings"]]
    return ["\n".join(lines), _longest(main["longest_runs"]), _reference(main)]


def _longest(rows: list[dict[str, Any]]) -> str:
    told = [(r["grows"], f"{12 * r['years']:.1f}", f"{12 * r['published_years']:.1f}") for r in rows]
    return table(("the longest sensible run while these grow", "months", "published"), told)


def _reference(main: dict[str, Any]) -> str:
    rows = [
        (r["model"], f"{r['six_nd']:.3g}", f"{r['share']:.2g}", r["machine"], _maybe(r["gpu_hours_published"]),
         _maybe(r["usd_published"]), _span(r["gpu_hours_here"]), "-" if r["usd_here"] is None else _span(r["usd_here"]))
        for r in main["reference_runs"]
    ]  # fmt: skip
    head = ("beside", "6ND", "this run is", "made on", "hours", "USD", f"hours on {main['machine']['gpu']}", "USD")
    return table(head, rows)


def _dry(body: dict[str, Any]) -> list[str]:
    if "dry_shard" not in body:
        return []
    dry = body["dry_shard"]
    held = ", ".join(str(number) for number in dry["local_parameters"])
    how = f"sharded over a fake group of {dry['num_ranks']} ranks in {dry['seconds']:.1f} s"
    return [f"{how}: rank 0 of the first (and last) stage holds {held} of {dry['num_parameters']} parameters"]


def _maybe(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _span(of: dict[str, Any], unit: float = 1.0) -> str:
    ends = cast("list[float] | None", of["interval"])
    said = f"{of['value'] / unit:.3g}"
    return said if ends is None else f"{said} [{ends[0] / unit:.3g}, {ends[1] / unit:.3g}]"
