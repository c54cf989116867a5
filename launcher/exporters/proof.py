"""What a trainer itself makes of an export, held against the decision: parameter by parameter, step by step.

Beside its files an exporter writes `prove.py`. Run by the trainer's interpreter it reads them with the trainer's own
parser, builds the trainer's own model, optimizer and scheduler, and prints one `TrainerView` as JSON, its last line of
output, which is then compared (launcher.exporters.view).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Protocol, cast

from launcher.exporters.fidelity import Exporter, exporter
from launcher.exporters.view import TrainerView, frozen_run, marked
from launcher.frozen import Decision
from proxies import canon
from proxies.shape import Shape

PROVE_FILE = "prove.py"
INSTALLED = Path(".venv-trainers")
"""Where `make trainers` puts interpreters, relative to the folder it runs in."""


class ProofError(ValueError):
    """A trainer that could not be asked, or whose answer is none. `problems` lists all of it."""

    def __init__(self, trainer: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{trainer} proof: " + "; ".join(problems))


class Provable(Exporter, Protocol):
    """An exporter whose `prove.py` tells what its trainer made of the files.

    One whose trainer cannot do all as frozen also has `foretold(decision) -> view.Run`: what it does.
    """

    def parameter_names(self, shape: Shape) -> dict[str, str]:
        """Each of our parameters' name in the trainer."""


def interpreter(trainer: str) -> Path | None:
    """The Python that has a trainer: `FORERUN_<TRAINER>_PYTHON`, or what `make trainers` built; None without either.

    Raises:
        ProofError: the variable names no file.
    """
    variable = f"FORERUN_{trainer.upper().replace('-', '_')}_PYTHON"
    if told := os.environ.get(variable):
        if not Path(told).is_file():
            raise ProofError(trainer, [f"{variable} = {told}: there is no such file"])
        return Path(told).absolute()
    built = INSTALLED / trainer / "bin" / "python"
    return built.absolute() if built.is_file() else None


def ask(trainer: str, python: Path, folder: Path, limit_seconds: float = 600) -> TrainerView:
    """Run an export's `prove.py` with the trainer's interpreter.

    Raises:
        ProofError: it failed, ran past the limit, or printed no view.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    told = {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            code = _run([str(python), PROVE_FILE], folder, told, (out, err), limit_seconds)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProofError(trainer, [f"{python} {PROVE_FILE}: {error}"]) from error
        out.seek(0)
        err.seek(0)
        lines, said = (file.read().decode(errors="replace").splitlines() for file in (out, err))
    if code or not lines:
        # Of a traceback the last words: where in the trainer it happened helps nobody.
        words = [line for line in said if line.strip() and not line.startswith((" ", "Traceback "))][-3:]
        why = " | ".join(words) or "no word why"
        raise ProofError(trainer, [f"{python} {PROVE_FILE} ended with {code}: {why}"])
    try:
        return canon.decode(TrainerView, canon.parse(lines[-1].encode()), "view")
    except canon.CanonError as error:
        raise ProofError(trainer, [f"{PROVE_FILE} printed no view: {error}"]) from error


def _run(command: list[str], folder: Path, told: dict[str, str], to: tuple[IO[bytes], IO[bytes]], limit: float) -> int:
    """Exit status of a command whose words go to files; nothing that it started outlives this call."""
    child = subprocess.Popen(
        command, cwd=folder, env=told, stdin=subprocess.DEVNULL, stdout=to[0], stderr=to[1], start_new_session=True
    )
    try:
        return child.wait(timeout=limit)
    finally:  # also after Ctrl-C, which does not reach another session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def prove(decision: Decision, trainer: str, version: str, python: Path, lying: Path | None = None) -> list[str]:
    """Export anew into a folder that goes away, ask the trainer there, and compare (`marked`).

    Anew, since nothing executable is ever run from a study folder: the export `lying` in one is proven if it holds the
    very files that were asked.

    Raises:
        ExportError: what the trainer cannot run.
        ProofError: the trainer could not be asked.
    """
    room = cast(Provable, exporter(trainer))
    with tempfile.TemporaryDirectory(prefix="forerun-proof-") as scratch:
        room.export(decision, Path(scratch), version)
        problems = [] if lying is None else _stale(Path(scratch), lying)
        try:
            view = ask(trainer, python, Path(scratch))
        except ProofError as error:
            raise ProofError(
                trainer, [*error.problems, f"the export is for {trainer} {version}: has it that?"]
            ) from error
    names, foretell = room.parameter_names(decision.shape), getattr(room, "foretold", frozen_run)
    problems += marked(decision, view, names, foretell(decision))
    if not version.startswith("main") and view.version.partition("+")[0] != version:
        problems.append(f"{python} has {trainer} {view.version}: {version} is wanted")
    return problems


def _stale(fresh: Path, lying: Path) -> list[str]:
    files = [path.relative_to(fresh) for path in sorted(fresh.rglob("*")) if path.is_file()]
    return [
        f"{lying / file} is not what this version of forerun writes: export again"
        for file in files
        if not (lying / file).is_file() or (lying / file).read_bytes() != (fresh / file).read_bytes()
    ]
