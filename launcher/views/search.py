"""The search as plain data for the report and the verbs, and in sentences; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.experiments.conventions import ties_body
from launcher.experiments.search import (
    GROWTH,
    edges_of,
    ended_losses,
    phases,
)
from launcher.plan.study import Study
from launcher.study.search_runs import said
from launcher.study.winner_reruns import replays_body
from launcher.study.winner_reruns import sentences as replay_sentences
from launcher.views.transfer import hyperparameter_name
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted, format_nats, format_percent
from sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from launcher.experiments.transferred_values import SearchOutcome
    from sweeps.store.ledger import Ledger

CLEAR_ERRORS = 2.0
"""Standard errors by which the runner-up must be worse before the two are called different."""

_STANDING = ("num_repeats", "num_diverged", "mean_nats", "standard_error_nats")


def search_body(study: Study, ledger: Ledger, outcome: SearchOutcome) -> dict[str, Json]:
    """Return section `search` of the report: trials, the best one, ranges, and repeats."""
    first_results, search_phases = ledger.first_results(), phases(study, ledger)
    results = [first_results[study.trial_id(point)] for point in outcome.points]
    trials: list[Json] = [
        {
            "index": index,
            **point,
            **{name: getattr(result, name) for name in ("loss_nats", "status", "num_steps")},
        }
        for index, (point, result) in enumerate(zip(outcome.points, results, strict=True))
    ]
    losses = ended_losses(study, ledger)
    assert losses is not None
    edges, stopped = edges_of(study, ledger, losses)
    axis_words: dict[str, Json] = {
        name: [*axis.words] for name, axis in study.plan.search.own.items() if axis.words
    }
    return {
        "trials": trials,
        "best": canon.to_json(outcome.best),
        "best_trial": outcome.best_trial,
        "sampler": study.plan.search.sampler,
        "pruner": study.plan.search.pruner,
        "ranges": {
            axis.name: list(axis.choices or axis.range) for axis in search_phases[-1].space.axes
        },
        **({"words": axis_words} if axis_words else {}),
        "can_be_off": list(study.plan.search.can_be_off),
        "growth": [record.body for record in ledger.records(GROWTH)],
        "open_edges": [canon.to_json(edge) for edge in edges],
        "stopped": canon.to_json(stopped),
        "replicates": _summarize_replicates(outcome),
        "ties": list(ties_body(outcome.ties, study.plan.transfer.margin_nats)),
        "replays": replays_body(ledger),
    }


def _summarize_replicates(outcome: SearchOutcome) -> Json:
    replication = outcome.replicated
    if replication is None or replication.comparison is None:
        return None
    comparison = replication.comparison
    return {
        "num_runs": len(replication.specs),
        "paired": comparison.paired,
        "lead_nats": comparison.lead_nats,
        "lead_standard_error_nats": comparison.lead_standard_error_nats,
        "standings": [
            {"trial": replication.candidates[standing.candidate]}
            | {name: getattr(standing, name) for name in _STANDING}
            for standing in comparison.standings
        ],
    }


def sentences(body: Any) -> list[str]:
    """Describe a search in sentences: the best trial, open ends of ranges, growth, and repeats."""
    lines = [f"sampler {body['sampler']}; the best is trial {body['best_trial']}"]
    lines += [said(growth) for growth in body["growth"]]
    lines += [
        f"{edge['axis']} is not bracketed: the best trials lie at the {edge['side']} end of "
        f"[{edge['range'][0]:.4g}, "
        f"{edge['range'][1]:.4g}]; a larger search.max_extensions in a new study widens it (--fork "
        "keeps finished runs)"
        for edge in body["open_edges"]
    ]
    lines += list(body["stopped"]) + _describe_pruning(body) + _describe_replicates(body)
    lines += [
        f"{hyperparameter_name(tie['hyperparameter'])}: {tie['words']}"
        for tie in body.get("ties", ())
    ]
    return lines + replay_sentences(body.get("replays"))


def _describe_pruning(body: Any) -> list[str]:
    """Describe which trials were pruned, and which share of the steps that saved."""
    pruned = [trial for trial in body["trials"] if trial["status"] == "pruned"]
    if not pruned:
        return []
    # Diverged trials are not counted: they stopped by themselves.
    planned = max(
        (trial["num_steps"] for trial in body["trials"] if trial["status"] == "finished"), default=0
    )
    saved_steps = sum(planned - trial["num_steps"] for trial in pruned)
    share = saved_steps / (saved_steps + sum(trial["num_steps"] for trial in body["trials"]))
    trials = f"{len(pruned)} of {counted(len(body['trials']), 'trial')}"
    saved = f"{format_percent(share)} of the search's steps"
    return [f"pruner {body['pruner']} stopped {trials} early, which saved {saved}"]


def _describe_replicates(body: Any) -> list[str]:
    replicates = body["replicates"]
    if replicates is None:
        return [
            (
                "each trial is one run, so the best of many is partly luck: search.num_replicates "
                "repeats the best"
            )
        ]
    best, *runners_up = replicates["standings"]
    lines = []
    if best["mean_nats"] is not None:
        mean = _format_with_error(best["mean_nats"], best["standard_error_nats"])
        lines.append(
            f"{replicates['num_runs']} repeats with other seeds: "
            f"trial {best['trial']} has {mean} nats over {best['num_repeats']}"
        )
    if replicates["lead_nats"] is not None:
        lead, error = replicates["lead_nats"], replicates["lead_standard_error_nats"]
        note = ", compared seed by seed" if replicates["paired"] else ""
        note += (
            ""
            if error is not None and lead > CLEAR_ERRORS * error
            else ": the runs do not distinguish them"
        )
        lines.append(
            f"trial {runners_up[0]['trial']} is worse than it by "
            f"{_format_with_error(lead, error)} nats{note}"
        )
    return lines + [
        f"trial {standing['trial']} diverged with {standing['num_diverged']} of "
        f"{counted(standing['num_repeats'], 'other seed')}"
        for standing in replicates["standings"]
        if standing["num_diverged"]
    ]


def _format_with_error(value: float, error: float | None) -> str:
    return format_nats(value) if error is None else f"{format_nats(value)} +- {format_nats(error)}"
