"""The user's own training script, asked by `forerun.hook` what it does, and compared with the
frozen config.

It runs twice, in folders that go away: at a reference width up to its first step, and as frozen for
at most five.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from launcher.exporters.proof import ProofError
from launcher.exporters.view import proof_steps
from launcher.frozen.frozen import Decision
from launcher.supervisor.own_launch import OwnPlaces, start_own
from launcher.supervisor.own_roles import HookParameter, frozen_numbers, own_rates
from proxies.core import canon
from proxies.core.flops import count_params
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import counted, format_factor, format_percent, with_article
from proxies.core.numbers import ParameterNumbers
from proxies.core.plain_files import read_plain
from proxies.core.schedule import Schedule, lr_multiplier
from proxies.core.shape import Shape
from proxies.external.command import size_values
from proxies.external.log_file import LOG_FILE, log_end
from proxies.parametrization.parametrization import delta_shape

PROVE_VARIABLE, FORMAT = "FORERUN_PROVE", 1
"""Those of `forerun.hook`, which belongs to the script."""
MOST_STEPS = 5
LIMIT_SECONDS = 1800.0
"""That the script has for its first steps."""
SAME = 1e-6
"""Relative: the script may compute in another order."""
_GRACE_SECONDS, _ADD_IT = (
    5.0,
    "call forerun.hook.prove(model, optimizer, scheduler) in it before the first step",
)
_STD_SLACK = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class HookGroup:
    """What an optimizer group holds before the first step."""

    optimizer: str
    numbers: dict[str, float]
    """Settings by forerun's names, as far as its optimizer has them."""
    decay_in_gradient: bool
    """As torch's Adam adds it, which is another decay than the frozen one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookStep:
    """One step that was watched, on one rank."""

    ids: int | None
    """Tokens looked up since the step before; None: the model has no nn.Embedding."""
    clip: float | None
    """What torch's clip_grad_norm_ was given; None: it was not called."""
    grad_norm: float
    """Behind the clipping."""
    rates: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HookReport:
    """What `forerun.hook.prove` wrote."""

    format: int
    error: str | None
    world_size: int
    num_data_ranks: int | None
    factors: dict[str, float]
    parameters: tuple[HookParameter, ...]
    groups: tuple[HookGroup, ...]
    rates: tuple[tuple[float, ...], ...] | None
    """Per step of the proof, each group's; None: neither a scheduler nor a rate was given."""
    schedule_error: str
    observed: tuple[HookStep, ...]

    @property
    def num_params(self) -> int:
        """Of the model, a tied matrix once."""
        return sum(math.prod(one.shape) for one in self.parameters)


def reference_shape(decision: Decision) -> Shape:
    """A shape of another width, by which the script shows what grows: the base, or the double of
    it.

    Its depth is the main run's, unless the parametrization has a rule for depth.
    """
    base = decision.base_shape
    if decision.parametrization.depth_alpha is None:
        base = base.at_depth(decision.shape.num_layers)
    return base if base.width != decision.shape.width else delta_shape(decision.shape, base)


def prove(decision: Decision, places: OwnPlaces) -> tuple[list[str], list[str], HookReport]:
    """Where the script does something else than is frozen; what was not seen or is another
    convention; its report.

    Raises:
        ProofError: it could not be asked.
        CommandError: there is no such program.
        OwnLaunchError: the command needs a corpus, and there is none.
    """
    own = decision.own
    assert own is not None
    values = {**own.values, **size_values(reference_shape(decision), decision.base_shape)}
    there = dataclasses.replace(decision, own=dataclasses.replace(own, values=values))
    reference = _ask(there, places, 0)
    here = _ask(decision, places, min(MOST_STEPS, decision.learning_rate.schedule.num_steps))
    problems, notes = compare(decision, here, reference)
    return problems, notes, here


def _ask(decision: Decision, places: OwnPlaces, steps: int) -> HookReport:
    """Run the command in a folder that goes away, with a request for so many steps."""
    with tempfile.TemporaryDirectory(prefix="forerun-prove-") as scratch:
        run_dir, report, request = (
            Path(scratch) / name for name in ("run", "report.json", "request.json")
        )
        run_dir.mkdir()
        at = list(proof_steps(decision.learning_rate.schedule))
        canon.write_atomic(request, canon.pretty({"report": str(report), "steps": steps, "at": at}))
        there = dataclasses.replace(places, run_dir=run_dir)
        kept = start_own(
            decision,
            there,
            resume=False,
            told={PROVE_VARIABLE: str(request)},
            grace_seconds=_GRACE_SECONDS,
        )
        try:
            ended = kept.wait(LIMIT_SECONDS)
        finally:
            kept.stop()
        if not report.is_file():
            how = (
                f"it ended with {kept.ended}"
                if ended
                else f"it was stopped after {LIMIT_SECONDS:g} seconds"
            )
            raise ProofError(
                "your trainer",
                [f"{how}, and the hook reported nothing: {_ADD_IT}{log_end(run_dir / LOG_FILE)}"],
            )
        return _read(read_plain(report))


def _read(answer: bytes) -> HookReport:
    try:
        body = canon.parse(answer)
        if isinstance(body, dict) and body.get("error"):
            raise ProofError("your trainer", [f"the hook failed: {body['error']}"])
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ProofError(
                "your trainer", ["its copy of forerun/hook.py is of another version: copy this one"]
            )
        return canon.decode(HookReport, body, "report")
    except (canon.CanonError, RecursionError) as error:
        raise ProofError(
            "your trainer", [f"the hook's report cannot be read: {str(error)[:400]}"]
        ) from error


def compare(decision: Decision, here: HookReport, there: HookReport) -> tuple[list[str], list[str]]:
    """Where the script departs from the frozen config, and notes; `there` is its report at the
    reference width.
    """
    reference = {one.folded: one for one in there.parameters}
    numbers = frozen_numbers(decision, here.parameters, reference)
    judged = _Judged(decision, here)
    for one in here.parameters:
        if not one.trained:
            judged.problem(one, "is frozen (requires_grad = False)")
        elif not one.groups:
            judged.problem(one, "no optimizer trains it")
        elif one.name not in numbers:
            judged.problem(one, f"has no counterpart at width {reference_shape(decision).width}")
        else:
            if len(one.groups) > 1:
                judged.problem(one, f"{counted(len(one.groups), 'optimizer group')} train it")
            judged.numbers(one, numbers[one.name])
            judged.initial(one, reference[one.folded], numbers[one.name])
    judged.run()
    return judged.problems, judged.notes


class _Judged:
    """Collects differences, a layer's parameters as one line."""

    def __init__(self, decision: Decision, here: HookReport) -> None:
        assert decision.own is not None
        self._decision, self._here, self._named = decision, here, decision.own.named
        self._schedule = decision.learning_rate.schedule
        self._at = proof_steps(self._schedule)
        self._shares = {
            shift: [_share(self._schedule, step + shift) for step in self._at]
            for shift in (0, -1, 1)
        }
        self._own_rates = own_rates(decision)
        self._found: Counter[str] = Counter()
        self._noted: dict[str, None] = {}

    @property
    def problems(self) -> list[str]:
        """Without repetition."""
        return [
            said + (f" ({counted(count, 'parameter')})" if count > 1 else "")
            for said, count in self._found.items()
        ]

    @property
    def notes(self) -> list[str]:
        """Without repetition."""
        return list(self._noted)

    def problem(self, one: HookParameter, said: str) -> None:
        """One more of a parameter."""
        self._wrong(f"{one.folded}: {said}")

    def _wrong(self, said: str) -> None:
        self._found[said] += 1

    def _note(self, said: str) -> None:
        self._noted[said] = None

    def numbers(self, one: HookParameter, frozen: ParameterNumbers) -> None:
        """The numbers of its group, its rate at every step."""
        group = self._here.groups[one.groups[0]]
        factor = math.prod(value for part, value in self._here.factors.items() if part in one.name)
        peaks = [frozen.learning_rate * factor]
        if frozen.kind == "readout":  # the output multiplier may be in its initial values and rate
            peaks.append(peaks[0] / frozen.width_multiplier)
        if not self._rate(one, frozen, peaks, [rate * factor for rate in self._own_rates]):
            return
        if group.decay_in_gradient:
            self.problem(
                one, f"{group.optimizer} adds its decay to the gradient, frozen is decay beside it"
            )
        for name, value in group.numbers.items():
            if name not in frozen.settings:
                continue
            wanted = frozen.settings[name]
            # what must not decay does not, whoever sets the number
            told = name in self._named or wanted == 0
            if name != LEARNING_RATE and told and not math.isclose(value, wanted, rel_tol=SAME):
                why = f": {with_article(frozen.kind)} does not decay" if wanted == 0 else ""
                self.problem(one, f"{name} is {value!r}, frozen as {wanted!r}{why}")

    def _rate(
        self, one: HookParameter, frozen: ParameterNumbers, peaks: list[float], axes: list[float]
    ) -> bool:
        """Whether its rate has a frozen peak; one of the plan's own `axes` is right too, and any
        other a problem.
        """
        rates = self._rates(one.groups[0])
        for peak in (*peaks, *axes):
            for shift, shares in self._shares.items():
                if _worst(rates, shares, peak) <= SAME:
                    if shift:
                        self._note(
                            f"the schedule is one step {'late' if shift < 0 else 'early'} beside "
                            "the frozen one"
                        )
                    return peak in peaks and peak not in axes
        shares = self._shares[0]
        near = min((*peaks, *axes), key=lambda peak: _worst(rates, shares, peak))
        length = max(
            1, self._schedule.decay_steps or self._schedule.num_steps - self._schedule.warmup_steps
        )
        apart = _worst(rates, shares, near)
        if apart <= 3.2 / length and _one_factor(rates, shares, near) is None:
            self._note(
                f"the rates are up to {format_percent(apart)} of the peak from the frozen ones: "
                "steps counted "
                "another way"
            )
            return near in peaks and near not in axes
        self.problem(one, _rate_said(rates, shares, peaks[0], frozen.width_multiplier, self._at))
        return False

    def _rates(self, number: int) -> list[float]:
        """A group's, by the scheduler for all steps, else as far as they were seen."""
        if self._here.rates is not None:
            return [row[number] for row in self._here.rates]
        return [
            cast(float, row.rates[number])
            for row in self._here.observed
            if row.rates[number] is not None
        ]

    def initial(self, one: HookParameter, other: HookParameter, frozen: ParameterNumbers) -> None:
        """The spread of the initial values, against the reference width's."""
        decision = self._decision
        ruled = (
            decision.parametrization.width == "mup"
            and decision.shape.width != decision.base_shape.width
        )
        if not ruled or one.std == 0 or other.std == 0 or frozen.kind.endswith(("gain", "bias")):
            return
        ratio = one.std / other.std
        allowed = _STD_SLACK + 5 / math.sqrt(2 * min(math.prod(one.shape), math.prod(other.shape)))
        forms = [frozen.init_std] + (
            [frozen.init_std / frozen.width_multiplier] if frozen.kind == "readout" else []
        )
        if all(abs(ratio / form - 1) > allowed for form in forms):
            self.problem(
                one,
                f"its initial std is {one.std:.4g}, and {other.std:.4g} at width "
                f"{reference_shape(decision).width}: "
                f"must be {format_factor(forms[0])} times that, not {ratio:.4g}",
            )

    def run(self) -> None:
        """Schedule, steps, batch and clipping."""
        if self._here.schedule_error:
            self._wrong(
                f"the scheduler fails {self._here.schedule_error}: frozen are "
                f"{counted(self._schedule.num_steps, 'step')}"
            )
        if self._here.rates is None:
            self._note(
                f"rates were seen at {counted(len(self._here.observed), 'step')} only: give prove "
                "the scheduler, or "
                "rate="
            )
        else:
            self._watched()
        self._batch()
        if "clip_norm" in self._named:
            self._clip()
        ours, theirs = count_params(self._decision.shape).total, self._here.num_params
        described = self._decision.own is not None and self._decision.own.num_params is not None
        if not described and abs(theirs / ours - 1) > 0.1:
            said = (
                f"it has {counted(theirs, 'parameter')}, and the forecast counts {ours:,} by "
                "[model]"
            )
            self._note(f"{said}: proxy.describe in a new study makes it count yours")

    def _watched(self) -> None:
        """Rates while it trained, beside those of the scheduler alone."""
        assert self._here.rates is not None
        for step, row in enumerate(self._here.observed):
            alone = self._here.rates[self._at.index(step)] if step in self._at else ()
            for seen, said in zip(row.rates, alone, strict=False):
                if seen is not None and not math.isclose(seen, said, rel_tol=SAME, abs_tol=1e-12):
                    again = "; is it stepped twice?" if step else ""
                    self._wrong(
                        f"while it trains, the rate at step {step} is {seen!r}, by the scheduler "
                        f"alone {said!r}{again}"
                    )
                    return

    def _batch(self) -> None:
        ranks = self._here.num_data_ranks or self._here.world_size
        sequences = self._decision.batch_tokens // self._decision.shape.seq_len
        for step, row in enumerate(self._here.observed):
            wanted = self._schedule.sequences(step, sequences)[1] * self._decision.shape.seq_len
            if row.ids is None:
                self._note("batch_tokens were not seen: the model has no nn.Embedding")
            elif not wanted <= row.ids * ranks <= wanted * (1 + 1 / self._decision.shape.seq_len):
                said = (
                    f"step {step} sees {row.ids * ranks} tokens ({row.ids} on each of "
                    f"{counted(ranks, 'rank')})"
                )
                self._wrong(f"{said}, frozen as {wanted}")
                return

    def _clip(self) -> None:
        wanted, seen = self._decision.clip_norm, {row.clip for row in self._here.observed}
        norm = max((row.grad_norm for row in self._here.observed), default=0.0)
        given = {clip for clip in seen if clip is not None and clip < math.inf}
        if wanted is None:
            if given:
                self._wrong(f"it clips at {max(given)!r}, frozen without clipping")
        elif given and any(not math.isclose(clip, wanted, rel_tol=SAME) for clip in given):
            self._wrong(f"it clips at {max(given)!r}, frozen as {wanted!r}")
        elif norm > wanted * 1.001:
            self._wrong(
                f"a step's gradient has the norm {norm:.4g} behind clipping, frozen is a clip_norm "
                f"of {wanted!r}"
            )
        elif not given:
            self._note(
                "clip_norm was not seen: torch's clip_grad_norm_ was not called, and no gradient "
                "was larger"
            )


def _share(schedule: Schedule, step: int) -> float:
    """Of the peak, also one step before the first and one behind the last."""
    if step < 0:
        return 0.0 if schedule.warmup_steps else 1.0
    if step >= schedule.num_steps:
        return 1.0 if schedule.kind == "constant" else schedule.final_fraction
    return lr_multiplier(schedule, step)


def _worst(rates: list[float], shares: Iterable[float], peak: float) -> float:
    """Largest distance, as a share of the peak."""
    return (
        max(
            (abs(rate - peak * share) for rate, share in zip(rates, shares, strict=False)),
            default=0.0,
        )
        / peak
    )


def _one_factor(rates: list[float], shares: list[float], peak: float) -> float | None:
    """What every rate is as a multiple of the frozen one; None: not one number."""
    factors = [
        rate / (peak * share) for rate, share in zip(rates, shares, strict=False) if share > SAME
    ]
    steady = bool(factors) and math.isclose(min(factors), max(factors), rel_tol=1e-3)
    return max(factors) if steady else None


def _rate_said(
    rates: list[float], shares: list[float], peak: float, multiplier: float, at: tuple[int, ...]
) -> str:
    """How a rate differs: by one factor, or from some step on."""
    if (factor := _one_factor(rates, shares, peak)) is not None:
        why = ""
        if multiplier != 1:
            why = (
                "; is it left as at the base width?"
                if math.isclose(factor, multiplier, rel_tol=1e-3)
                else why
            )
            why = (
                "; is it scaled twice?"
                if math.isclose(factor * multiplier, 1, rel_tol=1e-3)
                else why
            )
        return (
            f"its peak rate is {factor * peak:.6g}, frozen as {peak:.6g}: "
            f"{format_factor(factor)} times{why}"
        )
    wrong = [
        i
        for i, (rate, share) in enumerate(zip(rates, shares, strict=False))
        if abs(rate - peak * share) > SAME * peak
    ]
    first = wrong[0]
    more = (
        f", and at {len(wrong) - 1} more of {counted(len(rates), 'step')}" if len(wrong) > 1 else ""
    )
    return (
        f"its rate at step {at[first]} is {rates[first]:.6g}, frozen as "
        f"{peak * shares[first]:.6g}{more}"
    )
