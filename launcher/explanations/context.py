"""What a study knows when it freezes, in the parts that the provenance of a field is made of."""

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
    """One transfer test: its verdict as the report has it, and its runs."""

    verdict: Any
    runs: SourceRuns

    @property
    def reach(self) -> float:
        """The target's size over the largest that was run."""
        sizes = [optimum["size"] for optimum in self.verdict["optima"]]
        return float(self.verdict["target_size"] / max(sizes)) if sizes else 1.0

    def words(self) -> str:
        """Return sentences with outcome, number of runs, and cost."""
        verdict = self.verdict
        runs = f"{counted(self.runs.num_runs, 'run')}, {counted(self.runs.num_seeds, 'seed')}"
        said = f"{self.runs.what.capitalize()}: {words(verdict['outcome'])} ({runs}). "
        if verdict["outcome"] == "cannot_tell":
            said += f"Reason: {verdict['reasons'][0]}"
        else:
            said += f"The value used loses {estimate(verdict['regret_nats'])} nats"
            said += f", with a margin of {verdict['margin_nats']:g}"
        bend = verdict["bend"]
        if bend["probability"] is not None and verdict["power_is_measured"]:
            said += (
                f". The line bends with probability {bend['probability']:.2f}, beyond the runs by "
            )
            said += f"{estimate(bend['octaves_per_doubling'], '+.2f')} octaves per doubling"
        return said


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """A decision, and what the study that made it knows."""

    decision: Decision
    plan: Plan
    body: Any
    """The body of the report."""
    specs: tuple[RunSpec, ...]
    """Runs that the decision rests on, each once."""
    search: SourceRuns
    ladder: SourceRuns
    tests: tuple[TestEvidence, ...]

    @functools.cached_property
    def values(self) -> dict[str, Json]:
        """The plan's keys."""
        return _values(self.plan)

    def key(self, key: str) -> PlanKey:
        """A key of the plan: what it says, and what it would say by default."""
        return PlanKey(key=key, value=_at(self.values, key), default=_at(_defaults(), key))

    def row(self, hyperparameter: str) -> Any:
        """The row of the table of values; None where there is none."""
        return next(
            (r for r in self.body["transfer"]["values"] if r["hyperparameter"] == hyperparameter),
            None,
        )

    def tests_on(self, bears: Callable[[str, str], bool]) -> tuple[TestEvidence, ...]:
        """Transfer tests that bear on something, by hyperparameter and axis."""
        return tuple(
            one for one in self.tests if bears(one.verdict["hyperparameter"], one.verdict["axis"])
        )

    def gates(self, *names: str) -> tuple[GateOutcome, ...]:
        """Gates as they were when the config was frozen."""
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
        """How plan keys are changed, and what that repeats."""
        if not keys:
            return []
        section, _, name = keys[0].partition(".")
        asked = cast(Mapping[str, Any], self.plan.question().get(section, {}))
        named = f"plan key {' or '.join(keys)}"
        if section == "data" or name.partition(".")[0] in asked:
            return [
                (
                    f"{named}, which needs a new study: `forerun run OTHER_PLAN --study NEW --fork "
                    "STUDY`"
                )
            ]
        return [
            (
                f"{named}: `forerun run PLAN --study STUDY --set {keys[0]}=...`, then `forerun "
                "freeze "
                "STUDY`"
            )
        ]


def measured(
    tests: Sequence[TestEvidence], gates: Sequence[GateOutcome], *, before: str = "", **more: Any
) -> EvidenceStrength:
    """What runs say of a field, by tests and gates; `before` comes first."""
    told: dict[str, Any] = {}
    if tests:
        told = {
            "outcome": tests[0].verdict["outcome"],
            "num_runs": len({id for one in tests for id in one.runs.ids}),
            "num_seeds": max(one.runs.num_seeds for one in tests),
            "extrapolation": max(one.reach for one in tests),
        }
    said = [before] if before else []
    said += [one.words() for one in tests]
    said += [
        f"Gate {gate.name}: {words(gate.outcome)}"
        if gate.accepted is None
        else f"Gate {gate.name}: accepted failure ({gate.accepted})"
        if gate.outcome == "failed"
        else f"Gate {gate.name}: {words(gate.outcome)}, accepted ({gate.accepted})"
        for gate in gates
    ]
    return EvidenceStrength(
        kind="measured", text=". ".join(said), gates=tuple(gates), **{**told, **more}
    )


def _at(plan: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where a record lacks it."""
    found: Any = plan
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _values(plan: Plan) -> dict[str, Json]:
    return cast(dict[str, Json], json.loads(plan.model_dump_json()))


@functools.cache
def _defaults() -> dict[str, Json]:
    """A plan's keys where a plan says nothing."""
    return _values(Plan())


def _runs(what: str, specs: Iterable[RunSpec]) -> SourceRuns:
    """Runs as a record, each once."""
    seeds = {spec.id: spec.seed for spec in specs}
    return SourceRuns(
        what=what, num_runs=len(seeds), num_seeds=len(set(seeds.values())), ids=tuple(seeds)
    )


def known_of(
    study: Study, found: StudyFindings, decision: Decision, body: Mapping[str, Any]
) -> DecisionContext:
    """What is known of a decision.

    Args:
        study: as it was begun.
        found: with a choice.
        decision: what they make.
        body: of the report.
    """
    from launcher.experiments.ladder import checked_rungs

    assert found.searched and found.verdicts
    search = [study.trial(point) for point in found.searched.points]
    tests = [test for test, _ in found.verdicts.tests]
    checks = [spec for checked in checked_rungs(study, found.ladder) for spec in checked.extra]
    specs = {spec.id: spec for spec in (*search, *found.ladder, *checks)}
    specs |= {spec.id: spec for test in tests for spec in test.specs}
    return DecisionContext(
        decision=decision,
        plan=study.plan,
        body=body,
        specs=tuple(specs.values()),
        search=_runs("search", search),
        ladder=_runs("ladder", found.ladder),
        tests=tuple(
            TestEvidence(verdict=told["verdict"], runs=_runs(name_of(told), test.specs))
            for test, told in zip(tests, body["transfer"]["tests"], strict=True)
        ),
    )
