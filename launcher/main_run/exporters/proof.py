"""The proof of an export: the trainer itself reads the exported files, and the run that it builds
from them is compared with the decision.

An export contains the program `prove.py`, which the trainer's interpreter runs. The program reads
the files with the trainer's own parser. It builds the trainer's own model, optimizer, and
scheduler, and prints their numbers as one `TrainerView` in JSON, its last line of output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from forerun._launcher.main_run.exporters.comparison import (
    TrainerView,
    build_frozen_run,
    compare_with_prediction,
)
from forerun._launcher.main_run.exporters.export_writer import PROVE_FILE
from forerun._launcher.main_run.exporters.registry import ProvableExporter, load_exporter
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.process_signals import make_child_die_with_us
from forerun._proxies.core import canon
from forerun._proxies.core.errors import ProblemsError
from forerun._proxies.core.plain_files import read_plain

LIMIT_SECONDS = 600.0
"""Time limit for a trainer's answer."""
VENVS_FOLDER = Path(".venv-trainers")
"""Folder, relative to the working directory, in which `make trainers` installs interpreters."""
_MAX_ERROR_BYTES = 2**16
"""Maximum number of bytes that are read from the end of a trainer's stderr."""
_MAX_LINE_CHARS = 400


class ProofError(ProblemsError):
    """A trainer's `prove.py` cannot run, or printed no view."""

    label = " proof"


def _name_variable(trainer: str) -> str:
    """Return the environment variable that names the interpreter which has a trainer."""
    return f"FORERUN_{trainer.upper().replace('-', '_')}_PYTHON"


def find_interpreter(trainer: str) -> Path | None:
    """Return the interpreter that has a trainer; None if there is none.

    It is the interpreter that the trainer's environment variable names (`_name_variable`), or else
    the one that `make trainers` installed.

    Raises:
        ProofError: The variable names no file.
    """
    variable = _name_variable(trainer)
    if named := os.environ.get(variable):
        if not Path(named).is_file():
            raise ProofError(trainer, [f"{variable} = {named}: there is no such file"])
        return Path(named).absolute()
    installed = VENVS_FOLDER / trainer / "bin" / "python"
    return installed.absolute() if installed.is_file() else None


def describe_installation(trainer: str) -> str:
    """Return how to install a trainer so that `find_interpreter` finds it."""
    return (
        f"`make trainers TRAINERS={trainer}` installs it in .venv-trainers of a checkout; "
        f"elsewhere set {_name_variable(trainer)} to a Python that has it"
    )


def ask_trainer(trainer: str, python: Path, folder: Path) -> TrainerView:
    """Run the `prove.py` of an export with the trainer's interpreter, and return its answer.

    Raises:
        ProofError: The program failed, exceeded the time limit, or printed no view.
    """
    # PYTHONPATH and the like are for this process's interpreter, not for the trainer's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            failure = _run([str(python), PROVE_FILE], folder, environment, out, err)
        except OSError as error:
            raise ProofError(trainer, [f"{python} cannot be started: {error.strerror}"]) from error
        for file in (out, err):
            file.seek(0)
        answer = out.read().rstrip()
        errors = err.read()[-_MAX_ERROR_BYTES:].decode(errors="replace")
    if failure or not answer:
        # Keep the last lines of a traceback without its frames, which lie in the trainer's code.
        lines = [line for line in errors.splitlines() if line.strip()]
        words = [line for line in lines if not line.startswith((" ", "Traceback "))][-3:]
        reason = " | ".join(map(_shorten, words)) or "no reason given"
        problem = f"{python} {PROVE_FILE} {failure or 'ended with 0'}: {reason}"
        raise ProofError(trainer, [problem])
    try:
        return canon.decode(TrainerView, canon.parse(answer.rpartition(b"\n")[2]), "view")
    except (canon.CanonError, RecursionError) as error:
        problem = f"{PROVE_FILE} printed no readable answer: {_shorten(str(error))}"
        raise ProofError(trainer, [problem]) from error


def _run(
    command: list[str], folder: Path, environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> str:
    """Run a command, and return how it failed; empty if it ended with 0.

    At the end of this call, all processes that the command started are killed.
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
    if code >= 0:
        return f"ended with {code}" if code else ""
    advice = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code}{advice}"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LINE_CHARS else f"{text[:_MAX_LINE_CHARS]}..."


def prove(
    decision: Decision, trainer: str, version: str, python: Path, present: Path | None = None
) -> list[str]:
    """Export a decision into a temporary folder, ask the trainer there, and compare its answer.

    No program is ever run from a study's folder. An earlier export is proven too if its files equal
    those that the trainer was asked about.

    Args:
        decision: The decision.
        trainer: Name of the trainer.
        version: Version of the trainer that the export is for.
        python: Interpreter that has the trainer.
        present: Folder of an earlier export, whose files must be the same; None if there is none.

    Returns:
        The differences. A difference that the fidelity report notes ends in
        `comparison.PREDICTED_MARK`.

    Raises:
        ExportError: The trainer cannot run the decision.
        ProofError: The trainer could not be asked.
    """
    module = load_exporter(trainer)
    if not isinstance(module, ProvableExporter):
        raise ProofError(trainer, ["this export has no program that asks the trainer"])
    with tempfile.TemporaryDirectory(prefix="forerun-proof-") as scratch:
        module.export(decision, Path(scratch), version)
        problems = [] if present is None else list(_find_stale_files(Path(scratch), present))
        try:
            view = ask_trainer(trainer, python, Path(scratch))
        except ProofError as error:
            advice = (
                f"the export needs {trainer} {version}: is it installed? {_name_variable(trainer)} "
                "can name another Python"
            )
            raise ProofError(trainer, [*error.problems, advice]) from error
    predict_run = getattr(module, "predict_run", build_frozen_run)
    problems += compare_with_prediction(
        decision, view, module.parameter_names(decision.shape), predict_run(decision)
    )
    if view.version.partition("+")[0] != version:
        problems.append(f"{python} has {trainer} {view.version}: must be {version}")
    return problems


def _find_stale_files(fresh: Path, present: Path) -> Iterable[str]:
    """Yield a problem for each file of a fresh export that the present export lacks or changes."""
    for path in sorted(path for path in fresh.rglob("*") if path.is_file()):
        present_path = present / path.relative_to(fresh)
        if not present_path.is_file() or read_plain(present_path) != read_plain(path):
            yield f"{present_path} is not what this version of forerun writes: export again"
