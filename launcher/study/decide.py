"""From results to a decision: verdict, fit, choice. Pure functions of a study and its ledger's
records.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import policy
from launcher.estimates.layout import planned_parallelism
from launcher.experiments.ladder import ladder_runs
from launcher.experiments.sweep_grids import Sizes
from launcher.experiments.transferred_values import StageMissingError, Transferred, Verdicts
from launcher.frozen import frozen
from launcher.frozen.frozen import CurvePoint, Decision, PredictedLoss
from launcher.plan.study import Study
from launcher.study.history import ConcludedRun
from proxies.core import canon
from proxies.core.branches import trunk_id
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.programs import PLACES
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import DIVERGED_ABOVE_NATS, RunResult, RunSpec
from proxies.external.command import placeholder_values
from sweeps.store.curves import load_curve
from sweeps.store.ledger import Ledger
from transfer.verdict.rules import rule_of

if TYPE_CHECKING:
    from proxies.core.numbers import ParameterNumbers
    from scaling_fits.allocation.allocate import Allocation
    from scaling_fits.allocation.aspect import AspectTerm
    from scaling_fits.allocation.shapes import ShapeOption
    from scaling_fits.forecast.loss_curves import FinishedRun
    from scaling_fits.forecast.uncertainty import FittedRuns, Prediction
    from scaling_fits.laws.table import RunTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The main run: an integer shape and whole steps near the optimum of the fit."""

    allocation: Allocation
    shape: Shape
    num_steps: int
    prediction: Prediction

    batch_tokens: int
    aspect: AspectTerm | None = None
    """What the width per layer adds to the loss, where the ladder is a grid that tells it."""
    ends: tuple[Shape, Shape] | None = None
    """Shapes at the ends of the interval of the optimal size, where the depth is chosen with the
    width."""

    @property
    def num_tokens(self) -> float:
        """Tokens the main run trains on."""
        return self.prediction.tokens

    @property
    def sizes(self) -> Sizes:
        """The same as sizes along the axes of transfer."""
        return Sizes(
            width=self.shape.width,
            depth=self.shape.num_layers,
            batch=self.batch_tokens,
            duration=int(self.num_tokens),
        )


def ladder_specs(study: Study, found: Transferred) -> list[RunSpec]:
    """The ladder at the transferred rate and the other values that are frozen."""
    return ladder_runs(study, found.point, found.powers_at, found.warmup.rule)


def ladder_table(
    study: Study,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    past: Sequence[ConcludedRun] = (),
) -> RunTable:
    """Finished rungs as a table of runs, and below them main runs that were concluded.

    Raises:
        StageMissingError: rungs without an outcome.
    """
    from scaling_fits.laws.table import TRUNK, from_columns

    if any(spec.id not in results for spec in specs):
        raise StageMissingError(
            f"the ladder has not ended: `{study.command_line('ladder')}` runs or resumes it"
        )
    rungs = [(spec, loss) for spec in specs if (loss := results[spec.id].loss_nats) is not None]
    trunks = [trunk_id(spec) or spec.id for spec, _ in rungs] + [
        f"main run {index}" for index in range(len(past))
    ]
    numbered = {trunk: float(number) for number, trunk in enumerate(dict.fromkeys(trunks))}
    return from_columns(
        params=[
            *(study.num_params(spec.shape) for spec, _ in rungs),
            *(run.params for run in past),
        ],
        tokens=[*(spec.num_tokens for spec, _ in rungs), *(run.tokens for run in past)],
        loss=[*(loss for _, loss in rungs), *(run.actual_nats for run in past)],
        extra={TRUNK: [numbered[trunk] for trunk in trunks]}
        if study.plan.proxy.decay_branches
        else {},
    )


def fit_key(specs: Sequence[RunSpec]) -> str:
    """Name the fit of these rungs in the ledger: other rungs, after more runs moved the rate, have
    their own fit.
    """
    return f"ladder/{canon.content_id([spec.id for spec in specs])[:16]}"


def fitted(study: Study, ledger: Ledger, specs: Sequence[RunSpec]) -> FittedRuns:
    """The scaling fit of a ladder that has ended: the recorded one, or, where there is none yet,
    made now (seconds).
    """
    from scaling_fits.fit_file import from_file
    from scaling_fits.forecast.uncertainty import FittedRuns, fit_runs

    recorded = ledger.find("fit", fit_key(specs))
    if recorded is not None:
        found = from_file(recorded.body)
        assert isinstance(found, FittedRuns)
        return found
    table = ladder_table(study, specs, ledger.results())
    ladder = study.plan.ladder
    return fit_runs(
        table, form=ladder.form, bootstrap=ladder.bootstrap, level=study.plan.transfer.level
    )


def aspect_of(
    study: Study, fit: FittedRuns, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> AspectTerm | None:
    """What the width per layer adds to the loss; None where the ladder is no grid of widths and
    depths, or too few.
    """
    from scaling_fits.allocation.aspect import aspect_term, shaped_run

    if not study.plan.ladder.depths:
        return None
    runs = [
        shaped_run(
            fit,
            params=study.num_params(spec.shape),
            tokens=spec.num_tokens,
            loss_nats=rung.loss_nats,
            width_per_layer=spec.shape.width / spec.shape.num_layers,
        )
        for spec, rung in zip(specs, rungs, strict=True)
        if rung.loss_nats is not None
    ]
    try:
        return aspect_term(runs, study.plan.transfer.level)
    except SpecError:
        return None


def choose(study: Study, fit: FittedRuns, aspect: AspectTerm | None = None) -> Choice:
    """The shape and steps for the plan's budget: the fitted optimum, made whole, at the width per
    layer that the plan gives or that `aspect` determines.

    Raises:
        CannotTellError: the ladder identifies no law.
        ShapeError: no width keeps the template's ratios and splits over `[launch] tensor`.
    """
    from scaling_fits.allocation.allocate import allocate
    from scaling_fits.allocation.shapes import ShapeRequest, choose_shape
    from scaling_fits.forecast.uncertainty import predict

    plan = study.plan
    allocation = allocate(fit, plan.target.budget_flops)
    template = study.shape_template
    free = template.width_per_layer is not None
    if free and aspect is not None and aspect.determined:
        template = dataclasses.replace(template, width_per_layer=aspect.best().value)

    def shaped(params: float) -> ShapeOption:
        return choose_shape(ShapeRequest(params=params, template=template)).option

    option, ends = shaped(allocation.params), allocation.params_interval
    num_steps, batch_tokens = plan.target_steps(option.params), plan.target_batch_tokens
    return Choice(
        allocation=allocation,
        shape=option.shape,
        num_steps=num_steps,
        batch_tokens=batch_tokens,
        prediction=_by_shape(
            predict(fit, option.params, plan.num_tokens(num_steps, batch_tokens)),
            aspect,
            option.aspect_ratio,
        ),
        aspect=aspect,
        ends=(shaped(ends[0]).shape, shaped(ends[1]).shape) if free and ends else None,
    )


def _by_shape(
    prediction: Prediction, aspect: AspectTerm | None, width_per_layer: float
) -> Prediction:
    """The forecast with what the shape adds to it, where that is determined and was tried."""
    if aspect is None or not aspect.determined or not aspect.reaches(width_per_layer):
        return prediction
    more = aspect.log_loss(width_per_layer)
    low, high = (
        None if end is None else end * math.exp(by)
        for end, by in ((prediction.low, more.low), (prediction.high, more.high))
    )
    return dataclasses.replace(
        prediction, loss_nats=prediction.loss_nats * math.exp(more.value), low=low, high=high
    )


def main_spec(study: Study, found: Transferred, choice: Choice) -> RunSpec:
    """The main run, as a run of this study."""
    return study.run(
        shape=choice.shape,
        point=found.point_at(study, choice.sizes),
        seed=study.plan.launch.seed,
        num_steps=choice.num_steps,
        batch_tokens=choice.batch_tokens,
    )


def finished_rungs(
    study: Study, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> list[FinishedRun]:
    """Rungs that ended well, with their curves."""
    from scaling_fits.forecast.loss_curves import FinishedRun

    return [
        FinishedRun(
            params=study.num_params(spec.shape),
            tokens=spec.num_tokens,
            schedule=spec.schedule,
            final_loss_nats=rung.loss_nats,
            curve=load_curve(study.study_dir, rung),
        )
        for spec, rung in zip(specs, rungs, strict=True)
        if rung.loss_nats is not None
    ]


def predicted_loss(
    end: Prediction, schedule: Schedule, rungs: Sequence[FinishedRun]
) -> PredictedLoss:
    """Join the forecast of the end and the curve that leads there, from the curves of the rungs."""
    from scaling_fits.forecast.loss_curves import expected_curve, memory_octaves

    assert end.low is not None and end.high is not None  # the plan asks for a bootstrap
    final = (end.loss_nats, end.low, end.high)
    points = expected_curve(rungs, end.params, end.tokens, schedule, final, end.level)
    return PredictedLoss(
        loss_nats=end.loss_nats,
        low_nats=end.low,
        high_nats=end.high,
        level=end.level,
        extrapolation=end.extrapolation,
        curve=tuple(
            CurvePoint(
                step=round(point.share * schedule.num_steps),
                loss_nats=point.loss_nats,
                low_nats=point.low_nats,
                high_nats=point.high_nats,
            )
            for point in points
        ),
        memory_octaves=memory_octaves(rungs) if points else None,
    )


def decision(
    study: Study,
    found: Transferred,
    verdicts: Verdicts,
    choice: Choice,
    rungs: Sequence[FinishedRun],
) -> Decision:
    """Everything the main run computes with, as plain numbers.

    Raises:
        FactoryError, FactoryChangedError: the user's factory is not there, or is another.
    """
    from proxies.parametrization.parametrization import forward_numbers, parameter_table

    plan, shape, base = study.plan, choice.shape, study.base_shape
    run = main_spec(study, found, choice)
    own = frozen_command(study, run)
    table, model = parameter_table(run), None
    if run.factory is not None:
        table, model = frozen_model(run, study.code_dir)
    return frozen.Decision(
        schema_version=frozen.SCHEMA_VERSION,
        shape=shape,
        base_shape=base,
        parametrization=run.parametrization,
        transfer=tuple(rule_of(judged.verdict) for _, judged in verdicts.tests),
        forward=forward_numbers(run),
        groups=() if own else frozen.groups_of(table),
        optimizer=run.optimizer,
        learning_rate=frozen.learning_rate_of(run.schedule),
        # What a command does not get is up to it.
        **{
            name: value if plan.reaches(name) else HYPERPARAMETERS[name].off
            for name, value in run.hparams.run_wide.items()
        },  # type: ignore[arg-type]
        batch_tokens=run.batch_tokens,
        num_tokens=run.num_tokens,
        data=frozen.Data(
            data_id=study.manifest.data_id,
            tokenizer=study.manifest.tokenizer,
            vocab_size=study.manifest.vocab_size,
            num_train_tokens=study.manifest.num_tokens("train"),
            weights=tuple(sorted(study.plan.data.weights.items())),
        ),
        seed=plan.launch.seed,
        precision=plan.launch.precision,
        parallelism=frozen.Parallelism(data_parallel_shard=1)
        if own
        else planned_parallelism(plan.launch),
        checkpointing=policy.Checkpointing(every_steps=plan.launch.checkpoint_every_steps),
        predicted=predicted_loss(choice.prediction, run.schedule, rungs),
        abort=policy.AbortPolicy(
            on_non_finite=True,
            train_loss_above_nats=math.log(shape.vocab_size) + DIVERGED_ABOVE_NATS,
        ),
        spikes=policy.SpikePolicy(max_rollbacks=plan.launch.spike_rollbacks),
        monitoring=policy.Monitoring(
            validate_every_steps=plan.launch.validate_every_steps,
            layers_every_steps=plan.launch.layers_every_steps,
            replay_every_steps=plan.launch.replay_every_steps,
        ),
        compiled=plan.launch.compiled,
        own=own,
        model=model,
    )


def frozen_command(study: Study, run: RunSpec) -> frozen.OwnTrainer | None:
    """The user's own trainer with what it gets in a main run; None where forerun's trains."""
    if run.command is None:
        return None
    values = {
        name: value
        for name, value in placeholder_values(run, Path(), None).items()
        if name not in PLACES
    }
    return frozen.OwnTrainer(
        command=run.command,
        values=dict(values),
        resume=study.plan.launch.resume_arguments,
        num_params=study.num_params(run.shape) if study.counts else None,
    )


def frozen_model(
    run: RunSpec, code_dir: Path
) -> tuple[tuple[ParameterNumbers, ...], frozen.OwnModel]:
    """What the user's model is trained with in a main run, and how it is built and sharded.

    Raises:
        FactoryError, FactoryChangedError: the factory is not to be found from `code_dir`, or is
            another.
    """
    from proxies.external.description import called_blocks, outline_of
    from proxies.external.factory import checked_load

    assert run.factory is not None
    build = checked_load(run.factory, code_dir, run.own_values)
    found = outline_of(build, run)
    return found.numbers, frozen.OwnModel(
        factory=run.factory,
        values=dict(run.own_values),
        num_params=sum(math.prod(each.size) for each in found.numbers),
        blocks=called_blocks(build, run.base_shape.at_depth(run.shape.num_layers)),
        embeddings=found.embeddings,
        readouts=found.readouts,
    )
