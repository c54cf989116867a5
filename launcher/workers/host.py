"""The host of a worker: it runs one engine of proxies behind the pool's `Host` protocol. Only
workers load torch.
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
from typing import TYPE_CHECKING, TypeVar, cast

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import ForerunError
from proxies.core.failures import classify
from proxies.core.redaction import LineRedactor
from proxies.core.spec import Curve, RunResult, RunSpec
from proxies.training.memory import give_back_memory
from sweeps.run.pool import Finished, HostAnswer, HostCall
from sweeps.store.sites import DEVICE, RESUMED, gpu_name, site

if TYPE_CHECKING:
    from launcher.workers.resumable import ResumableRuns
    from proxies.data.tokens import TokenStore
    from proxies.external.command import CommandEngine
    from proxies.training.bank import Bank
    from proxies.training.solo import Solo
    from proxies.training.trainable_model import BuiltModel

    Engine = ResumableRuns | CommandEngine | Solo | Bank
    """Engine that trains runs: a user's command, a bank, or a single trial; `ResumableRuns` saves
    the latter two from time to time, unless a run is executed again."""

_Result = TypeVar("_Result")

# ---- Memory ----

CONTEXT_BYTES = 768 * 2**20
"""Memory in bytes that every process takes on a device for its context and libraries, which torch
cannot limit. Not measured for each kind of device; half a gigabyte is usual.
"""


def cap_memory(share: float) -> None:
    """Limit this process to `share` of its GPU's memory, the CUDA context included; on a CPU, do
    nothing.

    Call this before anything is allocated. An allocation beyond the share fails as out of memory,
    so other workers on the GPU keep theirs, and a run that does not fit is retried with smaller
    microbatches.
    """
    import torch  # imported here: neither the driver nor the host of a command needs it

    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        context = min(CONTEXT_BYTES / total_bytes, share / 2)
        torch.cuda.set_per_process_memory_fraction(share - context)


MOST_STEPS = sys.maxsize
"""Maximum number of steps of one call; the call's time limit ends it."""


class UserCodeError(ForerunError):
    """The user's own model failed during training; the message names the failing line of the user's
    code.
    """

    cause = "user_code"

    def __init__(self, message: str, log_tail: str) -> None:
        """Create the error; `log_tail` has the last lines of the traceback inside the
        user's files.
        """
        self.log_tail = log_tail
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFactory:
    """Settings from which a worker makes its host; sent to the worker. Folders are absolute paths
    on the worker.
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
    own_trainer: bool = False
    """Whether the user's own command trains, in processes of its own."""
    python_path: str | None = field(default_factory=lambda: os.environ.get("PYTHONPATH"))
    """PYTHONPATH for a command, as the user set it. The worker's own value serves forerun, and
    could hide the trainer's modules.
    """

    def __call__(self) -> WorkerHost:
        """Make a host without an engine."""
        return WorkerHost(self)


class WorkerHost:
    """A host with one engine at a time, which is rebuilt when the bank key changes."""

    def __init__(self, where: HostFactory) -> None:
        self._where = where
        self._store: TokenStore | None = None
        self._engine: Engine | None = None
        self._resumable: ResumableRuns | None = None  # the engine, if it is no command
        self._key = ""
        self._begun: dict[str, int] = {}  # run id -> step at which it was admitted
        self._may_go_on = False  # the last call succeeded, and its answer needs no reply

    def advance(self, call: HostCall) -> HostAnswer:
        """Carry out a call; see `sweeps.run.pool.Host`.

        Raises:
            UserCodeError: the user's own model fails during training.
        """
        may_go_on, self._may_go_on = self._may_go_on, False
        if call.probe is not None:
            kind = next(kind for kind in _PROBES if kind in call.probe)
            return HostAnswer(
                answer=cast(dict[str, Json], canon.to_json(_PROBES[kind](self, call.probe)))
            )
        if not call.ahead:
            self._prepare(call)
        engine, resumable = self._engine, self._resumable
        if call.ahead and not may_go_on:
            return HostAnswer(steps={} if engine is None else engine.steps, skipped=True)
        assert engine is not None, "a call that continues was prepared by an earlier one"
        train = call.seconds > 0
        ended = (
            self._raise_user_errors(lambda: engine.advance(MOST_STEPS, call.seconds))
            if train
            else []
        )
        if call.save and resumable is not None:
            resumable.save()
        answer = HostAnswer(
            finished=tuple(self._pack_outcome(*outcome) for outcome in ended),
            steps=engine.steps,
            paused=()
            if resumable is None
            else tuple(self._pack_outcome(*outcome) for outcome in resumable.paused()),
            notes=() if resumable is None else resumable.take_notes(),
        )
        self._may_go_on = train and not answer.needs_reply
        return answer

    def _prepare(self, call: HostCall) -> None:
        """Build the engine of the call's bank, and admit and free slots as the call says."""
        specs = [(slot, canon.decode(RunSpec, spec)) for slot, spec in call.admit]
        if call.bank_key != self._key or self._engine is None:
            if not specs:
                raise ValueError("a call without runs cannot build a bank")
            self._drop()
            self._engine = self._make_engine(specs[0][1], call.num_microbatches, again=call.again)
            self._key = call.bank_key
        resumable = self._resumable
        if resumable is not None:
            resumable.keep(call.hold.keys() - {slot for slot, _ in specs})
        for slot, spec in specs:
            self._engine.admit(slot, spec)
            self._begun[spec.id] = self._engine.steps.get(slot, 0)
        if resumable is not None:
            resumable.pause(call.hold, call.trunks)
            resumable.measure_noise(call.noise)

    def _get_device_name(self) -> str:
        """Return the name of the device that trains here, as engines record it.

        Torch is loaded only if it trains in this process anyway.
        """
        if self._where.own_trainer or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return gpu_name()
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def _drop(self) -> None:
        """Free the engine's memory before the next engine is built.

        A compiled model is in a reference cycle with its compiled wrapper: of a bank of 1056 MB,
        264 MB would wait for the garbage collector, and glibc cannot reuse the freed memory for a
        bank of other sizes. With both calls, a worker that went from that bank to an eager one with
        as many weights used 2.4 GB instead of 2.8 to 3.0 GB.
        """
        if self._engine is not None:
            self._engine = self._resumable = None
            gc.collect()
            give_back_memory()

    def _raise_user_errors(self, train: Callable[[], _Result]) -> _Result:
        """Call `train`, and raise an error in the user's files as UserCodeError."""
        try:
            return train()
        except Exception as error:
            frames = _find_user_frames(error, self._where.code_dir)
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

    def _pack_outcome(self, slot: int, result: RunResult, curve: Curve) -> Finished:
        """Return an outcome in the form that is sent to the driver, with the place where it was
        made.
        """
        # A pruned run's first steps do not depend on where it was resumed
        first_step = 0 if result.status == "pruned" else self._begun.get(result.id, 0)
        place = site() | ({RESUMED: str(first_step)} if first_step else {})
        # The outcome of a command has no device
        place |= {DEVICE: self._get_device_name()} if DEVICE not in result.environment else {}
        placed = dataclasses.replace(result, environment={**result.environment, **place})
        return Finished(
            slot=slot,
            result=cast(dict[str, Json], canon.to_json(placed)),
            curve=cast(dict[str, Json], canon.to_json(curve)),
        )

    def _make_engine(self, spec: RunSpec, num_microbatches: int, *, again: bool) -> Engine:
        """Return the engine that trains runs like this one: a user's command, or proxies, one at a
        time or as a bank.
        """
        where = self._where
        if spec.command is not None:
            from proxies.external.command import CommandEngine, CommandSettings

            return CommandEngine(
                CommandSettings(
                    runs_dir=Path(where.study_dir) / "external",
                    code_dir=Path(where.code_dir),
                    corpus=Path(where.corpus) if where.corpus else None,
                    timeout_seconds=where.timeout_seconds or math.inf,
                    python_path=where.python_path,
                    redact=LineRedactor,
                )
            )
        if again:
            return self._make_proxy_engine(spec, num_microbatches)
        from launcher.workers.resumable import ResumableRuns

        self._resumable = ResumableRuns(
            self._make_proxy_engine(spec, num_microbatches), Path(where.study_dir)
        )
        return self._resumable

    def _make_proxy_engine(self, spec: RunSpec, num_microbatches: int = 1) -> Solo | Bank:
        """Return an empty engine of proxies for runs like this one."""
        store = self._open_corpus()
        # With CUDA graphs, a bank is used even for one slot: it records its steps
        if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
            from proxies.training.solo import Solo

            return Solo(store, build=self._build_user_model, num_microbatches=num_microbatches)
        from proxies.training.bank import Bank

        return Bank(
            spec.shape,
            spec.batch_tokens,
            spec.numerics,
            store,
            optimizer=spec.optimizer,
            num_microbatches=num_microbatches,
        )

    def _open_corpus(self) -> TokenStore:
        """Return the corpus, and limit this worker to its share of a GPU; every engine that trains
        here needs both.
        """
        from proxies.data.tokens import TokenStore

        where = self._where
        self._store = self._store or TokenStore(
            Path(where.corpus), trusted=True, weights=where.weights
        )
        if 0 < where.gpu_share < 1:
            cap_memory(where.gpu_share)
        return self._store

    def _measure_modes(self, data: dict[str, Json]) -> object:
        """Return the answer to `proxies.training.calibration.CalibrationProbe`."""
        from proxies.training.calibration import CalibrationProbe, measure
        from proxies.training.torch_device import TorchDevice

        self._drop()  # the probe needs the memory
        self._key = ""
        probe = canon.decode(CalibrationProbe, data)
        return measure(probe, self._make_proxy_engine, TorchDevice(probe))

    def _read_coordinates(self, data: dict[str, Json]) -> object:
        """Return the answer to `proxies.coordinates.coordinates.CoordinateProbe`."""
        from proxies.coordinates.activations import read_run
        from proxies.coordinates.coordinates import CoordinateProbe

        self._drop()
        self._key = ""
        probe, store = canon.decode(CoordinateProbe, data), self._open_corpus()
        build = self._build_user_model if probe.spec.factory is not None else None
        return self._raise_user_errors(lambda: read_run(probe, store, build))

    def _build_user_model(self, spec: RunSpec) -> BuiltModel:
        from proxies.external.factory import build_model

        return build_model(spec, Path(self._where.code_dir))


_PROBES: dict[str, Callable[[WorkerHost, dict[str, Json]], object]] = {
    "where": lambda host, data: {**site(), DEVICE: host._get_device_name()},
    "modes": WorkerHost._measure_modes,
    "axis": WorkerHost._read_coordinates,
}
"""Function that answers a probe, by a key that only this kind of probe has (`WHERE`,
`CalibrationProbe`, `CoordinateProbe`).
"""


def _find_user_frames(error: Exception, code_dir: str) -> list[traceback.FrameSummary]:
    """Return the frames in the user's own files through which an error passed, the innermost last.

    forerun's own files may be below `code_dir` too; they are left out.
    """
    packages = [Path(__file__).parents[2] / name for name in ("proxies", "sweeps", "launcher")]

    def is_user_file(path: Path) -> bool:
        return path.is_relative_to(code_dir) and not any(map(path.is_relative_to, packages))

    frames = traceback.extract_tb(error.__traceback__) if code_dir else []
    return [
        frame
        for frame in frames
        if is_user_file(Path(frame.filename)) and "site-packages" not in Path(frame.filename).parts
    ]
