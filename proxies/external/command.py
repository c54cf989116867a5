"""The user's own trainer as an engine: a command per run, its metrics, and what came of it. No
torch.

The engine has a bank's interface with one slot: `admit` begins a run, `advance` looks after it for
a second or so. The command is no child of a shell; `proxies.external.keeper` sees that nothing of
it outlives its run or its worker. Every attempt has a folder of its own,
`RUNS_DIR/RUN_ID/attempt-N`, with `run.json`, `log.txt` and the metrics.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxies.core import canon, flops
from proxies.core.errors import InputError
from proxies.core.failures import Cause, signal_of
from proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS
from proxies.core.notation import format_loss
from proxies.core.programs import Command
from proxies.core.shape import Shape
from proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec
from proxies.external.growing_file import MetricsError
from proxies.external.log_file import LOG_FILE, RedactedLog, read_last_lines
from proxies.external.metric_files import LoggedMetrics, MetricFiles
from proxies.external.supervised_command import SupervisedCommand


def trouble(spec: RunSpec, logged: LoggedMetrics, *, ended: bool) -> tuple[int, str] | None:
    """Where and why a run has diverged: a loss that is NaN, or after the warmup worse than a
    uniform guess.

    Only the last validation loss is compared with the ceiling, once the run has `ended`.
    """
    ceiling = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    last = max(logged.validation_loss, default=None)
    above = list(logged.train_loss.items())
    above += [(last, logged.validation_loss[last])] if ended and last is not None else []
    found = [logged.bad] if logged.bad else []
    found += [
        (
            step,
            (
                f"loss {loss:.6g} at step {step} is above {format_loss(ceiling)} nats, worse than "
                "a "
                "uniform guess"
            ),
        )
        for step, loss in above
        if loss > ceiling and step > spec.schedule.warmup_steps + 1
    ]
    return min(found, default=None)


def judge(
    spec: RunSpec, metrics: MetricFiles, *, said: str, seconds: float, ended: bool = True
) -> tuple[RunResult, Curve]:
    """The outcome of a run that has ended, or is stopped for its `trouble`.

    Steps may be counted from 0 or from 1: a trainer whose first training loss is of step 0 counts
    from 0. Its last validation loss must be of the run's last step (or of the one before: the last
    one's name, counted from 0).

    Args:
        spec: the run.
        metrics: what it has logged.
        said: what was wrong with its end; empty for exit code 0, and for one that was stopped
            because of its metrics.
        seconds: that it took.
        ended: whether it has, by itself.

    Raises:
        MetricsError: it neither diverged nor finished.
    """
    logged = metrics.logged()
    if diverged := trouble(spec, logged, ended=ended):
        return _outcome(spec, logged, seconds, reason=diverged[1], until=diverged[0])
    problem = said or _incomplete(spec, logged)
    if problem and logged.nulls:  # strict JSON writers log null for NaN
        step, key = min((step, key) for key, step in logged.nulls.items())
        return _outcome(
            spec,
            logged,
            seconds,
            reason=f"{key} is null at step {step}, and no number after it",
            until=step,
        )
    if problem:
        raise MetricsError(f"{problem}; {metrics.hint()}")
    return _outcome(spec, logged, seconds, reason="", until=spec.schedule.num_steps)


def _incomplete(spec: RunSpec, logged: LoggedMetrics) -> str:
    """What a run that finished would have logged, and this one did not."""
    command, num_steps = spec.command, spec.schedule.num_steps
    assert command is not None
    for key, series in (
        (command.train_loss_key, logged.train_loss),
        (command.validation_loss_key, logged.validation_loss),
    ):
        if not series:
            return f"it ended with exit code 0 but logged no {key!r}"
    last, judged = logged.last_step or 0, max(logged.validation_loss)
    if last < num_steps - 1:
        return f"it ended with exit code 0 at step {last} of {num_steps}"
    if judged < num_steps - 1:
        name = command.validation_loss_key
        return (
            f"its last {name!r} is of step {judged}: it must also log one at the end, at step "
            f"{num_steps}"
        )
    return ""


def _outcome(
    spec: RunSpec, logged: LoggedMetrics, seconds: float, *, reason: str, until: int
) -> tuple[RunResult, Curve]:
    shift = 1 if 0 in logged.train_loss else 0
    wanted = spec.schedule.num_steps
    steps = sorted(
        step for step in logged.train_loss if step <= until and 1 <= step + shift <= wanted
    )
    has_norms = bool(steps) and all(step in logged.grad_norm for step in steps)
    losses = [logged.train_loss[step] for step in steps]
    curve = Curve(
        steps=tuple(step + shift for step in steps),
        train_loss_nats=tuple(losses),
        grad_norm=tuple(logged.grad_norm[step] for step in steps) if has_norms else (),
    )
    num_steps = wanted if not reason else (steps[-1] + shift if steps else 0)
    tokens = spec.tokens_by(num_steps)
    result = RunResult(
        id=spec.id,
        status="diverged" if reason else "finished",
        loss_nats=None if reason else logged.validation_loss[max(logged.validation_loss)],
        num_steps=num_steps,
        last_train_loss_nats=losses[-1] if losses else None,
        curve_id=canon.content_id(curve),
        flops=float(flops.flops_per_token(spec.shape)) * tokens,
        tokens=tokens,
        seconds=seconds,
        environment={"machine": platform.machine()},
        reason=reason,
    )
    return result, curve


RUN_FILE = "run.json"
RUN_DIR_VARIABLE = "FORERUN_RUN_DIR"
_READ_SECONDS = 2.0  # of metrics, at one go
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


class CommandError(InputError):
    """A command that could not begin, or gave nothing to judge. The message says why, and where to
    look.
    """

    cause: Cause = "user_code"
    log_tail: str = ""
    """Last lines of the command's log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSettings:
    """Where commands run."""

    runs_dir: Path
    """Every attempt's folder is made below it."""
    code_dir: Path
    """The commands' working folder."""
    corpus: Path | None
    """What `{data}` says; None: the trainer has its own."""
    timeout_seconds: float
    """Longest time of one run."""
    python_path: str | None = None
    """The commands' PYTHONPATH; a worker's own serves our code, and may hide the trainer's."""
    redact: Callable[[], Callable[[str], str]] = lambda: str
    """Makes what takes the secrets out of one log's lines, one after another; the log is kept with
    the study."""


class CommandEngine:
    """One slot, number 0, for runs whose spec has a command."""

    def __init__(self, workplace: CommandSettings) -> None:
        self._place = workplace
        self._run: _Running | None = None

    @property
    def free_slots(self) -> list[int]:
        """[0] or []."""
        return [] if self._run else [0]

    @property
    def steps(self) -> dict[int, int]:
        """Slot -> the last step that the command has logged."""
        return {} if self._run is None else {0: self._run.last_step}

    def admit(self, index: int, spec: RunSpec) -> None:
        """Begin a run.

        Raises:
            CommandError: the slot is taken, the run is none of a command, or its program cannot
                begin.
        """
        if index or self._run:
            raise CommandError(
                f"slot {index} is taken: a worker runs one command at a time (num_slots = 1)"
            )
        self._run = _Running(spec, self._place)

    def advance(self, num_steps: int, seconds: float = 1.0) -> list[tuple[int, RunResult, Curve]]:
        """Look after the run for so long, or until it ends: (slot, result, curve) then.

        However many steps `num_steps` are. Reading its files may take two seconds more, whatever
        the command does.

        Raises:
            CommandError: the run gave nothing to judge; the slot is free, its processes are gone.
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
        return [(0, *outcome)]

    def evict(self, index: int) -> None:
        """Stop what runs, in order, and free the slot."""
        run, self._run = self._run, None
        if run is not None and index == 0:
            run.kept.stop()


class _Running:
    """One attempt at one run."""

    def __init__(self, spec: RunSpec, place: CommandSettings) -> None:
        if spec.command is None:
            raise CommandError(f"run {spec.id[:12]} has no command")
        self.spec = spec
        self._timeout_seconds = place.timeout_seconds
        self.run_dir = _fresh_folder(place.runs_dir / spec.id)
        self._log = self.run_dir / LOG_FILE
        values = placeholder_values(spec, self.run_dir, place.corpus)
        argv = filled(spec.command.template, values)
        find_program(argv[0], place.code_dir)
        canon.write_atomic(
            self.run_dir / RUN_FILE, canon.pretty({"spec": spec, "values": values, "argv": argv})
        )
        self._metrics = MetricFiles(
            spec.command, self.run_dir / _fill(spec.command.metrics_path, values)
        )
        self._began = time.monotonic()
        self.kept = SupervisedCommand(
            argv,
            folder=place.code_dir,
            environment=command_environment(spec.command, self.run_dir, place.python_path),
            log=RedactedLog(self._log, place.redact()),
            grace_seconds=_GRACE_SECONDS,
        )
        self._seconds: float | None = None  # how long it ran, once it has ended

    @property
    def last_step(self) -> int:
        """The last step logged so far; 0 before any."""
        return self._metrics.logged().last_step or 0

    def advance(self, seconds: float) -> tuple[RunResult, Curve] | None:
        """See `CommandEngine.advance`."""
        if self._seconds is None and self.kept.wait(seconds):
            self._seconds = (self.kept.end_time or time.monotonic()) - self._began
        try:
            more = self._read()
            if self._seconds is None or more:
                return self._still_running()
            self._metrics.end(self.spec.schedule.num_steps)
            return judge(self.spec, self._metrics, said=self._said(), seconds=self._seconds)
        except (MetricsError, OSError) as error:
            raise self._failure(str(error)) from error

    def _said(self) -> str:
        """How the command ended, where it did not end well."""
        ended = self.kept.ended
        if isinstance(ended, str):
            return ended
        if not ended:
            return ""
        number = signal_of(ended)
        if number == signal.SIGKILL:
            return f"it was killed by SIGKILL ({_exit_words(ended)}), probably for memory"
        return (
            f"it was killed by signal {number}"
            if ended < 0
            else f"it ended with {_exit_words(ended)}"
        )

    def _failure(self, problem: str) -> CommandError:
        """Return the error of a run that gave nothing to judge, with its cause if that is not the
        command itself.
        """
        lines = read_last_lines(self._log)
        failure = CommandError(
            f"{self._where()}: {problem}" + ("" if lines else f"; {LOG_FILE} is empty")
        )
        failure.log_tail = "\n".join(lines)
        ended = self.kept.ended
        if self.kept.keeper_killed:
            failure.cause = "lost_worker"
        if isinstance(ended, int) and signal_of(ended) == signal.SIGKILL:
            failure.cause = "out_of_memory"
        return failure

    def _still_running(self) -> tuple[RunResult, Curve] | None:
        """Nothing yet; but NaN ends a run, and so does its time."""
        if trouble(self.spec, self._metrics.logged(), ended=False):
            self.kept.stop()
            self._seconds = self._seconds or time.monotonic() - self._began
            return judge(self.spec, self._metrics, said="", seconds=self._seconds, ended=False)
        if self._seconds is None and time.monotonic() - self._began > self._timeout_seconds:
            self.kept.stop()
            said = (
                f"it was stopped after timeout_seconds = {self._timeout_seconds:g}; "
                f"{self._metrics.hint()}"
            )
            raise self._failure(said)
        return None

    def _read(self) -> bool:
        until = time.monotonic() + _READ_SECONDS
        while more := self._metrics.read(self.spec.schedule.num_steps):
            if time.monotonic() > until:
                break
        return more

    def _where(self) -> str:
        return f"run {self.spec.id[:12]}, {self.run_dir.name} in {self.run_dir.parent}"


def _exit_words(ended: int) -> str:
    return f"exit code {ended}" if ended > 0 else f"signal {-ended}"


def placeholder_values(spec: RunSpec, run_dir: Path, corpus: Path | None) -> dict[str, canon.Json]:
    """What a template's placeholders stand for; a clip norm of None stays None.

    Keys are those of `proxies.core.programs.PLACEHOLDERS`, but for `data` where there is no corpus.
    """
    shape, base, hparams, schedule = spec.shape, spec.base_shape, spec.hparams, spec.schedule
    values: dict[str, canon.Json] = {
        **{HYPERPARAMETERS[name].told_as: getattr(hparams, name) for name in USER_TRAINER_HPARAMS},
        **spec.own_values,
        "num_steps": schedule.num_steps,
        "warmup_steps": schedule.warmup_steps,
        "decay_steps": schedule.decay_steps,
        "schedule": schedule.kind,
        "decay_shape": schedule.decay_shape,
        "final_fraction": schedule.final_fraction,
        **size_values(shape, base),
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


def size_values(shape: Shape, base: Shape) -> dict[str, canon.Json]:
    """Placeholders of a model's size, which differ from run to run of one trainer."""
    return {
        "num_layers": shape.num_layers,
        "width": shape.width,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "ffn_width": shape.ffn_width,
        "width_multiplier": shape.width / base.width,
    }


def filled(template: str, values: dict[str, canon.Json]) -> list[str]:
    """The words of a command, placeholders filled in after splitting: a value is never split, nor
    read by a shell.

    Raises:
        CommandError: it names what has no value here.
    """
    return [_fill(word, values) for word in shlex.split(template)]


def _fill(word: str, values: dict[str, canon.Json]) -> str:
    """Numbers exactly, as Python writes them; None, which is a clip norm's alone, as inf."""
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
    """The program that a command's first word names.

    Raises:
        CommandError: there is none, or it may not be run.
    """
    found = shutil.which((code_dir / name).absolute() if "/" in name else name)
    if found is None:
        where = f"at {code_dir / name}" if "/" in name else "on the PATH"
        raise CommandError(f"the program {name!r} is not {where}, or is not executable")
    return Path(found)


def _fresh_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:  # another worker may hold an earlier attempt of the same run
        with contextlib.suppress(FileExistsError):
            (attempt := folder.resolve() / f"attempt-{number}").mkdir()
            return attempt
        number += 1


def command_environment(command: Command, run_dir: Path, python_path: str | None) -> dict[str, str]:
    """This process's own, but for what it needs itself; a W&B run is written into the run's folder,
    without network.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    if command.metrics_format == "wandb":
        environment["WANDB_DIR"] = str(run_dir)
        environment.setdefault("WANDB_MODE", "offline")
    return environment
