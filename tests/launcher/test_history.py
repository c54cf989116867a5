"""Concluded main runs: passed on from ledger to ledger, held against a study's recipe, and their misses in its fit."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from main_run import spec_of

from launcher.study import history
from launcher.study.history import Concluded
from proxies.core import canon
from proxies.core.flops import count_params
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.spec import Curve
from scaling_fits.forecast.conclusive import interval_scale
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns
from sweeps.store.ledger import Ledger

SPEC = spec_of("d" * 64)


def concluded(digest="a", actual=3.0, **changes):
    run = Concluded(
        digest=digest * 64, params=count_params(SPEC.shape).total, tokens=10**6, shape=SPEC.shape,
        parametrization=SPEC.parametrization, schedule=SPEC.schedule, data_id=SPEC.data_id, predicted_nats=2.5,
        low_nats=2.0, high_nats=3.0, level=0.9, extrapolation=10.0, actual_nats=actual,
        curve=Curve(steps=(1, 5), train_loss_nats=(5.0, 4.0), grad_norm=()),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def study(**changes):
    def schedule(num_steps, warmup):
        return Schedule(kind="cosine", num_steps=num_steps, final_fraction=0.1)

    plan = SimpleNamespace(schedule=schedule, parametrization=changes.get("parametrization", SPEC.parametrization))
    manifest = SimpleNamespace(data_id=changes.get("data_id", SPEC.data_id))
    return SimpleNamespace(base_shape=changes.get("shape", SPEC.base_shape), plan=plan, manifest=manifest)


def test_a_child_gets_its_parents_own_and_what_that_inherited_once(tmp_path):
    with Ledger.open(tmp_path / "parent", {"q": 1}, create=True) as parent:
        parent.append(history.HISTORY, "b" * 64, concluded("b"))
        parent.append(history.CONCLUDED, "a" * 64, concluded("a"))
    with Ledger.open(tmp_path / "child", {"q": 2}, create=True) as child:
        assert history.take_over(child, Ledger.read(tmp_path / "parent")) == 2
        assert history.take_over(child, Ledger.read(tmp_path / "parent")) == 0
    kept = Ledger.read(tmp_path / "child")
    assert history.inherited(kept) == [concluded("b"), concluded("a")]
    assert history.concluded(kept) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"schedule": dataclasses.replace(SPEC.schedule, final_fraction=0.5)},
            "its last learning rate is 0.5, here 0.1",
        ),
        ({"data_id": "e" * 64}, "it was trained on other data"),
        ({"parametrization": named("sp")}, "its parametrization is sp, here mup"),
        ({"shape": dataclasses.replace(SPEC.shape, tied=True)}, "its tying is True, here False"),
    ],
)
def test_a_run_of_another_recipe_is_left_out_and_says_why(changes, said):
    kept, why = history.like(study(), [concluded("a", **changes), concluded("b")])
    assert [run.digest for run in kept] == ["b" * 64]
    (sentence,) = why
    assert sentence.startswith("the concluded run aaaaaaaa is left out of the fit: ")
    assert said in sentence


def test_misses_are_counted_by_the_fits_own_interval_and_scale_the_next():
    rng = np.random.default_rng(0)
    params, tokens = (column.ravel() for column in np.meshgrid([1e6, 3e6, 1e7], [1e8, 3e8, 1e9]))
    losses = (1.7 + 400 / params**0.34 + 400 / tokens**0.28) * np.exp(rng.normal(0, 0.003, 9))
    fit = fit_runs(from_columns(params, tokens, losses), form="chinchilla", bootstrap=50)
    runs = [concluded("a", actual=4.5), concluded("b", actual=2.4, interval_scale=1.5)]
    assert runs[1].z == pytest.approx(1.5 * runs[1].foretold.z)
    scaled = history.scaled(fit, runs, ["another is left out"])
    assert scaled.record_scale == pytest.approx(interval_scale([run.z for run in runs], 0.9))
    assert scaled.record_scale > 1.2
    assert scaled.warnings[-2] == "another is left out"
    assert "2 concluded main runs are among the runs" in scaled.warnings[-1]
    plain, wide = predict(fit, 3e7, 3e9), predict(scaled, 3e7, 3e9)
    assert wide.loss_nats == plain.loss_nats
    for end in ("low", "high"):
        arm, own = (np.log(getattr(at, end) / at.loss_nats) for at in (wide, plain))
        assert arm == pytest.approx(scaled.record_scale * own, rel=1e-9)
    assert history.scaled(fit, []).record_scale == 1.0


def test_its_curve_joins_those_that_the_course_is_fitted_to():
    (rung,) = history.as_rungs([concluded()])
    assert (rung.num_steps, rung.final_loss_nats, rung.curve.steps) == (12, 3.0, (1, 5))
    assert canon.decode(Concluded, canon.parse(canon.canonical(concluded()))) == concluded()
