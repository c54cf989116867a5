"""The drills: each one's name, what happens in it, what passes, and what to do if it does not. No torch.

A drill is an entry of `DRILLS` and a function of that name, of a `Stage`, in the module that the entry names. The
verb's `--only`, its `--json`, the attestation, `launch` and the reference page read the entry; nothing else lists them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from launcher.frozen.attestations import CheckOutcome
from proxies.core.canon import Json
from proxies.core.spec import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.rehearsal.stage import Stage

Outcome = Literal["passed", "failed", "skipped"]

HANG_SECONDS = 10.0
"""Without a step, after which the supervisor of the hang drill kills the job."""
CUTS = (3, 7, 11)
"""Steps done at which the run that is cut ends and begins again: in the warmup, after it, and near the end."""
LOSS_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.05}
"""That another number of ranks may make of a step's loss: sums in another order round otherwise."""
WEIGHTS_SHARE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""And of the weights, as a share of their norm: Adam makes whole steps of gradients that are all rounding."""
PROXY_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""That the proxies' engine may be away at a step: it sums in another order, and casts to bfloat16 elsewhere."""
SLOWEST_FACTOR = 1.25
"""Of the estimate's step, beyond its own interval."""
MOST_READ_BYTES = 8 * 2**30
"""Of a corpus that is read whole by the data drill; of a larger one the ends of every shard are."""
FULL_DISK_BYTES = 48 * 1024
"""No file may grow beyond it: less than a rank's part of a small checkpoint, more than a line of metrics."""


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
    needed: bool = True
    """Whether a rehearsal without it is no whole one."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attested:
    """What the attestation of a rehearsal holds."""

    outcome: CheckOutcome
    """Cannot tell: a drill that is needed did not take place."""
    not_asked_for: tuple[str, ...]
    """Drills that were left out on request: then it is a rehearsal in part."""
    copy: dict[str, object]
    """What was trained in the drills, and which config it stands for."""
    machine: dict[str, object]
    seconds: float
    drills: tuple[DrillResult, ...]

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed, 4 cannot tell."""
        return {"passed": 0, "failed": 3, "cannot_tell": 4}[self.outcome]

    def named(self, outcome: Outcome) -> list[str]:
        """The drills that ended so."""
        return [drill.name for drill in self.drills if drill.outcome == outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill."""

    name: str
    module: str
    """Of `launcher.rehearsal`, that has the function of the same name."""
    num_starts: int
    """Starts of a job that it takes, the shared ones counted where they are first asked for."""
    happens: str
    limit: str
    """What passes."""
    advice: str
    """What to do, where it does not."""
    not_proven: str = ""

    def hold(self, stage: Stage) -> DrillResult:
        """Run it."""
        function = getattr(importlib.import_module(f"launcher.rehearsal.{self.module}"), self.name)
        return cast("Callable[[Stage], DrillResult]", function)(stage)


def _limits(limits: dict[Dtype, float]) -> str:
    return f"{limits['float32']:g} (bfloat16: {limits['bfloat16']:g})"


_DRILLS = (
    Drill(
        name="echo", module="config_drills", num_starts=1,
        happens="the real model's optimizer is built without memory; the copy's live rates are written down at every "
        "update",
        limit="groups, and rates at the start, the warmup's end, the middle and the end, equal the frozen numbers to "
        "the last bit",
        advice="the trainer would run other numbers than were frozen: freeze again with this version",
        not_proven="that the numbers are good",
    ),
    Drill(
        name="two_ranks", module="resume_drills", num_starts=5,
        happens="the run on two ranks, on one, and on two again",
        limit=f"within {_limits(LOSS_NATS)} nats of one rank at every step; bitwise against itself",
        advice="the ranks do not train one batch: look at how it is dealt out and how gradients are averaged",
        not_proven="the real number of ranks",
    ),
    Drill(
        name="loss", module="config_drills", num_starts=0,
        happens="the copy's run in the proxies' own engine; of the real shape (`--full`) no proxy was trained",
        limit=f"within {_limits(PROXY_NATS)} nats of the proxy at every step and in validation, and falling; `--full`: "
        "first within 1 nat of ln(vocabulary), last below first, validation within 1 nat of the last",
        advice="the trainer does not train what the proxies trained: compare weights, forward multipliers and data",
        not_proven="anything about the loss of the real size",
    ),
    Drill(
        name="resume", module="resume_drills", num_starts=1,
        happens=f"cut after {', '.join(map(str, CUTS))} updates and resumed in new processes; and resumed wrongly "
        "(data of another seed, moments dropped, data off by one batch)",
        limit="weights and moments bitwise the uninterrupted run's; every wrong resume differs",
        advice="a resumed run is another run: look at what of weights, moments, step and data order is not restored",
    ),
    Drill(
        name="killed_rank", module="fault_drills", num_starts=2,
        happens="SIGKILL between gradients and update",
        limit="one restart, every weight and moment bitwise that of the uninterrupted run",
        advice="the supervisor did not bring the run back to where it was: see torchrun.log in the run's folder",
        not_proven="the loss of a machine",
    ),
    Drill(
        name="hang", module="fault_drills", num_starts=4,
        happens="a rank stands still",
        limit=f"the supervisor kills the job after {HANG_SECONDS:g} s without a step (`--full`: a minute), one "
        "restart, bitwise the same end",
        advice="a hang would stand for as long as nobody looks: the supervisor's watch on steps did not see it",
        not_proven="that so short a time suits the real run: see `launch --hang-seconds`",
    ),
    Drill(
        name="nan", module="fault_drills", num_starts=1,
        happens="a forward pass gives NaN",
        limit="aborted with exit 3 before the update, the last checkpoint whole and bitwise right",
        advice="a batch that gives NaN is stepped on, or saved: the weights would be lost with it",
    ),
    Drill(
        name="spike", module="fault_drills", num_starts=1,
        happens="two batches on which the loss leaps below the run's own ceiling; only where the policy has rollbacks "
        "(`launch.spike_rollbacks`)",
        limit="gone back before it once, as many batches skipped as frozen, no skipped window drawn, recorded in "
        "`rollbacks.json`, chronicle and metrics, trained to the end; a run that goes back and skips nothing is told "
        "from it",
        advice="a spike would not be answered as frozen: see rollbacks.json and chronicle.jsonl in the run's folder, "
        "or plan with launch.spike_rollbacks = 0",
        not_proven="that the real detector sees a real spike: the copy's window is 8 steps, its limit half way to the "
        "planted loss",
    ),
    Drill(
        name="sigterm", module="fault_drills", num_starts=2,
        happens="SIGTERM to the supervisor, as a scheduler's",
        limit="exit 130, a checkpoint of the step it ended at, bitwise the same end after resuming",
        advice="a scheduler's end of time would lose work: the ranks must save when they are told to end",
        not_proven="that the scheduler's grace is long enough for the real checkpoint",
    ),
    Drill(
        name="disk_full", module="fault_drills", num_starts=2,
        happens=f"no file may grow beyond {FULL_DISK_BYTES // 1024} KiB (`RLIMIT_FSIZE`)",
        limit="an end that names the disk, the older checkpoint whole, bitwise the same end with room again",
        advice="a full disk would cost more than the time since the last save: look at the save's error handling",
        not_proven="a network file system's ways to fail",
    ),
    Drill(
        name="corrupt_newest", module="resume_drills", num_starts=1,
        happens="a bit flipped in the newest checkpoint",
        limit="the one before is used, the damaged one kept aside, bitwise the same end",
        advice="a damaged checkpoint is loaded, or stops the run: checkpoints must be hashed before they are read",
    ),
    Drill(
        name="corrupt_all", module="resume_drills", num_starts=1,
        happens="a bit flipped in each checkpoint",
        limit="refused with exit 5, every checkpoint named and kept, nothing trained",
        advice="without a good checkpoint the run begins anew or resumes from a bad one: it must refuse",
    ),
    Drill(
        name="world_size", module="resume_drills", num_starts=1,
        happens="two ranks to one after 8 updates, and one to two",
        limit=f"within {_limits(LOSS_NATS)} nats at every step, weights within {_limits(WEIGHTS_SHARE)} of their norm "
        "at the end",
        advice="do not change the number of ranks of this run; its checkpoints or its data order depend on it",
    ),
    Drill(
        name="data", module="data_drill", num_starts=0,
        happens=f"the real corpus's manifest, hashes (up to {MOST_READ_BYTES // 2**30} GiB), the first and last token "
        "of every shard; and every window that the copy's runs drew, looked up in the shards' bytes",
        limit="all readable, every id below the vocabulary, each window once, none skipped, the same across resumes",
        advice="the corpus, or how it is read, is not what was frozen: `forerun tokenize` writes it anew",
        not_proven="that the text is good; of a larger corpus only the shards' ends are read (each rank reads the rest "
        "when it starts)",
    ),
    Drill(
        name="budget", module="config_drills", num_starts=0,
        happens="the time of a step, with `--full` on GPUs; skipped elsewhere",
        limit=f"at most {SLOWEST_FACTOR:g} times the slow end of `forerun estimate FROZEN`",
        advice="the run will take longer, and cost more, than was planned: estimate it anew",
    ),
)  # fmt: skip
DRILLS: dict[str, Drill] = {drill.name: drill for drill in _DRILLS}
"""In the order they are held."""


def judged(name: str, holds: bool, said: str, seen: dict[str, Json]) -> DrillResult:
    """Passed if it holds, failed with the drill's advice if not."""
    drill = DRILLS[name]
    return DrillResult(
        name=name, outcome="passed" if holds else "failed", said=said, seen={**seen}, limit=drill.limit,
        advice="" if holds else drill.advice,
    )  # fmt: skip


def skipped(name: str, said: str, advice: str, seen: dict[str, Json] | None = None) -> DrillResult:
    """Not held, and a rehearsal without it is a whole one."""
    return DrillResult(
        name=name, outcome="skipped", said=said, seen={**(seen or {})}, limit=DRILLS[name].limit, advice=advice,
        needed=False,
    )  # fmt: skip
