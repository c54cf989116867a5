"""What a trainer itself makes of an export, held against the decision: parameter by parameter, step by step.

Beside its files an exporter writes `prove.py`. Run by the trainer's interpreter it reads them with the trainer's own
parser, builds the trainer's own model, optimizer and scheduler, and prints one `TrainerView` as JSON, its last line of
output. `compare` knows no trainer: it needs the view, and what our parameters are called there.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from launcher.exporters.fidelity import Exporter, exporter
from launcher.frozen import Decision, ParameterGroup, assign_groups
from proxies import canon
from proxies.model import parameter_shapes
from proxies.schedule import Schedule, lr_multiplier
from proxies.shape import Shape

PROVE_FILE = "prove.py"
TOLERANCE = 1e-9
"""Of a number, and of the peak for a learning rate: trainers multiply in other orders. A wrong rule differs by more."""
MAX_STEPS = 4096
"""A longer run is compared at about as many steps, all those around a bend among them."""
AROUND_BENDS = 64
INSTALLED = Path(".venv-trainers")
"""Where `make trainers` puts interpreters, relative to the folder it runs in."""


class ProofError(ValueError):
    """A trainer that could not be asked, or whose answer is none. `problems` lists all of it."""

    def __init__(self, trainer: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{trainer} proof: " + "; ".join(problems))


class Provable(Exporter, Protocol):
    """An exporter whose `prove.py` tells what its trainer made of the files."""

    def parameter_names(self, shape: Shape) -> dict[str, str]:
        """Each of our parameters' name in the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWith:
    """What the trainer's optimizer holds for one of its parameters."""

    num_elements: int
    """Of the whole parameter, not of a rank's part."""
    learning_rate: float
    """At the schedule's peak, absolute."""
    weight_decay: float
    """A step multiplies the weight by 1 - lr * weight_decay."""
    eps: float
    beta1: float
    beta2: float
    rates: int
    """Its row in `TrainerView.rates`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerView:
    """A run as the trainer understood it."""

    trainer: str
    version: str
    """As installed."""
    num_steps: int
    batch_tokens: int
    clip_norm: float | None
    """Maximal norm of the whole gradient; None: it is not clipped."""
    steps: tuple[int, ...]
    """Updates, counted from 0, at which the rates were read."""
    rates: tuple[tuple[float, ...], ...]
    """Learning rates that the trainer's scheduler set for those updates; one row per optimizer group."""
    parameters: dict[str, TrainedWith]
    """By the trainer's own names; a matrix shared by two layers once."""


def proof_steps(schedule: Schedule) -> tuple[int, ...]:
    """Updates at which a scheduler is read: all, or of a long run some thousand, those around its bends among them."""
    num_steps = schedule.num_steps
    if num_steps <= MAX_STEPS:
        return tuple(range(num_steps))
    bends = (0, schedule.warmup_steps, num_steps - schedule.decay_steps, num_steps)
    found = {round(i * (num_steps - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
    for bend in bends:
        found.update(range(max(0, bend - AROUND_BENDS), min(num_steps, bend + AROUND_BENDS)))
    return tuple(sorted(found))


def compare(decision: Decision, view: TrainerView, names: Mapping[str, str]) -> list[str]:
    """Where a trainer's run is not the frozen one; empty if nowhere.

    `names` gives each of our parameters' name in the trainer; several may share one (a fused matrix, if they are
    trained with the same numbers).

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    assigned = assign_groups(decision.groups, list(parameter_shapes(decision.shape)))
    problems = _run_differences(decision, view) + _parameter_differences(decision, view, names)
    for name, group in assigned.items():
        if (held := view.parameters.get(names.get(name, ""))) is not None:
            problems += [f"{names[name]}: {said}" for said in _number_differences(group, held)]
    return problems + _rate_differences(decision, view, {names[n]: g for n, g in assigned.items() if n in names})


def _run_differences(decision: Decision, view: TrainerView) -> list[str]:
    told = {
        "num_steps": (view.num_steps, decision.learning_rate.schedule.num_steps),
        "batch_tokens": (view.batch_tokens, decision.batch_tokens),
        "clip_norm": (view.clip_norm, decision.clip_norm),
    }
    return [f"{field} is {theirs}, frozen as {ours}" for field, (theirs, ours) in told.items() if theirs != ours]


def _parameter_differences(decision: Decision, view: TrainerView, names: Mapping[str, str]) -> list[str]:
    sizes: dict[str, int] = {}
    problems = []
    for name, size in parameter_shapes(decision.shape).items():
        if name in names:
            sizes[names[name]] = sizes.get(names[name], 0) + math.prod(size)
        else:
            problems.append(f"{name} has no name in {view.trainer}")
    problems += [f"the optimizer lacks {name}" for name in sizes if name not in view.parameters]
    problems += [f"the optimizer trains {name}, which is not frozen" for name in view.parameters if name not in sizes]
    problems += [
        f"{name} has {held.num_elements} elements, frozen with {sizes[name]}"
        for name, held in view.parameters.items()
        if name in sizes and held.num_elements != sizes[name]
    ]
    return problems


def _number_differences(group: ParameterGroup, held: TrainedWith) -> list[str]:
    pairs = (
        ("learning_rate", held.learning_rate, group.learning_rate),
        ("weight_decay", held.weight_decay, group.weight_decay),
        ("eps", held.eps, group.eps),
        ("beta1", held.beta1, group.beta1),
        ("beta2", held.beta2, group.beta2),
    )
    return [
        f"{field} is {theirs!r}, frozen as {ours!r}"
        for field, theirs, ours in pairs
        if not math.isclose(theirs, ours, rel_tol=TOLERANCE)
    ]


def _rate_differences(decision: Decision, view: TrainerView, groups: Mapping[str, ParameterGroup]) -> list[str]:
    """Of each parameter the first step whose rate is another, and how many more there are."""
    schedule = decision.learning_rate.schedule
    wanted_steps = proof_steps(schedule)
    if view.steps != wanted_steps or any(len(row) != len(view.steps) for row in view.rates):
        return [f"rates are told at {len(view.steps)} steps: {len(wanted_steps)} other ones are wanted"]
    shares = [lr_multiplier(schedule, step) for step in view.steps]
    problems = []
    for name, held in view.parameters.items():
        if name not in groups:
            continue
        if not 0 <= held.rates < len(view.rates):
            problems.append(f"{name}: there is no row {held.rates} of learning rates")
            continue
        peak = groups[name].learning_rate
        wrong = [
            (step, rate, peak * share)
            for step, rate, share in zip(view.steps, view.rates[held.rates], shares, strict=True)
            if not math.isclose(rate, peak * share, rel_tol=TOLERANCE, abs_tol=TOLERANCE * peak)
        ]
        if wrong:
            step, rate, frozen = wrong[0]
            more = f", and at {len(wrong) - 1} more of {len(shares)} steps" if len(wrong) > 1 else ""
            problems.append(f"{name}: the rate at step {step} is {rate!r}, frozen as {frozen!r}{more}")
    return problems


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
    try:
        done = subprocess.run(
            [str(python), PROVE_FILE],
            cwd=folder,
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProofError(trainer, [f"{python} {PROVE_FILE}: {error}"]) from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()[-5:] or ["no word why"]
        raise ProofError(trainer, [f"{python} {PROVE_FILE} ended with {done.returncode}: " + " | ".join(said)])
    try:
        return canon.decode(TrainerView, canon.parse(lines[-1].encode()), "view")
    except canon.CanonError as error:
        raise ProofError(trainer, [f"{PROVE_FILE} printed no view: {error}"]) from error


def prove(decision: Decision, trainer: str, version: str, python: Path, lying: Path | None = None) -> list[str]:
    """Export anew into a folder that goes away, ask the trainer there, and compare; empty if all is equal.

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
        view = ask(trainer, python, Path(scratch))
    problems += compare(decision, view, room.parameter_names(decision.shape))
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
