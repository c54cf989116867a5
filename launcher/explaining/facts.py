"""Sentences and numbers that many fields share, each from the records: plan keys, transfer tests, gates. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.explaining.known import Known, asks_anew
from launcher.explaining.record import GateSaid, Interval, PlanKey, Runs, Source, Strength
from launcher.views.transfer import estimated, name_of, wanted
from proxies.core.canon import Json

NOT_HERE = "the evidence that would say is not here"


def number(value: object) -> str:
    """A value as one says it: numbers to four digits, counts with commas."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def ends(interval: Any) -> str:
    """An interval, `[1.2, 3.4]`; where there is none, that."""
    if interval is None or interval[0] is None or interval[1] is None:
        return "[no interval]"
    return f"[{number(float(interval[0]))}, {number(float(interval[1]))}]"


def nats(value: float) -> str:
    """A loss, or a difference of losses."""
    return f"{value:.4f}"


def lost(estimate: Any) -> str:
    """Nats with their interval."""
    value, *ends = estimated(estimate, nats)
    return value + (f" [{', '.join(ends)}]" if ends else "")


def key_words(asked: PlanKey) -> str:
    """A plan key and whether somebody set it."""
    if asked.is_set is None:
        return f"{asked.key} (the plan is not here; by default {shown(asked.default)})"
    told = f"by default {shown(asked.default)}" if asked.is_set else "the default"
    return f"{asked.key} = {shown(asked.value)} ({told})"


def shown(value: Json) -> str:
    """A plan's value, in short."""
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else number(value)


def from_plan(known: Known, value: Json, *keys: str, by: str = "", fields: tuple[str, ...] = ()) -> Source:
    """That the plan decides it.

    Args:
        known: the records.
        value: of the field; held against the default where the plan is not here.
        keys: the first that is not 0 or empty decides; the last in any case.
        by: how the value follows from them; empty: it is the key's own.
        fields: from which else it follows.
    """
    asked = [known.asked(key) for key in keys]
    first = next((index for index, one in enumerate(asked) if one.value), len(asked) - 1)
    passed, decides = asked[:first], asked[first]
    told = [f"{one.key} is {shown(one.value)}: as the proxies" for one in passed if one.is_set is not None]
    told.append(key_words(decides) + (f": {by}" if by else ""))
    is_set = decides.is_set
    if is_set is None:
        is_set = bool(by) or value != decides.default
        if not by:
            told.append(f"the value {'is not' if is_set else 'is'} that default")
    return Source(
        kind="plan" if is_set else "default", text="; ".join(told), plan_keys=(*passed, decides), fields=fields
    )


def change_keys(known: Known, *keys: str) -> tuple[str, ...]:
    """How a plan key is changed, and what that repeats."""
    plan, study = known.plan_words, known.study_words
    said = []
    if same := [key for key in keys if not asks_anew(key)]:
        said.append(
            f"plan key {' or '.join(same)}: `forerun run {plan} --study {study} --set {set_words(same[0])}`, then "
            f"`forerun freeze {study}`: another digest, and no finished run is run again"
        )
    if data := [key for key in keys if key.startswith("data.")]:
        said.append(
            f"plan key {' or '.join(data)}: other data make other runs, so a study of its own: "
            "`forerun run PLAN --study NEW`"
        )
    if anew := [key for key in keys if asks_anew(key) and key not in data]:
        said.append(
            f"plan key {' or '.join(anew)}: another question, so a study of its own: `forerun run {plan} --study NEW "
            f"--fork {study} --set {set_words(anew[0])}`; finished runs that it asks for too are taken over"
        )
    return tuple(said)


def set_words(key: str) -> str:
    """A key as `--set` takes it: a key of a table goes into the table."""
    section, _, name = key.partition(".")
    table, _, inner = name.partition(".")
    return f"'{section}.{table}={{ {inner} = ... }}'" if inner else f"{key}=..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """One transfer test of a hyperparameter, as the evidence has it."""

    test: Mapping[str, Any]
    ids: tuple[str, ...]

    @property
    def verdict(self) -> Any:
        """Of the study's own arm."""
        return self.test["verdict"]

    @property
    def num_seeds(self) -> int:
        """Different seeds among the runs of both arms."""
        return len({run["seed"] for run in self.test["runs"]})

    @property
    def num_runs(self) -> int:
        """Of both arms, those that they share once; failed ones too."""
        return len(self.ids) or len(self.test["runs"])

    @property
    def runs(self) -> Runs:
        """The same as a record."""
        return Runs(what=name_of(self.test), num_runs=self.num_runs, num_seeds=self.num_seeds, ids=self.ids)

    @property
    def reach(self) -> float:
        """The target's size over the largest that was run."""
        sizes = [optimum["size"] for optimum in self.verdict["optima"]]
        return float(self.verdict["target_size"] / max(sizes)) if sizes else 1.0

    def words(self) -> str:
        """Outcome, cost and reach in a clause."""
        verdict, cost = self.verdict, self.verdict["regret_nats"]
        said = f"{name_of(self.test)}: {verdict['outcome'].replace('_', ' ')}"
        if cost["value"] is not None:
            said += (
                f", the value used loses {lost(cost)} nats at level {verdict['level']:g} (margin "
                f"{verdict['margin_nats']:g})"
            )
        if verdict["outcome"] == "cannot_tell" or cost["value"] is None:
            said += f" ({verdict['reasons'][0]})"
        return f"{said}; {self.num_runs} runs, {self.num_seeds} seeds"


def tests_of(known: Known, hyperparameter: str) -> tuple[Tested, ...]:
    """The tests of a hyperparameter; none where none was made, or the evidence is not here."""
    ids = {
        (one["hyperparameter"], one["axis"]): tuple(one["ids"])
        for one in (known.provenance.get("runs") or {}).get("transfer", ())
    }
    return tuple(
        Tested(test=test, ids=ids.get((test["hyperparameter"], test["axis"]), ()))
        for test in known.transfer.get("tests", ())
        if test["hyperparameter"] == hyperparameter
    )


def decisive(known: Known, tests: Sequence[Tested]) -> list[str]:
    """Runs that would decide the tests, in sentences, and the command that makes them."""
    said = [sentence for one in tests for sentence in wanted(one.verdict)]
    if not any(one.verdict["outcome"] == "cannot_tell" for one in tests):
        return said
    spend = f"`forerun transfer {known.plan_words} --study {known.study_words} --spend` runs what a verdict still wants"
    return [*said, spend]


def intervals_of(tests: Sequence[Tested]) -> tuple[Interval, ...]:
    """What the tests know of the loss and of the drift."""
    found = []
    for one in tests:
        name, level = name_of(one.test), one.verdict["level"]
        for key, of in (
            ("regret_nats", "nats lost at the target"),
            ("drift_octaves_per_doubling", "octaves a doubling"),
        ):
            ends_of = one.verdict[key]["interval"]
            if ends_of is not None:
                found.append(Interval(of=f"{of}, {name}", low=ends_of[0], high=ends_of[1], level=level))
    return tuple(found)


def gate_words(gates: Sequence[GateSaid]) -> str:
    """Gates with their outcomes, and who went past them; empty where there are none."""
    return "; ".join(
        f"gate {gate.name} {gate.outcome.replace('_', ' ')}"
        + ("" if gate.accepted is None else f", accepted: {gate.accepted}")
        for gate in gates
    )


def gate_change(gates: Sequence[GateSaid]) -> tuple[str, ...]:
    """What gates that did not pass found, which is what would have to be mended."""
    return tuple(f"gate {gate.name}: {gate.reason}" for gate in gates if gate.outcome != "passed")


def resting(known: Known) -> tuple[str, ...]:
    """Ids of the runs that the decision rests on, each once; empty where the evidence does not name them by stage."""
    runs = known.provenance.get("runs") or {}
    ids = [*runs.get("search", ()), *runs.get("ladder", ()), *runs.get("ladder_checks", ())]
    return tuple(dict.fromkeys(ids + [id for test in runs.get("transfer", ()) for id in test["ids"]]))


def alike(known: Known, what: str) -> Strength:
    """That every run had it, so that none compares."""
    if not known.evidence:
        return Strength(kind="unknown", text=f"whether any run had another than {what}: {NOT_HERE}")
    num_runs = len(resting(known)) or None
    runs = "every run" if num_runs is None else f"all {num_runs} runs"
    text = f"{runs} that this config rests on had {what}: none says what another would do"
    return Strength(kind="assumed", num_runs=num_runs, text=text)
