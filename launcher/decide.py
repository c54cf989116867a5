"""From results to a decision: verdict, fit, choice. Pure functions of a study and its ledger's records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.study import Arm, Study, recorded_points
from proxies.flops import count_params
from proxies.shape import Shape
from proxies.spec import DIVERGED_ABOVE_NATS, RunResult, RunSpec
from sweeps.space import Params

if TYPE_CHECKING:
    from launcher.frozen import Decision
    from scaling_fits.allocate import Allocation
    from scaling_fits.table import RunTable
    from scaling_fits.uncertainty import FittedRuns, Prediction
    from sweeps.ledger import Ledger
    from transfer.verdict import Verdict

FIT_KEY = "ladder"
"""Of the study's one fit in its ledger."""


class StageMissingError(ValueError):
    """A decision needs a stage that has not run; the message names the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search found."""

    points: tuple[Params, ...]
    best: Params


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """What the transfer stage found."""

    arm: Arm
    control: Arm | None
    log2_lr: float
    """To be used at every width, set at the base."""
    at_optimum: bool
    """Whether it is the fitted optimum of the base width, or, where there is none, the search's best rate."""

    @property
    def learning_rate(self) -> float:
        """The same as a rate, to four digits."""
        return float(f"{2.0**self.log2_lr:.4g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The main run: an integer shape and whole steps near the optimum of the fit."""

    allocation: Allocation
    shape: Shape
    num_steps: int
    prediction: Prediction

    @property
    def num_tokens(self) -> float:
        """Tokens the main run trains on."""
        return self.prediction.tokens


def searched(study: Study, ledger: Ledger) -> Searched:
    """Points and winner of the search.

    Raises:
        StageMissingError: it has not ended.
    """
    suggestions = {record.key: record.body for record in ledger.records("suggestion")}
    points = recorded_points(suggestions, study.plan.search.num_trials)
    results = ledger.results()
    if len(points) < study.plan.search.num_trials or any(study.trial(p).id not in results for p in points):
        raise StageMissingError("the search has not ended: `forerun sweep PLAN` runs or resumes it")
    return Searched(points=tuple(points), best=study.best_point(points, results))


def transferred(study: Study, ledger: Ledger) -> Transferred:
    """The transfer runs and the rate they give.

    Raises:
        StageMissingError: they have not ended.
    """
    best = searched(study, ledger).best
    results = ledger.results()
    arm = study.arm(best, results, control=False)
    control = study.arm(best, results, control=True) if study.has_control else None
    if not arm.done(results) or (control is not None and not control.done(results)):
        raise StageMissingError("the transfer runs have not ended: `forerun transfer PLAN` runs or resumes them")
    log2_lr = study.judge(arm, None, results, study.target_width_guess).transferred_log2_lr
    fallback = math.log2(best["learning_rate"])
    return Transferred(
        arm=arm,
        control=control,
        log2_lr=fallback if log2_lr is None else log2_lr,
        at_optimum=log2_lr is not None,
    )


def verdict_at(study: Study, ledger: Ledger, found: Transferred, width: int) -> Verdict:
    """The verdict for a target width, with the control arm."""
    return study.judge(found.arm, found.control, ledger.results(), width, found.log2_lr)


def ladder_specs(study: Study, ledger: Ledger) -> list[RunSpec]:
    """The ladder at the transferred rate and the search's warmup and clip."""
    best = searched(study, ledger).best
    return study.ladder_runs({**best, "learning_rate": transferred(study, ledger).learning_rate})


def ladder_table(specs: list[RunSpec], results: Mapping[str, RunResult]) -> RunTable:
    """Finished rungs as a table of runs.

    Raises:
        StageMissingError: rungs without an outcome.
    """
    from scaling_fits.table import from_columns

    if any(spec.id not in results for spec in specs):
        raise StageMissingError("the ladder has not ended: `forerun ladder PLAN` runs or resumes it")
    rungs = [(spec, loss) for spec in specs if (loss := results[spec.id].loss_nats) is not None]
    return from_columns(
        params=[count_params(spec.shape).total for spec, _ in rungs],
        tokens=[spec.num_tokens for spec, _ in rungs],
        loss=[loss for _, loss in rungs],
    )


def fitted(study: Study, ledger: Ledger, table: RunTable) -> FittedRuns:
    """The study's scaling fit: the recorded one, or, where there is none yet, made now (some seconds)."""
    from scaling_fits.summary import from_file
    from scaling_fits.uncertainty import fit_runs

    recorded = ledger.find("fit", FIT_KEY)
    if recorded is not None:
        return from_file(recorded.body)
    ladder = study.plan.ladder
    return fit_runs(table, form=ladder.form, bootstrap=ladder.bootstrap, level=study.plan.transfer.level)


def choose(study: Study, fit: FittedRuns) -> Choice:
    """The shape and steps for the plan's budget: the fitted optimum, made whole.

    Raises:
        CannotTellError: the ladder identifies no law.
    """
    from scaling_fits.allocate import allocate
    from scaling_fits.shapes import shape_near
    from scaling_fits.uncertainty import predict

    budget_flops = study.plan.target.budget_flops
    allocation = allocate(fit, budget_flops)
    shape = shape_near(study.base_shape, allocation.params, study.plan.target.width_multiple).shape
    params = count_params(shape).total
    batch_tokens = study.plan.proxy.batch_tokens
    num_steps = _steps_for(study, budget_flops / (6.0 * params * batch_tokens))
    num_tokens = int(batch_tokens * study.plan.schedule(num_steps, 0.0).num_full_batches)
    return Choice(
        allocation=allocation,
        shape=shape,
        num_steps=num_steps,
        prediction=predict(fit, params, num_tokens),
    )


def _steps_for(study: Study, num_full_batches: float) -> int:
    """Steps that train on so many full batches: more of them where the batch warms up."""
    num_steps = max(1, round(num_full_batches))
    if study.plan.proxy.batch_warmup_fraction:
        num_steps = max(num_steps, study.plan.proxy.batch_warmup_stages)
        share = float(study.plan.schedule(num_steps, 0.0).num_full_batches) / num_steps
        num_steps = max(num_steps, round(num_full_batches / share))
    return num_steps


def main_spec(study: Study, best: Params, learning_rate: float, choice: Choice) -> RunSpec:
    """The main run, as a run of this study."""
    point: Params = {**best, "learning_rate": learning_rate}
    return study.run(shape=choice.shape, point=point, seed=study.plan.launch.seed, num_steps=choice.num_steps)


def decision(study: Study, best: Params, learning_rate: float, choice: Choice) -> Decision:
    """Everything the main run computes with, as plain numbers."""
    from launcher import frozen
    from proxies.parametrization import forward_numbers, parameter_table

    plan, shape, base = study.plan, choice.shape, study.base_shape
    run = main_spec(study, best, learning_rate, choice)
    table = parameter_table(run)
    predicted = choice.prediction
    assert predicted.low is not None and predicted.high is not None  # the plan asks for a bootstrap
    return frozen.Decision(
        schema_version=frozen.SCHEMA_VERSION,
        shape=shape,
        base_shape=base,
        parametrization=run.parametrization,
        forward=forward_numbers(run),
        groups=frozen.groups_of(table),
        optimizer="adamw",
        learning_rate=frozen.learning_rate_of(run.schedule),
        clip_norm=run.hparams.clip_norm,
        batch_tokens=plan.proxy.batch_tokens,
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
        parallelism=frozen.Parallelism(
            data_parallel_shard=plan.launch.data_parallel_shard,
            data_parallel_replicate=plan.launch.data_parallel_replicate,
        ),
        checkpointing=frozen.Checkpointing(every_steps=plan.launch.checkpoint_every_steps),
        predicted=frozen.PredictedLoss(
            loss_nats=predicted.loss_nats,
            low_nats=predicted.low,
            high_nats=predicted.high,
            level=predicted.level,
            extrapolation=predicted.extrapolation,
        ),
        abort=frozen.Abort(on_non_finite=True, train_loss_above_nats=math.log(shape.vocab_size) + DIVERGED_ABOVE_NATS),
    )
