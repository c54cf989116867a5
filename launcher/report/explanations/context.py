"""The knowledge of a study at the freeze, from which the provenance of fields is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from forerun._launcher.report.explanations.field_provenance import (
    EvidenceStrength,
    GateOutcome,
    PlanKey,
    SourceRuns,
)
from forerun._launcher.report.views.transfer import format_estimate, format_test
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import Decision
    from forerun._launcher.report.views.report_model import Report
    from forerun._launcher.report.views.transfer_findings import TargetValue, Verdict
    from forerun._launcher.study.plan.study import Study
    from forerun._launcher.study.stages.study_findings import StudyFindings


@dataclass(frozen=True, kw_only=True, slots=True)
class TestEvidence:
    """A transfer test: its verdict as in the report, and its runs."""

    verdict: Verdict
    runs: SourceRuns

    @property
    def extrapolation(self) -> float:
        """Ratio of the target's size to the largest size that was run."""
        sizes = [optimum.size for optimum in self.verdict.optima]
        return float(self.verdict.target_size / max(sizes)) if sizes else 1.0

    def describe(self) -> str:
        """Return sentences with the outcome, the number of runs, and the regret."""
        verdict = self.verdict
        seeds = format_counted(self.runs.num_seeds, "seed")
        runs = f"{format_counted(self.runs.num_runs, 'run')}, {seeds}"
        sentence = f"{self.runs.what.capitalize()}: {to_words(verdict.outcome)} ({runs}). "
        if verdict.outcome == "cannot_tell":
            sentence += f"Reason: {verdict.reasons[0]}"
        else:
            sentence += f"The value used loses {format_estimate(verdict.regret_nats)} nats"
            sentence += f", with a margin of {verdict.margin_nats:g}"
        bend = verdict.bend
        if bend.probability is not None and verdict.power_is_measured:
            sentence += (
                f". With probability {bend.probability:.2f} the line through the optima bends: "
                "beyond the largest size that was run, the optimum moves by "
                f"{format_estimate(bend.octaves_per_doubling, '+.2f')} octaves per doubling more "
                "than up to there"
            )
        return sentence


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """A decision, and the knowledge of the study that made it."""

    decision: Decision
    plan: Plan
    report: Report
    """The report. Every stage has ended."""
    specs: tuple[RunSpec, ...]
    """Runs that the decision rests on, each once."""
    search: SourceRuns
    """Runs of the search's trials."""
    ladder: SourceRuns
    """Runs of the ladder's rungs."""
    tests: tuple[TestEvidence, ...]
    """Transfer tests, in the order of the report."""

    def get_plan_keys(self, keys: Iterable[str]) -> tuple[PlanKey, ...]:
        """Return keys of the plan, each with its value and its default."""
        values, defaults = (plan.model_dump(mode="json") for plan in (self.plan, Plan()))
        return tuple(
            PlanKey(key=key, value=_get_value(values, key), default=_get_value(defaults, key))
            for key in keys
        )

    def find_value_row(self, hyperparameter: str) -> TargetValue | None:
        """Return a hyperparameter's row of the table of values; None if it has no row."""
        values = self.report.transfer.values if self.report.transfer else ()
        return next((value for value in values if value.hyperparameter == hyperparameter), None)

    def select_tests(self, bears_on: Callable[[str, str], bool]) -> tuple[TestEvidence, ...]:
        """Return the transfer tests whose hyperparameter and axis satisfy a predicate."""
        return tuple(
            test for test in self.tests if bears_on(test.verdict.hyperparameter, test.verdict.axis)
        )

    def select_gates(self, *names: str) -> tuple[GateOutcome, ...]:
        """Return the named gates, as they were when the config was frozen."""
        return tuple(
            GateOutcome(
                name=gate.name,
                outcome=gate.outcome,
                reason=gate.reason,
                accepted=self.report.accepted.get(gate.name),
            )
            for gate in self.report.gates
            if gate.name in names
        )

    def describe_key_changes(self, keys: Sequence[str]) -> list[str]:
        """Return a sentence on how to change plan keys; empty if there are no keys.

        A key that identifies the runs needs a new study; another key can be set in this study.
        """
        if not keys:
            return []
        section, _, name = keys[0].partition(".")
        section_values = cast(Mapping[str, Any], self.plan.to_question().get(section, {}))
        way = f": `forerun run PLAN --study STUDY --set {keys[0]}=...`, then `forerun freeze STUDY`"
        if section == "data" or name.partition(".")[0] in section_values:
            way = ", which needs a new study: `forerun run OTHER_PLAN --study NEW --fork STUDY`"
        return [f"plan key {' or '.join(keys)}{way}"]


def build_strength(
    tests: Sequence[TestEvidence], gates: Sequence[GateOutcome], *, preface: str = "", **fields: Any
) -> EvidenceStrength:
    """Return the strength of evidence from tests and gates.

    Args:
        tests: Tests that bear on the field. The first one gives the outcome.
        gates: Gates that bear on the field.
        preface: Text that precedes the sentences on tests and gates.
        **fields: Fields of the result. They take precedence over those from the tests.
    """
    sentences = [preface] if preface else []
    if tests:
        sentences += [test.describe() for test in tests]
        fields = {
            "outcome": tests[0].verdict.outcome,
            "num_runs": len({run_id for test in tests for run_id in test.runs.ids}),
            "num_seeds": max(test.runs.num_seeds for test in tests),
            "extrapolation": max(test.extrapolation for test in tests),
        } | fields
    for gate in gates:
        sentence = f"Gate {gate.name}: {to_words(gate.outcome)}"
        sentences.append(
            sentence if gate.accepted is None else f"{sentence}, accepted ({gate.accepted})"
        )
    return EvidenceStrength(
        kind="measured", text=". ".join(sentences), gates=tuple(gates), **fields
    )


def _get_value(plan: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if the plan has no such key."""
    value: Any = plan
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _describe_runs(purpose: str, specs: Iterable[RunSpec]) -> SourceRuns:
    """Build the record of some runs, each counted once."""
    seeds = {spec.id: spec.seed for spec in specs}
    return SourceRuns(
        what=purpose, num_runs=len(seeds), num_seeds=len(set(seeds.values())), ids=tuple(seeds)
    )


def collect_context(
    study: Study, findings: StudyFindings, decision: Decision, report: Report
) -> DecisionContext:
    """Collect the knowledge behind a decision.

    Args:
        study: The study as recorded.
        findings: Findings of the study, with a choice.
        decision: Decision made from these findings.
        report: The report.
    """
    from forerun._launcher.study.experiments.ladder import choose_checked_rungs

    assert findings.searched and findings.verdicts and report.transfer
    search = [study.build_trial(point) for point in findings.searched.points]
    tests = [test for test, _ in findings.verdicts.tests]
    checks = [
        spec
        for checked in choose_checked_rungs(study, findings.ladder)
        for spec in checked.extra_runs
    ]
    specs = {spec.id: spec for spec in (*search, *findings.ladder, *checks)}
    specs |= {spec.id: spec for test in tests for spec in test.specs}
    return DecisionContext(
        decision=decision,
        plan=study.plan,
        report=report,
        specs=tuple(specs.values()),
        search=_describe_runs("search", search),
        ladder=_describe_runs("ladder", findings.ladder),
        tests=tuple(
            TestEvidence(
                verdict=reported_test.verdict,
                runs=_describe_runs(format_test(reported_test), test.specs),
            )
            for test, reported_test in zip(tests, report.transfer.tests, strict=True)
        ),
    )
