"""The search as plain data for report and verbs, and in sentences: how it went, how sure its choice
is. No torch.
"""

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
"""Standard errors by which the runner-up must be worse to count as different."""

_STANDING = ("num_repeats", "num_diverged", "mean_nats", "standard_error_nats")


def search_body(study: Study, ledger: Ledger, found: SearchOutcome) -> dict[str, Json]:
    """Trials, the best, how the ranges grew, whether it is bracketed, and repeats."""
    first, done = ledger.first_results(), phases(study, ledger)
    results = [first[study.trial_id(point)] for point in found.points]
    trials: list[Json] = [
        {
            "index": index,
            **point,
            **{name: getattr(result, name) for name in ("loss_nats", "status", "num_steps")},
        }
        for index, (point, result) in enumerate(zip(found.points, results, strict=True))
    ]
    losses = ended_losses(study, ledger)
    assert losses is not None
    edges, stopped = edges_of(study, ledger, losses)
    words: dict[str, Json] = {
        name: [*axis.words] for name, axis in study.plan.search.own.items() if axis.words
    }
    return {
        "trials": trials,
        "best": canon.to_json(found.best),
        "best_trial": found.best_trial,
        "sampler": study.plan.search.sampler,
        "pruner": study.plan.search.pruner,
        "ranges": {axis.name: list(axis.choices or axis.range) for axis in done[-1].space.axes},
        **({"words": words} if words else {}),
        "can_be_off": list(study.plan.search.can_be_off),
        "growth": [record.body for record in ledger.records(GROWTH)],
        "open_edges": [canon.to_json(edge) for edge in edges],
        "stopped": canon.to_json(stopped),
        "replicates": _replicates(found),
        "ties": list(ties_body(found.ties, study.plan.transfer.margin_nats)),
        "replays": replays_body(ledger),
    }


def _replicates(found: SearchOutcome) -> Json:
    again = found.replicated
    if again is None or again.comparison is None:
        return None
    compared = again.comparison
    return {
        "num_runs": len(again.specs),
        "paired": compared.paired,
        "lead_nats": compared.lead_nats,
        "lead_standard_error_nats": compared.lead_standard_error_nats,
        "standings": [
            {"trial": again.candidates[one.candidate]}
            | {name: getattr(one, name) for name in _STANDING}
            for one in compared.standings
        ],
    }


def sentences(body: Any) -> list[str]:
    """A search in sentences: the best, its bracket, growth, repeats."""
    lines = [f"sampler {body['sampler']}; the best is trial {body['best_trial']}"]
    lines += [said(grew) for grew in body["growth"]]
    lines += [
        f"{edge['axis']} is not bracketed: the best trials lie at the {edge['side']} end of "
        f"[{edge['range'][0]:.4g}, "
        f"{edge['range'][1]:.4g}]; a larger search.max_extensions in a new study widens it (--fork "
        "keeps finished runs)"
        for edge in body["open_edges"]
    ]
    lines += list(body["stopped"]) + _pruned_sentences(body) + _repeat_sentences(body)
    lines += [
        f"{hyperparameter_name(one['hyperparameter'])}: {one['words']}"
        for one in body.get("ties", ())
    ]
    return lines + replay_sentences(body.get("replays"))


def _pruned_sentences(body: Any) -> list[str]:
    """What was stopped early, and how much that saved."""
    pruned = [trial for trial in body["trials"] if trial["status"] == "pruned"]
    if not pruned:
        return []
    # A trial that diverged has stopped by itself.
    planned = max(
        (trial["num_steps"] for trial in body["trials"] if trial["status"] == "finished"), default=0
    )
    spared = sum(planned - trial["num_steps"] for trial in pruned)
    share = spared / (spared + sum(trial["num_steps"] for trial in body["trials"]))
    trials = f"{len(pruned)} of {counted(len(body['trials']), 'trial')}"
    saved = f"{format_percent(share)} of the search's steps"
    return [f"pruner {body['pruner']} stopped {trials} early, which saved {saved}"]


def _repeat_sentences(body: Any) -> list[str]:
    again = body["replicates"]
    if again is None:
        return [
            (
                "each trial is one run, so the best of many is partly luck: search.num_replicates "
                "repeats the best"
            )
        ]
    best, *rest = again["standings"]
    lines = []
    if best["mean_nats"] is not None:
        mean = _with_error(best["mean_nats"], best["standard_error_nats"])
        lines.append(
            f"{again['num_runs']} repeats with other seeds: trial {best['trial']} has {mean} nats "
            "over "
            f"{best['num_repeats']}"
        )
    if again["lead_nats"] is not None:
        lead, error = again["lead_nats"], again["lead_standard_error_nats"]
        how = ", compared seed by seed" if again["paired"] else ""
        how += (
            ""
            if error is not None and lead > CLEAR_ERRORS * error
            else ": the runs do not distinguish them"
        )
        lines.append(
            f"trial {rest[0]['trial']} is worse than it by {_with_error(lead, error)} nats{how}"
        )
    return lines + [
        f"trial {one['trial']} diverged with {one['num_diverged']} of "
        f"{counted(one['num_repeats'], 'other seed')}"
        for one in again["standings"]
        if one["num_diverged"]
    ]


def _with_error(value: float, error: float | None) -> str:
    return format_nats(value) if error is None else f"{format_nats(value)} +- {format_nats(error)}"
