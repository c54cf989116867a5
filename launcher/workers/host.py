"""What a worker runs: an engine of proxies behind the pool's `Host` protocol. Torch is loaded in
the worker alone.
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
    """What trains: the user's own command, or a bank or one trial alone, saved now and then unless
    it runs again."""

_Made = TypeVar("_Made")

# What keeps a worker to its share of a GPU's memory: torch's own limit, set before anything is
# allocated.

CONTEXT_BYTES = 768 * 2**20
"""What every process takes on a device for its context and libraries, which torch cannot limit. Not
measured on a device of each kind; half a gigabyte is usual."""


def cap_memory(share: float) -> None:
    """Have an allocation beyond `share` of this process's GPU, contexts counted, fail as out of
    memory; none on a CPU.

    So a neighbour's memory is never taken: the run that does not fit is tried again in smaller
    parts.
    """
    import torch  # a command's host needs none, and the driver's process neither

    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        context = min(CONTEXT_BYTES / total_bytes, share / 2)
        torch.cuda.set_per_process_memory_fraction(share - context)


MOST_STEPS = sys.maxsize
"""Of one call: its time ends it."""


class UserCodeError(ForerunError):
    """The user's own model fails while it trains; the message names the line of theirs it
    fails at.
    """

    cause = "user_code"

    def __init__(self, said: str, log_tail: str) -> None:
        """`log_tail`: the last lines of the traceback inside their files."""
        self.log_tail = log_tail
        super().__init__(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFactory:
    """Makes the host of a worker; travels to it. Folders are absolute, as the workers see them."""

    study_dir: str
    """Checkpoints and a command's runs go there."""
    corpus: str
    """Folder of the token shards; empty where a command has its own data."""
    weights: dict[str, float] | None = None
    """Shares of the corpus's sources, where the plan changes them."""
    code_dir: str = ""
    """Folder of the user's own modules."""
    timeout_seconds: float | None = None
    """Longest time of one run of a command."""
    gpu_share: float = 0.0
    """GPUs of each worker; with less than one, none may take more than its share of the memory."""
    own_trainer: bool = False
    """The user's own command trains, in processes of its own."""
    python_path: str | None = field(default_factory=lambda: os.environ.get("PYTHONPATH"))
    """A command's, as the user set it: a worker's own serves our code, and could hide the
    trainer's."""

    def __call__(self) -> WorkerHost:
        """A host with no engine yet."""
        return WorkerHost(self)


class WorkerHost:
    """One engine at a time, rebuilt when the key changes."""

    def __init__(self, where: HostFactory) -> None:
        self._where = where
        self._store: TokenStore | None = None
        self._engine: Engine | None = None
        self._resumable: ResumableRuns | None = None  # the engine, if it is ours
        self._key = ""
        self._begun: dict[str, int] = {}  # run id -> step that it was admitted at
        self._may_go_on = False  # the last call failed in nothing, and its answer needs no reply

    def advance(self, call: HostCall) -> HostAnswer:
        """See `sweeps.run.pool.Host`.

        Raises:
            UserCodeError: the user's own model fails while it trains.
        """
        may_go_on, self._may_go_on = self._may_go_on, False
        if call.probe is not None:
            kind = next(kind for kind in _PROBES if kind in call.probe)
            return HostAnswer(
                answer=cast(dict[str, Json], canon.to_json(_PROBES[kind](self, call.probe)))
            )
        if not call.ahead:
            self._prepare(call)
        engine, own = self._engine, self._resumable
        if call.ahead and not may_go_on:
            return HostAnswer(steps={} if engine is None else engine.steps, skipped=True)
        assert engine is not None, "what goes on was prepared"
        train = call.seconds > 0
        ended = self._named(lambda: engine.advance(MOST_STEPS, call.seconds)) if train else []
        if call.save and own is not None:
            own.save()
        answer = HostAnswer(
            finished=tuple(self._told(*each) for each in ended),
            steps=engine.steps,
            paused=() if own is None else tuple(self._told(*each) for each in own.paused()),
            notes=() if own is None else own.take_notes(),
        )
        self._may_go_on = train and not answer.needs_reply
        return answer

    def _prepare(self, call: HostCall) -> None:
        """Have the engine hold what the call says."""
        specs = [(slot, canon.decode(RunSpec, spec)) for slot, spec in call.admit]
        if call.bank_key != self._key or self._engine is None:
            if not specs:
                raise ValueError("an empty bank was asked to advance")
            self._drop()
            self._engine = self._open(specs[0][1], call.num_microbatches, again=call.again)
            self._key = call.bank_key
        own = self._resumable
        if own is not None:
            own.keep(call.hold.keys() - {slot for slot, _ in specs})
        for slot, spec in specs:
            self._engine.admit(slot, spec)
            self._begun[spec.id] = self._engine.steps.get(slot, 0)
        if own is not None:
            own.pause(call.hold, call.trunks)
            own.measure_noise(call.noise)

    def _device(self) -> str:
        """The name of what trains here, as our engines record it; torch is loaded where it will
        train anyway.
        """
        if self._where.own_trainer or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return gpu_name()
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def _drop(self) -> None:
        """Free what the engine holds before the next one takes its own.

        A compiled model lies in a circle with its compiled self: of a bank of 1056 MB, 264 MB would
        wait for the collector, and glibc does not fit a bank of other sizes into what is left. With
        both done, a worker that went from that bank to an eager one of as many weights was at 2.4
        GB, not at 2.8 to 3.0.
        """
        if self._engine is not None:
            self._engine = self._resumable = None
            gc.collect()
            give_back_memory()

    def _named(self, trained: Callable[[], _Made]) -> _Made:
        """What training gives; its errors in the user's files raised as such."""
        try:
            return trained()
        except Exception as error:
            theirs = _frames_below(error, self._where.code_dir)
            if not theirs or classify(error) != "error":
                raise
            last = theirs[-1]
            sentence = (
                f"{Path(last.filename).name}, line {last.lineno}: `{last.line}`: "
                f"{type(error).__name__}: {error}"
            )
            tail = "\n".join(
                f"{Path(f.filename).name}, line {f.lineno}, in {f.name}: {f.line}" for f in theirs
            )
            raise UserCodeError(sentence, f"{tail}\n{type(error).__name__}: {error}") from error

    def _told(self, slot: int, result: RunResult, curve: Curve) -> Finished:
        """An outcome as it travels, with where it was made."""
        # its first steps are as any's
        begun = 0 if result.status == "pruned" else self._begun.get(result.id, 0)
        here = site() | ({RESUMED: str(begun)} if begun else {})
        # a command's does not tell
        here |= {DEVICE: self._device()} if DEVICE not in result.environment else {}
        placed = dataclasses.replace(result, environment={**result.environment, **here})
        return Finished(
            slot=slot,
            result=cast(dict[str, Json], canon.to_json(placed)),
            curve=cast(dict[str, Json], canon.to_json(curve)),
        )

    def _open(self, spec: RunSpec, num_microbatches: int, *, again: bool) -> Engine:
        """What trains runs like this one: their own command, we ourselves one at a time, or side by
        side.
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
            return self._own(spec, num_microbatches)
        from launcher.workers.resumable import ResumableRuns

        self._resumable = ResumableRuns(self._own(spec, num_microbatches), Path(where.study_dir))
        return self._resumable

    def _own(self, spec: RunSpec, num_microbatches: int = 1) -> Solo | Bank:
        """An empty engine of ours for runs like this one."""
        store = self._opened()
        # a bank of one slot records its steps
        if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
            from proxies.training.solo import Solo

            return Solo(store, build=self._build, num_microbatches=num_microbatches)
        from proxies.training.bank import Bank

        return Bank(
            spec.shape,
            spec.batch_tokens,
            spec.numerics,
            store,
            optimizer=spec.optimizer,
            num_microbatches=num_microbatches,
        )

    def _opened(self) -> TokenStore:
        """The corpus, once this worker is kept to its share of a GPU: what trains asks for both."""
        from proxies.data.tokens import TokenStore

        where = self._where
        self._store = self._store or TokenStore(
            Path(where.corpus), trusted=True, weights=where.weights
        )
        if 0 < where.gpu_share < 1:
            cap_memory(where.gpu_share)
        return self._store

    def _measured(self, asked: dict[str, Json]) -> object:
        """The answer to `proxies.training.calibration.CalibrationProbe`."""
        from proxies.training.calibration import CalibrationProbe, measure
        from proxies.training.torch_device import TorchDevice

        self._drop()  # the memory is the probe's
        self._key = ""
        probe = canon.decode(CalibrationProbe, asked)
        return measure(probe, self._own, TorchDevice(probe))

    def _read(self, asked: dict[str, Json]) -> object:
        """The answer to `proxies.coordinates.coordinates.CoordinateProbe`."""
        from proxies.coordinates.activations import read_run
        from proxies.coordinates.coordinates import CoordinateProbe

        self._drop()
        self._key = ""
        probe, store = canon.decode(CoordinateProbe, asked), self._opened()
        build = self._build if probe.spec.factory is not None else None
        return self._named(lambda: read_run(probe, store, build))

    def _build(self, spec: RunSpec) -> BuiltModel:
        from proxies.external.factory import build_model

        return build_model(spec, Path(self._where.code_dir))


_PROBES: dict[str, Callable[[WorkerHost, dict[str, Json]], object]] = {
    "where": lambda host, asked: {**site(), DEVICE: host._device()},
    "modes": WorkerHost._measured,
    "axis": WorkerHost._read,
}
"""What answers a probe, by a key that its kind alone has (`WHERE`, `CalibrationProbe`,
`CoordinateProbe`)."""


def _frames_below(error: Exception, code_dir: str) -> list[traceback.FrameSummary]:
    """Where in the user's own files an error came through, the innermost last; our files may lie
    there too.
    """
    ours = [Path(__file__).parents[2] / room for room in ("proxies", "sweeps", "launcher")]

    def theirs(path: Path) -> bool:
        return path.is_relative_to(code_dir) and not any(map(path.is_relative_to, ours))

    frames = traceback.extract_tb(error.__traceback__) if code_dir else []
    return [
        f
        for f in frames
        if theirs(Path(f.filename)) and "site-packages" not in Path(f.filename).parts
    ]
