"""Tests of the launch file.

The same decision must give the same bytes, an edit of any field must be refused, and the groups
must claim each parameter once.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from pathlib import Path

import pytest
from main_run import make_spec, make_tiny_decision

from forerun._launcher.main_run.frozen.frozen import (
    SCHEMA_VERSION,
    FrozenError,
    Parallelism,
    TamperedError,
    assign_groups,
    build_groups,
    sample_learning_rate,
)
from forerun._launcher.main_run.frozen.launch_file import (
    attest,
    read_attestation,
    read_launch,
    write_launch,
)
from forerun._launcher.main_run.frozen.run_policies import Checkpointing
from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.core.shape import Shape
from forerun._proxies.parametrization.parametrization import compute_parameter_table

GOLDENS = Path(__file__).parents[3] / "launcher" / "goldens"


@pytest.fixture(scope="module")
def decision(corpus):
    """A decision for a tiny model."""
    return make_tiny_decision(corpus)


def list_leaves(value, path=()):
    """Yield path and value of every leaf of a JSON value."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_leaves(item, (*path, key))
    else:
        yield path, value


def change_leaf(value, path):
    """Return a copy of a JSON value with the leaf at `path` changed."""
    edited = copy.deepcopy(value)
    *keys, last = path
    holder = edited
    for key in keys:
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


def test_launch_file_round_trips_with_equal_bytes(decision, tmp_path):
    first, second = write_launch(tmp_path / "a", decision), write_launch(tmp_path / "b", decision)
    assert first.read_bytes() == second.read_bytes()
    assert first.parent.name == decision.digest
    assert read_launch(first) == read_launch(first.parent) == decision


def test_change_of_any_leaf_is_refused(decision, tmp_path):
    path = write_launch(tmp_path, decision)
    content = json.loads(path.read_text())
    paths = [leaf for leaf, _ in list_leaves(content)]
    assert len(paths) > 100
    for leaf in paths:
        path.write_text(json.dumps(change_leaf(content, leaf)))
        with pytest.raises(TamperedError):
            read_launch(path)
    path.write_text(json.dumps(content))  # Only the white space differs from the written file.
    assert read_launch(path) == decision


def test_added_or_missing_field_is_refused(decision, tmp_path):
    path = write_launch(tmp_path, decision)
    content = json.loads(path.read_text())
    for edit in (
        {**content, "note": ""},
        {"digest": content["digest"]},
        [],
        {**content, "decision": 1},
    ):
        path.write_text(json.dumps(edit))
        with pytest.raises(FrozenError):
            read_launch(path)
    newer = {**content["decision"], "schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps({"digest": canon.compute_content_id(newer), "decision": newer}))
    with pytest.raises(
        FrozenError, match=f"schema_version = {SCHEMA_VERSION + 1}: this version reads"
    ) as caught:
        read_launch(path)
    # A file of another version is not reported as an edit.
    assert not isinstance(caught.value, TamperedError)
    path.write_text(
        json.dumps({**content, "decision": {**content["decision"], "optimizer": "\ud800"}})
    )
    with pytest.raises(TamperedError, match="surrogate"):
        read_launch(path)
    path.write_text("{")
    with pytest.raises(FrozenError, match="not JSON"):
        read_launch(path)
    with pytest.raises(FrozenError, match="cannot be read"):
        read_launch(tmp_path / "absent")


def test_inconsistent_decision_is_refused(decision):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(decision, num_tokens=7, seed=-1)
    assert caught.value.problems == ["seed = -1: must be a whole number, at least 0"]
    with pytest.raises(SpecError, match="num_tokens = 7: must be 12 steps of 256 tokens"):
        dataclasses.replace(decision, num_tokens=7)
    with pytest.raises(SpecError, match="whole sequences of 32 for each of 3 ranks"):
        dataclasses.replace(decision, parallelism=Parallelism(data_parallel_shard=3))
    with pytest.raises(SpecError, match="keep = 1: must be a whole number, at least 2"):
        Checkpointing(every_steps=5, keep=1)


def test_learning_rate_samples_follow_the_schedule():
    schedule = Schedule(kind="wsd", num_steps=1000, warmup_steps=10, decay_steps=200)
    learning_rate = sample_learning_rate(schedule)
    # The schedule is sampled at 64 steps, including the first and the last.
    assert len(learning_rate.samples) == 64
    assert (learning_rate.samples[0][0], learning_rate.samples[-1][0]) == (0, 999)
    assert all(
        share == compute_lr_multiplier(schedule, step) for step, share in learning_rate.samples
    )
    longer = dataclasses.replace(schedule, num_steps=1001)
    assert sample_learning_rate(longer).table_sha256 != learning_rate.table_sha256
    assert sample_learning_rate(Schedule(kind="constant", num_steps=1)).samples == ((0, 1.0),)


@pytest.mark.parametrize(
    ("parametrization", "num_layers"), [("sp", 1), ("mup", 2), ("completep", 12)]
)
def test_groups_return_every_parameters_own_numbers(parametrization, num_layers):
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
        make_spec("data"),
        shape=base.at_width(128),
        base_shape=base,
        parametrization=get_parametrization(parametrization),
        hparams=Hparams(learning_rate=0.01, weight_decay=0.1),
    )
    table = compute_parameter_table(run)
    groups = build_groups(table)
    assert len(groups) < 10
    assigned = assign_groups(groups, [parameter.name for parameter in table])
    for parameter in table:
        group = assigned[parameter.name]
        for name in ("kind", "optimizer", "settings", "init_std"):
            assert getattr(group, name) == getattr(parameter, name)


def test_all_problems_of_groups_are_reported_at_once(decision):
    first, second, *remaining = decision.groups
    overlapping = dataclasses.replace(second, pattern=first.pattern + "|" + second.pattern)
    unused = dataclasses.replace(first, pattern="nobody")
    groups = (first, overlapping, unused, *remaining)
    with pytest.raises(FrozenError) as caught:
        assign_groups(groups, ["tok_embeddings.weight", "stranger"])
    problems = caught.value.problems
    assert "no group claims stranger" in problems
    assert "2 groups claim tok_embeddings.weight" in problems
    assert "the group 'nobody' claims no parameter" in problems


def test_attestation_with_another_digest_or_an_edit_is_refused(decision, tmp_path):
    path = attest(tmp_path, "parity", decision.digest, {"mismatches": []})
    assert read_attestation(path, decision.digest) == {"mismatches": []}
    with pytest.raises(TamperedError, match="for the digest"):
        read_attestation(path, "0" * 64)
    content = json.loads(path.read_text())
    for leaf in [leaf for leaf, _ in list_leaves(content)]:
        path.write_text(json.dumps(change_leaf(content, leaf)))
        with pytest.raises(TamperedError):
            read_attestation(path, decision.digest)


def test_golden_launch_file_of_this_version_is_read():
    """Fail if the text of a decision changes, because its digest changes too.

    Then raise `SCHEMA_VERSION`, and add a golden file of the new version.
    """
    golden = GOLDENS / f"launch-{SCHEMA_VERSION}.json"
    assert read_launch(golden).digest == json.loads(golden.read_text())["digest"]


def test_all_impossible_numbers_of_a_group_are_reported_at_once(decision):
    with pytest.raises(SpecError) as caught:
        group = decision.groups[0]
        wrong = {"learning_rate": -1.0, "beta1": 1.5, "eps": float("nan")}
        dataclasses.replace(group, pattern="a(", settings={**group.settings, **wrong})
    assert len(caught.value.problems) == 4
    assert "pattern = 'a(': " in caught.value.problems[-1]
    with pytest.raises(SpecError, match="clip_norm"):
        dataclasses.replace(decision, clip_norm=-1.0)


def write_forged(decision, tmp_path, leaf, value):
    """Write a launch file with one leaf changed and the digest of its new content."""
    body = json.loads(write_launch(tmp_path / "original", decision).read_text())["decision"]
    holder = body
    for key in leaf[:-1]:
        holder = holder[key]
    holder[leaf[-1]] = value
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"digest": canon.compute_content_id(body), "decision": body}))
    return path


FORGED = {
    ("groups", 0, "pattern"): [r"(([a-z_.0-9]*)*)*!|tok_embeddings\.weight", "a" * 200_000],
    ("learning_rate", "schedule", "num_steps"): [10**12],
    ("shape", "ffn_width"): [2**63, 10**400],
    ("forward", "output"): [0.0, 1e308],
    ("abort", "train_loss_above_nats"): [-1e308],
    ("groups", 0, "kind"): ["L" * 3_000_000],
}
"""Values that are absurd, or dangerous to evaluate, by the path of their leaf."""


def test_dangerous_value_under_its_own_digest_is_refused_quickly(decision, tmp_path):
    cases = [(leaf, value) for leaf, values in FORGED.items() for value in values]
    for leaf, value in cases:
        path = write_forged(decision, tmp_path, leaf, value)
        began = time.monotonic()
        with pytest.raises(FrozenError) as caught:
            read_launch(path)
        assert not isinstance(caught.value, TamperedError)
        assert str(leaf[-1]) in str(caught.value)
        assert len(str(caught.value)) < 3000
        assert time.monotonic() - began < 5


def test_integer_in_place_of_a_float_is_refused(decision, tmp_path):
    path = write_forged(decision, tmp_path, ("abort", "train_loss_above_nats"), 6)
    with pytest.raises(TamperedError, match=r"restore it from a copy, or freeze again$"):
        read_launch(path)
