"""What a trainer itself makes of an export, compared with the decision: parameter by parameter,
step by step.

Beside its files an exporter writes `prove.py`. Run by the trainer's interpreter it reads them with
the trainer's own parser, builds the trainer's own model, optimizer and scheduler, and prints one
`TrainerView` as JSON, its last line of output, which is then compared (launcher.exporters.view).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Protocol, cast

from launcher.base.signals import make_child_die_with_us
from launcher.exporters.export_writer import PROVE_FILE
from launcher.exporters.fidelity import Exporter, exporter
from launcher.exporters.view import TrainerView, frozen_run, marked
from launcher.frozen.frozen import Decision
from proxies.core import canon
from proxies.core.errors import InputError
from proxies.core.plain_files import read_plain
from proxies.core.shape import Shape

LIMIT_SECONDS = 600.0
"""That a trainer has to answer."""
MOST_SAID_BYTES = 2**16
"""So much of the end of its stderr is read."""
INSTALLED = Path(".venv-trainers")
"""Where `make trainers` puts interpreters, relative to the folder it runs in."""
_LINE_LENGTH = 400


class ProofError(InputError):
    """A trainer that could not be asked, or whose answer is none. `problems` lists all of it."""

    def __init__(self, trainer: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{trainer} proof: " + "; ".join(problems))


class ProvableExporter(Exporter, Protocol):
    """An exporter whose `prove.py` tells what its trainer made of the files.

    One whose trainer cannot do all as frozen also has `foretold(decision) -> view.Run`: what it
    does.
    """

    def parameter_names(self, shape: Shape) -> dict[str, str]:
        """Each of our parameters' name in the trainer."""


def variable_of(trainer: str) -> str:
    """The environment variable that names the Python which has a trainer."""
    return f"FORERUN_{trainer.upper().replace('-', '_')}_PYTHON"


def interpreter(trainer: str) -> Path | None:
    """The Python that has a trainer: `FORERUN_<TRAINER>_PYTHON`, or what `make trainers` built;
    None without either.

    Raises:
        ProofError: the variable names no file.
    """
    variable = variable_of(trainer)
    if named := os.environ.get(variable):
        if not Path(named).is_file():
            raise ProofError(trainer, [f"{variable} = {named}: there is no such file"])
        return Path(named).absolute()
    built = INSTALLED / trainer / "bin" / "python"
    return built.absolute() if built.is_file() else None


def installing(trainer: str) -> str:
    """What to do for `interpreter` to find a trainer."""
    return (
        f"`make trainers TRAINERS={trainer}` installs it in .venv-trainers of a checkout; "
        "elsewhere "
        f"set {variable_of(trainer)} to a Python that has it"
    )


def ask(trainer: str, python: Path, folder: Path) -> TrainerView:
    """Run an export's `prove.py` with the trainer's interpreter.

    Raises:
        ProofError: it failed, ran past the limit, or printed no view.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            ending = _run([str(python), PROVE_FILE], folder, environment, out, err)
        except OSError as error:
            raise ProofError(trainer, [f"{python} cannot be started: {error.strerror}"]) from error
        for file in (out, err):
            file.seek(0)
        answer, said = out.read().rstrip(), err.read().rstrip()
    if ending or not answer:
        # Of a traceback the last words: where in the trainer it happened helps nobody.
        lines = said[-MOST_SAID_BYTES:].decode(errors="replace").splitlines()
        words = [
            _short(line)
            for line in lines
            if line.strip() and not line.startswith((" ", "Traceback "))
        ][-3:]
        why = " | ".join(words) or "no reason given"
        raise ProofError(trainer, [f"{python} {PROVE_FILE} {ending or 'ended with 0'}: {why}"])
    try:
        return canon.decode(TrainerView, canon.parse(answer.rpartition(b"\n")[2]), "view")
    except (canon.CanonError, RecursionError) as error:
        raise ProofError(
            trainer, [f"{PROVE_FILE} printed no readable answer: {_short(str(error))}"]
        ) from error


def _run(
    command: list[str], folder: Path, environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> str:
    """How a command whose words go to files ended, if not with 0; nothing that it started outlives
    this call.
    """
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        preexec_fn=make_child_die_with_us(),  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
    )
    try:
        code = child.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"gave no answer within {LIMIT_SECONDS:g} seconds and was stopped"
    finally:  # also after Ctrl-C, which does not reach another session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code < 0:
        return f"was killed by signal {-code}" + (
            " (out of memory?)" if code == -signal.SIGKILL else ""
        )
    return f"ended with {code}" if code else ""


def _short(text: str) -> str:
    return text if len(text) <= _LINE_LENGTH else f"{text[:_LINE_LENGTH]}..."


def prove(
    decision: Decision, trainer: str, version: str, python: Path, lying: Path | None = None
) -> list[str]:
    """Export anew into a folder that goes away, ask the trainer there, and compare (`marked`).

    Anew, since nothing executable is ever run from a study folder: the export `lying` in one is
    proven if it holds the very files that were asked.

    Raises:
        ExportError: what the trainer cannot run.
        ProofError: the trainer could not be asked.
    """
    module = cast(ProvableExporter, exporter(trainer))
    with tempfile.TemporaryDirectory(prefix="forerun-proof-") as scratch:
        module.export(decision, Path(scratch), version)
        problems = [] if lying is None else _stale(Path(scratch), lying)
        try:
            view = ask(trainer, python, Path(scratch))
        except ProofError as error:
            advice = (
                f"the export needs {trainer} {version}: is it installed? "
                f"{variable_of(trainer)} can name another Python"
            )
            raise ProofError(trainer, [*error.problems, advice]) from error
    names, foretell = (
        module.parameter_names(decision.shape),
        getattr(module, "foretold", frozen_run),
    )
    problems += marked(decision, view, names, foretell(decision))
    if view.version.partition("+")[0] != version:
        problems.append(f"{python} has {trainer} {view.version}: must be {version}")
    return problems


def _stale(fresh: Path, lying: Path) -> list[str]:
    files = [path.relative_to(fresh) for path in sorted(fresh.rglob("*")) if path.is_file()]
    return [
        f"{lying / file} is not what this version of forerun writes: export again"
        for file in files
        if not (lying / file).is_file() or read_plain(lying / file) != read_plain(fresh / file)
    ]
