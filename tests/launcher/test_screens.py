"""What every screen of `status` and `launch` keeps: how numbers are written, and where lines are
broken.
"""

import contextlib
import io
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from main_run import tiny_decision
from scripted_job import HEAD
from test_launching import freeze
from test_talk import Terminal

from launcher.base import terminal
from launcher.cli.cli import main
from launcher.study.progress_text import line_of
from launcher.supervisor import attempt
from launcher.supervisor.launch import LaunchOutcome
from launcher.verbs import launch, status
from proxies.core import notation
from sweeps.store.live import StudyState

FAULTS = {
    "a number that is none": r"\b(?:nan|inf|infinity)\b",
    "a negative share": r"-\d[\d.,]*\s*%",
    "a percent sign without its space": r"\d%",
    "an exponent where digits would do": r"\de\+0[0-5]\b",
    "a plural of one": (
        r"(?<![\d.,^/-])1 (?!is\b|was\b|s\b|of\b|across\b)(?:[a-z-]+ "
        r")?[A-Za-z-]{2,}s\b"
    ),
    "digits that nobody knows": r"[1-9]\d*\.\d{5,}|0\.0*[1-9]\d{4,}",
}
ATOM = re.compile(r"\[[^\]]+\]|[-+]?\d[\d.,^e+-]*")
"""A number or an interval."""
STATUSES = ("finished", "diverged", "failed", "pruned")


def find_faults(text):
    return {
        name: found[0]
        for name, pattern in FAULTS.items()
        if (found := re.search(pattern, text, re.IGNORECASE))
    }


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
def test_each_fault_is_seen(text):
    assert find_faults(text)


@pytest.mark.parametrize(
    "text", ["1 run, 1 s", "at 2^-1 steps", "1.5e+18 FLOPs at lr 3e-05", "42\u00a0%", "11 runs"]
)
def test_what_is_no_fault_is_not_seen(text):
    assert not find_faults(text)


def drawn_body(rng):
    """`now_body` of a study of any size, from one run to 10^15, with caps or without."""
    size = lambda low, high: 10 ** rng.uniform(low, high)  # noqa: E731
    count = lambda: rng.choice([0, 1, 1, 2, rng.randrange(10**4)])  # noqa: E731
    spent = {
        "num_runs": count(),
        "flops": size(6, 26),
        "hours": rng.choice([0.0, size(-4, 4)]),
        "device_hours": rng.choice([0.0, size(-4, 6)]),
        "usd": rng.choice([None, size(-3, 7)]),
    }
    kinds = [
        {"kind": kind, "device_hours": size(-3, 5), "usd": rng.choice([None, size(-3, 6)])}
        for kind in ("H100", None)
    ]
    best = {"loss_nats": size(-1, 2), "learning_rate": size(-6, 0), "num_steps": count()}
    widths = [
        {"width": 2**at, **{name: count() for name in STATUSES}, "best": rng.choice([None, best])}
        for at in (5, 12)
    ]
    outcomes = ("passes", "blows_up", "vanishes", "cannot_tell")
    return {
        "coordinates": {
            "parametrization": "mup",
            "outcome": rng.choice([None, "passed", "failed", "cannot_tell"]),
            "checks": {name: rng.choice(outcomes) for name in ("mup", "sp", "depth")},
        },
        "num_runs": {name: count() for name in STATUSES},
        "num_imported": count(),
        "num_lost_executions": count(),
        "by_width": widths,
        "at_work": rng.choice([True, False, None]),
        "driver": None,
        "target_flops": size(9, 26),
        "spent": {**spent, "by_kind": rng.choice([[], kinds])},
        "caps": {name: rng.choice([None, (spent[name] or 1) * size(0, 3)]) for name in spent}
        | {"num_runs": rng.choice([None, spent["num_runs"] + 1])},
    }


def drawn_screens(rng, decision):
    """Texts of the status, of its live line, of a step of a launch, and of a launch that ended."""
    low = rng.choice([None, 10 ** rng.uniform(-2, 6)])
    loss = rng.choice([None, 10 ** rng.uniform(-2, 5)])
    yield status.now_text(
        drawn_body(rng), Path("study"), notation.format_main_run_share(10 ** rng.uniform(-6, 4))
    )
    state = StudyState(
        done=rng.random(),
        stage="transfer",
        number=3,
        num_stages=5,
        left_low_seconds=low,
        left_high_seconds=None if low is None else low * rng.uniform(1, 4),
        best_loss_nats=loss,
        best_learning_rate=None if loss is None else 10 ** rng.uniform(-7, 0),
    )
    yield line_of(state, rng.choice([0, 1, 8]))
    pace = SimpleNamespace(
        step=rng.randrange(1, 10**6),
        loss_nats=loss or 1.0,
        tokens_per_second=lambda _: 10 ** rng.uniform(-2, 9),
        seconds_left=lambda _: low,
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
def test_any_status_or_launch_is_readable(columns, corpus):
    rng, decision = random.Random(0), tiny_decision(corpus)
    for _ in range(150):
        for text in drawn_screens(rng, decision):
            check_screen(text, columns)


def check_screen(text, columns):
    assert not find_faults(text), text
    lines = terminal.wrap(text, columns).split("\n")
    assert all(len(line) <= columns or " " not in line.strip() for line in lines), text
    assert [atom for line in lines for atom in ATOM.findall(line)] == [
        atom for line in text.split("\n") for atom in ATOM.findall(line)
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_a_launch_fits_its_terminal(columns, corpus, tmp_path, monkeypatch):
    line = [sys.executable, "-c", HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr("launcher.supervisor.launch.torchrun_command", lambda *_, **__: line)
    folder = freeze(tmp_path / "study", tiny_decision(corpus))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setattr("sys.stderr", err := Terminal())
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(folder), "--data", str(corpus)])
    assert not ended.value.code and "finished at step 12 of 12" in out.getvalue()
    for text in (out.getvalue(), err.getvalue()):
        plain = re.sub(r"\033\[[\dK]*m?", "", text)
        assert not find_faults(plain)
        lines = re.split(r"[\r\n]", plain)
        assert [
            line for line in lines if len(line) > columns > len(max(line.split(), key=len)) + 4
        ] == []
