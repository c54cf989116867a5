"""The main run before it runs: FLOPs, parallelism, memory, failures, hours, dollars, and whether to begin."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from launcher.estimates.duration import LONGEST_RUNS, beside_reference, duration_warnings, thresholds_passed
from launcher.estimates.failures import Cadence, cadence
from launcher.estimates.layout import Layout
from launcher.estimates.machine import Given, Machine, machine_of
from launcher.estimates.parallelism import NoParallelismError, ParallelPlan, hold_layout, plan_parallelism
from launcher.estimates.spans import MFU_CONVENTION, Span, exactly, gpu_hours
from launcher.estimates.utilization import SMALLEST_PUBLISHED, paid_share
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import CONVENTIONS, Convention, count_params, flops_per_token, six_nd
from proxies.core.shape import Shape
from proxies.core.spec import Precision

LEAST_GOODPUT = 1e-3
"""A run that makes less progress than this does not end."""
KEPT_CHECKPOINTS = 3
"""Two that are complete, and one that is being written."""
WIDE = 10.0
"""High over low of an interval beyond which the measurement that would narrow it is named."""


class EndlessRunError(ValueError):
    """So many GPUs are interrupted more often than they can save and begin again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MainRun:
    """What is to be trained."""

    shape: Shape
    num_tokens: int
    batch_tokens: int
    precision: Precision
    layout: Layout | None = None
    """Of a frozen config, or of a plan's `[launch]`; None: the best one is taken."""
    frozen: bool = False
    """A frozen layout that does not fit is refused; a plan's, whose size is a guess, gives way to the best one."""

    @property
    def flops(self) -> dict[str, float]:
        """Training FLOPs by convention; of the model, so what is recomputed does not count."""
        found = {name: float(flops_per_token(self.shape, cast(Convention, name))) * self.num_tokens
                 for name in CONVENTIONS if name != "recompute"}  # fmt: skip
        return {"six_nd": six_nd(count_params(self.shape).total, self.num_tokens), **found}


@dataclass(frozen=True, kw_only=True, slots=True)
class MainEstimate:
    """What it takes."""

    run: MainRun
    machine: Machine
    parallel: ParallelPlan
    layout_from: str
    """Who says so: `frozen`, `[launch]`, or `suggested` with the reason."""
    cadence: Cadence
    utilization: Span
    """Share of the peak over all hours paid."""
    gpu_hours: Span
    """All that are paid: what is lost to interruptions, saving, evaluations and restarts too."""
    usd: Span | None
    days: Span
    step_seconds: Span
    """Of a step that makes progress."""

    @property
    def save_every_steps(self) -> int:
        """The cadence in steps, at least one."""
        return max(1, int(self.cadence.interval_seconds / self.step_seconds.value))


def estimate_main(run: MainRun, given: Given) -> MainEstimate:
    """What the main run takes on the machine.

    Raises:
        NoParallelismError: no layout of the GPUs fits.
        EndlessRunError: it is interrupted too often ever to end.
        SpecError: the measured throughput is more than the peak.
    """
    machine = machine_of(given, flops_per_token(run.shape, MFU_CONVENTION))
    parallel, layout_from = _laid_out(run, machine)
    saves = cadence(
        run.shape, machine.num_gpus, rate=machine.failures, accepted_loss_seconds=machine.accepted_loss_seconds
    )
    if saves.goodput.low < LEAST_GOODPUT:
        raise EndlessRunError(
            f"{machine.num_gpus} GPUs are interrupted every {saves.mtbf_seconds.low:.0f} to "
            f"{saves.mtbf_seconds.high:.0f} s, and a save takes {saves.write_seconds.low:.0f} to "
            f"{saves.write_seconds.high:.0f} s: such a run need not end; fewer GPUs are wanted"
        )
    flops = exactly(run.flops[MFU_CONVENTION])
    share = paid_share(machine, count_params(run.shape).total, saves.goodput)
    steps, paid = (gpu_hours(flops, machine.peak_flops, each) for each in (machine.mfu, share))
    return MainEstimate(
        run=run, machine=machine, parallel=parallel, layout_from=layout_from, cadence=saves, utilization=share,
        gpu_hours=paid, usd=None if machine.price_usd is None else paid.times(machine.price_usd),
        days=paid.scaled(1 / (24.0 * machine.num_gpus)),
        step_seconds=steps.scaled(3600.0 * run.batch_tokens / run.num_tokens / machine.num_gpus),
    )  # fmt: skip


def _laid_out(run: MainRun, machine: Machine) -> tuple[ParallelPlan, str]:
    """The run's own layout where it is one of so many ranks and fits, else the best one; and why."""
    shape, batch, layout, gpus = run.shape, run.batch_tokens, run.layout, machine.num_gpus
    whose, lacks = "frozen" if run.frozen else "[launch]", []
    if layout is not None and layout.num_ranks == gpus:
        try:
            return hold_layout(shape, batch, layout, machine.memory_gb, run.precision), whose
        except NoParallelismError as error:
            if run.frozen:
                raise
            lacks = error.problems
    try:
        best = plan_parallelism(shape, batch, gpus, machine.memory_gb, run.precision)
    except NoParallelismError as error:
        raise NoParallelismError([f"{whose}: {said}" for said in lacks] + error.problems) from error
    if lacks:
        return best, f"suggested: {whose} does not fit a run of this size: {'; '.join(lacks)}"
    return best, "suggested" if layout is None else f"suggested for {gpus} GPUs: {whose} has {layout.num_ranks} ranks"


def main_body(found: MainEstimate) -> dict[str, Json]:
    """What `estimate --json` prints of the main run."""
    run, machine, saves = found.run, found.machine, found.cadence
    size = saves.checkpoint_bytes
    body = {
        "shape": run.shape,
        "params": count_params(run.shape).total,
        "tokens": run.num_tokens,
        "batch_tokens": run.batch_tokens,
        "flops": run.flops,
        "machine": {
            "gpu": machine.name, "num_gpus": machine.num_gpus, "peak_flops": machine.peak_flops,
            "memory_gb": machine.memory_gb, "mfu": machine.mfu.told(), "mfu_convention": MFU_CONVENTION,
            "utilization": found.utilization.told(),
            "price_usd": None if machine.price_usd is None else machine.price_usd.told(),
        },
        "gpu_hours": found.gpu_hours.told(),
        "usd": None if found.usd is None else found.usd.told(),
        "days": found.days.told(),
        "step_seconds": found.step_seconds.told(),
        "parallelism": dataclasses.asdict(found.parallel.layout)
        | {"num_microbatches": found.parallel.num_microbatches, "from": found.layout_from,
           "reasons": found.parallel.reasons},
        "memory": dataclasses.asdict(found.parallel.memory) | {"total_bytes": found.parallel.memory.total_bytes},
        "failures": {
            "per_1000_node_days": machine.failures.told(), "mtbf_seconds": saves.mtbf_seconds.told(),
            "goodput": saves.goodput.told(), "save_every_seconds": saves.interval_seconds,
            "save_every_steps": found.save_every_steps,
            "daly_seconds": saves.daly_seconds, "capped": saves.capped, "checkpoint_bytes": size,
            "write_seconds": saves.write_seconds.told(),
        },
        "disk_bytes": KEPT_CHECKPOINTS * size,
        "thresholds": thresholds_passed(max(run.flops.values())),
        "longest_runs": LONGEST_RUNS,
        "reference_runs": beside_reference(
            run.flops["six_nd"], machine.peak_flops, machine.mfu if machine.measured else None, machine.price_usd
        ),
        "warnings": _warnings(found) + duration_warnings(found.days),
    }  # fmt: skip
    return cast(dict[str, Json], canon.to_json(body))


def _warnings(found: MainEstimate) -> list[str]:
    params, machine, planned = count_params(found.run.shape).total, found.machine, found.run.layout
    said = []
    if planned is not None and planned != found.parallel.layout and planned.num_ranks == machine.num_gpus:
        said.append(f"parallelism is {found.layout_from}")
    if params < SMALLEST_PUBLISHED and not machine.measured:
        said.append(f"{params:.3g} parameters: no run below {SMALLEST_PUBLISHED:.0e} is published with its hours")
    cost = found.usd or found.gpu_hours
    if cost.high > WIDE * cost.low:
        said.append(
            f"hours and dollars are known within a factor of {cost.high / cost.low:.3g}: one measurement narrows them, "
            f"the tokens a second of one {machine.name} over some steps of this shape: --tokens-per-second"
        )
    return said
