"""Tests of `forerun demo`: the order of its steps, refused steps, signals, and a full run (slow).

Most tests replace the steps by `FakeSteps`, which records the commands and writes a report.
"""

import copy
import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import click
import pytest
from example_report import make_finished_body
from scripted_job import ENDING_SIGNALS, signal_once_there
from tiny_study import PLAN, run_forerun, run_json
from waiting import wait_until

from forerun._launcher.cli import cli, demo
from forerun._launcher.cli.demo import DemoError, run_demo
from forerun._launcher.report.views.report_model import to_report

DIGEST = "f" * 64
# The numbers of this report are easy to find in the summary.
REPORT = make_finished_body() | {"digest": DIGEST}
REPORT["transfer"]["learning_rate"] = 0.02
REPORT["transfer"]["tests"][0]["verdict"]["target_size"] = 4096
REPORT["choice"] |= {
    "shape": {"width": 4096, "num_layers": 32},
    "params": 7_000_000_000,
    "tokens": 1.4e11,
    "num_steps": 123_456,
}
REPORT["choice"]["prediction"] |= {"loss": 1.25, "interval": [1.2, 1.3]}
RATE = next(
    value for value in REPORT["transfer"]["values"] if value["hyperparameter"] == "learning_rate"
)
RATE["target_value"] = 0.01


class FakeSteps:
    """Records the commands in place of running them; `run` writes a report.

    Args:
        monkeypatch: The fixture of pytest.
        study: Folder of the study.
        **codes: Lists of exit codes by verb, one code for each call. A verb without codes, or after
            its last one, exits with 0.
    """

    def __init__(self, monkeypatch, study, **codes):
        self.lines, self.codes, self.study = [], codes, study
        self.gates = [
            {"name": name, "outcome": "passed", "reason": ""} for name in ("coordinates", "fit")
        ]
        monkeypatch.setattr(demo, "_run_command", self)

    def __call__(self, *arguments):
        verb = arguments[0]
        self.lines.append(arguments)
        codes_left = self.codes.get(verb, [])
        code = codes_left.pop(0) if codes_left else 0
        if verb == "run":
            self.study.mkdir(parents=True, exist_ok=True)
            (self.study / "report.json").write_text(json.dumps(REPORT | {"gates": self.gates}))
        return code, json.dumps({"digest": DIGEST})


def test_demo_runs_its_steps_in_order(tmp_path, monkeypatch):
    steps = FakeSteps(monkeypatch, tmp_path / "study")
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


def test_demo_without_changes_passes_no_set_option(tmp_path, monkeypatch):
    steps = FakeSteps(monkeypatch, tmp_path / "study")
    run_demo(tmp_path, ())
    assert not any("--set" in line for line in steps.lines)


def test_summary_fits_one_screen(tmp_path, monkeypatch):
    steps = FakeSteps(monkeypatch, Path("demo/study"))
    names = ("transfer", "fit", "data", "ladder_tuned", "replays_agree")
    steps.gates = [{"name": name, "outcome": "cannot_tell", "reason": ""} for name in names]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": "lib"})
    _, text = run_demo(Path("demo"), ())
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 100, text
    for phrase in (
        "mup holds",
        "parametrization drifts",
        "0.02",
        "width 4096",
        "1.250 nats",
        "launch.json",
        "report.html",
    ):
        assert phrase in text


def test_summary_without_a_control_says_none():
    """The control is the same test in the standard parametrization; a plan may leave it out."""
    body = copy.deepcopy(REPORT)
    body["transfer"]["tests"][0]["verdict"] |= {"regret_nats": None, "control": None}
    assert any(line.split() == ["control", "none"] for line in demo.format_summary(to_report(body)))


def test_every_step_is_a_valid_command_line(tmp_path, monkeypatch):
    steps = FakeSteps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": "cannot_tell", "reason": ""})
    run_demo(tmp_path, ())
    for verb, *arguments in steps.lines:
        command = cli.cli.get_command(click.Context(cli.cli), verb)
        # Resilient parsing does not require that the frozen config exists.
        command.make_context(verb, list(arguments), resilient_parsing=True)


def test_first_three_steps_succeed_for_real(tmp_path, monkeypatch):
    """The corpus is Python's own modules, which vary with the version; some are not UTF-8."""
    steps = FakeSteps(monkeypatch, tmp_path / "study")
    run_demo(tmp_path, ())
    for line in steps.lines[:3]:
        code, _, err = run_forerun(*line)
        assert (line[0], code) in {("tokenize", 0), ("init", 0), ("validate", 0)}, err


@pytest.mark.parametrize("outcome", ["failed", "cannot_tell"])
def test_demo_accepts_closed_gates_by_name_with_a_reason(tmp_path, monkeypatch, outcome):
    """A gate is a check before the freeze. It is closed if the check failed or cannot tell."""
    steps = FakeSteps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": outcome, "reason": ""})
    run_demo(tmp_path, ())
    freeze = next(line for line in steps.lines if line[0] == "freeze")
    assert freeze[freeze.index("--accept") :] == (
        "--accept",
        "transfer",
        "--reason",
        demo.ACCEPT_REASON,
    )


def test_demo_does_not_accept_a_gate_twice(tmp_path, monkeypatch):
    steps = FakeSteps(monkeypatch, tmp_path / "study")
    steps.gates.append({"name": "transfer", "outcome": "cannot_tell", "reason": ""})
    monkeypatch.setitem(REPORT, "accepted", {"transfer": demo.ACCEPT_REASON})
    run_demo(tmp_path, ())
    assert not any("--accept" in line for line in steps.lines)


@pytest.mark.parametrize(("verb", "code"), [("run", 130), ("freeze", 5)])
def test_failed_step_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch, verb, code):
    steps = FakeSteps(monkeypatch, tmp_path / "study", **{verb: [code]})
    with pytest.raises(DemoError, match=f"^forerun {verb} .* ended with exit code {code}$"):
        run_demo(tmp_path, ())
    assert steps.lines[-1][0] == verb
    steps.codes[verb] = [code]
    exit_code, body = run_json("demo", "--dir", tmp_path)
    assert (exit_code, body["error"]) == (code, "DemoError")


@pytest.fixture
def slow_step(tmp_path):
    """A program in place of python that takes 0.3 s to end after a signal.

    It writes the numbers of its signals to the file `signals`, its process id to `began`, and its
    session id to `session`; the file `ended` shows that it was not killed. `began` is written under
    another name and then renamed, so that the test never reads an empty file.
    """
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable} -S\n"
        "import os, pathlib, signal, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def end(number, _):\n"
        "    (here / 'signals').open('a').write(f'{number} ')\n"
        "    time.sleep(0.3), (here / 'ended').touch(), sys.exit(130)\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, "
        "end)\n"
        "(here / 'session').write_text(str(os.getsid(0)))\n"
        "(here / 'begins').write_text(str(os.getpid())), (here / 'begins').rename(here / 'began'), "
        "time.sleep(60)\n"
    )
    path.chmod(0o755)
    return path


@ENDING_SIGNALS
def test_signal_is_forwarded_once_and_the_step_may_end(tmp_path, monkeypatch, slow_step, number):
    monkeypatch.setattr(demo, "sys", types.SimpleNamespace(executable=str(slow_step)))
    signal_once_there(tmp_path / "began", number)
    code, body = run_json("demo", "--dir", tmp_path / "demo")
    assert (code, body["exit_code"]) == (130, 130)
    assert "the same command resumes" in body["message"]
    assert (tmp_path / "signals").read_text() == f"{int(signal.SIGINT)} "
    assert (tmp_path / "ended").exists(), "the demo waited for the step"
    assert (tmp_path / "session").read_text() == (tmp_path / "began").read_text(), (
        "the step has its own session, so a terminal's Ctrl-C reaches the demo alone"
    )


def test_killed_demo_leaves_no_step_running(tmp_path, slow_step):
    code = (
        "import sys, types; from forerun._launcher.cli import demo\ndemo.sys = "
        "types.SimpleNamespace(executable=sys.argv[1])\n"
    )
    code += "demo._run_command('run')"
    job = subprocess.Popen([sys.executable, "-c", code, str(slow_step)], stderr=subprocess.DEVNULL)
    wait_until((tmp_path / "began").exists, 30)
    time.sleep(0.1)  # the demo waits for the step by now
    job.kill()
    job.wait()
    # The step ends, or is a zombie that nobody has reaped yet.
    stat = Path(f"/proc/{(tmp_path / 'began').read_text()}/stat")

    def has_ended():
        return not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z"

    wait_until(has_ended, 30)


@pytest.mark.slow
def test_full_demo_runs_and_a_second_run_keeps_its_config(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN.replace("2e9", "2e10"))
    code, body = run_json("demo", "--dir", tmp_path)
    assert code == 0, body
    assert (tmp_path / "study" / "report.html").is_file()
    assert run_json("verify", body["frozen"])[0] == 0
    code, second_body = run_json("demo", "--dir", tmp_path)
    assert code == 0, second_body
    assert second_body["frozen"] == body["frozen"]
