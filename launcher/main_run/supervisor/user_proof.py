"""The proof of a user's training script: `forerun.hook`, which the script calls, reports what the
script does, and the report is compared with the frozen config.

The script runs twice, in temporary folders: at a reference width up to its first step, and as
frozen for at most `MAX_STEPS` steps.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.exporters.comparison import choose_proof_steps
from forerun._launcher.main_run.exporters.proof import ProofError
from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders, start_user_trainer
from forerun._launcher.main_run.supervisor.user_parameters import (
    HookParameter,
    compute_frozen_numbers,
    list_user_rates,
)
from forerun._proxies.core import canon
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.notation import (
    add_article,
    format_counted,
    format_factor,
    format_percent,
)
from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.plain_files import read_plain
from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.core.shape import Shape
from forerun._proxies.external.command import get_size_values
from forerun._proxies.external.log_file import LOG_FILE, describe_log_end
from forerun._proxies.parametrization.parametrization import make_delta_shape

PROVE_VARIABLE, FORMAT = "FORERUN_PROVE", 1
"""Environment variable that `forerun.hook` reads, and version of the report that it writes. Users
copy the hook into their code, so it imports nothing of forerun and cannot share these names."""
MAX_STEPS = 5
"""Maximum number of steps that the script trains as frozen."""
TIMEOUT_SECONDS, GRACE_SECONDS = 1800.0, 5.0
"""Time limit of the script for its first steps, and from SIGTERM to SIGKILL."""
SAME_TOLERANCE = 1e-6
"""Relative difference up to which numbers are equal: the script may compute in another order."""
FACTOR_RTOL = 1e-3
"""Relative difference up to which the factors between rates and frozen rates are equal."""
STD_SLACK = 0.02
"""Allowed relative difference of an initial std, added to its sampling error."""
NUM_STD_ERRORS = 5
"""Number of standard errors by which a ratio of initial stds may differ in addition to that."""
COUNTING_SLACK = 3.2
"""Maximum difference from a frozen rate that counts as another way to count steps, in multiples of
the change of a linear decay over one step."""
CLIP_SLACK = 0.001
"""Share by which a clipped gradient's norm may exceed the limit: clipping rounds."""
SIZE_SLACK = 0.1
"""Share by which the number of parameters may differ from the forecast's without a note."""


# ---- The script's report ----


@dataclass(frozen=True, kw_only=True, slots=True)
class HookGroup:
    """An optimizer group before the first step."""

    optimizer: str
    numbers: dict[str, float]
    """Settings that the optimizer has, by forerun's names."""
    decay_in_gradient: bool
    """Whether weight decay is coupled to the gradient (torch.optim.Adam), which differs from the
    frozen, decoupled decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookStep:
    """One observed step, on one rank."""

    ids: int | None
    """Number of tokens looked up since the step before; None if the model has no nn.Embedding."""
    clip: float | None
    """Argument of torch's clip_grad_norm_; None if it was not called."""
    grad_norm: float
    """Norm of the gradient after clipping."""
    rates: tuple[float | None, ...]
    """Rate of each optimizer group; None if it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookReport:
    """The report of `forerun.hook.prove`."""

    format: int
    error: str | None
    world_size: int
    num_data_ranks: int | None
    factors: dict[str, float]
    """Factors that the script itself applies to the learning rates, by part of a parameter's
    name."""
    parameters: tuple[HookParameter, ...]
    groups: tuple[HookGroup, ...]
    rates: tuple[tuple[float, ...], ...] | None
    """Rates of each group at each step of the proof; None without a scheduler and a rate."""
    schedule_error: str
    """Error of the scheduler when it was stepped alone; empty if there was none."""
    observed: tuple[HookStep, ...]
    """Steps that the script trained for the proof."""

    @property
    def num_params(self) -> int:
        """Number of parameters of the model; a tied matrix counts once."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


def choose_reference_shape(decision: Decision) -> Shape:
    """Return a shape of another width, which shows the dimensions that grow with the width.

    The shape is the base shape, or twice as wide if the main run has the base's width. The depth is
    the main run's, unless the parametrization has a rule for depth.
    """
    base = decision.base_shape
    if decision.parametrization.depth_alpha is None:
        base = base.at_depth(decision.shape.num_layers)
    return base if base.width != decision.shape.width else make_delta_shape(decision.shape, base)


def prove(decision: Decision, places: UserRunFolders) -> tuple[list[str], list[str], HookReport]:
    """Run the script twice, and compare it with the frozen config.

    Returns:
        The differences; notes on numbers that the hook did not see, or that follow another
        convention; and the script's report.

    Raises:
        ProofError: The script could not be run, or did not report.
        CommandError: There is no such program.
        OwnLaunchError: The command needs a corpus, and there is none.
    """
    trainer = decision.own
    assert trainer is not None
    sizes = get_size_values(choose_reference_shape(decision), decision.base_shape)
    at_reference = dataclasses.replace(trainer, values={**trainer.values, **sizes})
    reference = _run_script(dataclasses.replace(decision, own=at_reference), places, steps=0)
    num_steps = min(MAX_STEPS, decision.learning_rate.schedule.num_steps)
    report = _run_script(decision, places, num_steps)
    problems, notes = compare(decision, report, reference)
    return problems, notes, report


def _run_script(decision: Decision, places: UserRunFolders, steps: int) -> HookReport:
    """Run the command in a temporary folder, with a request for a report on its first `steps`."""
    with tempfile.TemporaryDirectory(prefix="forerun-prove-") as scratch:
        folder = Path(scratch)
        run_dir, report, request = folder / "run", folder / "report.json", folder / "request.json"
        run_dir.mkdir()
        at = list(choose_proof_steps(decision.learning_rate.schedule))
        canon.write_atomic(
            request, canon.to_pretty_json({"report": str(report), "steps": steps, "at": at})
        )
        command = start_user_trainer(
            decision,
            dataclasses.replace(places, run_dir=run_dir),
            resume=False,
            environment={PROVE_VARIABLE: str(request)},
            grace_seconds=GRACE_SECONDS,
        )
        try:
            has_ended = command.wait(TIMEOUT_SECONDS)
        finally:
            command.stop()
        if report.is_file():
            return _read(read_plain(report))
        ending = f"it was stopped after {TIMEOUT_SECONDS:g} seconds"
        if has_ended:
            ending = f"it ended with {command.exit_status}"
        problem = (
            f"{ending}, and the hook reported nothing: call forerun.hook.prove(model, optimizer, "
            f"scheduler) in it before the first step{describe_log_end(run_dir / LOG_FILE)}"
        )
        raise ProofError("your trainer", [problem])


def _read(answer: bytes) -> HookReport:
    try:
        body = canon.parse(answer)
        if isinstance(body, dict) and body.get("error"):
            problem = f"the hook failed: {body['error']}"
        elif not isinstance(body, dict) or body.get("format") != FORMAT:
            problem = "its copy of forerun/hook.py is of another version: copy this one"
        else:
            return canon.decode(HookReport, body, "report")
    except (canon.CanonError, RecursionError) as error:
        problem = f"the hook's report cannot be read: {str(error)[:400]}"
    raise ProofError("your trainer", [problem])


# ---- Comparison with the frozen config ----


def compare(
    decision: Decision, report: HookReport, reference: HookReport
) -> tuple[list[str], list[str]]:
    """Return where the script departs from the frozen config, and notes.

    Args:
        decision: The config.
        report: The script's report at the main run's width.
        reference: The script's report at the reference width.
    """
    assert decision.own is not None
    references = {parameter.folded: parameter for parameter in reference.parameters}
    numbers = compute_frozen_numbers(decision, decision.own, report.parameters, references)
    comparison = _Comparison(decision, decision.own, report)
    for parameter in report.parameters:
        if not parameter.trained:
            comparison.add(parameter, "is frozen (requires_grad = False)")
        elif not parameter.groups:
            comparison.add(parameter, "no optimizer trains it")
        elif parameter.name not in numbers:
            width = choose_reference_shape(decision).width
            comparison.add(parameter, f"has no counterpart at width {width}")
        else:
            if len(parameter.groups) > 1:
                groups = format_counted(len(parameter.groups), "optimizer group")
                comparison.add(parameter, f"{groups} train it")
            frozen = numbers[parameter.name]
            comparison.check_settings(parameter, frozen)
            comparison.check_init(parameter, references[parameter.folded], frozen)
    comparison.check_schedule()
    comparison.check_batch()
    comparison.check_clip()
    comparison.check_size()
    problems = [
        problem + (f" ({format_counted(count, 'parameter')})" if count > 1 else "")
        for problem, count in comparison.problems.items()
    ]
    return problems, [*comparison.notes]


class _Comparison:
    """The comparison of a script: problems, each with its number of parameters, and notes."""

    def __init__(self, decision: Decision, trainer: OwnTrainer, report: HookReport) -> None:
        self._decision, self._trainer, self._report = decision, trainer, report
        self._schedule = decision.learning_rate.schedule
        self._steps = choose_proof_steps(self._schedule)
        self._user_rates = list_user_rates(trainer)
        self.problems: Counter[str] = Counter()
        self.notes: dict[str, None] = {}

    def add(self, parameter: HookParameter, problem: str) -> None:
        """Count a problem of a parameter; the same problem in all blocks is one entry."""
        self.problems[f"{parameter.folded}: {problem}"] += 1

    def _compute_shares(self, shift: int = 0) -> list[float]:
        return [_compute_rate_share(self._schedule, step + shift) for step in self._steps]

    def check_settings(self, parameter: HookParameter, frozen: ParameterNumbers) -> None:
        """Compare the settings of a parameter's group, and its rate at every step."""
        group = self._report.groups[parameter.groups[0]]
        factors = self._report.factors.items()
        factor = math.prod(value for part, value in factors if part in parameter.name)
        peaks = [frozen.learning_rate * factor]
        if frozen.kind == "readout":
            # A script may apply the output multiplier to the readout's initial values and rate.
            peaks.append(peaks[0] / frozen.width_multiplier)
        user_peaks = [rate * factor for rate in self._user_rates]
        if not self._check_rate(parameter, frozen, peaks, user_peaks):
            return
        if group.decay_in_gradient:
            self.add(
                parameter,
                f"{group.optimizer} adds its decay to the gradient, the frozen decay is decoupled",
            )
        for name, value in group.numbers.items():
            wanted = frozen.settings.get(name)
            if (
                wanted is None
                or name == LEARNING_RATE
                or math.isclose(value, wanted, rel_tol=SAME_TOLERANCE)
            ):
                continue
            # Zero decay is compared even if the command does not set the number.
            if name in self._trainer.named or wanted == 0:
                why = f": {add_article(frozen.kind)} does not decay" if wanted == 0 else ""
                self.add(parameter, f"{name} is {value!r}, frozen as {wanted!r}{why}")

    def _check_rate(
        self,
        parameter: HookParameter,
        frozen: ParameterNumbers,
        peaks: list[float],
        user_peaks: list[float],
    ) -> bool:
        """Compare a parameter's rates with the schedule; return whether their peak is a frozen one.

        A peak that is the value of one of the plan's own axes is right too. The other settings of
        such a group are not compared.
        """
        number, schedule = parameter.groups[0], self._schedule
        rates = [row[number] for row in self._report.rates or ()] or [
            rate for row in self._report.observed if (rate := row.rates[number]) is not None
        ]
        distance, shift, peak = min(
            (
                (_compute_max_distance(rates, self._compute_shares(shift), peak), shift, peak)
                for peak in (*peaks, *user_peaks)
                for shift in (0, -1, 1)
            ),
            key=lambda match: match[0],
        )
        length = max(1, schedule.decay_steps or schedule.num_steps - schedule.warmup_steps)
        if distance <= SAME_TOLERANCE:
            if shift:
                when = "late" if shift < 0 else "early"
                self.notes[f"the schedule is one step {when}, compared with the frozen one"] = None
        elif (
            distance <= COUNTING_SLACK / length
            and _find_factor(rates, self._compute_shares(), peak) is None
        ):
            share = format_percent(distance)
            note = f"the rates are up to {share} of the peak from the frozen ones: the steps are"
            self.notes[f"{note} counted another way"] = None
        else:
            multiplier = frozen.width_multiplier
            problem = _describe_rates(
                rates, self._compute_shares(), peaks[0], multiplier, self._steps
            )
            self.add(parameter, problem)
            return False
        return peak in peaks and peak not in user_peaks

    def check_init(
        self, parameter: HookParameter, reference: HookParameter, frozen: ParameterNumbers
    ) -> None:
        """Compare the std of the initial values with that at the reference width."""
        decision = self._decision
        if (
            decision.parametrization.width != "mup"
            or decision.shape.width == decision.base_shape.width
            or 0 in (parameter.std, reference.std)
            or frozen.kind.endswith(("gain", "bias"))
        ):
            return
        ratio = parameter.std / reference.std
        # The standard error of the std of n normal values, as a share of it, is 1 / sqrt(2 n).
        num_values = min(math.prod(parameter.shape), math.prod(reference.shape))
        allowed = STD_SLACK + NUM_STD_ERRORS / math.sqrt(2 * num_values)
        wanted = [frozen.init_std]
        if frozen.kind == "readout":
            wanted.append(frozen.init_std / frozen.width_multiplier)
        if all(abs(ratio / factor - 1) > allowed for factor in wanted):
            width = choose_reference_shape(decision).width
            self.add(
                parameter,
                f"its initial std is {parameter.std:.4g}, and {reference.std:.4g} at width "
                f"{width}: must be {format_factor(wanted[0])} times that, not {ratio:.4g}",
            )

    def check_schedule(self) -> None:
        """Compare the scheduler with the frozen number of steps, and with the rates of training."""
        report = self._report
        if report.schedule_error:
            steps = format_counted(self._schedule.num_steps, "step")
            self.problems[f"the scheduler fails {report.schedule_error}: frozen are {steps}"] += 1
        if report.rates is None:
            steps = format_counted(len(report.observed), "step")
            note = f"rates were seen at {steps} only: pass prove the scheduler, or rate="
            self.notes[note] = None
            return
        for step, row in enumerate(report.observed):
            scheduled = report.rates[self._steps.index(step)] if step in self._steps else ()
            for rate, alone in zip(row.rates, scheduled, strict=False):
                # A rate of 0 has no relative difference, so there is an absolute one too.
                if rate is not None and not math.isclose(
                    rate, alone, rel_tol=SAME_TOLERANCE, abs_tol=1e-12
                ):
                    why = "; is it stepped twice?" if step else ""
                    self.problems[
                        f"while it trains, the rate at step {step} is {rate!r}, by the scheduler "
                        f"alone {alone!r}{why}"
                    ] += 1
                    return

    def check_batch(self) -> None:
        """Compare the tokens of each step with the frozen batch."""
        ranks = self._report.num_data_ranks or self._report.world_size
        seq_len = self._decision.shape.seq_len
        batch_sequences = self._decision.batch_tokens // seq_len
        for step, row in enumerate(self._report.observed):
            wanted = self._schedule.count_sequences(step, batch_sequences)[1] * seq_len
            if row.ids is None:
                self.notes["batch_tokens were not seen: the model has no nn.Embedding"] = None
            # A script may also look up the last target of each sequence.
            elif not wanted <= row.ids * ranks <= wanted * (1 + 1 / seq_len):
                self.problems[
                    f"step {step} sees {row.ids * ranks} tokens ({row.ids} on each of "
                    f"{format_counted(ranks, 'rank')}), frozen as {wanted}"
                ] += 1
                return

    def check_clip(self) -> None:
        """Compare the clipping with the frozen one, if the command is given it."""
        if "clip_norm" not in self._trainer.named:
            return
        wanted, observed = self._decision.clip_norm, self._report.observed
        limits = [row.clip for row in observed if row.clip is not None and row.clip < math.inf]
        grad_norm = max((row.grad_norm for row in observed), default=0.0)
        if wanted is None:
            if limits:
                self.problems[f"it clips at {max(limits)!r}, frozen without clipping"] += 1
        elif not all(math.isclose(limit, wanted, rel_tol=SAME_TOLERANCE) for limit in limits):
            self.problems[f"it clips at {max(limits)!r}, frozen as {wanted!r}"] += 1
        elif grad_norm > wanted * (1 + CLIP_SLACK):
            self.problems[
                f"a step's gradient has the norm {grad_norm:.4g} after clipping, the frozen "
                f"clip_norm is {wanted!r}"
            ] += 1
        elif not limits:
            note = "clip_norm was not seen: torch's clip_grad_norm_ was not called, and no gradient"
            self.notes[f"{note} was larger"] = None

    def check_size(self) -> None:
        """Note a model whose number of parameters is not the one of the forecast."""
        expected = count_params(self._decision.shape).total
        num_params = self._report.num_params
        if self._trainer.num_params is None and abs(num_params / expected - 1) > SIZE_SLACK:
            self.notes[
                f"it has {format_counted(num_params, 'parameter')}, and the forecast counts "
                f"{expected:,} by [model]: proxy.describe in a new study makes it count yours"
            ] = None


# ---- Rates ----


def _compute_rate_share(schedule: Schedule, step: int) -> float:
    """Return a rate's share of the peak, also one step before the first and after the last."""
    if step < 0:
        return 0.0 if schedule.warmup_steps else 1.0
    if step >= schedule.num_steps:
        return 1.0 if schedule.kind == "constant" else schedule.final_fraction
    return compute_lr_multiplier(schedule, step)


def _compute_max_distance(rates: list[float], shares: list[float], peak: float) -> float:
    """Return the largest distance of rates from `peak` times `shares`, as a share of the peak."""
    pairs = zip(rates, shares, strict=False)
    return max((abs(rate - peak * share) for rate, share in pairs), default=0.0) / peak


def _find_factor(rates: list[float], shares: list[float], peak: float) -> float | None:
    """Return the factor between the rates and the frozen ones; None if they have several."""
    factors = [
        rate / (peak * share)
        for rate, share in zip(rates, shares, strict=False)
        if share > SAME_TOLERANCE
    ]
    are_equal = bool(factors) and math.isclose(min(factors), max(factors), rel_tol=FACTOR_RTOL)
    return max(factors) if are_equal else None


def _describe_rates(
    rates: list[float], shares: list[float], peak: float, multiplier: float, steps: tuple[int, ...]
) -> str:
    """Describe how rates differ: by one factor, or from some step on."""
    factor = _find_factor(rates, shares, peak)
    if factor is not None:
        why = ""
        if multiplier != 1 and math.isclose(factor, multiplier, rel_tol=FACTOR_RTOL):
            why = "; does it still have the value for the base width?"
        elif multiplier != 1 and math.isclose(factor * multiplier, 1, rel_tol=FACTOR_RTOL):
            why = "; is it scaled twice?"
        return (
            f"its peak rate is {factor * peak:.6g}, frozen as {peak:.6g}: "
            f"{format_factor(factor)} times{why}"
        )
    wrong = [
        index
        for index, (rate, share) in enumerate(zip(rates, shares, strict=False))
        if abs(rate - peak * share) > SAME_TOLERANCE * peak
    ]
    first, num_more = wrong[0], len(wrong) - 1
    more = f", and at {num_more} more of {format_counted(len(rates), 'step')}" if num_more else ""
    return (
        f"its rate at step {steps[first]} is {rates[first]:.6g}, frozen as "
        f"{peak * shares[first]:.6g}{more}"
    )
