"""What `allocate` was asked: its options, and the records they come down to, checked all at once."""

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
"""The options of `allocate` by name; None or False is not given."""
_USUAL_PARAMS = 1e10
"""In the middle of the published runs by which hours paid are judged where no --mfu is given: the size is not chosen
yet, and ten times as many parameters change them by 17 %."""
_OPTIONS: tuple[tuple[str, type | Amount, str], ...] = (
    ("--flops", AMOUNT, "Budget in FLOPs: 6 * N * D, plus serving with --inference-tokens."),
    ("--gpu-hours", float, "Budget in hours of --gpu."),
    ("--usd", AMOUNT, "Budget in dollars of --gpu at --price-usd."),
    ("--gpu", str, "Accelerator, e.g. H100."),
    (
        "--mfu",
        float,
        "Share of the dense BF16 peak that training reaches, counted as 6 * N * D. Default: by published runs.",
    ),
    ("--price-usd", AMOUNT, "Price of one GPU-hour. Default: a published one, if any."),
    ("--gpus", int, "GPUs that run at once."),
    ("--deadline-days", float, "Days until the run must end, on --gpus."),
    ("--batch-tokens", WholeAmount(), "Tokens per step."),
    ("--inference-tokens", AMOUNT, "Tokens to serve over the model's life: the budget pays for them too."),
    ("--unique-tokens", AMOUNT, "Unique tokens available; training beyond them repeats data."),
    ("--tp", int, "Tensor-parallel degree the shape must split over. Default: the study's, else 1."),
    (
        "--vocab",
        int,
        "Vocabulary of the shape, padded to a multiple of 128 * --tp; for a shape other than the study's.",
    ),
    ("--seq-len", int, "Context of the shape, for a shape other than the study's. Default: 4096."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The options as records of `scaling_fits`."""

    wish: BudgetRequest
    machine: BudgetMachine | None
    shape: ShapeRequest | None
    """Its params and template are stand-ins: the allocation's and the study's come later. None without --shape."""
    typed: Typed
    """The others: `batch_tokens`, `inference_tokens`, `unique_tokens`, and whether to answer far `beyond` the runs."""


def asked_options(command: _Command) -> _Command:
    """Put every option on a command."""
    flags = (
        click.option(
            "--shape", is_flag=True, help="Also choose a shape in whole numbers: layers, width, heads, FFN, vocabulary."
        ),
        click.option("--beyond", is_flag=True, help="Answer even above 1e4 times the largest fitted FLOPs."),
    )
    for option in reversed((*(click.option(name, type=kind, help=text) for name, kind, text in _OPTIONS), *flags)):
        command = option(command)
    return command


def checked(asked: Typed) -> Checked:
    """The records that the options come down to.

    Raises:
        OptionProblems: everything that is wrong with them.
    """
    from scaling_fits.allocation.spending import Spending

    found = Collected()
    wish, machine, shape = _wish(asked, found), _machine(asked, found), _shape(asked, found)
    if wish is not None and wish.needs_machine and asked["gpu"] is None:
        found.problems.append("--gpu is missing: hours, dollars and days depend on the GPU")
    elif wish is not None and wish.needs_price and asked["price_usd"] is None and machine and machine.price_usd is None:
        found.problems.append(f"--price-usd is missing: no published price of {machine.name} is known here")
    with found.collecting():
        Spending(flops=1e6, inference_tokens=asked["inference_tokens"] or 0.0, unique_tokens=asked["unique_tokens"])
    if asked["inference_tokens"] is not None and 0 < asked["inference_tokens"] < 1:
        found.problems.append(f"inference_tokens = {asked['inference_tokens']}: must be 0, or at least 1")
    if asked["inference_tokens"] and asked["deadline_days"] is not None:
        found.problems.append("--deadline-days limits training alone, and with --inference-tokens the budget pays for "
                              "serving too: give one of them")  # fmt: skip
    if asked["batch_tokens"] is not None and not 1 <= asked["batch_tokens"] <= 10**12:
        found.problems.append(f"batch_tokens = {asked['batch_tokens']}: must be a whole number from 1 to 1e12")
    found.done()
    assert wish is not None
    return Checked(wish=wish, machine=machine, shape=shape, typed=asked)


def _wish(asked: Typed, found: Collected) -> BudgetRequest | None:
    from scaling_fits.allocation.budgets import BudgetRequest

    if all(asked[name] is None for name in BUDGETS):
        found.problems.append("Missing option '--flops' (or '--gpu-hours', '--usd' or '--deadline-days')")
        return None
    with found.collecting():
        return BudgetRequest(**{name: asked[name] for name in BUDGETS}, num_gpus=asked["gpus"])
    return None


def _machine(asked: Typed, found: Collected) -> BudgetMachine | None:
    from launcher.base import reference
    from launcher.estimates.utilization import MIDDLE_GPUS, PUBLISHED
    from scaling_fits.allocation.budgets import BudgetMachine

    mfu = _stated("mfu", asked["mfu"], found)
    price = _stated("price_usd", asked["price_usd"], found)
    if asked["gpu"] is None:
        for name, given in (("--mfu", asked["mfu"]), ("--price-usd", asked["price_usd"]), ("--gpus", asked["gpus"])):
            if given is not None and (name != "--gpus" or asked["deadline_days"] is None):  # said with the deadline
                found.problems.append(f"{name} needs --gpu")
        return None
    with found.collecting():
        name, gpu = reference.gpu(asked["gpu"])
        if price is None and asked["price_usd"] is None and name in reference.PRICES_USD:
            price = _known(reference.PRICES_USD[name])
        if mfu is None and asked["mfu"] is None:
            num_gpus = max(1, asked["gpus"] or MIDDLE_GPUS)
            mfu = _known(PUBLISHED.share(_USUAL_PARAMS, gpu.peak_flops, num_gpus))
        return None if mfu is None else BudgetMachine(name=name, peak_flops=gpu.peak_flops, mfu=mfu, price_usd=price)
    return None


def _known(fact: Published | Span) -> Assumption:
    """A published number with its range."""
    from scaling_fits.allocation.budgets import Assumption

    return Assumption(value=fact.value, low=fact.low, high=fact.high, source=fact.source)


def _stated(name: str, given: float | None, found: Collected) -> Assumption | None:
    """What was typed, if anything was."""
    from scaling_fits.allocation.budgets import Assumption

    if given is None:
        return None
    most = 1.0 if name == "mfu" else 1e6
    if not 1e-4 <= given <= most:
        found.problems.append(f"{name} = {given}: must be a number from 0.0001 to {most:g}")
        return None
    return Assumption(value=given, low=given, high=given, source="given")


def _shape(asked: Typed, found: Collected) -> ShapeRequest | None:
    from scaling_fits.allocation.shapes import ShapeRequest

    fields = {"tp": "tensor_parallel", "vocab": "vocab_size", "seq_len": "seq_len"}
    given = {option: asked[option] for option in fields if asked[option] is not None}
    if not asked["shape"]:
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            found.problems.append(f"{flags}: only with --shape")
        return None
    with found.collecting():
        return ShapeRequest(params=1.0, **{fields[option]: value for option, value in given.items()})
    return None
