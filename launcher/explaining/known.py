"""What a study knows when it freezes, in the parts that the provenance of a field is made of."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from launcher.explaining.record import GateOutcome, Interval, PlanKey, Runs, Strength
from launcher.plan.plan import Plan
from launcher.plan.sections import RuleChoices
from launcher.views.transfer import estimated, name_of
from proxies.core.canon import Json
from proxies.core.spec import RunSpec

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision
    from launcher.plan.study import Study
    from launcher.study.evidence import Findings

PLACES = {"cluster": True, "data": {"path"}, "proxy": {"code_path"}}
"""What a plan says of one machine: no field comes from it."""
SHARED = ("data", "model", "proxy")
"""Sections of the plan that every run follows."""


def plan_record(plan: Plan) -> dict[str, Json]:
    """Every key of a plan but those about places and machines."""
    return cast(dict[str, Json], json.loads(plan.model_dump_json(exclude=cast(Any, PLACES))))


def at(plan: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where a record lacks it."""
    found: Any = plan
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def nats(value: float) -> str:
    """A loss, or a difference of losses."""
    return f"{value:.4f}"


def lost(estimate: Any) -> str:
    """Nats with their interval."""
    value, *ends = estimated(estimate, nats)
    return value + (f" [{', '.join(ends)}]" if ends else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """One transfer test: its verdict as the report has it, and its runs."""

    verdict: Any
    runs: Runs

    @property
    def reach(self) -> float:
        """The target's size over the largest that was run."""
        sizes = [optimum["size"] for optimum in self.verdict["optima"]]
        return float(self.verdict["target_size"] / max(sizes)) if sizes else 1.0

    def words(self) -> str:
        """Outcome, cost and number of runs in a clause."""
        verdict, cost = self.verdict, self.verdict["regret_nats"]
        said = f"{self.runs.what}: {verdict['outcome'].replace('_', ' ')}"
        if cost["value"] is not None:
            said += f", the value used loses {lost(cost)} nats at level {verdict['level']:g} (margin "
            said += f"{verdict['margin_nats']:g})"
        if verdict["outcome"] == "cannot_tell" or cost["value"] is None:
            said += f" ({verdict['reasons'][0]})"
        return f"{said}; {self.runs.num_runs} runs, {self.runs.num_seeds} seeds"

    def intervals(self) -> list[Interval]:
        """What it knows of the loss and of the drift."""
        return [
            Interval(of=f"{of}, {self.runs.what}", low=ends[0], high=ends[1], level=self.verdict["level"])
            for key, of in (
                ("regret_nats", "nats lost at the target"),
                ("drift_octaves_per_doubling", "octaves a doubling"),
            )
            if (ends := self.verdict[key]["interval"]) is not None
        ]

    def cost(self) -> list[str]:
        """What a value off by a factor of two loses, and the standard form, where that was measured."""
        verdict, axis, said = self.verdict, self.verdict["axis"], []
        if (twice := verdict["cost_of_2x_off_nats"]) is not None:
            estimate = {"value": twice, "interval": verdict["cost_of_2x_off_interval"]}
            said.append(
                f"over {axis}, a value off by a factor of two, to the worse side, loses {lost(estimate)} nats at the "
                "largest size that tells it"
            )
        if (control := verdict["control"]) and control["regret_nats"]["value"] is not None:
            loss = lost(control["regret_nats"])
            said.append(f"the standard form, run beside, its value carried as it is over {axis}, loses {loss} nats")
        return said


@dataclass(frozen=True, kw_only=True)
class Known:
    """A decision, and what the study that made it knows."""

    decision: Decision
    plan: Plan
    body: Any
    """Of the report."""
    main: RunSpec
    """The launch as a run of the study."""
    specs: tuple[RunSpec, ...]
    """Runs that the decision rests on, each once."""
    search: Runs
    ladder: Runs
    tests: tuple[Tested, ...]

    @functools.cached_property
    def values(self) -> dict[str, Json]:
        """The plan's keys."""
        return plan_record(self.plan)

    def key(self, key: str) -> PlanKey:
        """A key of the plan: what it says, and what it would say by default."""
        section, _, name = key.partition(".")
        fields = type(getattr(self.plan, section)).model_fields
        if name.startswith("rules."):
            fields, name = RuleChoices.model_fields, name.removeprefix("rules.")
        value, default = at(self.values, key), at(_defaults(), key)
        text = fields[name.partition(".")[0]].description or ""
        return PlanKey(key=key, value=value, default=default, text=text, is_set=value != default)

    def row(self, hyperparameter: str) -> Any:
        """The row of the table of values; None where there is none."""
        return next((r for r in self.body["transfer"]["values"] if r["hyperparameter"] == hyperparameter), None)

    def tests_on(self, bears: Callable[[str, str], bool]) -> tuple[Tested, ...]:
        """Transfer tests that bear on something, by hyperparameter and axis."""
        return tuple(one for one in self.tests if bears(one.verdict["hyperparameter"], one.verdict["axis"]))

    def gates(self, *names: str) -> tuple[GateOutcome, ...]:
        """Gates as they were when the config was frozen."""
        return tuple(
            GateOutcome(name=gate["name"], outcome=gate["outcome"], reason=gate["reason"],
                        accepted=self.body["accepted"].get(gate["name"]))
            for gate in self.body["gates"]
            if gate["name"] in names
        )  # fmt: skip

    def change_keys(self, keys: Iterable[str]) -> list[str]:
        """How plan keys are changed, and what that repeats."""
        question = self.plan.question()
        kinds: dict[str, list[str]] = {}
        for key in keys:
            section, _, name = key.partition(".")
            asked = name.partition(".")[0] in cast(Mapping[str, Any], question.get(section, {}))
            kinds.setdefault("data" if section == "data" else "question" if asked else "launch", []).append(key)
        return [_CHANGE[kind].format(keys=" or ".join(same), written=_written(same[0])) for kind, same in kinds.items()]


_CHANGE = {
    "launch": "plan key {keys}: `forerun run PLAN --study STUDY --set {written}`, then `forerun freeze STUDY`: another "
    "digest, and no finished run is run again",
    "data": "plan key {keys}: other data make other runs, so a study of its own: `forerun run OTHER_PLAN --study NEW`",
    "question": "plan key {keys}: another question, so a study of its own: `forerun run PLAN --study NEW --fork STUDY "
    "--set {written}`; finished runs that it asks for too are taken over",
}


def _written(key: str) -> str:
    """A key as `--set` takes it: a key of a table goes into the table."""
    section, _, name = key.partition(".")
    table, _, inner = name.partition(".")
    return f"'{section}.{table}={{ {inner} = ... }}'" if inner else f"{key}=..."


def measured(tests: Sequence[Tested], gates: Sequence[GateOutcome], *, before: str = "", **more: Any) -> Strength:
    """What runs say of a field, by tests and gates; `before` is said first."""
    told: dict[str, Any] = {}
    if tests:
        told = {
            "outcome": tests[0].verdict["outcome"],
            "intervals": tuple(interval for one in tests for interval in one.intervals()),
            "num_runs": len({id for one in tests for id in one.runs.ids}),
            "num_seeds": max(one.runs.num_seeds for one in tests),
            "extrapolation": max(one.reach for one in tests),
        }
    said = [before] if before else []
    said += [one.words() for one in tests]
    said += [
        f"gate {gate.name} {gate.outcome.replace('_', ' ')}"
        + ("" if gate.accepted is None else f", accepted: {gate.accepted}")
        for gate in gates
    ]
    return Strength(kind="measured", text="; ".join(said), gates=tuple(gates), **{**told, **more})


@functools.cache
def _defaults() -> dict[str, Json]:
    """A plan's keys where a plan says nothing."""
    return plan_record(Plan())


def _runs(what: str, specs: Iterable[RunSpec]) -> Runs:
    """Runs as a record, each once."""
    seeds = {spec.id: spec.seed for spec in specs}
    return Runs(what=what, num_runs=len(seeds), num_seeds=len(set(seeds.values())), ids=tuple(seeds))


def known_of(study: Study, found: Findings, decision: Decision, body: Mapping[str, Any]) -> Known:
    """What is known of a decision.

    Args:
        study: as it was begun.
        found: with a choice.
        decision: what they make.
        body: of the report.
    """
    from launcher.experiments.ladder import checked_rungs
    from launcher.study.decide import main_spec

    assert found.searched and found.transferred and found.verdicts and found.choice
    search = [study.trial(point) for point in found.searched.points]
    tests = [test for test, _ in found.verdicts.tests]
    checks = [spec for checked in checked_rungs(study, found.ladder) for spec in checked.extra]
    specs = {spec.id: spec for spec in (*search, *found.ladder, *checks)}
    specs |= {spec.id: spec for test in tests for spec in test.specs}
    return Known(
        decision=decision, plan=study.plan, body=body, main=main_spec(study, found.transferred, found.choice),
        specs=tuple(specs.values()), search=_runs("search", search), ladder=_runs("ladder", found.ladder),
        tests=tuple(
            Tested(verdict=told["verdict"], runs=_runs(name_of(told), test.specs))
            for test, told in zip(tests, body["transfer"]["tests"], strict=True)
        ),
    )  # fmt: skip
