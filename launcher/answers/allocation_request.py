"""The options of `allocate`, and the records of `scaling_fits` that are made from them.

Every problem with the options is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.cli.options import AMOUNT, Amount, Collected, WholeAmount

if TYPE_CHECKING:
    from launcher.base.reference import Published
    from launcher.estimates.machine import Span
    from scaling_fits.allocation.budgets import Assumption, BudgetMachine, BudgetRequest
    from scaling_fits.allocation.shapes import ShapeRequest

_Command = TypeVar("_Command", bound=Callable[..., object])

BUDGETS = ("flops", "gpu_hours", "usd", "deadline_days")
Typed = Mapping[str, Any]
"""The options of `allocate` by name; an option that was not given is None or False."""
_USUAL_PARAMS = 1e10
"""Parameters at which utilization is looked up without --mfu, because the size is not chosen yet.
It is in the middle of the published runs; ten times as many parameters change the GPU-hours paid by
17 %."""
_OPTIONS: tuple[tuple[str, type | Amount, str], ...] = (
    ("--flops", AMOUNT, "Budget in FLOPs: 6 * N * D, plus serving with --inference-tokens."),
    ("--gpu-hours", float, "Budget in hours of --gpu."),
    ("--usd", AMOUNT, "Budget in dollars of --gpu at --price-usd."),
    ("--gpu", str, "Accelerator, e.g. H100."),
    (
        "--mfu",
        float,
        (
            "Share of the dense BF16 peak that training reaches, counted as 6 * N * D. Default: by "
            "published runs."
        ),
    ),
    ("--price-usd", AMOUNT, "Price of one GPU-hour. Default: a published one, if any."),
    ("--gpus", int, "GPUs that run at once."),
    ("--deadline-days", float, "Days until the run must end, on --gpus."),
    ("--batch-tokens", WholeAmount(), "Tokens per step."),
    (
        "--inference-tokens",
        AMOUNT,
        "Tokens to serve over the model's life: the budget pays for them too.",
    ),
    ("--unique-tokens", AMOUNT, "Unique tokens available; training beyond them repeats data."),
    (
        "--tp",
        int,
        "Tensor-parallel degree the shape must split over. Default: the study's, else 1.",
    ),
    (
        "--vocab",
        int,
        (
            "Vocabulary of the shape, padded to a multiple of 128 * --tp; for a shape other than "
            "the study's."
        ),
    ),
    ("--seq-len", int, "Context of the shape, for a shape other than the study's. Default: 4096."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The options of `allocate`, checked and turned into records of `scaling_fits`."""

    wish: BudgetRequest
    machine: BudgetMachine | None
    shape: ShapeRequest | None
    """Request for a shape; None without --shape. Its `params` and its template are stand-ins until
    the allocation and the study give theirs."""
    typed: Typed
    """All options as typed. Used from here: `batch_tokens`, `inference_tokens`, `unique_tokens`,
    and `beyond`, which allows an answer far above the FLOPs of the fitted runs."""


def asked_options(command: _Command) -> _Command:
    """Add every option of `allocate` to a command."""
    flags = (
        click.option(
            "--shape",
            is_flag=True,
            help="Also choose a shape in whole numbers: layers, width, heads, FFN, vocabulary.",
        ),
        click.option(
            "--beyond", is_flag=True, help="Answer even above 1e4 times the largest fitted FLOPs."
        ),
    )
    for option in reversed(
        (*(click.option(name, type=kind, help=text) for name, kind, text in _OPTIONS), *flags)
    ):
        command = option(command)
    return command


def checked(asked: Typed) -> Checked:
    """Check the options and turn them into records.

    Args:
        asked: The options by name.

    Raises:
        OptionProblems: Options are wrong or missing; every problem is listed.
    """
    from scaling_fits.allocation.spending import Spending

    problems = Collected()
    wish, machine, shape = (
        _read_budget(asked, problems),
        _read_machine(asked, problems),
        _read_shape(asked, problems),
    )
    if wish is not None and wish.needs_machine and asked["gpu"] is None:
        problems.problems.append("--gpu is missing: hours, dollars and days depend on the GPU")
    elif (
        wish is not None
        and wish.needs_price
        and asked["price_usd"] is None
        and machine
        and machine.price_usd is None
    ):
        problems.problems.append(
            f"--price-usd is missing: no published price of {machine.name} is known here"
        )
    with problems.collecting():
        Spending(
            flops=1e6,
            inference_tokens=asked["inference_tokens"] or 0.0,
            unique_tokens=asked["unique_tokens"],
        )
    if asked["inference_tokens"] is not None and 0 < asked["inference_tokens"] < 1:
        problems.problems.append(
            f"inference_tokens = {asked['inference_tokens']}: must be 0, or at least 1"
        )
    if asked["inference_tokens"] and asked["deadline_days"] is not None:
        problems.problems.append(
            "--deadline-days limits training alone, and with --inference-tokens the budget pays "
            "for serving too: give one of them"
        )
    if asked["batch_tokens"] is not None and not 1 <= asked["batch_tokens"] <= 10**12:
        problems.problems.append(
            f"batch_tokens = {asked['batch_tokens']}: must be a whole number from 1 to 1e12"
        )
    problems.done()
    assert wish is not None
    return Checked(wish=wish, machine=machine, shape=shape, typed=asked)


def _read_budget(asked: Typed, problems: Collected) -> BudgetRequest | None:
    from scaling_fits.allocation.budgets import BudgetRequest

    if all(asked[name] is None for name in BUDGETS):
        problems.problems.append(
            "Missing option '--flops' (or '--gpu-hours', '--usd' or '--deadline-days')"
        )
        return None
    with problems.collecting():
        return BudgetRequest(**{name: asked[name] for name in BUDGETS}, num_gpus=asked["gpus"])
    return None


def _read_machine(asked: Typed, problems: Collected) -> BudgetMachine | None:
    from launcher.base import reference
    from launcher.estimates.utilization import MIDDLE_GPUS, PUBLISHED
    from scaling_fits.allocation.budgets import BudgetMachine

    mfu = _read_assumption("mfu", asked["mfu"], problems)
    price = _read_assumption("price_usd", asked["price_usd"], problems)
    if asked["gpu"] is None:
        for name, value in (
            ("--mfu", asked["mfu"]),
            ("--price-usd", asked["price_usd"]),
            ("--gpus", asked["gpus"]),
        ):
            # A missing --gpu beside --deadline-days is already reported with the deadline.
            if value is not None and (name != "--gpus" or asked["deadline_days"] is None):
                problems.problems.append(f"{name} needs --gpu")
        return None
    with problems.collecting():
        name, gpu = reference.gpu(asked["gpu"])
        if price is None and asked["price_usd"] is None and name in reference.PRICES_USD:
            price = _to_assumption(reference.PRICES_USD[name])
        if mfu is None and asked["mfu"] is None:
            num_gpus = max(1, asked["gpus"] or MIDDLE_GPUS)
            mfu = _to_assumption(PUBLISHED.share(_USUAL_PARAMS, gpu.peak_flops, num_gpus))
        return (
            None
            if mfu is None
            else BudgetMachine(name=name, peak_flops=gpu.peak_flops, mfu=mfu, price_usd=price)
        )
    return None


def _to_assumption(fact: Published | Span) -> Assumption:
    """Convert a published number with its range to an assumption of the allocation."""
    from scaling_fits.allocation.budgets import Assumption

    return Assumption(value=fact.value, low=fact.low, high=fact.high, source=fact.source)


def _read_assumption(name: str, value: float | None, problems: Collected) -> Assumption | None:
    """Return an option's value as an assumption; None if it was not given or is out of range."""
    from scaling_fits.allocation.budgets import Assumption

    if value is None:
        return None
    limit = 1.0 if name == "mfu" else 1e6
    if not 1e-4 <= value <= limit:
        problems.problems.append(f"{name} = {value}: must be a number from 0.0001 to {limit:g}")
        return None
    return Assumption(value=value, low=value, high=value, source="given")


def _read_shape(asked: Typed, problems: Collected) -> ShapeRequest | None:
    from scaling_fits.allocation.shapes import ShapeRequest

    fields = {"tp": "tensor_parallel", "vocab": "vocab_size", "seq_len": "seq_len"}
    given = {option: asked[option] for option in fields if asked[option] is not None}
    if not asked["shape"]:
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            problems.problems.append(f"{flags}: only with --shape")
        return None
    with problems.collecting():
        return ShapeRequest(
            params=1.0, **{fields[option]: value for option, value in given.items()}
        )
    return None
