"""Section `search` of the report, and the search in sentences. The module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from forerun._launcher.report.views.search_findings import (
    OpenEdge,
    Replicates,
    Search,
    Standing,
    Tie,
    Trial,
)
from forerun._launcher.report.views.transfer import format_hyperparameter
from forerun._launcher.study.experiments.search import GROWTH, SearchState
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.search_runs import describe_growth
from forerun._launcher.study.stages.winner_reruns import build_replays_body, describe_replays
from forerun._proxies.core import canon
from forerun._proxies.core.notation import (
    format_counted,
    format_interval,
    format_nats,
    format_percent,
)
from forerun._sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from forerun._launcher.study.experiments.conventions import ConventionDecision
    from forerun._launcher.study.experiments.transfer_results import SearchResult

MIN_LEAD_STANDARD_ERRORS = 2.0
"""Standard errors by which the runner-up must be worse before the two are called different."""


def build_search_section(study: Study, ledger: Ledger, outcome: SearchResult) -> Search:
    """Return section `search`: trials, the best trial, ranges and their growth, and repeats."""
    first_results, state = ledger.get_first_results(), SearchState(study, ledger)
    results = [first_results[study.get_trial_id(point)] for point in outcome.points]
    trials = [
        Trial.model_validate(
            {
                "index": index,
                **point,
                "loss_nats": result.loss_nats,
                "status": result.status,
                "num_steps": result.num_steps,
            }
        )
        for index, (point, result) in enumerate(zip(outcome.points, results, strict=True))
    ]
    edges, stopped = state.find_edges()
    axis_words = {
        name: [*axis.word_values]
        for name, axis in study.plan.search.user_axes.items()
        if axis.word_values
    }
    section = Search(
        trials=trials,
        best=dict(outcome.best),
        best_trial=outcome.best_trial,
        sampler=study.plan.search.sampler,
        pruner=study.plan.search.pruner,
        ranges={
            axis.name: list(axis.choices or axis.range) for axis in state.phases[-1].space.axes
        },
        can_be_off=list(study.plan.search.can_be_off),
        growth=[record.body for record in ledger.read_records(GROWTH)],
        open_edges=[OpenEdge.model_validate(edge, from_attributes=True) for edge in edges],
        stopped=stopped,
        replicates=_build_replicates(outcome),
        ties=[build_tie(tie, study.plan.transfer.margin_nats) for tie in outcome.ties],
        replays=build_replays_body(ledger),
    )
    return section.model_copy(update={"words": axis_words}) if axis_words else section


def build_tie(tie: ConventionDecision, margin_nats: float) -> Tie:
    """Return the comparison of a searched value with the conventional one, and the value used."""
    body = cast(dict[str, Any], canon.to_json(tie))
    used = {"value": tie.value, "margin_nats": margin_nats, "words": tie.describe(margin_nats)}
    return Tie.model_validate({**body.pop("finding"), **body, **used})


def _build_replicates(outcome: SearchResult) -> Replicates | None:
    """Return the repeats of the best trials with other seeds; None if no trial was repeated."""
    replication = outcome.replicated
    if replication is None or replication.comparison is None:
        return None
    comparison = replication.comparison
    return Replicates(
        num_runs=len(replication.specs),
        paired=comparison.paired,
        lead_nats=comparison.lead_nats,
        lead_standard_error_nats=comparison.lead_standard_error_nats,
        standings=[
            Standing(
                trial=replication.candidates[standing.candidate],
                num_repeats=standing.num_repeats,
                num_diverged=standing.num_diverged,
                mean_nats=standing.mean_nats,
                standard_error_nats=standing.standard_error_nats,
            )
            for standing in comparison.standings
        ],
    )


def describe_search(search: Search) -> list[str]:
    """Describe a search in sentences: the best trial, open ends of ranges, growth, and repeats."""
    lines = [f"sampler {search.sampler}; the best is trial {search.best_trial}"]
    lines += [describe_growth(growth) for growth in search.growth]
    lines += [
        f"{edge.axis} is not bracketed: the best trials lie at the {edge.side} end of "
        f"{format_interval(edge.range, '.4g')}; a larger search.max_extensions in a new study "
        "widens it (--fork keeps finished runs)"
        for edge in search.open_edges
    ]
    lines += list(search.stopped) + _describe_pruning(search) + _describe_replicates(search)
    lines += [f"{format_hyperparameter(tie.hyperparameter)}: {tie.words}" for tie in search.ties]
    return lines + describe_replays(search.replays["replays"] if search.replays else ())


def _describe_pruning(search: Search) -> list[str]:
    """Describe which trials were pruned, and which share of the steps that saved."""
    pruned = [trial for trial in search.trials if trial.status == "pruned"]
    if not pruned:
        return []
    # Diverged trials are not counted: they stopped by themselves.
    planned = max(
        (trial.num_steps for trial in search.trials if trial.status == "finished"), default=0
    )
    saved_steps = sum(planned - trial.num_steps for trial in pruned)
    share = saved_steps / (saved_steps + sum(trial.num_steps for trial in search.trials))
    trials = f"{len(pruned)} of {format_counted(len(search.trials), 'trial')}"
    saved = f"{format_percent(share)} of the search's steps"
    return [f"pruner {search.pruner} stopped {trials} early, which saved {saved}"]


def _describe_replicates(search: Search) -> list[str]:
    """Describe how the best trials compare when they are repeated with other seeds."""
    replicates = search.replicates
    if replicates is None:
        advice = "search.num_replicates repeats the best"
        return [f"each trial is one run, so the best of many is partly luck: {advice}"]
    best, *runners_up = replicates.standings
    lines = []
    if best.mean_nats is not None:
        mean = _format_with_error(best.mean_nats, best.standard_error_nats)
        lines.append(
            f"{format_counted(replicates.num_runs, 'repeat')} with other seeds: "
            f"trial {best.trial} has {mean} nats over {best.num_repeats}"
        )
    if replicates.lead_nats is not None:
        lead, error = replicates.lead_nats, replicates.lead_standard_error_nats
        note = ", compared seed by seed" if replicates.paired else ""
        if error is None or lead <= MIN_LEAD_STANDARD_ERRORS * error:
            note += ": the runs do not distinguish them"
        lines.append(
            f"trial {runners_up[0].trial} is worse than it by "
            f"{_format_with_error(lead, error)} nats{note}"
        )
    return lines + [
        f"trial {standing.trial} diverged with {standing.num_diverged} of "
        f"{format_counted(standing.num_repeats, 'other seed')}"
        for standing in replicates.standings
        if standing.num_diverged
    ]


def _format_with_error(value: float, error: float | None) -> str:
    return format_nats(value) if error is None else f"{format_nats(value)} +- {format_nats(error)}"
