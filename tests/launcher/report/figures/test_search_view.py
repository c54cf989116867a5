"""Tests of the texts and the figure about a hyperparameter search."""

import pytest
from example_report import make_finished_body

from forerun._launcher.report.answers.report_text import format_search
from forerun._launcher.report.figures import plots
from forerun._launcher.report.figures.panel import render_svg
from forerun._launcher.report.views.search import describe_search
from forerun._launcher.report.views.search_findings import Search
from forerun._proxies.core.notation import format_percent

EDGE = {"axis": "learning_rate", "side": "high", "range": [2**-9, 2**-3], "wider": [2**-9, 2**-1]}
STANDINGS = [
    {
        "trial": 3,
        "num_repeats": 5,
        "num_diverged": 0,
        "mean_nats": 2.1,
        "standard_error_nats": 0.001,
    },
    {
        "trial": 5,
        "num_repeats": 4,
        "num_diverged": 0,
        "mean_nats": 2.11,
        "standard_error_nats": 0.002,
    },
    {
        "trial": 1,
        "num_repeats": 2,
        "num_diverged": 1,
        "mean_nats": None,
        "standard_error_nats": None,
    },
]


@pytest.fixture
def body():
    """Report of a search with everything that its sentences describe.

    The best trial is near an open edge: an end of a range that may exclude the optimum. The search
    was extended once to a wider range. Replicates (repeats with other seeds) compare the best
    trials. One trial has no clipping and no weight decay.
    """
    body = make_finished_body()
    search = body["search"]
    for trial in search["trials"]:
        trial["weight_decay"] = 0.05
    search["best"]["weight_decay"] = 0.05
    search["trials"][2] |= {"clip_norm": 0.0, "weight_decay": 0.0}
    search["growth"] = [{"edges": [EDGE], "points": [], "num_trials": 8}]
    search["open_edges"] = [EDGE]
    search["replicates"] = {
        "num_runs": 11,
        "paired": True,
        "lead_nats": 0.01,
        "lead_standard_error_nats": 0.002,
        "standings": STANDINGS,
    }
    return body


def describe(body):
    """Return the sentences about the search of a report."""
    return list(describe_search(Search.model_validate(body["search"])))


def test_sentences_name_best_trial_edges_and_replicates(body):
    parts = (
        "trial 3",
        "[0.001953, 0.5]",
        "search.max_extensions",
        "2.1000 +- 0.0010",
        "0.0100 +- 0.0020",
        "1 of 2",
    )
    for sentence, part in zip(describe(body), parts, strict=True):
        assert part in sentence
    body["search"]["replicates"]["lead_standard_error_nats"] = 0.006
    assert "do not distinguish them" in describe(body)[4]
    body["search"]["replicates"] = None
    assert "partly luck" in describe(body)[-1]


def test_table_has_every_axis_and_the_sentences(body):
    text = format_search(Search.model_validate(body["search"]))
    assert text.splitlines()[1].split() == [
        "trial",
        "learning",
        "rate",
        "warmup",
        "fraction",
        "clip",
        "norm",
        "weight",
        "decay",
        "loss",
        "(nats)",
    ]
    for sentence in describe(body):
        assert f"- {sentence}" in text.splitlines()

    # A value of 0 turns a hyperparameter off.
    finished = [trial for trial in body["search"]["trials"] if trial["loss_nats"] is not None]
    best = min(finished, key=lambda trial: trial["loss_nats"])
    best |= {"clip_norm": 0.0, "weight_decay": 0.0}
    row = format_search(Search.model_validate(body["search"])).splitlines()[2]
    assert row.split()[3:5] == ["off", "off"]


def test_pruned_trials_are_described_and_drawn(body):
    search = body["search"]
    assert not any("pruner" in sentence for sentence in describe(body)), "none is pruned yet"
    assert "pruned" not in render_svg(plots.search(body))
    for trial in search["trials"]:
        trial["num_steps"] = 100 if trial["status"] == "finished" else 40
    for trial in search["trials"][4:6]:
        trial |= {"status": "pruned", "loss_nats": None, "num_steps": 25}
    search |= {"pruner": "curve"}
    num_trials = len(search["trials"])
    num_diverged = sum(trial["status"] == "diverged" for trial in search["trials"])

    # The two pruned trials saved 75 steps each.
    share = 150 / (100 * (num_trials - num_diverged) + 40 * num_diverged)
    sentence = (
        f"pruner curve stopped 2 of {num_trials} trials early, which saved "
        f"{format_percent(share)} of the search's steps"
    )
    assert sentence in describe(body)
    assert "pruned" in render_svg(plots.search(body))
