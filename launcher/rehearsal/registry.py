"""The drills: each one's name, what happens in it, what passes, and what to do if it does not. No
torch.

A drill is an entry of `DRILLS` and a function of that name, which takes a `RehearsalFolder`, in the
module that the entry names. The verb's `--only`, its `--json`, the attestation, `launch` and the
reference page read the entry; nothing else lists them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from proxies.core.canon import Json
from proxies.core.spec import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.rehearsal.own_drills import OwnRehearsal
    from launcher.rehearsal.stage import RehearsalFolder

Outcome = Literal["passed", "failed"]

HANG_SECONDS, OWN_HANG_SECONDS = 10.0, 30.0
"""Without a step, after which the supervisor of the hang drill kills the job; the same for a user's
own trainer."""
CUTS = (3, 11)
"""Steps done at which the run that is cut ends and begins again: in the warmup, and near the
end."""
PROXY_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""That the proxies' engine may be away at a step: it sums in another order, and a user's own model,
under autocast there, casts elsewhere."""
FULL_DISK_BYTES = 48 * 1024
"""No file may grow beyond it: less than a rank's part of a small checkpoint, more than a line of
metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """What a drill found."""

    name: str
    outcome: Outcome
    said: str
    """In a sentence."""
    seen: dict[str, object]
    """The same in numbers."""
    limit: str
    """What would have passed."""
    advice: str = ""
    """What to do, where it did not pass."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalAttestation:
    """What the attestation of a rehearsal holds."""

    outcome: Outcome
    copy: dict[str, object]
    """What was trained in the drills, and which config it represents."""
    machine: dict[str, object]
    seconds: float
    drills: tuple[DrillResult, ...]

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed."""
        return 0 if self.outcome == "passed" else 3

    def named(self, outcome: Outcome) -> list[str]:
        """The drills that ended so."""
        return [drill.name for drill in self.drills if drill.outcome == outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill."""

    name: str
    module: str
    """The module of `launcher.rehearsal` that has the function of the same name."""
    happens: str
    limit: str
    """What passes."""
    advice: str
    """What to do, where it does not."""
    not_proven: str = ""

    def hold(self, stage: RehearsalFolder | OwnRehearsal) -> DrillResult:
        """Run it."""
        function = getattr(importlib.import_module(f"launcher.rehearsal.{self.module}"), self.name)
        return cast("Callable[[object], DrillResult]", function)(stage)


_DRILLS = (
    Drill(
        name="loss",
        module="resume_drills",
        happens="the copy is trained here and in the proxies' engine; `--full` has no proxy to "
        "compare with",
        limit=f"within {PROXY_NATS['float32']:g} (bfloat16: {PROXY_NATS['bfloat16']:g}) nats of "
        "the proxy at every "
        "step and in validation, and falling; `--full`: first loss within 1 nat of ln(vocabulary), "
        "last below first, "
        "validation loss within 1 nat of the last",
        advice="the trainer trains another model than the proxies did: compare weights, forward "
        "multipliers and data",
        not_proven="anything about the loss of the real size",
    ),
    Drill(
        name="resume",
        module="resume_drills",
        happens=f"the run is cut after {', '.join(map(str, CUTS))} updates and resumed in new "
        "processes; control runs "
        "resume wrongly (moments dropped, data off by one batch)",
        limit="weights and moments bitwise equal to the uninterrupted run's; every wrong resume "
        "differs",
        advice="resuming changes the run: check which of weights, moments, step and data order is "
        "not restored",
    ),
    Drill(
        name="killed_rank",
        module="fault_drills",
        happens="a rank gets SIGKILL between gradients and update",
        limit="one restart, every weight and moment bitwise equal to the uninterrupted run's",
        advice="the supervisor did not restore the run: see torchrun.log in the run's folder",
        not_proven="the loss of a machine",
    ),
    Drill(
        name="hang",
        module="fault_drills",
        happens="a rank hangs",
        limit=f"the supervisor kills the job after {HANG_SECONDS:g} s without a step (`--full`: a "
        "minute), one "
        "restart, final weights bitwise the same",
        advice="a hang would last until somebody looks: the supervisor's step timeout did not "
        "detect it",
        not_proven="that so short a timeout suits the real run: see `launch --hang-seconds`",
    ),
    Drill(
        name="nan",
        module="fault_drills",
        happens="a forward pass gives NaN",
        limit="aborted with exit 3 before the update, the last checkpoint complete and bitwise "
        "correct",
        advice="a batch that gives NaN reaches the weights or a checkpoint: the weights would be "
        "lost",
    ),
    Drill(
        name="sigterm",
        module="fault_drills",
        happens="the supervisor gets SIGTERM, as from a scheduler",
        limit="exit 130, a checkpoint of the step it ended at, final weights bitwise the same "
        "after resuming",
        advice="a scheduler's time limit would lose work: the ranks must save when they get the "
        "signal",
        not_proven="that the scheduler's grace period is long enough for the real checkpoint",
    ),
    Drill(
        name="disk_full",
        module="fault_drills",
        happens=f"no file may grow beyond {FULL_DISK_BYTES // 1024} KiB (`RLIMIT_FSIZE`)",
        limit="an error that names the disk, the older checkpoint complete, final weights bitwise "
        "the same once there "
        "is free space",
        advice="a full disk would cost more than the time since the last save: check the save's "
        "error handling",
        not_proven="the ways a network file system fails",
    ),
    Drill(
        name="corrupt_newest",
        module="resume_drills",
        happens="a bit flipped in the newest checkpoint",
        limit="the one before is used, the damaged one set aside, final weights bitwise the same",
        advice="a damaged checkpoint was loaded or stopped the run: checkpoints must be hashed "
        "before they are read",
    ),
    Drill(
        name="corrupt_all",
        module="resume_drills",
        happens="a bit flipped in each checkpoint",
        limit="refused with exit 5, every checkpoint named and kept, nothing trained",
        advice="without a good checkpoint the run started over or resumed from a bad one: it must "
        "refuse",
    ),
)
DRILLS: dict[str, Drill] = {drill.name: drill for drill in _DRILLS}
"""In the order they are held."""

_RESUMES = (
    "it goes on by `launch.resume_arguments`, and its validation loss is within 1 % of the "
    "uninterrupted run's"
)
_RESUME = (
    "see that the trainer saves often enough, and that launch.resume_arguments make it go on "
    "from there"
)
OWN_DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (
        Drill(
            name="own_run",
            module="own_drills",
            happens="the command runs at the base width, for `proxy.num_steps`",
            limit="it ends with exit code 0 and logs a validation loss at its last step",
            advice="run the command by hand with the values of run.json in the run's folder",
        ),
        Drill(
            name="own_killed",
            module="own_drills",
            happens="every process of the command gets SIGKILL",
            limit=f"one restart: {_RESUMES}",
            advice=_RESUME,
            not_proven="the loss of a machine",
        ),
        Drill(
            name="own_stopped",
            module="own_drills",
            happens="`launch` gets SIGTERM, as from a scheduler, then starts again",
            limit=f"it ends in order; started again {_RESUMES}",
            advice=_RESUME,
            not_proven="that a scheduler's grace period is long enough for the real checkpoint",
        ),
        Drill(
            name="own_hang",
            module="own_drills",
            happens="every process of the command gets SIGSTOP",
            limit=f"ended after {OWN_HANG_SECONDS:g} s without a step, one restart: {_RESUMES}",
            advice=_RESUME,
            not_proven="that so short a limit suits the real run: see `launch --hang-seconds`",
        ),
        Drill(
            name="own_cut_log",
            module="own_drills",
            happens="the log's last line is cut while the run is stopped",
            limit=f"started again {_RESUMES}",
            advice="write the log line by line, and begin a new line when resuming",
        ),
        Drill(
            name="own_divergence",
            module="own_drills",
            happens="the learning rate is a million times the frozen one",
            limit="`launch` ends the run with exit 3, at a loss that is not finite",
            advice="log the training loss also where it is NaN, and let the run go on or end after "
            "that",
        ),
    )
}
"""Of a command (`proxy.command`), in the order they are held."""


def judged(name: str, holds: bool, said: str, seen: dict[str, Json]) -> DrillResult:
    """Passed if it holds, failed with the drill's advice if not."""
    drill = (DRILLS | OWN_DRILLS)[name]
    return DrillResult(
        name=name,
        outcome="passed" if holds else "failed",
        said=said,
        seen={**seen},
        limit=drill.limit,
        advice="" if holds else drill.advice,
    )
