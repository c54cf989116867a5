"""All that W&B and TensorBoard are told of a study, from its folder as it is now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.dashboards.record import Record, Wanted, record_of
from launcher.dashboards.runs import main_runs, proxy_runs, read_frozen
from launcher.dashboards.workspace import described
from proxies.core import canon
from proxies.core.canon import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A study as runs and a workspace."""

    runs: tuple[Wanted, ...]
    """The study itself, its proxies, its main runs."""
    workspace: dict[str, Json]
    """What the workspace is built from."""

    @property
    def study(self) -> Record:
        """The run that stands for the study."""
        return self.runs[0].record


def told_of(study_dir: Path) -> Told:
    """A study, finished or not, also while a driver is at work on it; it is only read.

    Raises:
        SweepError, PlanError, DataError: it holds no study, or not a sound one.
        LinksOutError: links in it lead elsewhere.
        FrozenError, TamperedError: a config that was frozen of it is not what its digest names.
    """
    from launcher.report.body import body_of
    from launcher.report.report import page
    from launcher.study.opening import recorded

    study, ledger = recorded(study_dir)
    body = canon.parse(canon.pretty(body_of(study, ledger)))
    assert isinstance(body, dict)
    decisions = read_frozen(study_dir)
    record = record_of(body, page(body), [canon.to_json(decision) for decision in decisions])
    runs = (Wanted(record=record), *proxy_runs(study, ledger), *main_runs(study, decisions))
    return Told(runs=runs, workspace=described(body, record, [decision.digest for decision in decisions]))
