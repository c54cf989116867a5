"""The demo: the whole chain through the commands a user would type, on a corpus that every machine has.

The corpus is the source of Python's own standard library. Nothing is downloaded, no account is needed. Each step is a
command of its own and every one resumes or is quick, so an interrupted demo is simply run again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.base.signals import die_with_parent
from launcher.base.talk import duration, say
from launcher.supervisor.attempt import hearing
from proxies.core import canon
from proxies.core.canon import Json

BUDGET_FLOPS = 1e13
PINNED = ("proxy.num_slots=4", "proxy.compiled=false", "ladder.num_slots=1")
"""Two demos on one machine are to freeze the same digest, whatever else it does: nothing of theirs is measured."""
FIRST_STEPS, MORE_STEPS = 20, 40
ACCEPT_REASON = "demo: to show the rest of the chain; a real study would run what the gate asks for"


class DemoError(ValueError):
    """A step of the demo failed; its own message is above, its exit code the demo's."""

    def __init__(self, arguments: Sequence[str], exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"forerun {shlex.join(arguments)} ended with exit code {exit_code}")


def run_demo(folder: Path, overrides: tuple[str, ...]) -> tuple[dict[str, Json], str]:
    """Run every step into `folder`; what is there already is not made again.

    Raises:
        DemoError: a step failed.
    """
    started = time.monotonic()
    corpus, plan, study = folder / "corpus", folder / "plan.toml", folder / "study"
    library = sysconfig.get_paths()["stdlib"]
    if not (corpus / "manifest.json").exists():
        # Installed packages lie below the standard library's folder, and differ from machine to machine.
        excluded = ["--exclude", "site-packages", "--exclude", "dist-packages"]
        _step("tokenize", library, "--out", str(corpus), "--suffix", ".py", *excluded)
    if not plan.exists():
        pinned = [part for value in PINNED for part in ("--set", value)]
        _step("init", "--data", "corpus", "--budget-flops", f"{BUDGET_FLOPS:g}", "--out", str(plan), *pinned)
    changes = [part for override in overrides for part in ("--set", override)]
    _step("validate", str(plan), *changes)
    _step("run", str(plan), "--study", str(study), *changes)
    frozen = folder / "study" / "frozen" / _freeze(study)
    _step("export", str(frozen), "--to", "native")
    _step("export", str(frozen), "--to", "torchtitan")
    _step("launch", str(frozen), "--steps", str(FIRST_STEPS))
    _step("launch", str(frozen), "--steps", str(MORE_STEPS))
    _step("verify", str(frozen))
    _step("report", str(study))
    seconds = time.monotonic() - started
    text = (
        f"the chain took {duration(seconds)}\nfrozen config: {frozen / 'launch.json'}\n"
        f"report: {study / 'report.html'}\n"
        f"next: forerun rehearse {frozen}, then forerun launch {frozen}, with forerun watch {frozen} beside it"
    )
    return {"frozen": str(frozen), "report": str(study / "report.html"), "seconds": seconds}, text


def _freeze(study: Path) -> str:
    """Freeze, and give the digest; a gate that is not passed is accepted for show, with the reason recorded."""
    command = ("freeze", str(study), "--json")
    code, out = _call(*command)
    if code in (3, 4) and _closed_gates(study):
        accepts = [part for gate in _closed_gates(study) for part in ("--accept", gate)]
        say("some gates are closed, as they should be; the demo accepts them, on the record, to continue")
        code, out = _call(*command, *accepts, "--reason", ACCEPT_REASON)
    if code:
        raise DemoError(command, code)
    answer = canon.parse(out)
    assert isinstance(answer, dict)
    say(f"frozen {answer['digest']}")
    return str(answer["digest"])


def _closed_gates(study: Path) -> list[str]:
    body = canon.parse((study / "report.json").read_bytes())
    assert isinstance(body, dict) and isinstance(body["gates"], list)
    return [str(g["name"]) for g in body["gates"] if isinstance(g, dict) and g["outcome"] != "passed"]


def _step(*arguments: str) -> None:
    """One command, its answer passed through to stderr: stdout is the demo's own."""
    code, out = _call(*arguments)
    say(out.rstrip())
    if code:
        raise DemoError(arguments, code)


def _call(*arguments: str) -> tuple[int, str]:
    """Exit code and stdout of one command, which gets every signal that comes, once, and ends in its own time.

    Raises:
        KeyboardInterrupt: it was asked to end, and has.
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
            start_new_session=True,  # else a terminal's Ctrl-C comes twice, and the second one ends it unsaved
            preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
        )
        running.append(step)
        if received:  # meanwhile
            step.send_signal(received[0])
        with step:
            out, _ = step.communicate()
    if received:
        raise KeyboardInterrupt
    return step.returncode, out
