"""The demo: the whole chain, run through the commands that a user would type, on a corpus that
every machine has.

The corpus is the source of Python's own standard library. Nothing is downloaded, and no account is
needed. Each step is a separate command that resumes or is quick, so an interrupted demo is simply
run again.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.process_signals import make_child_die_with_us
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.report.answers.outcome import format_target_rate
from forerun._launcher.report.page.header import format_next_line
from forerun._launcher.report.views.report_model import Report
from forerun._launcher.report.views.transfer import format_estimate
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.stages.gates import Gate
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_duration,
    format_interval,
    format_learning_rate,
    format_loss,
)
from forerun._proxies.core.plain_files import read_plain

NUM_STEPS = (20, 40)
"""Steps of the main run after which the two launches stop. The second one resumes the first."""
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
    """Run every step in `folder`, and return the answer as data and as text. A corpus and a plan
    that exist are used again.

    Raises:
        DemoError: A step failed.
    """
    started = time.monotonic()
    corpus, plan, study = folder / "corpus", folder / "plan.toml", folder / "study"
    library = sysconfig.get_paths()["stdlib"]
    if not (corpus / "manifest.json").exists():
        # Installed packages lie below this folder, and differ from machine to machine.
        excluded = ["--exclude", "site-packages", "--exclude", "dist-packages"]
        _run_step("tokenize", library, "--out", str(corpus), "--suffix", ".py", *excluded)
    if not plan.exists():
        _run_step("init", "--preset", "demo", "--data", "corpus", "--out", str(plan))
    changes = [part for override in overrides for part in ("--set", override)]
    _run_step("validate", str(plan), *changes)
    _run_step("run", str(plan), "--study", str(study), *changes)
    frozen = folder / "study" / "frozen" / _freeze(study)
    config_name = shorten_config_name(frozen)
    for trainer in ("native", "torchtitan"):
        _run_step("export", config_name, "--to", trainer)
    for num_steps in NUM_STEPS:
        _run_step("launch", config_name, "--steps", str(num_steps))
    _run_step("verify", config_name)
    _run_step("report", str(study))
    seconds, report = time.monotonic() - started, _read_report(study)
    lines = [
        *format_summary(report),
        *_format_labelled("took", format_duration(seconds)),
        "frozen config:",
        str(frozen / "launch.json"),
        "report, for a browser:",
        str(study / "report.html"),
        format_next_line(report, None, study),
    ]
    body: dict[str, Json] = {
        "frozen": str(frozen),
        "report": str(study / "report.html"),
        "seconds": seconds,
    }
    return body, "\n".join(lines)


def format_summary(report: Report) -> list[str]:
    """Return lines that summarize the report of a study with a frozen config, for a screen of 100
    columns.
    """
    transfer, choice = report.transfer, report.choice
    assert transfer is not None and choice is not None
    verdict = next(test.verdict for test in transfer.tests if test.axis == "width")
    control = verdict.control
    texts = {
        "coordinate check": "; ".join(
            f"{name} {to_words(check.outcome)} over widths {', '.join(map(str, check.widths))}"
            for name, check in report.coordinates.items()
            if check.axis == "width"
        ),
        "best rate by width": ", ".join(
            f"{format_learning_rate(optimum.value)} at {optimum.size}" for optimum in verdict.optima
        ),
        "rate over width": f"{report.main_arm} {to_words(verdict.outcome)}: at width "
        f"{verdict.target_size} it costs {format_estimate(verdict.regret_nats)} nats, "
        f"{verdict.margin_nats:g} are allowed",
        "control": "none"
        if control is None
        else f"standard parametrization {to_words(control.outcome)}: the best "
        f"rate moves by {format_estimate(control.drift_octaves_per_doubling, '+.2f')} octaves per "
        "doubling of width",
        "rate used": f"{format_learning_rate(transfer.learning_rate)} at the searched width, "
        f"{format_target_rate(transfer)} for the main run",
        "main run": f"width {choice.shape.width}, "
        f"{format_counted(choice.shape.num_layers, 'layer')}, "
        f"{format_count(choice.params)} parameters, {format_count(choice.tokens)} tokens in "
        f"{format_counted(choice.num_steps, 'step')}",
        "expected loss": f"{format_loss(choice.prediction.loss)} nats "
        f"{format_interval(choice.prediction.interval)}",
        "gates passed": ", ".join(
            to_words(gate.name) for gate in report.gates if gate.outcome == "passed"
        ),
        "accepted": ", ".join(
            _format_gate(gate) for gate in report.gates if gate.outcome != "passed"
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


def _format_gate(gate: Gate) -> str:
    outcome = "accepted failure" if gate.outcome == "failed" else to_words(gate.outcome)
    return f"{to_words(gate.name)} ({outcome})"


def _freeze(study: Path) -> str:
    """Freeze the config and return its digest. Gates that did not pass are accepted, and the reason
    is recorded.
    """
    unsettled = _read_report(study).open_gates
    accepts = [part for gate in unsettled for part in ("--accept", gate.name)]
    if unsettled:
        names = ", ".join(map(_format_gate, unsettled))
        print_progress(
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
    print_progress(f"frozen {answer['digest']}")
    return str(answer["digest"])


def _read_report(study: Path) -> Report:
    """Return the report that `forerun run` or `forerun report` wrote last."""
    return Report.model_validate(canon.parse(read_plain(study / "report.json")))


def _run_step(*arguments: str) -> None:
    """Run one command, and pass its answer to stderr, because stdout is for the demo's own
    answer.
    """
    code, out = _run_command(*arguments)
    print_progress(out.rstrip())
    if code:
        raise DemoError(arguments, code)


def _run_command(*arguments: str) -> tuple[int, str]:
    """Run one command and return its exit code and stdout.

    Raises:
        KeyboardInterrupt: The demo received Ctrl-C or SIGTERM, passed it on to the command, and
            waited until the command ended. A second Ctrl-C ends both at once.
    """
    print_progress(f"\n$ forerun {shlex.join(arguments)}")
    with subprocess.Popen(
        [sys.executable, "-m", "forerun", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        # Otherwise Ctrl-C on a terminal would reach the step twice, from the terminal and from us,
        # and the second would end it without saving.
        start_new_session=True,
        preexec_fn=make_child_die_with_us(),  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
    ) as step:
        try:
            out, _ = step.communicate()
        except KeyboardInterrupt:
            step.send_signal(signal.SIGINT)
            step.wait()
            raise
    return step.returncode, out
