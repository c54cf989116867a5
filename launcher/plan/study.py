"""A study: a plan, a corpus and a folder, and the runs that each stage asks for. No torch, no Ray.

Every list of runs is a pure function of the plan and of earlier results, so a resumed study asks
for exactly the runs an uninterrupted one would have asked for.
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
"""What a spec's numbers mean: model, initial values, data order, validation windows. A version that
trains another model from the same spec raises it, so that no study mixes the two.
"""
SEARCH_STAGE = "search"
MOST_TRIALS = 1000
"""Specs of trials that a study keeps, 1.6 kB each."""
DEPTH = "depth"
"""The coordinate check over depths; those over widths bear their parametrization's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is asked, of what, and where its records lie."""

    plan: Plan
    study_dir: Path
    corpus: Path | None
    """None: a command's own data."""
    manifest: Manifest
    code_dir: Path
    """Where the factory's module lies, or the command runs."""
    factory: Factory | None = None
    chosen: Mapping[str, Numerics] = field(default_factory=dict)
    """What its calibration chose, by `ModeRequest.key`; empty before the ledger has it."""
    counts: Mapping[int, WidthCount] = field(default_factory=dict)
    """Parameters of the user's own code by depth, as the ledger has them; empty: as the shape's
    family counts."""
    _trials: dict[tuple[object, ...], RunSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The last trials made, at most `MOST_TRIALS`: each is asked for often."""
    _trial_ids: dict[bytes, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of every trial asked for, by 16 bytes of a hash: a search has thousands, which would not all
    fit as specs."""

    def command_line(self, verb: str) -> str:
        """Return the command that runs a stage of this study, or by `run` all of them, by its
        recorded plan.
        """
        plan, folder = (
            shlex.quote(str(path)) for path in (self.study_dir / PLAN_FILE, self.study_dir)
        )
        return f"forerun {verb} {plan} --study {folder}"

    @property
    def question(self) -> dict[str, canon.Json]:
        """Record 0 of the ledger: the plan without machine matters, the data, and what a run
        means.
        """
        return {
            **self.plan.question(),
            "data_id": self.manifest.data_id,
            "factory_sha256": self.factory.source_sha256 if self.factory else "",
            "semantics": SEMANTICS,
        }

    def shape(self, width: int) -> Shape:
        """The shape at a width, with the corpus's vocabulary."""
        return self.plan.shape(width, self.manifest.vocab_size)

    @property
    def base_shape(self) -> Shape:
        """Where hyperparameters are searched."""
        return self.shape(self.plan.proxy.base_width)

    @property
    def replays_winner(self) -> bool:
        """Whether the winning trial is run again elsewhere: not where somebody else trains."""
        return self.plan.search.replay_winner and self.plan.command is None

    @property
    def space(self) -> SearchSpace:
        """What the search varies, as it begins."""
        return self.plan.space

    @property
    def has_control(self) -> bool:
        """Whether a standard-parametrization control runs: a study in standard form is its own."""
        proxy = self.plan.proxy
        command = self.plan.command  # a trainer that scales by itself has no other form
        told = command is None or command.reaches("parametrization")
        return proxy.parametrization != "sp" and told and bool(self.plan.transfer.control_widths)

    @property
    def target_params_guess(self) -> float:
        """Parameters of the target before any fit, at 20 tokens each (Chinchilla, arXiv
        2203.15556).
        """
        return min(max(math.sqrt(self.plan.target.budget_flops / 120), 1.0), MOST_PARAMS)

    @property
    def target_shape_guess(self) -> Shape:
        """The target's shape before any fit, at 20 tokens per parameter (Chinchilla, arXiv
        2203.15556).
        """
        request = ShapeRequest(params=self.target_params_guess, template=self.shape_template)
        return choose_shape(request).option.shape

    @property
    def shape_template(self) -> Template:
        """What the plan fixes of the main run's shape: all but its width and, where the ladder
        varies it, its depth.
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
        """N of a shape, in the laws and the budget 6 N D."""
        counted = counted_at(self.counts, shape.num_layers)
        return count_params(shape).total if counted is None else counted.params(shape.width)

    def hparams(self, point: Params) -> Hparams:
        """Base-width hyperparameters: those of the point, the others the plan's."""
        own = [axis.value(name, point.get(name)) for name, axis in self.plan.search.own.items()]
        return Hparams.at(point, self.plan.proxy.hyperparameters, own)

    def asked(self, part: Part, shape: Shape, batch_tokens: int) -> ModeRequest:
        """How runs of a shape and batch compute, and what of it a calibration chooses."""
        given, choices = self.plan.numerics(part), self.plan.choices(part)
        return ModeRequest(
            part=part, shape=shape, batch_tokens=batch_tokens, given=given, open=choices
        )

    def numerics(self, part: Part, shape: Shape, batch_tokens: int) -> Numerics:
        """How they compute, as the plan says or the calibration chose."""
        asked = self.asked(part, shape, batch_tokens)
        return self.chosen.get(asked.key, asked.given) if asked.open else asked.given

    @property
    def control(self) -> Parametrization:
        """The same as the plan's at the base shape, and scaled by nothing."""
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
        """One run of this study; the batch is the proxies' unless another is given."""
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
        """A trial of the search; or its replicate, from 1, with a seed of its own."""
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
        """The id of the trial at a point, worked out once."""
        key = hashlib.sha256(repr(sorted(point.items())).encode()).digest()[:16]
        if key not in self._trial_ids:
            self._trial_ids[key] = self.trial(point).id
        return self._trial_ids[key]

    def check_runs(self, parametrization: Parametrization) -> list[list[RunSpec]]:
        """The coordinate check's runs, by width."""
        return self._check_runs(
            parametrization, [self.shape(width) for width in self.plan.transfer.check_widths]
        )

    @property
    def coordinate_checks(self) -> dict[str, list[list[RunSpec]]]:
        """The runs of every coordinate check by its name: the parametrization's, the standard
        form's beside it, and, where the parametrization has a depth rule, those over `depth` at the
        base width.
        """
        rules, depths = self.plan.parametrization, self.plan.transfer.check_depths
        standard = rules.unscaled if rules.rates_by_shape else named("sp")
        found: dict[str, list[list[RunSpec]]] = {
            each.name: self.check_runs(each)
            for each in (rules, *([] if rules.name == "sp" else [standard]))
        }
        if rules.depth_alpha is not None and depths:
            found[DEPTH] = self._check_runs(
                rules, [self.base_shape.at_depth(depth) for depth in depths]
            )
        return found

    def _check_runs(
        self, parametrization: Parametrization, shapes: list[Shape]
    ) -> list[list[RunSpec]]:
        """Constant rate, no warmup, no clipping that could hide a blow-up; each run alone."""
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
    """Tokens of a run of the search."""
    return study.plan.num_tokens(study.plan.proxy.num_steps)


def moved(rate: float, ratio: float, power: float) -> float:
    """A rate carried along a power law, to four digits; as it is where nothing moves it."""
    return rate if power == 0 or ratio == 1 else float(f"{rate * ratio**power:.4g}")


class NoFinishedTrialError(InputError):
    """A search in which nothing finished."""

    exit_code = ExitCode.CANNOT_TELL
