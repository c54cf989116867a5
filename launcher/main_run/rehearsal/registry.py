"""The drills of a rehearsal: for each its name, what happens in it, the condition to pass, and
advice if it fails. The records of their results are here too.

A drill is an entry of `DRILLS`, or of `USER_DRILLS` for a user's own trainer, and a function that
takes a `RehearsalFolder` or a `UserRehearsal`. No other list of drills exists: the verb's `--only`
and `--json`, the attestation, `launch`, and the reference page read these entries. This module does
not import torch, which takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from forerun._launcher.main_run.supervisor.hang_detector import FLOOR_SECONDS
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_duration
from forerun._proxies.core.spec import Dtype

if TYPE_CHECKING:
    from forerun._launcher.main_run.rehearsal.rehearsal_folder import RehearsalFolder
    from forerun._launcher.main_run.rehearsal.user_drills import UserRehearsal

Outcome = Literal["passed", "failed"]

HANG_SECONDS, USER_HANG_SECONDS = 10.0, 30.0
"""Seconds without a step after which the supervisor ends the job in a hang drill. The first is for
the embedded trainer's small copy; the real shape (`--full`) has the limit of a real launch,
`FLOOR_SECONDS`. The second is for a user's own trainer."""
CUTS = (3, 11)
"""Steps after which the cut run is stopped and resumed: in the warmup, and near the end, of the
schedule that `scaled_config.shorten_schedule` makes."""
PROXY_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""Maximum difference between a step's loss and the loss in the proxies' engine, in nats. The engine
adds in another order, and runs a user's model in bfloat16 under autocast, which casts elsewhere."""
FULL_DISK_BYTES = 48 * 1024
"""Maximum size of a file in the drill of a full disk: less than a rank's part of a small
checkpoint, more than the metrics of the drill's few steps."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation of a drill."""

    passed: bool
    sentence: str
    """Sentence on what happened."""
    seen: dict[str, Json] = field(default_factory=dict)
    """Measurements by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """The result of a drill, as it is attested."""

    name: str
    outcome: Outcome
    said: str
    """Sentence on what happened."""
    seen: dict[str, object]
    """Measurements of the drill by name."""
    limit: str
    """The condition to pass."""
    advice: str = ""
    """Advice on what to do; empty if the drill passed."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalAttestation:
    """The attestation of a rehearsal."""

    outcome: Outcome
    copy: dict[str, object]
    """The config that was trained in the drills, and the one for which it stands."""
    machine: dict[str, object]
    seconds: float
    drills: tuple[DrillResult, ...]

    @property
    def exit_code(self) -> int:
        """0 if all drills passed, else 3."""
        return 0 if self.outcome == "passed" else 3

    def list_drills(self, outcome: Outcome) -> list[str]:
        """Return the names of the drills with an outcome."""
        return [drill.name for drill in self.drills if drill.outcome == outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill."""

    name: str
    function: str
    """Module of `forerun._launcher.main_run.rehearsal` and function that run it, as
    `module:function`.
    """
    happens: str
    """Sentence on what is done to the run."""
    limit: str
    """The condition to pass."""
    advice: str
    """Advice on what to do if it fails."""
    not_proven: str = ""
    """Claim that a passed drill does not prove; empty if there is none to mention."""

    def run(self, rehearsal: RehearsalFolder | UserRehearsal) -> Observation:
        """Run the drill."""
        module_name, _, function_name = self.function.partition(":")
        module = importlib.import_module(f"forerun._launcher.main_run.rehearsal.{module_name}")
        observation: Observation = getattr(module, function_name)(rehearsal)
        return observation


_DRILLS = (
    Drill(
        name="loss",
        function="resume_drills:compare_loss",
        happens="the copy is trained here and in the proxies' engine; `--full` has no proxy to "
        "compare with",
        limit=f"within {PROXY_NATS['float32']:g} (bfloat16: {PROXY_NATS['bfloat16']:g}) nats of "
        "the proxy at every step and in validation, and falling; `--full`: first loss within 1 nat "
        "of ln(vocabulary), last below first, validation loss within 1 nat of the last",
        advice="the trainer trains another model than the proxies did: compare weights, forward "
        "multipliers and data",
        not_proven="anything about the loss of the real size",
    ),
    Drill(
        name="resume",
        function="resume_drills:cut_and_resume",
        happens=f"the run is cut after {', '.join(map(str, CUTS))} updates and resumed in new "
        "processes; control runs resume wrongly (moments dropped, data off by one batch)",
        limit="weights and moments bitwise equal to the uninterrupted run's; every wrong resume "
        "differs",
        advice="resuming changes the run: check which of weights, moments, step and data order is "
        "not restored",
    ),
    Drill(
        name="killed_rank",
        function="fault_drills:kill_rank",
        happens="a rank gets SIGKILL between gradients and update",
        limit="one restart, every weight and moment bitwise equal to the uninterrupted run's",
        advice="the supervisor did not restore the run: see torchrun.log in the run's folder",
        not_proven="the loss of a machine",
    ),
    Drill(
        name="hang",
        function="fault_drills:hang_rank",
        happens="a rank hangs",
        limit=f"the supervisor kills the job after {HANG_SECONDS:g} s without a step (`--full`: "
        f"{format_duration(FLOOR_SECONDS)}), one restart, final weights bitwise the same",
        advice="a hang would last until somebody looks: the supervisor's step timeout did not "
        "detect it",
        not_proven="that so short a timeout suits the real run: see `launch --hang-seconds`",
    ),
    Drill(
        name="nan",
        function="fault_drills:inject_nan",
        happens="a forward pass gives NaN",
        limit="aborted with exit 3 before the update, the last checkpoint complete and bitwise "
        "correct",
        advice="a batch that gives NaN reaches the weights or a checkpoint: the weights would be "
        "lost",
    ),
    Drill(
        name="sigterm",
        function="fault_drills:send_sigterm",
        happens="the supervisor gets SIGTERM, as from a scheduler",
        limit="exit 130, a checkpoint of the step it ended at, final weights bitwise the same "
        "after resuming",
        advice="a scheduler's time limit would lose work: the ranks must save when they get the "
        "signal",
        not_proven="that the scheduler's grace period is long enough for the real checkpoint",
    ),
    Drill(
        name="disk_full",
        function="fault_drills:fill_disk",
        happens=f"no file may grow beyond {FULL_DISK_BYTES // 1024} KiB (`RLIMIT_FSIZE`)",
        limit="an error that names the disk, the older checkpoint complete, final weights bitwise "
        "the same once there is free space",
        advice="a full disk would cost more than the time since the last save: check the save's "
        "error handling",
        not_proven="the ways a network file system fails",
    ),
    Drill(
        name="corrupt_newest",
        function="resume_drills:corrupt_newest",
        happens="a bit flipped in the newest checkpoint",
        limit="the one before is used, the damaged one set aside, final weights bitwise the same",
        advice="a damaged checkpoint was loaded or stopped the run: checkpoints must be hashed "
        "before they are read",
    ),
    Drill(
        name="corrupt_all",
        function="resume_drills:corrupt_all",
        happens="a bit flipped in each checkpoint",
        limit="refused with exit 5, every checkpoint named and kept, nothing trained",
        advice="without a good checkpoint the run started over or resumed from a bad one: it must "
        "refuse",
    ),
)
DRILLS: dict[str, Drill] = {drill.name: drill for drill in _DRILLS}
"""Drills of the embedded trainer, in the order in which they run."""

_RESUME_LIMIT = (
    "it goes on by `launch.resume_arguments`, and its validation loss is within 1 % of the "
    "uninterrupted run's"
)
_RESUME_ADVICE = (
    "see that the trainer saves often enough, and that launch.resume_arguments make it go on "
    "from there"
)
_USER_DRILLS = (
    Drill(
        name="own_run",
        function="user_drills:run_undisturbed",
        happens="the command runs at the base width, for `proxy.num_steps`",
        limit="it ends with exit code 0 and logs a validation loss at its last step",
        advice="run the command by hand with the values of run.json in the run's folder",
    ),
    Drill(
        name="own_killed",
        function="user_drills:kill_command",
        happens="every process of the command gets SIGKILL",
        limit=f"one restart: {_RESUME_LIMIT}",
        advice=_RESUME_ADVICE,
        not_proven="the loss of a machine",
    ),
    Drill(
        name="own_stopped",
        function="user_drills:interrupt_command",
        happens="`launch` gets SIGTERM, as from a scheduler, then starts again",
        limit=f"it ends in order; started again {_RESUME_LIMIT}",
        advice=_RESUME_ADVICE,
        not_proven="that a scheduler's grace period is long enough for the real checkpoint",
    ),
    Drill(
        name="own_hang",
        function="user_drills:hang_command",
        happens="every process of the command gets SIGSTOP",
        limit=f"ended after {USER_HANG_SECONDS:g} s without a step, one restart: {_RESUME_LIMIT}",
        advice=_RESUME_ADVICE,
        not_proven="that so short a limit suits the real run: see `launch --hang-seconds`",
    ),
    Drill(
        name="own_cut_log",
        function="user_drills:cut_log",
        happens="the log's last line is cut while the run is stopped",
        limit=f"started again {_RESUME_LIMIT}",
        advice="write the log line by line, and begin a new line when resuming",
    ),
    Drill(
        name="own_divergence",
        function="user_drills:diverge",
        happens="the learning rate is a million times the frozen one",
        limit="`launch` ends the run with exit 3, at a loss that is not finite",
        advice="log the training loss also where it is NaN, and let the run go on or end after "
        "that",
    ),
)
USER_DRILLS: dict[str, Drill] = {drill.name: drill for drill in _USER_DRILLS}
"""Drills of a user's own trainer (`proxy.command`), in the order in which they run."""
