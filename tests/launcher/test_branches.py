"""Runs of several durations through the driver and real workers: one stable phase, the same
results, lost or not.
"""

import dataclasses
import shutil

import pytest
from main_run import spec_of
from main_run import write_corpus as write_sentences
from tiny_study import PLAN, ask, forerun, write_plan

from launcher.experiments.ladder import ladder_runs
from launcher.experiments.sweep_grids import SharedSettings, axis_sizes, transfer_test
from launcher.experiments.transferred_values import target_guess
from launcher.plan.file import load_plan
from launcher.study.stages import bank_key
from launcher.study.study_folder import plan_study
from launcher.workers.host import HostFactory
from proxies.core.branches import TRUNK_STEPS, own_flops, trunk_id
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from proxies.data.tokens import TokenStore
from proxies.training.slot_state import of_trunk, store
from proxies.training.solo import Solo
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool
from sweeps.search.source import StaticSource
from sweeps.store.checkpoints import checkpoint_dir
from sweeps.store.ledger import Ledger


def outcomes(folder, specs, corpus, *, together, lose=False):
    """Results by id: of runs that know of each other, or of each in a drive of its own."""
    factory = HostFactory(study_dir=str(folder), corpus=str(corpus))

    def progress(event):
        states = folder / "checkpoints" / trunk_id(specs[0])
        if lose and states.exists():
            shutil.rmtree(states)

    with Ledger.open(folder, {}, create=True) as ledger:
        for batch in [specs] if together else [[spec] for spec in specs]:
            drive(
                StaticSource(batch, bank_key),
                InlinePool(factory),
                ledger,
                folder,
                progress=progress,
                num_slots_for=lambda spec: spec.numerics.num_slots,
                bank_key_for=bank_key,
            )
        return dict(ledger.results())


@pytest.mark.parametrize("num_slots", [1, 3])
def test_branches_are_the_full_runs_and_cost_their_share(tmp_path, num_slots):
    base = dataclasses.replace(
        spec_of(write_sentences(tmp_path).data_id), numerics=Numerics(num_slots=num_slots)
    )
    schedules = [
        Schedule(kind="wsd", num_steps=n, warmup_steps=3, decay_steps=n // 5) for n in (40, 10, 20)
    ]
    specs = [dataclasses.replace(base, schedule=one) for one in schedules]
    corpus = tmp_path / "tokens"
    alone = outcomes(tmp_path / "alone", specs, corpus, together=False)
    shared = outcomes(tmp_path / "shared", specs, corpus, together=True)
    lost = outcomes(tmp_path / "lost", specs, corpus, together=True, lose=True)
    for spec in specs:
        same = {
            (o[spec.id].loss_nats, o[spec.id].curve_id, o[spec.id].tokens)
            for o in (alone, shared, lost)
        }
        assert len(same) == 1, "bit by bit"
        assert alone[spec.id].flops == spec.flops
    assert [shared[spec.id].flops for spec in specs] == own_flops(specs)
    assert [shared[spec.id].environment.get(TRUNK_STEPS) for spec in specs] == ["16", None, "8"]
    assert sum(result.flops for result in lost.values()) > sum(own_flops(specs)), (
        "trained again, and said"
    )
    assert not list((tmp_path / "shared" / "checkpoints").glob("*")), "states go with the last run"


def test_no_run_goes_on_from_a_state_beyond_its_branch_step(tmp_path):
    """A state of its trunk inside its own decay: from there it would end too high, and nobody would
    know.
    """
    base = dataclasses.replace(spec_of(write_sentences(tmp_path).data_id), numerics=Numerics())
    long, short = (
        dataclasses.replace(
            base, schedule=Schedule(kind="wsd", num_steps=n, warmup_steps=3, decay_steps=n // 5)
        )
        for n in (40, 20)
    )
    corpus = tmp_path / "tokens"
    whole = outcomes(tmp_path / "whole", [short], corpus, together=False)[short.id]
    solo = Solo(TokenStore(corpus), device="cpu")
    solo.admit(0, long)
    solo.advance(18)
    store(
        checkpoint_dir(tmp_path / "beyond", trunk_id(long)), of_trunk(solo.state(0), trunk_id(long))
    )
    found = outcomes(tmp_path / "beyond", [short], corpus, together=False)[short.id]
    assert (found.loss_nats, found.curve_id, found.flops) == (
        whole.loss_nats,
        whole.curve_id,
        whole.flops,
    )


BRANCHES = PLAN.replace("[proxy]", '[proxy]\nschedule = "wsd"\ndecay_branches = true')
POINT = {"learning_rate": 0.01, "clip_norm": 1.0, "warmup_fraction": 0.2}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with a plan, and its study."""
    folder = tmp_path_factory.mktemp("branches")
    return folder, plan_study(write_plan(folder, BRANCHES), folder / "study")


def test_rungs_of_a_width_share_one_rate_one_warmup_and_one_trunk(planned):
    _, study = planned
    rungs = ladder_runs(study, POINT, lambda there: {"duration": -0.5})
    assert len({spec.hparams.learning_rate for spec in rungs if spec.shape.width == 16}) == 1
    assert len(rungs) == 9 and len({trunk_id(spec) for spec in rungs}) == 3
    longest = max(spec.flops for spec in rungs if spec.shape.width == 16)
    assert (
        longest < sum(own_flops(spec for spec in rungs if spec.shape.width == 16)) < 1.4 * longest
    )
    base = study.plan.schedule(study.plan.proxy.num_steps, 0.2).warmup_steps
    assert {spec.schedule.warmup_steps for spec in rungs} == {base}
    # 4 and 16 steps: the rate is that of 8, the geometric mean.
    moved = POINT["learning_rate"] * (8 / 6) ** -0.5
    assert rungs[0].hparams.learning_rate == pytest.approx(moved, rel=1e-3)


def test_the_test_over_duration_tries_the_same_rates_at_each(planned):
    _, study = planned
    settings = SharedSettings(
        study=study, results={}, best=POINT, target=target_guess(study), rounds=0
    )
    test = transfer_test(settings, "learning_rate", "duration")
    rates = {
        size: {x for spec, x in test.condition.specs if test.condition.size(spec) == size}
        for size in axis_sizes(study, "duration")
    }
    assert len(rates) == 3 and len({frozenset(one) for one in rates.values()}) == 1
    trunks = {trunk_id(spec) for spec in test.specs}
    assert len(trunks) == 4 * 2, "a trunk for each rate and seed"
    assert sum(own_flops(test.specs)) < 0.75 * sum(spec.flops for spec in test.specs)


def test_the_chain_spends_what_own_flops_say_and_leaves_no_state(planned):
    folder, _ = planned
    code, answer = ask("run", folder / "plan.toml", "--study", folder / "study")
    assert code in (0, 3, 4), answer
    with Ledger.read(folder / "study") as ledger:
        runs = ledger.runs()
    branched = [run for run in runs if TRUNK_STEPS in run.result.environment]
    assert len(branched) >= 6, "two of each width of the ladder at least"
    assert all(run.result.flops < run.spec.flops for run in branched)
    spent = sum(run.result.flops for run in runs)
    assert spent < 0.9 * sum(run.spec.flops for run in runs)
    assert not list((folder / "study" / "checkpoints").glob("*"))
    code, body = ask("report", folder / "study")
    assert body["spend"]["flops_causal"] == pytest.approx(spent)
    found = body["ladder"]["branches"]
    assert found["width"] == 24
    assert [(one["num_steps"], one["branch_step"]) for one in found["curves"]] == [
        (4, 3),
        (8, 6),
        (16, 13),
    ]
    assert [one["steps"][0] for one in found["curves"]] == [1, 4, 7], (
        "each from where it left the shorter one"
    )
    assert "Decay branches" in (folder / "study" / "report.html").read_text()


def test_a_plan_without_it_asks_what_it_asked(tmp_path):
    assert not {"decay_shape", "decay_branches"} & set(
        load_plan(write_plan(tmp_path)).question()["proxy"]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("proxy.decay_branches=true",), ["proxy.schedule = 'cosine'"]),
        (('proxy.decay_shape="sqrt"',), ["proxy.decay_shape = 'sqrt'"]),
        (
            (
                'proxy.schedule="wsd"',
                "proxy.decay_branches=true",
                "proxy.batch_warmup_fraction=0.1",
                "proxy.parametrization=completedp",
            ),
            ["proxy.batch_warmup_fraction = 0.1", "completedp scales with batch or duration"],
        ),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path, given, said):
    sets = [part for one in given for part in ("--set", one)]
    code, _, error = forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert all(words in error for words in said), error


@pytest.mark.parametrize(
    ("sets", "branches"),
    [
        (('proxy.schedule="wsd"',), True),
        (('proxy.schedule="wsd"', "proxy.decay_branches=false"), False),
        ((), False),
        (('proxy.schedule="wsd"', 'proxy.parametrization="completedp"'), False),
    ],
)
def test_a_new_plan_under_wsd_has_branches(tmp_path, sets, branches):
    given = [part for one in sets for part in ("--set", one)]
    code, _, error = forerun("init", "--preset", "demo", "--out", tmp_path / "plan.toml", *given)
    assert code == 0, error
    assert load_plan(tmp_path / "plan.toml").proxy.decay_branches is branches
