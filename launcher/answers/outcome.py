"""What came of a study, for people: the outcome in a sentence, what would decide it, values,
choice, gates.
"""

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
"""Cost of further runs, over what the study has spent, above which the line that proposes them says
so."""


def outcome_line(body: Any, after: Any) -> str:
    """The sentence that a study's user came for: whether to launch, and what; before there is a
    choice, how far it is; after the main run, its measured loss beside the predicted one.

    Args:
        body: `report.json`.
        after: the runs that would decide what cannot tell (`launcher.study.next_runs`), or None.
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
        why = ", for lack of runs" if {gate["name"] for gate in closed} <= lacking else ""
        names, are = listed([gate["name"] for gate in closed]), "are" if len(closed) > 1 else "is"
        return f"cannot tell yet whether to launch: {names} {are} undecided{why}"
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
    return f"{lead}: learning rate {format_learning_rate(rate)}, {_chosen(body['choice'])}"


def progress_text(body: Any) -> str:
    """How far each stage is, which is left out where none has begun."""
    parts = [
        f"{name} {done[0]} of {counted(done[1], 'run')}"
        for name, done in body["progress"].items()
        if done
    ]
    return ", ".join(parts) or "no run has ended"


def decide_line(after: Any, study_dir: Path, closed: Iterable[Any] = ()) -> str:
    """The one command that would decide what cannot tell, its time and its price, and which gates
    where it leaves others of the `closed` undecided; else what each of those that failed needs, as
    no runs of this study open it.

    Gates are records or JSON.
    """
    told = cast(list[Any], canon.to_json([*closed]))
    if after is None:
        return needs_text(told)
    which = (
        ""
        if {gate["name"] for gate in told} <= set(after["gates"])
        else f" {listed(after['gates'])} alone"
    )
    least = "" if after["sets"] else " at least"  # each round may ask for more
    costs = [f"+{counted(after['num_runs'], 'run')}{least}"]
    costs += (
        [f"about {format_rough_duration(after['seconds'])[0]} here"] if after["seconds"] else []
    )
    costs += [format_usd(after["usd"])] if after["usd"] is not None else []
    if after["times_spent"] and after["times_spent"] > MAX_TIMES_SPENT:
        costs.append(f"{format_significant(after['times_spent'])} times what the study has spent")
    return f"to decide{which}: {deciding_command(after, study_dir)}   ({', '.join(costs)})"


def gate_lines(body: Any, after: Any, *, full: bool = False) -> list[str]:
    """What passed in one line, what lacks the same runs in one line, every other gate in a line
    with its reason.

    Args:
        body: `report.json`.
        after: as `outcome_line` has it.
        full: every gate with its whole reason.
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


def _chosen(choice: Any) -> str:
    predicted = choice["prediction"]
    return (
        f"width {choice['shape']['width']}, {format_count(choice['params'])} params, "
        f"{format_count(choice['tokens'])} tokens, {counted(choice['num_steps'], 'step')}; loss "
        f"{format_loss(predicted['loss'])} nats {format_interval(predicted['interval'])}"
    )


def choice_text(body: Any) -> str:
    """The chosen shape with its forecast, doubts about it first; empty before there is one."""
    if not body["choice"]:
        return ""
    aspect = body["choice"].get("aspect")
    told = (
        [f"depth: {counted(body['choice']['shape']['num_layers'], 'layer')}, {aspect_text(aspect)}"]
        if aspect
        else []
    )
    noise = body.get("noise_scale")
    told += [judged_text(noise["judged"])] if noise else []
    return "\n".join(
        [*forecast_warnings(body["gates"]), f"choice: {_chosen(body['choice'])}", *told]
    )


def transfer_line(transfer: Any, outcome: str = "") -> str:
    """Whether the learning rate transfers, over what, and what it costs.

    Args:
        transfer: a report's `transfer`.
        outcome: of all tests, where that is another one.
    """
    together = transfer["together"]
    over = f"over {listed(together['axes'])}"
    lead = {
        "holds": f"holds: the learning rate transfers {over}",
        "drifts": f"drifts: the learning rate does not transfer {over}",
    }.get(together["outcome"], f"cannot tell whether the learning rate transfers {over}")
    if outcome and outcome != together["outcome"]:
        others = [v["hyperparameter"] for v in transfer["values"] if v["outcome"] == outcome]
        named = ", ".join(map(words, others)) or "a test"
        lead = f"{words(outcome)}: {named}; the learning rate {words(together['outcome'])}"
    if together["regret_nats"] is None or together["regret_nats"]["value"] is None:
        return f"{lead}: {together['reasons'][0]}"
    return (
        f"{lead}; at {format_learning_rate(together['transferred_value'])} it loses "
        f"{estimate(together['regret_nats'])} nats, {together['margin_nats']:g} allowed"
    )


def closing_text(body: Any, after: Any, study_dir: Path) -> str:
    """What came of a study in at most some 30 lines: outcome, what would decide it, values, choice,
    gates.
    """
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
