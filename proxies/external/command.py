"""The engine that trains runs with the user's own trainer, one command per run.

The engine has the interface of a bank (an engine that trains K trials as one batched model) with
one slot: `admit` starts a run, and `advance` waits about a second and reads the metrics that the
run has logged. The command is not started by a shell, and
`forerun._proxies.external.command_supervisor` ends all of its processes with the run or the worker.
Each attempt has its own folder, `RUNS_DIR/RUN_ID/attempt-N`, with `run.json`, `log.txt` and the
metrics. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.failures import Cause, get_signal
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS
from forerun._proxies.core.programs import Command
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Curve, EndedRun, RunResult, RunSpec
from forerun._proxies.external.command_outcome import find_divergence, judge_run
from forerun._proxies.external.growing_file import MetricsError
from forerun._proxies.external.log_file import LOG_FILE, RedactedLog, read_last_lines
from forerun._proxies.external.metric_files import MetricFiles
from forerun._proxies.external.supervised_command import SupervisedCommand

RUN_FILE = "run.json"
RUN_DIR_VARIABLE = "FORERUN_RUN_DIR"
_MAX_READ_SECONDS = 2.0
"""Time limit for reading metrics in one call of `advance`."""
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""


class CommandError(InputError):
    """A command could not be started, or ended without metrics that can be judged.

    The message says why, and where to look.
    """

    cause: Cause = "user_code"
    log_tail: str = ""
    """Last lines of the command's log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSettings:
    """The folders, time limit, and environment of commands."""

    runs_dir: Path
    """Folder in which each attempt's folder is created."""
    code_dir: Path
    """Working folder of the commands."""
    corpus: Path | None
    """Value of the placeholder `{data}`; None if the trainer has its own data."""
    timeout_seconds: float
    """Time limit of one run, in seconds."""
    python_path: str | None = None
    """PYTHONPATH of the commands; None to set none. The worker's own PYTHONPATH is for forerun's
    code, and could hide the trainer's modules."""
    redact: Callable[[], Callable[[str], str]] = lambda: str
    """Creates the function that removes secrets from the lines of one log, which is stored with the
    study."""


class CommandEngine:
    """An engine with one slot, number 0, for runs whose spec has a command."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._run: _Attempt | None = None

    @property
    def steps(self) -> dict[int, int]:
        """Last step that the command has logged, by slot; empty if no command runs."""
        return {} if self._run is None else {0: self._run.last_step}

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run.

        Raises:
            CommandError: The slot is taken, the run has no command, or its program cannot be
                started.
        """
        if index or self._run:  # there is no other slot than 0
            raise CommandError(
                f"slot {index} is taken: a worker runs one command at a time (num_slots = 1)"
            )
        self._run = _Attempt(spec, self._settings)

    def advance(self, num_steps: int, seconds: float = 1.0) -> list[EndedRun]:
        """Wait for the end of the run, up to a time limit, and read the metrics that it has logged.

        Args:
            num_steps: Ignored; other engines take this number of steps.
            seconds: Maximum time to wait for the end. Reading the files may take two seconds more.

        Returns:
            The run if it ended, else nothing.

        Raises:
            CommandError: The run ended without metrics that can be judged. The slot is free, and
                the command's processes have ended.
        """
        if self._run is None:
            return []
        try:
            outcome = self._run.advance(seconds)
        except BaseException:
            self.evict(0)
            raise
        if outcome is None:
            return []
        self._run = None
        return [EndedRun(0, *outcome)]

    def evict(self, index: int) -> None:
        """Stop the command, first by SIGTERM, and free the slot."""
        run, self._run = self._run, None
        if run is not None and index == 0:
            run.process.stop()


class _Attempt:
    """One attempt at training one run."""

    def __init__(self, spec: RunSpec, settings: CommandSettings) -> None:
        if spec.command is None:
            raise CommandError(f"run {spec.id[:12]} has no command")
        self.spec = spec
        self._timeout_seconds = settings.timeout_seconds
        self.run_dir = _create_attempt_folder(settings.runs_dir / spec.id)
        self._log = self.run_dir / LOG_FILE
        values = get_placeholder_values(spec, self.run_dir, settings.corpus)
        argv = fill_template(spec.command.template, values)
        find_program(argv[0], settings.code_dir)
        canon.write_atomic(
            self.run_dir / RUN_FILE,
            canon.to_pretty_json({"spec": spec, "values": values, "argv": argv}),
        )
        self._metrics = MetricFiles(
            spec.command, self.run_dir / _fill(spec.command.metrics_path, values)
        )
        self._began = time.monotonic()
        self.process = SupervisedCommand(
            argv,
            folder=settings.code_dir,
            environment=make_command_environment(spec.command, self.run_dir, settings.python_path),
            log=RedactedLog(self._log, settings.redact()),
            grace_seconds=_GRACE_SECONDS,
        )
        self._seconds: float | None = None
        """Duration of the command; None while it runs."""

    @property
    def last_step(self) -> int:
        """Last step logged so far; 0 before the first."""
        return self._metrics.merge_metrics().last_step or 0

    def advance(self, seconds: float) -> tuple[RunResult, Curve] | None:
        """Wait for the end of the run and read its metrics, as `CommandEngine.advance` does.

        Returns:
            The result and the curve; None if the run has not ended.
        """
        if self._seconds is None and self.process.wait(seconds):
            self._seconds = (self.process.end_time or time.monotonic()) - self._began
        try:
            has_more = self._read()
            if self._seconds is None or has_more:
                return self._check_running()
            self._metrics.end(self.spec.schedule.num_steps)
            return judge_run(
                self.spec,
                self._metrics,
                exit_problem=self._describe_exit_problem(),
                seconds=self._seconds,
            )
        except (MetricsError, OSError) as error:
            raise self._make_error(str(error)) from error

    def _describe_exit_problem(self) -> str:
        """Describe how the command ended; empty for exit code 0."""
        status = self.process.exit_status
        if isinstance(status, str):
            return status
        if not status:
            return ""
        ending = f"exit code {status}" if status > 0 else f"signal {-status}"
        if get_signal(status) == signal.SIGKILL:
            return f"it was killed by SIGKILL ({ending}), probably for memory"
        return f"it ended with {ending}" if status > 0 else f"it was killed by {ending}"

    def _make_error(self, problem: str) -> CommandError:
        """Return the error of a run that cannot be judged, with its cause."""
        lines = read_last_lines(self._log)
        place = f"run {self.spec.id[:12]}, {self.run_dir.name} in {self.run_dir.parent}"
        error = CommandError(f"{place}: {problem}" + ("" if lines else f"; {LOG_FILE} is empty"))
        error.log_tail = "\n".join(lines)
        status = self.process.exit_status
        if self.process.supervisor_killed:
            error.cause = "lost_worker"
        if isinstance(status, int) and get_signal(status) == signal.SIGKILL:
            error.cause = "out_of_memory"
        return error

    def _check_running(self) -> tuple[RunResult, Curve] | None:
        """Stop a run that has diverged, and return its result; None if it goes on.

        Raises:
            CommandError: The run has exceeded its time limit.
        """
        if find_divergence(self.spec, self._metrics.merge_metrics(), has_ended=False):
            self.process.stop()
            self._seconds = self._seconds or time.monotonic() - self._began
            return judge_run(
                self.spec, self._metrics, exit_problem="", seconds=self._seconds, has_ended=False
            )
        if self._seconds is None and time.monotonic() - self._began > self._timeout_seconds:
            self.process.stop()
            problem = (
                f"it was stopped after timeout_seconds = {self._timeout_seconds:g}; "
                f"{self._metrics.describe_contents()}"
            )
            raise self._make_error(problem)
        return None

    def _read(self) -> bool:
        """Read new metrics until the time limit; return whether there are more to read."""
        deadline = time.monotonic() + _MAX_READ_SECONDS
        while has_more := self._metrics.read(self.spec.schedule.num_steps):
            if time.monotonic() > deadline:
                break
        return has_more


def get_placeholder_values(
    spec: RunSpec, run_dir: Path, corpus: Path | None
) -> dict[str, canon.Json]:
    """Return the values of a template's placeholders, by name.

    The names are those of `forerun._proxies.core.programs.PLACEHOLDERS`, without `data` if there is
    no corpus. A clip norm of None, which means no clipping, stays None.

    Args:
        spec: The run.
        run_dir: Folder of the attempt.
        corpus: Corpus folder; None if the trainer has its own data.
    """
    shape, base, hparams, schedule = spec.shape, spec.base_shape, spec.hparams, spec.schedule
    values: dict[str, canon.Json] = {
        **{
            HYPERPARAMETERS[name].placeholder_name: getattr(hparams, name)
            for name in USER_TRAINER_HPARAMS
        },
        **spec.user_values,
        "num_steps": schedule.num_steps,
        "warmup_steps": schedule.warmup_steps,
        "decay_steps": schedule.decay_steps,
        "schedule": schedule.kind,
        "decay_shape": schedule.decay_shape,
        "final_fraction": schedule.final_fraction,
        **get_size_values(shape, base),
        "vocab_size": shape.vocab_size,
        "seq_len": shape.seq_len,
        "base_width": base.width,
        "base_num_layers": base.num_layers,
        "parametrization": spec.parametrization.name,
        "batch_tokens": spec.batch_tokens,
        "batch_sequences": spec.batch_sequences,
        "batch_warmup_steps": schedule.batch_warmup_steps,
        "batch_warmup_stages": schedule.batch_warmup_stages,
        "seed": spec.seed,
        "run_dir": str(run_dir),
        "run_json": str(run_dir / RUN_FILE),
    }
    return values if corpus is None else {**values, "data": str(corpus)}


def get_size_values(shape: Shape, base: Shape) -> dict[str, canon.Json]:
    """Return the values of the placeholders that describe a model's size."""
    return {
        "num_layers": shape.num_layers,
        "width": shape.width,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "ffn_width": shape.ffn_width,
        "width_multiplier": shape.width / base.width,
    }


def fill_template(template: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command, with its placeholders replaced by their values.

    The template is split into words first: a value is never split, and no shell interprets it.

    Raises:
        CommandError: The template has a placeholder without a value.
    """
    return [_fill(word, values) for word in shlex.split(template)]


def _fill(word: str, values: Mapping[str, object]) -> str:
    """Replace the placeholders of one word.

    Numbers are written exactly, as by `str`. Only a clip norm can be None, which is written as
    `inf`.
    """
    texts = {
        name: repr(math.inf) if value is None else str(value) for name, value in values.items()
    }
    try:
        return word.format_map(texts)
    except KeyError as error:
        raise CommandError(
            f"the command names {{{error.args[0]}}}, but the plan has no corpus: set data.path"
        ) from error


def find_program(name: str, code_dir: Path) -> Path:
    """Find the program that a command's first word names.

    Raises:
        CommandError: There is no such program, or it is not executable.
    """
    program = shutil.which((code_dir / name).absolute() if "/" in name else name)
    if program is None:
        place = f"at {code_dir / name}" if "/" in name else "on the PATH"
        raise CommandError(f"the program {name!r} is not {place}, or is not executable")
    return Path(program)


def _create_attempt_folder(folder: Path) -> Path:
    """Create the folder of the next attempt at a run."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    # Another worker may create a folder for the same run at the same time.
    while True:
        with contextlib.suppress(FileExistsError):
            (attempt := folder.resolve() / f"attempt-{number}").mkdir()
            return attempt
        number += 1


def make_command_environment(
    command: Command, run_dir: Path, python_path: str | None
) -> dict[str, str]:
    """Return the environment of a command: this process's own, without its PYTHONPATH.

    A W&B run is written into the run's folder, offline unless WANDB_MODE is set.

    Args:
        command: The command of the run.
        run_dir: Folder of the attempt.
        python_path: PYTHONPATH of the command; None to set none.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    if command.metrics_format == "wandb":
        environment["WANDB_DIR"] = str(run_dir)
        environment.setdefault("WANDB_MODE", "offline")
    return environment
