"""A study's outcome as text: whether to launch, which runs would decide that, the values, the
chosen main run, and the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun._launcher.main_run.frozen.launch_file import format_acceptance
from forerun._launcher.report.answers.report_text import format_text_table
from forerun._launcher.report.views import tables
from forerun._launcher.report.views.aspect import format_aspect_choice
from forerun._launcher.report.views.fit_findings import Choice
from forerun._launcher.report.views.noise_scale import format_batch_comparison
from forerun._launcher.report.views.report_model import Report
from forerun._launcher.report.views.transfer import format_estimate
from forerun._launcher.report.views.transfer_findings import Transfer
from forerun._launcher.report.views.wording import (
    describe_outcome,
    format_user_run,
    join_names,
    to_words,
)
from forerun._launcher.study.stages.gates import Gate, build_forecast_warnings, format_needs
from forerun._launcher.study.stages.next_runs import NextRuns, format_deciding_command
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_interval,
    format_learning_rate,
    format_loss,
    format_rough_duration,
    format_significant,
    format_usd,
)

MAX_TIMES_SPENT = 2.0
"""Ratio of the cost of further runs to the study's spend. A proposal of runs with a higher ratio
states the ratio."""


def format_outcome(report: Report, next_runs: NextRuns | None) -> str:
    """Return the sentence that says whether to launch, and with which values.

    Before the study has chosen a main run, the sentence says how far the study is. After the main
    run, the sentence compares the measured loss with the predicted one.

    Args:
        report: The report.
        next_runs: The runs that would decide the gates that cannot tell
            (`forerun._launcher.study.stages.next_runs`), or None.
    """
    unsettled = report.open_gates
    failed = [gate.name for gate in unsettled if gate.outcome == "failed"]
    if outcome := describe_outcome(report):
        accepted = report.accepted_failures
        leads = [
            f"{lead}: gate{'s' * (len(names) > 1)} {join_names(names)} failed; "
            for lead, names in (("not accepted", failed), ("accepted failure", accepted))
            if names
        ]
        return "".join([*leads, outcome])
    if failed:
        return f"do not launch: gate{'s' * (len(failed) > 1)} {join_names(failed)} failed"
    if not report.choice:
        return f"not decided yet: {format_progress(report)}"
    if unsettled:
        lacking = set(next_runs.gates) if next_runs else set()
        reason = ", for lack of runs" if {gate.name for gate in unsettled} <= lacking else ""
        names = join_names([gate.name for gate in unsettled])
        verb = "are" if len(unsettled) > 1 else "is"
        return f"cannot tell yet whether to launch: {names} {verb} undecided{reason}"
    lead = "ready to launch"
    if failures := report.accepted_failures:
        lead = f"accepted failure: gate{'s' * (len(failures) > 1)} {join_names(failures)} failed"
    elif report.accepted:
        lead += f", at the accepted risk of {join_names(sorted(report.accepted))}"
    if report.user_run:
        return lead if report.accepted else f"{lead}: every gate passed"
    rate = format_target_rate(report.transfer)
    return f"{lead}: learning rate {rate}, {_format_choice(report.choice)}"


def format_target_rate(transfer: Transfer | None) -> str:
    """Format the main run's learning rate as it is frozen.

    The verdict is on the rate before rounding, whose last digit may differ.
    """
    rates = (
        value.target_value
        for value in (transfer.values if transfer else ())
        if value.hyperparameter == LEARNING_RATE and not isinstance(value.target_value, str)
    )
    return format_learning_rate(next(rates, None))


def format_progress(report: Report) -> str:
    """Return the progress of every stage that has begun."""
    parts = [
        f"{name} {done[0]} of {format_counted(done[1], 'run')}"
        for name, done in report.progress.items()
        if done
    ]
    return ", ".join(parts) or "no run has ended"


def format_next_decision(
    next_runs: NextRuns | None, study_dir: Path, unsettled: Sequence[Gate] = ()
) -> str:
    """Return the command that would decide the gates that cannot tell, with its time and price.

    If the command leaves some gates undecided, the line names the gates that it decides. If no runs
    of this study would help, the line says what each failed gate needs.

    Args:
        next_runs: As in `format_outcome`.
        study_dir: The study's folder.
        unsettled: Gates that did not pass and that nobody accepted.
    """
    if next_runs is None:
        return format_needs(unsettled)
    scope = (
        ""
        if {gate.name for gate in unsettled} <= set(next_runs.gates)
        else f" {join_names(next_runs.gates)} alone"
    )
    # Without keys to set, the command runs in rounds, and each round may ask for more runs.
    bound = "" if next_runs.sets else " at least"
    costs = [f"+{format_counted(next_runs.num_runs, 'run')}{bound}"]
    costs += (
        [f"about {format_rough_duration(next_runs.seconds)[0]} here"] if next_runs.seconds else []
    )
    costs += [format_usd(next_runs.usd)] if next_runs.usd is not None else []
    if next_runs.times_spent and next_runs.times_spent > MAX_TIMES_SPENT:
        costs.append(f"{format_significant(next_runs.times_spent)} times what the study has spent")
    return (
        f"to decide{scope}: {format_deciding_command(next_runs, study_dir)}   ({', '.join(costs)})"
    )


def format_gates(report: Report, next_runs: NextRuns | None, *, full: bool = False) -> list[str]:
    """Return lines on the gates.

    The gates that passed share one line. The gates that lack the same runs share another. Every
    other gate has a line with its reason.

    Args:
        report: The report.
        next_runs: As in `format_outcome`.
        full: Whether to show every gate with its whole reason.
    """
    gates, accepted = report.gates, report.accepted
    if full:
        return [f"gate {gate.name}: {to_words(gate.outcome)}\n  {gate.reason}" for gate in gates]
    passed = [gate.name for gate in gates if gate.outcome == "passed"]
    lines = [f"gates passed: {', '.join(passed)}"] if passed else []
    lacking = [
        gate
        for gate in gates
        if next_runs and gate.name in next_runs.gates and gate.outcome == "cannot_tell"
    ]
    if lacking:
        names = ", ".join(gate.name for gate in lacking)
        lines.append(
            f"gate{'s' * (len(lacking) > 1)} {names}: cannot tell: too few runs (--full: what each "
            "found)"
        )
    for gate in gates:
        if gate.outcome == "passed" or gate in lacking:
            continue
        if gate.name in accepted:
            has_failed = gate.outcome == "failed"
            lines.append(format_acceptance(gate.name, accepted[gate.name], failed=has_failed))
        else:
            lines.append(f"gate {gate.name}: {to_words(gate.outcome)}: {gate.reason}")
    return lines


def _format_choice(choice: Choice) -> str:
    prediction = choice.prediction
    return (
        f"width {choice.shape.width}, {format_count(choice.params)} params, "
        f"{format_count(choice.tokens)} tokens, {format_counted(choice.num_steps, 'step')}; loss "
        f"{format_loss(prediction.loss)} nats {format_interval(prediction.interval)}"
    )


def format_choice(report: Report) -> str:
    """Describe the chosen shape and its forecast, doubts first; empty before there is a choice."""
    if not report.choice:
        return ""
    lines = [*build_forecast_warnings(report.gates), f"choice: {_format_choice(report.choice)}"]
    if aspect := report.choice.aspect:
        depth = format_counted(report.choice.shape.num_layers, "layer")
        lines.append(f"depth: {depth}, {format_aspect_choice(aspect)}")
    if (noise := report.noise_scale) and noise.judged:
        lines.append(format_batch_comparison(noise.judged))
    return "\n".join(lines)


def format_transfer(transfer: Transfer, outcome: str = "") -> str:
    """Say whether the learning rate transfers, over which axes, and at which regret.

    Args:
        transfer: Section `transfer` of a report.
        outcome: Outcome of all tests together. The text names it if it differs from the learning
            rate's outcome.
    """
    together = transfer.together
    over = f"over {join_names(together.axes)}"
    lead = {
        "holds": f"holds: the learning rate transfers {over}",
        "drifts": f"drifts: the learning rate does not transfer {over}",
    }.get(together.outcome, f"cannot tell whether the learning rate transfers {over}")
    if outcome and outcome != together.outcome:
        hyperparameters = [v.hyperparameter for v in transfer.values if v.outcome == outcome]
        names = ", ".join(map(to_words, hyperparameters)) or "a test"
        lead = f"{to_words(outcome)}: {names}; the learning rate {to_words(together.outcome)}"
    if together.regret_nats is None or together.regret_nats.value is None:
        return f"{lead}: {together.reasons[0]}"
    return (
        f"{lead}; at {format_target_rate(transfer)} it loses "
        f"{format_estimate(together.regret_nats)} nats, {together.margin_nats:g} allowed"
    )


def format_study(report: Report, next_runs: NextRuns | None, study_dir: Path) -> str:
    """Summarize a study in about 30 lines: outcome, deciding runs, values, choice, and gates."""
    head = [
        format_outcome(report, next_runs),
        format_next_decision(next_runs, study_dir, report.open_gates),
    ]
    if report.user_run:
        head.append(format_user_run(report.user_run))
    parts = ["\n".join(filter(None, head))]
    if report.transfer:
        values = format_text_table(tables.build_values_table(report.transfer.values))
        parts.append(f"{format_transfer(report.transfer)}\n{values}")
    parts += [format_choice(report), "\n".join(format_gates(report, next_runs))]
    return "\n\n".join(filter(None, parts))
