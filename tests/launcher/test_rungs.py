"""The ladder's runs: main runs in small, and which of them are checked at other rates."""

import dataclasses
from types import SimpleNamespace

import pytest
from tiny_study import plan_with

from launcher.experiments.conventions import WarmupRule
from launcher.experiments.ladder import checked_rungs, ladder_runs, stage_specs
from launcher.experiments.transferred_values import Transferred
from launcher.study import decide
from launcher.study.study_folder import plan_study
from proxies.core.flops import flops_per_token
from proxies.parametrization.parametrization import parameter_table

BEST = {"learning_rate": 0.02, "warmup_fraction": 0.25, "clip_norm": 1.0}
POWERS = {"duration": -0.3, "batch": 0.4}


@pytest.fixture(scope="module")
def study_with(folder):
    return lambda part="": plan_study(plan_with(folder, part), folder / "study")


def moved(powers):
    return Transferred(
        tests=(),
        best=BEST,
        ties=(),
        warmup=WarmupRule(rule="share"),
        log2_lr=-5.0,
        at_optimum=True,
        powers_at=lambda there: powers,
    )


def flops(spec):
    return float(flops_per_token(spec.shape)) * spec.num_tokens


def as_main_run(study, found, rung):
    """The main run that a choice of this rung's size would give."""
    choice = decide.Choice(
        allocation=None,
        shape=rung.shape,
        num_steps=rung.schedule.num_steps,
        batch_tokens=rung.batch_tokens,
        prediction=SimpleNamespace(tokens=float(rung.num_tokens)),
    )
    return decide.main_spec(study, found, choice)


@pytest.mark.parametrize(
    "part",
    [
        "[ladder]\nbatch_tokens = 256",
        '[proxy]\nparametrization = "sp"',
        '[ladder]\nbatch_tokens = 128\n[proxy]\nparametrization = "completedp"\nnum_steps = 16',
        "[proxy]\nbatch_warmup_fraction = 0.5\nbatch_warmup_stages = 2",
    ],
)
def test_a_rung_is_the_main_run_of_its_size(study_with, part):
    """The same rate, groups and schedule by the same rules, over width, duration and batch."""
    study, found = study_with(part), moved(POWERS)
    for rung in decide.ladder_specs(study, found):
        main = as_main_run(study, found, rung)
        assert dataclasses.replace(main, seed=rung.seed, numerics=rung.numerics) == rung
        assert parameter_table(main) == parameter_table(rung)


def test_the_two_ends_are_checked_an_octave_to_either_side(study_with):
    study = study_with("[ladder]\ncheck_share = 1.0")
    specs = decide.ladder_specs(study, moved(POWERS))
    checked = checked_rungs(study, specs)
    assert [c.rung.id for c in checked] == [min(specs, key=flops).id, max(specs, key=flops).id]
    for one in checked:
        assert [octaves for octaves, _ in one.runs] == [-1.0, 0.0, 1.0]
        rates = [
            runs[0].hparams.learning_rate / one.rung.hparams.learning_rate for _, runs in one.runs
        ]
        assert rates == pytest.approx([0.5, 1.0, 2.0], rel=1e-5)
        assert one.runs[1][1] == (one.rung,), "the rung itself is not run again"
        for spec in one.extra:
            hparams = dataclasses.replace(
                spec.hparams, learning_rate=one.rung.hparams.learning_rate
            )
            assert dataclasses.replace(spec, hparams=hparams) == one.rung
    stage = stage_specs(study, specs)
    assert (
        len({spec.id for spec in stage}) == len(stage) == len(specs) + 4
        and stage[: len(specs)] == specs
    )


def test_the_share_limits_which_rungs_are_checked(study_with):
    specs = decide.ladder_specs(study_with(), moved({}))
    total, seen = sum(map(flops, specs)), []
    for share in (1.0, 0.3, 0.1, 0.03, 1e-6):
        study = study_with(f"[ladder]\ncheck_share = {share}")
        own = sum(flops(one.rung) for one in checked_rungs(study, specs))
        assert own <= share * total
        seen.append(own)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) >= 4 and seen[-1] == 0


def test_every_rung_is_repeated_with_other_seeds(study_with):
    """The rungs of one seed are among them as they are, and each repeat is a row of the table that
    is fitted.
    """
    one, three = (ladder_runs(study_with(part), BEST) for part in ("", "[ladder]\nnum_seeds = 3"))
    assert three[::3] == one and len({spec.id for spec in three}) == len(three) == 3 * len(one)
    assert [spec.seed for spec in three] == [100, 101, 102] * len(one)
    assert {dataclasses.replace(spec, seed=100) for spec in three} == set(one)
    losses = {
        spec.id: SimpleNamespace(loss_nats=2 + index / 100) for index, spec in enumerate(three)
    }
    table = decide.ladder_table(study_with(""), three, losses)
    assert table.loss.tolist() == [losses[spec.id].loss_nats for spec in three]
    for rows in range(0, len(three), 3):
        assert (
            len({*zip(table.params[rows : rows + 3], table.tokens[rows : rows + 3], strict=True)})
            == 1
        )
    assert decide.fit_key(three) != decide.fit_key(one)


def test_a_finished_study_has_its_checks_and_a_gate(finished, study, ledger, found):
    specs, results = list(found.ladder), ledger.results()
    assert {spec.id for spec in stage_specs(study, specs)} <= results.keys()
    assert [one.rung.id for one in found.checks.rungs] == [
        c.rung.id for c in checked_rungs(study, specs)
    ]
    assert len(found.checks.rungs) == 2
    assert [gate.name for gate in found.gates][-1] == "ladder_tuned"
    assert all(one.words in found.gates[-1].reason for one in found.checks.rungs)
