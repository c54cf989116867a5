"""The demo: the order of its steps, how it takes a refusal, and (slow) the whole of it."""

import json
import subprocess
import sys
import time
import types
from pathlib import Path

import click
import pytest
from scripted_job import ENDING_SIGNALS, signal_once_there
from tiny_study import PLAN, ask, forerun

from launcher.cli import cli, demo
from launcher.cli.demo import DemoError, run_demo

DIGEST = "f" * 64
_CLOSE = {"value": 0.001, "interval": [0.0, 0.009]}
_VERDICT = {
    "optima": [{"size": size, "value": None} for size in (32, 64, 128, 256, 512)],
    "outcome": "holds",
    "target_size": 4096,
    "regret_nats": _CLOSE,
    "margin_nats": 0.01,
    "control": {
        "outcome": "drifts",
        "drift_octaves_per_doubling": {"value": -1.0, "interval": [-1.3, -0.7]},
    },
}
REPORT = {
    "accepted": {},
    "fit": {},
    "own_run": None,
    "main_run": None,
    "digest": DIGEST,
    "coordinates": {
        name: {"axis": "width", "outcome": outcome, "widths": [32, 64, 128, 256, 512]}
        for name, outcome in (("mup", "passes"), ("sp", "blows_up"))
    },
    "question": {"proxy": {"parametrization": "mup"}},
    "transfer": {
        "tests": [{"axis": "width", "hyperparameter": "learning_rate", "verdict": _VERDICT}],
        "learning_rate": 0.02,
        "together": {"transferred_value": 0.01},
    },
    "choice": {
        "shape": {"width": 4096, "num_layers": 32},
        "params": 7e9,
        "tokens": 1.4e11,
        "num_steps": 123_456,
        "prediction": {"loss": 1.25, "interval": [1.2, 1.3]},
    },
}
"""What the summary reads of a report."""


class Steps:
    """Stands for the commands; `codes` gives the exit codes of a verb, one for each time it is
    called.
    """

    def __init__(self, monkeypatch, study, **codes):
        self.lines, self.codes, self.study = [], codes, study
        self.gates = [
            {"name": "coordinates", "outcome": "passed"},
            {"name": "fit", "outcome": "passed"},
        ]
        monkeypatch.setattr(demo, "_run_command", self)

    def __call__(self, *arguments):
        verb = arguments[0]
        self.lines.append(arguments)
        left = self.codes.get(verb, [])
        code = left.pop(0) if left else 0
        if verb == "run":
            self.study.mkdir(parents=True, exist_ok=True)
            (self.study / "report.json").write_text(json.dumps(REPORT | {"gates": self.gates}))
        return code, json.dumps({"digest": DIGEST})


def test_the_chain_in_order(tmp_path, monkeypatch):
    steps = Steps(monkeypatch, tmp_path / "study")
    body, _ = run_demo(tmp_path, ("search.num_trials=4",))
    verbs = [line[0] for line in steps.lines]
    assert verbs == [
        "tokenize",
        "init",
        "validate",
        "run",
        "freeze",
        "export",
        "export",
        "launch",
        "launch",
        "verify",
        "report",
    ]
    assert body["frozen"] == str(tmp_path / "study" / "frozen" / DIGEST)
    run = next(line for line in steps.lines if line[0] == "run")
    assert run[-2:] == ("--set", "search.num_trials=4")
    assert not any("--accept" in line for line in steps.lines)


def test_a_newcomer_sees_no_set(tmp_path, monkeypatch):
    steps = Steps(monkeypatch, tmp_path / "study")
    run_demo(tmp_path, ())
    assert not any("--set" in line for line in steps.lines)


def test_the_summary_fits_a_screen(tmp_path, monkeypatch):
    steps = Steps(monkeypatch, Path("demo/study"))
    names = ("transfer", "fit", "data", "ladder_tuned", "replays_agree")
    steps.gates = [{"name": name, "outcome": "cannot_tell"} for name in names]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": "lib"})
    _, text = run_demo(Path("demo"), ())
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 100, text
    for said in (
        "mup holds",
        "parametrization drifts",
        "0.02",
        "width 4096",
        "1.250 nats",
        "launch.json",
        "report.html",
    ):
        assert said in text


def test_a_summary_of_what_is_not_known():
    """No control was asked for, and nothing could be estimated."""
    unknown = {**_VERDICT, "regret_nats": None, "control": None}
    tests = [{"axis": "width", "hyperparameter": "learning_rate", "verdict": unknown}]
    body = {**REPORT, "gates": [], "transfer": {**REPORT["transfer"], "tests": tests}}
    assert any(line.split() == ["control", "none"] for line in demo.summary_lines(body))


def test_every_step_is_a_line_a_user_could_type(tmp_path, monkeypatch):
    steps = Steps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": "cannot_tell"})
    run_demo(tmp_path, ())
    for verb, *arguments in steps.lines:
        command = cli.cli.get_command(click.Context(cli.cli), verb)
        # the config is none: no step runs
        command.make_context(verb, list(arguments), resilient_parsing=True)


def test_the_corpus_and_the_plan_are_made_for_real(tmp_path, monkeypatch):
    """Python's own modules: some are not UTF-8, and what they are differs from one version to the
    next.
    """
    steps = Steps(monkeypatch, tmp_path / "study")
    run_demo(tmp_path, ())
    for line in steps.lines[:3]:
        code, _, err = forerun(*line)
        assert (line[0], code) in {("tokenize", 0), ("init", 0), ("validate", 0)}, err


@pytest.mark.parametrize("outcome", ["failed", "cannot_tell"])
def test_shut_gates_are_accepted_by_name_and_with_a_reason(tmp_path, monkeypatch, outcome):
    steps = Steps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": outcome})
    run_demo(tmp_path, ())
    freeze = next(line for line in steps.lines if line[0] == "freeze")
    assert freeze[freeze.index("--accept") :] == (
        "--accept",
        "transfer",
        "--reason",
        demo.ACCEPT_REASON,
    )


def test_what_was_accepted_is_not_accepted_again(tmp_path, monkeypatch):
    steps = Steps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": "cannot_tell"})
    monkeypatch.setitem(REPORT, "accepted", {"transfer": demo.ACCEPT_REASON})
    run_demo(tmp_path, ())
    assert not any("--accept" in line for line in steps.lines)


@pytest.mark.parametrize(("verb", "code"), [("run", 130), ("freeze", 5)])
def test_a_step_that_fails_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch, verb, code):
    steps = Steps(monkeypatch, tmp_path / "study", **{verb: [code]})
    with pytest.raises(DemoError, match=f"^forerun {verb} .* ended with exit code {code}$"):
        run_demo(tmp_path, ())
    assert steps.lines[-1][0] == verb
    steps.codes[verb] = [code]
    got, body = ask("demo", "--dir", tmp_path)
    assert (got, body["error"]) == (code, "DemoError")


@pytest.fixture
def slow_step(tmp_path):
    """In the place of python: a step that, told to end, takes a moment for it; which signals came
    is in `told`.
    """
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable} -S\n"
        "import os, pathlib, signal, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def told(number, _):\n"
        "    (here / 'told').open('a').write(f'{number} ')\n"
        "    time.sleep(0.3), (here / 'ended').touch(), sys.exit(130)\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, "
        "told)\n"
        "(here / 'session').write_text(str(os.getsid(0)))\n"
        "(here / 'begins').write_text(str(os.getpid())), (here / 'begins').rename(here / 'began'), "
        "time.sleep(60)\n"
    )
    path.chmod(0o755)
    return path


@ENDING_SIGNALS
def test_a_signal_is_passed_on_once_and_waited_for(tmp_path, monkeypatch, slow_step, number):
    monkeypatch.setattr(demo, "sys", types.SimpleNamespace(executable=str(slow_step)))
    signal_once_there(tmp_path / "began", number)
    code, body = ask("demo", "--dir", tmp_path / "demo")
    assert (code, body["exit_code"]) == (130, 130)
    assert "the same command resumes" in body["message"]
    assert (tmp_path / "told").read_text() == f"{int(number)} "
    assert (tmp_path / "ended").exists(), "it was waited for"
    assert (tmp_path / "session").read_text() == (tmp_path / "began").read_text(), (
        "a terminal reaches the demo alone"
    )


def test_a_demo_that_is_killed_leaves_no_step_behind(tmp_path, slow_step):
    code = (
        "import sys, types; from launcher.cli import demo\ndemo.sys = "
        "types.SimpleNamespace(executable=sys.argv[1])\n"
    )
    code += "demo._run_command('run')"
    job = subprocess.Popen([sys.executable, "-c", code, str(slow_step)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    job.kill()
    job.wait()
    stat = Path(f"/proc/{(tmp_path / 'began').read_text()}/stat")
    while (
        stat.exists()
        and stat.read_text().rpartition(") ")[2][0] != "Z"
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert time.monotonic() < deadline


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    """Every step for real, on the tiny plan; run again, it only looks on."""
    (tmp_path / "plan.toml").write_text(PLAN.replace("2e9", "2e10"))
    code, body = ask("demo", "--dir", tmp_path)
    assert code == 0, body
    assert (tmp_path / "study" / "report.html").is_file()
    assert ask("verify", body["frozen"])[0] == 0
    again, second = ask("demo", "--dir", tmp_path)
    assert again == 0, second
    assert second["frozen"] == body["frozen"]
