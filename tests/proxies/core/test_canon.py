"""Tests of the canonical JSON that ids are hashed from, and of atomic writes."""

import dataclasses
import errno
import hashlib
import os
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun._proxies.core import canon

deterministic = settings(deadline=None, max_examples=40, derandomize=True, database=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A record with a choice and a tuple."""

    kind: Literal["bolt", "nut"]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A record with a field of every supported type."""

    weight: float
    count: int
    ready: bool
    label: str | None
    part: Part
    pair: tuple[int, str]
    table: dict[str, float]


MACHINE = Machine(
    weight=1.5,
    count=2,
    ready=True,
    label=None,
    part=Part(kind="nut", sizes=(1, 2)),
    pair=(3, "x"),
    table={"a": 0.5},
)


@pytest.mark.parametrize(
    "value, text",
    [
        ({"b": 1, "a": None, "B": [True, False]}, '{"B":[true,false],"a":null,"b":1}'),
        ([1, 1.0, -0.0, 0.1, 1e-3, 3e-4, 123456789.0], "[1,1.0,-0.0,0.1,0.001,0.0003,123456789.0]"),
        (
            [1e16, 1e22, 5e-324, 1.7976931348623157e308, 2**64],
            "[1e+16,1e+22,5e-324,1.7976931348623157e+308,18446744073709551616]",
        ),
        ([0.1 + 0.2, 2**-24], "[0.30000000000000004,5.960464477539063e-08]"),
        ('é\n"\\\t\u2028', '"é\\n\\"\\\\\\t\u2028"'),
        ({}, "{}"),
        (((), [[]]), "[[],[[]]]"),
        (MACHINE.part, '{"kind":"nut","sizes":[1,2]}'),
        (
            dataclasses.replace(MACHINE, part=Part(kind="bolt", sizes=())),
            '{"count":2,"label":null,"pair":[3,"x"],"part":{"kind":"bolt","sizes":[]},"ready":true,"table":{"a":0.5},"weight":1.5}',
        ),
    ],
)
def test_canonical_form_is_pinned(value, text):
    """Ids of stored records are hashes of these texts. Never change an expected text."""
    assert canon.to_canonical_json(value) == text


def test_id_is_the_sha256_of_the_text():
    empty_id = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert canon.compute_content_id({}) == empty_id
    text = canon.to_canonical_json(MACHINE)
    assert canon.compute_content_id(MACHINE) == hashlib.sha256(text.encode()).hexdigest()
    assert len(canon.compute_content_id([])) == canon.ID_LENGTH


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(number):
    with pytest.raises(canon.CanonError, match=r"\$\.a\[1\]\.table\.x"):
        canon.to_canonical_json({"a": [0, dataclasses.replace(MACHINE, table={"x": number})]})
    for write in (canon.compute_content_id, canon.to_pretty_json):
        with pytest.raises(canon.CanonError):
            write(number)


@pytest.mark.parametrize("value", [{1: 2}, {None: 1}, {1, 2}, b"bytes", object(), Machine, 1j])
def test_values_that_json_cannot_hold_are_refused(value):
    with pytest.raises(canon.CanonError, match=r"\$\.here"):
        canon.to_canonical_json({"here": value})


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}])
def test_lone_surrogate_is_refused(value):
    with pytest.raises(canon.CanonError, match="surrogate"):
        canon.compute_content_id(value)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "-Infinity",
        "1e999",
        '{"a":1,"a":1}',
        '{"x":{"a":1,"b":2,"a":3}}',
        "",
        "{",
        "01",
        "'a'",
        "[1,]",
        "nul",
        "1 2",
        b"\xff",
        b'{"a":"\xe9"}',
        "[" * 200_000,
        "1" * 5000,
    ],
)
def test_parse_refuses_text_that_is_not_strict_json(text):
    with pytest.raises(canon.CanonError):
        canon.parse(text)


finite_floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | finite_floats | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def is_identical(left, right):
    """Return whether two values are equal in value and type, and in the sign of zero."""
    return repr(left) == repr(right)


@deterministic
@given(json_values)
def test_parse_inverts_to_canonical_json(value):
    text = canon.to_canonical_json(value)
    assert canon.to_canonical_json(canon.parse(text)) == text
    assert canon.parse(text) == value
    assert canon.parse(canon.to_pretty_json(value)) == value


@deterministic
@given(finite_floats, st.integers(), st.none() | st.text(), st.lists(st.integers()))
def test_decode_inverts_to_canonical_json(weight, count, label, sizes):
    part = Part(kind="bolt", sizes=tuple(sizes))
    machine = dataclasses.replace(MACHINE, weight=weight, count=count, label=label, part=part)
    decoded = canon.decode(Machine, canon.parse(canon.to_canonical_json(machine)))
    assert is_identical(decoded, machine)


def make_changed_json(**changes):
    """Return the JSON value of the machine with some fields changed or added."""
    return {**canon.to_json(MACHINE), **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"count": True}, r"\$\.count is True \(bool\): must be int"),
        ({"count": 2.0}, r"\$\.count is 2.0 \(float\): must be int"),
        ({"ready": 1}, r"\$\.ready is 1 \(int\): must be bool"),
        ({"weight": True}, r"\$\.weight is True \(bool\): must be float"),
        ({"weight": 10**400}, r"\$\.weight is an integer too large"),
        ({"label": 5}, r"\$\.label is 5 \(int\): must be str"),
        ({"part": None}, r"\$\.part is a NoneType: must be an object \(Part\)"),
        (
            {"part": {"kind": "screw", "sizes": []}},
            r"\$\.part\.kind is 'screw': must be one of 'bolt', 'nut'",
        ),
        ({"part": {"kind": "nut"}}, r"\$\.part \(Part\) lacks sizes"),
        ({"part": {"kind": "nut", "sizes": [1, "2"]}}, r"\$\.part\.sizes\[1\] is '2'"),
        ({"pair": [1]}, r"\$\.pair has 1 item: must have 2"),
        ({"table": {"x": "y"}}, r"\$\.table\.x is 'y'"),
        ({"extra": 1, "more": 2}, r"\$ \(Machine\) has the unknown 'extra', 'more'"),
    ],
)
def test_decode_is_strict(changes, message):
    with pytest.raises(canon.CanonError, match=message):
        canon.decode(Machine, make_changed_json(**changes))


def test_decode_names_missing_and_unknown_fields_together():
    value = make_changed_json(wieght=1.0)
    del value["weight"], value["count"]
    with pytest.raises(canon.CanonError, match=r"lacks weight, count and has the unknown 'wieght'"):
        canon.decode(Machine, value)


def test_decode_converts_integers_to_floats():
    decoded = canon.decode(Machine, make_changed_json(weight=3, table={"a": 1}))
    assert is_identical([decoded.weight, decoded.table["a"]], [3.0, 1.0])


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    canon.write_atomic(path, b"old")

    def fail_on_full_disk(descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", fail_on_full_disk)
    with pytest.raises(OSError, match="no space"):
        canon.write_atomic(path, b"new")
    with pytest.raises(OSError, match="no space"):
        canon.write_atomic(tmp_path / "fresh.json", b"new")
    assert path.read_bytes() == b"old"
    assert not (tmp_path / "fresh.json").exists()


def test_write_replaces_the_file_and_syncs_its_folder(tmp_path, monkeypatch):
    synced_inodes, real_fsync = [], os.fsync

    def record_fsync(descriptor):
        synced_inodes.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    path = tmp_path / "record.json"
    canon.write_atomic(path, b"one")
    canon.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    # The second write synced the new file, and then its folder.
    assert synced_inodes[2:] == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert canon.hash_file(path) == hashlib.sha256(b"two").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordWithSharedFields:
    """A record with two fields whose equal values are decoded to one shared object."""

    part: Part = field(metadata=canon.SHARED)
    words: dict[str, str] | None = field(default=None, metadata=canon.SHARED)


def test_equal_shared_values_are_decoded_to_one_object():
    data = {"part": {"kind": "bolt", "sizes": [1, 2]}, "words": {"a": "b"}}
    first, second = (
        canon.decode(RecordWithSharedFields, dict(data)),
        canon.decode(RecordWithSharedFields, dict(data)),
    )
    assert first.part is second.part
    assert first.words is second.words
    different = canon.decode(
        RecordWithSharedFields, data | {"part": {"kind": "bolt", "sizes": [1, 3]}}
    )
    assert different.part != first.part
    # True and 1.0 equal 1, but must not be decoded to the shared part.
    for wrong_type in (True, 1.0):
        part = {"kind": "bolt", "sizes": [wrong_type, 2]}
        with pytest.raises(canon.CanonError, match=r"\$.part.sizes\[0\]"):
            canon.decode(RecordWithSharedFields, {"part": part, "words": None})


def test_number_of_shared_values_is_bounded(monkeypatch):
    monkeypatch.setattr(canon, "MAX_SHARED", 3)
    monkeypatch.setattr(canon, "_shared", {})
    for size in range(10):
        decoded = canon.decode(
            RecordWithSharedFields, {"part": {"kind": "nut", "sizes": [size]}, "words": None}
        )
        assert decoded.part == Part(kind="nut", sizes=(size,))
        assert len(canon._shared) <= 3
