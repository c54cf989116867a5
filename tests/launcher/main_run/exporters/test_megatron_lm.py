"""Tests of the Megatron-LM export, read back flag by flag.

test_megatron_lm_live.py runs the export in Megatron. A field of the frozen decision is lost if
Megatron cannot express it. The fidelity report lists the lost fields, and `list_plan_remedies`
advises changes of the plan that avoid them.
"""

import dataclasses
import json
import math
import tomllib

import pytest
import torch
from export_case import assert_refused, list_judged_fields
from exported_program import import_program
from megatron_lm_case import (
    MEGATRON_MUP,
    make_megatron_decision,
    make_megatron_spec,
    read_arguments,
)

from forerun._launcher.main_run.exporters.trainers import megatron_lm
from forerun._launcher.main_run.exporters.trainers.megatron_lm_numbers import (
    choose_flags,
    choose_scheduler,
)
from forerun._launcher.main_run.exporters.trainers.megatron_lm_remedies import list_plan_remedies
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._launcher.main_run.frozen.run_policies import Monitoring
from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule, compute_lr_table
from forerun._proxies.parametrization.parametrization import (
    compute_parameter_table,
    draw_initial_tensor,
)

CONSTANT = Schedule(kind="constant", num_steps=12, warmup_steps=4)
WSD = Schedule(kind="wsd", num_steps=12, decay_steps=5, final_fraction=0.1)


def list_lost_fields(report):
    """Return the lost fields of a fidelity report, with their notes."""
    return {entry.field: entry.note for entry in report.lost}


def test_no_field_is_lost_with_the_rules_of_megatrons_use_mup(tmp_path, manifest):
    # A plan can set these rules (`proxy.rules`).
    rules = get_parametrization("mup_no_wd_scaling", decayed="two_dimensional", eps="hidden")
    decision = make_megatron_decision(
        manifest, make_megatron_spec(manifest.data_id, parametrization=rules, schedule=WSD)
    )
    report = megatron_lm.export(decision, tmp_path)
    assert list_lost_fields(report) == {}
    arguments = read_arguments(tmp_path)
    assert "--use-mup" in arguments
    assert (
        arguments["--lr"],
        arguments["--min-lr"],
        arguments["--adam-eps"],
        arguments["--weight-decay"],
    ) == (
        "0.03125",
        "0.003125",
        "1e-08",
        "0.1",
    )
    assert (
        arguments["--mup-base-hidden-size"],
        arguments["--mup-embedding-mult"],
        arguments["--mup-output-mult"],
    ) == (
        "32",
        "2.0",
        "0.75",
    )
    # The frozen attention scale is sqrt(base head dim) / head dim.
    scale = math.sqrt(float(arguments["--mup-base-head-dim"])) / 16
    assert math.isclose(scale, decision.forward.attention, rel_tol=1e-14)
    assert (arguments["--lr-decay-style"], arguments["--lr-wsd-decay-style"]) == ("WSD", "linear")
    assert (
        arguments["--lr-wsd-decay-iters"],
        arguments["--lr-warmup-iters"],
        arguments["--train-iters"],
    ) == (
        "5",
        "0",
        "12",
    )


def test_no_field_is_lost_with_the_standard_parametrization(tmp_path, manifest):
    standard = get_parametrization("sp", decayed="two_dimensional")
    spec = make_megatron_spec(manifest.data_id, parametrization=standard, schedule=CONSTANT)
    spec = dataclasses.replace(
        spec,
        hparams=dataclasses.replace(spec.hparams, embedding_multiplier=1.0, output_multiplier=1.0),
    )
    decision = make_megatron_decision(manifest, spec)
    assert list_lost_fields(megatron_lm.export(decision, tmp_path)) == {}
    arguments = read_arguments(tmp_path)
    assert "--use-mup" not in arguments
    # Megatron's warmup t / 3 that starts at 1 / 4 of the peak equals the frozen (t + 1) / 4.
    assert (arguments["--lr-warmup-iters"], arguments["--lr-warmup-init"]) == ("3", repr(2**-5 / 4))


def test_lost_fields_have_notes_and_the_advice_avoids_them(tmp_path, manifest):
    notes = list_lost_fields(
        megatron_lm.export(
            make_megatron_decision(manifest, make_megatron_spec(manifest.data_id, schedule=WSD)),
            tmp_path,
        )
    )
    assert set(notes) == {"groups.weight_decay", "groups.eps"}
    assert (
        "embedding: frozen 0, Megatron 0.2; readout: frozen 0.1, Megatron 0.2"
        in notes["groups.weight_decay"]
    )
    assert "block_gain: frozen 1e-08, Megatron 2e-08" in notes["groups.eps"]
    assert "hidden" not in notes["groups.weight_decay"] + notes["groups.eps"]
    advised = make_megatron_spec(
        manifest.data_id,
        parametrization=get_parametrization("mup", **read_advised_rules(notes)),
        schedule=WSD,
    )
    decision = make_megatron_decision(manifest, advised)
    assert list_lost_fields(megatron_lm.export(decision, tmp_path / "advised")) == {}


def read_advised_rules(fields):
    """Return the values of the plan's `proxy.rules` that the report advises for lost fields."""
    remedies = list_plan_remedies(list(fields))
    assert remedies and all(remedy.startswith("proxy.rules = ") for remedy in remedies)
    rules = {}
    for remedy in remedies:
        rules |= tomllib.loads(remedy)["proxy"]["rules"]
    return rules


def test_advice_for_an_embedding_rate_works(tmp_path, manifest):
    rules = {"decayed": "two_dimensional", "embedding_rate": "inverse_root"}
    spec = make_megatron_spec(
        manifest.data_id,
        parametrization=get_parametrization("mup_no_wd_scaling", **rules),
        schedule=WSD,
    )
    notes = list_lost_fields(megatron_lm.export(make_megatron_decision(manifest, spec), tmp_path))
    assert "groups.learning_rate" in notes
    spec = dataclasses.replace(
        spec,
        parametrization=get_parametrization(
            "mup_no_wd_scaling", **rules | read_advised_rules(notes)
        ),
    )
    decision = make_megatron_decision(manifest, spec)
    assert list_lost_fields(megatron_lm.export(decision, tmp_path / "advised")) == {}


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(kind="cosine", num_steps=400),
        Schedule(kind="linear", num_steps=400, final_fraction=0.1),
        Schedule(kind="wsd", num_steps=400, decay_steps=40),
        Schedule(kind="constant", num_steps=400),
    ],
    ids=lambda schedule: schedule.kind,
)
def test_advice_for_a_warmup_works(tmp_path, manifest, schedule):
    """Megatron's rate at warmup step t of W is t / W of the peak with `--use-mup`, not (t+1) / W.

    The report advises other warmups. The plan must accept them, and with them nothing is lost.
    """

    def list_lost_with(warmup_steps):
        spec = make_megatron_spec(
            manifest.data_id,
            parametrization=MEGATRON_MUP,
            schedule=dataclasses.replace(schedule, warmup_steps=warmup_steps),
        )
        decision = make_megatron_decision(manifest, spec)
        report = megatron_lm.export(decision, tmp_path / str(warmup_steps))
        return [field for field in list_lost_fields(report) if field.startswith("learning_rate")]

    [remedy] = list_plan_remedies(list_lost_with(40))
    # The remedy is a line of TOML, then ", or" and a range in which the warmup has 100 steps.
    toml = tomllib.loads(remedy.partition(", or")[0])
    fractions = toml["search"]["warmup_fraction"]
    assert Plan.model_validate_json(json.dumps(toml)).search.warmup_fraction == tuple(fractions)
    assert not any(list_lost_with(round(fraction * schedule.num_steps)) for fraction in fractions)
    # The remedy ends with "100 steps".
    assert not list_lost_with(int(remedy.split()[-2]))


def test_advice_for_repeated_data_works(tmp_path, manifest):
    decision = make_megatron_decision(manifest, make_megatron_spec(manifest.data_id))
    few = dataclasses.replace(decision.data, num_train_tokens=decision.num_tokens // 2)
    notes = list_lost_fields(megatron_lm.export(dataclasses.replace(decision, data=few), tmp_path))
    [remedy] = list_plan_remedies([field for field in notes if field.startswith("data")])
    larger_corpus = dataclasses.replace(
        decision, data=dataclasses.replace(few, num_train_tokens=decision.num_tokens)
    )
    half = Schedule(kind="cosine", num_steps=decision.learning_rate.schedule.num_steps // 2)
    shorter_run = dataclasses.replace(
        make_megatron_decision(manifest, make_megatron_spec(manifest.data_id, schedule=half)),
        data=few,
    )
    for key, advised in (("data.path", larger_corpus), ("target.budget_flops", shorter_run)):
        assert key in remedy
        assert "data.order" not in list_lost_fields(megatron_lm.export(advised, tmp_path / key))


@pytest.mark.parametrize(
    ("schedule", "mup", "max_difference"),
    [
        (Schedule(kind="cosine", num_steps=12), True, 0.0),
        (
            Schedule(kind="wsd", num_steps=12, warmup_steps=3, decay_steps=4, final_fraction=0.1),
            False,
            0.0,
        ),
        (Schedule(kind="wsd", num_steps=12, decay_steps=4, decay_shape="sqrt"), True, 0.0),
        (Schedule(kind="linear", num_steps=12, warmup_steps=1, final_fraction=0.1), False, 0.0),
        (Schedule(kind="cosine", num_steps=12, warmup_steps=4), True, 1 / 4),
        (Schedule(kind="wsd", num_steps=900, warmup_steps=200, decay_steps=4), True, 1 / 200),
        # Megatron's decay starts one step early, and takes 110 steps instead of 109.
        (Schedule(kind="linear", num_steps=119, warmup_steps=10), False, 1 / 110),
    ],
)
def test_difference_from_the_frozen_rates_is_computed_and_judged(
    tmp_path, manifest, schedule, mup, max_difference
):
    parametrization = MEGATRON_MUP if mup else get_parametrization("sp", decayed="two_dimensional")
    decision = make_megatron_decision(
        manifest,
        make_megatron_spec(manifest.data_id, parametrization=parametrization, schedule=schedule),
    )
    scheduler, difference = choose_scheduler(decision, choose_flags(decision))
    assert difference == pytest.approx(max_difference, abs=1e-12)
    differences = [
        abs(scheduler.compute_share(step) - share)
        for step, share in enumerate(compute_lr_table(schedule))
    ]
    assert max(differences) == difference
    verdicts = {
        entry.field: entry.verdict for entry in megatron_lm.export(decision, tmp_path).entries
    }
    if max_difference == 0:
        expected = "exact"
    else:
        expected = "equivalent" if max_difference <= 0.01 else "not_expressible"
    assert verdicts["learning_rate.step_convention"] == expected
    assert verdicts["learning_rate.schedule.kind"] == "exact"


def test_parallelism_becomes_flags(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=2,
        data_parallel_replicate=2,
        tensor=2,
        pipeline=2,
        context=2,
        microbatch_sequences=1,
        activation_checkpointing="full",
    )
    megatron_lm.export(
        make_megatron_decision(manifest, make_megatron_spec(manifest.data_id), parallelism=mesh),
        tmp_path,
    )
    arguments = read_arguments(tmp_path)
    flags = (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "micro-batch-size",
    )
    assert [arguments[f"--{flag}"] for flag in flags] == ["2", "2", "2", "1"]
    assert arguments["--num-distributed-optimizer-instances"] == "2"
    assert (arguments["--recompute-granularity"], arguments["--recompute-method"]) == (
        "full",
        "uniform",
    )


def test_all_reasons_of_a_refusal_are_reported_at_once(tmp_path, manifest):
    decision = make_megatron_decision(
        manifest,
        make_megatron_spec(manifest.data_id),
        precision="float64",
        parallelism=Parallelism(
            data_parallel_shard=1, tensor=3, pipeline=4, context=3, microbatch_sequences=3
        ),
    )
    decision = dataclasses.replace(
        decision,
        shape=dataclasses.replace(decision.shape, vocab_size=257),
    )
    problems = (
        "'0.17.1' is not supported: this export is written for 0.19.2",
        "float64",
        "tensor = 3 does not divide num",
        "vocab_size = 257",
        "pipeline = 4",
        "context = 3",
        "microbatch_sequences = 3",
    )
    assert_refused(megatron_lm.export, decision, tmp_path / "out", *problems, version="0.17.1")


def test_report_judges_every_field_of_a_decision(tmp_path, manifest):
    for precision in ("float32", "bfloat16"):
        decision = make_megatron_decision(
            manifest, make_megatron_spec(manifest.data_id), precision=precision
        )
        decision = dataclasses.replace(
            decision, monitoring=Monitoring(validate_every_steps=1), compiled=True
        )
        report = megatron_lm.export(decision, tmp_path)
        assert {field.split(".")[0] for field in list_judged_fields(report)} == {
            field.name
            for field in dataclasses.fields(Decision)
            if field.name not in ("own", "model")
        }


def test_residual_multiplier_needs_a_layer_spec_unless_it_is_one(tmp_path, manifest):
    plain = make_megatron_decision(manifest, make_megatron_spec(manifest.data_id))
    scaled = dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, residual=0.5))
    for name, decision in {"plain": plain, "scaled": scaled}.items():
        assert "forward.residual" not in list_lost_fields(
            megatron_lm.export(decision, tmp_path / name)
        )
        spec = read_arguments(tmp_path / name).get("--spec")
        assert spec == ("forerun_megatron_spec SPEC" if name == "scaled" else None)
        assert (tmp_path / name / "forerun_megatron_spec.py").is_file() == (name == "scaled")
    assert 'PYTHONPATH="$here:$MEGATRON_LM' in (tmp_path / "scaled" / "run.sh").read_text()


def test_data_order_is_lost_with_more_than_one_epoch(tmp_path, manifest):
    decision = make_megatron_decision(manifest, make_megatron_spec(manifest.data_id))
    few = dataclasses.replace(decision.data, num_train_tokens=decision.num_tokens - 1)
    assert "data.order" not in list_lost_fields(megatron_lm.export(decision, tmp_path))
    assert "data.order" in list_lost_fields(
        megatron_lm.export(dataclasses.replace(decision, data=few), tmp_path)
    )


@pytest.mark.parametrize("shape_changes", [{}, {"tied": True, "qk_norm": True, "num_kv_heads": 4}])
def test_seed_checkpoint_has_the_embedded_trainers_weights(tmp_path, manifest, shape_changes):
    spec = make_megatron_spec(manifest.data_id, shape_changes=shape_changes)
    megatron_lm.export(make_megatron_decision(manifest, spec), tmp_path)
    exported = dict(import_program(tmp_path, "seed_checkpoint").generate_weights())
    expected = {p.name: draw_initial_tensor(p, spec.seed) for p in compute_parameter_table(spec)}
    names = megatron_lm.parameter_names(spec.shape)
    assert set(exported) == set(names.values())
    assert set(names) == set(expected)
    num_exported = sum(value.numel() for value in exported.values())
    assert num_exported == sum(value.numel() for value in expected.values())
    num_groups = spec.shape.num_kv_heads
    for name, value in expected.items():
        # Megatron fuses queries, keys and values by group, and the two matrices of SwiGLU.
        part = exported[names[name]]
        if name.endswith(("wq.weight", "wk.weight", "wv.weight")):
            head_dim = 16
            num_query_rows = spec.shape.num_heads // num_groups * head_dim
            start = {"wq": 0, "wk": num_query_rows, "wv": num_query_rows + head_dim}[
                name.split(".")[-2]
            ]
            per_group = part.unflatten(0, (num_groups, -1))
            part = per_group[:, start : start + value.shape[0] // num_groups].flatten(0, 1)
        elif name.endswith(("w1.weight", "w3.weight")):
            part = part.chunk(2)["w3" in name]
        assert torch.equal(part, value), name
