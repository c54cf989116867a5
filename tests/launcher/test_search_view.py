"""What terminal and report say of a search."""

import pytest
from example_report import finished_body

from launcher.answers.texts import search_text
from launcher.figures import plots
from launcher.figures.panel import svg_of
from launcher.views.search import sentences
from proxies.core.notation import format_percent

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
    body = finished_body()
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


def test_every_sentence(body):
    told = (
        "trial 3",
        "[0.001953, 0.5]",
        "search.max_extensions",
        "2.1000 +- 0.0010",
        "0.0100 +- 0.0020",
        "1 of 2",
    )
    for sentence, part in zip(sentences(body["search"]), told, strict=True):
        assert part in sentence
    body["search"]["replicates"]["lead_standard_error_nats"] = 0.006
    assert "do not distinguish them" in sentences(body["search"])[4]
    body["search"]["replicates"] = None
    assert "partly luck" in sentences(body["search"])[-1]


def test_a_table_has_every_axis_in_one_order(body):
    text = search_text(body["search"])
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
    assert all(f"- {sentence}" in text.splitlines() for sentence in sentences(body["search"]))
    finished = [trial for trial in body["search"]["trials"] if trial["loss_nats"] is not None]
    best = min(finished, key=lambda trial: trial["loss_nats"])
    best |= {"clip_norm": 0.0, "weight_decay": 0.0}
    assert search_text(body["search"]).splitlines()[2].split()[3:5] == ["off", "off"]


def test_what_was_pruned_is_said_and_drawn(body):
    search = body["search"]
    assert not any("pruner" in line for line in sentences(search)), "nothing was"
    assert "pruned" not in svg_of(plots.search(body))
    for trial in search["trials"]:
        trial["num_steps"] = 100 if trial["status"] == "finished" else 40
    for trial in search["trials"][4:6]:
        trial |= {"status": "pruned", "loss_nats": None, "num_steps": 25}
    search |= {"pruner": "curve"}
    num, diverged = (
        len(search["trials"]),
        sum(trial["status"] == "diverged" for trial in search["trials"]),
    )
    share = 150 / (100 * (num - diverged) + 40 * diverged)
    told = sentences(search)
    assert (
        f"pruner curve stopped 2 of {num} trials early, which saved {format_percent(share)} of the "
        "search's steps" in told
    )
    assert "pruned" in svg_of(plots.search(body))
