"""Tests of decay branches. Runs of several durations share a trunk, the steps before their learning
rates decay, which is trained once; each run branches off when its decay begins.

Results equal those of full runs, also if the saved states of the trunk are lost. A plan whose keys
conflict with branches is refused.
"""

import dataclasses
import shutil

import pytest
from main_run import make_spec
from main_run import write_corpus as write_sentences
from tiny_study import PLAN, run_forerun, run_json, write_plan

from forerun._launcher.study.experiments.ladder import build_ladder
from forerun._launcher.study.experiments.sizes import list_axis_sizes
from forerun._launcher.study.experiments.transfer_results import guess_target_sizes
from forerun._launcher.study.experiments.transfer_tests import GridSettings, build_transfer_test
from forerun._launcher.study.plan.file import load_plan
from forerun._launcher.study.plan.study import build_bank_key
from forerun._launcher.study.stages.study_folder import read_study
from forerun._launcher.study.workers.host import HostFactory
from forerun._proxies.core.branches import TRUNK_STEPS, compute_own_flops, compute_trunk_id
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Numerics
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.slot_state import save_state, to_trunk_state
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.checkpoints import get_checkpoint_dir
from forerun._sweeps.store.ledger import Ledger


def train_runs(folder, specs, corpus, *, together, lose=False):
    """Train runs in a new study, and return their results by id.

    Args:
        folder: Folder of the study.
        specs: Runs to train.
        corpus: Folder of the corpus.
        together: Whether to train them in one call of the driver, in which they share a trunk.
        lose: Whether to remove the trunk's states as soon as they are written.
    """
    factory = HostFactory(study_dir=str(folder), corpus=str(corpus))

    def lose_states(event):
        states = folder / "checkpoints" / compute_trunk_id(specs[0])
        if lose and states.exists():
            shutil.rmtree(states)

    with Ledger.open(folder, {}, create=True) as ledger:
        for batch in [specs] if together else [[spec] for spec in specs]:
            drive(
                StaticSource(batch, build_bank_key),
                InlinePool(factory),
                ledger,
                folder,
                progress=lose_states,
                bank_key_for=build_bank_key,
            )
        return dict(ledger.get_results())


@pytest.mark.parametrize("num_slots", [1, 3])
def test_branches_equal_full_runs_and_cost_their_share(tmp_path, num_slots):
    base = dataclasses.replace(
        make_spec(write_sentences(tmp_path).data_id), numerics=Numerics(num_slots=num_slots)
    )
    schedules = [
        Schedule(kind="wsd", num_steps=n, warmup_steps=3, decay_steps=n // 5) for n in (40, 10, 20)
    ]
    specs = [dataclasses.replace(base, schedule=schedule) for schedule in schedules]
    corpus = tmp_path / "tokens"
    alone = train_runs(tmp_path / "alone", specs, corpus, together=False)
    shared = train_runs(tmp_path / "shared", specs, corpus, together=True)
    lost = train_runs(tmp_path / "lost", specs, corpus, together=True, lose=True)
    for spec in specs:
        results = [results_by_id[spec.id] for results_by_id in (alone, shared, lost)]
        # Equal bit for bit
        assert len({(result.loss_nats, result.curve_id, result.tokens) for result in results}) == 1
        assert alone[spec.id].flops == spec.flops
    own_flops = compute_own_flops(specs)
    assert [shared[spec.id].flops for spec in specs] == own_flops
    assert [shared[spec.id].environment.get(TRUNK_STEPS) for spec in specs] == ["16", None, "8"]
    # Without the trunk's states, more steps are trained, and the results count them.
    assert sum(result.flops for result in lost.values()) > sum(own_flops)
    # The trunk's states are removed when its last run ends.
    assert not list((tmp_path / "shared" / "checkpoints").glob("*"))


def test_no_run_resumes_from_a_state_after_its_branch_step(tmp_path):
    """The decay of a run of 20 steps begins at step 16. The trunk's state at step 18, from a longer
    run, is too late for it: resuming from that state would give a wrong loss without an error.
    """
    base = dataclasses.replace(make_spec(write_sentences(tmp_path).data_id), numerics=Numerics())
    long, short = (
        dataclasses.replace(
            base, schedule=Schedule(kind="wsd", num_steps=n, warmup_steps=3, decay_steps=n // 5)
        )
        for n in (40, 20)
    )
    corpus = tmp_path / "tokens"
    alone = train_runs(tmp_path / "alone", [short], corpus, together=False)[short.id]
    engine = SingleTrialEngine(TokenStore(corpus), device="cpu")
    engine.admit(0, long)
    engine.advance(18)
    trunk_id = compute_trunk_id(long)
    save_state(
        get_checkpoint_dir(tmp_path / "late", trunk_id),
        to_trunk_state(engine.get_state(0), trunk_id),
    )
    result = train_runs(tmp_path / "late", [short], corpus, together=False)[short.id]
    assert (result.loss_nats, result.curve_id) == (alone.loss_nats, alone.curve_id)
    assert result.flops == alone.flops


BRANCHES = PLAN.replace("[proxy]", '[proxy]\nschedule = "wsd"\ndecay_branches = true')
"""The tiny plan with decay branches; its ladder has rungs of 4, 8, and 16 steps at three widths."""
POINT = {"learning_rate": 0.01, "clip_norm": 1.0, "warmup_fraction": 0.2}


@pytest.fixture(scope="module")
def planned_study(tmp_path_factory):
    """A folder with a plan that has decay branches, and its study."""
    folder = tmp_path_factory.mktemp("branches")
    return folder, read_study(write_plan(folder, BRANCHES), folder / "study")


def test_rungs_of_a_width_share_rate_warmup_and_trunk(planned_study):
    _, study = planned_study
    rungs = build_ladder(study, POINT, lambda sizes: {"duration": -0.5})
    assert len({spec.hparams.learning_rate for spec in rungs if spec.shape.width == 16}) == 1
    assert len(rungs) == 9 and len({compute_trunk_id(spec) for spec in rungs}) == 3
    rungs_16 = [spec for spec in rungs if spec.shape.width == 16]
    longest = max(spec.flops for spec in rungs_16)
    assert longest < sum(compute_own_flops(rungs_16)) < 1.4 * longest
    base = study.plan.build_schedule(study.plan.proxy.num_steps, 0.2).warmup_steps
    assert {spec.schedule.warmup_steps for spec in rungs} == {base}
    # All rungs of a width have the rate of 8 steps, the geometric mean of 4 and 16. The base has 6.
    expected_rate = POINT["learning_rate"] * (8 / 6) ** -0.5
    assert rungs[0].hparams.learning_rate == pytest.approx(expected_rate, rel=1e-3)


def test_every_duration_is_tested_at_the_same_rates(planned_study):
    _, study = planned_study
    settings = GridSettings(
        study=study, results={}, best=POINT, target=guess_target_sizes(study), rounds=0
    )
    test = build_transfer_test(settings, "learning_rate", "duration")
    rates = {
        size: {x for spec, x in test.grid.specs if test.grid.get_size(spec) == size}
        for size in list_axis_sizes(study, "duration")
    }
    assert len(rates) == 3 and len({frozenset(values) for values in rates.values()}) == 1
    trunks = {compute_trunk_id(spec) for spec in test.specs}
    assert len(trunks) == 4 * 2, "one trunk for each rate and seed"
    assert sum(compute_own_flops(test.specs)) < 0.75 * sum(spec.flops for spec in test.specs)


def test_study_counts_only_the_flops_that_branches_train_and_leaves_no_state(planned_study):
    folder, _ = planned_study
    code, answer = run_json("run", folder / "plan.toml", "--study", folder / "study")
    assert code in (0, 3, 4), answer
    with Ledger.read(folder / "study") as ledger:
        runs = ledger.read_runs()
    branched = [run for run in runs if TRUNK_STEPS in run.result.environment]
    assert len(branched) >= 6, "two of each width of the ladder at least"
    assert all(run.result.flops < run.spec.flops for run in branched)
    spent = sum(run.result.flops for run in runs)
    assert spent < 0.9 * sum(run.spec.flops for run in runs)
    assert not list((folder / "study" / "checkpoints").glob("*"))
    code, body = run_json("report", folder / "study")
    assert body["spend"]["flops_causal"] == pytest.approx(spent)
    branches = body["ladder"]["branches"]
    assert branches["width"] == 24
    curves = branches["curves"]
    steps = [(curve["num_steps"], curve["branch_step"]) for curve in curves]
    assert steps == [(4, 3), (8, 6), (16, 13)]
    # Each curve begins where it leaves the shorter one.
    assert [curve["steps"][0] for curve in curves] == [1, 4, 7]
    assert "Decay branches" in (folder / "study" / "report.html").read_text()


def test_question_of_a_plan_without_branches_is_unchanged(tmp_path):
    """A plan's question is the part that decides what is measured. With new keys in it, studies
    that began before these keys existed could not continue.
    """
    assert not {"decay_shape", "decay_branches"} & set(
        load_plan(write_plan(tmp_path)).to_question()["proxy"]
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
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
def test_keys_that_conflict_with_branches_are_named(tmp_path, overrides, words):
    sets = [word for override in overrides for word in ("--set", override)]
    code, _, error = run_forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("overrides", "branches"),
    [
        (('proxy.schedule="wsd"',), True),
        (('proxy.schedule="wsd"', "proxy.decay_branches=false"), False),
        ((), False),
        (('proxy.schedule="wsd"', 'proxy.parametrization="completedp"'), False),
    ],
)
def test_new_plan_with_wsd_has_branches_unless_it_cannot(tmp_path, overrides, branches):
    sets = [word for override in overrides for word in ("--set", override)]
    code, _, error = run_forerun("init", "--preset", "demo", "--out", tmp_path / "plan.toml", *sets)
    assert code == 0, error
    assert load_plan(tmp_path / "plan.toml").proxy.decay_branches is branches
