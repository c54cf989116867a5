"""The Megatron-LM export, read back flag by flag. What Megatron itself makes of it:
test_megatron_lm_live.py.
"""

import dataclasses
import json
import math
import tomllib

import pytest
import torch
from export_case import assert_refused, judged
from exported_program import imported
from megatron_lm_case import MEGATRON_MUP, arguments_in, decision_for, spec_for

from launcher.base.policy import Monitoring
from launcher.exporters.fidelity import list_plan_remedies
from launcher.exporters.trainers import megatron_lm
from launcher.exporters.trainers.megatron_lm_numbers import flags_of, scheduler_of
from launcher.frozen.frozen import Decision, Parallelism
from launcher.plan.plan import Plan
from proxies.core.rules import named
from proxies.core.schedule import Schedule, lr_table
from proxies.parametrization.parametrization import initial_tensor, parameter_table

CONSTANT = Schedule(kind="constant", num_steps=12, warmup_steps=4)
WSD = Schedule(kind="wsd", num_steps=12, decay_steps=5, final_fraction=0.1)


def lost(report):
    return {entry.field: entry.note for entry in report.lost}


def test_what_use_mup_gives_is_written_and_nothing_of_it_is_lost(tmp_path, manifest):
    # as a plan's proxy.rules can say it
    rules = named("mup_no_wd_scaling", decayed="two_dimensional", eps="hidden")
    decision = decision_for(
        manifest, spec_for(manifest.data_id, parametrization=rules, schedule=WSD)
    )
    report = megatron_lm.export(decision, tmp_path)
    assert lost(report) == {}
    told = arguments_in(tmp_path)
    assert "--use-mup" in told
    assert (told["--lr"], told["--min-lr"], told["--adam-eps"], told["--weight-decay"]) == (
        "0.03125",
        "0.003125",
        "1e-08",
        "0.1",
    )
    assert (
        told["--mup-base-hidden-size"],
        told["--mup-embedding-mult"],
        told["--mup-output-mult"],
    ) == (
        "32",
        "2.0",
        "0.75",
    )
    # sqrt(base head dim) / head dim is the frozen scale
    scale = math.sqrt(float(told["--mup-base-head-dim"])) / 16
    assert math.isclose(scale, decision.forward.attention, rel_tol=1e-14)
    assert (told["--lr-decay-style"], told["--lr-wsd-decay-style"]) == ("WSD", "linear")
    assert (told["--lr-wsd-decay-iters"], told["--lr-warmup-iters"], told["--train-iters"]) == (
        "5",
        "0",
        "12",
    )


def test_the_standard_form_is_wholly_expressible_without_use_mup(tmp_path, manifest):
    standard = named("sp", decayed="two_dimensional")
    spec = spec_for(manifest.data_id, parametrization=standard, schedule=CONSTANT)
    spec = dataclasses.replace(
        spec,
        hparams=dataclasses.replace(spec.hparams, embedding_multiplier=1.0, output_multiplier=1.0),
    )
    decision = decision_for(manifest, spec)
    assert lost(megatron_lm.export(decision, tmp_path)) == {}
    told = arguments_in(tmp_path)
    assert "--use-mup" not in told
    # t -> (t + 1) / 4 from a start at 1 / 4 of the peak
    assert (told["--lr-warmup-iters"], told["--lr-warmup-init"]) == ("3", repr(2**-5 / 4))


def test_numbers_that_flags_cannot_give_are_named_with_megatrons_own(tmp_path, manifest):
    said = lost(
        megatron_lm.export(
            decision_for(manifest, spec_for(manifest.data_id, schedule=WSD)), tmp_path
        )
    )
    assert set(said) == {"groups.weight_decay", "groups.eps"}
    assert (
        "embedding: frozen 0, Megatron 0.2; readout: frozen 0.1, Megatron 0.2"
        in said["groups.weight_decay"]
    )
    assert "block_gain: frozen 1e-08, Megatron 2e-08" in said["groups.eps"]
    assert "hidden" not in said["groups.weight_decay"] + said["groups.eps"]  # most weights: exact
    mended = spec_for(
        manifest.data_id, parametrization=named("mup", **advised_rules(said)), schedule=WSD
    )
    assert lost(megatron_lm.export(decision_for(manifest, mended), tmp_path / "mended")) == {}, (
        "as they advise"
    )


def advised_rules(fields):
    """The values of `proxy.rules` that an export's refusal advises for what is lost."""
    remedies = list_plan_remedies(list(fields))
    assert remedies and all(remedy.startswith("proxy.rules = ") for remedy in remedies)
    tables = [tomllib.loads(remedy)["proxy"]["rules"] for remedy in remedies]
    return {key: value for rules in tables for key, value in rules.items()}


def test_the_advice_for_an_embedding_rate_works(tmp_path, manifest):
    rules = {"decayed": "two_dimensional", "embedding_rate": "inverse_root"}
    spec = spec_for(
        manifest.data_id, parametrization=named("mup_no_wd_scaling", **rules), schedule=WSD
    )
    said = lost(megatron_lm.export(decision_for(manifest, spec), tmp_path))
    assert "groups.learning_rate" in said
    spec = dataclasses.replace(
        spec, parametrization=named("mup_no_wd_scaling", **rules | advised_rules(said))
    )
    assert lost(megatron_lm.export(decision_for(manifest, spec), tmp_path / "mended")) == {}


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
def test_the_advice_for_a_warmup_works(tmp_path, manifest, schedule):
    """Of mup's, where Megatron's own warmup is t / W. The plan takes the advised values too."""

    def lost_with(warmup_steps):
        kind = dataclasses.replace(schedule, warmup_steps=warmup_steps)
        spec = spec_for(manifest.data_id, parametrization=MEGATRON_MUP, schedule=kind)
        fields = lost(
            megatron_lm.export(decision_for(manifest, spec), tmp_path / str(warmup_steps))
        )
        return [field for field in fields if field.startswith("learning_rate")]

    [remedy] = list_plan_remedies(lost_with(40))
    toml = tomllib.loads(remedy.partition(", or")[0])
    fractions = toml["search"]["warmup_fraction"]
    assert Plan.model_validate_json(json.dumps(toml)).search.warmup_fraction == tuple(fractions)
    assert not any(lost_with(round(fraction * schedule.num_steps)) for fraction in fractions)
    assert not lost_with(int(remedy.split()[-2]))


@pytest.mark.parametrize("change", ["data.path", "target.budget_flops"])
def test_the_advice_for_repeated_data_works(tmp_path, manifest, change):
    decision = decision_for(manifest, spec_for(manifest.data_id))
    few = dataclasses.replace(decision.data, num_train_tokens=decision.num_tokens // 2)
    said = lost(megatron_lm.export(dataclasses.replace(decision, data=few), tmp_path))
    [remedy] = list_plan_remedies([field for field in said if field.startswith("data")])
    assert change in remedy
    if change == "data.path":
        mended = dataclasses.replace(
            decision, data=dataclasses.replace(few, num_train_tokens=decision.num_tokens)
        )
    else:
        half = Schedule(kind="cosine", num_steps=decision.learning_rate.schedule.num_steps // 2)
        mended = dataclasses.replace(
            decision_for(manifest, spec_for(manifest.data_id, schedule=half)), data=few
        )
    assert "data.order" not in lost(megatron_lm.export(mended, tmp_path / "mended"))


@pytest.mark.parametrize(
    ("schedule", "mup", "worst"),
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
        # A decay one step early, over 110 steps for 109 (from step 9, where the warmup ends, for
        # step 10).
        (Schedule(kind="linear", num_steps=119, warmup_steps=10), False, 1 / 110),
    ],
)
def test_the_distance_from_the_frozen_table_is_known_and_judged(
    tmp_path, manifest, schedule, mup, worst
):
    parametrization = MEGATRON_MUP if mup else named("sp", decayed="two_dimensional")
    decision = decision_for(
        manifest, spec_for(manifest.data_id, parametrization=parametrization, schedule=schedule)
    )
    scheduler, off = scheduler_of(decision, flags_of(decision))
    assert off == pytest.approx(worst, abs=1e-12)
    assert (
        max(abs(scheduler.share(step) - share) for step, share in enumerate(lr_table(schedule)))
        == off
    )
    verdicts = {
        entry.field: entry.verdict for entry in megatron_lm.export(decision, tmp_path).entries
    }
    wanted = "exact" if worst == 0 else "equivalent" if worst <= 0.01 else "not_expressible"
    assert verdicts["learning_rate.step_convention"] == wanted
    assert verdicts["learning_rate.schedule.kind"] == "exact"


def test_the_mesh_becomes_degrees(tmp_path, manifest):
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
        decision_for(manifest, spec_for(manifest.data_id), parallelism=mesh), tmp_path
    )
    told = arguments_in(tmp_path)
    flags = (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "micro-batch-size",
    )
    assert [told[f"--{flag}"] for flag in flags] == ["2", "2", "2", "1"]
    assert told["--num-distributed-optimizer-instances"] == "2"
    assert (told["--recompute-granularity"], told["--recompute-method"]) == ("full", "uniform")


def test_everything_that_cannot_be_run_is_said_at_once(tmp_path, manifest):
    decision = decision_for(
        manifest,
        spec_for(manifest.data_id),
        precision="float64",
        parallelism=Parallelism(
            data_parallel_shard=1, tensor=3, pipeline=4, context=3, microbatch_sequences=3
        ),
    )
    decision = dataclasses.replace(
        decision,
        shape=dataclasses.replace(decision.shape, vocab_size=257),
    )
    said = (
        "'0.17.1' is not supported: this export is written for 0.19.2",
        "float64",
        "tensor = 3 does not divide num",
        "vocab_size = 257",
        "pipeline = 4",
        "context = 3",
        "microbatch_sequences = 3",
    )
    assert_refused(megatron_lm.export, decision, tmp_path / "out", *said, version="0.17.1")


def test_fidelity_covers_every_leaf_field_once(tmp_path, manifest):
    for precision in ("float32", "bfloat16"):
        decision = decision_for(manifest, spec_for(manifest.data_id), precision=precision)
        decision = dataclasses.replace(
            decision, monitoring=Monitoring(validate_every_steps=1), compiled=True
        )
        report = megatron_lm.export(decision, tmp_path)
        assert {field.split(".")[0] for field in judged(report)} == {
            field.name
            for field in dataclasses.fields(Decision)
            if field.name not in ("own", "model")
        }


def test_a_residual_multiplier_takes_a_layer_spec_and_one_takes_none(tmp_path, manifest):
    plain = decision_for(manifest, spec_for(manifest.data_id))
    scaled = dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, residual=0.5))
    for name, decision in {"plain": plain, "scaled": scaled}.items():
        assert "forward.residual" not in lost(megatron_lm.export(decision, tmp_path / name))
        spec = arguments_in(tmp_path / name).get("--spec")
        assert spec == ("forerun_megatron_spec SPEC" if name == "scaled" else None)
        assert (tmp_path / name / "forerun_megatron_spec.py").is_file() == (name == "scaled")
    assert 'PYTHONPATH="$here:$MEGATRON_LM' in (tmp_path / "scaled" / "run.sh").read_text()


def test_more_than_one_epoch_loses_the_order(tmp_path, manifest):
    decision = decision_for(manifest, spec_for(manifest.data_id))
    few = dataclasses.replace(decision.data, num_train_tokens=decision.num_tokens - 1)
    assert "data.order" not in lost(megatron_lm.export(decision, tmp_path))
    assert "data.order" in lost(
        megatron_lm.export(dataclasses.replace(decision, data=few), tmp_path)
    )


@pytest.mark.parametrize("of_shape", [{}, {"tied": True, "qk_norm": True, "num_kv_heads": 4}])
def test_the_seed_checkpoint_holds_the_embedded_trainers_weights(tmp_path, manifest, of_shape):
    spec = spec_for(manifest.data_id, of_shape=of_shape)
    megatron_lm.export(decision_for(manifest, spec), tmp_path)
    theirs = dict(imported(tmp_path, "seed_checkpoint").weights())
    ours = {p.name: initial_tensor(p, spec.seed) for p in parameter_table(spec)}
    names = megatron_lm.parameter_names(spec.shape)
    assert set(theirs) == set(names.values())
    assert set(names) == set(ours)
    assert sum(value.numel() for value in theirs.values()) == sum(
        value.numel() for value in ours.values()
    )
    groups = spec.shape.num_kv_heads
    for name, value in ours.items():
        there = theirs[names[name]]
        if name.endswith(("wq.weight", "wk.weight", "wv.weight")):
            per_group = there.unflatten(0, (groups, -1))
            queries, kv = (
                value.shape[0] // groups if "wq" in name else spec.shape.num_heads // groups * 16,
                16,
            )
            start = {"wq": 0, "wk": queries, "wv": queries + kv}[name.split(".")[-2]]
            there = per_group[:, start : start + value.shape[0] // groups].flatten(0, 1)
        elif name.endswith(("w1.weight", "w3.weight")):
            there = there.chunk(2)["w3" in name]
        assert torch.equal(there, value), name
