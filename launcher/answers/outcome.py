"""A study's outcome as text: whether to launch, what would decide it, values, choice, gates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from launcher.answers.texts import shown_table
from launcher.frozen.launch_file import format_accepted_gates, list_accepted_failures
from launcher.study.decide import own_text
from launcher.study.gates import forecast_warnings, needs_text, open_gates
from launcher.study.next_runs import deciding_command
from launcher.views import tables
from launcher.views.aspect import aspect_text
from launcher.views.batch import judged_text
from launcher.views.main_run import describe_outcome
from launcher.views.numbers import listed, words
from launcher.views.transfer import estimate
from launcher.views.wider import wider_text
from proxies.core import canon
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import (
    counted,
    format_count,
    format_interval,
    format_learning_rate,
    format_loss,
    format_rough_duration,
    format_significant,
    format_usd,
)

MAX_TIMES_SPENT = 2.0
"""Ratio of the cost of further runs to the study's spend, above which the proposal states it."""


def outcome_line(body: Any, after: Any) -> str:
    """Return the sentence that says whether to launch, and with which values.

    Before there is a choice, it says how far the study is; after the main run, it compares the
    measured loss with the predicted one.

    Args:
        body: `report.json`.
        after: The runs that would decide the gates that cannot tell
            (`launcher.study.next_runs`), or None.
    """
    closed = open_gates(body)
    failed = [gate["name"] for gate in closed if gate["outcome"] == "failed"]
    if outcome := describe_outcome(body):
        accepted = list_accepted_failures(body["gates"], body["accepted"])
        leads = [
            f"{lead}: gate{'s' * (len(names) > 1)} {listed(names)} failed; "
            for lead, names in (("not accepted", failed), ("accepted failure", accepted))
            if names
        ]
        return "".join([*leads, outcome])
    if failed:
        return f"do not launch: gate{'s' * (len(failed) > 1)} {listed(failed)} failed"
    if not body["choice"]:
        return f"not decided yet: {progress_text(body)}"
    if closed:
        lacking = set(after["gates"]) if after else set()
        reason = ", for lack of runs" if {gate["name"] for gate in closed} <= lacking else ""
        names, verb = listed([gate["name"] for gate in closed]), "are" if len(closed) > 1 else "is"
        return f"cannot tell yet whether to launch: {names} {verb} undecided{reason}"
    lead = "ready to launch"
    if failures := list_accepted_failures(body["gates"], body["accepted"]):
        lead = f"accepted failure: gate{'s' * (len(failures) > 1)} {listed(failures)} failed"
    elif body["accepted"]:
        lead += f", at the accepted risk of {listed(sorted(body['accepted']))}"
    if body["own_run"]:
        return lead if body["accepted"] else f"{lead}: every gate passed"
    rate = next(
        (
            v["target_value"]
            for v in body["transfer"]["values"]
            if v["hyperparameter"] == LEARNING_RATE
        ),
        None,
    )
    return f"{lead}: learning rate {format_learning_rate(rate)}, {_format_choice(body['choice'])}"


def progress_text(body: Any) -> str:
    """Return the progress of every stage that has begun."""
    parts = [
        f"{name} {done[0]} of {counted(done[1], 'run')}"
        for name, done in body["progress"].items()
        if done
    ]
    return ", ".join(parts) or "no run has ended"


def decide_line(after: Any, study_dir: Path, closed: Iterable[Any] = ()) -> str:
    """Return the command that would decide the gates that cannot tell, with its time and price.

    If it leaves other gates undecided, the line names those it decides. If no runs of this study
    would help, the line says what each failed gate needs.

    Args:
        after: As in `outcome_line`.
        study_dir: The study's folder.
        closed: Gates that are not open, as records or as JSON.
    """
    gates = cast(list[Any], canon.to_json([*closed]))
    if after is None:
        return needs_text(gates)
    scope = (
        ""
        if {gate["name"] for gate in gates} <= set(after["gates"])
        else f" {listed(after['gates'])} alone"
    )
    # Each round may ask for more runs.
    bound = "" if after["sets"] else " at least"
    costs = [f"+{counted(after['num_runs'], 'run')}{bound}"]
    costs += (
        [f"about {format_rough_duration(after['seconds'])[0]} here"] if after["seconds"] else []
    )
    costs += [format_usd(after["usd"])] if after["usd"] is not None else []
    if after["times_spent"] and after["times_spent"] > MAX_TIMES_SPENT:
        costs.append(f"{format_significant(after['times_spent'])} times what the study has spent")
    return f"to decide{scope}: {deciding_command(after, study_dir)}   ({', '.join(costs)})"


def gate_lines(body: Any, after: Any, *, full: bool = False) -> list[str]:
    """Return one line for the gates that passed, one for those that lack the same runs, and one for
    every other gate, with its reason.

    Args:
        body: `report.json`.
        after: As in `outcome_line`.
        full: Whether to show every gate with its whole reason.
    """
    gates, accepted = body["gates"], body["accepted"]
    if full:
        return [
            f"gate {gate['name']}: {words(gate['outcome'])}\n  {gate['reason']}" for gate in gates
        ]
    passed = [gate["name"] for gate in gates if gate["outcome"] == "passed"]
    lines = [f"gates passed: {', '.join(passed)}"] if passed else []
    lacking = [
        gate
        for gate in gates
        if after and gate["name"] in after["gates"] and gate["outcome"] == "cannot_tell"
    ]
    if lacking:
        names = ", ".join(gate["name"] for gate in lacking)
        lines.append(
            f"gate{'s' * (len(lacking) > 1)} {names}: cannot tell: too few runs (--full: what each "
            "found)"
        )
    for gate in gates:
        if gate["outcome"] == "passed" or gate in lacking:
            continue
        if gate["name"] in accepted:
            lines += format_accepted_gates([gate], {gate["name"]: accepted[gate["name"]]})
        else:
            lines.append(f"gate {gate['name']}: {words(gate['outcome'])}: {gate['reason']}")
    return lines


def _format_choice(choice: Any) -> str:
    prediction = choice["prediction"]
    return (
        f"width {choice['shape']['width']}, {format_count(choice['params'])} params, "
        f"{format_count(choice['tokens'])} tokens, {counted(choice['num_steps'], 'step')}; loss "
        f"{format_loss(prediction['loss'])} nats {format_interval(prediction['interval'])}"
    )


def choice_text(body: Any) -> str:
    """Describe the chosen shape and its forecast, doubts first; empty before there is a choice."""
    if not body["choice"]:
        return ""
    aspect = body["choice"].get("aspect")
    lines = (
        [f"depth: {counted(body['choice']['shape']['num_layers'], 'layer')}, {aspect_text(aspect)}"]
        if aspect
        else []
    )
    noise = body.get("noise_scale")
    lines += [judged_text(noise["judged"])] if noise else []
    return "\n".join(
        [*forecast_warnings(body["gates"]), f"choice: {_format_choice(body['choice'])}", *lines]
    )


def transfer_line(transfer: Any, outcome: str = "") -> str:
    """Say whether the learning rate transfers, over which axes, and at which regret.

    Args:
        transfer: Section `transfer` of a report.
        outcome: Outcome of all tests together, which is named if it differs from the learning
            rate's.
    """
    together = transfer["together"]
    over = f"over {listed(together['axes'])}"
    lead = {
        "holds": f"holds: the learning rate transfers {over}",
        "drifts": f"drifts: the learning rate does not transfer {over}",
    }.get(together["outcome"], f"cannot tell whether the learning rate transfers {over}")
    if outcome and outcome != together["outcome"]:
        hyperparameters = [
            v["hyperparameter"] for v in transfer["values"] if v["outcome"] == outcome
        ]
        names = ", ".join(map(words, hyperparameters)) or "a test"
        lead = f"{words(outcome)}: {names}; the learning rate {words(together['outcome'])}"
    if together["regret_nats"] is None or together["regret_nats"]["value"] is None:
        return f"{lead}: {together['reasons'][0]}"
    return (
        f"{lead}; at {format_learning_rate(together['transferred_value'])} it loses "
        f"{estimate(together['regret_nats'])} nats, {together['margin_nats']:g} allowed"
    )


def closing_text(body: Any, after: Any, study_dir: Path) -> str:
    """Summarize a study in about 30 lines: outcome, what would decide it, values, choice, gates."""
    head = [outcome_line(body, after), decide_line(after, study_dir, open_gates(body))]
    if body["own_run"]:
        head.append(own_text(body["own_run"]))
    parts = ["\n".join(filter(None, head))]
    if body["transfer"]:
        values = shown_table(tables.values_table(body["transfer"]["values"]))
        parts.append(f"{transfer_line(body['transfer'])}\n{values}")
    if body.get("wider"):
        parts.append(f"wider is better: {wider_text(body['wider'])}")
    parts += [choice_text(body), "\n".join(gate_lines(body, after))]
    return "\n\n".join(filter(None, parts))
