"""The steps from results to a decision: verdicts, fit, and choice of the main run. All are pure
functions of a study and its ledger's records.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
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
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.programs import PLACES
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import DIVERGED_ABOVE_NATS, RunResult, RunSpec
from proxies.external.command import filled, placeholder_values
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
    """The main run: an integer shape and a whole number of steps near the optimum of the fit."""

    allocation: Allocation
    shape: Shape
    num_steps: int
    prediction: Prediction

    batch_tokens: int
    aspect: AspectTerm | None = None
    """Effect of the width per layer on the loss; None if the ladder is not a grid of widths and
    depths that determines it.
    """
    ends: tuple[Shape, Shape] | None = None
    """Shapes at the ends of the interval of the optimal size; None if the depth is not chosen with
    the width.
    """

    @property
    def num_tokens(self) -> float:
        """Number of training tokens of the main run."""
        return self.prediction.tokens

    @property
    def sizes(self) -> Sizes:
        """Sizes of the main run along the axes of transfer."""
        return Sizes(
            width=self.shape.width,
            depth=self.shape.num_layers,
            batch=self.batch_tokens,
            duration=int(self.num_tokens),
        )


def ladder_specs(study: Study, transfer_result: Transferred) -> list[RunSpec]:
    """Return the runs of the ladder at the transferred learning rate and the other values that are
    frozen.
    """
    return ladder_runs(
        study, transfer_result.point, transfer_result.powers_at, transfer_result.warmup.rule
    )


def ladder_table(
    study: Study,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    past: Sequence[ConcludedRun] = (),
) -> RunTable:
    """Return the finished rungs as a table of runs, followed by the main runs that have been
    concluded.

    Raises:
        StageMissingError: Some rungs have no outcome yet.
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
    """Return the ledger's key for the fit of these rungs. If more runs move the learning rate, the
    rungs differ, and their fit has another key.
    """
    return f"ladder/{canon.content_id([spec.id for spec in specs])[:16]}"


def fitted(study: Study, ledger: Ledger, specs: Sequence[RunSpec]) -> FittedRuns:
    """Return the scaling fit of a ladder that has ended: the recorded one, or a new one if none is
    recorded (seconds of work).
    """
    from scaling_fits.fit_file import from_file
    from scaling_fits.forecast.uncertainty import FittedRuns, fit_runs

    recorded = ledger.find("fit", fit_key(specs))
    if recorded is not None:
        fit = from_file(recorded.body)
        assert isinstance(fit, FittedRuns)
        return fit
    table = ladder_table(study, specs, ledger.results())
    ladder = study.plan.ladder
    return fit_runs(
        table, form=ladder.form, bootstrap=ladder.bootstrap, level=study.plan.transfer.level
    )


def aspect_of(
    study: Study, fit: FittedRuns, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> AspectTerm | None:
    """Return the effect of the width per layer on the loss; None if the ladder is not a grid of
    widths and depths, or is too small.
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
    """Choose the shape and the number of steps for the plan's budget: the fitted optimum, rounded
    to integers, at the width per layer that the plan gives or that `aspect` determines.

    Raises:
        CannotTellError: The ladder identifies no law.
        ShapeError: No width keeps the template's ratios and is divisible by `[launch] tensor`.
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

    def choose_option(params: float) -> ShapeOption:
        return choose_shape(ShapeRequest(params=params, template=template)).option

    option, ends = choose_option(allocation.params), allocation.params_interval
    num_steps, batch_tokens = plan.target_steps(option.params), plan.target_batch_tokens
    return Choice(
        allocation=allocation,
        shape=option.shape,
        num_steps=num_steps,
        batch_tokens=batch_tokens,
        prediction=_correct_for_shape(
            predict(fit, option.params, plan.num_tokens(num_steps, batch_tokens)),
            aspect,
            option.aspect_ratio,
        ),
        aspect=aspect,
        ends=(choose_option(ends[0]).shape, choose_option(ends[1]).shape)
        if free and ends
        else None,
    )


def _correct_for_shape(
    prediction: Prediction, aspect: AspectTerm | None, width_per_layer: float
) -> Prediction:
    """Return the forecast with the effect of the shape, if that effect is determined and the ladder
    covers this width per layer.
    """
    if aspect is None or not aspect.determined or not aspect.reaches(width_per_layer):
        return prediction
    effect = aspect.log_loss(width_per_layer)
    low, high = (
        None if end is None else end * math.exp(log_factor)
        for end, log_factor in ((prediction.low, effect.low), (prediction.high, effect.high))
    )
    return dataclasses.replace(
        prediction, loss_nats=prediction.loss_nats * math.exp(effect.value), low=low, high=high
    )


def main_spec(study: Study, transfer_result: Transferred, choice: Choice) -> RunSpec:
    """Return the main run as a run of this study."""
    return study.run(
        shape=choice.shape,
        point=transfer_result.point_at(study, choice.sizes),
        seed=study.plan.launch.seed,
        num_steps=choice.num_steps,
        batch_tokens=choice.batch_tokens,
    )


def own_run(study: Study, transfer_result: Transferred, choice: Choice) -> Json:
    """Return the command line of the main run; None if forerun's trainer is used."""
    spec = main_spec(study, transfer_result, choice)
    if spec.command is None:
        return None
    values = placeholder_values(spec, Path("RUN_DIR"), study.corpus)
    return {"kind": "command", "line": shlex.join(filled(spec.command.template, values))}


def own_text(body: Json) -> str:
    """Return the command of the main run as text for the terminal."""
    assert isinstance(body, dict)
    return f"the main run with your own trainer (use a fresh folder as RUN_DIR):\n  {body['line']}"


def finished_rungs(
    study: Study, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> list[FinishedRun]:
    """Return the rungs that have a final loss, with their loss curves."""
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
    """Return the forecast of the final loss with the expected loss curve, which follows from the
    curves of the rungs.
    """
    from scaling_fits.forecast.loss_curves import expected_curve, memory_octaves

    assert end.low is not None and end.high is not None  # every plan has a bootstrap
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
    transfer_result: Transferred,
    verdicts: Verdicts,
    choice: Choice,
    rungs: Sequence[FinishedRun],
) -> Decision:
    """Return everything that the main run computes with, as plain numbers.

    Raises:
        FactoryError, FactoryChangedError: The user's factory is missing, or has changed.
    """
    from proxies.parametrization.parametrization import forward_numbers, parameter_table

    plan, shape, base = study.plan, choice.shape, study.base_shape
    run = main_spec(study, transfer_result, choice)
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
        # A value that the command does not take is left to the command.
        **{
            name: value if plan.reaches(name) else HYPERPARAMETERS[name].off
            for name, value in run.hparams.run_wide.items()
        },  # type: ignore[arg-type]
        batch_tokens=run.batch_tokens,
        num_tokens=run.num_tokens,
        data=_describe_data(study),
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


def _describe_data(study: Study) -> frozen.Data:
    """Return the identity of the study's data."""
    return frozen.Data(
        data_id=study.manifest.data_id,
        tokenizer=study.manifest.tokenizer,
        vocab_size=study.manifest.vocab_size,
        num_train_tokens=study.manifest.num_tokens("train"),
        weights=tuple(sorted(study.plan.data.weights.items())),
    )


def frozen_command(study: Study, run: RunSpec) -> frozen.OwnTrainer | None:
    """Return the user's own trainer with the values that it gets in a main run; None if forerun's
    trainer is used.
    """
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
    """Return the numbers with which the user's model is trained in a main run, and how it is built
    and sharded.

    Raises:
        FactoryError, FactoryChangedError: The factory cannot be found from `code_dir`, or has
            changed.
    """
    from proxies.external.description import called_blocks, outline_of
    from proxies.external.factory import checked_load

    assert run.factory is not None
    build = checked_load(run.factory, code_dir, run.own_values)
    outline = outline_of(build, run)
    return outline.numbers, frozen.OwnModel(
        factory=run.factory,
        values=dict(run.own_values),
        num_params=sum(math.prod(each.size) for each in outline.numbers),
        blocks=called_blocks(build, run.base_shape.at_depth(run.shape.num_layers)),
        embeddings=outline.embeddings,
        readouts=outline.readouts,
    )
