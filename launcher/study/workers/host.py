"""The host of a worker: it runs one engine at a time behind the pool's `Host` protocol. Only
workers load torch.

An engine trains proxies: one run alone, a bank (several runs as one batched model, one in each
slot), or a user's command.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from forerun._proxies.core import canon
from forerun._proxies.core.canon import PACKAGE_DIR, Json
from forerun._proxies.core.errors import ForerunError
from forerun._proxies.core.failures import classify
from forerun._proxies.core.redaction import LineRedactor
from forerun._proxies.core.spec import EndedRun, RunSpec
from forerun._proxies.training.memory import return_free_memory
from forerun._sweeps.run.pool import HostCall, Report
from forerun._sweeps.store.sites import DEVICE, RESUMED, get_gpu_name, get_site

if TYPE_CHECKING:
    from forerun._launcher.study.workers.resumable import ResumableRuns
    from forerun._proxies.data.tokens import TokenStore
    from forerun._proxies.external.command import CommandEngine
    from forerun._proxies.training.bank import Bank
    from forerun._proxies.training.single_trial import SingleTrialEngine
    from forerun._proxies.training.trainable_model import BuiltModel

    Engine = ResumableRuns | CommandEngine | SingleTrialEngine | Bank
    """Engine that trains runs: a user's command, a bank, or a single trial; `ResumableRuns` saves
    the latter two from time to time, unless a run is executed again."""

_Result = TypeVar("_Result")

# ---- Memory ----

CONTEXT_BYTES = 768 * 2**20
"""Bytes that every process takes on a device for its CUDA context and libraries, which torch cannot
limit. They were not measured for each kind of device; half a gigabyte is usual.
"""


def cap_memory(share: float) -> None:
    """Limit this process to `share` of its GPU's memory, the CUDA context included. Do nothing if
    there is no GPU.

    Call this before anything is allocated. An allocation beyond the share fails as out of memory,
    so that other workers on the GPU keep their memory. A run that does not fit is tried again with
    smaller microbatches.
    """
    import torch  # imported here: neither the driver nor the host of a command needs it

    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        context = min(CONTEXT_BYTES / total_bytes, share / 2)
        torch.cuda.set_per_process_memory_fraction(share - context)


MAX_STEPS = sys.maxsize
"""Maximum number of steps of a call. There is no limit, because the call has a time limit."""


class UserCodeError(ForerunError):
    """The user's own model failed during training; the message names the failing line of the user's
    code.
    """

    cause = "user_code"

    def __init__(self, message: str, log_tail: str) -> None:
        """Create the error. `log_tail` is the part of the traceback inside the user's files."""
        self.log_tail = log_tail
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFactory:
    """Settings from which a worker makes its host. The driver sends them to the worker. Folders are
    absolute paths on the worker.
    """

    study_dir: str
    """Folder of the study, for checkpoints and the runs of a command."""
    corpus: str
    """Folder of the token shards; empty if a command has its own data."""
    weights: dict[str, float] | None = None
    """Shares of the corpus's sources, if the plan changes them."""
    code_dir: str = ""
    """Folder of the user's own modules."""
    timeout_seconds: float | None = None
    """Maximum duration in seconds of one run of a command."""
    gpu_share: float = 0.0
    """GPUs of each worker; below one, a worker may use only its share of the GPU's memory."""
    has_user_trainer: bool = False
    """Whether the user's own command trains, in processes of its own."""
    python_path: str | None = field(default_factory=lambda: os.environ.get("PYTHONPATH"))
    """PYTHONPATH for a command: the user's own value, read in the driver. The value in a worker is
    for forerun, and could hide the trainer's modules.
    """

    def __call__(self) -> WorkerHost:
        """Make a host without an engine."""
        return WorkerHost(self)


class _LoadedEngine(NamedTuple):
    """The engine of a host, and the bank key of its runs."""

    bank_key: str
    engine: Engine
    resumable: ResumableRuns | None
    """The same engine if it saves its runs, else None."""


class WorkerHost:
    """A host with one engine at a time, which is rebuilt when the bank key changes.

    Runs with the same bank key can train in one bank.
    """

    def __init__(self, settings: HostFactory) -> None:
        self._settings = settings
        self._store: TokenStore | None = None
        self._loaded: _LoadedEngine | None = None
        self._begun: dict[str, int] = {}  # run id -> step at which it was admitted
        # Whether a call that was sent ahead may train: the last call succeeded, and the driver
        # does not have to react to its report.
        self._may_go_on = False

    def advance(self, call: HostCall) -> Report:
        """Carry out a call; see `forerun._sweeps.run.pool.Host`.

        Raises:
            UserCodeError: the user's own model fails during training.
        """
        may_go_on, self._may_go_on = self._may_go_on, False
        if call.probe is not None:
            ((kind, data),) = call.probe.items()
            return Report(answer=cast(dict[str, Json], canon.to_json(_PROBES[kind](self, data))))
        if call.is_ahead and not may_go_on:
            return Report(steps=self._loaded.engine.steps if self._loaded else {}, skipped=True)
        loaded = self._loaded if call.is_ahead else self._prepare(call)
        assert loaded is not None, "a call that continues was prepared by an earlier one"
        _, engine, resumable = loaded
        ended: list[EndedRun] = []
        paused: list[EndedRun] = []
        notes: tuple[str, ...] = ()
        if call.seconds > 0:
            ended = self._raise_user_errors(lambda: engine.advance(MAX_STEPS, call.seconds))
        if resumable is not None:
            if call.save:
                resumable.save()
            paused, notes = resumable.collect_paused(), resumable.take_notes()
        report = Report(
            finished=tuple(map(self._add_place, ended)),
            steps=engine.steps,
            paused=tuple(map(self._add_place, paused)),
            notes=notes,
        )
        self._may_go_on = call.seconds > 0 and not report.needs_reply
        return report

    def _prepare(self, call: HostCall) -> _LoadedEngine:
        """Return the engine of the call's bank, which is built if another one is loaded. Admit and
        free slots as the call says.
        """
        specs = [(slot, canon.decode(RunSpec, spec)) for slot, spec in call.admit]
        if self._loaded is None or self._loaded.bank_key != call.bank_key:
            if not specs:
                raise ValueError("a call without runs cannot build a bank")
            self._drop_engine()
            self._loaded = self._load_engine(specs[0][1], call)
        loaded = self._loaded
        if loaded.resumable is not None:
            loaded.resumable.free_other_slots(call.hold.keys() - {slot for slot, _ in specs})
        for slot, spec in specs:
            loaded.engine.admit(slot, spec)
            self._begun[spec.id] = loaded.engine.steps.get(slot, 0)
        if loaded.resumable is not None:
            loaded.resumable.set_pauses(call.hold, call.trunks)
            loaded.resumable.set_noise_measurement(call.noise)
        return loaded

    def _get_device_name(self) -> str:
        """Return the name of the device that trains here, as engines record it.

        Torch is loaded only if it trains in this process anyway.
        """
        if self._settings.has_user_trainer or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return get_gpu_name()
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def _drop_engine(self) -> None:
        """Drop the engine, and free its memory for the next engine or for a probe.

        Two calls are needed. A compiled model is in a reference cycle with its compiled wrapper, so
        264 MB of a bank of 1056 MB would wait for the garbage collector. And glibc does not reuse
        the freed memory for a bank of other sizes. With both calls, a worker that went from that
        bank to an eager one with as many weights used 2.4 GB instead of 2.8 to 3.0 GB.
        """
        if self._loaded is not None:
            self._loaded = None
            gc.collect()
            return_free_memory()

    def _raise_user_errors(self, train: Callable[[], _Result]) -> _Result:
        """Call `train`, and raise an error in the user's files as UserCodeError."""
        try:
            return train()
        except Exception as error:
            frames = _find_user_frames(error, self._settings.code_dir)
            if not frames or classify(error) != "error":
                raise
            last = frames[-1]
            message = (
                f"{Path(last.filename).name}, line {last.lineno}: `{last.line}`: "
                f"{type(error).__name__}: {error}"
            )
            tail = "\n".join(
                f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
                for frame in frames
            )
            raise UserCodeError(message, f"{tail}\n{type(error).__name__}: {error}") from error

    def _add_place(self, ended: EndedRun) -> EndedRun:
        """Add the place where a run was trained to the environment of its result."""
        result, place = ended.result, get_site()
        # A pruned run's first steps do not depend on where it was resumed
        if result.status != "pruned" and (first_step := self._begun.get(result.id, 0)):
            place[RESUMED] = str(first_step)
        # The outcome of a command has no device
        if DEVICE not in result.environment:
            place[DEVICE] = self._get_device_name()
        environment = {**result.environment, **place}
        return ended._replace(result=dataclasses.replace(result, environment=environment))

    def _load_engine(self, spec: RunSpec, call: HostCall) -> _LoadedEngine:
        """Return the engine that trains runs like this one: a user's command, or an engine of
        proxies. The state of a run that is executed again for comparison is not saved.
        """
        settings, resumable = self._settings, None
        engine: Engine
        if spec.command is not None:
            from forerun._proxies.external.command import CommandEngine, CommandSettings

            engine = CommandEngine(
                CommandSettings(
                    runs_dir=Path(settings.study_dir) / "external",
                    code_dir=Path(settings.code_dir),
                    corpus=Path(settings.corpus) if settings.corpus else None,
                    timeout_seconds=settings.timeout_seconds or math.inf,
                    python_path=settings.python_path,
                    redact=LineRedactor,
                )
            )
        else:
            engine = self._make_proxy_engine(spec, call.num_microbatches)
            if not call.is_rerun:
                from forerun._launcher.study.workers.resumable import ResumableRuns

                engine = resumable = ResumableRuns(engine, Path(settings.study_dir))
        return _LoadedEngine(call.bank_key, engine, resumable)

    def _make_proxy_engine(
        self, spec: RunSpec, num_microbatches: int = 1
    ) -> SingleTrialEngine | Bank:
        """Return an empty engine of proxies for runs like this one."""
        store = self._limit_memory_and_open_corpus()
        # Only a bank records CUDA graphs, so one with a single slot is used for them.
        if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
            from forerun._proxies.training.single_trial import SingleTrialEngine

            return SingleTrialEngine(
                store, build=self._get_model_builder(spec), num_microbatches=num_microbatches
            )
        from forerun._proxies.training.bank import Bank

        return Bank(
            spec.shape,
            spec.batch_tokens,
            spec.numerics,
            store,
            optimizer=spec.optimizer,
            num_microbatches=num_microbatches,
        )

    def _limit_memory_and_open_corpus(self) -> TokenStore:
        """Limit this process to its share of a GPU, and return the open corpus. The first call does
        both; it must come before anything is allocated on the GPU.
        """
        if self._store is None:
            from forerun._proxies.data.tokens import TokenStore

            settings = self._settings
            if 0 < settings.gpu_share < 1:
                cap_memory(settings.gpu_share)
            self._store = TokenStore(Path(settings.corpus), trusted=True, weights=settings.weights)
        return self._store

    def _get_model_builder(self, spec: RunSpec) -> Callable[[RunSpec], BuiltModel] | None:
        """Return the function that builds the user's own model; None for forerun's models."""
        if spec.factory is None:
            return None
        from forerun._proxies.external.factory import build_model

        code_dir = Path(self._settings.code_dir)
        return lambda run: build_model(run, code_dir)

    def _measure_modes(self, data: Json) -> object:
        """Return the answer to `forerun._proxies.training.calibration.CalibrationProbe`."""
        from forerun._proxies.training.calibration import CalibrationProbe, measure_modes
        from forerun._proxies.training.torch_device import TorchDevice

        self._drop_engine()
        probe = canon.decode(CalibrationProbe, data)
        return measure_modes(probe, self._make_proxy_engine, TorchDevice(probe))

    def _read_coordinates(self, data: Json) -> object:
        """Return the answer to `forerun._proxies.coordinates.coordinate_check.CoordinateProbe`."""
        from forerun._proxies.coordinates.activations import measure_run
        from forerun._proxies.coordinates.coordinate_check import CoordinateProbe

        self._drop_engine()
        probe, store = canon.decode(CoordinateProbe, data), self._limit_memory_and_open_corpus()
        build = self._get_model_builder(probe.spec)
        return self._raise_user_errors(lambda: measure_run(probe, store, build))


_PROBES: dict[str, Callable[[WorkerHost, Json], object]] = {
    "where": lambda host, _: {**get_site(), DEVICE: host._get_device_name()},
    "modes": WorkerHost._measure_modes,
    "coordinates": WorkerHost._read_coordinates,
}
"""Function that answers each kind of probe. A probe is a dict with one entry: its kind, and the
data for the function.
"""


def _find_user_frames(error: Exception, code_dir: str) -> list[traceback.FrameSummary]:
    """Return the frames in the user's own files through which an error passed, the innermost last.

    forerun's own files may be below `code_dir` too; they are left out.
    """

    def is_user_file(path: Path) -> bool:
        return path.is_relative_to(code_dir) and not path.is_relative_to(PACKAGE_DIR)

    frames = traceback.extract_tb(error.__traceback__) if code_dir else []
    return [
        frame
        for frame in frames
        if is_user_file(Path(frame.filename)) and "site-packages" not in Path(frame.filename).parts
    ]
