"""Tests of the scaled copy of a main run that a rehearsal trains in its place.

The copy has a small shape with the numbers that the parametrization gives at this shape, and a cut
corpus. The last test checks the status that a config reports of its rehearsal.
"""

import dataclasses
import importlib
import importlib.metadata
from types import MappingProxyType

import pytest
from main_run import make_decision, make_spec, make_tiny_decision

from forerun._launcher.main_run.frozen.frozen import FrozenError, Parallelism
from forerun._launcher.main_run.frozen.launch_file import attest
from forerun._launcher.main_run.rehearsal import run
from forerun._launcher.main_run.rehearsal.registry import DrillResult, RehearsalAttestation
from forerun._launcher.main_run.rehearsal.run import cut_corpus
from forerun._launcher.main_run.rehearsal.scaled_config import (
    _infer_hparams,
    build_full_copy,
    build_scaled_copy,
    shorten_schedule,
)
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status
from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)


def make_wide_decision(manifest, **changes):
    """Return a spec and its decision at width 256."""
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
        make_spec(manifest.data_id),
        shape=base.at_width(256),
        base_shape=base,
        batch_tokens=16 * 64,
        **changes,
    )
    return spec, make_decision(spec, manifest)


VARIANTS = {
    "mup": {},
    "completep": {"parametrization": get_parametrization("completep")},
    "sp": {"parametrization": get_parametrization("sp")},
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
def test_copy_has_the_parametrizations_numbers_at_its_shape(manifest, name):
    spec, decision = make_wide_decision(manifest, **VARIANTS[name])
    copy, copy_spec = build_scaled_copy(decision, manifest)
    for field, value in dataclasses.asdict(spec.hparams).items():
        inferred = getattr(_infer_hparams(decision), field)
        # A hyperparameter that is off is 0 or None, which has no tolerance.
        assert inferred == (value and pytest.approx(value, rel=1e-9)), field
    assert [g.pattern for g in copy.groups] == [g.pattern for g in decision.groups]
    small = dataclasses.replace(copy_spec, hparams=spec.hparams)
    table = {p.name: p for p in compute_parameter_table(small)}
    by_kind = {group.kind: group for group in copy.groups}
    for kind in {p.kind for p in table.values()}:
        rates = {p.learning_rate for p in table.values() if p.kind == kind}
        assert by_kind[kind].learning_rate in [pytest.approx(rate) for rate in rates]
    assert dataclasses.asdict(copy.forward) == pytest.approx(
        dataclasses.asdict(compute_forward_numbers(small))
    )
    shape = copy.shape
    assert (shape.num_layers, shape.family, shape.tied, shape.qk_norm) == (
        2,
        spec.shape.family,
        spec.shape.tied,
        spec.shape.qk_norm,
    )
    assert shape.num_heads == 2 * shape.num_kv_heads, "grouped queries stay grouped"
    assert copy.digest != decision.digest


def test_numbers_that_no_parametrization_gives_are_refused(manifest):
    decision = make_wide_decision(manifest)[1]
    first, *remaining = decision.groups
    first = dataclasses.replace(first, settings={**first.settings, "learning_rate": 0.5})
    inconsistent = dataclasses.replace(decision, groups=(first, *remaining))
    with pytest.raises(
        FrozenError, match=r"learning_rate: the groups imply from 0.03125 to 0.5.*--full"
    ):
        build_scaled_copy(inconsistent, manifest)


def test_layout_is_reduced_to_two_ranks(manifest):
    layout = Parallelism(
        data_parallel_shard=8, microbatch_sequences=2, activation_checkpointing="full"
    )
    decision = dataclasses.replace(
        make_wide_decision(manifest)[1], parallelism=layout, batch_tokens=16 * 64, compiled=True
    )
    copy = build_scaled_copy(decision, manifest)[0]
    assert copy.parallelism == Parallelism(
        data_parallel_shard=2, microbatch_sequences=1, activation_checkpointing="full"
    )
    assert not copy.compiled
    full = build_full_copy(decision, manifest)
    assert (full.shape, full.groups, full.parallelism, full.compiled) == (
        decision.shape,
        decision.groups,
        layout,
        True,
    )
    assert full.learning_rate.schedule.num_steps == 16


def test_shortened_schedule_keeps_its_form():
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
    assert shorten_schedule(long) == short
    assert shorten_schedule(Schedule(kind="linear", num_steps=100)) == Schedule(
        kind="linear", num_steps=16
    )


def test_cut_corpus_has_the_first_tokens(corpus, manifest, tmp_path, monkeypatch):
    full = cut_corpus(corpus, manifest, tmp_path / "full")
    assert full.count_tokens("train") == manifest.count_tokens("train")
    monkeypatch.setattr(run, "NUM_TOKENS", 500)
    cut = cut_corpus(corpus, manifest, tmp_path / "cut")
    assert cut.count_tokens("train") == cut.count_tokens("validation") == 500
    store = TokenStore(tmp_path / "cut")  # It checks the hashes of all shards.
    assert store.manifest == cut
    content = (corpus / manifest.sources[0].train[0].file).read_bytes()
    (part,) = cut.sources[0].train
    assert content.startswith((tmp_path / "cut" / part.file).read_bytes())


def attest_rehearsal(folder, decision, outcomes, outcome="passed", machine=MappingProxyType({})):
    """Write the attestation of a rehearsal whose drills had these outcomes."""
    drills = tuple(
        DrillResult(name=name, outcome=drill_outcome, said="", seen={}, limit="")
        for name, drill_outcome in outcomes.items()
    )
    record = RehearsalAttestation(
        outcome=outcome, copy={"kind": "scaled"}, machine={**machine}, seconds=1.0, drills=drills
    )
    return attest(folder, "rehearsal", decision.digest, canon.to_json(record))


@pytest.mark.parametrize("name", ["forerun", "torch"])
def test_rehearsal_with_other_versions_does_not_count(corpus, tmp_path, name):
    decision = make_tiny_decision(corpus)
    versions = {
        "forerun": importlib.metadata.version("forerun"),
        "torch": importlib.metadata.version("torch"),
    }
    attest_rehearsal(
        tmp_path,
        decision,
        {"nan": "passed"},
        machine={**versions, "gpus": ["NVIDIA H100", "NVIDIA H100"]},
    )
    sound = read_rehearsal_status(tmp_path, decision.digest)
    assert sound.rehearsed
    assert (
        "rehearsed: 1 of 1 drill passed on a scaled-down copy on 2 NVIDIA H100, 20"
        in sound.sentence
    )
    attest_rehearsal(tmp_path, decision, {"nan": "passed"}, machine={**versions, name: "0.0.1"})
    older = read_rehearsal_status(tmp_path, decision.digest)
    assert not older.rehearsed
    assert older.sentence.startswith(
        "UNREHEARSED with the versions installed here: 1 of 1 drill passed"
    )
    assert older.sentence.endswith(
        f"with {name} 0.0.1 (installed here: {versions[name]}); forerun rehearse {tmp_path}"
    )
    assert older.body["other_versions"] == [f"{name} 0.0.1 (installed here: {versions[name]})"]
