"""The steps from results to a decision: the ladder and its fit, the choice of the main run, its
forecast, and the frozen decision. All are pure functions of a study, its ledger's records, and its
loss curves.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.main_run.estimates.layout import read_parallelism
from forerun._launcher.main_run.frozen import frozen, run_policies
from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun
from forerun._launcher.main_run.frozen.frozen import CurvePoint, Decision, PredictedLoss
from forerun._launcher.study.experiments.ladder import build_ladder
from forerun._launcher.study.experiments.sizes import Sizes
from forerun._launcher.study.experiments.transfer_results import (
    StageMissingError,
    TransferResult,
    Verdicts,
)
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core import canon
from forerun._proxies.core.branches import compute_trunk_id
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.programs import PATH_PLACEHOLDERS
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import DIVERGED_ABOVE_NATS, RunResult, RunSpec
from forerun._proxies.external.command import fill_template, get_placeholder_values
from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.ledger import Ledger
from forerun._transfer.verdict.rules import build_rule

if TYPE_CHECKING:
    from forerun._proxies.core.numbers import ParameterNumbers
    from forerun._scaling_fits.allocation.allocate import Allocation
    from forerun._scaling_fits.allocation.aspect import AspectTerm
    from forerun._scaling_fits.allocation.shapes import ShapeOption
    from forerun._scaling_fits.forecast.loss_curves import FinishedRun
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns, Prediction
    from forerun._scaling_fits.laws.table import RunTable


@dataclass(frozen=True, kw_only=True, slots=True)
class MainRunChoice:
    """The main run: an integer shape and a whole number of steps near the optimum of the fit."""

    allocation: Allocation
    """Optimum of the fit for the budget, before rounding."""
    shape: Shape
    num_steps: int
    prediction: Prediction
    """Forecast of the main run's final loss."""
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


def build_ladder_runs(study: Study, transfer_result: TransferResult) -> list[RunSpec]:
    """Return the runs of the ladder at the transferred learning rate and the other values that are
    frozen.
    """
    return build_ladder(
        study, transfer_result.point, transfer_result.powers_at, transfer_result.warmup.rule
    )


def build_ladder_table(
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
    from forerun._scaling_fits.laws.table import TRUNK, from_columns

    if any(spec.id not in results for spec in specs):
        raise StageMissingError(
            f"the ladder has not ended: `{study.format_command('ladder')}` runs or resumes it"
        )
    rungs = [(spec, loss) for spec in specs if (loss := results[spec.id].loss_nats) is not None]
    extra = {}
    if study.plan.proxy.decay_branches:
        trunks = [compute_trunk_id(spec) or spec.id for spec, _ in rungs]
        numbers = {trunk: number for number, trunk in enumerate(dict.fromkeys(trunks))}
        main_runs = range(len(numbers), len(numbers) + len(past))  # each has a trunk of its own
        extra[TRUNK] = [*(float(numbers[trunk]) for trunk in trunks), *map(float, main_runs)]
    return from_columns(
        params=[
            *(study.count_params(spec.shape) for spec, _ in rungs),
            *(run.params for run in past),
        ],
        tokens=[*(spec.num_tokens for spec, _ in rungs), *(run.tokens for run in past)],
        loss=[*(loss for _, loss in rungs), *(run.actual_nats for run in past)],
        extra=extra,
    )


def build_fit_key(specs: Sequence[RunSpec]) -> str:
    """Return the ledger's key for the fit of these rungs. If further transfer runs change the
    learning rate, the rungs differ, and so does the key.
    """
    return f"ladder/{canon.compute_content_id([spec.id for spec in specs])[:16]}"


def load_or_fit_ladder(study: Study, ledger: Ledger, specs: Sequence[RunSpec]) -> FittedRuns:
    """Return the scaling fit of a ladder that has ended: the recorded fit, or a new one, which
    takes seconds.
    """
    from forerun._scaling_fits.fit_file import from_json
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns, fit_runs

    recorded = ledger.find("fit", build_fit_key(specs))
    if recorded is not None:
        fit = from_json(recorded.body)
        assert isinstance(fit, FittedRuns)
        return fit
    table = build_ladder_table(study, specs, ledger.get_results())
    ladder = study.plan.ladder
    return fit_runs(
        table, form=ladder.form, bootstrap=ladder.bootstrap, level=study.plan.transfer.level
    )


def fit_aspect_term(
    study: Study, fit: FittedRuns, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> AspectTerm | None:
    """Return the effect of the width per layer on the loss; None if the ladder is not a grid of
    widths and depths, or is too small.
    """
    from forerun._scaling_fits.allocation.aspect import build_shaped_run, fit_aspect_term

    if not study.plan.ladder.depths:
        return None
    runs = [
        build_shaped_run(
            fit,
            params=study.count_params(spec.shape),
            tokens=spec.num_tokens,
            loss_nats=rung.loss_nats,
            width_per_layer=spec.shape.width / spec.shape.num_layers,
        )
        for spec, rung in zip(specs, rungs, strict=True)
        if rung.loss_nats is not None
    ]
    try:
        return fit_aspect_term(runs, study.plan.transfer.level)
    except SpecError:
        return None


def choose_main_run(
    study: Study, fit: FittedRuns, aspect: AspectTerm | None = None
) -> MainRunChoice:
    """Choose the shape and the number of steps for the plan's budget: the fitted optimum, rounded
    to integers, at the width per layer that the plan gives or that `aspect` determines.

    Raises:
        CannotTellError: The ladder identifies no law.
        ShapeError: No width keeps the template's ratios and is divisible by `[launch] tensor`.
    """
    from forerun._scaling_fits.allocation.allocate import allocate
    from forerun._scaling_fits.allocation.shapes import ShapeRequest, choose_shape
    from forerun._scaling_fits.forecast.uncertainty import predict

    plan, template = study.plan, study.shape_template
    allocation = allocate(fit, plan.target.budget_flops)
    is_free = template.width_per_layer is not None
    if is_free and aspect is not None and aspect.determined:
        template = dataclasses.replace(template, width_per_layer=aspect.find_best().estimate)

    def choose_option(params: float) -> ShapeOption:
        return choose_shape(ShapeRequest(params=params, template=template)).option

    option, ends = choose_option(allocation.params), None
    if is_free and allocation.params_interval:
        low, high = allocation.params_interval
        ends = choose_option(low).shape, choose_option(high).shape
    num_steps, batch_tokens = plan.count_target_steps(option.params), plan.target_batch_tokens
    prediction = predict(fit, option.params, plan.count_tokens(num_steps, batch_tokens))
    return MainRunChoice(
        allocation=allocation,
        shape=option.shape,
        num_steps=num_steps,
        batch_tokens=batch_tokens,
        prediction=_correct_for_shape(prediction, aspect, option.aspect_ratio),
        aspect=aspect,
        ends=ends,
    )


def _correct_for_shape(
    prediction: Prediction, aspect: AspectTerm | None, width_per_layer: float
) -> Prediction:
    """Return the forecast with the effect of the shape, if that effect is determined and the ladder
    covers this width per layer.
    """
    if aspect is None or not aspect.determined or not aspect.is_within_reach(width_per_layer):
        return prediction
    effect, low, high = aspect.estimate_shift(width_per_layer), prediction.low, prediction.high
    return dataclasses.replace(
        prediction,
        loss_nats=prediction.loss_nats * math.exp(effect.estimate),
        low=None if low is None else low * math.exp(effect.low),
        high=None if high is None else high * math.exp(effect.high),
    )


def build_main_run(study: Study, transfer_result: TransferResult, choice: MainRunChoice) -> RunSpec:
    """Return the main run as a run of this study."""
    return study.build_run(
        shape=choice.shape,
        point=transfer_result.get_point(study, choice.sizes),
        seed=study.plan.launch.seed,
        num_steps=choice.num_steps,
        batch_tokens=choice.batch_tokens,
    )


def format_user_command(
    study: Study, transfer_result: TransferResult, choice: MainRunChoice
) -> str | None:
    """Return the command line of the main run; None if forerun's trainer is used."""
    spec = build_main_run(study, transfer_result, choice)
    if spec.command is None:
        return None
    values = get_placeholder_values(spec, Path("RUN_DIR"), study.corpus)
    return shlex.join(fill_template(spec.command.template, values))


def load_finished_rungs(
    study: Study, specs: Sequence[RunSpec], rungs: Sequence[RunResult]
) -> list[FinishedRun]:
    """Return the rungs that have a final loss, with their loss curves."""
    from forerun._scaling_fits.forecast.loss_curves import FinishedRun

    return [
        FinishedRun(
            params=study.count_params(spec.shape),
            tokens=spec.num_tokens,
            schedule=spec.schedule,
            final_loss_nats=rung.loss_nats,
            curve=load_curve(study.study_dir, rung),
        )
        for spec, rung in zip(specs, rungs, strict=True)
        if rung.loss_nats is not None
    ]


def predict_loss_curve(
    end: Prediction, schedule: Schedule, rungs: Sequence[FinishedRun]
) -> PredictedLoss:
    """Return the forecast of the final loss, with the loss curve that the curves of the rungs let
    expect.
    """
    from forerun._scaling_fits.forecast.loss_curves import estimate_memory, predict_curve

    assert end.low is not None and end.high is not None  # every plan has a bootstrap
    final = (end.loss_nats, end.low, end.high)
    points = predict_curve(rungs, end.params, end.tokens, schedule, final, end.level)
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
        memory_octaves=estimate_memory(rungs) if points else None,
    )


def _build_abort_policy(vocab_size: int) -> run_policies.AbortPolicy:
    """Return the policy that ends a run whose loss is far above that of uniform predictions."""
    limit_nats = math.log(vocab_size) + DIVERGED_ABOVE_NATS
    return run_policies.AbortPolicy(on_non_finite=True, train_loss_above_nats=limit_nats)


def build_decision(
    study: Study,
    transfer_result: TransferResult,
    verdicts: Verdicts,
    choice: MainRunChoice,
    rungs: Sequence[FinishedRun],
) -> Decision:
    """Return everything that the main run computes with, as plain numbers.

    Raises:
        FactoryError, FactoryChangedError: The user's factory is missing, or has changed.
    """
    from forerun._proxies.parametrization import parametrization

    plan, shape = study.plan, choice.shape
    run = build_main_run(study, transfer_result, choice)
    user_trainer = freeze_command(study, run)
    table, model = parametrization.compute_parameter_table(run), None
    if run.factory is not None:
        table, model = freeze_model(run, study.code_dir)
    return frozen.Decision(
        schema_version=frozen.SCHEMA_VERSION,
        shape=shape,
        base_shape=study.base_shape,
        parametrization=run.parametrization,
        transfer=tuple(build_rule(verdict) for _, verdict in verdicts.tests),
        forward=parametrization.compute_forward_numbers(run),
        groups=() if user_trainer else frozen.build_groups(table),
        optimizer=run.optimizer,
        learning_rate=frozen.sample_learning_rate(run.schedule),
        # A value that the command does not take is left to the command.
        **{
            name: value if plan.is_passed_to_trainer(name) else HYPERPARAMETERS[name].off
            for name, value in run.hparams.run_wide.items()
        },  # type: ignore[arg-type]
        batch_tokens=run.batch_tokens,
        num_tokens=run.num_tokens,
        data=_describe_data(study),
        seed=plan.launch.seed,
        precision=plan.launch.precision,
        parallelism=frozen.Parallelism(data_parallel_shard=1)
        if user_trainer
        else read_parallelism(plan.launch.model_dump()),
        checkpointing=run_policies.Checkpointing(every_steps=plan.launch.checkpoint_every_steps),
        predicted=predict_loss_curve(choice.prediction, run.schedule, rungs),
        abort=_build_abort_policy(shape.vocab_size),
        spikes=run_policies.SpikePolicy(max_rollbacks=plan.launch.spike_rollbacks),
        monitoring=run_policies.Monitoring(
            validate_every_steps=plan.launch.validate_every_steps,
            layers_every_steps=plan.launch.layers_every_steps,
            replay_every_steps=plan.launch.replay_every_steps,
        ),
        compiled=plan.launch.compiled,
        own=user_trainer,
        model=model,
    )


def _describe_data(study: Study) -> frozen.Data:
    """Return the identity of the study's data."""
    return frozen.Data(
        data_id=study.manifest.data_id,
        tokenizer=study.manifest.tokenizer,
        vocab_size=study.manifest.vocab_size,
        num_train_tokens=study.manifest.count_tokens("train"),
        weights=tuple(sorted(study.plan.data.weights.items())),
    )


def freeze_command(study: Study, run: RunSpec) -> frozen.OwnTrainer | None:
    """Return the user's own trainer with the values that it gets in a main run; None if forerun's
    trainer is used.
    """
    if run.command is None:
        return None
    values = get_placeholder_values(run, Path(), None)
    return frozen.OwnTrainer(
        command=run.command,
        values={name: value for name, value in values.items() if name not in PATH_PLACEHOLDERS},
        resume=study.plan.launch.resume_arguments,
        num_params=study.count_params(run.shape) if study.counts else None,
    )


def freeze_model(
    run: RunSpec, code_dir: Path
) -> tuple[tuple[ParameterNumbers, ...], frozen.OwnModel]:
    """Return the numbers with which the user's model is trained in a main run, and how it is built
    and sharded.

    Raises:
        FactoryError, FactoryChangedError: The factory cannot be found from `code_dir`, or has
            changed.
    """
    from forerun._proxies.external.description import describe_outline, find_called_blocks
    from forerun._proxies.external.factory import load_unchanged_factory

    assert run.factory is not None
    build = load_unchanged_factory(run.factory, code_dir, run.user_values)
    outline = describe_outline(build, run)
    return outline.numbers, frozen.OwnModel(
        factory=run.factory,
        values=dict(run.user_values),
        num_params=sum(math.prod(each.size) for each in outline.numbers),
        blocks=find_called_blocks(build, run.base_shape.at_depth(run.shape.num_layers)),
        embeddings=outline.embeddings,
        readouts=outline.readouts,
    )
