"""The report's part on the watch: what it holds is what the watch and the chronicle said, and the page shows it."""

import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from main_run import tiny_decision
from test_report import text_of, unknown_numbers
from tiny_study import ask
from watched_case import finish, line, loss_at, watched_decision, write_run

from launcher.base import chronicle, metrics
from launcher.frozen.launch_file import write_launch
from launcher.report.main_run import beside_curve, watched
from launcher.report.page import report_page
from proxies.core import canon

SPIKE_AT, SPIKE_NATS, ROLLED_BACK_AT = 200, 1.5, 320


@pytest.fixture(scope="module")
def decision(corpus):
    return watched_decision(tiny_decision(corpus))


@pytest.fixture(scope="module")
def folder(decision, tmp_path_factory):
    """A run that spiked, was rolled back, restarted by its supervisor, finished and was concluded."""
    folder = write_launch(tmp_path_factory.mktemp("watched") / "frozen", decision).parent
    run = write_run(folder / "run", SPIKE_AT - 1, digest=decision.digest).parent
    for step in range(SPIKE_AT, ROLLED_BACK_AT + 1):
        metrics.append(run, line(step, train_loss_nats=loss_at(step) + (SPIKE_NATS if step < SPIKE_AT + 3 else 0)))
    metrics.append(run, {"event": "rolled_back", "step": ROLLED_BACK_AT, "to_step": 300, "skipped_sequences": 80,
                         "clip_norm": None, "reason": "spike"})  # fmt: skip
    for step in range(301, 401):
        metrics.append(run, line(step))
    finish(run, 400, decision.predicted.loss_nats * 1.02)
    chronicle.record(run, "restarted", "it was killed", step=150, digest=decision.digest)
    assert ask("watch", folder, "--conclude")[0] == 0
    return folder


@pytest.fixture(scope="module")
def found(decision, folder):
    return watched(decision, folder)


def test_it_holds_what_the_watch_and_the_chronicle_say(found, decision, folder):
    canon.canonical(found)
    assert (found["standing"], found["notes"]) == ("on the band", [])
    (spike,) = found["spikes"]
    assert (spike["first_step"], spike["num_lines"], spike["over"]) == (SPIKE_AT, 3, True)
    assert spike["peak_nats"] == max(loss_at(step) + SPIKE_NATS for step in range(SPIKE_AT, SPIKE_AT + 3))
    assert (found["rollbacks"], found["num_rollbacks"]) == ([{"step": ROLLED_BACK_AT, "to_step": 300}], 1)
    assert (found["events"]["restarted"], found["events"]["launched"]) == (1, 0)
    assert found["conclusion"]["actual_nats"] == decision.predicted.loss_nats * 1.02
    assert all("next_command" not in alert for alert in found["alerts"])
    assert str(folder) not in canon.canonical(found)
    assert watched(decision, folder) == found


def test_a_log_of_another_config_is_a_problem_and_no_judgement(decision, tmp_path):
    write_run(tmp_path / "run", 5, digest="cd" * 32)
    assert "nothing of it is judged" in watched(decision, tmp_path)["problem"]


def test_the_page_shows_it_and_the_figure_marks_it(found, decision):
    steps = list(range(1, 401))
    losses = [loss_at(step) for step in steps]
    main_run = {
        "steps": steps, "train_loss_nats": losses, "validation_loss_nats": 2.2, "event": "finished",
        "beside_curve": beside_curve(steps, losses, decision.predicted.curve, 400), "watched": found,
    }  # fmt: skip
    body = finished_body() | {"decision": canon.to_json(decision), "main_run": main_run, "transfer": None}

    def shown():
        page = report_page(body)
        return page[page.index('<section id="main-run">') : page.index('<section id="spend">')]

    section = shown()
    assert unknown_numbers(section, body) == []
    svg = section[section.index("<svg") : section.index("</svg>") + 6]
    ET.fromstring(svg)
    told = text_of(section)
    for said in ("The watch: on the band;", "Restarts by the supervisor 1", "Spikes 1", "Rollbacks 1", "Concluded",
                 "inside the interval", "So far 1 of 1 main runs of this study and its parents"):  # fmt: skip
        assert said in told, said
    assert "spike, at its peak" in svg
    assert "rolled back" in svg
    main_run["watched"] = {"problem": "nothing of it is judged"}
    assert "nothing of it is judged" in shown()
    assert "spike, at its peak" not in shown()
