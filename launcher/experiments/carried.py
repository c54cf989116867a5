"""What transfer found, as plain data for report and verbs: every test, every value carried to the target."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.experiments.arms import Sizes, TransferTest, axis_sizes, base_sizes, base_value
from launcher.experiments.ties import ties_body
from launcher.experiments.transferred import Transferred, Verdicts
from launcher.plan.study import Study
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, WITH_OPTIMUM
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import scaled, scaling
from proxies.core.spec import RunResult
from transfer.question import Axis, Hyperparameter
from transfer.verdict.summary import estimate_summary, together_summary, verdict_summary
from transfer.verdict.together import differs
from transfer.verdict.verdict import Verdict

_AXES: tuple[Axis, ...] = ("width", "depth", "batch", "duration")
_USUAL = tuple(one.name for one in HYPERPARAMETERS.values() if one.set_by != "axes")
"""Shown whether they were searched or not."""


def transfer_body(
    study: Study, found: Transferred, verdicts: Verdicts, results: Mapping[str, RunResult]
) -> dict[str, Json]:
    """Tests with their verdicts and runs, the learning rate over all axes, and the table of values."""
    return {
        "tests": [
            {
                "axis": test.axis,
                "hyperparameter": test.hyperparameter,
                "verdict": verdict_summary(judged.verdict),
                "runs": _runs(study, test, results),
            }
            for test, judged in verdicts.tests
        ],
        "together": together_summary(verdicts.together),
        "values": _values(study, found, verdicts),
        "learning_rate": found.learning_rate,
        "at_base_optimum": found.at_optimum,
    }


def _runs(study: Study, test: TransferTest, results: Mapping[str, RunResult]) -> list[Json]:
    arms = {study.plan.proxy.parametrization: test.arm} | ({"sp": test.control} if test.control else {})
    return [
        {
            "arm": name,
            "size": arm.size(spec),
            "log2_value": log2_value,
            "seed": spec.seed,
            "loss_nats": results[spec.id].loss_nats,
            "status": results[spec.id].status,
        }
        for name, arm in arms.items()
        for spec, log2_value in arm.specs
    ]


def _values(study: Study, found: Transferred, verdicts: Verdicts) -> list[Json]:
    """One row a hyperparameter: at the base, at the target, by which rule, and how far that was tested."""
    tested = [test.hyperparameter for test, _ in verdicts.tests]
    names = [name for name in WITH_OPTIMUM if name in (*_USUAL, *found.best, *tested)]
    return [_value(study, found, verdicts, name) for name in names]


def _value(study: Study, found: Transferred, verdicts: Verdicts, name: Hyperparameter) -> dict[str, Json]:
    base, target = base_sizes(study), verdicts.target
    mine = [judged.verdict for test, judged in verdicts.tests if test.hyperparameter == name]
    axes = [verdict.question.axis for verdict in mine]
    value, rule = _carried(study, found, target, name)
    rate = name == LEARNING_RATE
    worst = max(mine, key=_regret, default=None)
    regret = verdicts.together.regret_nats if rate else worst.regret_nats if worst else None
    outcome = verdicts.together.outcome if rate else worst.outcome if worst else None
    margin = study.plan.transfer.margin_nats
    over = [*axes, *(["duration"] if name == found.warmup.HYPERPARAMETER and found.warmup.finding else [])]
    twice = [cost for verdict in mine if (cost := verdict_summary(verdict)["cost_of_2x_off_nats"]) is not None]
    return {
        "hyperparameter": name,
        "base_value": found.learning_rate if rate else base_value(study, name, found.point),
        "target_value": value,
        "rule": rule,
        "tested": list(axes),
        "untested": [a for a in _AXES if a not in over and differs(target.along(a), base.along(a))],
        "outcome": outcome,
        "drifts": {v.question.axis: estimate_summary(v.drift) for v in mine},
        "regret_nats": estimate_summary(regret),
        "cost_of_2x_off_nats": twice[0] if twice else None,
        "tie": next(iter(ties_body([tie for tie in found.ties if tie.hyperparameter == name], margin)), None),
        "carry": found.warmup.body(margin) if name == found.warmup.HYPERPARAMETER else None,
    }


def _regret(verdict: Verdict) -> tuple[int, float]:
    """What drifts first, then what cannot tell, then by cost."""
    rank = ("holds", "cannot_tell", "drifts").index(verdict.outcome)
    return rank, verdict.regret_nats.high if verdict.regret_nats else 0.0


def _carried(study: Study, found: Transferred, target: Sizes, name: Hyperparameter) -> tuple[Json, str]:
    """A value at the target, and the rule that puts it there in words, with what the search's end decided."""
    value, rule = _ruled(study, found, target, name)
    margin = study.plan.transfer.margin_nats
    return value, "; ".join([rule, *(tie.words(margin) for tie in found.ties if tie.hyperparameter == name)])


def _ruled(study: Study, found: Transferred, target: Sizes, name: Hyperparameter) -> tuple[Json, str]:
    base, rules = base_sizes(study), study.plan.parametrization
    ratios = Ratios(**{axis: target.along(axis) / base.along(axis) for axis in _AXES})
    if name == LEARNING_RATE:
        said = [f"set at the base width; each kind of parameter as {rules.name} scales it"]
        said += [
            f"times {ratio:.3g}^{power:+.3f} over {axis}, as measured"
            for axis, power in found.powers.items()
            if (ratio := target.along(axis) / base.along(axis)) != 1
        ]
        said += [
            f"no exponent over {axis} could be measured: none is used"
            for axis in study.plan.transfer.measured_rules
            if axis_sizes(study, axis) and axis not in found.powers
        ]
        return found.rate_at(base, target), "; ".join(said)
    value = base_value(study, name, found.point)
    if name == found.warmup.HYPERPARAMETER:
        return found.point_at(study, target)[name], found.warmup.words(study.plan.transfer.margin_nats)
    powers, one = scaling(rules, name), HYPERPARAMETERS[name]
    if one.can_be_off and not value:
        return value, "off"
    if powers == Powers():
        return value, "as it is"
    scaled_words = f"1 - {name}" if one.scale == "log2_complement" else "of hidden matrices,"
    return scaled(rules, name, value, ratios), f"{scaled_words} times {powers}"
