"""The options of `allocate`, checked and turned into records of `scaling_fits`.

Every problem with the options is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun._launcher.main_run.estimates import reference_tables
from forerun._launcher.report.answers.option_problems import ProblemCollector

if TYPE_CHECKING:
    from forerun._launcher.main_run.estimates.machine import Span
    from forerun._scaling_fits.allocation.budgets import Assumption, BudgetMachine, BudgetRequest
    from forerun._scaling_fits.allocation.shapes import ShapeRequest

BUDGETS = ("flops", "gpu_hours", "usd", "deadline_days")
Options = Mapping[str, Any]
"""The options of `allocate` by name; an option that was not given is None or False."""
_TYPICAL_PARAMS = 1e10
"""Number of parameters for which the published utilization is looked up, if --mfu is not given. The
allocation has not chosen the size yet at that point. The number is in the middle of the published
runs. For ten times as many parameters, the published utilization is about a third higher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationRequest:
    """The options of `allocate`, checked and turned into records of `scaling_fits`."""

    budget: BudgetRequest
    machine: BudgetMachine | None
    shape: ShapeRequest | None
    """Request for a shape; None without --shape. The request's `params` and template are stand-ins:
    the allocation and the study replace them later."""
    options: Options
    """All options as typed. The command reads these from here: `batch_tokens`, `inference_tokens`,
    `unique_tokens`, and `beyond` (which allows a budget far above the FLOPs of the fitted runs)."""


def check_request(options: Options) -> AllocationRequest:
    """Check the options and turn them into records.

    Raises:
        OptionProblems: Options are wrong or missing; every problem is listed.
    """
    from forerun._scaling_fits.allocation.spending import Spending

    collector = ProblemCollector()
    problems = collector.problems
    budget = _read_budget(options, collector)
    machine = _read_machine(options, collector)
    shape = _read_shape(options, collector)
    if budget is not None and budget.needs_machine and options["gpu"] is None:
        problems.append("--gpu is missing: hours, dollars and days depend on the GPU")
    elif (
        budget is not None
        and budget.needs_price
        and options["price_usd"] is None
        and machine
        and machine.price_usd is None
    ):
        problems.append(
            f"--price-usd is missing: no published price of {machine.name} is known here"
        )
    inference_tokens, batch_tokens = options["inference_tokens"], options["batch_tokens"]
    with collector.collect():
        # This record checks the two token options. Its FLOPs are a stand-in, because the budget may
        # # be in hours or dollars.
        Spending(
            flops=1e6,
            inference_tokens=inference_tokens or 0.0,
            unique_tokens=options["unique_tokens"],
        )
    if inference_tokens is not None and 0 < inference_tokens < 1:
        problems.append(f"inference_tokens = {inference_tokens}: must be 0, or at least 1")
    if inference_tokens and options["deadline_days"] is not None:
        problems.append(
            "--deadline-days limits training alone, and with --inference-tokens the budget pays "
            "for serving too: give one of them"
        )
    if batch_tokens is not None and not 1 <= batch_tokens <= 10**12:
        problems.append(f"batch_tokens = {batch_tokens}: must be a whole number from 1 to 1e12")
    collector.raise_problems()
    assert budget is not None
    return AllocationRequest(budget=budget, machine=machine, shape=shape, options=options)


def _read_budget(options: Options, collector: ProblemCollector) -> BudgetRequest | None:
    """Return the budget; None, with a problem in `collector`, if it is missing or wrong."""
    from forerun._scaling_fits.allocation.budgets import BudgetRequest

    amounts = {name: options[name] for name in BUDGETS}
    if all(amount is None for amount in amounts.values()):
        collector.problems.append(
            "Missing option '--flops' (or '--gpu-hours', '--usd' or '--deadline-days')"
        )
        return None
    with collector.collect():
        return BudgetRequest(**amounts, num_gpus=options["gpus"])
    return None


def _read_machine(options: Options, collector: ProblemCollector) -> BudgetMachine | None:
    """Return the GPU with utilization and price; None without --gpu or if an option is wrong."""
    from forerun._launcher.main_run.estimates.machine import PRICES_USD
    from forerun._launcher.main_run.estimates.utilization import CENTER_GPUS, PUBLISHED
    from forerun._scaling_fits.allocation.budgets import BudgetMachine

    mfu = _read_assumption("mfu", options["mfu"], collector)
    price = _read_assumption("price_usd", options["price_usd"], collector)
    if options["gpu"] is None:
        collector.problems += [
            f"--{name.replace('_', '-')} needs --gpu"
            for name in ("mfu", "price_usd", "gpus")
            # With --deadline-days, the missing --gpu is already reported.
            if options[name] is not None and (name != "gpus" or options["deadline_days"] is None)
        ]
        return None
    with collector.collect():
        name, gpu = reference_tables.look_up_gpu(options["gpu"])
        if options["price_usd"] is None and name in PRICES_USD:
            price = _to_assumption(PRICES_USD[name])
        if options["mfu"] is None:
            num_gpus = max(1, options["gpus"] or CENTER_GPUS)
            mfu = _to_assumption(
                PUBLISHED.estimate_share(_TYPICAL_PARAMS, gpu.peak_flops, num_gpus)
            )
        if mfu is not None:
            return BudgetMachine(name=name, peak_flops=gpu.peak_flops, mfu=mfu, price_usd=price)
    return None


def _to_assumption(fact: Span) -> Assumption:
    """Convert a published number with its range to an assumption of the allocation."""
    from forerun._scaling_fits.allocation.budgets import Assumption

    return Assumption(value=fact.value, low=fact.low, high=fact.high, source=fact.source)


def _read_assumption(
    name: str, value: float | None, collector: ProblemCollector
) -> Assumption | None:
    """Return an option's value as an assumption; None if it was not given or is out of range."""
    from forerun._scaling_fits.allocation.budgets import Assumption

    if value is None:
        return None
    limit = 1.0 if name == "mfu" else 1e6
    if not 1e-4 <= value <= limit:
        collector.problems.append(f"{name} = {value}: must be a number from 0.0001 to {limit:g}")
        return None
    return Assumption(value=value, low=value, high=value, source="given")


def _read_shape(options: Options, collector: ProblemCollector) -> ShapeRequest | None:
    """Return the request for a shape; None without --shape, or if an option is wrong."""
    from forerun._scaling_fits.allocation.shapes import ShapeRequest

    fields = {"tp": "tensor_parallel", "vocab": "vocab_size", "seq_len": "seq_len"}
    given = {option: options[option] for option in fields if options[option] is not None}
    if not options["shape"]:
        if given:
            flags = ", ".join("--" + option.replace("_", "-") for option in given)
            collector.problems.append(f"{flags}: only with --shape")
        return None
    with collector.collect():
        sizes = {fields[option]: size for option, size in given.items()}
        # The number of parameters is a stand-in: the allocation sets it later.
        return ShapeRequest(params=1.0, **sizes)
    return None
