"""A study: a plan, a corpus, and a folder, with methods that build its runs.

Runs are pure functions of the plan and of earlier results, so a resumed study asks for exactly the
runs that an uninterrupted one would have asked for. A study's question is the part of the plan that
decides what is measured, with the identity of the data and of the user's own model. This module
imports neither torch nor Ray.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.study.plan.calibration_records import ModeRequest, Part
from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core import canon
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.hyperparameters import LEARNING_RATE, Hparams, get_warmup, replace_warmup
from forerun._proxies.core.programs import Factory
from forerun._proxies.core.rules import Parametrization, get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._scaling_fits.allocation.shapes import (
    MAX_PARAMS,
    ShapeRequest,
    Template,
    WidthCount,
    choose_shape,
    compute_count_per_layer,
    interpolate_count,
)
from forerun._sweeps.search.space import Params, SearchSpace

if TYPE_CHECKING:
    from forerun._proxies.data.tokens import Manifest

PLAN_FILE = "plan.toml"
"""Name of the plan that a study keeps in its folder."""
SEMANTICS = 5
"""Version of the meaning of a spec's numbers: model, initial values, data order, validation
windows. A release that trains another model from the same spec raises it, so that no study mixes
the two.
"""
SEARCH_STAGE = "search"
"""Name under which the ledger keeps the suggestions of the search."""
MAX_CACHED_TRIALS = 1000
"""Maximum number of trial specs that a study keeps in memory, at 1.6 kB each."""
DEPTH_CHECK = "depth"
"""Name of the coordinate check over depths. Checks over widths have the name of their
parametrization.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The plan of a study, its data, and the folder of its records."""

    plan: Plan
    study_dir: Path
    corpus: Path | None
    """Folder of the corpus; None if a command has its own data."""
    manifest: Manifest
    code_dir: Path
    """Folder of the factory's module, or the folder in which the command runs."""
    factory: Factory | None = None
    chosen: Mapping[str, Numerics] = field(default_factory=dict)
    """Modes that the calibration chose, by `ModeRequest.key`; empty before the ledger has them."""
    counts: Mapping[int, WidthCount] = field(default_factory=dict)
    """Parameters of the user's own model by depth, as the ledger has recorded them. If this is
    empty, parameters are counted for the family of the shape.
    """
    _trials: dict[tuple[object, ...], RunSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of the last trials, at most `MAX_CACHED_TRIALS`, because each is asked for often."""
    _trial_ids: dict[bytes, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of the ids of all trials, by 16 bytes of a hash of the point. A search may have many
    thousands of trials, and their specs would take too much memory.
    """

    def format_command(self, verb: str) -> str:
        """Return the command that runs a stage of this study from its recorded plan; `run` runs all
        stages.
        """
        plan, folder = (
            shlex.quote(str(path)) for path in (self.study_dir / PLAN_FILE, self.study_dir)
        )
        return f"forerun {verb} {plan} --study {folder}"

    @property
    def question(self) -> dict[str, canon.Json]:
        """The study's question, which is record 0 of the ledger: the part of the plan that decides
        what is measured, the ids of the data and of the user's own model, and the version of the
        meaning of a run.
        """
        return {
            **self.plan.to_question(),
            "data_id": self.manifest.data_id,
            "factory_sha256": self.factory.source_sha256 if self.factory else "",
            "semantics": SEMANTICS,
        }

    def build_shape(self, width: int) -> Shape:
        """Return the shape at a width, with the corpus's vocabulary."""
        return self.plan.build_shape(width, self.manifest.vocab_size)

    @property
    def base_shape(self) -> Shape:
        """Shape at which hyperparameters are searched."""
        return self.build_shape(self.plan.proxy.base_width)

    @property
    def ladder_shapes(self) -> list[Shape]:
        """Shapes of the models of the ladder."""
        return [self.build_shape(width).at_depth(depth) for width, depth in self.plan.ladder_sizes]

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
        is_passed = command is None or command.can_receive("parametrization")
        return (
            proxy.parametrization != "sp" and is_passed and bool(self.plan.transfer.control_widths)
        )

    @property
    def target_params_guess(self) -> float:
        """Number of parameters of the target before any fit, at 20 tokens per parameter
        (Chinchilla, arXiv 2203.15556).
        """
        # The budget is 6 N D FLOPs with D = 20 N tokens, so N is the root of a 120th of it.
        return min(max(math.sqrt(self.plan.target.budget_flops / 120), 1.0), MAX_PARAMS)

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
            count=interpolate_count(self.counts, depth),
            width_per_layer=self.plan.width_per_layer or None,
            per_layer=compute_count_per_layer(self.counts)
            if self.plan.width_per_layer and several
            else None,
        )

    def count_params(self, shape: Shape) -> int:
        """Return the number of parameters N of a shape, as the laws and the budget 6 N D count
        it.
        """
        counted = interpolate_count(self.counts, shape.num_layers)
        return count_params(shape).total if counted is None else counted.count_params(shape.width)

    def build_hparams(self, point: Params) -> Hparams:
        """Return the base-width hyperparameters: those of the point, and the plan's for the
        others.
        """
        user_axes = self.plan.search.user_axes.items()
        user_values = [axis.get_value(name, point.get(name)) for name, axis in user_axes]
        return Hparams.from_point(point, self.plan.proxy.hyperparameters, user_values)

    def build_mode_request(self, part: Part, shape: Shape, batch_tokens: int) -> ModeRequest:
        """Return the mode in which runs of a shape and batch compute, and the parts of it that a
        calibration chooses.
        """
        given, choices = self.plan.build_numerics(part), self.plan.list_open_choices(part)
        return ModeRequest(
            part=part, shape=shape, batch_tokens=batch_tokens, given=given, open=choices
        )

    def get_numerics(self, part: Part, shape: Shape, batch_tokens: int) -> Numerics:
        """Return the mode of computing that the plan sets or the calibration chose."""
        request = self.build_mode_request(part, shape, batch_tokens)
        return self.chosen.get(request.key, request.given) if request.open else request.given

    @property
    def control(self) -> Parametrization:
        """The plan's parametrization without scaling; both are the same at the base shape."""
        return self.plan.parametrization.unscaled

    def build_run(
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
        hparams = self.build_hparams(point)
        needs_tokens = rules.needs_tokens or hparams.needs_tokens
        return RunSpec(
            shape=shape,
            base_shape=self.base_shape,
            parametrization=rules,
            hparams=hparams,
            schedule=self.plan.build_schedule(num_steps, get_warmup(point)),
            batch_tokens=batch_tokens or proxy.batch_tokens,
            data_id=self.manifest.data_id,
            seed=seed,
            numerics=self.get_numerics(part, shape, batch_tokens or proxy.batch_tokens),
            base_batch_tokens=proxy.batch_tokens if needs_tokens else None,
            base_num_tokens=count_base_tokens(self) if needs_tokens else None,
            optimizer=proxy.optimizer,
            factory=self.factory,
            command=self.plan.command,
        )

    def build_trial(self, point: Params, replicate: int = 0) -> RunSpec:
        """Return the run of a trial of the search (`replicate` 0), or a repeat of it with another
        seed (1, 2, ...).
        """
        key = (replicate, *sorted(point.items()))
        if key not in self._trials:
            if len(self._trials) >= MAX_CACHED_TRIALS:
                self._trials.clear()
            seed, num_steps = self.plan.search.seed + replicate, self.plan.proxy.num_steps
            self._trials[key] = self.build_run(
                shape=self.base_shape, point=point, seed=seed, num_steps=num_steps
            )
        return self._trials[key]

    def get_trial_id(self, point: Params) -> str:
        """Return the id of the trial at a point; it is computed once."""
        key = hashlib.sha256(repr(sorted(point.items())).encode()).digest()[:16]
        if key not in self._trial_ids:
            self._trial_ids[key] = self.build_trial(point).id
        return self._trial_ids[key]

    @property
    def coordinate_checks(self) -> dict[str, list[list[RunSpec]]]:
        """Runs of every coordinate check, by name of the check. There is one for the
        parametrization, one for the standard parametrization as a control, and, if the
        parametrization has a depth rule, one over depth at the base width (`DEPTH_CHECK`).
        """
        rules, depths = self.plan.parametrization, self.plan.transfer.check_depths
        standard = rules.unscaled if rules.rates_by_shape else get_parametrization("sp")
        checks: dict[str, list[list[RunSpec]]] = {
            parametrization.name: self.build_check_runs(
                parametrization,
                [self.build_shape(width) for width in self.plan.transfer.check_widths],
            )
            for parametrization in (rules, *([] if rules.name == "sp" else [standard]))
        }
        if rules.depth_alpha is not None and depths:
            checks[DEPTH_CHECK] = self.build_check_runs(
                rules, [self.base_shape.at_depth(depth) for depth in depths]
            )
        return checks

    def build_check_runs(
        self, parametrization: Parametrization, shapes: Sequence[Shape]
    ) -> list[list[RunSpec]]:
        """Return the runs of a coordinate check: a list for each shape, with a run for each seed.

        The rate is constant, without warmup and without clipping, either of which could hide a
        blow-up. Each run trains alone. Rules over batch and duration are off.
        """
        transfer = self.plan.transfer
        point: Params = replace_warmup({LEARNING_RATE: transfer.check_learning_rate}, 0.0)
        # The outputs after the last step of the check are read in the forward pass of one more.
        constant = Schedule(kind="constant", num_steps=transfer.check_num_steps + 1)
        numerics = dataclasses.replace(self.plan.build_numerics("proxy"), num_slots=1)
        rules = dataclasses.replace(
            parametrization, moments="fixed", rate_batch_power=0.0, rate_duration_power=0.0
        )
        rows = []
        for shape in shapes:
            run = self.build_run(
                shape=shape,
                point=point,
                seed=0,
                num_steps=self.plan.proxy.num_steps,
                parametrization=rules,
            )
            run = dataclasses.replace(
                run, schedule=constant, numerics=numerics, hparams=run.hparams.unclipped
            )
            seeds = range(transfer.check_num_seeds)
            rows.append([dataclasses.replace(run, seed=seed) for seed in seeds])
        return rows


def build_bank_key(spec: RunSpec) -> str:
    """Return the bank key of a run. Runs with the same key can train in one bank, that is, as one
    batched model.
    """
    return canon.compute_content_id(
        [
            spec.shape,
            spec.batch_tokens,
            spec.data_id,
            spec.numerics,
            spec.optimizer,
            spec.factory,
            spec.command,
        ]
    )


def count_base_tokens(study: Study) -> int:
    """Return the number of tokens of a run of the search."""
    return study.plan.count_tokens(study.plan.proxy.num_steps)


def scale_rate(rate: float, ratio: float, power: float) -> float:
    """Return rate * ratio^power, rounded to four digits. A rate that does not move is not rounded
    either.
    """
    return rate if power == 0 or ratio == 1 else float(f"{rate * ratio**power:.4g}")


class NoFinishedTrialError(InputError):
    """No trial of the search finished."""

    exit_code = ExitCode.CANNOT_TELL
