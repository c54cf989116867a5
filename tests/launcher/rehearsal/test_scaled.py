"""The copy is the parametrization's own at a small shape; its corpus is a cut; a config's standing
is told as it is.
"""

import dataclasses
import importlib
import importlib.metadata
from types import MappingProxyType

import pytest
from main_run import decision_of, spec_of, tiny_decision

from launcher.frozen.frozen import FrozenError, Parallelism
from launcher.frozen.launch_file import attest
from launcher.rehearsal import run
from launcher.rehearsal.registry import DrillResult, RehearsalAttestation
from launcher.rehearsal.run import cut_corpus
from launcher.rehearsal.scaled_config import _implied, full_copy, scaled_copy, short_schedule
from launcher.rehearsal.status import rehearsal_of
from proxies.core import canon
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.data.tokens import TokenStore
from proxies.parametrization.parametrization import forward_numbers, parameter_table


def wide(manifest, **changes):
    base = Shape(
        num_layers=3,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=176,
        vocab_size=300,
        seq_len=64,
        **{key: changes.pop(key) for key in ("family", "tied", "qk_norm") if key in changes},
    )
    spec = dataclasses.replace(
        spec_of(manifest.data_id),
        shape=base.at_width(256),
        base_shape=base,
        batch_tokens=16 * 64,
        **changes,
    )
    return spec, decision_of(spec, manifest)


VARIANTS = {
    "mup": {},
    "completep": {"parametrization": named("completep")},
    "sp": {"parametrization": named("sp")},
    "gpt2-tied": {"family": "gpt2", "tied": True},
    "qk-norm": {"qk_norm": True},
    "unclipped": {"hparams": Hparams(learning_rate=2**-5, weight_decay=0.1, clip_norm=None)},
    "wsd-growing": {
        "schedule": Schedule(
            kind="wsd",
            num_steps=1000,
            warmup_steps=10,
            decay_steps=200,
            batch_warmup_steps=100,
            batch_warmup_stages=4,
        )
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_copys_numbers_are_those_of_the_same_hyperparameters_at_its_own_shape(manifest, name):
    spec, decision = wide(manifest, **VARIANTS[name])
    copy = scaled_copy(decision, manifest)
    for field, value in dataclasses.asdict(spec.hparams).items():
        assert getattr(_implied(decision), field) == (value and pytest.approx(value, rel=1e-9)), (
            field
        )
    assert [g.pattern for g in copy.decision.groups] == [g.pattern for g in decision.groups]
    small = dataclasses.replace(copy.spec, hparams=spec.hparams)
    table = {p.name: p for p in parameter_table(small)}
    by_kind = {group.kind: group for group in copy.decision.groups}
    for kind in {p.kind for p in table.values()}:
        rates = {p.learning_rate for p in table.values() if p.kind == kind}
        assert by_kind[kind].learning_rate in [pytest.approx(rate) for rate in rates]
    assert dataclasses.asdict(copy.decision.forward) == pytest.approx(
        dataclasses.asdict(forward_numbers(small))
    )
    shape = copy.decision.shape
    assert (shape.num_layers, shape.family, shape.tied, shape.qk_norm) == (
        2,
        spec.shape.family,
        spec.shape.tied,
        spec.shape.qk_norm,
    )
    assert shape.num_heads == 2 * shape.num_kv_heads  # grouped queries stay grouped
    assert copy.decision.digest != decision.digest == copy.stands_for


def test_numbers_that_no_parametrization_gives_are_refused(manifest):
    decision = wide(manifest)[1]
    first, *rest = decision.groups
    first = dataclasses.replace(first, settings={**first.settings, "learning_rate": 0.5})
    odd = dataclasses.replace(decision, groups=(first, *rest))
    with pytest.raises(
        FrozenError, match=r"learning_rate: the groups imply from 0.03125 to 0.5.*--full"
    ):
        scaled_copy(odd, manifest)


def test_the_layout_keeps_what_two_ranks_can_hold(manifest):
    layout = Parallelism(
        data_parallel_shard=8, microbatch_sequences=2, activation_checkpointing="full"
    )
    decision = dataclasses.replace(
        wide(manifest)[1], parallelism=layout, batch_tokens=16 * 64, compiled=True
    )
    copy = scaled_copy(decision, manifest).decision
    assert copy.parallelism == Parallelism(
        data_parallel_shard=2, microbatch_sequences=1, activation_checkpointing="full"
    )
    assert not copy.compiled
    full = full_copy(decision, manifest).decision
    assert (full.shape, full.groups, full.parallelism, full.compiled) == (
        decision.shape,
        decision.groups,
        layout,
        True,
    )
    assert full.learning_rate.schedule.num_steps == 16


def test_a_short_schedule_keeps_its_form():
    long = Schedule(
        kind="wsd",
        num_steps=1000,
        warmup_steps=10,
        decay_steps=250,
        batch_warmup_steps=100,
        batch_warmup_stages=4,
        final_fraction=0.1,
    )
    short = Schedule(
        kind="wsd",
        num_steps=16,
        warmup_steps=4,
        decay_steps=4,
        batch_warmup_steps=4,
        batch_warmup_stages=2,
        final_fraction=0.1,
    )
    assert short_schedule(long) == short
    assert short_schedule(Schedule(kind="linear", num_steps=100)) == Schedule(
        kind="linear", num_steps=16
    )


def test_a_cut_holds_the_ends_of_the_corpus_and_can_be_trained_on(
    corpus, manifest, tmp_path, monkeypatch
):
    whole = cut_corpus(corpus, {}, tmp_path / "whole")
    assert whole.num_tokens("train") == manifest.num_tokens("train")
    monkeypatch.setattr(run, "NUM_TOKENS", 500)
    cut = cut_corpus(corpus, {}, tmp_path / "cut")
    assert cut.num_tokens("train") == cut.num_tokens("validation") == 1000
    store = TokenStore(tmp_path / "cut")  # every byte hashed
    assert store.manifest == cut
    shard = manifest.sources[0].train[0]
    content = (corpus / shard.file).read_bytes()
    parts = [(tmp_path / "cut" / s.file).read_bytes() for s in cut.sources[0].train]
    assert content.startswith(parts[0])
    assert content.endswith(parts[1])


def attested(folder, decision, outcomes, outcome="passed", machine=MappingProxyType({})):
    drills = tuple(
        DrillResult(name=name, outcome=found, said="", seen={}, limit="")
        for name, found in outcomes.items()
    )
    record = RehearsalAttestation(
        outcome=outcome, copy={"kind": "scaled"}, machine={**machine}, seconds=1.0, drills=drills
    )
    return attest(folder, "rehearsal", decision.digest, canon.to_json(record))


@pytest.mark.parametrize("name", ["forerun", "torch"])
def test_a_rehearsal_of_other_versions_is_named(corpus, tmp_path, name):
    decision = tiny_decision(corpus)
    here = {
        "forerun": importlib.metadata.version("forerun"),
        "torch": importlib.metadata.version("torch"),
    }
    attested(
        tmp_path,
        decision,
        {"nan": "passed"},
        machine={**here, "gpus": ["NVIDIA H100", "NVIDIA H100"]},
    )
    sound = rehearsal_of(tmp_path, decision.digest)
    assert sound.rehearsed
    assert (
        "rehearsed: 1 of 1 drill passed on a scaled-down copy on 2 NVIDIA H100, 20"
        in sound.sentence
    )
    attested(tmp_path, decision, {"nan": "passed"}, machine={**here, name: "0.0.1"})
    older = rehearsal_of(tmp_path, decision.digest)
    assert not older.rehearsed
    assert older.sentence.startswith(
        "UNREHEARSED with the versions installed here: 1 of 1 drill passed"
    )
    assert older.sentence.endswith(
        f"with {name} 0.0.1 (installed here: {here[name]}); forerun rehearse {tmp_path}"
    )
    assert older.body["other_versions"] == [f"{name} 0.0.1 (installed here: {here[name]})"]
