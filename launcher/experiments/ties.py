"""The end of a search: where its runs cannot tell the best trial's values from conventional ones, convention wins.

It is decided before transfer tests and ladder run, so that rate, verdict and forecast are all of the values that are
frozen. All conventions are tried at once first; if these lose, one at a time, each with those taken before it, against
the best trial: what is given away is never more than what one comparison allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.experiments.conventions import (
    CONVENTIONAL,
    Contest,
    Finding,
    because,
    contest,
    convention,
    num_runs,
    rate_offsets,
)
from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params, SearchSpace
from transfer.question import Hyperparameter

SAME = Finding(basis="same", loses_nats=None, noise_nats=None, octaves=0.0, num_seeds=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """One hyperparameter's value at the end of a search."""

    hyperparameter: Hyperparameter
    searched: float
    """To three digits, as later stages would run it."""
    conventional: float
    source: str
    """Whose value the conventional one is."""
    together: tuple[Hyperparameter, ...]
    """That had their conventional values in these runs."""
    finding: Finding

    @property
    def value(self) -> float:
        """What is used."""
        return self.conventional if self.finding.conventional else self.searched

    def words(self, margin_nats: float) -> str:
        """What was decided, and why."""
        with_others = [name.replace("_", " ") for name in self.together if name != self.hyperparameter]
        told = because(self.finding, margin_nats)
        if with_others and self.finding.basis != "same":
            told += f"; run with the conventional {' and '.join(with_others)}"
        if self.finding.octaves:
            told += f", at {2.0**self.finding.octaves:g} times the rate"
        conventional = f"the conventional {self.conventional:.3g} ({self.source})"
        if not self.finding.conventional:
            return f"the search's {self.searched:.3g}, not {conventional}: {told}"
        searched = "" if self.finding.basis == "same" else f" in place of the search's {self.searched:.3g}"
        return f"{conventional}{searched}: {told}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The decisions, as far as outcomes tell, and the runs that they take."""

    ties: tuple[Tie, ...]
    specs: tuple[RunSpec, ...]
    """Repeats of the best trial among them, which may have run already."""
    point: Params | None
    """None before all has been decided."""


def settled(study: Study, space: SearchSpace, best: Params, results: Mapping[str, RunResult]) -> Settled:
    """Decide between the best trial's values and conventional ones.

    Args:
        study: what is asked.
        space: of the search, as its ranges ended.
        best: the best trial's point.
        results: so far, by id.
    """
    values = {name: convention(study.plan, name)[0] for name in _open(study, space)}
    same = [name for name in values if _is_same(study, best, {name: values[name]})]
    left = [name for name in values if name not in same]
    ties = [_tie(study, best, name, SAME, (name,)) for name in same]
    specs: dict[str, RunSpec] = {}
    taken: tuple[Hyperparameter, ...] = tuple(same)
    octaves = 0.0

    def tried(names: tuple[Hyperparameter, ...]) -> Finding | None:
        found = _tried(study, best, {name: values[name] for name in names}, results)
        specs.update((spec.id, spec) for spec in found.specs)
        return found.finding

    def ended(*, whole: bool) -> Settled:
        rate = best["learning_rate"] * 2.0**octaves
        point: Params = {**best, "learning_rate": rate}
        point.update((name, values[name]) for name in taken)
        return Settled(ties=tuple(ties), specs=tuple(specs.values()), point=point if whole else None)

    if not left:
        return ended(whole=True)
    every = (*same, *left)
    found = tried(every)
    if found is None:
        return ended(whole=False)
    if found.conventional or len(left) == 1:
        ties += [_tie(study, best, name, found, tuple(left)) for name in left]
        taken, octaves = (every, found.octaves) if found.conventional else (taken, 0.0)
        return ended(whole=True)
    for name in left:
        found = tried((*taken, name))
        if found is None:
            return ended(whole=False)
        ties.append(_tie(study, best, name, found, tuple(n for n in (*taken, name) if n not in same)))
        taken, octaves = ((*taken, name), found.octaves) if found.conventional else (taken, octaves)
    return ended(whole=True)


def num_tie_runs(study: Study) -> tuple[int, int]:
    """Runs before anything is known: of all conventions at once, and with those of each by itself."""
    names, seeds = _open(study, study.space), study.plan.search.tie_seeds
    if not names:
        return 0, 0
    offsets = [len(rate_offsets({name: 0.0}, {name: 1.0})) for name in names]
    least = num_runs(max(offsets), seeds)
    # The searched value's runs are there by then.
    return least, least + (sum(num_runs(number, seeds) - seeds for number in offsets) if len(names) > 1 else 0)


def ties_body(ties: Sequence[Tie], margin_nats: float) -> list[Json]:
    """As JSON: what was found, the value used, and the margin it was compared with."""
    return [
        {
            "hyperparameter": tie.hyperparameter, "value": tie.value, "searched": tie.searched,
            "conventional": tie.conventional, "source": tie.source, "together": list(tie.together),
            "margin_nats": margin_nats, "words": tie.words(margin_nats), **_plain(tie.finding),
        }
        for tie in ties
    ]  # fmt: skip


def _plain(finding: Finding) -> dict[str, Json]:
    body = canon.to_json(finding)
    assert isinstance(body, dict)
    return body


def _open(study: Study, space: SearchSpace) -> list[Hyperparameter]:
    """Hyperparameters that the search varies, and whose range holds the convention."""
    if not study.plan.search.tie_seeds:
        return []
    found = []
    for name in CONVENTIONAL:
        if name not in space.names:
            continue
        axis, (value, _) = space.axis(name), convention(study.plan, name)
        inside = value in axis.choices if axis.choices else axis.range[0] <= value <= axis.range[1]
        if inside and (axis.can_be_off or not axis.fixed):
            found.append(name)
    return found


def _is_same(study: Study, best: Params, values: Params) -> bool:
    return study.trial({**best, **values}).id == study.trial(best).id


def _tried(study: Study, best: Params, values: Params, results: Mapping[str, RunResult]) -> Contest:
    """The best trial's point against the same with these values."""
    transfer, search = study.plan.transfer, study.plan.search

    def conventional(octaves: float, seed: int) -> RunSpec:
        rate = best["learning_rate"] * 2.0**octaves
        return study.trial({**best, **values, "learning_rate": rate}, seed + 1)

    return contest(
        lambda seed: study.trial(best, seed + 1), conventional, rate_offsets(values, best),
        search.tie_seeds, results, margin_nats=transfer.margin_nats, level=transfer.level,
    )  # fmt: skip


def _tie(
    study: Study, best: Params, name: Hyperparameter, finding: Finding, together: tuple[Hyperparameter, ...]
) -> Tie:  # fmt: skip
    value, source = convention(study.plan, name)
    return Tie(
        hyperparameter=name, searched=study.space.axis(name).rounded(best[name]), conventional=value, source=source,
        together=together, finding=finding,
    )  # fmt: skip
