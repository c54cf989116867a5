"""A study: a plan, a corpus, and a folder, with the runs that each stage asks for. No torch, no
Ray.

Every list of runs is a pure function of the plan and of earlier results, so a resumed study asks
for exactly the runs that an uninterrupted one would have asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.plan.calibration_records import ModeRequest, Part
from launcher.plan.plan import Plan
from proxies.core import canon
from proxies.core.errors import ExitCode, InputError
from proxies.core.flops import count_params
from proxies.core.hyperparameters import LEARNING_RATE, Hparams, warmup_of, with_warmup
from proxies.core.programs import Factory
from proxies.core.rules import Parametrization, named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from scaling_fits.allocation.shapes import (
    MOST_PARAMS,
    ShapeRequest,
    Template,
    WidthCount,
    choose_shape,
    counted_at,
    per_layer,
)
from sweeps.search.space import Params, SearchSpace

if TYPE_CHECKING:
    from proxies.data.tokens import Manifest

PLAN_FILE = "plan.toml"
SEMANTICS = 5
"""Version of the meaning of a spec's numbers: model, initial values, data order, validation
windows. A release that trains another model from the same spec raises it, so that no study mixes
the two.
"""
SEARCH_STAGE = "search"
MOST_TRIALS = 1000
"""Maximum number of trial specs that a study keeps in memory, at 1.6 kB each."""
DEPTH = "depth"
"""Name of the coordinate check over depths. Checks over widths have the name of their
parametrization.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The question of a study, its data, and the folder of its records."""

    plan: Plan
    study_dir: Path
    corpus: Path | None
    """Folder of the corpus; None if a command has its own data."""
    manifest: Manifest
    code_dir: Path
    """Folder of the factory's module, or the folder in which the command runs."""
    factory: Factory | None = None
    chosen: Mapping[str, Numerics] = field(default_factory=dict)
    """Modes that its calibration chose, by `ModeRequest.key`; empty before the ledger has them."""
    counts: Mapping[int, WidthCount] = field(default_factory=dict)
    """Parameters of the user's own model by depth, as the ledger has them; empty to count as the
    shape's family does.
    """
    _trials: dict[tuple[object, ...], RunSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of the last trials, at most `MOST_TRIALS`, because each is asked for often."""
    _trial_ids: dict[bytes, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of the ids of all trials, by 16 bytes of a hash. A search has thousands of trials,
    whose specs would not all fit.
    """

    def command_line(self, verb: str) -> str:
        """Return the command that runs a stage of this study from its recorded plan; `run` runs all
        stages.
        """
        plan, folder = (
            shlex.quote(str(path)) for path in (self.study_dir / PLAN_FILE, self.study_dir)
        )
        return f"forerun {verb} {plan} --study {folder}"

    @property
    def question(self) -> dict[str, canon.Json]:
        """Record 0 of the ledger: the plan without machine settings, the data, and the semantics of
        a run.
        """
        return {
            **self.plan.question(),
            "data_id": self.manifest.data_id,
            "factory_sha256": self.factory.source_sha256 if self.factory else "",
            "semantics": SEMANTICS,
        }

    def shape(self, width: int) -> Shape:
        """Return the shape at a width, with the corpus's vocabulary."""
        return self.plan.shape(width, self.manifest.vocab_size)

    @property
    def base_shape(self) -> Shape:
        """Shape at which hyperparameters are searched."""
        return self.shape(self.plan.proxy.base_width)

    @property
    def replays_winner(self) -> bool:
        """Whether the winning trial is run again elsewhere; never if a user's command trains."""
        return self.plan.search.replay_winner and self.plan.command is None

    @property
    def space(self) -> SearchSpace:
        """Search space at the start of the search."""
        return self.plan.space

    @property
    def has_control(self) -> bool:
        """Whether a control with the standard parametrization runs. A study of the standard
        parametrization needs none.
        """
        proxy = self.plan.proxy
        command = self.plan.command  # a trainer without {parametrization} cannot run the control
        is_passed = command is None or command.reaches("parametrization")
        return (
            proxy.parametrization != "sp" and is_passed and bool(self.plan.transfer.control_widths)
        )

    @property
    def target_params_guess(self) -> float:
        """Number of parameters of the target before any fit, at 20 tokens per parameter
        (Chinchilla, arXiv 2203.15556).
        """
        return min(max(math.sqrt(self.plan.target.budget_flops / 120), 1.0), MOST_PARAMS)

    @property
    def target_shape_guess(self) -> Shape:
        """Shape of the target before any fit, at 20 tokens per parameter (Chinchilla, arXiv
        2203.15556).
        """
        request = ShapeRequest(params=self.target_params_guess, template=self.shape_template)
        return choose_shape(request).option.shape

    @property
    def shape_template(self) -> Template:
        """Everything that the plan fixes about the main run's shape: all but its width and, if the
        ladder varies it, its depth.
        """
        depth = self.plan.target_num_layers
        several = len(self.counts) > 1
        return Template(
            shape=self.base_shape.at_depth(depth),
            width_multiple=self.plan.target.width_multiple,
            tensor_parallel=self.plan.launch.tensor,
            count=counted_at(self.counts, depth),
            width_per_layer=self.plan.width_per_layer or None,
            per_layer=per_layer(self.counts) if self.plan.width_per_layer and several else None,
        )

    def num_params(self, shape: Shape) -> int:
        """Return the number of parameters N of a shape, as the laws and the budget 6 N D count
        it.
        """
        counted = counted_at(self.counts, shape.num_layers)
        return count_params(shape).total if counted is None else counted.params(shape.width)

    def hparams(self, point: Params) -> Hparams:
        """Return the base-width hyperparameters: those of the point, and the plan's for the
        others.
        """
        own = [axis.value(name, point.get(name)) for name, axis in self.plan.search.own.items()]
        return Hparams.at(point, self.plan.proxy.hyperparameters, own)

    def asked(self, part: Part, shape: Shape, batch_tokens: int) -> ModeRequest:
        """Return the mode in which runs of a shape and batch compute, and the parts of it that a
        calibration chooses.
        """
        given, choices = self.plan.numerics(part), self.plan.choices(part)
        return ModeRequest(
            part=part, shape=shape, batch_tokens=batch_tokens, given=given, open=choices
        )

    def numerics(self, part: Part, shape: Shape, batch_tokens: int) -> Numerics:
        """Return the mode of computing that the plan sets or the calibration chose."""
        request = self.asked(part, shape, batch_tokens)
        return self.chosen.get(request.key, request.given) if request.open else request.given

    @property
    def control(self) -> Parametrization:
        """The plan's parametrization without scaling; both are the same at the base shape."""
        return self.plan.parametrization.unscaled

    def run(
        self,
        *,
        shape: Shape,
        point: Params,
        seed: int,
        num_steps: int,
        batch_tokens: int | None = None,
        parametrization: Parametrization | None = None,
        part: Part = "proxy",
    ) -> RunSpec:
        """Return one run of this study. `batch_tokens`: None for the proxies' batch."""
        proxy, rules = self.plan.proxy, parametrization or self.plan.parametrization
        hparams = self.hparams(point)
        needs_tokens = rules.needs_tokens or hparams.needs_tokens
        return RunSpec(
            shape=shape,
            base_shape=self.base_shape,
            parametrization=rules,
            hparams=hparams,
            schedule=self.plan.schedule(num_steps, warmup_of(point)),
            batch_tokens=batch_tokens or proxy.batch_tokens,
            data_id=self.manifest.data_id,
            seed=seed,
            numerics=self.numerics(part, shape, batch_tokens or proxy.batch_tokens),
            base_batch_tokens=proxy.batch_tokens if needs_tokens else None,
            base_num_tokens=base_duration(self) if needs_tokens else None,
            optimizer=proxy.optimizer,
            factory=self.factory,
            command=self.plan.command,
        )

    def trial(self, point: Params, replicate: int = 0) -> RunSpec:
        """Return a trial of the search; or its replicate (numbered from 1), which has another
        seed.
        """
        key = (replicate, *sorted(point.items()))
        if key not in self._trials:
            if len(self._trials) >= MOST_TRIALS:
                self._trials.clear()
            seed, num_steps = self.plan.search.seed + replicate, self.plan.proxy.num_steps
            self._trials[key] = self.run(
                shape=self.base_shape, point=point, seed=seed, num_steps=num_steps
            )
        return self._trials[key]

    def trial_id(self, point: Params) -> str:
        """Return the id of the trial at a point; it is computed once."""
        key = hashlib.sha256(repr(sorted(point.items())).encode()).digest()[:16]
        if key not in self._trial_ids:
            self._trial_ids[key] = self.trial(point).id
        return self._trial_ids[key]

    def check_runs(self, parametrization: Parametrization) -> list[list[RunSpec]]:
        """Return the runs of the coordinate check by width."""
        return self._build_check_runs(
            parametrization, [self.shape(width) for width in self.plan.transfer.check_widths]
        )

    @property
    def coordinate_checks(self) -> dict[str, list[list[RunSpec]]]:
        """Runs of every coordinate check by name: the parametrization's, the standard
        parametrization's as a control, and, if the parametrization has a depth rule, those over
        `depth` at the base width.
        """
        rules, depths = self.plan.parametrization, self.plan.transfer.check_depths
        standard = rules.unscaled if rules.rates_by_shape else named("sp")
        checks: dict[str, list[list[RunSpec]]] = {
            parametrization.name: self.check_runs(parametrization)
            for parametrization in (rules, *([] if rules.name == "sp" else [standard]))
        }
        if rules.depth_alpha is not None and depths:
            checks[DEPTH] = self._build_check_runs(
                rules, [self.base_shape.at_depth(depth) for depth in depths]
            )
        return checks

    def _build_check_runs(
        self, parametrization: Parametrization, shapes: list[Shape]
    ) -> list[list[RunSpec]]:
        """Return runs with a constant rate, without warmup, and without clipping, which could hide
        a blow-up. Each run trains alone.
        """
        transfer = self.plan.transfer
        point: Params = with_warmup({LEARNING_RATE: transfer.check_learning_rate}, 0.0)
        constant, steps = (
            Schedule(kind="constant", num_steps=transfer.check_num_steps + 1),
            self.plan.proxy.num_steps,
        )
        numerics = dataclasses.replace(self.plan.numerics("proxy"), num_slots=1)
        rules = dataclasses.replace(
            parametrization, moments="fixed", rate_batch_power=0.0, rate_duration_power=0.0
        )
        return [
            [
                dataclasses.replace(
                    run, schedule=constant, numerics=numerics, hparams=run.hparams.unclipped
                )
                for seed in range(transfer.check_num_seeds)
                for run in [
                    self.run(
                        shape=shape, point=point, seed=seed, num_steps=steps, parametrization=rules
                    )
                ]
            ]
            for shape in shapes
        ]


def base_duration(study: Study) -> int:
    """Return the number of tokens of a run of the search."""
    return study.plan.num_tokens(study.plan.proxy.num_steps)


def moved(rate: float, ratio: float, power: float) -> float:
    """Return a rate scaled by a power law, rounded to four digits; unchanged if the law does not
    move it.
    """
    return rate if power == 0 or ratio == 1 else float(f"{rate * ratio**power:.4g}")


class NoFinishedTrialError(InputError):
    """No trial of the search finished."""

    exit_code = ExitCode.CANNOT_TELL
