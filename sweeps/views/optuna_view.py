"""A study as an Optuna storage, read only: what `optuna-dashboard` and Optuna's own analyses open.

Two studies: `search`, the trials that a search suggested, and `runs`, every run with an outcome. It reads the ledger
anew when that has changed, so a dashboard follows a driver at work. With `sweeps.search.samplers`, the only door to
Optuna.
"""

from __future__ import annotations

import datetime
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from proxies.core.hyperparameters import HPARAMS, HYPERPARAMETERS
from proxies.core.spec import Run, RunResult
from sweeps.search.space import Params
from sweeps.store.curves import load_curve
from sweeps.store.errors import CurveCorrupt, SweepError
from sweeps.store.ledger import LEDGER_NAME
from sweeps.views.view import StudyView

STUDIES = ("search", "runs")
NUM_CURVE_POINTS = 64
"""Of a run's training loss, as intermediate values."""

_STATES = {
    "finished": TrialState.COMPLETE,
    "diverged": TrialState.FAIL,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
_RUN_PARAMS = ("width", "num_layers", *HPARAMS, "warmup_steps", "num_steps", "seed")
_LOG_PARAMS = frozenset(one.name for one in HYPERPARAMETERS.values() if one.scale == "log2")


def _refused(*_: object, **__: object) -> NoReturn:
    raise SweepError("the ledger is the study: Optuna reads it and writes nothing into it")


class StudyStorage(InMemoryStorage):
    """The storage: Optuna's own, filled from the ledger. Whatever would write is refused.

    Raises:
        SweepError: no study there, or not a sound one; when it is made, or when it is read again.
    """

    def __init__(self, study_dir: Path) -> None:
        super().__init__()
        self._study_dir = study_dir
        self._stamp: tuple[int, int] | None = None
        self._curves: dict[str, dict[int, float]] = {}
        self._refresh()

    def _refresh(self) -> None:
        """Read the ledger if it has changed since."""
        path = self._study_dir / LEDGER_NAME
        stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        if stamp is not None and stamp == self._stamp:
            return
        view, filled = StudyView(self._study_dir), InMemoryStorage()
        for name, trials in zip(STUDIES, (self._search_trials(view), self._run_trials(view)), strict=True):
            study_id = filled.create_new_study([StudyDirection.MINIMIZE], name)
            for key, said in {"ledger_head": view.ledger.head_hash, "loss": "validation, nats per token"}.items():
                filled.set_study_user_attr(study_id, key, said)
            for trial in trials:
                filled.create_new_trial(study_id, trial)
        vars(self).update(vars(filled))  # at once: somebody may be reading
        self._stamp = stamp

    def _search_trials(self, view: StudyView) -> Iterator[FrozenTrial]:
        points = view.points()
        axes = _distributions(points)
        runs = [view.run_of(point) for point in points]
        for index, (point, run) in enumerate(zip(points, runs, strict=True)):
            yield self._trial(index, dict(point), {name: axes[name] for name in point}, run)

    def _run_trials(self, view: StudyView) -> Iterator[FrozenTrial]:
        rows: list[dict[str, Any]] = [
            {name: row[name] for name in _RUN_PARAMS if row[name] is not None} for row in view.table().to_pylist()
        ]
        axes = _distributions(rows)
        for index, (row, run) in enumerate(zip(rows, view.runs, strict=True)):
            yield self._trial(index, row, {name: axes[name] for name in row}, run)

    def _trial(
        self, number: int, params: dict[str, Any], distributions: dict[str, BaseDistribution], run: Run | None
    ) -> FrozenTrial:
        began = datetime.datetime.fromtimestamp(number, datetime.UTC).replace(tzinfo=None)  # the ledger has no clock
        result = None if run is None else run.result
        attrs: dict[str, Any] = {}
        if result is not None:
            attrs = {"run_id": result.id, "status": result.status, "flops": result.flops, "seconds": result.seconds}
            attrs |= {"reason": result.reason} if result.reason else {}
        return FrozenTrial(
            number=number,
            trial_id=number,
            state=TrialState.RUNNING if result is None else _STATES[result.status],
            value=None if result is None else result.loss_nats,
            datetime_start=began,
            datetime_complete=None if result is None else began + datetime.timedelta(seconds=result.seconds),
            params=params,
            distributions=distributions,
            user_attrs=attrs,
            system_attrs={},
            intermediate_values={} if result is None else self._curve(result),
        )

    def _curve(self, result: RunResult) -> dict[int, float]:
        """Some of a run's training losses, the last one among them: of a pruned one, that at its rung; read once."""
        if result.curve_id not in self._curves:
            try:
                curve = load_curve(self._study_dir, result)
            except CurveCorrupt:
                return {}
            every = max(1, -(-len(curve.steps) // NUM_CURVE_POINTS))
            pairs = list(zip(curve.steps, curve.train_loss_nats, strict=True))
            self._curves[result.curve_id] = dict(pairs[::-1][::every][::-1])
        return self._curves[result.curve_id]

    def get_all_studies(self) -> list[FrozenStudy]:
        """See Optuna."""
        self._refresh()
        return super().get_all_studies()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """See Optuna."""
        self._refresh()
        return super().get_all_trials(study_id, deepcopy, states)

    create_new_study = delete_study = create_new_trial = set_trial_param = _refused
    set_study_user_attr = set_study_system_attr = set_trial_state_values = _refused
    set_trial_user_attr = set_trial_system_attr = set_trial_intermediate_value = _refused


def _distributions(points: Sequence[Params | dict[str, Any]]) -> dict[str, BaseDistribution]:
    """An axis for every name, as wide as its values."""
    values: dict[str, list[Any]] = {}
    for point in points:
        for name, value in point.items():
            values.setdefault(name, []).append(value)
    return {name: _distribution(name, found) for name, found in values.items()}


def _distribution(name: str, values: list[Any]) -> BaseDistribution:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return IntDistribution(min(values), max(values))
    if all(isinstance(value, float) for value in values):
        return FloatDistribution(min(values), max(values), log=name in _LOG_PARAMS and min(values) > 0)
    return CategoricalDistribution(sorted(set(values), key=str))
