"""The knowledge of a study at the freeze, in the parts that a field's provenance is made of."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from launcher.explanations.record import EvidenceStrength, GateOutcome, PlanKey, SourceRuns
from launcher.plan.plan import Plan
from launcher.views.numbers import words
from launcher.views.transfer import estimate, name_of
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.spec import RunSpec

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision
    from launcher.plan.study import Study
    from launcher.study.evidence import StudyFindings


@dataclass(frozen=True, kw_only=True, slots=True)
class TestEvidence:
    """A transfer test: its verdict as in the report, and its runs."""

    verdict: Any
    runs: SourceRuns

    @property
    def reach(self) -> float:
        """Ratio of the target's size to the largest size that was run."""
        sizes = [optimum["size"] for optimum in self.verdict["optima"]]
        return float(self.verdict["target_size"] / max(sizes)) if sizes else 1.0

    def words(self) -> str:
        """Return sentences with the outcome, the number of runs, and the regret."""
        verdict = self.verdict
        runs = f"{counted(self.runs.num_runs, 'run')}, {counted(self.runs.num_seeds, 'seed')}"
        sentence = f"{self.runs.what.capitalize()}: {words(verdict['outcome'])} ({runs}). "
        if verdict["outcome"] == "cannot_tell":
            sentence += f"Reason: {verdict['reasons'][0]}"
        else:
            sentence += f"The value used loses {estimate(verdict['regret_nats'])} nats"
            sentence += f", with a margin of {verdict['margin_nats']:g}"
        bend = verdict["bend"]
        if bend["probability"] is not None and verdict["power_is_measured"]:
            sentence += (
                f". The line bends with probability {bend['probability']:.2f}, beyond the runs by "
            )
            sentence += f"{estimate(bend['octaves_per_doubling'], '+.2f')} octaves per doubling"
        return sentence


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """A decision, and the knowledge of the study that made it."""

    decision: Decision
    plan: Plan
    body: Any
    """Body of the report."""
    specs: tuple[RunSpec, ...]
    """Runs that the decision rests on, each once."""
    search: SourceRuns
    ladder: SourceRuns
    tests: tuple[TestEvidence, ...]

    @functools.cached_property
    def values(self) -> dict[str, Json]:
        """Values of the plan's keys."""
        return _dump_plan(self.plan)

    def key(self, key: str) -> PlanKey:
        """Return a key of the plan, with its value and its default."""
        return PlanKey(
            key=key,
            value=_get_value(self.values, key),
            default=_get_value(_dump_default_plan(), key),
        )

    def row(self, hyperparameter: str) -> Any:
        """Return a hyperparameter's row of the table of values; None if it has none."""
        return next(
            (r for r in self.body["transfer"]["values"] if r["hyperparameter"] == hyperparameter),
            None,
        )

    def tests_on(self, bears_on: Callable[[str, str], bool]) -> tuple[TestEvidence, ...]:
        """Return the transfer tests whose hyperparameter and axis satisfy a predicate."""
        return tuple(
            test
            for test in self.tests
            if bears_on(test.verdict["hyperparameter"], test.verdict["axis"])
        )

    def gates(self, *names: str) -> tuple[GateOutcome, ...]:
        """Return the named gates, as they were when the config was frozen."""
        return tuple(
            GateOutcome(
                name=gate["name"],
                outcome=gate["outcome"],
                reason=gate["reason"],
                accepted=self.body["accepted"].get(gate["name"]),
            )
            for gate in self.body["gates"]
            if gate["name"] in names
        )

    def change_keys(self, keys: Sequence[str]) -> list[str]:
        """Return how plan keys are changed, and what has to run again."""
        if not keys:
            return []
        section, _, name = keys[0].partition(".")
        section_values = cast(Mapping[str, Any], self.plan.question().get(section, {}))
        key_text = f"plan key {' or '.join(keys)}"
        if section == "data" or name.partition(".")[0] in section_values:
            return [
                (
                    f"{key_text}, which needs a new study: "
                    "`forerun run OTHER_PLAN --study NEW --fork STUDY`"
                )
            ]
        return [
            (
                f"{key_text}: `forerun run PLAN --study STUDY --set {keys[0]}=...`, "
                "then `forerun freeze STUDY`"
            )
        ]


def build_strength(
    tests: Sequence[TestEvidence], gates: Sequence[GateOutcome], *, before: str = "", **more: Any
) -> EvidenceStrength:
    """Return the strength of evidence from tests and gates.

    Args:
        tests: Tests that bear on the field.
        gates: Gates that bear on it.
        before: Text that precedes theirs.
        **more: Other fields of the result, which take precedence.
    """
    fields_from_tests: dict[str, Any] = {}
    if tests:
        fields_from_tests = {
            "outcome": tests[0].verdict["outcome"],
            "num_runs": len({run_id for test in tests for run_id in test.runs.ids}),
            "num_seeds": max(test.runs.num_seeds for test in tests),
            "extrapolation": max(test.reach for test in tests),
        }
    sentences = [before] if before else []
    sentences += [test.words() for test in tests]
    sentences += [
        f"Gate {gate.name}: {words(gate.outcome)}"
        if gate.accepted is None
        else f"Gate {gate.name}: accepted failure ({gate.accepted})"
        if gate.outcome == "failed"
        else f"Gate {gate.name}: {words(gate.outcome)}, accepted ({gate.accepted})"
        for gate in gates
    ]
    return EvidenceStrength(
        kind="measured",
        text=". ".join(sentences),
        gates=tuple(gates),
        **{**fields_from_tests, **more},
    )


def _get_value(plan: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if a section lacks it."""
    value: Any = plan
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _dump_plan(plan: Plan) -> dict[str, Json]:
    return cast(dict[str, Json], json.loads(plan.model_dump_json()))


@functools.cache
def _dump_default_plan() -> dict[str, Json]:
    """Return the values of an empty plan, which are the defaults."""
    return _dump_plan(Plan())


def _describe_runs(purpose: str, specs: Iterable[RunSpec]) -> SourceRuns:
    """Build the record of some runs, each counted once."""
    seeds = {spec.id: spec.seed for spec in specs}
    return SourceRuns(
        what=purpose, num_runs=len(seeds), num_seeds=len(set(seeds.values())), ids=tuple(seeds)
    )


def known_of(
    study: Study, findings: StudyFindings, decision: Decision, body: Mapping[str, Any]
) -> DecisionContext:
    """Collect the knowledge behind a decision.

    Args:
        study: The study as recorded.
        findings: Findings of the study, with a choice.
        decision: Decision made from them.
        body: Body of the report.
    """
    from launcher.experiments.ladder import checked_rungs

    assert findings.searched and findings.verdicts
    search = [study.trial(point) for point in findings.searched.points]
    tests = [test for test, _ in findings.verdicts.tests]
    checks = [spec for checked in checked_rungs(study, findings.ladder) for spec in checked.extra]
    specs = {spec.id: spec for spec in (*search, *findings.ladder, *checks)}
    specs |= {spec.id: spec for test in tests for spec in test.specs}
    return DecisionContext(
        decision=decision,
        plan=study.plan,
        body=body,
        specs=tuple(specs.values()),
        search=_describe_runs("search", search),
        ladder=_describe_runs("ladder", findings.ladder),
        tests=tuple(
            TestEvidence(
                verdict=body_of_test["verdict"],
                runs=_describe_runs(name_of(body_of_test), test.specs),
            )
            for test, body_of_test in zip(tests, body["transfer"]["tests"], strict=True)
        ),
    )
