"""Tests of the screens of `status` and `launch`: number formats and line breaks.

Random states are rendered, and every text must be free of the faults that `FAULTS` describes.
"""

import contextlib
import io
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_terminal import Terminal
from frozen_case import freeze
from main_run import make_tiny_decision
from scripted_job import SCRIPT_HEAD
from tiny_study import run_forerun

from forerun._launcher.cli.cli import main
from forerun._launcher.cli.verbs import launch, status
from forerun._launcher.main_run import terminal_layout
from forerun._launcher.main_run.supervisor import attempt
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome
from forerun._launcher.report.views import study_status
from forerun._launcher.study.stages.progress_text import format_progress_line
from forerun._proxies.core import notation
from forerun._sweeps.run.budget import KindSpend, Spend
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.store.live_state import StudyState

FAULTS = {
    "not a number": r"\b(?:nan|inf|infinity)\b",
    "a negative share": r"-\d[\d.,]*\s*%",
    "a percent sign without its space": r"\d%",
    "an exponent for a small number": r"\de\+0[0-5]\b",
    "a plural of one": (
        r"(?<![\d.,^/-])1 (?!is\b|was\b|s\b|of\b|across\b)(?:[a-z-]+ "
        r")?[A-Za-z-]{2,}s\b"
    ),
    "more digits than are known": r"[1-9]\d*\.\d{5,}|0\.0*[1-9]\d{4,}",
}
"""Patterns of faults in a text for people."""
ATOM = re.compile(r"\[[^\]]+\]|[-+]?\d[\d.,^e+-]*")
"""A number or an interval."""
STATUSES = ("finished", "diverged", "failed", "pruned")


def find_faults(text):
    """Return the faulty part of the text for each fault that it has."""
    matches = {name: re.search(pattern, text, re.IGNORECASE) for name, pattern in FAULTS.items()}
    return {name: match[0] for name, match in matches.items() if match}


@pytest.mark.parametrize(
    "text",
    [
        "loss nan nats",
        "-3 % done",
        "study 42%",
        "1.3e+03 times",
        "1 runs",
        "1 other seeds",
        "0.123456789 nats",
        "MFU -10000.0 %",
    ],
)
def test_each_fault_is_found(text):
    assert find_faults(text)


@pytest.mark.parametrize(
    "text", ["1 run, 1 s", "at 2^-1 steps", "1.5e+18 FLOPs at lr 3e-05", "42\u00a0%", "11 runs"]
)
def test_correct_text_has_no_fault(text):
    assert not find_faults(text)


def draw_status(rng):
    """Draw the status of a study of any size, with caps or without."""

    def draw_size(low_log10, high_log10):
        return 10 ** rng.uniform(low_log10, high_log10)

    def draw_count():
        return rng.choice([0, 1, 1, 2, rng.randrange(10**4)])

    spent = {
        "num_runs": draw_count(),
        "flops": draw_size(6, 26),
        "hours": rng.choice([0.0, draw_size(-4, 4)]),
        "device_hours": rng.choice([0.0, draw_size(-4, 6)]),
        "usd": rng.choice([None, draw_size(-3, 7)]),
    }
    kinds = [
        KindSpend(
            kind=kind, device_hours=draw_size(-3, 5), usd=rng.choice([None, draw_size(-3, 6)])
        )
        for kind in ("H100", "")
    ]
    best = study_status.BestRun(
        run_id="0" * 64,
        loss_nats=draw_size(-1, 2),
        learning_rate=draw_size(-6, 0),
        num_steps=draw_count(),
        num_layers=2,
    )
    widths = [
        study_status.WidthStatus(
            width=width,
            **{name: draw_count() for name in STATUSES},
            best=rng.choice([None, best]),
        )
        for width in (32, 4096)
    ]
    outcomes = ("passes", "blows_up", "vanishes", "cannot_tell")
    caps = {name: rng.choice([None, (spent[name] or 1) * draw_size(0, 3)]) for name in spent}
    return study_status.StudyStatus(
        coordinates=study_status.CoordinateStatus(
            parametrization="mup",
            outcome=rng.choice([None, "passed", "failed", "cannot_tell"]),
            checks={name: rng.choice(outcomes) for name in ("mup", "sp", "depth")},
        ),
        num_runs={name: draw_count() for name in STATUSES},
        num_imported=draw_count(),
        num_lost_executions=draw_count(),
        by_width=tuple(widths),
        at_work=rng.choice([True, False, None]),
        driver=None,
        driver_at_work=None,
        target_flops=draw_size(9, 26),
        spent=Spend(**spent, by_kind=tuple(rng.choice([[], kinds]))),
        caps=BudgetCaps(**caps | {"num_runs": rng.choice([None, spent["num_runs"] + 1])}),
    )


def draw_screens(rng, decision):
    """Yield random texts: a status, its live line, a step of a launch, and the end of a launch."""
    seconds_left = rng.choice([None, 10 ** rng.uniform(-2, 6)])
    loss = rng.choice([None, 10 ** rng.uniform(-2, 5)])
    yield status.format_state(
        draw_status(rng),
        Path("study"),
        notation.format_main_run_share(10 ** rng.uniform(-6, 4)),
    )
    state = StudyState(
        done=rng.random(),
        stage="transfer",
        number=3,
        num_stages=5,
        left_low_seconds=seconds_left,
        left_high_seconds=None if seconds_left is None else seconds_left * rng.uniform(1, 4),
        best_loss_nats=loss,
        best_learning_rate=None if loss is None else 10 ** rng.uniform(-7, 0),
    )
    yield format_progress_line(state, rng.choice([0, 1, 8]))
    pace = SimpleNamespace(
        step=rng.randrange(1, 10**6),
        loss_nats=loss or 1.0,
        compute_tokens_per_second=lambda _: 10 ** rng.uniform(-2, 9),
        estimate_seconds_left=lambda _: seconds_left,
    )
    with contextlib.redirect_stderr(io.StringIO()) as progress:
        attempt._report(SimpleNamespace(num_steps=10**6), pace, -1, 0.0)
    yield progress.getvalue()
    outcome = LaunchOutcome(
        event="stopped",
        exit_code=0,
        step=rng.randrange(12),
        num_restarts=rng.choice([0, 1, 3]),
        reason="",
        validation_loss_nats=loss,
    )
    yield launch._format_outcome(decision, outcome, None)


@pytest.mark.parametrize("columns", [60, 80])
def test_random_status_and_launch_screens_have_no_fault(columns, corpus):
    rng, decision = random.Random(0), make_tiny_decision(corpus)
    for _ in range(150):
        for text in draw_screens(rng, decision):
            check_screen(text, columns)


def check_screen(text, columns):
    """Assert that a text has no fault, fits the terminal, and breaks no number over two lines."""
    assert not find_faults(text), text
    lines = terminal_layout.wrap(text, columns).split("\n")
    assert all(len(line) <= columns or " " not in line.strip() for line in lines), text
    assert [atom for line in lines for atom in ATOM.findall(line)] == [
        atom for line in text.split("\n") for atom in ATOM.findall(line)
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_launch_output_fits_the_terminal(columns, corpus, tmp_path, monkeypatch):
    line = [sys.executable, "-c", SCRIPT_HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr(
        "forerun._launcher.main_run.supervisor.launch.build_torchrun_command", lambda *_, **__: line
    )
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setattr("sys.stderr", err := Terminal())
    with pytest.raises(SystemExit) as stop:
        main(["launch", str(folder), "--data", str(corpus)])
    assert not stop.value.code and "finished at step 12 of 12" in out.getvalue()
    for text in (out.getvalue(), err.getvalue()):
        plain = re.sub(r"\033\[[\dK]*m?", "", text)
        assert not find_faults(plain)
        # A line may be longer than the terminal only if a word does not fit: a path, for example.
        long_lines = [line for line in re.split(r"[\r\n]", plain) if len(line) > columns]
        for line in long_lines:
            assert len(max(line.split(), key=len)) + 4 >= columns, line


def test_ctrl_c_of_status_says_that_nothing_was_stopped(tmp_path, monkeypatch):
    def raise_interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forerun._launcher.cli.verbs.status._read_state", raise_interrupt)
    code, _, err = run_forerun("status", "study", "--follow")
    assert (code, "nothing was stopped" in err) == (130, True)
