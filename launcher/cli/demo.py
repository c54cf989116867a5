"""The demo: the whole chain, run through the commands that a user would type, on a corpus that
every machine has.

The corpus is the source of Python's own standard library. Nothing is downloaded, and no account is
needed. Each step is a separate command that resumes or is quick, so an interrupted demo is simply
run again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.base.signals import make_child_die_with_us
from launcher.base.study_names import shown_name
from launcher.base.talk import say
from launcher.report.about import next_line
from launcher.study.gates import open_gates
from launcher.supervisor.attempt import hearing
from launcher.views.numbers import words
from launcher.views.transfer import estimate
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import InputError
from proxies.core.notation import (
    counted,
    format_count,
    format_duration,
    format_interval,
    format_learning_rate,
    format_loss,
)
from proxies.core.plain_files import read_plain

FIRST_STEPS, MORE_STEPS = 20, 40
COLUMNS, LABEL_COLUMNS = 100, 20
"""Width of the summary, and of its labels, in columns."""
ACCEPT_REASON = "demo: to show the rest of the chain; a real study would run what the gate asks for"


class DemoError(InputError):
    """A step of the demo failed. Its own message was printed above; its exit code becomes the
    demo's.
    """

    def __init__(self, arguments: Sequence[str], exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"forerun {shlex.join(arguments)} ended with exit code {exit_code}")


def run_demo(folder: Path, overrides: tuple[str, ...]) -> tuple[dict[str, Json], str]:
    """Run every step into `folder`. A corpus and a plan that exist are used again.

    Raises:
        DemoError: A step failed.
    """
    started = time.monotonic()
    corpus, plan, study = folder / "corpus", folder / "plan.toml", folder / "study"
    library = sysconfig.get_paths()["stdlib"]
    if not (corpus / "manifest.json").exists():
        # Installed packages lie below the standard library's folder, and differ from machine to
        # machine.
        excluded = ["--exclude", "site-packages", "--exclude", "dist-packages"]
        _run_step("tokenize", library, "--out", str(corpus), "--suffix", ".py", *excluded)
    if not plan.exists():
        _run_step("init", "--preset", "demo", "--data", "corpus", "--out", str(plan))
    changes = [part for override in overrides for part in ("--set", override)]
    _run_step("validate", str(plan), *changes)
    _run_step("run", str(plan), "--study", str(study), *changes)
    frozen = folder / "study" / "frozen" / _freeze(study)
    named = shown_name(frozen)
    _run_step("export", named, "--to", "native")
    _run_step("export", named, "--to", "torchtitan")
    _run_step("launch", named, "--steps", str(FIRST_STEPS))
    _run_step("launch", named, "--steps", str(MORE_STEPS))
    _run_step("verify", named)
    _run_step("report", str(study))
    seconds = time.monotonic() - started
    text = "\n".join(
        [
            *summary_lines(_read_report(study)),
            *_format_labelled("took", format_duration(seconds)),
            "frozen config:",
            str(frozen / "launch.json"),
            "report, for a browser:",
            str(study / "report.html"),
            next_line(_read_report(study), None, study),
        ]
    )
    return {"frozen": str(frozen), "report": str(study / "report.html"), "seconds": seconds}, text


def summary_lines(body: Json) -> list[str]:
    """Summarize a report as lines for a screen of 100 columns.

    Args:
        body: `report.json` of a study whose config is frozen.
    """
    report: Any = body
    transfer, choice = report["transfer"], report["choice"]
    verdict = next(test["verdict"] for test in transfer["tests"] if test["axis"] == "width")
    control = verdict["control"]
    texts = {
        "coordinate check": "; ".join(
            f"{name} {words(check['outcome'])} over widths {', '.join(map(str, check['widths']))}"
            for name, check in report["coordinates"].items()
            if check["axis"] == "width"
        ),
        "best rate by width": ", ".join(
            f"{format_learning_rate(optimum['value'])} at {optimum['size']}"
            for optimum in verdict["optima"]
        ),
        "rate over width": f"{report['question']['proxy']['parametrization']} "
        f"{words(verdict['outcome'])}: at width "
        f"{verdict['target_size']} it costs {estimate(verdict['regret_nats'])} nats, "
        f"{verdict['margin_nats']:g} are allowed",
        "control": "none"
        if control is None
        else f"standard parametrization {words(control['outcome'])}: the best "
        f"rate moves by {estimate(control['drift_octaves_per_doubling'], '+.2f')} octaves per "
        "doubling of width",
        "rate used": f"{format_learning_rate(transfer['learning_rate'])} at the searched width, "
        f"{format_learning_rate(transfer['together']['transferred_value'])} for the main run",
        "main run": f"width {choice['shape']['width']}, "
        f"{counted(choice['shape']['num_layers'], 'layer')}, "
        f"{format_count(choice['params'])} parameters, {format_count(choice['tokens'])} tokens in "
        f"{counted(choice['num_steps'], 'step')}",
        "expected loss": f"{format_loss(choice['prediction']['loss'])} nats "
        f"{format_interval(choice['prediction']['interval'])}",
        "gates passed": ", ".join(
            words(gate["name"]) for gate in report["gates"] if gate["outcome"] == "passed"
        ),
        "accepted": ", ".join(
            _format_gate(gate) for gate in report["gates"] if gate["outcome"] != "passed"
        )
        or "none",
    }
    return [line for name, text in texts.items() for line in _format_labelled(name, text)]


def _format_labelled(name: str, text: str) -> list[str]:
    """Return a label with its text, wrapped."""
    indent = " " * LABEL_COLUMNS
    return textwrap.wrap(
        text, COLUMNS, initial_indent=name.ljust(LABEL_COLUMNS), subsequent_indent=indent
    )


def _format_gate(gate: Any) -> str:
    outcome = "accepted failure" if gate["outcome"] == "failed" else words(gate["outcome"])
    return f"{words(gate['name'])} ({outcome})"


def _freeze(study: Path) -> str:
    """Freeze the config and return its digest. Gates that did not pass are accepted, with the
    reason recorded.
    """
    report = _read_report(study)
    closed = open_gates(report)
    accepts = [part for gate in closed for part in ("--accept", gate["name"])]
    if closed:
        names = ", ".join(map(_format_gate, closed))
        say(
            f"gates that did not pass: {names}; the demo accepts them on record, to show the rest "
            "of the chain"
        )
        accepts += ["--reason", ACCEPT_REASON]
    command = ("freeze", str(study), "--json", *accepts)
    code, out = _run_command(*command)
    if code:
        raise DemoError(command, code)
    answer = canon.parse(out)
    assert isinstance(answer, dict)
    say(f"frozen {answer['digest']}")
    return str(answer["digest"])


def _read_report(study: Path) -> Any:
    """Return the report that `forerun run` or `forerun report` wrote last."""
    return canon.parse(read_plain(study / "report.json"))


def _run_step(*arguments: str) -> None:
    """Run one command, and pass its answer to stderr, because stdout is for the demo's own
    answer.
    """
    code, out = _run_command(*arguments)
    say(out.rstrip())
    if code:
        raise DemoError(arguments, code)


def _run_command(*arguments: str) -> tuple[int, str]:
    """Run one command and return its exit code and stdout. Every signal is passed on to it once,
    and it ends in its own time.

    Raises:
        KeyboardInterrupt: The command was told to end, and has ended.
    """
    say(f"\n$ forerun {shlex.join(arguments)}")
    received: list[int] = []
    running: list[subprocess.Popen[str]] = []

    def pass_on(number: int) -> None:
        received.append(number)
        for step in running:
            step.send_signal(number)

    with hearing(pass_on):
        step = subprocess.Popen(
            [sys.executable, "-m", "launcher", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            # Otherwise Ctrl-C on a terminal reaches it twice, and the second ends it unsaved.
            start_new_session=True,
            preexec_fn=make_child_die_with_us(),  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
        )
        running.append(step)
        if received:  # a signal arrived before the process was in `running`
            step.send_signal(received[0])
        with step:
            out, _ = step.communicate()
    if received:
        raise KeyboardInterrupt
    return step.returncode, out
