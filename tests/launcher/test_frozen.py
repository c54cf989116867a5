"""The launch file: same decision, same bytes; any leaf changed, refused; groups claim each
parameter once.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from pathlib import Path

import pytest
from main_run import spec_of, tiny_decision

from launcher.base.policy import Checkpointing
from launcher.frozen.frozen import (
    SCHEMA_VERSION,
    FrozenError,
    Parallelism,
    TamperedError,
    assign_groups,
    groups_of,
    learning_rate_of,
)
from launcher.frozen.launch_file import attest, read_attestation, read_launch, write_launch
from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule, lr_multiplier
from proxies.core.shape import Shape
from proxies.parametrization.parametrization import parameter_table

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def decision(corpus):
    return tiny_decision(corpus)


def leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def changed(value, path):
    edited = copy.deepcopy(value)
    *way, last = path
    holder = edited
    for key in way:
        holder = holder[key]
    old = holder[last]
    match old:
        case bool():
            holder[last] = not old
        case int() | float():
            holder[last] = old + 1
        case None:
            holder[last] = 0
        case _:
            holder[last] = old + "x"
    return edited


def test_writes_and_reads_the_same_decision_with_the_same_bytes(decision, tmp_path):
    first, second = write_launch(tmp_path / "a", decision), write_launch(tmp_path / "b", decision)
    assert first.read_bytes() == second.read_bytes()
    assert first.parent.name == decision.digest
    assert read_launch(first) == read_launch(first.parent) == decision


def test_any_leaf_changed_is_refused(decision, tmp_path):
    path = write_launch(tmp_path, decision)
    whole = json.loads(path.read_text())
    paths = [leaf for leaf, _ in leaves(whole)]
    assert len(paths) > 100
    for leaf in paths:
        path.write_text(json.dumps(changed(whole, leaf)))
        with pytest.raises(TamperedError):
            read_launch(path)
    path.write_text(json.dumps(whole))  # only re-spaced: the same content
    assert read_launch(path) == decision


def test_an_added_or_lost_field_is_refused(decision, tmp_path):
    path = write_launch(tmp_path, decision)
    whole = json.loads(path.read_text())
    for edit in ({**whole, "note": ""}, {"digest": whole["digest"]}, [], {**whole, "decision": 1}):
        path.write_text(json.dumps(edit))
        with pytest.raises(FrozenError):
            read_launch(path)
    newer = {**whole["decision"], "schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps({"digest": canon.content_id(newer), "decision": newer}))
    with pytest.raises(
        FrozenError, match=f"schema_version = {SCHEMA_VERSION + 1}: this version reads"
    ) as caught:
        read_launch(path)
    assert not isinstance(caught.value, TamperedError)  # another version's file, not an edit
    path.write_text(json.dumps({**whole, "decision": {**whole["decision"], "optimizer": "\ud800"}}))
    with pytest.raises(TamperedError, match="surrogate"):
        read_launch(path)
    path.write_text("{")
    with pytest.raises(FrozenError, match="not JSON"):
        read_launch(path)
    with pytest.raises(FrozenError, match="cannot be read"):
        read_launch(tmp_path / "absent")


def test_a_decision_adds_up(decision):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(decision, num_tokens=7, seed=-1)
    assert caught.value.problems == ["seed = -1: must be a whole number, at least 0"]
    with pytest.raises(SpecError, match="num_tokens = 7: must be 12 steps of 256 tokens"):
        dataclasses.replace(decision, num_tokens=7)
    with pytest.raises(SpecError, match="whole sequences of 32 for each of 3 ranks"):
        dataclasses.replace(decision, parallelism=Parallelism(data_parallel_shard=3))
    with pytest.raises(SpecError, match="keep = 1: must be a whole number, at least 2"):
        Checkpointing(every_steps=5, keep=1)


def test_samples_are_the_schedule_with_its_ends():
    schedule = Schedule(kind="wsd", num_steps=1000, warmup_steps=10, decay_steps=200)
    learning_rate = learning_rate_of(schedule)
    assert len(learning_rate.samples) == 64
    assert (learning_rate.samples[0][0], learning_rate.samples[-1][0]) == (0, 999)
    assert all(share == lr_multiplier(schedule, step) for step, share in learning_rate.samples)
    longer = dataclasses.replace(schedule, num_steps=1001)
    assert learning_rate_of(longer).table_sha256 != learning_rate.table_sha256
    assert learning_rate_of(Schedule(kind="constant", num_steps=1)).samples == ((0, 1.0),)


@pytest.mark.parametrize(
    ("parametrization", "num_layers"), [("sp", 1), ("mup", 2), ("completep", 12)]
)
def test_groups_give_every_parameter_its_own_numbers_back(parametrization, num_layers):
    base = Shape(
        num_layers=num_layers,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        ffn_width=96,
        vocab_size=64,
        seq_len=16,
    )
    run = dataclasses.replace(
        spec_of("data"),
        shape=base.at_width(128),
        base_shape=base,
        parametrization=named(parametrization),
        hparams=Hparams(learning_rate=0.01, weight_decay=0.1),
    )
    table = parameter_table(run)
    groups = groups_of(table)
    assert len(groups) < 10
    assigned = assign_groups(groups, [p.name for p in table])
    for p in table:
        group = assigned[p.name]
        for name in ("kind", "optimizer", "settings", "init_std"):
            assert getattr(group, name) == getattr(p, name)


def test_groups_that_do_not_fit_are_told_all_at_once(decision):
    first, second, *others = decision.groups
    twice = dataclasses.replace(second, pattern=first.pattern + "|" + second.pattern)
    dead = dataclasses.replace(first, pattern="nobody")
    with pytest.raises(FrozenError) as caught:
        assign_groups((first, twice, dead, *others), ["tok_embeddings.weight", "stranger"])
    problems = caught.value.problems
    assert "no group claims stranger" in problems
    assert "2 groups claim tok_embeddings.weight" in problems
    assert "the group 'nobody' claims no parameter" in problems


def test_attestations_name_the_digest_and_hold_their_hash(decision, tmp_path):
    path = attest(tmp_path, "parity", decision.digest, {"mismatches": []})
    assert read_attestation(path, decision.digest) == {"mismatches": []}
    with pytest.raises(TamperedError, match="for the digest"):
        read_attestation(path, "0" * 64)
    whole = json.loads(path.read_text())
    for leaf in [leaf for leaf, _ in leaves(whole)]:
        path.write_text(json.dumps(changed(whole, leaf)))
        with pytest.raises(TamperedError):
            read_attestation(path, decision.digest)


def test_the_golden_launch_file_of_this_version_is_read():
    """Another text of the same decision would be another digest: whoever changes one raises
    `SCHEMA_VERSION`.
    """
    golden = GOLDENS / f"launch-{SCHEMA_VERSION}.json"
    assert read_launch(golden).digest == json.loads(golden.read_text())["digest"]


def test_a_group_of_impossible_numbers_is_refused_all_at_once(decision):
    with pytest.raises(SpecError) as caught:
        group = decision.groups[0]
        wrong = {"learning_rate": -1.0, "beta1": 1.5, "eps": float("nan")}
        dataclasses.replace(group, pattern="a(", settings={**group.settings, **wrong})
    assert len(caught.value.problems) == 4
    assert "pattern = 'a(': " in caught.value.problems[-1]
    with pytest.raises(SpecError, match="clip_norm"):
        dataclasses.replace(decision, clip_norm=-1.0)


def forged(decision, tmp_path, leaf, value):
    """The file with one leaf changed, under the digest of what it holds then."""
    body = json.loads(write_launch(tmp_path / "whole", decision).read_text())["decision"]
    holder = body
    for key in leaf[:-1]:
        holder = holder[key]
    holder[leaf[-1]] = value
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"digest": canon.content_id(body), "decision": body}))
    return path


FORGED = {
    ("groups", 0, "pattern"): [r"(([a-z_.0-9]*)*)*!|tok_embeddings\.weight", "a" * 200_000],
    ("learning_rate", "schedule", "num_steps"): [10**12],
    ("shape", "ffn_width"): [2**63, 10**400],
    ("forward", "output"): [0.0, 1e308],
    ("abort", "train_loss_above_nats"): [-1e308],
    ("groups", 0, "kind"): ["L" * 3_000_000],
}


def test_a_forged_leaf_under_its_own_digest_is_refused_at_once_in_a_few_words(decision, tmp_path):
    for leaf, value in ((leaf, value) for leaf, values in FORGED.items() for value in values):
        path = forged(decision, tmp_path, leaf, value)
        began = time.monotonic()
        with pytest.raises(FrozenError) as caught:
            read_launch(path)
        assert not isinstance(caught.value, TamperedError)
        assert str(leaf[-1]) in str(caught.value)
        assert len(str(caught.value)) < 3000
        assert time.monotonic() - began < 5


def test_a_number_of_another_type_would_be_another_decision(decision, tmp_path):
    path = forged(decision, tmp_path, ("abort", "train_loss_above_nats"), 6)
    with pytest.raises(TamperedError, match=r"restore it from a copy, or freeze again$"):
        read_launch(path)
